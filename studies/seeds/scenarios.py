"""What the documents' claims are rebuilt as: jobs in virtual time, and a formula.

No document states a model, its data, a line and a scheduler together, and none of their
hardware is here. So a stand-in is trained for real, a perceptron on handwritten digits,
and takes the time that ResNet-50 would take on the machines that Huang's section 5.1.1
names. ``ASSUMED`` states what that section leaves open. No assumption was chosen after
its result was known.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import results
import virtual_runs
from exchanges import ring_bytes

from aggregator.methods import capacity
from aggregator.methods.chosen_steps import Pace
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec

ASSUMED: Mapping[str, str] = {
    "model": "ResNet-50: 25.6M values, 102 MB in float32; 256 images a step",
    "A100": "2,500 images a second",
    "CPU-only instance": "100 images a second",
    "network": "10 Gbit/s for each node, as stated; between clouds 1 Gbit/s",
    "four clouds": "speeds 1 : 1 : 2 : 4, of which the fastest is an A100",
    "utilisation": "the share of the time in which a site trains",
    "latency": "50 microseconds in the formulas; none in virtual time",
}
IMAGES, A100, CPU = 256, 2500.0, 100.0
RESNET_VALUES, VALUE_BYTES, MBIT, LATENCY = 25_600_000, 4, 1e6 / 8, 50e-6

# The stand-in: a step on so many digits takes as long as one on 256 images, and its
# float32 message as long as ResNet-50's.
HIDDEN, BATCH = 128, 16
_VALUES = 64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10
STEPS, ROUNDS = 12, 40

_CAPACITY: Mapping[str, Any] = {"schedule.allocation": "capacity"}
_INT8: Mapping[str, Any] = {
    "communication": {
        "codec": {"name": "int8"},
        "down_codec": {"name": "int8"},
        "down_content": "change",
    }
}
CODECS: Mapping[str, Mapping[str, Any]] = {
    "32 bits": {},
    "16 bits (bf16)": {
        "communication": {"codec": {"name": "bf16"}, "down_codec": {"name": "bf16"}}
    },
    "16 bits (fp16)": {
        "communication": {"codec": {"name": "fp16"}, "down_codec": {"name": "fp16"}}
    },
    "8 bits": _INT8,
    "4 bits up, 8 down": {
        "communication": {**_INT8["communication"], "codec": {"name": "int4"}}
    },
}
OFF, ON = "all off", "all on"
CLOUDS = (0.25, 0.25, 0.5, 1.0)  # Of an A100.
RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
NODES = (2, 4, 8, 16, 32, 64, 128, 256)
_RELAY = 8  # Sites of a relay.
_STALL_FROM = 10  # The first round in which a site stalls.


def job_of(
    speeds: Sequence[float],
    mbit: float,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    alpha: float = 100.0,
    keys: Mapping[str, Any] | None = None,
) -> JobSpec:
    """Describe a job of the stand-in.

    Args:
        speeds: Images per second of each site.
        mbit: Width of each site's line to the aggregator, in each direction.
        rounds: Of the run.
        seed: Of the run.
        alpha: How alike the sites' data are (Dirichlet).
        keys: Changes of the job.
    """
    names = [f"site-{number:02}" for number in range(len(speeds))]
    width = mbit * _VALUES / RESNET_VALUES
    document: dict[str, Any] = {
        "name": "claims",
        "rounds": rounds,
        "seed": seed,
        "model": {
            "factory": "clients.models:mlp",
            "options": {"inputs": 64, "classes": 10, "hidden": [HIDDEN]},
        },
        "data": {
            "source": "clients.data:digits",
            "partition": {"kind": "dirichlet", "alpha": alpha},
        },
        "training": {
            "local_steps": STEPS,
            "batch_size": BATCH,
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "evaluation": {"every": 1000},  # The first and the last model only.
        "aggregation": {"weights": "uniform"},
        "sites": [{"name": name} for name in names],
        "simulation": {
            "machines": [
                {
                    "site": name,
                    "examples_per_second": speed * BATCH / IMAGES,
                    "down_mbit": width,
                    "up_mbit": width,
                }
                for name, speed in zip(names, speeds, strict=True)
            ]
        },
    }
    for key, value in (keys or {}).items():
        job_file.override(document, key, value)
    return job_file.parse(document)


def rows_of(case: str, seeds: int, rounds: int) -> Iterator[results.Result]:
    """Yield the rows of a case."""
    yield from _CASES[case](seeds, rounds)


def _row(case: str, variant: str, job: JobSpec, **more: Any) -> results.Result:
    run = virtual_runs.run(job)
    shares = [*run.trains.values()]
    return {
        "case": case,
        "variant": variant,
        "seed": job.seed,
        "seconds": run.round_seconds,
        "trains": run.busy,
        "trains_slowest": shares[0],
        "trains_fastest": shares[-1],
        "bytes": run.bytes_sent,
        "steps": run.steps,
        "loss": run.loss,
        "accuracy": run.accuracy,
        **more,
    }


def _all(seeds: int, rounds: int) -> Iterator[results.Result]:
    """Everything off, on, and in between: as many local steps in all rows."""
    every_step = {"training.local_steps": 1}
    ways: Mapping[str, tuple[int, Mapping[str, Any]]] = {
        OFF: (rounds * STEPS, every_step),
        "8 bits at every step": (rounds * STEPS, {**every_step, **_INT8}),
        f"{STEPS} local steps": (rounds, {}),
        f"{STEPS} local steps, 8 bits": (rounds, _INT8),
        f"{STEPS} local steps, by capacity": (rounds, _CAPACITY),
        ON: (rounds, {**_CAPACITY, **_INT8}),
    }
    for mbit in (10_000.0, 1_000.0):
        for way, (number, keys) in ways.items():
            for seed in range(seeds):
                speeds = [A100 * each for each in CLOUDS]
                job = job_of(speeds, mbit, rounds=number, seed=seed, keys=keys)
                yield _row("all", way, job, mbit=mbit)


def _heterogeneity(_: int, rounds: int) -> Iterator[results.Result]:
    """Two sites are faster than the other two. Times do not depend on the seed."""
    for ratio in RATIOS:
        speeds = [A100 / ratio, A100 / ratio, A100, A100]
        for way, keys in (("static", {}), ("capacity", _CAPACITY)):
            job = job_of(speeds, 10_000.0, rounds=rounds, keys=keys)
            yield _row("heterogeneity", way, job, ratio=ratio)


def _cluster(_: int, rounds: int) -> Iterator[results.Result]:
    """The machines of section 5.1.1: 16 instances without GPU, and 32 with."""
    speeds, number = [CPU] * 16 + [A100] * 32, max(2, rounds // 4)
    for way, keys in (("static", {}), ("capacity", _CAPACITY)):
        # A quarter of them is the least that a site takes, however slow it is.
        longer = {"training.local_steps": 4 * STEPS, **keys}
        job = job_of(speeds, 10_000.0, rounds=number, keys=longer)
        yield _row("cluster", way, job)


def _response(_: int, rounds: int) -> Iterator[results.Result]:
    """One of four equal sites loses the time of a round in each, from the tenth on."""
    first = min(_STALL_FROM, rounds // 2)
    stall = {
        "site": "site-03",
        "kind": "hang",
        "seconds": STEPS * IMAGES / A100,
        "rounds": [*range(first, rounds + 1)],
    }
    for way, keys in (("static", {}), ("capacity", _CAPACITY)):
        changed = {**keys, "simulation.faults": [stall]}
        job = job_of([A100] * 4, 10_000.0, rounds=rounds, keys=changed)
        run = virtual_runs.run(job)
        yield {
            "case": "response",
            "variant": way,
            "seed": 0,
            "first": first,
            "round_seconds": [one.seconds for one in run.rounds],
        }


def _bits(seeds: int, rounds: int) -> Iterator[results.Result]:
    """The same run with fewer bits for each value."""
    for name, keys in CODECS.items():
        for seed in range(seeds):
            job = job_of([A100] * 4, 10_000.0, rounds=rounds, seed=seed, keys=keys)
            yield _row("bits", name, job)


def _weights(seeds: int, rounds: int) -> Iterator[results.Result]:
    """FedAvg, dynamic weights and gradients, on sites alike and unlike."""
    number = rounds * 5 // 4  # 50 rounds, as the claim says.
    measured = {"evaluation.every": 1}
    ways: Mapping[str, tuple[int, Mapping[str, Any]]] = {
        "FedAvg": (number, {"aggregation.weights": "examples"}),
        "dynamic weights": (number, {"aggregation.weights": "dynamic"}),
        "gradients, as many rounds": (
            number,
            {"aggregation.weights": "examples", "training.local_steps": 1},
        ),
        "gradients, as many steps": (
            number * STEPS,
            {
                "aggregation.weights": "examples",
                "training.local_steps": 1,
                "evaluation.every": STEPS,
            },
        ),
    }
    for alpha in (100.0, 0.3):
        for way, (each, keys) in ways.items():
            for seed in range(seeds):
                job = job_of(
                    [A100] * 4,
                    10_000.0,
                    rounds=each,
                    seed=seed,
                    alpha=alpha,
                    keys={**measured, **keys},
                )
                yield _row("weights", way, job, alpha=alpha)


def _nodes(_: int, __: int) -> Iterator[results.Result]:
    """Share of time that nodes train, by formula, as their number grows.

    Each node, the server and each relay has one line of 10 Gbit/s in each direction.
    A ring is that of Patarasuk and Yuan 2009 (section 3).
    """
    model = RESNET_VALUES * VALUE_BYTES
    line, step = 10_000.0 * MBIT, IMAGES / A100
    for nodes in NODES:
        star = 2 * nodes * model / line
        near = min(_RELAY, nodes)
        tree = 2 * near * model / line
        tree += 2 * -(-nodes // near) * model / line if nodes > near else 0.0
        ring = ring_bytes(RESNET_VALUES, nodes) / line + 2 * (nodes - 1) * LATENCY
        exchanges = {
            "parameter server": (star, 1),
            "ring": (ring, 1),
            f"relays of {_RELAY}": (tree, 1),
            f"one server, {STEPS} local steps": (star, STEPS),
            f"relays of {_RELAY}, {STEPS} local steps": (tree, STEPS),
            f"relays of {_RELAY}, {STEPS} local steps, 8 bits": (tree / 4, STEPS),
        }
        for name, (seconds, steps) in exchanges.items():
            share = steps * step / (steps * step + seconds)
            yield {"case": "nodes", "variant": name, "nodes": nodes, "trains": share}


def _decision(_: int, __: int) -> Iterator[results.Result]:
    """How long the aggregator takes to choose the steps of all sites."""
    for nodes in (48, 1_000, 5_000):
        job = job_of([A100] * 4, 10_000.0, keys=_CAPACITY)
        paces = {
            SiteId(f"site-{i}"): Pace(0.1 * (1 + i % 7), 0.2) for i in range(nodes)
        }
        began = time.perf_counter()
        capacity.allocate(job, [*paces], paces)
        took = time.perf_counter() - began
        yield {"case": "decision", "variant": f"{nodes} sites", "seconds": took}


_CASES = {
    "all": _all,
    "heterogeneity": _heterogeneity,
    "cluster": _cluster,
    "response": _response,
    "bits": _bits,
    "weights": _weights,
    "nodes": _nodes,
    "decision": _decision,
}
CASES = tuple(_CASES)
