"""Verdicts of one round: which sites were asked and answered, and what counts.

Pure: messages in, verdicts out. Everything that a site may do wrong is decided
here, so that the round loop handles sound updates only. One thing only their use shows:
whether all values are finite, which the rule that combines them finds out.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from federation.compression.codec import IDENTITY, Codec
from federation.epsilon_text import format_epsilon
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    SecureAnswer,
    SecureStep,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import Suspicions
from federation.rounds.schedule import SURPLUS, OpenTask
from federation.vectors import Layout

_INT64 = np.dtype(np.int64)


@dataclass(kw_only=True, eq=False)
class RoundVerdicts:
    """The answers to the tasks of one round.

    Each asked site is open until it is settled: by its first sound answer, by its
    own or the grid's word that it failed, or by an answer that must not be counted.
    Messages of strangers, of other rounds and second answers settle nothing.

    Attributes:
        kind: What the sites were asked for.
        cohort: Who was asked.
        layout: Layout of the model.
        in_secret: Whether there is secure aggregation: then the only sound answer is
            a ``MaskedUpdate``.
        based_on: The round whose model answers are based on; by default the one
            before.
        codec: In whose words answers come.
        codecs: Those of sites that send other places, by site.
        epsilon_cap: What no site's ledger can have spent; 0 without differential
            privacy, None for any.
        complaints: What is wrong with each answer that does not count, or why there
            is none, with the name of the site before it.
        out_of_budget: Those of sites whose privacy budget does not allow the round.
        suspicions: What all rounds have shown of sites by now; None if this round has
            shown nothing.
    """

    run_id: RunId
    round_index: int
    kind: TaskKind
    cohort: Sequence[SiteId]
    layout: Layout
    in_secret: bool = False
    based_on: int | None = None
    codec: Codec = IDENTITY
    codecs: Mapping[SiteId, Codec] = field(default_factory=dict)
    epsilon_cap: float | None = None
    complaints: list[str] = field(init=False, default_factory=list)
    out_of_budget: list[str] = field(init=False, default_factory=list)
    suspicions: Suspicions | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Open the round."""
        based_on = self.round_index - 1 if self.based_on is None else self.based_on
        # Of each site the round that it was asked in, and the model that it was sent.
        self._open = dict.fromkeys(self.cohort, (self.round_index, based_on))
        self._carried: Collection[OpenTask] = ()
        self._asked = frozenset(self.cohort)
        self._overdue: set[SiteId] = set()
        self._answered: list[SiteId] = []
        self._failed: Counter[FailureKind] = Counter()

    @property
    def answered(self) -> tuple[SiteId, ...]:
        """Sites whose answer counts, in the order of arrival."""
        return tuple(self._answered)

    @property
    def num_answered(self) -> int:
        """Number of sites whose answer counts."""
        return len(self._answered)

    @property
    def failed(self) -> tuple[tuple[str, int], ...]:
        """Refused or missing answers by kind."""
        return tuple(sorted((kind.value, n) for kind, n in self._failed.items()))

    def carry(self, tasks: Collection[OpenTask]) -> None:
        """Expect answers to open tasks; those that stay open are not overdue."""
        self._carried = tasks
        for task in tasks:
            self._open[task.site] = task.round_index, task.based_on
        self._asked |= self._open.keys()

    def accept(self, message: SiteMessage) -> SiteFailure | None:
        """Judge a message.

        Returns:
            None if it is a sound answer, which may be used once and now; otherwise
            what is wrong with it.
        """
        failure = self._judge_stray(message)
        if isinstance(message, SiteFailure) and message.kind is FailureKind.SURPLUS:
            failure = failure and message
        if failure is None:
            _, based_on = self._open.pop(message.site)
            failure = self._judge_answer(message, based_on)
            if failure is None:
                self._answered.append(message.site)
                return None
            if failure.kind is FailureKind.DEADLINE:
                self._overdue.add(message.site)
        return self._count(failure)

    def revoke(
        self, site: SiteId, reason: str, kind: FailureKind = FailureKind.INVALID
    ) -> SiteFailure:
        """Refuse an accepted answer, for a reason that only its use showed."""
        self._answered.remove(site)
        return self._count(self._failure(site, kind, reason))

    def leave_out(self, site: SiteId, reason: str) -> SiteFailure:
        """Settle a site of the cohort that is not asked."""
        failure = self._invalid(site, f"left out: {reason}")
        self.accept(failure)
        return failure

    def accept_step(
        self, message: SiteMessage, step: SecureStep, round_index: int | None = None
    ) -> SiteFailure | None:
        """Judge an answer to a step of secure aggregation beside the round's tasks.

        Args:
            message: The answer.
            step: What was asked.
            round_index: The round of the sum; this one by default.

        Returns:
            None if it may be used; otherwise what is wrong with it. A site that fails
            here fails in this round, also if its update is in the sum.
        """
        if isinstance(message, SiteFailure) and message.kind is FailureKind.SURPLUS:
            return message
        asked_in = self.round_index if round_index is None else round_index
        is_overdue = isinstance(message, MaskedUpdate) and message.site in self._overdue
        if is_overdue or 0 < message.round_index < asked_in:  # Setups have no round.
            text = f"answered round {message.round_index} too late"
            return self.fail_step(message.site, step, text, FailureKind.LATE)
        if isinstance(message, SecureAnswer) and message.step is step:
            return None
        if isinstance(message, SiteFailure):
            if message.kind is FailureKind.LEAVING:
                self._open.pop(message.site, None)  # It is asked nothing more.
            return self.fail_step(message.site, step, message.message, message.kind)
        return self.fail_step(message.site, step, "sent the wrong kind of answer")

    def fail_step(
        self,
        site: SiteId,
        step: SecureStep,
        reason: str,
        kind: FailureKind = FailureKind.INVALID,
    ) -> SiteFailure:
        """Count an answer to a step that may not be used."""
        return self._count(self._failure(site, kind, f"{step.value}: {reason}"))

    def close(self, surplus: Collection[SiteId] = ()) -> list[SiteFailure]:
        """End the round: every site that is still open has missed the deadline.

        Args:
            surplus: Those that have not, since the round needs no answer of theirs.
        """
        for task in self._carried:
            self._open.pop(task.site, None)
        missing = [
            self.surplus(site)
            if site in surplus
            else self._failure(site, FailureKind.DEADLINE, "gave no valid answer")
            for site in self._open
        ]
        missing = [self._count(failure) for failure in missing]
        self._overdue.update(self._open)
        self._open.clear()
        return missing

    def surplus(self, site: SiteId) -> SiteFailure:
        """Say of a site that others had answered before it."""
        return self._failure(site, FailureKind.SURPLUS, SURPLUS)

    def _count(self, failure: SiteFailure) -> SiteFailure:
        self._failed[failure.kind] += 1
        complaint = f"{failure.site}: {failure.message}"
        self.complaints.append(complaint)
        if failure.kind is FailureKind.BUDGET:
            self.out_of_budget.append(complaint)
        return failure

    def _judge_stray(self, message: SiteMessage) -> SiteFailure | None:
        """Find a message that answers no open question of this round."""
        site, of_round = message.site, message.round_index
        if message.run_id != self.run_id:
            text = f"answered run {message.run_id}, not {self.run_id}"
            return self._failure(site, FailureKind.UNKNOWN, text)
        asked_in, _ = self._open.get(site, (self.round_index, 0))
        if of_round != asked_in:
            early = of_round > self.round_index
            kind = FailureKind.INVALID if early else FailureKind.LATE
            text = f"answered round {of_round} in round {self.round_index}"
            return self._failure(site, kind, text)
        if site not in self._asked:
            return self._failure(site, FailureKind.UNKNOWN, "was not asked")
        if site in self._overdue:
            text = "answered after its deadline"
            return self._failure(site, FailureKind.LATE, text)
        if site not in self._open:
            return self._failure(site, FailureKind.DUPLICATE, "answered twice")
        return None

    def _judge_answer(self, message: SiteMessage, based_on: int) -> SiteFailure | None:
        if isinstance(message, SiteFailure):
            return message
        if not isinstance(message, SecureAnswer) and (
            (message.based_on, message.fragment) != (based_on, 0)
        ):
            text = (
                f"sent fragment {message.fragment} of what is based on the model of "
                f"round {message.based_on}, not the whole of {based_on}"
            )
            return self._invalid(message.site, text)
        spent = None if isinstance(message, SecureAnswer) else message.spent
        if spent is not None and self.epsilon_cap is not None:
            # After a recovery a ledger may be above its cap, and then trains no more.
            told = spent.epsilon if self.kind is TaskKind.TRAIN else 0.0
            told = max(told, spent.held_out_epsilon or 0.0)
            if told > self.epsilon_cap:
                text = (
                    f"states epsilon {format_epsilon(told)}, above {self.epsilon_cap:g}"
                )
                return self._invalid(message.site, text)
        if self.in_secret or isinstance(message, MaskedUpdate | SecureAnswer):
            return self._judge_secret(message)
        asked = TaskKind.TRAIN if isinstance(message, SiteUpdate) else TaskKind.EVALUATE
        if asked is not self.kind:
            text = f"answered {asked.value} but its task was to {self.kind.value}"
            return self._invalid(message.site, text)
        return self._judge_update(message) if isinstance(message, SiteUpdate) else None

    def _judge_secret(self, message: SiteMessage) -> SiteFailure | None:
        if not self.in_secret:
            text = "sent a masked answer, but the job has no secure aggregation"
        elif isinstance(message, SecureAnswer):
            text = "declined to answer"
        elif not isinstance(message, MaskedUpdate):
            text = "sent an unmasked answer, but the job has secure aggregation"
        elif message.layout_digest != self.layout.digest:
            text = "trained a model with a different layout than this run's"
        else:
            return None
        return self._invalid(message.site, text)

    def codec_of(self, site: SiteId) -> Codec:
        """In whose words a site's updates come."""
        return self.codecs.get(site, self.codec)

    def _judge_update(self, update: SiteUpdate) -> SiteFailure | None:
        layout, codec = self.layout, self.codec_of(update.site)
        if update.layout_digest != layout.digest:
            text = "trained a model with a different layout than this run's"
            return self._invalid(update.site, text)
        delta_d, integers_m = update.delta_d, update.integers_m
        num_words = codec.num_words(layout.size)
        floats = "values" if num_words == layout.size else "words"
        for name, values, size, dtype in (
            (floats, delta_d, num_words, codec.dtype),
            ("integer values", integers_m, layout.num_integers, _INT64),
        ):
            if values.shape != (size,):
                text = f"sent {values.size} {name}; the model has {size}"
                return self._invalid(update.site, text)
            if values.dtype != dtype:
                text = f"sent {name} of type {values.dtype}, not {dtype}"
                return self._invalid(update.site, text)
        if fault := codec.fault(delta_d, layout.size):
            return self._invalid(update.site, f"sent {fault}")
        return None

    def _invalid(self, site: SiteId, text: str) -> SiteFailure:
        return self._failure(site, FailureKind.INVALID, text)

    def _failure(self, site: SiteId, kind: FailureKind, text: str) -> SiteFailure:
        return SiteFailure(
            run_id=self.run_id,
            round_index=self.round_index,
            site=site,
            kind=kind,
            message=text,
        )
