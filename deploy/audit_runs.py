"""The two runs of an audit: one with canaries, one without.

Both are the job's own rounds over the job's own trainers, in memory. What wraps them
is in ``clients.canaries`` and ``clients.observed``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients import randomness
from clients.budget import BudgetedTrainer, Releases
from clients.canaries import (
    CanariedData,
    CanaryScores,
    draw_canaries,
)
from clients.datasets import Dataset
from clients.membership import membership_scores
from clients.model_pool import ModelPool
from clients.observed import ObservedTrainer
from clients.trainer import TorchTrainer
from cloud_adapters.inproc_grid import InProcessGrid
from cloud_adapters.storage.memory import MemoryStore
from deploy import wiring
from deploy.audit_jobs import with_canaried_model, with_more_records
from deploy.private_sites import SitePlan
from deploy.wiring import Federation, SiteData
from federation.clock import SystemClock
from federation.coordinator import run_federation
from federation.errors import SiteError
from federation.events import Emit, Event, SiteFailed
from federation.ids import RunId, SiteId, new_run_id
from federation.job import JobSpec
from federation.messages import FailureKind
from federation.protocols import LocalResult, RunState, Trainer
from federation.vectors import Vector
from monitoring.audit_findings import Membership, Promise, SiteFindings
from privacy.dp import accountant, auditing
from privacy.dp.held_out import MAX_LOSS
from privacy.dp.ledger import InMemoryLedger
from privacy.dp.ledger_format import Terms
from privacy.dp_sgd.clipping import choose

DEFAULT_CANARIES = 5_000
DEFAULT_CONFIDENCE = 0.95

# Guesses, half of them of each kind, by the number of canaries alone: a bound for the
# best of several numbers would be none. In Gaussian noise 5 % gives about the highest
# bound, unless canaries are so few that the guesses themselves limit it.
_GUESSED_SHARE, _MOST_GUESSED_SHARE, _FEW_GUESSES = 0.05, 0.1, 500

# Records of each kind that membership inference looks at, at most.
MAX_RECORDS = 20_000

_FREE_DELTA = 1e-5  # Where nothing is promised.


Plans = Mapping[SiteId, SitePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """How to attack.

    Attributes:
        sites: Whose promise is put to the test; empty for every site's.
        canaries: m, at each of them.
        confidence: Of the bounds.
        random_bytes: Draws which canaries are in.
    """

    sites: Sequence[str] = ()
    canaries: int = DEFAULT_CANARIES
    confidence: float = DEFAULT_CONFIDENCE
    random_bytes: Callable[[int], bytes] = os.urandom


def guesses_for(num_canaries: int) -> int:
    """Number of guesses about so many canaries."""
    few = min(_FEW_GUESSES, int(_MOST_GUESSED_SHARE * num_canaries))
    return max(few, int(_GUESSED_SHARE * num_canaries))


class CanaryRun:
    """A run of the job with canaries in some sites' training data."""

    def __init__(
        self,
        federation: Federation,
        plans: Plans,
        attack: Attack,
        names: Sequence[SiteId],
    ) -> None:
        """Draw canaries for the sites that are named, and build the model for them.

        Raises:
            JobError: The data cannot carry canaries.
        """
        self._attack = attack
        self._plans = plans
        self._num_trained = federation.pool.num_trained
        job = with_canaried_model(federation, attack.canaries)
        pool = ModelPool(job)
        num_bytes = -(-attack.canaries // 8)
        self._is_in = {
            name: draw_canaries(attack.canaries, attack.random_bytes(num_bytes))
            for name in names
        }
        self._federation = replace(federation, job=job, pool=pool)
        self._scores = {n: CanaryScores(pool.layout, attack.canaries) for n in names}
        self._trainers: dict[SiteId, Trainer] = {}

    def run(self, listeners: Sequence[Emit]) -> None:
        """Train, and note what each site sends along the canaries' coordinates."""
        for name in self._federation.site_data:
            job, data = self._canaried(name)
            federation = replace(self._federation, job=job)
            trainer = _trainer(federation, name, data, self._plan(name))
            scores = self._scores.get(name)
            if scores is not None:
                trainer = ObservedTrainer(trainer, _see_update(scores))
            self._trainers[name] = trainer
        _run(self._federation, self._trainers, listeners)

    def _canaried(self, name: SiteId) -> tuple[JobSpec, SiteData]:
        """A site's job and data: with canaries, or with codes alone."""
        job, is_in_m, num_empty = self._federation.job, np.zeros(0, np.bool_), 0
        train, held_out = self._federation.site_data[name]
        if name in self._is_in:
            is_in_m = self._is_in[name]
            job, num_empty = with_more_records(job, len(train), len(is_in_m))
        # What is out has no gradient, and so has what fills up.
        is_in_m = np.append(is_in_m, np.zeros(num_empty, np.bool_))
        task, none = job.training.task, np.zeros(0, np.bool_)
        return job, (
            CanariedData(train, is_in_m, task=task),
            CanariedData(held_out, none, task=task),
        )

    def _plan(self, name: SiteId) -> SitePlan | None:
        """A site's plan, with the clipping that is chosen for the model as it is."""
        plan = self._plans.get(name)
        if plan is None or plan.training is None:
            return None
        clipping = plan.training.clipping
        if clipping == "auto":
            batch_size = self._federation.job.training.batch_size
            clipping = choose(self._num_trained, batch_size=batch_size)
        return replace(plan, training=replace(plan.training, clipping=clipping))

    def findings(self, name: SiteId, membership: Membership) -> SiteFindings:
        """Put together what is known of a site."""
        scores_m, is_in_m = self._scores[name].scores_m, self._is_in[name]
        promise = self._promise(name)
        num_guesses = guesses_for(len(scores_m))
        return SiteFindings(
            site=name,
            promise=promise,
            guesses=auditing.guess(scores_m, is_in_m, num_guesses=num_guesses),
            confidence=self._attack.confidence,
            scores_m=scores_m,
            is_in_m=is_in_m,
            canaries=auditing.roc(scores_m[is_in_m], scores_m[~is_in_m]),
            independent_bound=auditing.epsilon_of_independent(
                scores_m[is_in_m],
                scores_m[~is_in_m],
                delta=promise.delta,
                confidence=self._attack.confidence,
            ),
            membership=membership,
        )

    def _promise(self, name: SiteId) -> Promise:
        spent = self._trainers[name].spent()
        if spent is None:
            return Promise(epsilon=float("inf"), delta=_FREE_DELTA, terms="none")
        unit = self._federation.job.privacy.differential_privacy.unit
        terms = f"unit {unit}, neighbours: {accountant.NEIGHBOURING_RELATION}; "
        terms += f"accountant pld; {accountant.SAMPLING_ASSUMPTION}"
        return Promise(epsilon=spent.epsilon, delta=spent.delta, terms=terms)


class PlainRun:
    """A run of the job as it is, and attacks on its models."""

    def __init__(
        self, federation: Federation, plans: Plans, names: Sequence[SiteId]
    ) -> None:
        """Bring together what is attacked, and at which sites."""
        self._federation = federation
        self._plans = plans
        self._last: dict[SiteId, tuple[Vector, Any]] = {}
        self._names = names
        self._state: RunState | None = None

    def run(self, listeners: Sequence[Emit]) -> None:
        """Train, and keep the last model of each audited site."""
        trainers: dict[SiteId, Trainer] = {}
        for name, data in self._federation.site_data.items():
            trainer = _trainer(self._federation, name, data, self._plans.get(name))
            if name in self._names:
                trainer = ObservedTrainer(trainer, self._keep(name))
            trainers[name] = trainer
        self._state = _run(self._federation, trainers, listeners)

    def membership(self, name: SiteId) -> Membership:
        """Attack a site's records through both models."""
        state = self._state
        if state is None:
            raise ValueError("there is no model before the run")
        if name not in self._last:
            raise _absent(name, "")
        train, held_out = self._federation.site_data[name]
        rocs = []
        for model in ((state.weights_d, state.integers_m), self._last[name]):
            members, others = (self._score(model, data) for data in (train, held_out))
            rocs.append(auditing.roc(members, others))
        return Membership(final=rocs[0], local=rocs[1])

    def _keep(self, name: SiteId) -> Callable[[Vector, LocalResult], None]:
        def see(_: Vector, result: LocalResult) -> None:
            self._last[name] = result.weights_d.copy(), result.integers_m.copy()

        return see

    def _score(self, model: tuple[Vector, Any], data: Dataset) -> NDArray[np.float64]:
        job = self._federation.job
        chosen = np.arange(len(data))
        if len(data) > MAX_RECORDS:
            rng = randomness.stream(job.seed, "audit")
            chosen = np.sort(rng.choice(len(data), MAX_RECORDS, replace=False))
        return membership_scores(
            self._federation.pool,
            *model,
            data,
            chosen=chosen,
            task=job.training.task,
            batch_size=job.evaluation.batch_size,
        )


def _trainer(
    federation: Federation,
    name: SiteId,
    data: SiteData,
    plan: SitePlan | None,
) -> Trainer:
    """Make a site's trainer as a run does, with a ledger that nobody keeps."""
    train, held_out = data
    trainer = TorchTrainer(
        federation.job,
        name,
        pool=federation.pool,
        train=train,
        held_out=held_out,
        private=None if plan is None else plan.training,
    )
    if plan is None:
        return trainer
    terms = Terms(
        run_id=throwaway_id(),
        site=name,
        job_digest="0" * 64,
        delta=plan.delta,
        epsilon_cap=plan.epsilon_cap,
        unit=federation.job.privacy.differential_privacy.unit,
    )
    return BudgetedTrainer(
        trainer,
        InMemoryLedger(terms, clock=SystemClock()),
        Releases(
            round_event=plan.round_event, held_out=plan.held_out, max_loss=MAX_LOSS
        ),
    )


def _see_update(scores: CanaryScores) -> Callable[[Vector, LocalResult], None]:
    return lambda weights_d, result: scores.see(weights_d, result.weights_d)


def _run(
    federation: Federation,
    trainers: Mapping[SiteId, Trainer],
    listeners: Sequence[Emit],
) -> RunState:
    """Run the job's rounds in this process and keep nothing.

    Raises:
        SiteError: A site failed in some round: the promises were not put to the test
            as they were made.
    """
    clock, run_id, store = SystemClock(), throwaway_id(), MemoryStore()
    failures: list[SiteFailed] = []

    def emit(event: Event) -> None:
        # What a spent budget forbids was not released, and is not to be audited.
        if isinstance(event, SiteFailed) and event.kind is not FailureKind.BUDGET:
            failures.append(event)
        for listener in listeners:
            listener(event)

    sites = {
        name: federation.site(
            name, make_trainer=_always(trainer), store=store, clock=clock
        )
        for name, trainer in trainers.items()
    }
    workers = wiring.num_workers(federation.job)
    with InProcessGrid(sites, clock=clock, workers=workers) as grid:
        parts = wiring.build_server(
            federation,
            run_id=run_id,
            engine="inproc",
            gather=wiring.plain_gather(federation, run_id, grid),
            store=store,
            clock=clock,
            emit=emit,
            stop_requested=lambda: bool(failures),
        )
        try:
            state = run_federation(federation.job, parts)
        finally:
            if failures:
                raise _absent(failures[0].site, failures[0].message)
    return state


def throwaway_id() -> RunId:
    """Name a run that nobody keeps."""
    return new_run_id(SystemClock().now(), os.urandom(3))


def _always(trainer: Trainer) -> Callable[[], Trainer]:
    return lambda: trainer


def _absent(name: str, message: str) -> SiteError:
    why = f": {message}" if message else ""
    return SiteError(f"site {name!r} did not take part in the audit as it should{why}")
