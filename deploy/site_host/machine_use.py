"""What a site's machine does, second by second, and the energy that takes.

All of it stays at the site, but the energy of a round if ``policy.report_energy`` lets
it leave: ``use.csv`` has the newest seconds, ``use.json`` the sums,
and ``use.prom`` the same for the text file collector of a Prometheus node exporter. It
is of the whole machine, whatever else runs there.

Energy is measured where the machine measures it: by RAPL for processors (the packages
of ``/sys/class/powercap``, often readable by root alone), by NVML for GPUs. Processors
without RAPL have a model, whose lower and upper bound are kept: so many watts for each
virtual CPU at rest and at work, of the three clouds in the methodology of Cloud Carbon
Footprint (section *Compute*). GPUs that nothing measures make the energy unknown.
"""

import contextlib
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from federation.durable_files import read_json, replace_file
from federation.errors import CorruptObject, StoreUnavailable
from federation.messages import UNKNOWN_ENERGY, Energy
from federation.protocols import Clock
from federation.typed_json import encode
from monitoring.units import format_bytes, format_duration, format_range

SECONDS, TEXTS_SECONDS = 1.0, 10.0
MAX_LOG_BYTES = 8 << 20  # Of each of two files: about two days.
# In a second without a task: what a site sends or gets of its aggregator is more.
COMMUNICATION_BYTES = 64 << 10
REST_WATTS, WORK_WATTS = (0.71, 0.78), (3.5, 4.26)  # Of a virtual CPU, low and high.
STATES = TRAINING, COMMUNICATION, IDLE = "training", "communication", "idle"
TOTALS, LOG, METRICS = "use.json", "use.csv", "use.prom"
_JOULES_PER_KWH = 3.6e6
_SECTOR, _KIB, _MICRO, _MILLI = 512, 1024, 1e-6, 1e-3
_UNKNOWN = "unknown"

Joules = tuple[float, float]  # At least and at most.
Sample = tuple[str, dict[str, str], float]  # The name of its family, labels, value.


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the machine has counted since it started; memory and GPU use are of now.

    Attributes:
        cpu_seconds: In which processors were busy, all together.
        cpus: Virtual CPUs.
        memory_bytes: In use.
        network_bytes: Sent and received, without the loopback.
        disk_bytes: Read and written.
        gpu_share: Mean use of the GPUs, 0 to 1; None without any that says so.
        gpu_memory_bytes: In use; likewise.
        cpu_joules: By RAPL, package by package with its largest count; empty without.
        gpu_joules: By NVML; None without a GPU or a measure of it.
        has_gpu: Whether there is a GPU.
    """

    cpu_seconds: float
    cpus: int
    memory_bytes: int
    network_bytes: int
    disk_bytes: int
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None
    cpu_joules: tuple[tuple[float, float], ...] = ()
    gpu_joules: float | None = None
    has_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUse:
    """Sums over the seconds of one state.

    Attributes:
        state: ``training`` while a task is at work; ``communication`` while there is
            none and the network carries something; ``idle`` for the rest.
        seconds: How many.
        joules: At least and at most; None if a second of it is unknown.
    """

    state: str
    seconds: float = 0.0
    joules: Joules | None = (0.0, 0.0)

    def plus(self, seconds: float, joules: Joules | None) -> "StateUse":
        """Add some time."""
        both = None
        if joules is not None and self.joules is not None:
            both = (self.joules[0] + joules[0], self.joules[1] + joules[1])
        return replace(self, seconds=self.seconds + seconds, joules=both)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """What is known of a machine.

    Attributes:
        since: When the sums begin, seconds since 1970. They leave out the time in
            which no agent ran.
        at: When this was noted.
        methods: How energy was measured: ``RAPL``, ``model``, ``NVML``; ``unknown``.
        states: Sums by state.
        cpus: Virtual CPUs.
        cpu_share: Of them in use now, 0 to 1.
        memory_bytes: In use.
        network_bytes: In the last second.
        disk_bytes: Likewise.
        gpu_share: Use of the GPUs now, 0 to 1.
        gpu_memory_bytes: In use.
    """

    since: float
    at: float
    methods: tuple[str, ...] = ()
    states: tuple[StateUse, ...] = tuple(StateUse(state=state) for state in STATES)
    cpus: int = 0
    cpu_share: float = 0.0
    memory_bytes: int = 0
    network_bytes: int = 0
    disk_bytes: int = 0
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None


def energy(
    before: Counters, after: Counters, seconds: float
) -> tuple[Joules | None, tuple[str, ...]]:
    """Joules between two counts, at least and at most, and the methods."""
    busy = max(0.0, after.cpu_seconds - before.cpu_seconds)
    if after.cpu_joules and len(after.cpu_joules) == len(before.cpu_joules):
        pairs = zip(before.cpu_joules, after.cpu_joules, strict=True)
        # A counter that has reached its largest value begins again.
        used = sum((new - old) % (most or 1.0) for (old, _), (new, most) in pairs)
        low, high, methods = used, used, ("RAPL",)
    else:
        rest = max(0.0, after.cpus * seconds - busy)
        low, high = (
            rest * at_rest + busy * at_work
            for at_rest, at_work in zip(REST_WATTS, WORK_WATTS, strict=True)
        )
        methods = ("model",)
    if not after.has_gpu:
        return (low, high), methods
    if before.gpu_joules is None or after.gpu_joules is None:
        return None, (*methods, _UNKNOWN)
    gpu = max(0.0, after.gpu_joules - before.gpu_joules)
    return (low + gpu, high + gpu), (*methods, "NVML")


def grams(joules: float, grams_per_kwh: float) -> float:
    """gCO2e of some energy, at the grid's intensity."""
    return joules / _JOULES_PER_KWH * grams_per_kwh


