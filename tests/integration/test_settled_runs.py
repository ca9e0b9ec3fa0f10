"""A long run leaves what its rounds came to, and nobody can tell from its numbers."""

import shutil
from pathlib import Path

import pytest
from support import event_samples
from support.event_samples import Script
from support.small_jobs import small_job
from support.without_report import simulate

from federation.errors import CorruptObject
from federation.event_log import EventWriter
from monitoring.pages.plots import draw_all
from monitoring.runs import fold_cache, numbers_reader, run_reader
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_reader import RunReader
from monitoring.views import run_fold
from monitoring.views.result_json import result

pytestmark = [pytest.mark.slow]

FIGURES = ("loss", "accuracy", "bytes", "participation", "update-norm")


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log is long, and is settled at every occasion."""
    monkeypatch.setattr(run_fold, "MAX_REPORTS", 1)
    monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1)


def _settled(run: RunFolder) -> RunReader:
    """What the run has left, of which nothing is read again."""
    reader = RunReader(run.events)
    assert reader.tail.place[0] == run.events.stat().st_size
    assert reader.fold.view().past is not None
    return reader


def test_run_leaves_the_numbers_of_all_its_rounds(tmp_path: Path) -> None:
    """Its result, its figures and its page have those of every event."""
    simulate(small_job(num_sites=3, rounds=12), folder=tmp_path)
    run = RunFolder(tmp_path)
    view, settled = run.view(), _settled(run).fold.view()
    assert len(settled.rounds) < len(view.rounds) == 12
    assert result(settled) == result(view)
    assert run.result.read_text() != ""
    assert draw_all(settled, FIGURES) == draw_all(view, FIGURES)
    assert run.settled_view() == settled


def test_repeated_rounds_count_once(tmp_path: Path) -> None:
    """A coordinator goes on before the rounds that the one before it has left."""
    run = RunFolder(tmp_path)
    begun = Script(rounds=9, stop_after=7, seed=3)
    resumed = Script(rounds=9, first_round=4, start=event_samples.START + 90)
    for script in (begun, resumed):
        with EventWriter(run.events) as log:
            reader = RunReader(run.events)
            reader.look()
            for event in event_samples.run(script):
                log(event)
                reader.take(event)
    assert result(_settled(run).fold.view()) == result(run.view())
    assert reader.fold.view() == _settled(run).fold.view()


def test_resumed_run_goes_on_from_what_was_left(tmp_path: Path) -> None:
    """Also where it was left in the middle, is damaged, or is of another run."""
    job, other = small_job(num_sites=3, rounds=8), tmp_path / "other"
    simulate(job, folder=other)
    for name in ("left", "lost", "damaged", "foreign"):
        run = RunFolder(tmp_path / name)
        simulate(job, folder=run.path)
        lines = run.events.read_bytes().splitlines(keepends=True)
        run.events.write_bytes(b"".join(lines[: len(lines) // 2]))
        cached = run.path / run_reader.NAME
        cached.unlink()
        if name == "left":
            RunReader(run.events).look()
        elif name == "damaged":
            cached.write_bytes(b'{"release": "1')
        elif name == "foreign":
            cached.write_bytes((other / run_reader.NAME).read_bytes())
        simulate(job, folder=run.path, resume=True)
        assert result(_settled(run).fold.view()) == result(run.view()), name


def test_run_that_goes_on_reads_no_long_log_for_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine they are not there; the monitor reads it, if there is one."""
    monkeypatch.setattr(numbers_reader, "ROUND_BYTES", 1)
    left = tmp_path / numbers_reader.NAME
    job = small_job(num_sites=3, rounds=8)
    for is_long in (True, False):
        simulate(job, folder=tmp_path)
        assert left.exists()
        left.unlink()
        lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / "events.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
        monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1 if is_long else 1 << 20)
        simulate(job, folder=tmp_path, resume=True)
        assert left.exists() is not is_long
        shutil.rmtree(tmp_path)


def test_damaged_line_keeps_a_run_from_being_resumed(tmp_path: Path) -> None:
    """A page shows the rest; who goes on must know all of it."""
    job, run = small_job(num_sites=3, rounds=4), RunFolder(tmp_path)
    simulate(job, folder=tmp_path)
    (tmp_path / run_reader.NAME).unlink()
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(
        b"".join([*lines[:5], b'{"event": "SiteAnswered"\n', *lines[5:9]])
    )
    with pytest.raises(CorruptObject, match=r"events.jsonl, line 6"):
        simulate(job, folder=tmp_path, resume=True)
