"""What commands say."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import safetensors.torch

from deploy import service_log
from deploy.cli import terminal
from federation.errors import FederationError, JobError


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
