"""A site: it answers one task at a time.

What it does for a round is the same however the answer leaves: restore what it keeps,
pay, evaluate, train, seal the update, keep what the next round needs. A *seal* decides
how it leaves: as it is here, as masked words in ``clients.privacy.ring_seal``.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import Generic, Protocol

from clients.methods.guest import NotFinite
from clients.methods.registry import if_counted
from clients.training.error_feedback import ErrorFeedback
from clients.training.held_model import HeldModel
from clients.training.kept_steps import LeftAtStep
from clients.training.site_state import NOTHING, Fact, KeptState, SiteState
from clients.training.update import Form, SealedT, local_weights
from clients.user_code import sentence
from federation.compression.codec import BeyondCodec, Links
from federation.errors import (
    AggregatorAtFault,
    BudgetExceeded,
    FederationError,
    ProtocolError,
    SiteError,
    StoreError,
)
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    MetricSums,
    Phase,
    PrivacySpent,
    Resources,
    RoundTask,
    SecureAnswer,
    SecureTask,
    SiteEvaluation,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import (
    Clock,
    FitArguments,
    LocalUpdate,
    LocalWeights,
    RoundCharges,
    ServerOptimizer,
    Trainer,
    WorksAhead,
)
from federation.resources import CLOCK, Usage, UsageMeter
from federation.rounds.failures import failure
from federation.rounds.local_work import check_not_taken
from federation.rounds.server_optimizer import average
from federation.vectors import (
    Arrays,
    IntegerVector,
    Layout,
    Vector,
    layout_differs,
)
from privacy.secagg.errors import NoState, NotSetUp, ReplayedRound

_LOG = logging.getLogger(__name__)
_IN_THE_CLEAR = (
    "was asked for secure aggregation but was set up without it: give the site the "
    "same job as the run"
)

# A fact that a round leaves: steps of the run up to its end.
_STEPS_TAKEN = "steps_taken"


@dataclass(slots=True, kw_only=True, eq=False)
class TrainResult(Generic[SealedT]):
    """The result of training, with a sealed update.

    Attributes:
        sealed: The update, as the seal made it.
        integers_m: The model's integer values, without those that the site keeps.
        num_examples: As in ``LocalResult``.
        num_steps: As there.
        training: As there.
        evaluation_after: Evaluation of the site's own model, if asked.
    """

    sealed: SealedT
    integers_m: IntegerVector
    num_examples: int
    num_steps: int
    training: MetricSums | None
    evaluation_after: MetricSums | None


@dataclass(slots=True, kw_only=True, eq=False)
class WorkResult(Generic[SealedT]):
    """The result of a site's work on a task.

    Attributes:
        trained: None if the task was to evaluate only.
        evaluation: Evaluation of the global model, if asked.
        phases: Where the time went.
        resources: What the work took.

    The last two are empty where the site may not say them.
    """

    trained: TrainResult[SealedT] | None
    evaluation: MetricSums | None
    phases: tuple[Phase, ...]
    resources: Resources | None


Report = Callable[[Task, Exception], None]
CheckFirst = Callable[[Vector, IntegerVector], None]


def log(task: Task, error: Exception) -> None:
    """Log an error at the site, whose log may quote its records."""
    index = task.round_index
    place = f"round {index}" if index else "the setup of secure aggregation"
    said = str(error)  # A record that keeps the error keeps all that its frames hold.
    if isinstance(error, LeftAtStep):
        _LOG.warning("%s", said)
    elif _kind_of(error) is not FailureKind.CRASHED:
        _LOG.warning("%s refused: %s", place, said)
    elif isinstance(error, StoreError):
        _LOG.warning("%s failed: %s", place, said)
    else:  # In code that the site's operator may have to look at.
        _LOG.warning("%s failed", place, exc_info=error)


CheckWork = Callable[[RoundTask], None]


def _any_work(task: RoundTask) -> None:
    """Take any task, as where no number of local steps is chosen."""


def _any_model(weights_d: Vector, integers_m: IntegerVector) -> None:
    """Take any first model, as where the site's own factory cannot say which."""


class Seal(Protocol):
    """How a site's answers leave it."""

    def step(self, task: SecureTask, layout: Callable[[], Layout]) -> SecureAnswer:
        """Take a step of the secure-aggregation protocol.

        Args:
            task: The step.
            layout: Loads the site's model, if need be, and tells its layout.

        Raises:
            ProtocolError: The step is not due.
        """
        ...

    def answer(self, task: RoundTask, work: "Work") -> SiteMessage:
        """Check a task, do the work, and seal the result.

        Raises:
            ProtocolError: The task is not one to answer; nothing was done.
        """
        ...

    def close(self) -> None:
        """Erase every key of the run."""
        ...


