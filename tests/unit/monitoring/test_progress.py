"""Progress says what happened, in lines or in a picture, and cleans up after."""

import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from support import event_samples
from support.event_samples import Script, run

from federation.clock import VirtualClock
from federation.events import (
    Event,
    ModelEvaluated,
    RoundFinished,
    RunExtended,
    RunFinished,
    SiteAnswered,
    SiteFailed,
    SitesIntroduced,
    SitesLeftOut,
    SitesPaid,
)
from federation.messages import FailureKind
from monitoring.pages.report import render
from monitoring.terminal.live import LiveProgress, sparkline
from monitoring.terminal.outcome import lines
from monitoring.terminal.progress import PlainProgress
from monitoring.views.run_fold import fold

HOSTILE = "\x1b[31m\r\nboom [bold]\x07"


def _lines(events: list[Event], *, every: int = 1) -> list[str]:
    stream = io.StringIO()
    with PlainProgress(stream, every=every) as emit:
        for event in events:
            emit(event)
    return stream.getvalue().splitlines()


def _live(events: list[Event], **console: Any) -> str:
    stream = io.StringIO()
    terminal = Console(
        file=stream, force_terminal=True, width=80, legacy_windows=False, **console
    )
    clock = VirtualClock(event_samples.START + 2)
    with LiveProgress(terminal, clock=clock) as emit:
        for event in events:
            emit(event)
    return stream.getvalue()


def _page_without_figures(*events: Event) -> str:
    """The report of a run of which there is nothing to draw yet: figures take long."""
    started, *_ = event_samples.two_sites(1)
    return render(fold([started, *events]), "", {})


def _last_picture(events: list[Event], **console: Any) -> str:
    """The text of the final picture, without colours."""
    plain = _live(events, color_system=None, height=40, **console)
    return plain[plain.rindex("two-clouds-quickstart") :]


def test_plain_lines_of_a_run():
    """One line for every site task and every round."""
    expected = [
        (
            "run 20260921-141320-c0ffee starts  two-clouds-quickstart  1 round  2 sites"
            "  37,650 parameters"
        ),
        (
            "site   1/1  gcp-us-central1  training loss 1.640  up 150.6 kB"
            "  down 150.6 kB  0.6 s"
        ),
        (
            "site   1/1  aws-us-east-1  training loss 1.723  up 150.6 kB"
            "  down 150.6 kB  0.6 s"
        ),
        "start  loss 2.273  accuracy 10.6 %",
        (
            "round  1/1  loss 1.681  accuracy 35.0 %  2/2 sites  up 301.2 kB"
            "  down 301.2 kB  0.7 s"
        ),
        "run completed  1 round completed  0.7 s",
    ]
    assert expected == _lines(event_samples.two_sites(1))


def test_plain_lines_keep_the_order_of_rounds():
    """A round's line waits for its evaluation, and those of the next one behind it."""
    events = event_samples.two_sites(3)
    lines = [line for line in _lines(events) if re.match("site|round|failed", line)]
    indices = [int(re.findall(r" (\d)/3", line)[0]) for line in lines]
    assert indices == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [line[:5] for line in lines] == ["site ", "site ", "round"] * 3
    rare = [e for e in events if not isinstance(e, ModelEvaluated)]
    assert [line[:9] for line in _lines(rare)[1:-1]] == [line[:9] for line in lines]


def test_dollars_are_called_virtual():
    events = event_samples.two_sites(1)
    paid = SitesPaid(at=events[-1].at, sites=("a", "b"), dollars=(1.5, 2.25))
    events.insert(-1, paid)
    (line,) = [line for line in _lines(events) if "dollars" in line]
    for text in (line, _live(events, color_system=None)):
        assert re.search(r"3\.7500\b.*\bvirtual", text)


def test_plain_secure_run():
    """Losses while training are known of all sites together, so the round has them."""
    lines = _lines(event_samples.secure(1))
    assert lines[0].endswith("37,650 parameters  secure aggregation")
    sites = [line for line in lines if line.startswith("site")]
    assert len(sites) == 3
    assert all("  training loss hidden  up 150.6 kB" in line for line in sites)
    (line,) = (line for line in lines if line.startswith("round"))
    assert re.match(r"round  1/1  training loss \d\.\d{3}  loss \d\.\d{3}  acc", line)
    assert line.endswith("3/3 sites  up 456.6 kB  down 462.6 kB  0.8 s")


