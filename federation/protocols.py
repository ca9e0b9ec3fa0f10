"""The interfaces between the round loop, its parts and the wiring.

A seam of only one room is where that room uses it, for example ``Gather`` in
``federation.rounds.gather`` or ``Dataset`` in ``clients.data.datasets``.

Each is a ``typing.Protocol`` of two to six methods, or a function type. An
implementation inherits nothing and registers nowhere; ``deploy.wiring.parts`` chooses.
Each seam has a contract suite in ``tests/contract`` that every implementation
passes.

Shape suffixes: d float values of the model.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, fields, replace
from typing import (
    Any,
    NotRequired,
    Protocol,
    Self,
    TypedDict,
    Unpack,
    runtime_checkable,
)

from federation.ids import SiteId, TaskId
from federation.members import EVERYBODY, Members
from federation.messages import (
    LedgerAnchor,
    MetricSums,
    PrivacySpent,
    Reply,
    SiteMessage,
    StateName,
    Task,
)
from federation.vectors import (
    Arrays,
    IntegerVector,
    Layout,
    Values,
    Vector,
    Words,
)

Buffer = bytes | bytearray | memoryview


class Clock(Protocol):
    """Time. Implementations: ``federation.clock``."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Grid(Protocol):
    """The way to the sites. Implementations: in one process, over Flower.

    Tasks of several rounds may be open at once. A task is open until a reply with its
    id is taken, or until it is withdrawn. ``federation.rounds.gather`` sends tasks and
    waits for all of them.

    Nothing is promised about the order, number or content of replies: the caller checks
    them with ``federation.rounds.round_verdicts``.
    """

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Send tasks and return their ids, in the same order.

        A site that gives no answer within ``deadline_seconds`` is reported as a
        ``SiteFailure``; what it answers after that is one more reply.

        Raises:
            ValueError: A task is for a site that the grid does not have.
        """
        ...

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Wait for replies and remove them from the grid.

        Returns:
            At least one reply; none if ``timeout_seconds`` have passed, or immediately
            if no task is open.
        """
        ...

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks: those that have not been sent never will be.

        An answer that arrives anyway is late, and brings no bytes of its task. Tasks
        that are already closed do not change.

        Returns:
            The bytes that were sent for each task that is closed now.
        """
        ...

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """The sites of some that are back after leaving.

        Args:
            sites: Sites that have said that they leave.
            round_index: The round before which this is asked.
        """
        ...


class SiteHandler(Protocol):
    """What a site does with a task. Implementation: ``clients.training.site``."""

    def handle(self, task: Task) -> SiteMessage:
        """Answer a task; an error becomes a ``SiteFailure``."""
        ...

    def close(self) -> None:
        """End the site's part in the run: none of its keys stays in memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """The result of training at a site, besides the weights.

    Attributes:
        integers_m: The model's integer values after training, shape ``(m,)``.
        num_examples: Training examples that the site holds; 0 if that is not to
            leave it.
        num_steps: Optimiser steps taken.
        training: Sums over the training batches; None if they are not to leave the
            site.
        kept: What the site's next round begins with, by name; it never leaves the
            site.
    """

    integers_m: IntegerVector
    num_examples: int
    num_steps: int
    training: MetricSums | None
    kept: Arrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWeights(LocalResult):
    """Training that produced weights.

    Attributes:
        weights_d: The trained weights, shape ``(d,)``, in an array of its own.
    """

    weights_d: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdate(LocalResult):
    """Training that produced an update, if the weights' digits would cost privacy.

    Attributes:
        update_d: What training adds to the weights that it was given, shape ``(d,)``,
            in an array of its own.
    """

    update_d: Vector


class RoundCharges(TypedDict):
    """What ``Trainer.pay`` must charge.

    Attributes:
        round_index: Number of the round, from 1.
        trains: Whether ``fit`` is called in it.
        evaluations: How often ``evaluate`` is.
        anchor: How many charges the site's ledger must hold before this one.
        steps: Local steps that the round takes, where its task says how many.
    """

    round_index: int
    trains: bool
    evaluations: int
    anchor: NotRequired[LedgerAnchor]
    steps: NotRequired[int]


class EvaluateArguments(TypedDict):
    """What a ``Trainer`` is given for an evaluation, besides the global model.

    Attributes:
        round_index: Number of the round, from 1.
        kept: What an earlier round has kept; see ``LocalResult.kept``.
    """

    round_index: int
    kept: NotRequired[Arrays]


class FitArguments(EvaluateArguments):
    """What a ``Trainer`` is given for training, besides the global model.

    Attributes:
        steps: Local steps of the run that the round takes, counted from 0; the job's
            number of each round by default.
    """

    steps: NotRequired[range]


class Trainer(Protocol):
    """Local training. Implementations: torch, a toy quadratic in the tests."""

    def layout(self) -> Layout:
        """Layout of the model that this trainer trains."""
        ...

    def pay(self, **charges: Unpack[RoundCharges]) -> None:
        """Charge a round to the site's privacy budget, before any of its work.

        Raises:
            BudgetExceeded: The budget does not allow all of it; nothing was charged.
            PrivacyError: It is not known what was spent, or the ledger is behind the
                anchor; nothing was charged.
        """
        ...

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalWeights | LocalUpdate:
        """Do a round's local training from the given weights, which stay as is.

        Args:
            weights_d: The global weights, shape ``(d,)``.
            integers_m: The model's integer values, shape ``(m,)``.
            arguments: The round, and what the site kept of earlier ones.
        """
        ...

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[EvaluateArguments],
    ) -> MetricSums:
        """Sums over the site's held-out data, for a round; see ``fit``."""
        ...

    def spent(self) -> PrivacySpent | None:
        """The current spending in the site's privacy ledger; None without one."""
        ...


