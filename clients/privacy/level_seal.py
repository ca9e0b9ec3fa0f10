"""A site's seal where updates are rounded to few levels before they are masked.

See ``privacy.secagg.arithmetic.levels``. What rounding leaves out is added to the next
update (``residual``). Where a task has the words of the newest sum in place of a model,
the site computes the model from them.

Shape suffixes: d float values of the model, f those of a fragment.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from clients.privacy.cohort_seal import CohortSeal
from clients.privacy.masking import SealedUpdate
from clients.privacy.residual import Residual, stored
from clients.privacy.ring_seal import RESTARTED, Protection, RingRound, RingSeal
from clients.training.site import Work
from clients.training.site_state import Fact, KeptState
from federation.compression.fragments import fragment_of
from federation.compression.rotation import padded
from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import RoundTask, TaskKind
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import Arrays, Vector, Words
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.digits import finest_levels
from privacy.secagg.arithmetic.level_sum import rotation_of, sum_digest
from privacy.secagg.arithmetic.levels import (
    FIRST_BITS,
    LevelPlan,
    LevelSite,
    largest_step,
    open_levels,
)
from privacy.secagg.arithmetic.ring import WEIGHT_ERROR
from privacy.secagg.errors import NotSetUp
from privacy.secagg.protocol import train
from privacy.secagg.protocol.client import SiteSession


def seal_of(job: JobSpec, name: SiteId, protection: Protection) -> RingSeal:
    """Make the seal of a site of a job with secure aggregation."""
    if job.has_free_cohorts:
        return CohortSeal(name, protection, job)
    few = job.privacy.secure_aggregation.levels is not None
    return (LevelSeal if few else RingSeal)(name, protection)


@dataclass(slots=True)
class _Newest:
    """What outlives a round in memory.

    Attributes:
        plan: Round and levels of the newest update of this site.
        followed: Task in which this site took the newest step of a sum, and the sum's
            round.
    """

    plan: tuple[int, LevelPlan] | None = None
    followed: tuple[int, int] | None = None


class LevelSeal(RingSeal):
    """Answers leave masked; of each value, the number of its level."""

    def __init__(self, name: SiteId, protection: Protection) -> None:
        """Seal the answers of the site of this name."""
        super().__init__(name, protection)
        self._newest = _Newest()

    def _round(
        self, task: RoundTask, body: train.TrainBody, session: SiteSession, work: Work
    ) -> RingRound:
        return LevelRound(task, body, session, work, newest=self._newest)


@dataclass(eq=False)
class LevelRound(RingRound):
    """One round at a site, whose update leaves as numbers of levels."""

    _: KW_ONLY
    newest: _Newest
    _residual_d: Vector = field(init=False)
    _left: Residual = field(init=False)

    def check(self) -> None:
        """Check levels and steps; see ``check_plan``."""
        check_plan(
            self.session.contract,
            self.body.plan,
            round_index=self.task.round_index,
            trains=self.task.kind is TaskKind.TRAIN,
        )

    def model(self) -> Words:
        """Return the model as the certificate names it, computed here from a sum."""
        task, held = self.task, self.work.held
        if not held.takes_sums:
            return task.weights_d
        if not task.changed_to:
            return held.whole(task)
        if task.weights_d.size:
            self._follow()
        return held.receive(task)

    def _follow(self) -> None:
        """Take the step of the sum that a task carries, if it is the certified one.

        Raises:
            NotSetUp: The round of the sum is not the last one of this site.
            ProtocolError: The words are others than those that were certified.
        """
        task, newest, contract = self.task, self.newest, self.session.contract
        opened = self.session.opened(self.body.certificate)
        step = task.round_index, opened.round_index
        if step == newest.followed:
            return  # The same task once more, which is refused for that reason.
        if newest.plan is None or newest.plan[0] != opened.round_index:
            raise NotSetUp(RESTARTED)
        plan = newest.plan[1]
        digits = plan.digits(contract.num_sites)
        fragment = fragment_of(opened.round_index, contract.fragments)
        size, words_w = fragment.size(contract.num_values), task.weights_d
        if (
            words_w.dtype != np.uint64
            or words_w.shape != (digits.num_words(size),)
            or sum_digest(words_w) != opened.sum_digest
        ):
            raise ProtocolError(
                f"was sent a sum of round {opened.round_index} that is not the "
                "certified one"
            )
        divisor = self.body.divisor
        check_divisor(contract, len(opened.survivors), divisor)
        mean_f = open_levels(
            words_w,
            plan=plan,
            digits=digits,
            rotation=rotation_of(contract.run_id),
            size=size,
            num_updates=len(opened.survivors),
            divisor=divisor,
            allocate=self.work.held.allocate,
        ).mean_d
        self.work.held.follow(task, mean_f, fragment)
        newest.followed = step

    def begin(self, kept: KeptState, weights_d: Vector) -> Vector:
        """Settle what the round of the named state left out, and begin training.

        Of fragments that were not exchanged, the site's own values go on.
        """
        contract = self.session.contract
        opened = self.session.opened(self.body.certificate)
        before = stored(kept, contract)
        if before is None:
            self._residual_d = np.zeros(padded(contract.num_values), np.float32)
            return weights_d
        left_out = opened.leaves_out(before.round_index, self.session.number)
        self._residual_d = before.settled(contract, left_out=left_out)
        return weights_d if before.drift_d is None else weights_d + before.drift_d

    def update(
        self, weights_d: Vector, result: LocalWeights | LocalUpdate
    ) -> SealedUpdate:
        """Turn trained weights into masked digits; keep what these leave out.

        Raises:
            UpdateNotFinite: The update is not finite.
            UpdateOutOfRange: The site has more examples than the contract allows.
        """
        contract, plan = self.session.contract, self.body.plan
        assert plan is not None  # noqa: S101 -- as ``check`` has seen: the site trains
        round_index, residual_d = self.task.round_index, self._residual_d
        masking = self.masking
        weight = masking.weight(result)
        update_d, measured = masking.measured(weights_d, result)
        site = LevelSite(
            plan=plan,
            digits=plan.digits(contract.num_sites),
            rotation=rotation_of(contract.run_id),
            clip_norm=contract.clip_norm,
        )
        fragment = fragment_of(round_index, contract.fragments)
        is_whole = contract.fragments == 1
        residual_f = fragment.take(residual_d)
        sealed = site.seal_(
            fragment.take(update_d),
            weight=weight,
            residual_d=residual_f,
            masks=train.masks(masking.masks.vector),
            measured=measured if is_whole else None,
        )
        fragment.put_(residual_f, residual_d)
        for span in () if is_whole else fragment.spans(update_d.size):
            update_d[span] = 0  # What is left is the site's own until its turn.
        self._left = Residual(
            left_d=residual_d,
            words_w=sealed.words_w,
            plan=plan,
            round_index=round_index,
            drift_d=None if is_whole else update_d,
        )
        self.newest.plan = round_index, plan
        return SealedUpdate(
            words=sealed.masked_w.view(np.uint8),
            weight=weight,
            is_within=sealed.is_within,
            norm=measured.norm,
            slots={
                train.CLIPPED: sealed.num_clipped,
                train.ENERGY: sealed.energy / contract.clip_norm**2,
            },
        )

    def left(self) -> tuple[Arrays, Mapping[str, Fact]]:
        """Return what the words left out, for the next round."""
        return self._left.arrays(), self._left.facts()


def check_plan(
    contract: Contract, plan: LevelPlan | None, *, round_index: int, trains: bool
) -> None:
    """Check that a round's levels are those of the contract.

    Steps are free up to what honest sums give: they say how finely each site rounds,
    the same at all.

    Raises:
        ProtocolError: They are others.
    """
    if plan is None:
        if trains:
            raise ProtocolError("was sent no levels to round to")
        return
    first = finest_levels(contract.num_sites, FIRST_BITS)
    if not (trains and contract.levels) or plan.levels not in {contract.levels, first}:
        raise ProtocolError(
            f"was asked to round to {plan.levels} levels, and the contract says "
            f"{contract.levels or 'none'}"
        )
    fragment = fragment_of(round_index, contract.fragments)
    blocks = fragment.num_blocks(contract.num_values)
    if plan.steps_b.size != blocks:
        raise ProtocolError(f"was sent {plan.steps_b.size} steps for {blocks} blocks")
    largest, most = (
        float(plan.steps_b.max()),
        largest_step(plan.levels, clip_norm=contract.clip_norm),
    )
    if largest > most:
        raise ProtocolError(
            f"was sent a step of {largest:.4g}, and honest sums give at most {most:.4g}"
        )


def check_divisor(contract: Contract, num_updates: int, divisor: float) -> None:
    """Check the sum of the weights in a sum of so many updates.

    Raises:
        ProtocolError: Honest weights do not sum to it.
    """
    error = num_updates * WEIGHT_ERROR
    least = num_updates / contract.max_examples - error
    if contract.weight_rule == "uniform":
        least = num_updates
    if not (divisor > 0 and least <= divisor <= num_updates + error):
        raise ProtocolError(
            f"was sent a task in which the weights of {num_updates} updates sum to "
            f"{divisor}"
        )
