"""The progress of a run, as lines for a pipe or a log file.

``PlainProgress`` is an ``Emit`` callable and a context manager, and reads only events.
Names and messages come from sites: whatever is not printable is replaced before it
reaches a terminal. The picture for a terminal is in ``live``.
"""

import math
from typing import TextIO

from federation.epsilon_text import format_epsilon
from federation.events import (
    CheckpointSkipped,
    Event,
    GroupsCompared,
    LocalWorkChosen,
    ModelEvaluated,
    PrivacyPlanned,
    RoundEvent,
    RoundFinished,
    RoundStarted,
    RunExtended,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesIntroduced,
    SitesLeftOut,
    SitesPaid,
    Warned,
    recalled,
)
from federation.job.metrics import LANGUAGE, STATISTICS
from federation.messages import FailureKind
from federation.protocols import Closing
from monitoring import privacy_words
from monitoring.units import (
    format_bytes,
    format_count,
    format_duration,
    format_fraction,
    format_number,
)
from monitoring.views.round_view import accuracy_of, loss_of, metrics_of, perplexity
from monitoring.views.run_view import COMPLETED, EXHAUSTED, INTERRUPTED

# A failure whose message is longer is not written out a second time.
_LONG_MESSAGE, _MOST_MESSAGES = 60, 100

# With more sites than this, only failures get a line of their own.
MAX_SITES_WITH_LINES = 8

# A site that keeps to its budget, or answers a round only once, has not failed.
DECLINED = frozenset({FailureKind.BUDGET, FailureKind.DUPLICATE})

ANOTHER = "the service starts another, which resumes from the newest checkpoint"

MAX_WARNING_CHARS = 2000  # They end with what to do.