class Machine:
    """Reads the counters of this machine."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Find its packages and GPUs.

        Args:
            root: Where ``proc``, ``sys`` and ``dev`` are.
        """
        self._root = root
        packages = sorted((root / "sys/class/powercap").glob("intel-rapl:?"))
        self._packages = [path for path in packages if _counts(path)]
        self._cpus = os.cpu_count() or 1
        self._has_gpu = (root / "dev/nvidia0").exists()
        self._gpus = _Gpus() if self._has_gpu else None

    def read(self) -> Counters:
        """Count.

        Raises:
            OSError: A file of ``/proc`` cannot be read.
            ValueError: One has another form.
        """
        ticks = [int(part) for part in self._rows("stat")[0][1:8]]
        memory = {row[0]: int(row[1]) for row in self._rows("meminfo")}
        links = [row for row in self._rows("net/dev")[2:] if row[0] != "lo"]
        # Whole disks alone: a partition's count is in that of its disk.
        disks = {path.name for path in (self._root / "sys/block").glob("*")}
        sectors = sum(
            int(row[5]) + int(row[9])
            for row in self._rows("diskstats")
            if row[2] in disks and not row[2].startswith(("loop", "dm-", "md", "ram"))
        )
        share, gpu_memory, gpu_joules = (
            self._gpus.read() if self._gpus else (None, None, None)
        )
        busy = sum(ticks) - ticks[3] - ticks[4]  # Without idle, iowait and stolen.
        return Counters(
            cpu_seconds=busy / os.sysconf("SC_CLK_TCK"),
            cpus=self._cpus,
            memory_bytes=_KIB * (memory["MemTotal"] - memory["MemAvailable"]),
            network_bytes=sum(int(row[1]) + int(row[9]) for row in links),
            disk_bytes=_SECTOR * sectors,
            gpu_share=share,
            gpu_memory_bytes=gpu_memory,
            cpu_joules=tuple(map(_package, self._packages)),
            gpu_joules=gpu_joules,
            has_gpu=self._has_gpu,
        )

    def _rows(self, name: str) -> list[list[str]]:
        """The words of each line of a file of ``/proc``."""
        text = (self._root / "proc" / name).read_text()
        return [line.replace(":", " ").split() for line in text.splitlines()]


