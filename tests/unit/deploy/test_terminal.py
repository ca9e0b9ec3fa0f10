"""What commands say."""

import argparse
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import safetensors.torch

from deploy import service_log
from deploy.cli import terminal
from federation.clock import VirtualClock
from federation.errors import FederationError, JobError
from federation.typed_json import refuse_constant


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    """Nor an infinity, however deep: no other program could read it."""
    terminal.say_json({"rows": [{"loss": math.nan}, (math.inf, 1.0)]})
    found = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert found == {"rows": [{"loss": "NaN"}, ["Infinity", 1.0]]}


def test_what_others_send_begins_no_line_of_a_log(
    capsys: pytest.CaptureFixture[str],
):
    terminal.note("refused: a\ncrossfed: all is well\u2028b\x1b[2J")
    service_log.keep_records_in_lines()
    assert logging.lastResort is not None
    error = ValueError("a\ncrossfed: all is well\x1b")
    about = (ValueError, error, None)
    logging.lastResort.handle(
        logging.LogRecord("a", logging.ERROR, "f", 1, "b\nc\x1b", (), about)
    )
    said = capsys.readouterr().err
    assert not any(line.startswith("crossfed: all") for line in said.splitlines())
    assert "\nb c" in said
    assert "\x1b" not in said


def test_each_line_of_a_services_log_has_its_time(capsys: pytest.CaptureFixture[str]):
    """Also those of libraries; what others send begins no line."""
    log = service_log.service_log(VirtualClock(86_400.0))
    log("refused: a\ncrossfed: all is well\n  b = 1\nc\x1b[2J")
    logging.getLogger("x.y").propagate = False
    logging.lastResort.handle(  # type: ignore[union-attr]
        logging.LogRecord("a", logging.ERROR, "f", 1, "b\nc", (), None)
    )
    assert capsys.readouterr().err.splitlines() == [
        "1970-01-02 00:00:00Z crossfed: refused: a crossfed: all is well",
        "  b = 1 c [2J",
        "1970-01-02 00:00:00Z crossfed: b c",
    ]
    service_log.keep_records_in_lines()


def test_a_row_is_one_line_if_its_last_cell_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for width in ("60", "200"):
        monkeypatch.setattr(terminal, "_PIPE_COLUMNS", int(width))
        rows = [["one", f"a\n  {'b' * 300}"], ["two", "short"]]
        assert terminal.say_table(["run", "reason"], rows, cut="reason")
        _, first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("one  a bbb")
        assert first.rstrip().endswith("b...")
        assert len(first.rstrip()) <= int(width)
        assert second.split() == ["two", "short"]
        assert not terminal.say_table(["run", "reason"], rows[1:], cut="reason")
        capsys.readouterr()


def test_no_message_controls_a_terminal(capsys: pytest.CaptureFixture[str]):
    """Names of nodes and words of services come from others; lines stay lines."""
    options = argparse.Namespace(verbose=False)
    terminal.tell("a\x1b[2J\u202eb\n\tc\udcff")
    terminal.complain(FederationError("node \x9b1m\r"), options)
    terminal.say_table(["node"], [["x\x1b[2Jy"]])
    out, err = capsys.readouterr()
    assert err == "crossfed: a [2J b\n\tc \ncrossfed: node  1m\n"
    assert "\x1b" not in out
    assert "x [2Jy" in out


def test_an_error_names_one_file(capsys: pytest.CaptureFixture[str]):
    """The job's file stands before an error, unless that names another file."""
    options = argparse.Namespace(verbose=False, job="job.toml", speeds="speeds.toml")
    terminal.complain(JobError("is 0", key="speeds.toml: combine_seconds"), options)
    terminal.complain(JobError("is 0", key="rounds"), options)
    told = capsys.readouterr().err
    assert "job.toml: rounds: is 0" in told
    assert "job.toml: speeds.toml" not in told


def _no_file(folder: Path) -> object:
    file = folder / "damaged.safetensors"
    file.write_bytes(b"\xff" * 100)
    return safetensors.torch.load_file(file)


def _no_class(_: Path) -> object:
    import sklearn.utils  # noqa: PLC0415 (a second to import)

    return sklearn.utils.check_X_y([[0.0]], [0.0, 1.0])


@pytest.mark.parametrize(
    ("call", "shown"),
    [(_no_file, "never"), (_no_class, "always")],
    ids=["ours", "theirs"],
)
def test_lines_of_a_library_that_only_we_call_are_not_shown(
    call: Callable[[Path], object],
    shown: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """They say nothing to a user; a library that a job may name is another matter."""
    with pytest.raises(Exception, match=r".+") as caught:
        call(tmp_path)
    theirs: TracebackType | None = caught.tb
    while theirs and theirs.tb_frame.f_globals["__name__"] == __name__:
        theirs = theirs.tb_next  # Without this module, which would pass for a user's.
    error = JobError("ends here", key="rounds")
    error.__cause__ = caught.value.with_traceback(theirs)
    terminal.complain(error, argparse.Namespace(verbose=False, job="job.toml"))
    said = capsys.readouterr().err
    assert said.startswith("crossfed: job.toml: rounds: ends here\n")
    assert ("File" in said) is (shown == "always")
