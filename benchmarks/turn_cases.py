"""Units of work for ``turns.py``, which runs them at two commits in turn.

    python benchmarks/turn_cases.py [CASE ...]

runs a unit of each case that matches, in this checkout, to see that they work. A
pattern such as ``dp-*`` stands for several cases; without any, all of them run.
``--list`` prints their names.

This file runs with the modules of an older commit too. So a case takes names from the
benchmark scripts of the checkout that it measures, which import them from where they
were at that commit, and imports others only where they have always been.

JSON lines on stdout: the seconds of each unit, and the peak of memory so far.
"""

import contextlib
import fnmatch
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

# What a unit took, by the name of the measure. CPU times are of the whole process.
Seconds = dict[str, float]
# Ends a unit, and begins the next when it returns. Takes what the unit took if it knows
# better than the process's CPU time, by which many small acts are divided.
Turn = Callable[..., None]
Case = Callable[[Turn], None]

MIB = 1 << 20
SMALL_OBJECTS, SMALL_BYTES = 20, 1000
UPDATE_VALUES = 2_000_000
TINY_ROUNDS = 25


class EndOfTurns(BaseException):
    """No more units are wanted."""


def repeated(make: Callable[[], Callable[[], object]], times: int = 1) -> Case:
    """A case whose unit is a call, or the mean of several."""

    def run(turn: Turn) -> None:
        act = make()
        while True:
            for _ in range(times):
                act()
            turn(times)

    return run


def reporting(act: Callable[[], Seconds]) -> Case:
    """A case whose unit says itself what it took."""

    def run(turn: Turn) -> None:
        while True:
            turn(**act())

    return run


def simulated(load: Callable[[], object]) -> Case:
    """A case whose unit is a round of one long simulation."""

    def run(turn: Turn) -> None:
        import overhead

        def listen(event: object) -> None:
            if isinstance(event, overhead.RoundFinished):
                turn()

        overhead.simulate(load(), listeners=[listen])

    return run


def secure(num_sites: int, **secure_aggregation: object) -> Any:
    """The job of ``jobs/secure.toml`` with next to no training, and no faults."""
    import overhead

    return overhead.job_file.parse(
        {
            "name": "secure",
            "seed": 7,
            "rounds": 1000,
            "model": {"factory": "clients.models:digits_cnn"},
            "data": {"source": "clients.data:digits"},
            "training": {
                "local_steps": 1,
                "batch_size": 8,
                "optimizer": {"name": "adamw", "lr": 2e-3},
            },
            "evaluation": {"every": 0},
            "privacy": {"secure_aggregation": {"enabled": True, **secure_aggregation}},
            "sites": [{"name": f"site-{index:02d}"} for index in range(num_sites)],
        }
    )


def private() -> object:
    """``jobs/private.toml``, with noise for 200 rounds."""
    import overhead

    jobs = Path(overhead.__file__).parents[1] / "jobs"
    return overhead.job_file.load(jobs / "private.toml", ["rounds=200"])


def private_step(kind: str, size: int, clipping: str) -> Callable[[], object]:
    """A step of DP-SGD."""
    import dp_sgd

    dp_sgd.torch.set_num_threads(1)
    return dp_sgd.cases([kind])[f"{kind} {size}"]()[clipping]


def mask(num_masks: int, bits: int) -> Callable[[], object]:
    """Clip, round and mask an update, as a site does."""
    import secure_aggregation as sums

    inputs = _sum_inputs(num_masks, bits)

    def act() -> None:
        sums.np.copyto(inputs.work_d, inputs.update_d)
        sums.seal_(
            inputs.work_d,
            inputs.spec,
            weight=sums.WEIGHT,
            masks=inputs.masks,
            rounding_key=os.urandom(32),
        )

    return act


