"""Rounds per second of a federation whose sites do nothing, ours and Flower's.

    python benchmarks/rounds.py [--sites 2 10 100] [--values 1000]
        [--rounds N] [--ours-only]

Every site adds one to a vector of 1,000 values; the server averages. Ours is the
whole round loop as in `crossfed simulate`: sites in threads, answers checked,
events, a checkpoint in memory after every round. Flower's is its simulation engine
(Ray) with its own FedAvg. Both start first; only rounds are timed. Ours also measures
how much memory grows from round to round.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import machine
import numpy as np

from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import weighted_mean
from aggregator.methods import registry
from aggregator.sampling import cohorts_of
from aggregator.weighting import weight_of
from clients.training.site import Site
from clients.training.site_state import SiteState
from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.storage.memory import MemoryStore
from federation import events
from federation.clock import SystemClock
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import LocalWeights, RunState
from federation.rounds.coordinator import ServerParts, run_federation
from federation.rounds.gather import PlainGather
from federation.rounds.server_optimizer import average
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Role, Vector
from monitoring.views.round_view import named_metric

NOTHING = MetricSums(count=1, loss_sum=0.0, metrics={"correct": 0})


class AddOne:
    """A trainer that does next to nothing."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def layout(self) -> Layout:
        return self._layout

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> LocalWeights:
        del round_index, kept
        return LocalWeights(
            weights_d=weights_d + np.float32(1),
            integers_m=integers_m,
            num_examples=1,
            num_steps=1,
            training=NOTHING,
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> MetricSums:
        del weights_d, integers_m, round_index, kept
        return NOTHING

    def pay(self, **_charges: object) -> None:
        pass

    def spent(self) -> None:
        return None


def ours(num_sites: int, values: int, rounds: int) -> dict[str, object]:
    """Time our rounds; also memory after the first and after the last."""
    job = _job(num_sites, rounds)
    layout = Layout.build([("w", (values,), "float32", Role.PARAMETER)])
    clock, store = SystemClock(), MemoryStore()
    seconds: list[float] = []
    memory: list[int] = []

    def emit(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished):
            seconds.append(event.seconds)
            memory.append(_resident_bytes())

    sites = {
        SiteId(site.name): Site(
            SiteId(site.name),
            make_trainer=lambda: AddOne(layout),
            state=SiteState(SiteId(site.name), layout, store),
            clock=clock,
        )
        for site in job.sites
    }
    with InProcessGrid(sites, clock=clock) as grid:
        state = run_federation(job, _parts(job, layout, grid, store, emit))
    assert np.allclose(state.weights_d, rounds)
    warm = seconds[len(seconds) // 10 :]
    return {
        "seconds_per_round": statistics.median(warm),
        "rounds_per_second": len(warm) / sum(warm),
        "resident_growth_bytes_per_round": (memory[-1] - memory[len(memory) // 2])
        / max(len(memory) // 2, 1),
    }


def _job(num_sites: int, rounds: int) -> JobSpec:
    return job_file.parse(
        {
            "name": "trivial",
            "rounds": rounds,
            "model": {"factory": "none:none"},
            "data": {"source": "none:none"},
            "training": {"local_steps": 1},
            "evaluation": {"every": 0},
            "sites": [{"name": f"site-{i:04d}"} for i in range(num_sites)],
        }
    )


def _parts(
    job: JobSpec,
    layout: Layout,
    grid: InProcessGrid,
    store: MemoryStore,
    emit: events.Emit,
) -> ServerParts:
    clock, optimizer = SystemClock(), average(lr=1.0)
    run_id = RunId("benchmark")
    return ServerParts(
        run_id=run_id,
        engine="inproc",
        layout=layout,
        gather=PlainGather(
            job,
            grid=grid,
            weight_of=weight_of("examples"),
            combine=weighted_mean,
        ),
        initial_state=lambda: RunState(
            round_index=0,
            weights_d=np.zeros(layout.size, dtype=np.float32),
            integers_m=np.zeros(0, dtype=np.int64),
            optimizer=optimizer.init(layout.size),
            rounds_completed=0,
            lost_in_a_row=0,
        ),
        checkpoints=RunCheckpoints(
            store=store,
            prefix="",
            run_id=run_id,
            job=job_file.document(job),
            layout=layout,
            keep=3,
            emit=emit,
            clock=clock,
        ),
        draw_cohort=cohorts_of(job),
        optimizer=optimizer,
        guests=registry.begin(job, named_metric),
        clock=clock,
        emit=emit,
        stop_requested=lambda: False,
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def flower(num_sites: int, values: int, rounds: int) -> dict[str, object]:
    """Time the rounds of Flower's own simulation with its own FedAvg."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    warnings.simplefilter("ignore")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, _context: Context) -> Message:
        (record,) = message.content.array_records.values()
        added = ArrayRecord([array.numpy() + 1 for array in record.values()])
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": added, "metrics": metrics})
        return Message(content, reply_to=message)

    ends: list[float] = []
    final: list[np.ndarray] = []

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=num_sites,
            min_available_nodes=num_sites,
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord([np.zeros(values, dtype=np.float32)]),
            num_rounds=rounds,
            evaluate_fn=lambda _round, _arrays: ends.append(time.perf_counter()),
        )
        final.extend(array.numpy() for array in result.arrays.values())

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=num_sites,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    assert np.allclose(final[0], rounds)
    # The first interval holds the start of Ray's processes.
    seconds = [b - a for a, b in pairwise(ends[1:])]
    return {
        "seconds_per_round": statistics.median(seconds),
        "rounds_per_second": len(seconds) / sum(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 10, 100])
    parser.add_argument("--values", type=int, default=1000)
    parser.add_argument("--rounds", type=int, help="of ours; else more of fewer sites")
    parser.add_argument("--ours-only", action="store_true", help="without Flower's")
    args = parser.parse_args()
    print(json.dumps(machine.facts("rounds", **vars(args))), flush=True)
    print(f"{'sites':>6} {'ours':>12} {'Flower':>12} {'ratio':>8}", file=sys.stderr)
    for num_sites in args.sites:
        num_rounds = args.rounds or max(20, 4000 // num_sites)
        fast = ours(num_sites, args.values, num_rounds)
        if args.ours_only:
            print(json.dumps({"sites": num_sites, "ours": fast}), flush=True)
            continue
        slow = flower(num_sites, args.values, 12 if num_sites <= 100 else 5)
        ratio = slow["seconds_per_round"] / fast["seconds_per_round"]
        row = {"sites": num_sites, "ours": fast, "flower": slow, "ratio": ratio}
        print(json.dumps(row), flush=True)
        print(
            f"{num_sites:>6} {1e3 * fast['seconds_per_round']:>9.2f} ms "
            f"{1e3 * slow['seconds_per_round']:>9.1f} ms {ratio:>7.0f}x",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
