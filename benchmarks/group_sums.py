"""What robust rules over groups stop, and what they cost, under secure aggregation.

    python benchmarks/group_sums.py [--job jobs/poisoned.toml] [--sites 9]
        [--groups 3] [--liars 1] [--seeds 1] [--rounds 15] [--attacks none,flip]
        [--smoke]

The job's model, data and training, with so many sites. The last, or so many of the
last, keep to the protocol and lie about their updates in every round:

    none     nobody lies
    garbage  random words instead of masked ones, as in the job's own fault
    noise    a random vector, another one in each round
    flip     the liar's update, reversed
    push     one random direction, the same in every round

The last three have the largest norm that no check finds: n C less the updates of the
other sites in the sum, whose norms a liar takes to be its own; liars in one sum share
it. C, the clip norm, is twice the largest norm of a site's update in the first round of
an honest run.

For each attack the final accuracy on the held-out data of all sites, by the mean of one
sum over all sites and by the job's rule over groups: mean and range over the seeds,
which are the same for both. Then what a round costs: bytes, processor time, and the
number of sites in a sum. The default is short: one seed, nobody who lies, and `flip`.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np

from clients.privacy.ring_seal import RingRound
from clients.training.local_federation import Federation
from clients.training.site import Site, Work
from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import parts as wiring
from deploy.wiring.rehearsal import Rehearsal, rehearse
from deploy.wiring.run import ConnectedSites, Run
from federation import events
from federation.clock import SystemClock
from federation.errors import FederationError
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import AggregationSpec, JobSpec
from federation.protocols import LocalWeights, Trainer
from federation.vectors import ByteVector, HeaderVector, Vector, norm
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.measurement import subtract_

WorkOfSite = Callable[[RingRound], tuple[ByteVector, HeaderVector]]

ATTACKS = ("none", "garbage", "noise", "flip", "push")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to."""

    accuracy: float
    lost: int
    bytes_up: float
    bytes_down: float
    cpu_seconds: float


class Liar:
    """Adds to a site's masked words what makes of its update another vector."""

    def __init__(
        self, site: Site, attack: str, seed: int, liars: Collection[SiteId]
    ) -> None:
        self._attack, self._liars = attack, liars
        self._random = np.random.default_rng([seed, 1])  # Liars push the same way.
        self._push_d: Vector | None = None
        self._update_d: Vector = np.empty(0, np.float32)
        self._honest_work = replace_work(site, self._work)

    def _work(self, round_: RingRound) -> tuple[ByteVector, HeaderVector]:
        masking = round_.masking
        round_.work = _watched(round_.work, self._keep)
        words, header_h = self._honest_work(round_)
        if not words.size:
            return words, header_h
        if self._attack == "garbage":
            return self._random.integers(256, size=words.size, dtype=np.uint8), header_h
        ring = masking.contract.ring()
        told_d = self._update_d * min(1.0, ring.clip_norm / norm(self._update_d))
        steps_d = (self._lie(masking.contract) - told_d).astype(np.float64) * ring.scale
        view = words.view(ring.wire_dtype)
        view += np.rint(steps_d).astype(np.int64).astype(view.dtype)
        return words, header_h

    def _keep(self, update_d: Vector) -> None:
        self._update_d = update_d

    def _lie(self, contract: Contract) -> Vector:
        own, n = norm(self._update_d), contract.num_sites
        liars = sum(member.site in self._liars for member in contract.members)
        room = n * contract.clip_norm - (n - liars) * own
        most = max(contract.clip_norm, 0.95 * room / liars)
        if self._attack == "flip":
            return self._update_d * np.float32(-most / own)
        if self._attack == "noise" or self._push_d is None:
            self._push_d = self._random.standard_normal(
                self._update_d.size, dtype=np.float32
            )
        return self._push_d * np.float32(most / norm(self._push_d))


class _Watched:
    """A trainer whose update somebody keeps."""

    def __init__(
        self, trainer: Trainer, weights_d: Vector, keep: Callable[[Vector], None]
    ) -> None:
        self._trainer, self._weights_d, self._keep = trainer, weights_d, keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def fit(self, *args: Any, **named: Any) -> LocalWeights:
        result = self._trainer.fit(*args, **named)
        update_d = result.weights_d.copy()
        subtract_(update_d, self._weights_d)
        self._keep(update_d)
        return result


def run(
    job: JobSpec,
    attack: str,
    *,
    liars: int = 1,
    watch: Callable[[Vector], None] | None = None,
) -> Result:
    """Run a job whose last sites attack."""
    federation = wiring.build_federation(job)
    federation.pool.reserve(1)
    rehearsal = rehearse(federation, RunId("run"), None)
    store, clock = MemoryStore(), SystemClock()
    seen: list[events.Event] = []
    sites = {
        SiteId(spec.name): _site(federation, rehearsal, SiteId(spec.name), store)
        for spec in job.sites
    }
    if watch is not None:
        for site in sites.values():
            _watch(site, watch)
    elif attack != "none":
        last = [SiteId(spec.name) for spec in job.sites[-liars:]]
        for name in last:
            Liar(sites[name], attack, job.seed, last)
    start = time.process_time()
    with (
        wiring.torch_threads(job),
        InProcessGrid(sites, clock=clock, workers=1) as grid,
    ):
        run = Run(
            federation=federation,
            run_id=RunId("run"),
            clock=clock,
            store=store,
            emit=seen.append,
        )
        run.drive(ConnectedSites(engine="inproc", grid=grid), secret=rehearsal.secret)
    cpu = time.process_time() - start
    ends = [e for e in seen if isinstance(e, events.RoundFinished)]
    told = [e.pooled for e in seen if isinstance(e, events.ModelEvaluated)]
    return Result(
        accuracy=told[-1].accuracy,
        lost=sum(e.status != "completed" for e in ends),
        bytes_up=statistics.fmean(e.bytes_up for e in ends),
        bytes_down=statistics.fmean(e.bytes_down for e in ends),
        cpu_seconds=cpu / len(ends),
    )