def unmask() -> Callable[[], object]:
    """Add vectors of ten sites and take a mask of each off, as the aggregator does."""
    import secure_aggregation as sums

    inputs = _sum_inputs(64, 32)
    masks = inputs.masks[:1]
    words = sums.seal_(
        inputs.update_d.copy(),
        inputs.spec,
        weight=sums.WEIGHT,
        masks=masks,
        rounding_key=bytes(32),
    ).words_w

    def act() -> None:
        total = sums.MaskedSum(inputs.values, inputs.spec)
        for _ in range(10):
            total.fold_(words)
            total.apply_masks_(masks)

    return act


def _sum_inputs(num_masks: int, bits: int) -> Any:
    import secure_aggregation as sums

    random = sums.np.random.default_rng(0)
    update_d = random.standard_normal(UPDATE_VALUES, dtype="float32")
    return sums._inputs(update_d, update_d.copy(), num_masks, bits)  # noqa: SLF001


def idle_rounds() -> Callable[[], object]:
    """Twenty rounds of 100 sites that do nothing, and the start of their run."""
    import rounds

    if not hasattr(rounds.AddOne, "spent"):  # As at 3d2fbe6, whose script failed.
        rounds.AddOne.spent = lambda _self: None
    return functools.partial(rounds.ours, 100, 1000, 20)


def combined(num_sites: int) -> Case:
    """The mean of updates of 2 million values, with the finiteness check."""

    def run(turn: Turn) -> None:
        import combine

        inputs = combine._inputs(num_sites, UPDATE_VALUES)  # noqa: SLF001

        def seconds() -> float:
            if hasattr(combine, "timed"):
                return combine.timed("ours", inputs)[1]
            begin = time.process_time()  # Older scripts give all turns the same memory.
            combine.CONTENDERS["ours_checked"](inputs)  # type: ignore[call-arg]
            return time.process_time() - begin

        while True:
            times = 16 // num_sites
            turn(CPU=sum(seconds() for _ in range(times)) / times)

    return run


def stored(
    act: str, times: int, *, encrypted: bool, num_bytes: int, count: int
) -> Case:
    """Objects put or read: on disk, or encrypted in memory."""

    def run(turn: Turn) -> None:
        with tempfile.TemporaryDirectory() as name:
            store = _encrypted(Path(name)) if encrypted else _on_disk(Path(name))
            content = bytes(num_bytes)
            keys = [f"objects/{number}" for number in range(count)]

            def put() -> None:
                for key in keys:
                    store.put(key, [content])

            def read() -> None:
                for key in keys:
                    store.read(key)

            put()
            repeated(lambda: {"put": put, "read": read}[act], times)(turn)

    return run


def _on_disk(folder: Path) -> Any:
    import storage

    return storage.LocalStore(folder / "store")


def _encrypted(folder: Path) -> Any:
    from cloud_adapters.keys.key_file import KeyFile, add_key
    from cloud_adapters.storage.encrypted import EncryptedStore
    from cloud_adapters.storage.memory import MemoryStore

    add_key(folder / "keys")
    return EncryptedStore(MemoryStore(), KeyFile(folder / "keys"))


def deployed() -> Seconds:
    """Rounds of two sites and ten values over a SuperLink that starts for them."""
    import deployed

    found = deployed.tiny(TINY_ROUNDS)
    return {
        "round": found["median_seconds"],
        "SuperLink's CPU a round": found["superlink_cpu_seconds_a_round"],
    }


