"""A site: it answers one task at a time."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clients.training import update
from clients.training.kept_integers import KeptIntegers
from federation.errors import BudgetExceeded, FederationError
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    Phase,
    RoundTask,
    SiteEvaluation,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import Clock, Trainer
from federation.rounds.failures import failure
from federation.vectors import layout_differs

_LOG = logging.getLogger(__name__)


class Site:
    """What one site does, whichever engine brings the tasks."""

    def __init__(
        self,
        name: SiteId,
        *,
        make_trainer: Callable[[], Trainer],
        kept: KeptIntegers,
        clock: Clock,
        tells_all: bool = True,
    ) -> None:
        """Make a site.

        Args:
            name: Its name in the job.
            make_trainer: Called before the first task; loads data and model.
            kept: Integer values that never leave the site.
            clock: Measures how long work takes.
            tells_all: Whether the text of any error leaves the site, as is good in a
                simulation. If not, of errors that are not ours only their kind does,
                since they may quote a record; the rest is in the site's own log.
        """
        self._name = name
        self._tells_all = tells_all
        self._make_trainer = make_trainer
        self._kept = kept
        self._clock = clock
        self._trainer: Trainer | None = None

    def handle(self, task: Task) -> SiteMessage:
        """Answer a task; whatever goes wrong becomes a ``SiteFailure``."""
        try:
            return self._answer(task)
        except Exception as error:  # noqa: BLE001 -- a site never takes the run down
            if self._tells_all or isinstance(error, FederationError):
                _LOG.debug("site_task_failed", exc_info=True)
                return failure(task, _kind_of(error), _text(error))
            _LOG.warning("round %s failed", task.round_index, exc_info=error)
            return failure(task, FailureKind.CRASHED, type(error).__name__)

    def close(self) -> None:
        """Let go of model and data; the site holds no keys."""
        self._trainer = None

    def _answer(self, task: Task) -> SiteMessage:
        if not isinstance(task, RoundTask) or task.secure:
            return failure(
                task,
                FailureKind.INVALID,
                "was asked for secure aggregation and answers in the clear only: give "
                "the site the run's own job",
            )
        if self._trainer is None:
            self._trainer = self._make_trainer()
        trainer = self._trainer
        if task.layout_digest != trainer.layout().digest:
            return failure(
                task,
                FailureKind.INVALID,
                f"{layout_differs(trainer.layout())}: give the site the job's model "
                "factory and options",
            )
        if task.kind is TaskKind.EVALUATE:
            return self._evaluate(task, trainer)
        return self._train(task, trainer)

    def _evaluate(self, task: RoundTask, trainer: Trainer) -> SiteEvaluation:
        watch = _Stopwatch(self._clock)
        integers_m = self._kept.restore(task.integers_m, task.round_index)
        trainer.pay(
            round_index=task.round_index,
            trains=False,
            evaluations=1,
            anchor=task.anchor,
        )
        with watch.phase("evaluate"):
            sums = trainer.evaluate(
                task.weights_d, integers_m, round_index=task.round_index
            )
        return SiteEvaluation(
            run_id=task.run_id,
            round_index=task.round_index,
            site=self._name,
            evaluation=sums,
            phases=watch.phases(),
            spent=trainer.spent(),
            based_on=task.based_on,
            fragment=task.fragment,
        )

    def _train(self, task: RoundTask, trainer: Trainer) -> SiteUpdate:
        watch = _Stopwatch(self._clock)
        evaluation = evaluation_after = None
        integers_m = self._kept.restore(task.integers_m, task.round_index)
        before = task.evaluate or task.evaluate_after
        trainer.pay(
            round_index=task.round_index,
            trains=True,
            evaluations=before + task.evaluate_after,
            anchor=task.anchor,
        )
        if before:
            with watch.phase("evaluate"):
                evaluation = trainer.evaluate(
                    task.weights_d, integers_m, round_index=task.round_index
                )
        with watch.phase("train"):
            result = trainer.fit(
                task.weights_d, integers_m, round_index=task.round_index
            )
        if task.evaluate_after:
            with watch.phase("evaluate"):
                evaluation_after = trainer.evaluate(
                    update.local_weights(task.weights_d, result),
                    result.integers_m,
                    round_index=task.round_index,
                )
        with watch.phase("prepare"):
            delta_d = update.prepare(task.weights_d, result)
            self._kept.keep(result.integers_m, task.round_index)
        return SiteUpdate(
            run_id=task.run_id,
            round_index=task.round_index,
            site=self._name,
            layout_digest=task.layout_digest,
            delta_d=delta_d,
            integers_m=self._kept.conceal(result.integers_m),
            num_examples=result.num_examples,
            num_steps=result.num_steps,
            training=result.training,
            evaluation=evaluation,
            evaluation_after=evaluation_after,
            phases=watch.phases(),
            spent=trainer.spent(),
            based_on=task.based_on,
            fragment=task.fragment,
        )


class _Stopwatch:
    """Notes what a site's time goes to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = clock.monotonic()
        self._phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        begin = self._clock.monotonic()
        yield
        self._phases.append(
            Phase(
                name=name,
                start_seconds=begin - self._start,
                seconds=self._clock.monotonic() - begin,
            )
        )

    def phases(self) -> tuple[Phase, ...]:
        """What was timed so far."""
        return tuple(self._phases)


def _kind_of(error: Exception) -> FailureKind:
    if isinstance(error, BudgetExceeded):
        return FailureKind.BUDGET
    if isinstance(error, update.NotFinite):
        return FailureKind.NOT_FINITE
    return FailureKind.CRASHED


def _text(error: Exception) -> str:
    if isinstance(error, FederationError):
        return str(error)
    return f"{type(error).__name__}: {error}"
