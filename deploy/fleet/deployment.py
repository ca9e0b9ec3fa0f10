"""A deployment's folder: who owns it, what was launched, and where its parties are.

``deployment.json``: the owner's name, which every node carries, and the number of the
last launch of each role. ``aggregator/``: the aggregator's folder. ``sites/NAME/``:
folders of sites that run on this host. ``nodes/``: processes of this host. ``lock``:
held by the command that changes any of it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.local_files import check_own
from cloud_adapters.compute.pool import ComputePool
from cloud_adapters.extras import naming_extras
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.fleet.deployment_file import AWS, LOCAL, DeploymentPlan, SiteMachine
from federation import durable_json, folder_lock
from federation.errors import CorruptObject
from federation.protocols import Clock
from privacy import own_folder
from privacy.keystream import RandomBytes

_RECORD = "deployment.json"
_OWNER_BYTES = 8
_DAMAGED = (
    "restore it, or end the nodes with crossfed down --any-owner, which begins a new "
    "one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastLaunch:
    role: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    name: str
    owner: str
    launches: tuple[_LastLaunch, ...] = ()


@dataclass(kw_only=True)
class Deployment:
    """A deployment that this process may change.

    Attributes:
        plan: What is wanted.
        pools: Compute services by their names, as ``SiteMachine.pool``.
        clock: Tells time.
        owner: Random name of this folder; every node carries it.
    """

    plan: DeploymentPlan
    pools: Mapping[str, ComputePool]
    clock: Clock
    owner: str
    _launches: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self.plan.file.name

    @property
    def aggregator(self) -> Path:
        """Folder of the aggregator."""
        return self.plan.folder / "aggregator"

    def site(self, name: str) -> Path:
        """Folder of a site on this host."""
        return self.plan.folder / "sites" / name

    def launched(self, role: str) -> int:
        """Number of the last launch of a role; 0 for none."""
        return self._launches.get(role, 0)

    def note_launch(self, role: str, number: int) -> None:
        """Write down that a role is about to be launched with a number.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        self._launches[role] = number
        launches = tuple(
            _LastLaunch(role=name, number=last) for name, last in self._launches.items()
        )
        record = _Record(name=self.name, owner=self.owner, launches=launches)
        durable_json.write(self.plan.folder / _RECORD, record)


def pools_of(plan: DeploymentPlan, clock: Clock) -> Mapping[str, ComputePool]:
    """Open every compute service that a deployment names, this host first.

    Raises:
        ComputeError: The name of a region or a profile is wrong.
        MissingExtra: The library of one is not installed.
    """
    # A user's own models and data are found from where the deployment file is.
    here, nodes = plan.path.parent.absolute(), plan.folder / "nodes"
    pools: dict[str, ComputePool] = {
        LOCAL: LocalPool(folder=nodes, working_folder=here, clock=clock)
    }
    for site in plan.file.sites:
        if site.pool not in pools:
            pools[site.pool] = _cloud(site)
    return pools


def _cloud(site: SiteMachine) -> ComputePool:
    machine = site.machine
    with naming_extras():
        if site.provider == AWS:
            from cloud_adapters.compute import ec2  # noqa: PLC0415 -- the extra aws

            return ec2.connect(machine.region, machine.endpoint)
        from cloud_adapters.compute import gce  # noqa: PLC0415 -- the extra gcp

        return gce.connect(machine.project, machine.endpoint)


@contextmanager
def opened(
    plan: DeploymentPlan,
    *,
    random_bytes: RandomBytes,
    clock: Clock,
    any_owner: bool = False,
) -> Iterator[Deployment]:
    """Hold a deployment's folder, which is made if there is none.

    Args:
        plan: The deployment.
        random_bytes: ``os.urandom``.
        clock: Tells time.
        any_owner: Whether a damaged record counts as a lost one: the nodes of its owner
            are then another's.

    Raises:
        ComputeError: Another user could write to the folder.
        FederationError: Another command works on it.
        CorruptObject: Its record is damaged, or belongs to another deployment.
        StoreUnavailable: The folder cannot be made or written.
    """
    folder = plan.folder
    with file_errors("make", folder):
        own_folder.make(folder)
    check_own(folder)
    complaint = f"another crossfed command works on {folder}: wait until it has ended"
    with folder_lock.hold(folder / "lock", complaint):
        try:
            record = durable_json.read(folder / _RECORD, _Record, advice=_DAMAGED)
        except CorruptObject:
            if not any_owner:
                raise
            record = None
        if record is None:
            owner = random_bytes(_OWNER_BYTES).hex()
            record = _Record(name=plan.file.name, owner=owner)
            durable_json.write(folder / _RECORD, record)
        if record.name != plan.file.name:
            raise CorruptObject(
                f"{folder} belongs to deployment {record.name!r} and not to "
                f"{plan.file.name!r}: name another folder"
            )
        yield Deployment(
            plan=plan,
            pools=pools_of(plan, clock),
            clock=clock,
            owner=record.owner,
            _launches={launch.role: launch.number for launch in record.launches},
        )