def test_plain_private_run_says_what_it_promises():
    """Before the first round: the terms once, each site's means, what is replaced."""
    lines = _lines(event_samples.private(2))
    said = [line for line in lines if line.startswith("privacy  ")]
    assert said == lines[1 : 1 + len(said)]
    assert said[0] == (
        "privacy  unit record: epsilon at most 8 at delta 1e-04 at each site "
        "(one record added or removed; PLD; Poisson sampling: each record is in each "
        "step independently)"
    )
    against = event_samples.HOLDS_AGAINST["record"]
    assert said[1] == f"privacy  holds against {against}"
    assert said[2] == (
        "privacy  aws-us-east-1  noise multiplier 0.900  sampling rate 0.05  "
        "20 steps a round  held-out counts +-3.2"
    )
    assert "privacy  layer replaced  bn1: BatchNorm2d by GroupNorm" in said


def test_plain_private_lines_have_epsilon():
    """In place of the loss of training; what carries noise is marked, with its size."""
    lines = _lines(event_samples.private(2))
    assert not any("training loss " in line for line in lines)
    assert "site   1/2  aws-us-east-1  epsilon 5.61  up 150.6 kB" in "\n".join(lines)
    (line,) = (line for line in lines if line.startswith("round  2/2"))
    assert re.match(
        r"round  2/2  epsilon 7\.92  loss ~1\.\d+ \+-0\.087  accuracy ~52\.5 % \+-1\.6",
        line,
    )


def test_plain_public_held_out_results_are_not_marked():
    """They are exact, so nothing is approximate."""
    lines = _lines(event_samples.private(2, public=True))
    assert not any("~" in line or "+-" in line for line in lines)


def test_plain_exhausted_run_ends_soundly():
    """Sites decline, and the last line says why; nothing is called failed."""
    lines = _lines(event_samples.exhausted())
    assert not any(line.startswith("failed") for line in lines)
    assert sum(line.startswith("declined  7/10") for line in lines) == 2
    assert lines[-1].startswith("run exhausted  6 rounds completed")
    assert "the privacy budget is spent: round 7 is beyond" in lines[-1]


def _until_round(events: list[Event], index: int) -> list[Event]:
    """Events up to the one that finishes a round."""
    finished = (e for e in events if isinstance(e, RoundFinished))
    last = next(e for e in finished if e.round_index == index)
    return events[: events.index(last) + 1]


def _shown(events: list[Event], *, every: int) -> list[str]:
    """Lines that a person sees after these events, while the run goes on."""
    stream = io.StringIO()
    emit = PlainProgress(stream, every=every)
    for event in events:
        emit(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(("every", "index"), [(2, 1), (2, 3), (0, 1), (0, 4)])
def test_plain_round_that_is_not_evaluated_comes_when_it_ends(every: int, index: int):
    """Nobody waits a round for an evaluation that the job does not plan."""
    kept = [e for e in event_samples.two_sites(4) if not isinstance(e, ModelEvaluated)]
    last = _shown(_until_round(kept, index), every=every)[-1]
    assert last.startswith(f"round  {index}/4  not evaluated  2/2 sites")


@pytest.mark.parametrize(("every", "index"), [(1, 1), (2, 2), (3, 4)])
def test_plain_round_that_is_evaluated_waits(every: int, index: int):
    """Also the last one, which is evaluated whatever the job's period."""
    shown = _shown(_until_round(event_samples.two_sites(4), index), every=every)
    assert not any(line.startswith(f"round  {index}/4") for line in shown)


def test_plain_lost_round_comes_when_it_is_lost():
    """And the round before it, whose evaluation it took along."""
    events = _until_round(event_samples.troubled(), 5)
    kept = [
        e
        for e in events
        if getattr(e, "round_index", 0) < 5 or not isinstance(e, ModelEvaluated)
    ]
    rounds = [line for line in _shown(kept, every=1) if line.startswith("round ")]
    assert [line.split()[1].split("/")[0] for line in rounds][-2:] == ["4", "5"]
    assert " lost " in rounds[-1]
    assert "evaluated" not in rounds[-1]


def test_plain_failures_and_warnings_come_at_once():
    """What went wrong has a line of its own."""
    lines = _lines(event_samples.troubled())
    assert "warning  class 7 is held by one site only" in lines
    failed = [line for line in lines if line.startswith("failed")]
    assert len(failed) == 4
    assert failed[0].startswith(
        "failed  3/10  gcp-us-central1  deadline  the site's process ended"
    )
    assert any(line.startswith("round   5/10  lost  0/2 sites") for line in lines)
    assert any(line.startswith("model   5/10  loss") for line in lines)


def test_plain_lines_hold_no_control_characters():
    """A site cannot steer the terminal of whoever reads the log."""
    aws, _ = event_samples.TWO_SITES
    script = Script(
        rounds=2,
        failures=((1, aws, FailureKind.CRASHED),),
        message=HOSTILE,
        warning=HOSTILE,
    )
    text = "\n".join(_lines(run(script)))
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert "boom" in text


def test_live_picture_at_80_columns():
    """Rounds, sites, curves and numbers fit an ordinary terminal."""
    picture = _last_picture(event_samples.two_sites())
    assert "two-clouds-quickstart  completed  round 10/10" in picture
    for text in ("loss", "accuracy", "█", "301.2 kB", "aws-us-east-1", "answered"):
        assert text in picture
    assert all(len(line) <= 80 for line in picture.splitlines())
    assert "…" not in picture


def test_live_secure_picture_at_80_columns():
    """The header says so, and rounds have the loss that the sites' rows lack."""
    picture = _last_picture(event_samples.secure())
    header, *_ = picture.splitlines()
    assert header.rstrip().endswith("secure aggregation")
    assert re.search(r"round +training +loss", picture)
    assert re.search(r"on-premises .* answered +\S+ s +hidden +150.6 kB", picture)
    assert all(len(line) <= 80 for line in picture.splitlines())
    assert "…" not in picture


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "secure"])
def test_live_private_picture_at_80_columns(secure: bool):  # noqa: FBT001
    """Epsilon comes with its terms; rounds and sites have it where losses are not."""
    plain = _live(event_samples.private(secure=secure), color_system=None, height=40)
    picture = plain[plain.rindex("two-clouds-private") :]
    words = " ".join(picture.split())
    assert (
        "epsilon 7.92 of 8 at delta 1e-04 (one record added or removed; PLD; Poisson "
        "sampling), held-out 7.66; ~ with noise: loss +-0.085, accuracy +-1.9 points"
    ) in words
    assert re.search(r"round +epsilon +loss", picture)
    assert re.search(r"10 +7\.92 +~0\.\d+ +~9\d\.\d %", picture)
    assert re.search(r"gcp-us-central1 .* answered +\S+ s +7.76 +150.6 kB", picture)
    assert all(len(line) <= 80 for line in picture.splitlines())
    assert "training" not in picture


