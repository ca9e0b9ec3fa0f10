"""All seams of the product on one page.

Each is a ``typing.Protocol`` of two to six methods, or a function type. An
implementation inherits nothing and registers nowhere; ``deploy.wiring`` chooses.
Each seam has a contract suite in ``tests/contract`` that every implementation
passes.

Shape suffixes: d float values of the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from federation.ids import SiteId
from federation.messages import MetricSums, PrivacySpent, Reply, SiteMessage, Task
from federation.vectors import IntegerVector, Layout, Vector

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
    """The way to the sites. Implementations: in one process, over Flower."""

    def sites(self) -> Sequence[SiteId]:
        """Every site of the run, in the order of the job."""
        ...

    def exchange(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Iterator[Reply]:
        """Send tasks and yield what comes back, until all answered or time is up.

        A site that cannot answer in time is reported as a ``SiteFailure``.
        Nothing is promised about order, number or content of the answers: the
        caller checks them with ``federation.round_state``.
        """
        ...


class SiteHandler(Protocol):
    """What a site does with a task. Implementation: ``clients.site``."""

    def handle(self, task: Task) -> SiteMessage:
        """Answer a task; an error becomes a ``SiteFailure``."""
        ...

    def close(self) -> None:
        """End the site's part in the run: no key of it stays in memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """What training at a site produced.

    Attributes:
        weights_d: The trained weights, shape ``(d,)``, in an array of its own; their
            difference from the given ones if ``is_update``.
        integers_m: The model's integer values after training, shape ``(m,)``.
        num_examples: Training examples that the site holds; 0 if that is not to
            leave it.
        num_steps: Optimiser steps taken.
        training: Sums over the training batches; None if they are not to leave the
            site.
        is_update: Whether ``weights_d`` is the update itself, as where rounding to
            the weights' digits would cost privacy.
    """

    weights_d: Vector
    integers_m: IntegerVector
    num_examples: int
    num_steps: int
    training: MetricSums | None
    is_update: bool = False


class Trainer(Protocol):
    """Local training. Implementations: torch, a toy quadratic in the tests."""

    def layout(self) -> Layout:
        """Layout of the model that this trainer trains."""
        ...

    def fit(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> LocalResult:
        """Do a round's local training from the given weights, which stay as is."""
        ...

    def evaluate(self, weights_d: Vector, integers_m: IntegerVector) -> MetricSums:
        """Sums over the site's held-out data."""
        ...

    def spent(self) -> PrivacySpent | None:
        """What the site's privacy ledger says by now; None if it keeps none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedUpdate:
    """An update that passed every check, and how much it counts.

    Attributes:
        site: Who sent it.
        delta_d: Shape ``(d,)``, finite.
        weight: At least 0; not normalised.
    """

    site: SiteId
    delta_d: Vector
    weight: float


class CombineRule(Protocol):
    """Many updates to one. Implementations: ``aggregator.combine``."""

    def __call__(self, updates: Iterable[WeightedUpdate], out_d: Vector) -> Vector:
        """Consume the updates as they come and write their combination.

        Args:
            updates: Possibly a generator that waits for the network.
            out_d: Shape ``(d,)``, float32; overwritten and returned.

        Raises:
            ValueError: There are too few updates for the rule, or no weight.
        """
        ...


OptimizerState = Mapping[str, Vector]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """A server optimiser as a pair of functions: ``aggregator.server_optimizer``.

    Attributes:
        init: From the length d to a fresh state: named vectors of shape ``(d,)``.
        apply: ``(weights_d, state, update_d) -> (new weights, new state)``, where
            ``update_d`` is the combined update (local minus global). The new
            weights are written over ``update_d``, the state over itself, and
            ``weights_d`` is left alone: no other memory of size d is used.
    """

    init: Callable[[int], OptimizerState]
    apply: Callable[[Vector, OptimizerState, Vector], tuple[Vector, OptimizerState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store knows of an object.

    Attributes:
        key: Its key.
        size: Bytes.
        version: Opaque; changes whenever the content changes.
    """

    key: str
    size: int
    version: str


class ObjectStore(Protocol):
    """Named bytes. Implementations: ``cloud_adapters.storage``."""

    def put(
        self, key: str, data: Iterable[Buffer], *, if_absent: bool = False
    ) -> ObjectInfo:
        """Write an object whole or not at all, durably.

        Args:
            key: ``/``-separated; see ``cloud_adapters.storage.keys``.
            data: The content in pieces, so that it need not be in one buffer.
            if_absent: Fail if the key is taken: of many writers one wins.

        Raises:
            ObjectExists: ``if_absent`` and the key is taken.
            StoreUnavailable: The store is full, read-only or out of reach.
        """
        ...

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Bytes ``[start, start + length)`` of an object; to its end by default.

        Raises:
            ObjectNotFound: There is no such object.
            StoreUnavailable: The store is out of reach.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Size and version of an object.

        Raises:
            ObjectNotFound: There is no such object.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that the next round depends on.

    Attributes:
        round_index: Rounds that have ended; 0 before the first.
        weights_d: The global model, shape ``(d,)``.
        integers_m: Its integer values, shape ``(m,)``.
        optimizer: State of the server optimiser.
        rounds_completed: Rounds after which the weights changed.
        lost_in_a_row: Rounds without result since the last completed one.
        update_clip: What updates are clipped to in the next round, where that
            adapts to them; otherwise None.
    """

    round_index: int
    weights_d: Vector
    integers_m: IntegerVector
    optimizer: OptimizerState
    rounds_completed: int
    lost_in_a_row: int
    update_clip: float | None = None


class Checkpoints(Protocol):
    """Durable states of one run. Implementation: ``aggregator.checkpoint``."""

    def load_latest(self) -> RunState | None:
        """The newest state that is whole, or None if the run has none.

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
            StoreUnavailable: The store is full, read-only or out of reach.
        """
        ...