@dataclass(eq=False)
class Site:
    """What one site does, whichever engine brings the tasks.

    Attributes:
        name: Its name in the job.
        make_trainer: Called before the first task; loads data and model.
        state: What it keeps of the run.
        clock: Measures how long work takes.
        meter: Measures what else it takes.
        withheld: Fields of its work that the site does not send; see
            ``federation.job.disclosure``.
        seal: How answers leave the site; unmasked by default.
        links: The job's codecs.
        optimizer: The job's server optimiser, where sites take its steps themselves.
        check_first: Checks float and integer values of the model before the first
            round, and raises a ``ProtocolError`` if they are not the job's.
        check_work: Checks the local steps that a task asks for; raises a
            ``ProtocolError`` if the job does not allow them.
        tells_all: Whether the text of any error leaves the site, as is good in a
            simulation. If not, of errors that are not ours only their kind does,
            since they may quote a record.
        report: Takes every error whole, here at the site; by default its log does.
        works_ahead: Whether the site begins with the next round while its answer is on
            its way. In one process with all others that would gain nothing.
    """

    name: SiteId
    _: KW_ONLY
    make_trainer: Callable[[], Trainer]
    state: SiteState
    clock: Clock
    meter: UsageMeter = CLOCK
    withheld: Collection[str] = ()
    seal: InitVar[Seal | None] = None
    links: InitVar[Links] = Links()  # noqa: RUF009 -- immutable
    optimizer: InitVar[ServerOptimizer] = average(lr=1.0)  # noqa: RUF009 -- as well
    check_first: CheckFirst = _any_model
    check_work: CheckWork = _any_work
    tells_all: bool = True
    report: Report = log
    works_ahead: bool = False

    def __post_init__(
        self, seal: Seal | None, links: Links, optimizer: ServerOptimizer
    ) -> None:
        """Make a site."""
        self._held = HeldModel(
            links,
            optimizer=optimizer,
            layout=lambda: self._current_trainer().layout(),
            allocate=self.state.allocate,
        )
        self._seal: Seal = PlainSeal(links) if seal is None else seal
        self._trainer: Trainer | None = None

    def handle(self, task: Task) -> SiteMessage:
        """Answer a task; any error becomes a ``SiteFailure``."""
        try:
            if isinstance(task, SecureTask):
                return self._seal.step(task, lambda: self._current_trainer().layout())
            return self._answer(task)
        except Exception as error:  # noqa: BLE001 -- a site never takes the run down
            self.report(task, error)
            return failure(task, _kind_of(error), self._text(error))

    def close(self) -> None:
        """Let go of model and data, and erase the keys of the run."""
        self._trainer = None
        self._seal.close()

    def _work(self, task: RoundTask) -> "Work":
        return Work(
            task=task,
            find_trainer=self._current_trainer,
            state=self.state,
            clock=self.clock,
            held=self._held,
            check_first=self.check_first,
            meter=self.meter,
            withheld=self.withheld,
            report=self.report,
        )

    def _answer(self, task: RoundTask) -> SiteMessage:
        """Do a round's work, and begin with that of the round that is expected next."""
        self.check_work(task)
        work = self._work(task)
        answer = self._seal.answer(task, work)
        trainer = self._current_trainer()
        if self.works_ahead and work.kept_now and isinstance(trainer, WorksAhead):
            following = task.steps.stop if task.steps else None
            trainer.work_ahead(task.round_index + 1, work.kept_now, following)
        return answer

    def _text(self, error: Exception) -> str:
        if self.tells_all:
            return sentence(error)
        if isinstance(error, FederationError):
            return error.outside
        return type(error).__name__

    def _current_trainer(self) -> Trainer:
        if self._trainer is None:
            self._trainer = self.make_trainer()
        return self._trainer


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """What a site does for one task, for any seal.

    Attributes:
        find_trainer: Finds the trainer, which is loaded for it.
        state: What the site keeps of the run.
        clock: Measures how long the work takes.
        held: Reads the model.
        check_first: As in ``Site``.
        meter: Measures what else it takes.
        withheld: Fields of the result that the site does not send.
        report: Takes what is wrong with the work, if the seal says less of it.
        kept: What an earlier round left, which the work begins with.
        earlier: Finds what another round left; where a task names the state, nothing.
        steps_taken: Steps of the run up to the end of the site's last round.
        context: The round's ctx_r as hexadecimal digits, in a secure sum.
        kept_now: What training has the site keep of this one.
        answers_anyway: Whether training that fails counts as an update of zero, to
            which the seal adds noise. Whether it fails depends on the site's records,
            and nothing else that leaves the site tells this without noise.
    """

    task: RoundTask
    find_trainer: Callable[[], Trainer]
    state: SiteState
    clock: Clock
    held: HeldModel
    check_first: CheckFirst
    meter: UsageMeter
    withheld: Collection[str]
    report: Report
    kept: KeptState = NOTHING
    earlier: Callable[[RunId, int], KeptState] = lambda _run_id, _round: NOTHING
    steps_taken: int = 0
    context: str = ""
    kept_now: Arrays = field(default_factory=dict)
    answers_anyway: bool = False

    def check_model(self) -> None:
        """Check that the task is about the site's model, which is loaded for it.

        The first round's must also have the values that the job begins with.

        Raises:
            ProtocolError: It is about another one.
        """
        task, layout = self.task, self.find_trainer().layout()
        if task.layout_digest != layout.digest:
            raise ProtocolError(
                f"{layout_differs(layout)}: give the site the job's model factory and "
                "options"
            )
        if 0 in {task.based_on, task.round_index - 1}:
            self.check_first(self.held.whole(task), task.integers_m)

    def begin_with_last(self) -> None:
        """Begin with what the site's last round left."""
        task, state = self.task, self.state
        trains = task.kind is TaskKind.TRAIN
        self.kept = state.before(task.run_id, task.round_index, trains=trains)
        self.earlier = state.of
        self.steps_taken = _steps_taken(self.kept)

    def begin_with_named(self) -> None:
        """Begin with the state that the task names, as every site of a secure sum.

        Raises:
            NoState: This site does not have it.
        """
        task, state = self.task, self.state
        name, index = task.begins_with, task.round_index
        self.kept = last = state.named(task.run_id, name)
        if task.steps is not None and state.newest(index) != task.state_round:
            last = state.before(task.run_id, index)
        self.steps_taken = _steps_taken(last)

    def do(self, form: Form[SealedT]) -> WorkResult[SealedT]:
        """Evaluate and train as asked; the update leaves in a form."""
        task, trainer, state = self.task, self.find_trainer(), self.state
        usage, watch = Usage(self.clock, self.meter), _Stopwatch(self.clock)
        weights_d = self.held.receive(task)
        evaluate = partial(trainer.evaluate, round_index=task.round_index)
        trains = task.kind is TaskKind.TRAIN
        kept = self.kept
        if task.steps is not None:
            check_not_taken(task.steps, self.steps_taken)
        integers_m = state.restore_integers(task.integers_m, kept)
        begin_d = form.begin(kept, weights_d) if trains else weights_d
        after = trains and task.evaluate_after
        before = task.evaluate or after or not trains
        charges: RoundCharges = {
            "round_index": task.round_index,
            "trains": trains,
            "evaluations": before + after,
            "anchor": task.anchor,
        }
        if task.steps is not None:
            charges["steps"] = len(task.steps)
        trainer.pay(**charges)
        evaluation = evaluation_after = trained = None
        if before:
            with watch.phase("evaluate"):
                evaluation = evaluate(weights_d, integers_m, kept=kept.arrays)
        if trains:
            with watch.phase("train"):
                result = self._fit(trainer, begin_d, integers_m, kept)
            if after:
                with watch.phase("evaluate"):
                    local_d = local_weights(weights_d, result)
                    evaluation_after = evaluate(
                        local_d, result.integers_m, kept=result.kept
                    )
            with watch.phase("prepare"):
                sealed = form.update(weights_d, result)
                self._keep(result, *form.left())
            trained = TrainResult(
                sealed=sealed,
                integers_m=state.conceal(result.integers_m),
                num_examples=result.num_examples,
                num_steps=result.num_steps,
                training=result.training,
                evaluation_after=evaluation_after,
            )
        return WorkResult(
            trained=trained,
            evaluation=evaluation,
            phases=() if "phases" in self.withheld else watch.phases(),
            resources=None if "resources" in self.withheld else usage.so_far(),
        )

    def _fit(
        self,
        trainer: Trainer,
        weights_d: Vector,
        integers_m: IntegerVector,
        kept: KeptState,
    ) -> LocalWeights | LocalUpdate:
        """Train; change nothing where training fails and nothing may show that."""
        task = self.task
        given: FitArguments = {
            "round_index": task.round_index,
            "kept": if_counted(
                kept.arrays,
                task.counted,
                earlier=lambda: self.earlier(task.run_id, task.counted).arrays,
                site=task.site,
            ),
        }
        if task.steps is not None:
            given["steps"] = task.steps
        try:
            return trainer.fit(weights_d, integers_m, **given)
        except Exception as error:
            # The user's code may raise anything.
            if not (self.answers_anyway and _shows_records(error)):
                raise
            self.report(task, error)
            _LOG.warning("training failed: the update is only noise")
            return _untrained(weights_d, integers_m, kept)

    def _keep(
        self,
        result: LocalWeights | LocalUpdate,
        left: Arrays,
        facts: Mapping[str, Fact],
    ) -> None:
        """Store what the next round begins with."""
        task, state = self.task, self.state
        own = {**state.own_integers(result.integers_m), **result.kept}
        if task.steps is not None:
            facts = {**facts, _STEPS_TAKEN: task.steps.stop}
        self.kept_now = result.kept
        state.keep(
            task.run_id,
            task.round_index,
            {**own, **left},
            facts,
            context=self.context,
            before=task.state_round,
        )

    def spent(self) -> PrivacySpent | None:
        """The current spending in the site's privacy ledger."""
        return self.find_trainer().spent()


