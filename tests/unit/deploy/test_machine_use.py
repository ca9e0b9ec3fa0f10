"""What a site's machine does, and the energy that takes: counted from its files."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import agents

from deploy.site_host import machine_use, run_status
from deploy.site_host.machine_use import Counters, Machine, UseLog, energy
from federation.clock import VirtualClock
from federation.messages import UNKNOWN_ENERGY
from federation.typed_json import encode

REST = Counters(
    cpu_seconds=100.0,
    cpus=4,
    memory_bytes=1 << 30,
    network_bytes=1000,
    disk_bytes=1000,
)


def machine(root: Path, busy: int, *, joules: int | None = None) -> Path:
    """The files of a machine whose processors were busy for so many hundredths."""
    files = {
        "proc/stat": f"cpu  {busy} 0 0 1000 50 0 0 9 0 0\ncpu0 1 1 1 1\n",
        "proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n",
        "proc/net/dev": "Inter-|\n face |bytes\n    lo: 9 0 0 0 0 0 0 0 9 0\n"
        "  eth0: 70 0 0 0 0 0 0 0 30 0\n",
        "proc/diskstats": "8 0 sda 1 2 10 4 5 6 20 8\n8 1 sda1 1 2 9 4 5 6 9 8\n"
        "7 0 loop0 1 2 9 4 5 6 9 8\n",
    }
    if joules is not None:
        package = "sys/class/powercap/intel-rapl:0"
        files[f"{package}/energy_uj"] = f"{joules}\n"
        files[f"{package}/max_energy_range_uj"] = "1000000000\n"
    for name in ("sys/block/sda", "sys/block/loop0"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_counts_are_those_of_the_kernel(tmp_path: Path):
    found = Machine(machine(tmp_path, busy=250)).read()
    assert (found.cpu_seconds, found.memory_bytes) == (2.5, 3072 * 1024)
    assert (found.network_bytes, found.disk_bytes) == (100, 30 * 512)
    assert (found.cpu_joules, found.has_gpu, found.gpu_share) == ((), False, None)


def test_energy_is_measured_where_the_machine_does(tmp_path: Path):
    """Also when a counter begins again; otherwise a model gives a range."""
    reader = Machine(machine(tmp_path, busy=0, joules=999_000_000))
    before = reader.read()
    machine(tmp_path, busy=100, joules=1_000_000)
    assert energy(before, reader.read(), 1.0) == ((2.0, 2.0), ("RAPL",))
    after = replace(REST, cpu_seconds=101.0)  # One of four processors, for a second.
    ((low, high), methods) = energy(REST, after, 1.0)  # type: ignore[misc]
    assert (low, high) == pytest.approx((3 * 0.71 + 3.5, 3 * 0.78 + 4.26))
    assert methods == ("model",)


def test_energy_of_a_gpu_that_nothing_measures_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And with NVML it is that of its counter, in millijoules."""
    root = machine(tmp_path, busy=0)
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = Machine(root).read()
    assert found.has_gpu
    assert energy(found, found, 1.0) == (None, ("model", "unknown"))

    class NVMLError(Exception):
        pass

    counts = {"energy": 5000}
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError  # type: ignore[attr-defined]
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetCount = lambda: 2  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByIndex = lambda at: at  # type: ignore[attr-defined]
    use = types.SimpleNamespace(gpu=30)
    nvml.nvmlDeviceGetUtilizationRates = lambda _: use  # type: ignore[attr-defined]

    def refuse(_: int) -> None:
        raise NVMLError

    nvml.nvmlDeviceGetMemoryInfo = refuse  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda _: counts["energy"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = Machine(root)
    before = reader.read()
    counts["energy"] += 1500
    after = reader.read()
    assert after.gpu_share == pytest.approx(0.3)
    assert after.gpu_memory_bytes is None
    ((low, high), methods) = energy(before, after, 0.0)  # type: ignore[misc]
    assert (low, high, methods) == (3.0, 3.0, ("model", "NVML"))


def test_time_is_training_communication_or_idle(tmp_path: Path):
    """Sums outlive the process; the operator sees them, and nobody else."""
    clock, work, counted = VirtualClock(1e9), [True], [REST]
    config = agents.site_config(tmp_path, "north", compute={"grams_per_kwh": 360.0})

    def log() -> UseLog:
        return UseLog(
            folder=tmp_path,
            clock=clock,
            is_at_work=lambda: work[0],
            read=lambda: counted[-1],
            grams_per_kwh=360.0,
        )

    first = log()
    for is_at_work, network in ((True, 10**9), (False, 10**6), (False, 10)):
        first.look()
        work[0] = is_at_work
        last = counted[-1]
        counted.append(replace(last, network_bytes=last.network_bytes + network))
        clock.sleep(1.0)
    first.look()
    first.save()
    again = log()
    again.look()
    clock.sleep(2.0)
    again.look()
    again.save()
    use = machine_use.read_use(tmp_path)
    assert use is not None
    seconds = {each.state: each.seconds for each in use.states}
    assert seconds == {"training": 1.0, "communication": 1.0, "idle": 3.0}
    rest = (4 * 0.71, 4 * 0.78)
    assert use.states[0].joules == pytest.approx(rest)
    (families) = list(
        text_string_to_metric_families((tmp_path / "use.prom").read_text())
    )
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    joules = samples["crossfed_machine_joules_total", "idle", "high"]
    assert joules == pytest.approx(3 * rest[1])
    grams = samples["crossfed_machine_gco2e_grams_total", "idle", "high"]
    assert grams == pytest.approx(joules / 3.6e6 * 360)
    shown = "\n".join(run_status.lines(run_status.status(config), clock.now()))
    assert "0.00284 to 0.00312 kJ, 0.000284 to 0.000312 gCO2e" in shown
    rows = (tmp_path / "use.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == [
        *("training", "communication", "idle", "idle")
    ]


def test_energy_of_a_task_is_read_between_two_looks(tmp_path: Path):
    """A short task is counted, and one that nothing can measure is unknown."""
    clock, counted = VirtualClock(1e9), [REST]
    log = UseLog(
        folder=tmp_path,
        clock=clock,
        is_at_work=lambda: True,
        read=lambda: counted[-1],
        grams_per_kwh=360.0,
    )
    assert log.energy_so_far() == UNKNOWN_ENERGY  # Nothing has been counted yet.
    log.look()
    clock.sleep(1.0)
    log.look()
    clock.sleep(0.25)
    found = log.energy_so_far()
    joules = (1.25 * 4 * 0.71, 1.25 * 4 * 0.78)
    assert found.joules == pytest.approx(joules)
    assert found.grams == pytest.approx([each / 1e4 for each in joules])
    assert found.method == "model"
    assert log.energy_so_far() == found  # Asking changes nothing.
    log.grams_per_kwh = 0.0
    assert log.energy_so_far().grams is None
    counted.append(replace(REST, has_gpu=True))
    assert log.energy_so_far() == UNKNOWN_ENERGY
    counted.clear()
    assert log.energy_so_far() == UNKNOWN_ENERGY  # The kernel's files cannot be read.


def test_log_is_bounded_and_what_is_damaged_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As does what was unknown, or it would stay so for ever."""
    clock = VirtualClock(1e9)
    monkeypatch.setattr(machine_use, "MAX_LOG_BYTES", 100)

    def log() -> UseLog:
        return UseLog(
            folder=tmp_path, clock=clock, is_at_work=lambda: False, read=lambda: REST
        )

    first = log()
    for _ in range(4):
        first.look()
        clock.sleep(1.0)
    assert len((tmp_path / "use.csv").read_text().splitlines()) == 2
    assert (tmp_path / "use.csv.1").exists()
    first.save()
    use = machine_use.read_use(tmp_path)
    assert use is not None
    assert (use.since, use.states[2].seconds) == (1e9, 3.0)
    clock.sleep(3600.0)  # While no agent runs, nothing is measured.
    later = log()
    for _ in range(2):
        later.look()
        clock.sleep(1.0)
    later.save()
    use = machine_use.read_use(tmp_path)
    assert use is not None
    told = [line for line, _ in machine_use.parts(use, 0.0, clock.now())]
    assert told[-1].startswith("energy in 4.0 s")
    unknown = replace(use, states=(replace(use.states[0], joules=None),))
    (tmp_path / "use.json").write_text(json.dumps(encode(unknown)))
    log().save()
    anew = machine_use.read_use(tmp_path)
    assert anew is not None
    assert (anew.since, anew.states[0].joules) == (clock.now(), (0.0, 0.0))
    (tmp_path / "use.json").write_text("{")
    assert machine_use.read_use(tmp_path) is None