@runtime_checkable
class WorksAhead(Protocol):
    """A trainer that can take a round's first steps before the model has come."""

    def work_ahead(
        self, round_index: int, kept: Arrays, first_step: int | None = None
    ) -> None:
        """Begin with the first steps of a round; it returns immediately.

        Args:
            round_index: The round that is expected next.
            kept: What the site keeps of the round before.
            first_step: Local steps of the run before that round; None if each round
                takes the job's number.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedUpdate:
    """An unread update, and how much it counts.

    Attributes:
        site: Who sent it.
        delta_d: Shape ``(d,)``; decoded as it is read.
        weight: At least 0; not normalised.
        handed_over: Whether ``delta_d`` is a vector without another user: the rule may
            write to it, and return it.
        refuse: The rule calls it, before it asks for the next update, if a value is
            not finite: the update is then ignored. Without it that is an error.
    """

    site: SiteId
    delta_d: Values
    weight: float
    handed_over: bool = False
    refuse: Callable[[], None] | None = None


class CombineRule(Protocol):
    """Combines updates. Implementations: ``aggregator.combine``."""

    def __call__(self, updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        """Consume the updates as they arrive and write their combination.

        Args:
            updates: Possibly a generator that waits for the network.
            out_d: Shape ``(d,)``, float32; may be overwritten.

        Returns:
            The combination, shape ``(d,)``: in ``out_d``, or in the memory of an update
            that was handed over. Then ``out_d`` is as it was.

        Raises:
            ValueError: There are too few updates for the rule, or no weight.
        """
        ...


OptimizerState = Mapping[str, Vector]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """A server optimiser as two functions: ``federation.rounds.server_optimizer``.

    Attributes:
        init: From the length d to a fresh state: named vectors of shape ``(d,)``.
        step: ``(state_c, update_c)`` of a chunk, each value by itself: writes what is
            added to the weights over the combined update (local minus global), and
            the state over itself.
        period: Only every so manieth model takes ``step``.
        between: What the other models take in its place.
    """

    init: Callable[[int], OptimizerState]
    step: Callable[[OptimizerState, Vector], None]
    period: int = 1
    between: Callable[[OptimizerState, Vector], None] | None = None

    def of_model(self, number: int) -> "ServerOptimizer":
        """The optimiser whose ``step`` makes a model, by its number from 1."""
        if self.between is None or number % self.period == 0:
            return self
        return replace(self, step=self.between)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """A store's information on an object.

    Attributes:
        key: Name of the object within its store.
        size: Bytes.
        version: Opaque; changes whenever the content changes.
        crc32c: Checksum of the content, as 8 hexadecimal digits; None if unknown.
        sha256: Digest of the content, as 64 hexadecimal digits; None if unknown.
        metadata: What the writer said of it: lower-case names of letters, digits and
            ``-``, and ASCII values.
        updated: When it was written, in seconds since 1970; None if unknown.
    """

    key: str
    size: int
    version: str
    crc32c: str | None = None
    sha256: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    updated: float | None = None


class PutArguments(TypedDict, total=False):
    """What ``ObjectStore.put`` may be given besides key and content.

    Attributes:
        if_absent: Fail if the key is taken: of many writers one wins.
        if_version: Fail unless the object is of this version.
        metadata: Kept with it; see ``ObjectInfo``.
    """

    if_absent: bool
    if_version: str | None
    metadata: Mapping[str, str] | None


class ReadArguments(TypedDict, total=False):
    """What ``ObjectStore.read`` may be given besides the key.

    Attributes:
        start: First byte that is read; 0 by default.
        length: How many are read; all to the object's end by default.
        if_version: Fail unless the object is of this version.
    """

    start: int
    length: int | None
    if_version: str | None


class ObjectStore(Protocol):
    """Named bytes. Implementations: ``cloud_adapters.storage``.

    Every call gives up by itself: it tries again what may pass, a few times and
    within a deadline. Streams, downloads by parts and the like are functions over
    this seam: ``cloud_adapters.storage.disk.transfer``.
    """

    @property
    def url(self) -> str:
        """The URL for messages: ``s3://bucket/prefix``; without secrets."""
        ...

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object atomically and durably.

        Args:
            key: ``/``-separated; see ``cloud_adapters.storage.object_keys``.
            data: The content in pieces, so that it need not be in one buffer.
            options: Its conditions and metadata; see ``PutArguments``.

        Returns:
            What is known of it now, with CRC32C; and SHA-256 if the store keeps it,
            which some can only if ``data`` can be gone through twice.

        Raises:
            ObjectExists: ``if_absent`` and the key is taken.
            ObjectChanged: ``if_version``, but the object has another or is gone.
            CorruptObject: Other bytes arrived than were sent; nothing is there.
            StoreUnavailable: The store is full, read-only or unreachable.
            ValueError: Key or metadata are not of the permitted form, or both
                conditions are given.
        """
        ...

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object, all of them by default; see ``ReadArguments``.

        Whole objects are checked against their checksum where one is known.

        Raises:
            ObjectNotFound: There is no such object.
            ObjectChanged: ``if_version``, but the object has another.
            CorruptObject: What arrived does not have the object's checksum.
            StoreUnavailable: The store is unreachable.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """A store's information on an object.

        Raises:
            ObjectNotFound: There is no such object.
        """
        ...

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the order of their keys.

        By code points. Checksums and metadata are not promised; ``stat`` has them.

        Args:
            prefix: Prefix of the keys.
            start_after: Only keys behind this one.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        ...

    def close(self) -> None:
        """Close connections; the store is not used afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKey:
    """A key for one object, and the same key wrapped by a key service.

    Attributes:
        plaintext: 32 bytes; never stored, never logged.
        wrapped: What is stored beside the object, at most 960 bytes.
    """

    plaintext: bytes = field(repr=False)
    wrapped: bytes = field(repr=False)


