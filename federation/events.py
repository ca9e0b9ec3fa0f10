"""What happens in a run, as typed events.

The coordinator emits them, ``log`` writes them as JSON lines, and everything in
``monitoring`` reads only them. Times are seconds since the epoch (``at``) or
durations; sizes are bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from federation.messages import FailureKind, MetricSums, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteShare:
    """What one site holds.

    Attributes:
        site: Its name.
        cloud: Where it runs.
        region: The cloud's name of the region.
        train_examples: Training examples.
        held_out_examples: Examples kept for evaluation.
        counts: Training examples by class or by group, in the order of ``labels``
            of the event; empty if the data has neither.
    """

    site: str
    cloud: str
    region: str
    train_examples: int
    held_out_examples: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A coordinator has begun, or gone on with, a run."""

    at: float
    run_id: str
    job_name: str
    rounds: int
    first_round: int
    sites: tuple[str, ...]
    parameters: int
    engine: str
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDistributed:
    """Who holds what (simulation: the partition)."""

    at: float
    label_kind: str  # "class", "group" or ""
    labels: tuple[str, ...]
    shares: tuple[SiteShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """Tasks are about to go out."""

    at: float
    round_index: int
    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteAnswered:
    """A site's update was accepted and folded in.

    ``asked_seconds`` and ``answered_seconds`` count from the start of the round.
    ``evaluation`` is of the global model that the round began with.
    """

    at: float
    round_index: int
    site: str
    asked_seconds: float
    answered_seconds: float
    bytes_down: int
    bytes_up: int
    num_examples: int
    num_steps: int
    weight: float
    training: MetricSums
    evaluation: MetricSums | None
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFailed:
    """An answer was refused, or none came."""

    at: float
    round_index: int
    site: str
    kind: FailureKind
    message: str
    asked_seconds: float
    answered_seconds: float
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluated:
    """The global model after ``round_index`` rounds, on held-out data.

    Sites evaluate the model that a round begins with, so this follows one round
    behind. Round 0 is the initial model. The tuples run in parallel with ``sites``;
    bytes are those of an exchange for evaluation alone, as after the last round,
    and 0 where the metrics came along with updates.
    """

    at: float
    round_index: int
    pooled: MetricSums
    sites: tuple[str, ...]
    by_site: tuple[MetricSums, ...]
    bytes_down: tuple[int, ...]
    bytes_up: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """The canonical line of a round.

    Attributes:
        at: When it ended.
        round_index: 1 for the first.
        status: ``completed``; or ``lost`` (no quorum) or ``discarded`` (result not
            finite): the weights are then those of the round before.
        asked: Sites that were asked.
        answered: Sites whose update was folded in.
        failed: Number of refused or missing answers by kind.
        bytes_down: To all sites.
        bytes_up: From all sites.
        seconds: The whole round.
        phases: Where the aggregator's time went.
        training: Pooled over the sites, taken while they trained.
        update_norm: Euclidean norm of the combined update; None if there is none.
    """

    at: float
    round_index: int
    status: str
    asked: tuple[str, ...]
    answered: tuple[str, ...]
    failed: tuple[tuple[str, int], ...]
    bytes_down: int
    bytes_up: int
    seconds: float
    phases: tuple[Phase, ...]
    training: MetricSums | None
    update_norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """The state after a round is durable."""

    at: float
    round_index: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped:
    """A checkpoint was torn or corrupt; the one before it is used."""

    at: float
    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something that a person should know and that does not stop the run."""

    at: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The coordinator has ended.

    Attributes:
        at: When.
        status: ``completed``, ``stopped`` (on request) or ``failed``.
        rounds_completed: Rounds after which the weights changed.
        last_round: Index of the last round that ended.
        message: Why it ended, if not completed.
        seconds: Since this coordinator began.
    """

    at: float
    status: str
    rounds_completed: int
    last_round: int
    message: str
    seconds: float


Event = (
    RunStarted
    | DataDistributed
    | RoundStarted
    | SiteAnswered
    | SiteFailed
    | ModelEvaluated
    | RoundFinished
    | CheckpointSaved
    | CheckpointSkipped
    | Warned
    | RunFinished
)

Emit = Callable[[Event], None]