class PlainSeal:
    """Updates leave in words of a codec, sums unchanged."""

    def __init__(self, links: Links) -> None:
        """Encode updates with the job's codec."""
        self._links = links

    def step(
        self,
        task: SecureTask,  # noqa: ARG002 -- of the seam
        layout: Callable[[], Layout],  # noqa: ARG002 -- of the seam
    ) -> SecureAnswer:
        """Refuse; see ``Seal``."""
        raise ProtocolError(_IN_THE_CLEAR)

    def answer(self, task: RoundTask, work: Work) -> SiteMessage:
        """Send what was done; see ``Seal``.

        Raises:
            NotFinite: Training left the finite numbers.
            BeyondCodec: It left those of the codec.
        """
        if task.secure:
            raise ProtocolError(_IN_THE_CLEAR)
        work.check_model()
        work.begin_with_last()
        done = work.do(ErrorFeedback(self._links, task))
        trained = done.trained
        if trained is None:
            if done.evaluation is None:
                raise ProtocolError("an evaluation returned no sums")
            return SiteEvaluation(
                run_id=task.run_id,
                round_index=task.round_index,
                site=task.site,
                evaluation=done.evaluation,
                phases=done.phases,
                spent=work.spent(),
                based_on=task.based_on,
                fragment=task.fragment,
            )
        return SiteUpdate(
            run_id=task.run_id,
            round_index=task.round_index,
            site=task.site,
            layout_digest=task.layout_digest,
            delta_d=trained.sealed,
            integers_m=trained.integers_m,
            num_examples=trained.num_examples,
            num_steps=trained.num_steps,
            training=trained.training,
            evaluation=done.evaluation,
            evaluation_after=trained.evaluation_after,
            phases=done.phases,
            spent=work.spent(),
            based_on=task.based_on,
            fragment=task.fragment,
            resources=done.resources,
        )

    def close(self) -> None:
        """Hold no keys."""


