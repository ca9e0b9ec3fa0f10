"""What a site's log says of a run: when it is accepted, begins here and ends."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field

from deploy.site_host.run_status import RunStatus, sent_by
from federation.epsilon_text import format_cap, format_epsilon
from federation.events import SitePrivacy
from federation.ids import RunId
from federation.job.evaluation_job import evaluates_only
from federation.job.spec import JobSpec
from federation.job.statistics_checks import planned_rounds
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    PrivacySpent,
    RoundTask,
    SiteEvaluation,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import Clock
from federation.wire import frame as wire
from monitoring.units import format_count

_HOW = {
    "stopped": "was stopped",
    "exhausted": "ran out of privacy budget",
    "failed": "failed",
}


@dataclass(eq=False)
class RunLines:
    """One run, as this process of the site sees it.

    Attributes:
        job: As proposed, with the rounds of extensions.
        promise: What the site has promised; None without differential privacy.
        data: Says on which data it trains.
        listener: Called with each line.
        total: Says what all runs on the site's records have spent together.
        save: Called with the status of the run when that has changed.
        clock: Tells time.
        audit: Called with how the run has ended here, and the rounds answered.
        before: What an earlier process, or an earlier coordinator, came to here.
        reports_energy: Whether the operator lets the energy of rounds leave the site.
    """

    run_id: RunId
    _: KW_ONLY
    job: JobSpec
    promise: SitePrivacy | None
    data: str
    listener: Callable[[str], None]
    total: Callable[[], str]
    save: Callable[[RunStatus], None]
    clock: Clock
    audit: Callable[[str, int], None]
    before: RunStatus | None = None
    reports_energy: bool = False
    _rounds: set[int] = field(default_factory=set, init=False)
    _evaluations: int = field(default=0, init=False)
    _spent: PrivacySpent | None = field(default=None, init=False)
    _failure: str = field(default="", init=False)
    _took: tuple[int, int, float] = field(default=(0, 0, 0.0), init=False)
    _has_begun: bool = field(default=False, init=False)
    _is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Go on counting where they stopped."""
        for first, last in self.before.spans if self.before else ():
            self._rounds.update(range(first, last + 1))
        if self.before is not None:
            known = self.before
            self._took = (known.bytes_down, known.bytes_up, known.seconds)

    @property
    def is_over(self) -> bool:
        """Whether nothing more of the run is expected here."""
        return self._is_over

    def accept(self) -> None:
        """Say that the site takes part, if the others do."""
        protection = "no differential privacy"
        if self.promise is not None:
            cap, delta = self.promise.epsilon_cap, self.promise.delta
            at_most = f"epsilon at most {format_cap(cap)}"
            protection = f"{at_most} with delta {delta:.1e}"
        secret = self.job.privacy.secure_aggregation.enabled
        self.listener(
            f"accepts run {self.run_id}: job {self.job.name!r}, {self._asked}, "
            f"{protection}, {'' if secret else 'no '}secure aggregation; "
            f"{self.data}; waits for the other sites"
        )
        self._save("accepted")

    def begin(self) -> None:
        """Say that the first task has come."""
        if not self._has_begun:
            self.listener(f"run {self.run_id} begins")
            self._save("begun")
        self._has_begun = True

    def note(self, task: Task, answer: SiteMessage, seconds: float = 0.0) -> None:
        """Count an answer, and the work on it; say so if it is the last one."""
        down, up, worked = self._took
        sizes = wire.encoded_size(task), wire.encoded_size(answer)
        self._took = (down + sizes[0], up + sizes[1], worked + seconds)
        if isinstance(answer, SiteFailure) and answer.kind is not FailureKind.LEAVING:
            told = wire.one_line(answer.message)
            self._failure = f"round {task.round_index}: {told}"
            self._save("answered" if self._rounds else "begun")
        if not isinstance(answer, SiteUpdate | SiteEvaluation | MaskedUpdate):
            return
        self._failure = ""
        self._spent = answer.spent or self._spent
        if not isinstance(task, RoundTask):
            return
        if task.kind is TaskKind.TRAIN:
            self._rounds.add(task.round_index)
        else:
            self._evaluations += 1
        if evaluates_only(self.job):
            model = (self.job.model.weights or "").partition("@")[0]
            left = ", ".join(sent_by(self.job))
            self.listener(f"run {self.run_id}: evaluated {model}; sends {left}")
        self._save("answered")
        is_last = self.job.evaluation.every == 0 and task.round_index == self.job.rounds
        if task.kind is TaskKind.EVALUATE or is_last:
            self._end("is over")

    def end(self, outcome: str) -> None:
        """Say how the run has ended.

        Args:
            outcome: As the aggregator has signed it; empty if it only says that the
                site cannot join.
        """
        if self._is_over and outcome:  # Its last task has come before this word.
            self._save(outcome)
        where = "before its last round" if self._has_begun else "before it began here"
        how = f"{_HOW.get(outcome, 'ended')} {where}"
        self._end("is over" if outcome == "completed" else how, state=outcome)

    def leave(self, *, for_another: bool = False) -> None:
        """Say that the site leaves a run that may go on."""
        if self._has_begun and for_another:
            self._end("makes way for another run, and may be resumed")
        elif self._has_begun:
            self._end("is left, and may continue without this site")
        else:
            self._end("did not start while this site waited for it")

    def _end(self, how: str, *, state: str = "") -> None:
        if self._is_over:
            return
        self._is_over = True
        spent = ""
        if self._spent is not None and self.promise is not None:
            cap = format_cap(self.promise.epsilon_cap)
            training = format_epsilon(self._spent.epsilon)
            spent = f", epsilon {training} of {cap} spent on training"
            held_out = self._spent.held_out_epsilon
            if held_out is not None:
                spent += f" and {format_epsilon(held_out)} of {cap} on evaluations"
            spent += self.total()
        self._save(state or how)
        self.audit(how, len(self._rounds))
        answered, last = f"{len(self._rounds)}", ""
        if evaluates_only(self.job):
            answered = format_count(self._evaluations, "evaluation")
        elif self._rounds:
            last = f", the last one {max(self._rounds)}"
        self.listener(
            f"run {self.run_id} {how}: job {self.job.name!r}, {self._asked}, "
            f"{answered} answered by this site{last}{spent}"
        )

    @property
    def _asked(self) -> str:
        """What the job asks."""
        if evaluates_only(self.job):
            return "no training"
        what = " of statistics" if self.job.statistics else ""
        return f"{format_count(self._planned, 'round')}{what}"

    @property
    def _planned(self) -> int:
        """Rounds of the job; of statistics, spare ones only as far as they were."""
        if self.job.statistics is None:
            return self.job.rounds
        return max(planned_rounds(self.job), len(self._rounds))

    def _save(self, state: str) -> None:
        promise, spent = self.promise, self._spent or self.before
        down, up, seconds = self._took
        self.save(
            RunStatus(
                run_id=self.run_id,
                job=self.job.name,
                state=state,
                rounds=self._planned,
                answered=len(self._rounds),
                last_round=max(self._rounds, default=0),
                spans=_spans(self._rounds),
                at=self.clock.now(),
                data=self.data,
                sent=sent_by(self.job, reports_energy=self.reports_energy),
                epsilon_cap=None if promise is None else promise.epsilon_cap,
                epsilon=None if spent is None else spent.epsilon,
                held_out_epsilon=None if spent is None else spent.held_out_epsilon,
                bytes_down=down,
                bytes_up=up,
                seconds=seconds,
                failure=self._failure,
            )
        )


def _spans(rounds: Collection[int]) -> tuple[tuple[int, int], ...]:
    """First and last round of each row without a gap."""
    firsts = sorted(index for index in rounds if index - 1 not in rounds)
    lasts = sorted(index for index in rounds if index + 1 not in rounds)
    return tuple(zip(firsts, lasts, strict=True))


def lost_work(job: JobSpec, task: Task) -> str:
    """What it means that a process ends in the middle of a task."""
    private = job.privacy.differential_privacy.enabled
    charged = ", but its charge to the privacy budget stays" if private else ""
    waits = (
        "If the site is back before the round ends, it is asked again; the round waits "
        "only if its quorum needs this site"
        if job.repeats_tasks
        else "If the quorum needs this site, the round has no result, and the next "
        "round waits for the site"
    )
    return (
        f"the agent was stopped in round {task.round_index} of run {task.run_id}: its "
        f"work in that round is lost{charged}. {waits}"
    )