def start() -> Seconds:
    """CPU time of ``crossfed simulate`` up to its first line, less torch's import."""
    command = "import sys; from deploy.cli import main; sys.exit(main())"
    job = Path(_checkout(), "jobs", "quickstart.toml")
    options = ["--set", "storage.url=memory://", "--set", "rounds=1"]
    with tempfile.TemporaryDirectory() as folder:
        begin = _cpu_of_children()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, cwd=folder)
        torch = _cpu_of_children() - begin
        with subprocess.Popen(
            [sys.executable, "-c", command, "simulate", str(job), *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=folder,
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline()
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]
            process.kill()
    ticks = sum(map(int, fields.split()[11:13]))
    return {"CPU beyond torch": ticks / os.sysconf("SC_CLK_TCK") - torch}


def _checkout() -> Path:
    import federation

    return Path(federation.__file__).parents[1]


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cases() -> Iterator[tuple[str, Case]]:
    part = functools.partial
    yield "secure-5", simulated(part(secure, 5))
    yield "secure-5-threshold-4", simulated(part(secure, 5, threshold=4))
    yield "secure-16-threshold-12", simulated(part(secure, 16, threshold=12))
    yield "secure-64-threshold-43", simulated(part(secure, 64, threshold=43))
    yield "private", simulated(private)
    for kind, size, times in (("cnn", 64, 3), ("cnn", 256, 1), ("gpt", 8, 1)):
        for clipping in ("hooks", "ghost"):
            step = part(private_step, kind, size, clipping)
            yield f"dp-{kind}-{size}-{clipping}", repeated(step, times)
    for num_masks, bits in ((5, 32), (5, 16), (16, 32)):
        yield f"mask-{num_masks}-{bits}", repeated(part(mask, num_masks, bits), 4)
    yield "unmask", repeated(unmask)
    for place in ("disk", "encrypted"):
        objects = part(stored, encrypted=place == "encrypted")
        for act, times in (("put", 3), ("read", 10)):
            large = objects(act, times, num_bytes=16 * MIB, count=1)
            yield f"{place}-{act}-16-mib", large
            many = 1 if (place, act) == ("disk", "put") else 40  # These are flushed.
            small = objects(act, many, num_bytes=SMALL_BYTES, count=SMALL_OBJECTS)
            yield f"{place}-{act}-small", small
    yield "rounds-100", repeated(idle_rounds)
    for num_sites in (4, 16):
        yield f"combine-{num_sites}-checked", combined(num_sites)
    yield "deployed", reporting(deployed)
    yield "start", reporting(start)


CASES = dict(_cases())


class Turns:
    """Runs the units of a case when they are asked for, and reports each."""

    def __init__(self, wait: Callable[[], None], answers: TextIO) -> None:
        """Take what waits for the next turn, or raises ``EndOfTurns``."""
        self._wait, self._answers = wait, answers
        self._begin = 0.0

    def run(self, case: Case) -> None:
        """Run units until no more are wanted."""
        with contextlib.suppress(EndOfTurns):
            self._wait()
            self._begin = time.process_time()
            case(self._end_of_unit)

    def _end_of_unit(self, times: int = 1, **seconds: float) -> None:
        used = (time.process_time() - self._begin) / times
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"seconds": seconds or {"CPU": used}, "peak_mib": peak}
        print(json.dumps(answer), file=self._answers, flush=True)
        self._wait()
        self._begin = time.process_time()


def worker(checkout: Path, case: str) -> None:
    """Run a unit of work for each line of standard input."""
    sys.path.insert(0, str(checkout / "benchmarks"))
    if _checkout().resolve() != checkout.resolve():
        raise SystemExit(f"turn_cases.py: imported {_checkout()}, not {checkout}")

    def wait() -> None:
        if not sys.stdin.readline():
            raise EndOfTurns

    # What a library prints must not come between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        Turns(wait, answers).run(CASES[case])


def once() -> Callable[[], None]:
    """Let the first unit run, and no other."""
    units = iter([None])

    def wait() -> None:
        for _ in units:
            return
        raise EndOfTurns

    return wait


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3])
        return
    if sys.argv[1:] == ["--list"]:
        print(json.dumps({"cases": list(CASES)}))
        return
    wanted = sys.argv[1:] or ["*"]
    for name, case in CASES.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in wanted):
            print(json.dumps({"case": name}), flush=True)
            Turns(once(), sys.stdout).run(case)


if __name__ == "__main__":
    main()
