"""The live view of a run in a terminal.

``LiveProgress`` is an ``Emit`` callable and a context manager, and reads only events.
"""

from collections.abc import Iterator
from threading import Lock

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from federation.epsilon_text import format_epsilon
from federation.events import (
    CheckpointSkipped,
    Event,
    PrivacyPlanned,
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
)
from federation.messages import FailureKind
from federation.protocols import Clock, Closing
from monitoring import privacy_words
from monitoring.terminal.progress import (
    DECLINED,
    MAX_WARNING_CHARS,
    attempt_failed,
    introduced,
    killed_before,
    left_out,
    noted,
    printable,
    training_loss,
)
from monitoring.units import (
    format_bytes,
    format_count,
    format_duration,
    format_fraction,
    format_number,
)
from monitoring.views.round_view import RoundView, loss_of, perplexity
from monitoring.views.run_fold import RunFold
from monitoring.views.run_totals import RoundRow
from monitoring.views.run_view import COMPLETED, EXHAUSTED, INTERRUPTED, RunView

MAX_ROUND_ROWS = 8
_MAX_HELD = 20_000  # Answers, before rounds are settled.
MAX_SITE_ROWS = 12
SPARKLINE_ROUNDS = 40
REFRESH_PER_SECOND = 4

_MIN_ROWS = 6
_FRAME_LINES = 10  # everything of the live picture that is not a table row
_NARROW = 100
_BARS = "▁▂▃▄▅▆▇█"
_STATUS_STYLES = {
    COMPLETED: "bold green",
    EXHAUSTED: "bold cyan",
    INTERRUPTED: "bold yellow",
}
_ASCII_BARS = "_.-=+*#@"


class LiveProgress(Closing):
    """A live view of the run, which redraws itself in a terminal.

    Use it in a ``with`` statement: leaving it restores the terminal, whatever
    happened. Failures, warnings and skipped checkpoints stay above the picture.
    """

    def __init__(self, console: Console, *, clock: Clock) -> None:
        """Draw on ``console``; nothing appears before the first event.

        Args:
            console: A terminal; of standard error, since standard output is data.
            clock: Tells the time since the run began.
        """
        self._clock = clock
        self._console = console
        self._fold = RunFold()
        self._rounds = 0
        self._is_closed = False
        self._lock = Lock()  # rich draws from a thread of its own
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=REFRESH_PER_SECOND,
            redirect_stdout=False,
        )

    def __call__(self, event: Event) -> None:
        """Add the event; the view follows within a quarter of a second."""
        if isinstance(event, RunStarted):
            self._rounds = event.rounds
            if self._fold.has_started and self._fold.view().finished is None:
                self._console.print(Text(killed_before(event), style="yellow"))
        if isinstance(event, RoundStarted):
            self._rounds = max(self._rounds, event.round_index)
        left_before = self._fold.left_out
        with self._lock:
            self._fold.add(event)
            if isinstance(event, RoundFinished):
                self._fold.settle(_MAX_HELD)
        for notice in _notices(event, self._rounds, left_before):
            self._console.print(notice)
        if isinstance(event, RunFinished) and event.status != INTERRUPTED:
            self.close()
        elif not self._live.is_started and not self._is_closed:
            self._live.start()

    def close(self) -> None:
        """Draw a last time and release the terminal; a second call does nothing."""
        self._is_closed = True
        self._live.stop()

    def _draw(self) -> RenderableType:
        with self._lock:
            view = self._fold.view() if self._fold.has_started else None
        if view is None:
            return Text("starting ...", style="dim")
        return picture(view, self._console, now=self._clock.now())


