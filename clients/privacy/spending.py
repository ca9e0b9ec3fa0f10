"""A trainer that asks the site's privacy ledger before anything private leaves.

The ledger is charged, durably and for all of a round at once, before any of its work:
what a crash interrupts stays charged, and a round that is refused costs nothing. Only
steps that were kept in order are continued for what they were charged.
What would reveal single records without noise is withheld: the losses of training,
and how many examples the site holds.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Unpack

from clients.training.kept_steps import KeptSteps
from federation.errors import BudgetExceeded, ProtocolError
from federation.messages import (
    NO_ANCHOR,
    LedgerAnchor,
    MetricSums,
    PrivacySpent,
)
from federation.protocols import (
    FitArguments,
    LocalUpdate,
    LocalWeights,
    Trainer,
    WorksAhead,
)
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Vector
from privacy.dp.events import PrivacyEvent
from privacy.dp.held_out import HeldOutMechanism
from privacy.dp.ledger.ledger import Ledger, Release
from privacy.dp.ledger.ledger_format import Charge


class ClippingTrainer(Trainer, Protocol):
    """A trainer that can bound a single record's part in held-out sums."""

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
        max_loss: float | None = None,
    ) -> MetricSums:
        """Sums over the site's held-out data, each prediction's loss clipped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """What a site releases, as charged to its ledger.

    Attributes:
        round_event: The private steps of one round.
        later: Those of later rounds, where they differ: first round and event.
        held_out: Noise for held-out results; None if these are public.
        evaluates: Whether the job has evaluations; if not, held-out results stay.
        max_loss: What a held-out prediction's loss is clipped to, in nats.
        random_bytes: Source of the keys of the held-out noise.
        planned: All training that was planned, where rounds differ in what they cost.
        once: What is charged with the training before the first round.
        noise_varies: Whether a resumed run may have other noise than before, as where
            all sites plan it together.
    """

    round_event: PrivacyEvent
    held_out: HeldOutMechanism | None
    evaluates: bool
    max_loss: float
    random_bytes: Callable[[int], bytes] = os.urandom
    later: Sequence[tuple[int, PrivacyEvent]] = ()
    planned: Sequence[PrivacyEvent] = ()
    once: Sequence[PrivacyEvent] = ()
    noise_varies: bool = False

    def has_room(self, event: PrivacyEvent, charged: Iterable[PrivacyEvent]) -> bool:
        """Whether the plan has a round left for more training, as large or larger.

        The aggregator may choose the next round by the results of earlier ones. If
        events differ, the epsilon of what was charged is then no bound (Rogers et al.
        2016, arXiv:1605.08294, section 1). The events of a plan may come in any order
        (concurrent composition: Vadhan and Zhang 2023, arXiv:2207.08335), and one of a
        smaller sampling rate in place of a larger one.

        The same holds where a resumed run has other noise: another site states what it
        needs again, and may collude. Every such plan has at least the noise with which
        all planned rounds keep the promise, so only their number counts.

        Args:
            event: The training; only its rate and its number of steps count.
            charged: What was charged for training.
        """
        if not (self.later or self.noise_varies):
            return True  # All events are alike.
        taken = [event, *(each for each in charged if each not in self.once)]
        return all(
            _steps_from(rate, taken) <= _steps_from(rate, self.planned)
            for rate in {each.sampling_rate for each in taken}
        )

    def event_in(self, round_index: int, steps: int = 0) -> PrivacyEvent:
        """The private steps of a round, of which its task may say the number.

        Whoever chooses these numbers may do so by earlier answers. All steps are alike:
        from whatever model it begins, each is a mechanism M of this event's noise, rate
        and slack. After s steps the ledger refuses n more unless ::

            epsilon(M composed s + n times) <= cap

        so that no choice leads beyond the largest N with epsilon(M composed N times)
        <= cap, and N follows from no data. A run is N adaptive steps of M, of which the
        last may be left out, and few models are seen: post-processing of what the
        accountant bounds. Rounds of other rates need more; see ``has_room``.

        Args:
            round_index: The round, from 1.
            steps: As its task says; 0 where the job fixes them.
        """
        found = self.round_event
        for first, event in self.later:
            if first <= round_index:
                found = event
        return replace(found, steps=steps) if steps else found


def _steps_from(rate: float, events: Iterable[PrivacyEvent]) -> int:
    """Steps with this sampling rate or a larger one."""
    return sum(each.steps for each in events if each.sampling_rate >= rate)


def _name(charge: Charge) -> str:
    """Name an entry; one with its place, of a ledger that was restored, has another."""
    return f"{charge.seq}@{charge.time!r}"


class BudgetedTrainer:
    """A ``federation.protocols.Trainer`` around a private one and a ledger.

    Each task that a site begins is charged once, in rounds and in buffers
    (``schedule.mode = "buffered"``). Let e_1, ..., e_k be a site's charges of training,
    with Renyi divergences r_i(alpha). Its i-th task begins with a model that earlier
    answers of this and other sites decide. Given that model, the answer is the
    mechanism of e_i on the site's records with new noise. So the k answers together are
    an adaptive composition, of divergence r_1 + ... + r_k (Mironov 2017,
    arXiv:1702.07476, proposition 1), and the ledger turns the sum into epsilon. It
    needs neither equal models, nor that sites take turns.

    All else in a buffer costs nothing. Whether an answer counts, in which model, and
    its weight by staleness (how many models were made since) are computed from answers
    and from the order in which they come: post-processing. That order follows from
    machines and lines, not from values of records, apart from the time that a step
    takes, a side channel that rounds have as well. A task that is withdrawn, or open
    when a process is killed, has its charge and no answer: the answers are then a part
    of what the k charges bound. A task that is sent again is charged again, so a kill
    costs a site one task at most.

    In secure sums over whichever sites are ready nothing changes: a site is charged for
    a task before it trains, and what becomes of the update, in which sum and beside
    whom, is post-processing of that one answer. An update that is lost with its cohort
    has its charge.

    A site gets each model once, so it begins at most ``rounds`` tasks, for which the
    noise is planned; who answers faster begins more. Whether this number follows from
    earlier answers does not matter: charges are alike, so no order of tasks leads
    beyond what the ledger has room for, as in ``Releases.event_in``. That is the bound
    also against an aggregator that sends more tasks.
    """

    def __init__(
        self,
        trainer: ClippingTrainer,
        ledger: Ledger,
        releases: Releases,
        kept: KeptSteps | None = None,
    ) -> None:
        """Charge what ``trainer`` does to ``ledger``.

        Args:
            trainer: Takes private steps, as ``releases.event_in`` says.
            ledger: The site's own, of this run.
            releases: What each piece of work costs.
            kept: Keeps the steps of a round that the site cannot end; None to keep
                none.
        """
        self._trainer = trainer
        self._ledger = ledger
        self._releases = releases
        self._kept = kept
        # What was charged and has not been done yet.
        self._round_index = -1
        self._trains = False
        self._evaluations = 0
        self._steps = 0

    def layout(self) -> Layout:
        """Layout of the model."""
        return self._trainer.layout()

    def pay(
        self,
        *,
        round_index: int,
        trains: bool,
        evaluations: int,
        anchor: LedgerAnchor = NO_ANCHOR,
        steps: int = 0,
    ) -> None:
        """Charge all that a round releases, or nothing.

        What an earlier payment was for and was not done is not to be done any more.

        Raises:
            BudgetExceeded: Some of it is beyond the budget, or the plan has no such
                round left; nothing was charged.
            PrivacyError: The ledger cannot vouch for what was spent, or holds fewer
                charges than ``anchor`` says that it held; nothing was charged.
            ProtocolError: The job has no evaluations; nothing was charged.
        """
        self._trains, self._evaluations = False, 0
        self._ledger.check_anchor(anchor)
        held_out = self._releases.held_out
        if evaluations and not self._releases.evaluates:
            raise ProtocolError("was asked to evaluate, but the job has no evaluations")
        releases: list[Release] = []
        if trains:
            event = whole = self._releases.event_in(round_index, steps)
            if self._is_paid(whole):
                event = replace(whole, steps=0)
            else:
                self._check_room(whole, round_index)
            releases.append((event, "train"))
        if held_out is not None:
            releases += [(held_out.event(), "evaluate")] * evaluations
        self._ledger.charge_all(releases, round_index=round_index)
        self._round_index, self._steps = round_index, steps
        self._trains, self._evaluations = trains, evaluations
        if self._kept is not None and trains:
            self._kept.charge = _name(self._trainings()[-1])
            self._kept.event = str(whole)

    def _is_paid(self, event: PrivacyEvent) -> bool:
        """Whether the newest charge of training is for such a round and released none.

        Every round writes an entry into the ledger before its work. It has 0 steps if
        the site left in order under the entry before it: at a notice, which no record
        decides, after s of n steps, with all that it knew of them in its own store and
        no answer sent. So entries e_1, e_2, ... of n steps, each with those of 0 steps
        that follow it, have at most one answer. It is a function of the n steps, at
        most, that led to it; others were dropped unseen, as for a process that is
        killed. Each answer has an e_i, and kept steps are continued only for an equal
        event, of the same noise, rate and number. So answers 1 to k are a function of
        at most k n such steps, which their entries compose, whichever steps they
        continued from: steps in two answers are charged twice and taken once.

        An entry cannot be used again. Kept steps name it, and the next round, also one
        that continues them, moves the ledger on: a copy that is put back names an entry
        that has others after it. The ledger itself is held to its anchor, and a process
        that ends in another way, which may depend on records, pays anew.
        """
        charges = self._trainings()
        if self._kept is None or not charges:
            return False
        had = [c.event for c in charges if c.event.steps]
        return self._kept.left_under() == _name(charges[-1]) and had[-1:] == [event]

    def _trainings(self) -> Sequence[Charge]:
        return [c for c in self._ledger.charges() if c.purpose == "train"]

    def _check_room(self, event: PrivacyEvent, round_index: int) -> None:
        charged = [each.event for each in self._trainings()]
        if not self._releases.has_room(event, charged):
            raise BudgetExceeded(
                f"round {round_index} has sampling rate {event.sampling_rate:.3g}, and "
                f"site {self._ledger.terms.site!r} has trained all rounds with this "
                "rate, or a larger one, that were planned and held in reserve; nothing "
                "was released. Stop here, or start a run with more "
                "privacy.differential_privacy.reserve_rounds"
            )

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalWeights | LocalUpdate:
        """Train a round that was charged.

        Raises:
            RuntimeError: It was not, or it was trained already.
        """
        round_index = arguments["round_index"]
        if not self._trains or round_index != self._round_index:
            raise RuntimeError(f"round {round_index} was not charged")
        if (steps := len(arguments.get("steps", ()))) != self._steps:
            raise RuntimeError(f"{self._steps} steps were charged, not {steps}")
        self._trains = False
        result = self._trainer.fit(weights_d, integers_m, **arguments)
        return replace(result, num_examples=0, training=None)

    def work_ahead(
        self, round_index: int, kept: Arrays, first_step: int | None = None
    ) -> None:
        """Begin with a round's first steps, which are charged with their round.

        Only ``fit`` looks at what they led to, and only after ``pay`` has charged the
        n steps of a round, of which they are some. So what leaves in rounds 1 to r is a
        function of the steps that were charged for these rounds. Steps ahead of a round
        that does not come, or that begins with something else, are dropped. Whether
        that happens follows from tasks and from the time, not from these steps, and
        their keys and samples are used for nothing else: without them, all that leaves
        has the same distribution.
        """
        if isinstance(self._trainer, WorksAhead):
            self._trainer.work_ahead(round_index, kept, first_step)

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> MetricSums:
        """Evaluate as was paid for, and add noise to the sums, if that is asked.

        Raises:
            RuntimeError: It was not charged, or for another round.
        """
        held_out = self._releases.held_out
        if not self._evaluations or round_index != self._round_index:
            raise RuntimeError(f"an evaluation of round {round_index} was not charged")
        self._evaluations -= 1
        if held_out is None:
            return self._trainer.evaluate(
                weights_d, integers_m, round_index=round_index, kept=kept
            )
        sums = self._trainer.evaluate(
            weights_d,
            integers_m,
            round_index=round_index,
            kept=kept,
            max_loss=self._releases.max_loss,
        )
        return held_out.release(sums, self._releases.random_bytes)

    def spent(self) -> PrivacySpent:
        """The ledger's current spending."""
        ledger = self._ledger
        return PrivacySpent(
            epsilon=ledger.epsilon("train"),
            delta=ledger.terms.delta,
            held_out_epsilon=(
                None if self._releases.held_out is None else ledger.epsilon("evaluate")
            ),
            anchor=ledger.anchor(),
        )
