"""Sums of one round: everything that is added up besides the updates.

Shape suffixes: m integer values of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from federation.compression.fragments import WHOLE, Fragment
from federation.events import Event, RoundFinished, RunStarted
from federation.ids import SiteId
from federation.messages import (
    NO_ANCHOR,
    LedgerAnchor,
    MetricSums,
    Phase,
    PrivacySpent,
    Reply,
    SiteUpdate,
)
from federation.protocols import Clock, ModelChange
from federation.resources import CLOCK, Usage, UsageMeter
from federation.vectors import IntegerVector, Layout, Role, Words


@dataclass(kw_only=True, eq=False)
class RoundSums:
    """Bytes, metrics, privacy spent, clipping and seconds.

    Attributes:
        clock: Time.
        start: When the round began, on the monotonic clock.
        meter: Measures what the round takes of the aggregator.
        bytes_down: To all sites so far.
        bytes_up: From all sites so far.
        inside_down: Between relays and their sites so far.
        inside_up: The same, towards the relays.
        training: Pooled over the sites, taken while they trained.
        evaluations: What each site made of the model, where that is known.
        secret_evaluation: What they all made of it, where only that is known.
        evaluators: Whose results these are, if not those of all who answered.
        epsilon: Largest that a site has spent; None without differential privacy.
        anchors: How many charges the ledger of each site held that answered.
        update_norm: Euclidean norm of the combined update, once it is known.
        update_clip: What each site's update was clipped to, in weight units, where
            that is agreed upon.
        next_clip: What they are clipped to in the next round, where that adapts.
        opened_w: Words of the opened sum, where sites compute the model from them.
        change: What sites that have the round's model are sent of the next one.
        fragment: The part of the model that the combined update is of.
        phases: Where the aggregator's time went.
        last_trained: How long the site trained that answered last; None if sites do
            not say.
    """

    clock: Clock
    start: float
    meter: UsageMeter = CLOCK
    bytes_down: int = 0
    bytes_up: int = 0
    inside_down: int = 0
    inside_up: int = 0
    training: MetricSums | None = None
    evaluations: dict[SiteId, MetricSums] = field(default_factory=dict)
    secret_evaluation: MetricSums | None = None
    evaluators: tuple[SiteId, ...] = ()
    epsilon: float | None = None
    anchors: dict[SiteId, LedgerAnchor] = field(default_factory=dict)
    update_norm: float | None = None
    update_clip: float | None = None
    next_clip: float | None = None
    opened_w: Words | None = None
    change: ModelChange | None = None
    fragment: Fragment = WHOLE
    phases: list[Phase] = field(default_factory=list)
    last_trained: float | None = None

    def __post_init__(self) -> None:
        """Start measuring."""
        self.usage = Usage(self.clock, self.meter)
        self._phase_start = self.start
        self._largest_m: IntegerVector | None = None

    def add_bytes(self, reply: Reply) -> None:
        """Add the bytes of a reply and its task, for any reply."""
        self.bytes_down += reply.bytes_down
        self.bytes_up += reply.bytes_up
        self.inside_down += reply.inside_down
        self.inside_up += reply.inside_up

    def add_update(self, update: SiteUpdate, *, is_fresh: bool) -> None:
        """Add the report of a sound update, besides its vector.

        Args:
            update: Its counts are added, and its vector is not touched.
            is_fresh: Whether the site evaluated the model that the round began with.
        """
        self.add_spent(update.site, update.spent)
        if update.training is not None:
            self.training = _pool(self.training, update.training)
        if update.evaluation is not None and is_fresh:
            self.evaluations[update.site] = update.evaluation
        if not update.integers_m.size:
            return
        if self._largest_m is None:
            self._largest_m = update.integers_m.copy()
        else:
            np.maximum(self._largest_m, update.integers_m, out=self._largest_m)

    def add_spent(self, site: SiteId, spent: PrivacySpent | None) -> None:
        """Record the spending in a site's privacy ledger."""
        if spent is not None:
            self.epsilon = max(self.epsilon or 0.0, spent.epsilon)
            before = self.anchors.get(site, NO_ANCHOR)
            self.anchors[site] = before.joined(spent.anchor)

    def pooled_evaluation(self) -> MetricSums | None:
        """The results of all sites that evaluated the model."""
        return reduce(_pool, self.evaluations.values(), self.secret_evaluation)

    def combined_integers(
        self, integers_m: IntegerVector, layout: Layout
    ) -> IntegerVector:
        """Integer values after the round: the largest where the role is ``max``."""
        if self._largest_m is None:
            return integers_m
        return np.where(layout.integer_mask(Role.MAX), self._largest_m, integers_m)

    def end_phase(self, name: str) -> None:
        """Note that the aggregator's time since the last note went to ``name``."""
        now = self.clock.monotonic()
        self.phases.append(
            Phase(
                name=name,
                start_seconds=self._phase_start - self.start,
                seconds=now - self._phase_start,
            )
        )
        self._phase_start = now


def _pool(total: MetricSums | None, more: MetricSums) -> MetricSums:
    return more if total is None else total + more


# What a round is called after which the model has changed.
COMPLETED = "completed"


def completed_rounds(events: Iterable[Event]) -> int:
    """Count the rounds after which the model changed, each of them once.

    A coordinator that resumes repeats the rounds after its checkpoint: what it says of
    them replaces what the one before it said.

    Args:
        events: Events of all coordinators of one run, in their order.
    """
    completed: set[int] = set()
    for event in events:
        match event:
            case RunStarted(first_round=first):
                completed = {index for index in completed if index < first}
            case RoundFinished(round_index=index, status=status):
                completed |= {index} if status == COMPLETED else set()
            case _:
                pass
    return len(completed)