class KeyService(Protocol):
    """Holds the keys that wrap other keys. Implementations: ``cloud_adapters.keys``.

    A context is authenticated and not secret: a service may write it in its log. A
    key that was wrapped in one context is of no use in another.
    """

    @property
    def name(self) -> str:
        """The key for messages: ``file:PATH``, ``aws-kms:ARN``; without secrets."""
        ...

    def generate(self, context: Mapping[str, str]) -> DataKey:
        """Make a new key for an object.

        Raises:
            KeyRefused: The service has no such key, or it is disabled.
            StoreUnavailable: The service is unreachable, or forbids it.
        """
        ...

    def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
        """Wrap a key of 32 bytes with the service's newest key.

        Raises:
            KeyRefused: The service has no such key, or it is disabled.
            StoreUnavailable: The service is unreachable, or forbids it.
        """
        ...

    def unwrap(self, wrapped: bytes, context: Mapping[str, str]) -> bytes:
        """Return the 32 bytes that were wrapped.

        Raises:
            KeyRefused: They were locked with a key that this service does not have or
                does not let us use.
            CorruptObject: ``wrapped`` was changed, or made in another context.
            StoreUnavailable: The service is unreachable, or forbids it.
        """
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicions:
    """What rounds of secure aggregation have shown about sites.

    Attributes:
        faults: What a site did that no honest site does, by its name.
        disputes: Pairs of sites: one says that the other dealt it a wrong share.
        silences: How often a site has not done what it was asked to.
    """

    faults: Mapping[SiteId, str] = field(default_factory=dict)
    disputes: tuple[tuple[SiteId, SiteId], ...] = ()
    silences: Mapping[SiteId, int] = field(default_factory=dict)

    def among(self, sites: Collection[SiteId]) -> "Suspicions":
        """What is known of some sites."""
        return Suspicions(
            faults={s: why for s, why in self.faults.items() if s in sites},
            disputes=tuple(two for two in self.disputes if {*two} <= {*sites}),
            silences={s: n for s, n in self.silences.items() if s in sites},
        )

    def joined(self, newer: "Suspicions") -> "Suspicions":
        """Add what is known by now."""
        return Suspicions(
            faults={**self.faults, **newer.faults},
            disputes=tuple(dict.fromkeys((*self.disputes, *newer.disputes))),
            silences={**self.silences, **newer.silences},
        )


