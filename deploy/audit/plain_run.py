"""The run of an audit without canaries, and attacks on its models by their loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients import randomness
from clients.audit.membership_scores import membership_scores, scores_of_persons
from clients.audit.observed import ObservedTrainer, Witness
from clients.data.datasets import Dataset
from clients.data.persons import numbered_alike
from clients.training.local_federation import Federation, SiteData
from deploy.audit.jobs import PlanSites, is_summed, ledger_of, plans_of, trainer_of
from deploy.audit.rounds import OpenStage, SecretStage, Stage, absent, run_rounds
from federation.errors import JobError
from federation.events import Emit
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import Clock, LocalWeights, RunState, Trainer
from federation.vectors import Vector
from monitoring.audit_findings import Membership
from privacy.dp import auditing

# Records of each kind that membership inference looks at, at most.
MAX_RECORDS = 20_000


class PlainRun:
    """A run of the job as it is, and attacks on its models."""

    def __init__(
        self,
        federation: Federation,
        plan_sites: PlanSites,
        names: Sequence[SiteId],
        clock: Clock,
    ) -> None:
        """Bring together what is attacked, and at which sites.

        Raises:
            JobError: The promise cannot be kept, or persons are protected and none is
                held out.
        """
        self._federation = federation
        self._clock = clock
        self._private = plan_sites(federation, clock)
        self._last: dict[SiteId, tuple[Vector, Any]] = {}
        # What no attacker sees is not attacked.
        self._seen = () if is_summed(federation.job) else names
        self._outside = {
            name: not_trained_on(federation.job, federation.site_data[name], name)
            for name in names
        }
        self._state: RunState | None = None

    def run(self, listeners: Sequence[Emit]) -> None:
        """Train, and keep the last model of each audited site, if it is seen."""
        trainers: dict[SiteId, Trainer] = {}
        plans = plans_of(self._private)
        for name, data in self._federation.site_data.items():
            plan = plans.get(name)
            ledger = (
                ledger_of(self._federation, name, plan, self._clock) if plan else None
            )
            trainer = trainer_of(self._federation, name, data, plan, ledger)
            if name in self._seen:
                trainer = ObservedTrainer(trainer, self._keep(name))
            trainers[name] = trainer
        self._state = run_rounds(self._stage(), trainers, listeners, self._clock)

    def _stage(self) -> Stage:
        if self._private is None or self._private.in_sum is None:
            return OpenStage(self._federation)
        return SecretStage(self._federation, self._private)

    def membership(self, name: SiteId) -> Membership:
        """Attack a site's records through the models that are seen."""
        state = self._state
        if state is None:
            raise ValueError("there is no model before the run")
        if name in self._seen and name not in self._last:
            raise absent(name, "")
        last = self._last.get(name)
        return Membership(
            final=self._roc((state.weights_d, state.integers_m), name),
            local=None if last is None else self._roc(last, name),
        )

    def _roc(self, model: tuple[Vector, Any], name: SiteId) -> auditing.Roc:
        train, _ = self._federation.site_data[name]
        return auditing.roc(
            self._score(model, train), self._score(model, self._outside[name])
        )

    def _keep(self, name: SiteId) -> Witness:
        def see(_round: int, _before_d: Vector, result: LocalWeights) -> None:
            self._last[name] = result.weights_d.copy(), result.integers_m.copy()

        return see

    def _score(self, model: tuple[Vector, Any], data: Dataset) -> NDArray[np.float64]:
        job = self._federation.job
        chosen = np.arange(len(data))
        if len(data) > MAX_RECORDS:
            rng = randomness.stream(job.seed, "audit")
            chosen = np.sort(rng.choice(len(data), MAX_RECORDS, replace=False))
        scores_n = membership_scores(
            self._federation.pool,
            *model,
            data,
            chosen=chosen,
            task=job.training.task,
            batch_size=job.evaluation.batch_size,
        )
        ids = data.persons
        if not job.privacy.differential_privacy.of_persons or ids is None:
            return scores_n
        return scores_of_persons(scores_n, ids[chosen])


def not_trained_on(job: JobSpec, data: SiteData, name: SiteId) -> Dataset:
    """Held-out records that stand for others; of persons who are not trained on.

    Raises:
        JobError: Persons are protected, and no such record names its person.
    """
    train, held_out = data
    if not job.privacy.differential_privacy.of_persons:
        return held_out
    ids, held_ids = train.persons, held_out.persons
    if ids is None or held_ids is None:
        raise JobError(
            f"site {name!r}: an audit of persons needs data that names the person of "
            "each record, held-out ones too",
            key="privacy.differential_privacy.unit",
        )
    trained, held = numbered_alike(ids, held_ids)
    kept = np.flatnonzero(~np.isin(held, trained))
    if len(kept) == 0:
        raise JobError(
            f"site {name!r}: an audit compares persons who are trained on with others, "
            "and every held-out person is trained on: hold out whole persons",
            key="privacy.differential_privacy.unit",
        )
    return held_out.subset(kept)
