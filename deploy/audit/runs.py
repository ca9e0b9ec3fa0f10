"""The run of an audit with canaries, and the attack on them.

It is the job's own rounds over the job's own trainers, in memory, as
``deploy.audit.rounds`` runs them. What wraps them is in ``clients.audit.canaries`` and
``clients.audit.observed``. The run without canaries is in ``deploy.audit.plain_run``.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clients.audit.canaries import CanariedData, CanaryScores, draw_canaries
from clients.audit.observed import ObservedTrainer, Witness
from clients.data.privacy_units import num_units
from clients.models.model_pool import ModelPool
from clients.privacy.site_plans import PrivateSites, SitePlan
from clients.training.local_federation import Federation, SiteData
from clients.training.private_steps import (
    sampling_rate,
    takes_private_steps,
    units_at_once,
)
from deploy.audit.jobs import (
    PlanSites,
    is_summed,
    ledger_of,
    meaning_of,
    plans_of,
    records_of_canary,
    round_weight,
    trainer_of,
    with_canaried_model,
    with_more_records,
    with_room_in_sums,
)
from deploy.audit.rounds import (
    OpenStage,
    SecretStage,
    Stage,
    run_rounds,
)
from federation.errors import JobError
from federation.events import Emit
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import Clock, LocalWeights, Trainer
from federation.vectors import Vector
from monitoring.audit_findings import (
    CurveFindings,
    Membership,
    Promise,
    SiteFindings,
)
from privacy.dp import accountant, auditing, curve_tests
from privacy.dp.auditing import Guesses
from privacy.dp.curve_tests import PValues
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp_sgd.clipping import choose

DEFAULT_CANARIES = 5_000
DEFAULT_CONFIDENCE = 0.95

# Guesses, half of them of each kind, only by the number of canaries: a bound for the
# best of several numbers would be none. In Gaussian noise 5 % gives about the highest
# bound, unless canaries are so few that the guesses themselves limit it.
_GUESSED_SHARE, _MOST_GUESSED_SHARE, _FEW_GUESSES = 0.05, 0.1, 500

# Guesses for the trade-off curve, likewise. A third gives about the smallest p-value
# for half the noise, and more than this number hardly change it.
_CURVE_SHARE, _MOST_CURVE_GUESSES = 1 / 3, 5_000

_FREE_DELTA = 1e-5  # Where nothing is promised.


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """How to attack.

    Attributes:
        sites: Whose promise is tested; empty for every site's.
        canaries: m, at each of them.
        confidence: Confidence of the bounds.
        random_bytes: Draws which canaries are in.
    """

    sites: Sequence[str] = ()
    canaries: int = DEFAULT_CANARIES
    confidence: float = DEFAULT_CONFIDENCE
    random_bytes: Callable[[int], bytes] = os.urandom


def guesses_for(num_canaries: int) -> int:
    """Number of guesses for a number of canaries."""
    few = min(_FEW_GUESSES, int(_MOST_GUESSED_SHARE * num_canaries))
    return max(few, int(_GUESSED_SHARE * num_canaries))


def curve_guesses_for(num_canaries: int) -> int:
    """Number of guesses that test the trade-off curve."""
    return min(_MOST_CURVE_GUESSES, int(_CURVE_SHARE * num_canaries))


class CanaryRun:
    """A run of the job with canaries in some sites' training data."""

    def __init__(
        self,
        federation: Federation,
        plan_sites: PlanSites,
        attack: Attack,
        names: Sequence[SiteId],
        clock: Clock,
    ) -> None:
        """Draw canaries for the sites that are named, and build the model for them.

        Raises:
            JobError: The data cannot carry canaries, or the promise cannot be kept
                with so many of them.
        """
        self._attack = attack
        self._clock = clock
        self._num_trained = federation.pool.num_trained
        apart = attack.canaries if is_summed(federation.job) else 0
        self._first = {name: place * apart for place, name in enumerate(names)}
        self._is_in = {
            name: draw_canaries(
                attack.canaries, attack.random_bytes(-(-attack.canaries // 8))
            )
            for name in names
        }
        if apart:
            job = with_room_in_sums(federation.job, attack.canaries)
            federation = replace(federation, job=job)
        job = with_canaried_model(
            federation, attack.canaries + max(*self._first.values(), 0)
        )
        pool = ModelPool(job)
        # Delta is for all that the job releases, evaluated or not.
        self._private = _planned(
            plan_sites, replace(federation, pool=pool), attack, clock
        )
        self._federation = replace(federation, job=job, pool=pool)
        self._scores = {
            name: CanaryScores(pool.layout, attack.canaries, first=first)
            for name, first in self._first.items()
        }
        self._trainers: dict[SiteId, Trainer] = {}
        self._ledgers: dict[SiteId, InMemoryLedger] = {}
        self._data: dict[SiteId, CanariedData] = {}
        self._rates: dict[SiteId, float] = {}

    @property
    def noise_shares(self) -> int | None:
        """Sites whose noise is in an opened sum; None where each has its own."""
        in_sum = None if self._private is None else self._private.in_sum
        return None if in_sum is None else in_sum.share.honest

    def run(self, listeners: Sequence[Emit]) -> None:
        """Train, and record what is visible along the canaries' coordinates."""
        stage = self._stage()
        for name in self._federation.site_data:
            job, data = self._canaried(name)
            federation = replace(self._federation, job=job)
            plan = self._plan(name)
            if plan is not None:
                self._ledgers[name] = ledger_of(federation, name, plan, self._clock)
            ledger = self._ledgers.get(name)
            trainer = trainer_of(federation, name, data, plan, ledger)
            scores = self._scores.get(name)
            if scores is not None and self.noise_shares is None:
                trainer = ObservedTrainer(trainer, _see_update(job, scores))
            self._trainers[name] = trainer
        run_rounds(stage, self._trainers, listeners, self._clock)

    def _stage(self) -> Stage:
        if self._private is None or self.noise_shares is None:
            return OpenStage(self._federation)
        # Accounting counts on so many shares: of the others the adversary knows some,
        # and some may be missing. Those of the sites in question are in the sum first.
        others = [
            name for name in self._federation.site_data if name not in self._is_in
        ]
        silent = [*self._is_in, *others][self.noise_shares :]
        return SecretStage(
            self._federation, self._private, silent=silent, see=self._see_sum
        )

    def _see_sum(self, mean_d: Vector) -> None:
        for scores in self._scores.values():
            scores.see_sum(mean_d)

    def _canaried(self, name: SiteId) -> tuple[JobSpec, SiteData]:
        """A site's job and data: with canaries, or only with codes."""
        job, none, num_empty = self._federation.job, np.zeros(0, np.bool_), 0
        train, held_out = self._federation.site_data[name]
        is_in_m = self._is_in.get(name, none)
        if name in self._is_in:
            own, num_own = job, num_units(job, train)
            job, num_empty = with_more_records(own, num_own, len(is_in_m))
            if takes_private_steps(own):
                rate = sampling_rate(job, num_own + len(is_in_m) + num_empty)
                self._rates[name] = rate / sampling_rate(own, num_own)
        canaried = CanariedData(
            train,
            is_in_m,
            task=job.training.task,
            first=self._first.get(name, 0),
            records_each=records_of_canary(job),
            num_empty=num_empty,
            of_persons=job.privacy.differential_privacy.of_persons,
        )
        self._data[name] = canaried
        return job, (canaried, CanariedData(held_out, none, task=job.training.task))

    def _plan(self, name: SiteId) -> SitePlan | None:
        """A site's plan, with the clipping that is chosen for the model as it is."""
        plan = plans_of(self._private).get(name)
        if plan is None or plan.training is None:
            return None
        clipping = plan.training.clipping
        if clipping == "auto":
            job = self._federation.job
            private, batch_size = job.privacy.differential_privacy, units_at_once(job)
            if private.of_persons:
                batch_size *= private.records_per_person
            clipping = choose(self._num_trained, batch_size=batch_size)
        return replace(plan, training=replace(plan.training, clipping=clipping))

    def findings(self, name: SiteId, membership: Membership) -> SiteFindings:
        """Collect the findings of a site."""
        scores_m, is_in_m = self._scores[name].scores_m, self._is_in[name]
        promise = self._promise(name)
        num_guesses = guesses_for(len(scores_m))
        return SiteFindings(
            site=name,
            promise=promise,
            guesses=auditing.guess(scores_m, is_in_m, num_guesses=num_guesses),
            curve=self._curve(name),
            num_audited=len(self._scores),
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

    def _curve(self, name: SiteId) -> CurveFindings | None:
        """Test the curve of all that the site's ledger was charged for training."""
        if name not in self._ledgers:
            return None
        charges = self._ledgers[name].charges()
        events = [c.event for c in charges if c.purpose == "train"]
        curve, is_in_m = accountant.trade_off(events), self._is_in[name]

        def test(scores_m: NDArray[np.float64]) -> tuple[Guesses, PValues]:
            guesses = auditing.guess(
                scores_m, is_in_m, num_guesses=curve_guesses_for(len(scores_m))
            )
            return guesses, PValues(
                one_run=curve_tests.one_run(curve, guesses),
                independent=curve_tests.independent(curve, scores_m, is_in_m),
            )

        guesses, p_values = test(self._scores[name].scores_m)
        _, without_noise = test(curve_tests.scores_without_noise(is_in_m, events))
        # What a site keeps of its steps carries noise over to later rounds, which is
        # post-processing.
        training = self._federation.job.training
        is_kept = training.optimizer.state == "keep" or training.overlap_steps > 0
        products_o = self._scores[name].products_m[~is_in_m]
        return CurveFindings(
            guesses=guesses,
            p_values=p_values,
            without_noise=without_noise,
            repeated_noise=1.0 if is_kept else curve_tests.repeated_noise(products_o),
            sampling=curve_tests.sampling(
                self._data[name].draws_u, events, share_of_rate=self._rates[name]
            ),
        )

    def _promise(self, name: SiteId) -> Promise:
        spent = self._trainers[name].spent()
        if spent is None:
            return Promise(epsilon=float("inf"), delta=_FREE_DELTA, terms="none")
        private = self._federation.job.privacy.differential_privacy
        relation, sampling = meaning_of(private)
        terms = f"unit {private.unit}, neighbours: {relation}; "
        terms += f"accountant pld; {sampling}"
        if self.noise_shares is not None:
            terms += f"; noise of {self.noise_shares} sites in each sum"
        return Promise(epsilon=spent.epsilon, delta=spent.delta, terms=terms)


def _planned(
    plan_sites: PlanSites, federation: Federation, attack: Attack, clock: Clock
) -> PrivateSites | None:
    """Plan for a model with canaries; the job's own model could be planned for.

    Raises:
        JobError: There are too many of them for a grid of the job's bits.
    """
    try:
        return plan_sites(federation, clock)
    except JobError as error:
        raise JobError(
            f"with {attack.canaries} canaries at each audited site (fewer may be "
            f"enough): {error.reason}",
            key=error.key,
        ) from error


def _see_update(job: JobSpec, scores: CanaryScores) -> Witness:
    def see(round_index: int, weights_d: Vector, result: LocalWeights) -> None:
        weight = round_weight(job, round_index)
        scores.see(weights_d, result.weights_d, weight=weight)

    return see