NO_SUSPICIONS = Suspicions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """From the model of one round to that of the next.

    Attributes:
        words: What is added, encoded.
        after: SHA-256 of the sum, 64 hexadecimal digits.
    """

    words: Words
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionProgress:
    """What is known of a run's models by now, if its job selects one.

    Attributes:
        best_round: The round of the best evaluated model, 0 for the initial one; None
            if none was evaluated.
        best_score: Its result.
        stale: Evaluations in a row since then without a better one.
        averaged: Number of models in the average.
    """

    best_round: int | None = None
    best_score: float | None = None
    stale: int = 0
    averaged: int = 0


NO_SELECTION = SelectionProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model that is kept besides the newest: the best one, or an average.

    Attributes:
        weights_d: Its values, shape ``(d,)``.
        integers_m: Its integer values, shape ``(m,)``.
    """

    weights_d: Vector
    integers_m: IntegerVector


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """What a round took.

    Attributes:
        round_index: Number of the round, from 1.
        num_steps: Its local steps.
        seconds: From its first task to its result, on the aggregator's clock.
        train_seconds: How long the site trained that answered last, by its own clock;
            None if sites do not say.
        evaluate_seconds: The same of evaluation; 0 if sites do not say.
        missed: Whether it was waited for in vain, for ``seconds``.
    """

    round_index: int
    num_steps: int
    seconds: float
    train_seconds: float | None = None
    evaluate_seconds: float = 0.0
    missed: bool = False


@dataclass(frozen=True, slots=True)
class SiteHistory:
    """What a site has done so far in a run.

    Attributes:
        asked: Rounds that asked it.
        counted: Rounds whose model its update is a part of.
        last_round: The newest round that asked it; 0 if none has.
        loss: Mean loss in nats of the newest update's training; None if it is not
            known, as with differential privacy.
        predictions: How many predictions this is the mean of; 0 without a loss.
        seconds: What its newest answer took, or how long it was waited for in vain;
            None if it has not answered, and with differential privacy.
    """

    asked: int = 0
    counted: int = 0
    last_round: int = 0
    loss: float | None = None
    predictions: int = 0
    seconds: float | None = None


NEVER_ASKED = SiteHistory()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """A run's progress, without its model.

    Attributes:
        round_index: Rounds that have ended; 0 before the first.
        rounds_completed: Rounds after which the weights changed.
        lost_in_a_row: Rounds without result since the last completed one.
        update_clip: What updates are clipped to in the next round, where that
            adapts to them; otherwise None.
        anchors: The largest anchor that each site's ledger has sent.
        suspicions: What rounds have shown of sites that do not keep to the protocol.
        members: Who takes part, who has left, and who is left out.
        counted: Of each site the newest round whose update is a part of the model, if
            sites keep what their codec leaves out.
        selection: What is known of the models, if the job selects one.
        states: Of each site the newest states that it is known to have kept, oldest
            first, if secure sums depend on them.
        steps_taken: Local steps of all rounds, if these are chosen round by round.
        times: What the newest of these rounds took: the next choice follows from it.
        site_times: What the newest rounds of each site took, if faster sites take more
            steps or deadlines are learnt.
        history: What each site has done, if samples of the sites follow it.
    """

    round_index: int
    rounds_completed: int
    lost_in_a_row: int
    update_clip: float | None = None
    anchors: Mapping[SiteId, LedgerAnchor] = field(default_factory=dict)
    suspicions: Suspicions = NO_SUSPICIONS
    members: Members = EVERYBODY
    counted: Mapping[SiteId, int] = field(default_factory=dict)
    selection: SelectionProgress = NO_SELECTION
    states: Mapping[SiteId, tuple[StateName, ...]] = field(default_factory=dict)
    steps_taken: int = 0
    times: tuple[RoundTime, ...] = ()
    site_times: Mapping[SiteId, tuple[RoundTime, ...]] = field(default_factory=dict)
    history: Mapping[SiteId, SiteHistory] = field(default_factory=dict)

    def progress(self) -> Mapping[str, Any]:
        """Its fields by name, without those of a class that has more."""
        return {one.name: getattr(self, one.name) for one in fields(RunProgress)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(RunProgress):
    """Everything that the next round depends on.

    Attributes:
        weights_d: The global model, shape ``(d,)``.
        integers_m: Its integer values, shape ``(m,)``.
        optimizer: State of the server optimiser; and what the codec of the way down has
            left out of changes, if it is added to the next one.
        change: What makes this model of that of the round before; None if nothing
            was changed, or after a restart: it is not durable.
        kept: The best model, or the average, if the job selects one.
    """

    weights_d: Vector
    integers_m: IntegerVector
    optimizer: OptimizerState
    change: ModelChange | None = None
    kept: KeptModel | None = None

    def with_model_left(self) -> Self:
        """Return the state with the model that the run leaves in place of the newest.

        That is the newest if none is kept: no model was evaluated, or the run ended
        before the first round to average.
        """
        if self.kept is None:
            return self
        # A site that has the newest model is sent the whole of this one, and no step
        # begins with it.
        return replace(
            self,
            weights_d=self.kept.weights_d,
            integers_m=self.kept.integers_m,
            optimizer={},
            change=None,
        )


class Checkpoints(Protocol):
    """Durable states of one run. Implementation: ``aggregator.checkpoint``."""

    def load_latest(self) -> RunState | None:
        """The newest complete state, or None if the run has none.

        Raises:
            CheckpointMismatch: The run was started from another job.
            LayoutMismatch: The run's model has another layout.
            CorruptObject: Checkpoints exist and not one of them is whole.
        """
        ...

    def save(self, state: RunState) -> int:
        """Make a state durable and return the bytes written.

        Raises:
            RunConflict: Another coordinator has saved this round.
            StoreUnavailable: The store is full, read-only or unreachable.
        """
        ...


class Closing(ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release its resources; a second call does nothing."""
