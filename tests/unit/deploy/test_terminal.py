"""What commands say."""

import argparse
import logging

import pytest

from deploy import service_log
from deploy.cli import terminal
from federation.errors import FederationError


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