def picture(view: RunView, console: Console, *, now: float) -> RenderableType:
    """Draw a run for a console of its width and height."""
    privacy = _privacy(view, console)
    rows = max(_MIN_ROWS, console.height - _FRAME_LINES - len(privacy))
    current = view.current or (view.rounds[-1] if view.rounds else None)
    num_sites = len(current.cohort) if current else 0
    site_rows = min(num_sites, MAX_SITE_ROWS, max(2, rows // 2))
    round_rows = min(MAX_ROUND_ROWS, max(2, rows - site_rows))
    parts: list[RenderableType] = [_header(view, now), *privacy, _bar(view)]
    if view.rounds:
        parts += [
            Text(),
            _trends(view, console),
            _round_table(view, console, round_rows),
        ]
    if current is not None:
        parts += [Text(), _site_table(view, current, console, site_rows)]
    words = (Text(printable(text), "dim") for text in view.participation.words())
    parts += [part for text in words for part in text.wrap(console, console.width)]
    return Group(*parts)


def _notices(
    event: Event, rounds: int, left_before: SitesLeftOut | None
) -> Iterator[Text]:
    """The notices above the view."""
    match event:
        case SiteFailed(kind=FailureKind.SURPLUS):
            return
        case SiteFailed(round_index=index):
            # After the last round there is one more exchange, to evaluate.
            place = f"round {index}" if index <= rounds else "last evaluation"
            line = f"{place}: {event.site}: {event.kind}: "
            style = "yellow" if event.kind in DECLINED else "red"
            yield Text(printable(line + event.message), style=style)
        case PrivacyPlanned():
            for line in privacy_words.lines(event, MAX_SITE_ROWS):
                yield Text(printable(f"privacy: {line}", limit=500), style="cyan")
        case SitesIntroduced():
            yield Text(printable(f"examples: {introduced(event)}", limit=500))
        case RunFinished():
            yield from _end_notice(event)
        case SitesLeftOut():
            text = left_out(event, left_before)
            yield Text(printable(text, limit=500), style="red")
        case _:
            yield from _trouble(event)


def _trouble(event: Event) -> Iterator[Text]:
    match event:
        case RunExtended() | SitesPaid():
            yield Text(printable(noted(event)))
        case Warned(message=message):
            yield Text(
                printable(f"warning: {message}", MAX_WARNING_CHARS), style="yellow"
            )
        case CheckpointSkipped(key=key, reason=reason):
            yield Text(printable(f"skipped checkpoint {key}: {reason}"), "yellow")


def _end_notice(event: RunFinished) -> Iterator[Text]:
    if event.status == INTERRUPTED:
        yield Text(printable(attempt_failed(event)), style="yellow")
    elif event.status == EXHAUSTED:
        line = f"the privacy budget is spent: {event.message or 'as planned'}"
        yield Text(printable(line), style="bold cyan")
    elif event.message:
        yield Text(printable(event.message), style="bold red")


def _header(view: RunView, now: float) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(printable(view.started.job_name), style="bold")
    if view.finished is not None:
        style = _STATUS_STYLES.get(view.status, "bold red")
        line.append(f"  {view.status}", style=style)
    last = view.rounds[-1].index if view.rounds else view.started.first_round - 1
    running = view.current.index if view.current and not view.finished else last
    line.append(f"  round {running}/{view.started.rounds}")
    if view.finished is not None:
        line.append(f"  {format_duration(view.seconds)}")
        return _with_secrecy(line, view)
    line.append(f"  {format_duration(max(0.0, now - view.started.at))}")
    left = view.seconds_left(now)
    if left is not None:
        line.append(f"  about {format_duration(left)} left", "dim")
    return _with_secrecy(line, view)


def _with_secrecy(line: Text, view: RunView) -> Text:
    return line.append("  secure aggregation", "cyan") if view.is_secret else line


def _privacy(view: RunView, console: Console) -> list[Text]:
    """Epsilon with its terms; several lines in a narrow terminal."""
    if view.privacy is None:
        return []
    told = privacy_words.spent(
        view.privacy, view.total_spent, by_results=view.by_results
    )
    line = f"epsilon {told}"
    if privacy_words.has_noise(view.privacy):
        line += f"; {privacy_words.NOISY} with noise: loss"
        last = view.last_evaluated
        line += privacy_words.plus_minus(privacy_words.loss_noise(view.privacy, last))
        noise = privacy_words.accuracy_noise(view.privacy, last)
        if noise is not None and not view.is_language:
            line += f", accuracy +-{privacy_words.format_points(noise)} points"
    return list(Text(printable(line), "cyan").wrap(console, console.width))


def _bar(view: RunView) -> ProgressBar:
    done = view.rounds[-1].index if view.rounds else view.started.first_round - 1
    return ProgressBar(total=view.started.rounds, completed=done, width=60)


def _trends(view: RunView, console: Console) -> Text:
    """Loss and accuracy of the whole run so far as two small curves."""
    bars = _ASCII_BARS if console.options.ascii_only else _BARS
    width = min(SPARKLINE_ROUNDS, max(8, (console.width - 40) // 2))
    line = Text("loss ", style="dim", no_wrap=True, overflow="ellipsis")
    losses = [row.loss for row in view.ended if row.loss is not None]
    line.append(sparkline(losses, bars, width), style="cyan")
    if not view.is_language:
        values = [row.accuracy for row in view.ended if row.accuracy is not None]
        line.append("   accuracy ", style="dim")
        line.append(sparkline(values, bars, width), style="green")
    return line


def sparkline(values: list[float], bars: str, width: int) -> str:
    """Draw the values as bars of eight heights, thinned out to ``width`` of them."""
    finite = [value for value in values if abs(value) != float("inf")]
    finite = [value for value in finite if value == value]  # noqa: PLR0124 - not NaN
    if not finite:
        return ""
    if len(finite) > width:
        step = (len(finite) - 1) / (width - 1)
        finite = [finite[round(index * step)] for index in range(width)]
    low, high = min(finite), max(finite)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in finite)


def _table(console: Console) -> Table:
    return Table(
        box=None,
        expand=True,
        pad_edge=False,
        padding=(0, 1 if console.width < _NARROW else 2, 0, 0),
        header_style="dim",
    )


def _round_table(view: RunView, console: Console, num_rows: int) -> Table:
    table = _table(console)
    quality = "perplexity" if view.is_language else "accuracy"
    # What the sites' own rows cannot tell under secure aggregation.
    training = ("training",) if view.is_secret else ()
    if view.privacy is not None:  # Then no loss of training leaves a site.
        training = ("epsilon",)
    for name in ("round", *training, "loss", quality, "sites", "up", "down", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    # Losses over other sites are losses over other data: compare none with them.
    losses = [loss_of(view.initial.pooled if view.initial else None)]
    losses += [None if row.num_unheard else row.loss for row in view.ended]
    for row, last in [*zip(view.ended, losses, strict=False)][-num_rows:]:
        index, *cells = _round_cells(row, last, view, console)
        pooled = [format_number(row.training_loss)] if view.is_secret else []
        if view.privacy is not None:
            pooled = [format_epsilon(row.epsilon)]
        table.add_row(index, *pooled, *cells)
    return table


def _round_cells(
    row: RoundRow | RoundView,
    previous_loss: float | None,
    view: RunView,
    console: Console,
) -> list[Text | str]:
    quality = format_fraction(row.accuracy)
    if view.is_language:
        quality = format_number(None if row.loss is None else perplexity(row.loss))
    noisy = privacy_words.NOISY if privacy_words.has_noise(view.privacy) else ""
    noisy = noisy if row.loss is not None else ""
    loss = Text(f"{noisy}{format_number(row.loss)}")
    # Noise goes up and down for no reason.
    comparable = None if row.num_unheard or noisy else previous_loss
    loss.append_text(_arrow(row.loss, comparable, console))
    failed = ", ".join(f"{count} {kind}" for kind, count in row.failures.items())
    note = Text("" if row.status == COMPLETED else f"{row.status} ", style="bold red")
    note.append(printable(failed), style="red")
    if row.num_unheard:
        note.append("  " if note else "")
        whole = (row.sites_evaluated or 0) + row.num_unheard
        note.append(f"loss of {row.sites_evaluated}/{whole}", style="yellow")
    return [
        str(row.index),
        loss,
        f"{noisy}{quality}",
        f"{row.answered}/{row.asked}{f' ({row.covered})' if row.covered else ''}",
        format_bytes(row.bytes_up),
        format_bytes(row.bytes_down),
        format_duration(row.seconds or 0.0),
        note,
    ]


def _arrow(loss: float | None, previous: float | None, console: Console) -> Text:
    if loss is None or previous is None or loss == previous:
        return Text("  ")
    fell = loss < previous
    plain = console.options.ascii_only
    sign = ("v" if plain else "↓") if fell else ("^" if plain else "↑")
    return Text(f" {sign}", style="green" if fell else "red")


def _site_table(
    view: RunView, row: RoundView, console: Console, num_rows: int
) -> RenderableType:
    table = _table(console)
    table.add_column(f"round {row.index}", no_wrap=True, overflow="ellipsis", ratio=1)
    told = "epsilon" if view.privacy else "training loss"
    # Smallest widths keep the columns still while answers come in.
    for name, width in (("cloud", 5), ("state", 17)):
        table.add_column(name, no_wrap=True, min_width=width)
    for name, width in (("time", 6), (told, 13), ("up", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    shares = {s.site: s for s in view.data.shares} if view.data else {}
    reports = row.newest
    before = view.rounds[-1].reports if view.current and view.rounds else ()
    dropped = {
        report.site
        for report in before
        if isinstance(report, SiteFailed) and report.kind is FailureKind.DISCONNECTED
    }
    # Failures first, then those still awaited: what a person would look for.
    order = sorted(row.cohort, key=lambda site: _urgency(reports.get(site)))
    shown = set(order[:num_rows])
    for site in (site for site in row.cohort if site in shown):
        share = shares.get(site)
        # Whether such a site is back is not known before it answers.
        silent = "was disconnected" if site in dropped else "training"
        cells = _site_cells(reports.get(site), view, silent)
        table.add_row(
            Text(printable(site)),
            Text(printable(share.cloud) if share else "-"),
            *cells,
        )
    if len(row.cohort) <= num_rows:
        return table
    hidden = len(row.cohort) - num_rows
    rest = Text(f"and {format_count(hidden, 'site')} more: ", style="dim")
    rest.append(f"{row.answered} of {len(row.cohort)} have answered", style="dim")
    return Group(table, rest)


def _urgency(report: SiteAnswered | SiteFailed | None) -> int:
    return 1 if report is None else 0 if isinstance(report, SiteFailed) else 2


def _site_cells(
    report: SiteAnswered | SiteFailed | None, view: RunView, silent: str
) -> list[Text | str]:
    if report is None:
        state = Text("no answer" if view.finished else silent, style="cyan")
        return [state, "", "", ""]
    seconds = format_duration(report.answered_seconds - report.asked_seconds)
    if isinstance(report, SiteFailed):
        if report.kind in DECLINED:
            return [Text(f"declined ({report.kind})", style="yellow"), seconds, "", ""]
        return [Text(f"failed ({report.kind})", style="red"), seconds, "", ""]
    told = Text(training_loss(report, view.is_secret), "dim" if view.is_secret else "")
    if view.privacy is not None:
        told = Text(format_epsilon(report.spent.epsilon if report.spent else None))
    size = format_bytes(report.bytes_up)
    return [Text("answered", style="green"), seconds, told, size]
