"""Types of machines, as clouds describe and price them, and what a site needs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """A type of machine in one region.

    Attributes:
        name: The cloud's name for it.
        gpus: Number of its GPUs.
        gpu: Their model, in the cloud's words.
        gpu_memory_gb: Memory of one of them, in GiB; 0 if the cloud does not say.
        cpus: Number of virtual CPUs.
        memory_gb: Memory, in GiB.
        zones: Zones that offer it.
    """

    name: str
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gb: float = 0.0
    cpus: int
    memory_gb: float
    zones: Sequence[str]


@runtime_checkable
class MachineCatalogue(Protocol):
    """A compute service that can describe its types of machines: ``ec2``, ``gce``."""

    def machine_types(
        self, names: Collection[str], zones: Sequence[str]
    ) -> Sequence[MachineType]:
        """Describe those of some types that are offered.

        Args:
            names: The types.
            zones: Zones to look in; empty for all of the region.

        Raises:
            ComputeError: The service failed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrice:
    """What a spot machine costs in one zone, from a time on.

    Attributes:
        at: When the price began, in seconds since 1970.
        dollars_per_hour: The price.
    """

    zone: str
    at: float
    dollars_per_hour: float


@runtime_checkable
class SpotMarket(Protocol):
    """A compute service that publishes a history of spot prices: ``ec2``."""

    def spot_prices(
        self, machine: str, zones: Sequence[str], since: float
    ) -> Sequence[SpotPrice]:
        """Read the prices of a type of machine, the oldest first.

        Args:
            machine: The type.
            zones: Zones to ask about; empty for all of the region.
            since: Seconds since 1970. The price that held then is included.

        Raises:
            ComputeError: The service failed, or answers what is no price.
        """
        ...


def num_gpus(pool: object, machine: str, zones: Sequence[str]) -> int:
    """Count the GPUs that are built into a type of machine.

    Args:
        pool: A compute service.
        machine: The type; one that is not offered has none.
        zones: Zones to look in; empty for all of the region.

    Returns:
        0 also for a service that describes no types.

    Raises:
        ComputeError: The service failed.
    """
    if not isinstance(pool, MachineCatalogue):
        return 0
    found = pool.machine_types({machine}, zones)
    return max((each.gpus for each in found), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiresSpec:
    """What the machine of a site needs at least; `crossfed up` takes the cheapest.

    Attributes:
        gpus: Number of GPUs.
        gpu: Part of the name of their model, for example `H100`.
        gpu_memory_gb: Memory of each, in GiB.
        cpus: Number of virtual CPUs.
        memory_gb: Memory, in GiB.
    """

    gpus: int = 0
    gpu: str = ""
    gpu_memory_gb: float = 0.0
    cpus: int = 0
    memory_gb: float = 0.0

    def lacking(self, machine: MachineType) -> Sequence[str]:
        """What a type of machine has too little of, in words."""
        gpus = max(self.gpus, int(bool(self.gpu or self.gpu_memory_gb)))
        found = []
        if machine.gpus < gpus:
            found.append(f"{machine.gpus} GPUs")
        elif _plain(self.gpu) not in _plain(machine.gpu):
            found.append(f"GPU {machine.gpu}")
        elif gpus and machine.gpu_memory_gb < self.gpu_memory_gb:
            found.append(f"{machine.gpu_memory_gb:g} GB of GPU memory")
        if machine.cpus < self.cpus:
            found.append(f"{machine.cpus} CPUs")
        if machine.memory_gb < self.memory_gb:
            found.append(f"{machine.memory_gb:g} GB of memory")
        return found


def _plain(model: str) -> str:
    """A model's name without what clouds write differently."""
    return "".join(each for each in model.lower() if each.isalnum())