def _counts(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        _package(path)
        return True
    return False


def _package(path: Path) -> tuple[float, float]:
    """Joules of a package, and the count after which it begins again."""
    found = (path / name for name in ("energy_uj", "max_energy_range_uj"))
    joules, most = (_MICRO * int(each.read_text()) for each in found)
    return joules, most


class _Gpus:
    """The GPUs of this machine, by NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        with contextlib.suppress(ImportError):
            nvml = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
                count = nvml.nvmlDeviceGetCount()
                self._all = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
                self._nvml = nvml

    def read(self) -> tuple[float | None, int | None, float | None]:
        """Share in use, memory in use, joules since the driver was loaded."""
        nvml = self._nvml
        if nvml is None or not self._all:
            return None, None, None

        def sum_of(value: Callable[[Any], float]) -> float | None:
            try:
                return sum(map(value, self._all))
            except nvml.NVMLError:  # Not every GPU, nor a part of one, has each.
                return None

        share = sum_of(lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
        memory = sum_of(lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used)
        joules = sum_of(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return (
            None if share is None else share / len(self._all),
            None if memory is None else int(memory),
            None if joules is None else _MILLI * joules,
        )


@dataclass(kw_only=True)
class UseLog:
    """Adds up what a machine does.

    Attributes:
        folder: The site's.
        clock: Tells time.
        is_at_work: Whether a task is at work.
        read: Counts.
        grams_per_kwh: gCO2e of a kWh here; 0 if that is not known.
    """

    folder: Path
    clock: Clock
    is_at_work: Callable[[], bool]
    read: Callable[[], Counters]
    grams_per_kwh: float = 0.0
    _use: MachineUse = field(init=False)
    _before: tuple[float, Counters] | None = None
    _saved: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        """Go on with earlier sums, unless their energy was unknown."""
        now, known = self.clock.now(), read_use(self.folder)
        if known is None or any(each.joules is None for each in known.states):
            known = MachineUse(since=now, at=now)
        self._use = known

    def look(self) -> None:
        """Count the time since the last look.

        Raises:
            OSError, ValueError: See ``Machine.read``.
        """
        with self._lock:
            at, counted = self.clock.monotonic(), self.read()
            before, self._before = self._before, (at, counted)
            if before is not None:
                self._add(at - before[0], before[1], counted)

    def energy_so_far(self) -> Energy:
        """What the machine has taken up to now; only differences mean something."""
        with self._lock, contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            if self._before is None:
                return UNKNOWN_ENERGY
            (at, before), counted = self._before, self.read()
            newest, methods = energy(before, counted, self.clock.monotonic() - at)
            known = [
                joules
                for joules in (newest, *(each.joules for each in self._use.states))
                if joules is not None
            ]
            if len(known) > len(self._use.states):
                low, high = (sum(ends) for ends in zip(*known, strict=True))
                made = [grams(joules, self.grams_per_kwh) for joules in (low, high)]
                return Energy(
                    joules=(low, high),
                    grams=(made[0], made[1]) if self.grams_per_kwh else None,
                    method=" and ".join(methods),
                )
        return UNKNOWN_ENERGY

    def _add(self, seconds: float, before: Counters, after: Counters) -> None:
        network = max(0, after.network_bytes - before.network_bytes)
        spread = COMMUNICATION_BYTES * max(seconds, SECONDS)
        state = TRAINING if self.is_at_work() else IDLE
        if state == IDLE and network >= spread:
            state = COMMUNICATION
        joules, methods = energy(before, after, seconds)
        busy = after.cpu_seconds - before.cpu_seconds
        self._use = replace(
            self._use,
            states=tuple(
                each.plus(seconds, joules) if each.state == state else each
                for each in self._use.states
            ),
            at=self.clock.now(),
            methods=tuple(dict.fromkeys((*self._use.methods, *methods))),
            cpus=after.cpus,
            cpu_share=min(1.0, max(0.0, busy / (after.cpus * seconds or 1.0))),
            memory_bytes=after.memory_bytes,
            network_bytes=network,
            disk_bytes=max(0, after.disk_bytes - before.disk_bytes),
            gpu_share=after.gpu_share,
            gpu_memory_bytes=after.gpu_memory_bytes,
        )
        self._log(state, joules)
        if self.clock.monotonic() >= self._saved + TEXTS_SECONDS:
            self.save()

    def _log(self, state: str, joules: Joules | None) -> None:
        use, path = self._use, self.folder / LOG
        known = (None, None) if joules is None else joules
        cells = (
            *(f"{use.at:.1f}", state, f"{use.cpu_share:.3f}", use.memory_bytes),
            *(use.network_bytes, use.disk_bytes, use.gpu_share, use.gpu_memory_bytes),
            *(None if each is None else f"{each:.2f}" for each in known),
        )
        line = ",".join("" if cell is None else str(cell) for cell in cells)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{LOG}.1"))
        head = "" if path.exists() else f"{_HEADS}\n"
        with path.open("a", encoding="ascii") as log:
            log.write(f"{head}{line}\n")

    def save(self) -> None:
        """Write the sums.

        Raises:
            StoreUnavailable: The disk is full.
        """
        self._saved = self.clock.monotonic()
        replace_file(self.folder / TOTALS, [json.dumps(encode(self._use)).encode()])
        # By hand: the library that serves metrics would be 2 MiB of every agent.
        text, last = "", ""
        for name, labels, value in samples(self._use, self.grams_per_kwh):
            if name != last:
                kind = "counter" if name.endswith("_total") else "gauge"
                text, last = f"{text}# TYPE {name} {kind}\n", name
            listed = ",".join(f'{label}="{each}"' for label, each in labels.items())
            text += f"{name}{{{listed}}} {value:.9g}\n"
        replace_file(self.folder / METRICS, [text.encode()])


_HEADS = (
    "at,state,cpu_share,memory_bytes,network_bytes,disk_bytes,gpu_share,"
    "gpu_memory_bytes,joules_low,joules_high"
)


def samples(use: MachineUse, grams_per_kwh: float) -> Iterator[Sample]:
    """Values for a Prometheus, family by family."""
    taken = [
        ({"state": each.state, "bound": bound}, joules)
        for each in use.states
        for bound, joules in zip(("low", "high"), each.joules or (), strict=False)
    ]
    for each in use.states:
        yield "crossfed_machine_seconds_total", {"state": each.state}, each.seconds
    for labels, joules in taken:
        yield "crossfed_machine_joules_total", labels, joules
    for labels, joules in taken if grams_per_kwh else ():
        made = grams(joules, grams_per_kwh)
        yield "crossfed_machine_gco2e_grams_total", labels, made
    for name in (each.name for each in fields(use)):
        value = getattr(use, name)
        if isinstance(value, int | float) and name not in {"since", "at"}:
            yield f"crossfed_machine_{name}", {}, value


def parts(
    use: MachineUse, grams_per_kwh: float, now: float
) -> Iterator[tuple[str, Sequence[tuple[str, Sequence[str]]]]]:
    """Say it for the operator; see ``run_status.about``.

    Args:
        use: What is known.
        grams_per_kwh: gCO2e of a kWh; 0 if that is not known.
        now: Seconds since 1970.
    """
    found = [
        f"{use.cpu_share:.0%} of {use.cpus} CPUs",
        f"{format_bytes(use.memory_bytes)} of memory",
        f"network {format_bytes(use.network_bytes)} a second",
        f"disk {format_bytes(use.disk_bytes)} a second",
    ]
    if use.gpu_share is not None:
        found.append(f"GPUs {use.gpu_share:.0%}")
    if use.gpu_memory_bytes is not None:
        found.append(f"{format_bytes(use.gpu_memory_bytes)} of GPU memory")
    ago = format_duration(max(0.0, now - use.at))
    yield f"machine, {ago} ago: {', '.join(found)}", ()
    measured = format_duration(sum(each.seconds for each in use.states))
    methods = " and ".join(use.methods) or "nothing yet"
    rows = [(each.state, [_text(each, grams_per_kwh)]) for each in use.states]
    yield f"energy in {measured}, by {methods}:", rows


def _text(use: StateUse, grams_per_kwh: float) -> str:
    took = f"{format_duration(use.seconds)}, "
    if use.joules is None:
        return f"{took}unknown: nothing measures the GPUs (pip install nvidia-ml-py)"
    made = "gCO2e unknown (compute.grams_per_kwh)"
    if grams_per_kwh:
        low, high = (grams(joules, grams_per_kwh) for joules in use.joules)
        made = f"{format_range((low, high))} gCO2e"
    return f"{took}{format_range(use.joules, 1000)} kJ, {made}"


def read_use(folder: Path) -> MachineUse | None:
    """The sums of a site's machine; None if there are none, or they are damaged."""
    with contextlib.suppress(CorruptObject):
        return read_json(folder / TOTALS, MachineUse, advice="remove it")
    return None


@contextmanager
def measured(log: UseLog, listener: Callable[[str], None]) -> Iterator[None]:
    """Look once a second, in a thread, until the block ends.

    Whatever fails is told once: a site trains without it.
    """
    over = threading.Event()

    def run() -> None:
        told = ""
        while not over.wait(SECONDS):
            try:
                log.look()
            except (
                OSError,
                ValueError,
                KeyError,
                IndexError,
                StoreUnavailable,
            ) as error:
                if str(error) != told:
                    told = str(error)
                    listener(f"the machine's use is not measured now: {told}")

    thread = threading.Thread(target=run, daemon=True, name="machine use")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(StoreUnavailable):
            log.save()