class _Stopwatch:
    """Measures what a site spends its time on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = clock.monotonic()
        self._phases: list[Phase] = []

    def phase(self, name: str) -> "_Stopwatch":
        """Time the block that this is entered for; blocks are not nested."""
        self._name = name
        return self

    def __enter__(self) -> None:
        self._begin = self._clock.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._phases.append(
                Phase(
                    name=self._name,
                    start_seconds=self._begin - self._start,
                    seconds=self._clock.monotonic() - self._begin,
                )
            )

    def phases(self) -> tuple[Phase, ...]:
        """What was timed so far."""
        return tuple(self._phases)


def _steps_taken(kept: KeptState) -> int:
    return int(kept.facts.get(_STEPS_TAKEN, 0))


def _shows_records(error: Exception) -> bool:
    """Whether training that failed so may have failed because of a record.

    Errors of ours that are none of a site's data depend on the job, the aggregator's
    messages, the ledger or the site's store; and who leaves says so anyway.
    """
    if isinstance(error, FederationError):
        return isinstance(error, SiteError) and not isinstance(error, LeftAtStep)
    return True


def _untrained(
    weights_d: Vector, integers_m: IntegerVector, kept: KeptState
) -> LocalWeights:
    """The result of training that has changed nothing, of a site that counts as any."""
    return LocalWeights(
        weights_d=weights_d.copy(),
        integers_m=integers_m.copy(),
        num_examples=1,
        num_steps=0,
        training=None,
        kept=kept.arrays,
    )


def _kind_of(error: Exception) -> FailureKind:
    kinds = {
        NotSetUp: FailureKind.NOT_SET_UP,
        NoState: FailureKind.NO_STATE,
        AggregatorAtFault: FailureKind.AGGREGATOR,
        ReplayedRound: FailureKind.DUPLICATE,
        ProtocolError: FailureKind.INVALID,
        BudgetExceeded: FailureKind.BUDGET,
        NotFinite: FailureKind.NOT_FINITE,
        BeyondCodec: FailureKind.NOT_FINITE,
    }
    found = (kind for of, kind in kinds.items() if isinstance(error, of))
    return next(found, FailureKind.CRASHED)