def _site(
    federation: Federation,
    rehearsal: Rehearsal,
    name: SiteId,
    store: MemoryStore,
) -> Site:
    return federation.site(
        name,
        make_trainer=partial(federation.trainer, name),
        store=store,
        clock=SystemClock(),
        seal=rehearsal.seal(name, None),
        tells_all=False,
    )


def replace_work(site: Site, work: WorkOfSite) -> WorkOfSite:
    """Have a site do other work than its own, which is returned."""
    patched: Any = site._seal  # noqa: SLF001
    honest: WorkOfSite = patched._work  # noqa: SLF001  # A liar changes what it runs.
    patched._work = work  # noqa: SLF001
    return honest


def _watch(site: Site, keep: Callable[[Vector], None]) -> None:
    def work(round_: RingRound) -> tuple[ByteVector, HeaderVector]:
        round_.work = _watched(round_.work, keep)
        return honest(round_)

    honest = replace_work(site, work)


def _watched(work: Work, keep: Callable[[Vector], None]) -> Work:
    trainer: Any = _Watched(work.find_trainer(), work.task.weights_d, keep)
    return replace(work, find_trainer=lambda: trainer)


def jobs(
    path: str, *, sites: int, groups: int, rounds: int, seed: int
) -> list[JobSpec]:
    """The job by the mean of one sum, and by its rule over groups."""
    base = job_file.load(Path(path))
    named = tuple(
        replace(base.sites[0], name=f"site-{at:02d}") for at in range(1, sites + 1)
    )
    base = replace(
        base,
        seed=seed,
        rounds=rounds,
        sites=named,
        simulation=replace(base.simulation, faults=()),
        schedule=replace(base.schedule, max_lost_rounds=rounds),
    )
    secure = replace(base.privacy.secure_aggregation, enabled=True, clip_norm=100.0)
    norms: list[float] = []
    first = replace(
        base,
        rounds=1,
        aggregation=AggregationSpec(weights="uniform"),
        privacy=replace(base.privacy, secure_aggregation=secure),
    )
    run(first, "none", watch=lambda update_d: norms.append(norm(update_d)))
    secure = replace(secure, clip_norm=float(f"{2 * max(norms):.2g}"))
    whole = replace(
        first, rounds=rounds, privacy=replace(base.privacy, secure_aggregation=secure)
    )
    grouped = replace(secure, groups=groups)
    apart = replace(base, privacy=replace(base.privacy, secure_aggregation=grouped))
    return [whole, apart]


def measure(job: JobSpec, attack: str, liars: int) -> Result | None:
    """Run a job; None if the attack ends it without a model."""
    try:
        return run(job, attack, liars=liars)
    except FederationError as error:
        sys.stderr.write(f"{attack}: {error}\n")
        return None


def line(
    attack: str, of: str, jobs: Sequence[JobSpec], liars: int
) -> dict[str, object]:
    """Run a job with every seed; what it came to as a JSON line."""
    results = [measure(job, attack, liars) for job in jobs]
    known = [result for result in results if result is not None]
    accuracies = [result.accuracy for result in known] or [math.nan]
    return {
        "attack": attack,
        "of": of,
        "clip_norm": jobs[0].update_clip_norm,
        "accuracy": statistics.fmean(accuracies),
        "low": min(accuracies),
        "high": max(accuracies),
        "runs": len(jobs),
        "without_model": len(jobs) - len(known),
        "lost_rounds": sum(result.lost for result in known),
        "bytes_up": statistics.fmean([r.bytes_up for r in known] or [math.nan]),
        "bytes_down": statistics.fmean([r.bytes_down for r in known] or [math.nan]),
        "cpu_seconds": statistics.median([r.cpu_seconds for r in known] or [math.nan]),
    }


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="jobs/poisoned.toml")
    parser.add_argument("--sites", type=int, default=9)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--attacks", default="none,flip", help=",".join(ATTACKS))
    parser.add_argument("--smoke", action="store_true", help="one seed, one round")
    given = parser.parse_args()
    if given.smoke:
        given.seeds, given.rounds = 1, 1
    settings = {k: v for k, v in vars(given).items() if k != "smoke"}
    print(json.dumps(machine.facts("group_sums", **settings)), flush=True)
    by_seed = [
        jobs(
            given.job,
            sites=given.sites,
            groups=given.groups,
            rounds=given.rounds,
            seed=seed,
        )
        for seed in range(1, given.seeds + 1)
    ]
    rule = by_seed[0][1].aggregation.combine
    for attack in given.attacks.split(","):
        for at, of in enumerate(("mean", f"{rule} of groups")):
            found = line(attack, of, [both[at] for both in by_seed], given.liars)
            print(json.dumps(found), flush=True)
            sys.stderr.write(
                f"{attack:8} {of:24} {found['accuracy']:.2%} "
                f"({found['low']:.2%} to {found['high']:.2%}), "
                f"{found['lost_rounds']} rounds lost, "
                f"{found['without_model']} runs without a model\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