def test_live_site_that_was_disconnected_is_not_shown_as_training():
    """It may still be away: its row in the next round says what is known."""
    events, site = list[Event](), "gcp-us-central1"
    for event in event_samples.two_sites(2):
        if isinstance(event, SiteAnswered) and event.round_index == 2:
            break
        if isinstance(event, SiteAnswered) and event.site == site:
            event = SiteFailed(  # noqa: PLW2901
                at=event.at,
                round_index=1,
                site=site,
                kind=FailureKind.DISCONNECTED,
                message="its heartbeats have stopped",
                asked_seconds=0.0,
                answered_seconds=12.0,
                bytes_down=0,
                bytes_up=0,
            )
        events.append(event)
    picture = _last_picture(events)
    assert re.search(rf"{site} .* was disconnected", picture)
    assert re.search(r"aws-us-east-1 .* training", picture)


def test_live_hides_control_characters_and_markup():
    """Messages are text: neither escape sequences nor rich's own markup."""
    aws, _ = event_samples.TWO_SITES
    script = Script(
        rounds=1, failures=((1, aws, FailureKind.CRASHED),), message=HOSTILE
    )
    text = _live(run(script), color_system=None)
    assert "?[31m??boom [bold]?" in text
    assert "\x1b[31m" not in text
    assert "\x07" not in text


class _Interrupted(Exception):
    pass


def _feed_and_raise(live: LiveProgress, events: list[Event]) -> None:
    with live as emit:
        for event in events:
            emit(event)
        raise _Interrupted