def printable(text: str, limit: int = 200) -> str:
    """One line without control characters, cut at ``limit`` characters."""
    line = text
    if not text.isprintable():
        line = "".join(sign if sign.isprintable() else "?" for sign in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def introduced(event: SitesIntroduced) -> str:
    """How many examples each site reports, the largest first, so outliers stand out."""
    pairs = zip(event.sites, event.num_examples, strict=True)
    order = sorted(pairs, key=lambda pair: -pair[1])
    named = [f"{n:,} at {site}" for site, n in order[:MAX_SITES_WITH_LINES]]
    more = len(order) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def left_out(event: SitesLeftOut, before: SitesLeftOut | None) -> str:
    """Which sites rounds exclude, and why; which are awaited, and have come back."""
    text = f"sites away: {'; '.join(event.named()) or 'none'}"
    if awaited := recalled(before, event):
        text = f"round {event.round_index} waits for {', '.join(awaited)}"
    return f"{text}; back: {', '.join(event.back())}" if event.back() else text


def attempt_failed(event: RunFinished) -> str:
    """The notice that a coordinator ended before its run."""
    why = f": {event.message}" if event.message else ""
    return f"coordinator stopped{why}; {ANOTHER}"


def killed_before(event: RunStarted) -> str:
    """The notice that the previous coordinator wrote no last event."""
    return (
        "the previous coordinator was killed, or its machine failed; another resumes "
        f"at round {event.first_round}"
    )


def noted(event: RunExtended | SitesPaid) -> str:
    """The notice of more rounds or sites from here on, or of what a run has cost."""
    if isinstance(event, SitesPaid):
        return f"dollars  {sum(event.dollars):,.4f} in virtual time"
    joined = f"{', '.join(event.joined)} joined" if event.joined else ""
    if joined and event.rounds == event.rounds_before:
        return f"{joined} after round {event.last_round}"
    joined = f"; {joined}" if joined else ""
    return (
        f"extended  from {event.rounds_before} to {event.rounds} rounds, after round "
        f"{event.last_round}{joined}"
    )


class PlainProgress(Closing):
    """One line for every round and site task, for pipes and log files.

    A round's line waits for the evaluation of its model, which comes during the
    next round, and lines of that round wait behind it. A round without a result, or
    whose model the job does not evaluate, is written at once.
    """

    def __init__(self, stream: TextIO, *, every: int = 1) -> None:
        """Write to ``stream``, which stays open.

        Args:
            stream: Receives the lines.
            every: The job's ``evaluation.every``; 0 if no model is evaluated.
        """
        self._stream = stream
        self._every = every
        self._is_language = self._is_secret = self._is_at_work = False
        self._rounds = self._steps = 0
        self._started: RunStarted | None = None
        self._privacy: PrivacyPlanned | None = None
        self._groups: tuple[tuple[str, ...], ...] = ()  # As written last.
        self._waiting: list[RoundFinished | str] = []  # In the order of events.
        self._evaluated: dict[int, ModelEvaluated] = {}
        self._left_out: SitesLeftOut | None = None
        self._failures: dict[str, str] = {}  # Where each long message was written.
        self._earlier_seconds = 0.0  # Of the coordinators before the newest.
        self._last_at = 0.0
        self._heard_all = True

    def __call__(self, event: Event) -> None:
        """Write the lines of an event, if any."""
        match event:
            case RunStarted():
                self._start(event)
            case PrivacyPlanned():
                self._plan(event)
            case SiteAnswered() | SiteFailed():
                self._write_site(event)
            case LocalWorkChosen() if event.num_steps != self._steps:
                self._steps = event.num_steps
                self._write(f"steps  {self._place(event.round_index)}  {chosen(event)}")
            case RoundFinished():
                self._take_round(event)
            case ModelEvaluated():
                self._evaluate(event)
            case RunFinished():
                self._finish(event)
            case _:
                self._write_notice(event)
        self._note_time(event)

    def _note_time(self, event: Event) -> None:
        """Notices may come between two coordinators, so their time does not count."""
        if isinstance(event, RunStarted | RoundEvent):
            self._last_at = event.at

    def close(self) -> None:
        """Write the lines that still wait for an evaluation."""
        self._write_rounds(before=math.inf)

    def _start(self, event: RunStarted) -> None:
        if self._is_at_work:
            self._put(killed_before(event))
        if self._is_at_work and self._started is not None:
            self._earlier_seconds += max(0.0, self._last_at - self._started.at)
        elif self._started is None:
            self._heard_all = event.first_round == 1
        self._is_at_work = True
        # A round that was completed before is evaluated after this.
        self._waiting = [
            each
            for each in self._waiting
            if isinstance(each, str) or each.round_index < event.first_round
        ]
        self._is_language = event.task in LANGUAGE
        self._trains = event.task != STATISTICS
        size = f"  {format_count(event.parameters, 'parameter')}"
        self._is_secret = event.secure_aggregation
        self._rounds, self._started = event.rounds, event
        verb = "resumes" if event.first_round > 1 else "starts"
        self._put(
            f"run {event.run_id} {verb}  {event.job_name}  "
            f"{format_count(event.rounds, 'round')}  "
            f"{format_count(len(event.sites), 'site')}{size if self._trains else ''}"
            f"{f' ({event.frozen:,} more frozen)' if event.frozen else ''}"
            f"{'  secure aggregation' if self._is_secret else ''}"
            f"{f'  from {event.weights}' if event.weights else ''}"
        )

    def _plan(self, event: PrivacyPlanned) -> None:
        self._privacy = event
        for line in privacy_words.lines(event, MAX_SITES_WITH_LINES):
            self._write(f"privacy  {line}")

    def _evaluate(self, event: ModelEvaluated) -> None:
        if event.round_index == 0:
            self._write(f"start  {self._metrics(event)}")
            return
        self._evaluated[event.round_index] = event
        self._write_rounds(before=event.round_index + 1)
        if self._evaluated.pop(event.round_index, None):  # Its round was written.
            place = self._place(event.round_index)
            self._write(f"model  {place}  {self._metrics(event)}")

    def _take_round(self, event: RoundFinished) -> None:
        # A model is evaluated in the round after its own, if at all.
        self._write_rounds(before=event.round_index)
        self._waiting.append(event)
        if not self._awaits_evaluation(event):
            self._write_rounds(before=math.inf)

    def _awaits_evaluation(self, event: RoundFinished) -> bool:
        """Whether an evaluation is planned whose results belong to a round's line."""
        if event.status != COMPLETED or self._every == 0:
            return False
        index = event.round_index
        return index % self._every == 0 or index == self._rounds

    def _write_site(self, event: SiteAnswered | SiteFailed) -> None:
        place = f"{self._place(event.round_index)}  {event.site}"
        seconds = format_duration(event.answered_seconds - event.asked_seconds)
        if isinstance(event, SiteFailed) and event.kind is FailureKind.SURPLUS:
            return
        if isinstance(event, SiteFailed):
            verb = "declined" if event.kind in DECLINED else "failed"
            message = self._once(event)
            self._write(f"{verb} {place}  {event.kind}  {message}  {seconds}")
        elif self._started and len(self._started.sites) <= MAX_SITES_WITH_LINES:
            told = "statistics"
            if self._trains:
                told = f"training loss {training_loss(event, self._is_secret)}"
            if self._privacy is not None:  # Then no loss of training leaves a site.
                spent = event.spent.epsilon if event.spent else None
                told = f"epsilon {format_epsilon(spent)}"
            self._write(
                f"site   {place}  {told}  "
                f"up {format_bytes(event.bytes_up)}  "
                f"down {format_bytes(event.bytes_down)}  {seconds}"
            )

    def _once(self, event: SiteFailed) -> str:
        """A failure's message, or where it was written if it is long."""
        message = event.message
        first = self._failures.get(message)
        if first is not None:
            return f"the same as at {first}"
        if len(message) > _LONG_MESSAGE and len(self._failures) < _MOST_MESSAGES:
            self._failures[message] = f"{event.site} in round {event.round_index}"
        return message

    def _write_notice(self, event: Event) -> None:
        match event:
            case SitesIntroduced():
                self._write(f"examples  {introduced(event)}")
            case RoundStarted():  # Statistics ask a lost one again.
                self._rounds = max(self._rounds, event.round_index)
            case SitesLeftOut():
                self._put(left_out(event, self._left_out))
                self._left_out = event
            case GroupsCompared() if event.groups != self._groups:
                self._groups = event.groups
                named = (", ".join(group) for group in event.groups)
                self._write(f"groups  {'  |  '.join(named)}")
            case Warned(message=message):
                self._put(f"warning  {message}", limit=MAX_WARNING_CHARS)
            case RunExtended() | SitesPaid():
                self._write(noted(event))
            case CheckpointSkipped(key=key, reason=reason):
                self._write(f"checkpoint skipped  {key}  {reason}")

    def _write_rounds(self, *, before: float) -> None:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, str):
                self._put(first)
            elif first.round_index < before:
                self._write_round(first)
            else:
                break
            del self._waiting[0]

    def _write_round(self, event: RoundFinished) -> None:
        evaluated = self._evaluated.pop(event.round_index, None)
        # A lost round leaves the model of the one before, with its results.
        has_result = self._trains and event.status == COMPLETED
        has_result = has_result or evaluated is not None
        metrics = f"{self._metrics(evaluated)}  " if has_result else ""
        status = "" if event.status == COMPLETED else f"{event.status}  "
        training = ""
        if self._privacy is not None:
            # Its terms were shown at the start of the run.
            training = f"epsilon {format_epsilon(event.epsilon)}  "
        elif self._is_secret and self._trains:  # Which the sites' lines cannot tell.
            training = f"training loss {format_number(loss_of(event.training))}  "
        start, copies = self._started, ""
        if start and start.replicas:
            part = start.share(event.answered, event.asked)
            copies = f" ({part or 'all data'})"
        self._put(
            f"round  {self._place(event.round_index)}  {status}"
            f"{training}{metrics}"
            f"{len(event.answered)}/{len(event.asked)} sites{copies}  "
            f"up {format_bytes(event.bytes_up)}  "
            f"down {format_bytes(event.bytes_down)}  {format_duration(event.seconds)}"
        )

    def _finish(self, event: RunFinished) -> None:
        self.close()
        if self._is_at_work:  # Otherwise a run was stopped that waited.
            self._earlier_seconds += event.seconds
        self._is_at_work = False
        if event.status == INTERRUPTED:
            self._write(attempt_failed(event))
            return
        message = f"  {event.message}" if event.message else ""
        if event.status == EXHAUSTED:
            message = f"  the privacy budget is spent:{message[1:] or ' as planned'}"
        self._write(
            f"run {event.status}  "
            f"{format_count(event.rounds_completed, 'round')} completed  "
            f"{format_duration(self._earlier_seconds)}"
            f"{'' if self._heard_all else ' since it resumed'}{message}"
        )

    def _metrics(self, event: ModelEvaluated | None) -> str:
        if event is None:
            return "not evaluated"
        loss = loss_of(event.pooled)
        noisy = privacy_words.NOISY if privacy_words.has_noise(self._privacy) else ""
        noise = privacy_words.loss_noise(self._privacy, event)
        text = f"loss {noisy}{format_number(loss)}{privacy_words.plus_minus(noise)}"
        if self._is_language:
            value = None if loss is None else perplexity(loss)
            text += f"  perplexity {noisy}{format_number(value)}"
        for name, mean in metrics_of(event.pooled).items():
            text += f"  {name} {noisy}{format_number(mean)}"
        accuracy = accuracy_of(event.pooled)
        if not self._is_language and accuracy is not None:
            text += f"  accuracy {noisy}{format_fraction(accuracy)}"
            noise = privacy_words.accuracy_noise(self._privacy, event)
            text += "" if noise is None else f" +-{privacy_words.format_points(noise)}"
        # Losses over other sites are losses over other data: do not compare them.
        start = self._started
        part = start and start.share(event.sites, start.sites)
        text += f" (at {part})" if part else ""
        return text

    def _place(self, round_index: int) -> str:
        width = len(str(self._rounds))
        if round_index > self._rounds:
            # The exchange after the last round, which only evaluates.
            return "end".rjust(2 * width + 1)
        return f"{round_index:>{width}}/{self._rounds}"

    def _write(self, line: str) -> None:
        """Write a line after those that wait."""
        if self._waiting:
            self._waiting.append(line)
        else:
            self._put(line)

    def _put(self, line: str, *, limit: int = 500) -> None:
        self._stream.write(printable(line, limit=limit) + "\n")
        self._stream.flush()


def chosen(event: LocalWorkChosen) -> str:
    """Describe how many local steps a round takes, and why."""
    text = format_count(event.num_steps, "local step")
    if event.step_seconds is None or event.waiting_seconds is None:
        return f"{text}  ({event.reason})"
    return (
        f"{text}  ({event.reason}: {format_duration(event.step_seconds)} a step, "
        f"{format_duration(event.waiting_seconds)} of waiting, sites train "
        f"{format_fraction(event.share)})"
    )


def training_loss(report: SiteAnswered, is_secret: bool) -> str:  # noqa: FBT001
    """Loss while a site trained, or why it is not shown."""
    # A dash would look like a failure; this is what secure aggregation is for.
    return "hidden" if is_secret else format_number(loss_of(report.training))
