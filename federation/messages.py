"""The messages between the aggregator and a site, as frozen values.

``wire`` turns these into bytes; nothing here knows how.
Shape suffixes: d float values of the model, m integer values of the model.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from federation.ids import RunId, SiteId, TaskId
from federation.vectors import ByteVector, HeaderVector, IntegerVector, Words

MAX_METRICS = 16  # Of an objective of a user's.
MAX_CLASSES = 32  # Of a confusion matrix, which is so many squared sums.
MAX_MEASURED = 256  # Sums of ``training.measures``.
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class TaskKind(StrEnum):
    """The kind of work in a task."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class SecureStep(StrEnum):
    """An exchange of the secure aggregation protocol, other than that of the model."""

    COMMIT = "commit"  # once per run with groups: commitment to a secret back
    DRAW = "draw"  # once per run with groups: all commitments out, the secret back
    ADVERTISE = "advertise"  # once per run: contract out, public keys back
    CONFIRM = "confirm"  # once per run: all public keys out, consent back
    READY = "ready"  # a round with free cohorts: the site keeps a finished update
    DECLINE = "decline"  # a round: the site's signed statement that it has no update
    SURVIVORS = "survivors"  # a round with dropouts: surviving sites out, consent back
    REVEAL = "reveal"  # a round with dropouts: consents out, shares back


class FailureKind(StrEnum):
    """Why a site's answer does not count."""

    CRASHED = "crashed"  # the site raised an error
    NOT_SET_UP = "not_set_up"  # the site has no keys for the run, as after a restart
    DEADLINE = "deadline"  # no answer by the deadline, or within the grace
    UNREACHABLE = "unreachable"  # the site is not connected
    DISCONNECTED = "disconnected"  # its connection ended; it may return after a restart
    BUSY = "busy"  # the site is still working on an earlier round
    BUDGET = "budget"  # the site's privacy budget does not allow the work
    NOT_FINITE = "not_finite"  # the update holds NaN or infinity
    INVALID = "invalid"  # wrong length, wrong model, wrong round
    AGGREGATOR = "aggregator"  # what the aggregator sent is wrong, not the site
    DUPLICATE = "duplicate"  # a second answer to the same task
    SURPLUS = "surplus"  # its round asked more sites than it needed
    LATE = "late"  # an answer after its round had ended
    UNKNOWN = "unknown"  # an answer from a site that had no task
    LEAVING = "leaving"  # the site leaves the run; the message is a ``LeaveReason``
    NO_STATE = "no_state"  # the site does not have the state that the task names