def test_live_restores_the_terminal():
    """An error in the middle leaves a visible cursor."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    live = LiveProgress(console, clock=VirtualClock())
    with pytest.raises(_Interrupted):
        _feed_and_raise(live, event_samples.two_sites(2)[:5])
    text = stream.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    live.close()


def _interrupted() -> list[Event]:
    """A coordinator that ends after two rounds, and one that continues."""
    events = run(Script(stop_after=2))
    *before, last = events
    assert isinstance(last, RunFinished)
    end = replace(last, status="interrupted", message="No space left on device")
    return [*before, end, *run(Script(first_round=3))]


def test_attempt_that_failed_is_not_called_the_runs_end():
    """In a pipe: only the last word is of the run."""
    lines = _lines(_interrupted())
    ends = [line for line in lines if line.startswith(("run ", "coordinator "))]
    started, attempt, resumed, ended = ends
    assert " starts " in started
    assert " resumes " in resumed
    assert ended.startswith("run completed")
    assert attempt == (
        "coordinator stopped: No space left on device; the service starts another, "
        "which resumes from the newest checkpoint"
    )


def test_killed_coordinator_is_explained():
    """It left no last event; a person is told when the next one begins."""
    *before, _end = run(Script(stop_after=2))
    events = [*before, *run(Script(first_round=3))]
    text = (
        "the previous coordinator was killed, or its machine failed; another resumes "
        "at round 3"
    )
    lines = _lines(events)
    assert lines.count(text) == 1
    # The model of the round before is evaluated by the next coordinator.
    rounds = [line[:12] for line in lines if line.startswith("round ")]
    assert rounds == [f"round  {n:2}/10" for n in range(1, 11)]
    assert text in " ".join(_live(events, color_system=None).split())
    assert text not in _lines(_interrupted())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([math.nan, math.inf], ""),
        ([1.0], "_"),
        ([1.0, math.nan, 2.0], "_@"),
        ([float(n) for n in range(100)], "_-*@"),
    ],
)
def test_sparkline(values: list[float], expected: object):
    """Not more bars than there is room, and none for what is not a number."""
    assert expected == sparkline(values, "_.-=+*#@", 4)


@pytest.mark.slow
def test_start_up_is_quick():
    """Progress must not wait for matplotlib."""
    code = (
        "import sys, monitoring.terminal.live, monitoring.terminal.progress;"
        "import monitoring.views.run_view;"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_examples_that_sites_claim_are_said_when_a_run_starts():
    """The largest first, so that one that cannot be is seen, however many sites."""
    sites = (*(f"site-{n}" for n in range(9)), f"odd{HOSTILE}")
    event = SitesIntroduced(
        at=event_samples.START,
        sites=sites,
        num_examples=(*range(10, 19), 10**9),
    )
    events = event_samples.two_sites(1)
    events.insert(1, event)
    expected = "1,000,000,000 at odd?[31m??boom [bold]?, 18 at site-8, 17 at site-7"
    (line,) = [line for line in _lines(events) if line.startswith("examples  ")]
    assert line.startswith(f"examples  {expected}, ")
    assert line.endswith("12 at site-2 and 2 more")
    shown = " ".join(_live(events, color_system=None, height=40).split())
    assert f"examples: {expected}" in shown


def test_sites_that_are_left_out_are_shown_wherever_a_run_is():
    """As it happens, in the report and at the end; until all are asked again."""
    event = SitesLeftOut(
        at=event_samples.START,
        round_index=1,
        sites=(f"site-1{HOSTILE}",),
        reasons=("at fault",),
    )
    seen = event_samples.two_sites(1)
    seen.insert(-1, event)
    (line,) = [line for line in _lines(seen) if line.startswith("sites away")]
    assert line == "sites away: site-1?[31m??boom [bold]? (at fault)"
    assert "sites away: site-1?" in _live(seen, color_system=None, height=40)
    page = _page_without_figures(event)
    assert "From round 1 on, the run continued without" in page
    assert "(at fault)</li>" in page
    assert any(line.startswith("without     site-1") for line in lines(fold(seen)))
    gone = replace(event, sites=("a",), reasons=("spot",), standings=("gone",))
    seen.insert(-1, gone)
    assert "sites away: a (gone: spot)" in _lines(seen)
    none = replace(gone, sites=(), reasons=(), standings=())
    seen.insert(-1, none)
    assert "round 1 waits for a" in _lines(seen)
    assert "round 1 waits for a" in _live(seen, color_system=None, height=40)
    seen[-2] = replace(none, returned=("a",), times=(1,))
    assert "sites away: none; back: a (returned 1x)" in _lines(seen)
    assert "a (gone: spot)</li>" in _page_without_figures(event, gone)
    none = replace(event, sites=(), reasons=())
    seen.insert(-1, none)
    assert "sites away: none" in _lines(seen)
    page = _page_without_figures(event, gone, none)
    assert "the run continued without" not in page
    back = replace(
        event, sites=("b",), standings=("gone",), returned=("a", "b"), times=(2, 1)
    )
    seen.insert(-1, back)
    assert "sites away: b (gone: at fault); back: a (returned 2x)" in _lines(seen)
    page = _page_without_figures(event, gone, none, back)
    assert "take part again: a (returned 2x)</p>" in page


def test_sites_that_join_extend_no_rounds():
    joined = RunExtended(
        at=event_samples.START,
        last_round=5,
        first_round=6,
        rounds_before=40,
        rounds=40,
        job_before="a" * 64,
        job="b" * 64,
        joined=("e",),
    )
    started, *_ = event_samples.two_sites(1)
    *_, line = _lines([started, joined])
    assert "e joined after round 5" in line
    assert "extended" not in line
    *_, line = _lines([started, replace(joined, rounds=50)])
    assert "from 40 to 50 rounds, after round 5; e joined" in line