class LeaveReason(StrEnum):
    """Why a site leaves a run before its end."""

    SIGTERM = "sigterm"  # its supervisor stopped it
    SPOT = "spot"  # its cloud reclaims the machine
    OPERATOR = "operator"  # a person asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums over examples, so that the metrics of several sites add up exactly.

    Attributes:
        count: Predictions made: tokens of a language model, otherwise examples.
        loss_sum: Sum of the losses of these predictions, in nats.
        metrics: The job's other sums over them, by name; in the built-in tasks,
            ``correct`` is the number of correct predictions. In JSON they are beside
            ``count`` and ``loss_sum``.
    """

    count: int
    loss_sum: float
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """Mean loss of a prediction, in nats."""
        return self.loss_sum / self.count

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions."""
        return self.mean("correct")

    def mean(self, metric: str) -> float:
        """Mean of a metric over the predictions; NaN if the job does not have it."""
        return self.metrics.get(metric, math.nan) / self.count

    def __add__(self, other: "MetricSums") -> "MetricSums":
        """Pool two sums."""
        return MetricSums(
            count=self.count + other.count,
            loss_sum=self.loss_sum + other.loss_sum,
            metrics={
                name: self.metrics.get(name, 0) + other.metrics.get(name, 0)
                for name in {**self.metrics, **other.metrics}
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnchor:
    """How many charges a site's ledger of a run holds: its sequence numbers.

    A site sends them with every answer. The aggregator keeps them with its
    checkpoints and events, and sends them back with every proposal and task. A
    ledger that holds fewer has lost charges.

    Attributes:
        train: Charges on the training records.
        evaluate: Charges on the held-out records.
    """

    train: int = 0
    evaluate: int = 0

    def is_within(self, other: "LedgerAnchor") -> bool:
        """Whether ``other`` has at least as many charges of each kind."""
        return self.train <= other.train and self.evaluate <= other.evaluate

    def joined(self, other: "LedgerAnchor") -> "LedgerAnchor":
        """Return the larger number of each kind."""
        return LedgerAnchor(
            train=max(self.train, other.train),
            evaluate=max(self.evaluate, other.evaluate),
        )


NO_ANCHOR = LedgerAnchor()


def join_anchors(
    *found: Mapping[SiteId, LedgerAnchor],
) -> dict[SiteId, LedgerAnchor]:
    """Return the largest anchor of each site."""
    joined: dict[SiteId, LedgerAnchor] = {}
    for site, anchor in (item for each in found for item in each.items()):
        joined[site] = joined.get(site, NO_ANCHOR).joined(anchor)
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySpent:
    """What a site's ledger says, with the work of this answer charged.

    Attributes:
        epsilon: Spent on the training records so far; at least 0 and finite.
        delta: The probability that goes with it.
        held_out_epsilon: Spent on the held-out records so far, which are other
            records; None if their results leave the site without noise.
        anchor: How many charges the ledger holds.
    """

    epsilon: float
    delta: float
    held_out_epsilon: float | None
    anchor: LedgerAnchor = NO_ANCHOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a site's work.

    Attributes:
        name: For example ``evaluate``, ``train`` or ``prepare``.
        start_seconds: When it began, counted from the site's receipt of the task.
        seconds: How long it took.
    """

    name: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What a whole machine took while it worked, whatever else ran there.

    Attributes:
        joules: At least and at most; None if unknown.
        grams: gCO2e, likewise; None without the carbon intensity of its electricity.
        method: How it was measured: ``RAPL``, ``NVML`` or a ``model``, joined by
            ``and``; or ``unknown``.
    """

    joules: tuple[float, float] | None
    grams: tuple[float, float] | None
    method: str


UNKNOWN_ENERGY = Energy(joules=None, grams=None, method="unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What work took of a machine; ``federation.resources`` measures it.

    Attributes:
        busy_seconds: From its beginning to its end.
        cpu_seconds: CPU time; None if the method has none.
        peak_memory_bytes: Most memory that the process has held at once since it
            began; None if the method has none.
        method: ``process``; ``thread`` where sites share a process; or ``clock``,
            which knows only ``busy_seconds``.
        energy: None if the site does not report it (``policy.report_energy``).
    """

    busy_seconds: float
    cpu_seconds: float | None
    peak_memory_bytes: int | None
    method: str
    energy: Energy | None = None


@dataclass(frozen=True, slots=True)
class StateName:
    """Names what the sites of a secure sum have kept of a round.

    Attributes:
        round_index: The round that left it.
        context: Its ctx_r, 64 hexadecimal digits: what the round was made of, down to
            the state that it began with.
    """

    round_index: int
    context: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMessage:
    """What every task and every answer says first.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round; see each message.
        site: Who is asked, or who answers.
    """

    run_id: RunId
    round_index: int
    site: SiteId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTask(RoundMessage):
    """One site's task in one round.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: 1 for the first round.
        site: The site that gets the task.
        kind: Whether to train and answer with an update, or only to evaluate.
        layout_digest: Digest of the run's model layout.
        weights_d: The global model, encoded with the job's downstream codec, shape
            ``(d,)``, float32 by default; read-only. Empty in the task of a free
            cohort, which asks for the update that the site has kept.
        integers_m: Its integer values, shape ``(m,)``; read-only.
        evaluate: Whether the site evaluates the weights on its held-out data before
            training.
        evaluate_after: Whether the site evaluates its own model after training, which
            dynamic weights need.
        secure: With secure aggregation, the protocol's part of the task, as bytes of
            ``privacy.secagg.protocol.train``: hash of the setup, confirms, certificate,
            and the clip norm of updates; otherwise empty.
        anchor: The largest anchor that this site has sent in this run. The site refuses
            the task if its ledger is behind it; the anchor has no other effect.
        based_on: The round whose model the task carries; 0 for the initial one.
        fragment: Which part of the model the task carries; 0 for the whole.
        changed_to: Empty if ``weights_d`` is the whole model. Otherwise ``weights_d``
            is the difference to the model that the site received before, and this is
            the SHA-256 of the result.
        counted: The newest round whose update of this site is a part of the model; 0 if
            there is none, or if sites do not keep what their codec leaves out.
        num_steps: How many local steps the round takes; 0 for the job's number.
        first_step: How many the run has taken before, with ``num_steps``.
        state_round: With secure aggregation, the round whose state every site begins
            with; 0 if they begin with none.
        state_context: That round's ctx_r, 64 hexadecimal digits.
    """

    kind: TaskKind
    layout_digest: str
    weights_d: Words
    integers_m: IntegerVector
    evaluate: bool
    evaluate_after: bool
    secure: bytes = b""
    anchor: LedgerAnchor = NO_ANCHOR
    based_on: int = 0
    fragment: int = 0
    changed_to: str = ""
    counted: int = 0
    num_steps: int = 0
    first_step: int = 0
    state_round: int = 0
    state_context: str = ""

    @property
    def begins_with(self) -> StateName | None:
        """The state that the sites of a secure sum begin with; None for none."""
        if not (self.state_round or self.state_context):
            return None
        return StateName(self.state_round, self.state_context)

    @property
    def steps(self) -> range | None:
        """Steps of the run that the round takes, from 0; None for the job's number."""
        if not self.num_steps:
            return None
        return range(self.first_step, self.first_step + self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureTask(RoundMessage):
    """One site's task in a step of the secure aggregation protocol.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round; 0 for the setup of the run.
        site: The site that gets the task.
        step: Which step.
        body: Bytes of ``privacy.secagg``.
    """

    step: SecureStep
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAnswer(RoundMessage):
    """A site's answer to a ``SecureTask``; attributes as there."""

    step: SecureStep
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedUpdate(RoundMessage):
    """A site's answer to a task with secure aggregation.

    It reveals nothing about the site's update, loss or number of examples except
    through the sum over all sites.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round of the task.
        site: The site that answers.
        layout_digest: Digest of the layout of the site's model.
        words: The masked update, raw little-endian words of the contract's ring,
            shape ``(bytes,)``, uint8.
        header_h: The masked header, shape ``(h,)``, uint64: weight, counts, losses and
            numbers of correct predictions.
        body: Signed head, sealed shares and commitments, bytes of ``privacy.secagg``.
        spent: With differential privacy, what the site has spent; public.
        based_on: As in the task.
        fragment: As in the task.
        leaving: Why the site leaves after this round; None if it stays.
    """

    layout_digest: str
    words: ByteVector
    header_h: HeaderVector
    body: bytes
    spent: PrivacySpent | None = None
    based_on: int = 0
    fragment: int = 0
    leaving: LeaveReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteUpdate(RoundMessage):
    """A site's answer to a training task.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round of the task.
        site: The site that answers.
        layout_digest: Digest of the layout of the site's model.
        delta_d: Local weights minus global weights, encoded with the job's upstream
            codec, shape ``(d,)``, float32 by default. The receiver may overwrite it if
            it is writable, so a sender that keeps it sends a read-only view.
        integers_m: The site's integer values, shape ``(m,)``.
        num_examples: Number of training examples at the site; 0 if the site does not
            report it, as with differential privacy.
        num_steps: Number of optimiser steps that it took.
        training: Sums over the training batches, taken during training; None with
            differential privacy.
        evaluation: Results of the global weights on the site's held-out data, if the
            task asks for them.
        evaluation_after: Results of the local weights on the same data, if the task
            asks for them.
        phases: Where the site's time went; empty with differential privacy.
        spent: With differential privacy, what the site has spent.
        based_on: As in the task.
        fragment: As in the task.
        resources: Resources that the work used; None with differential privacy.
        leaving: Why the site leaves after this round; None if it stays.
    """

    layout_digest: str
    delta_d: Words
    integers_m: IntegerVector
    num_examples: int
    num_steps: int
    training: MetricSums | None
    evaluation: MetricSums | None
    evaluation_after: MetricSums | None
    phases: tuple[Phase, ...]
    spent: PrivacySpent | None = None
    based_on: int = 0
    fragment: int = 0
    resources: Resources | None = None
    leaving: LeaveReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEvaluation(RoundMessage):
    """A site's answer to an evaluation task.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round of the task.
        site: The site that answers.
        evaluation: Sums over the site's held-out data.
        phases: Where the site's time went; empty with differential privacy.
        spent: With differential privacy, what the site has spent.
        based_on: As in the task.
        fragment: As in the task.
        leaving: Why the site leaves after this round; None if it stays.
    """

    evaluation: MetricSums
    phases: tuple[Phase, ...]
    spent: PrivacySpent | None = None
    based_on: int = 0
    fragment: int = 0
    leaving: LeaveReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFailure(RoundMessage):
    """A report, by a site or the grid, that no update will come.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round of the task.
        site: The site that failed.
        kind: Why.
        message: What happened, in one line without secrets.
    """

    kind: FailureKind
    message: str


Task = RoundTask | SecureTask
SiteMessage = SiteUpdate | SiteEvaluation | MaskedUpdate | SecureAnswer | SiteFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedTasks(RoundMessage):
    """What a relay is asked in one message: tasks of sites behind it.

    Attributes:
        run_id: ID of the run; messages of other runs are rejected.
        round_index: The round of all of them.
        site: The relay.
        tasks: One for each of its sites that is asked, in the order of the job.
    """

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RelayedSum:
    """A sum that a relay has made of its sites' answers.

    Each of these answers then has the words of the sum, and none of its own.

    Attributes:
        sites: Whose answers are in it, in the order of the job.
        update: The sum, in the relay's name: a mean of updates weighted by the
            aggregator's rule, or masked words, whose ``body`` the relay has signed.
    """

    sites: tuple[SiteId, ...]
    update: SiteUpdate | MaskedUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A site's message as it arrived, with what the journey cost.

    Attributes:
        task_id: The task that it is about, as ``Grid.send`` named it.
        message: What the site said, or the grid on its behalf.
        asked_seconds: When the task was sent, on the monotonic clock.
        answered_seconds: When the answer arrived, on the same clock.
        bytes_down: Bytes sent to the site for this task.
        bytes_up: Bytes received from it.
        through: The relay's sum that this answer is a part of; None if it came alone.
        inside_down: Bytes between a relay and the site, for the same task;
            ``bytes_down`` is then the site's part of what the relay received.
        inside_up: The same for the answer.
        following: What came in the same message after ``message``; only a relay sends
            more than one.
        is_awaited: Whether the site was busy first, and was asked again.
    """

    task_id: TaskId
    message: SiteMessage
    asked_seconds: float
    answered_seconds: float
    bytes_down: int
    bytes_up: int
    through: RelayedSum | None = None
    inside_down: int = 0
    inside_up: int = 0
    following: tuple[SiteMessage, ...] = ()
    is_awaited: bool = False
