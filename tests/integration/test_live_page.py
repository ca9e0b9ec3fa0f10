"""The live page of a simulated run, from the process that trains."""

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import forked
from support.commands import workplace
from support.deployment import wait_for

from monitoring.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow]

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)(/runs/\S+)\?token=(\S+)")


class Browser(httpx.Client):
    """One browser, with the cookie that the address gave it."""

    def __init__(self, address: str) -> None:
        found = ADDRESS.search(address)
        assert found is not None
        host, self.path, token = found.groups()
        super().__init__(base_url=host, headers={"origin": host}, timeout=120)
        assert self.get(self.path, params={"token": token}).status_code == 303

    def changes(self) -> Iterator[dict[str, Any]]:
        """What the page is told, until its stream ends."""
        with self.stream("GET", f"{self.path}/changes") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))


def test_page_follows_a_run_and_stops_it(tmp_path: Path) -> None:
    """It shows the round that waits, and stops the run after it when asked to."""
    place = workplace(tmp_path / "place")
    out, err = tmp_path / "out", tmp_path / "err"
    process = forked.shared().start(
        *("simulate", "job.toml", "--out", "run", "--no-report", "--web"),
        *("--set", "model.options.until=go"),
        out=out,
        err=err,
        folder=place,
        environment={**os.environ},
    )
    wait_for(lambda: ADDRESS.search(err.read_text()) is not None, "an address")
    with contextlib.closing(Browser(err.read_text())) as browser:
        assert "Stop after this round" in browser.get(browser.path).text
        with contextlib.closing(browser.changes()) as changes:
            told = next(changes)
            while "<b>Round 2 of 6</b>" not in told["sections"].get("now", ""):
                told = next(changes)
            assert told["state"] == "live"
            assert browser.post(f"{browser.path}/stop").status_code == 303
            (place / "go").touch()
            while told["state"] != "stopped":
                told = next(changes)
    assert process.wait() == 128 + signal.SIGINT
    # The run may have begun one more round before the request came.
    view = RunFolder(place / "run").view()
    assert view.status == "stopped"
    assert view.rounds_completed in {2, 3}
    assert f"{view.rounds_completed} of 6" in told["sections"]["summary"]


def test_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """Nothing begins on another port than the one that was asked for."""
    place = workplace(tmp_path / "place")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = forked.shared().start(
            *("simulate", "job.toml", "--out", "run", "--web", "--port", str(port)),
            out=tmp_path / "out",
            err=tmp_path / "err",
            folder=place,
            environment={**os.environ},
        )
        assert process.wait() == 1
    assert f"port {port}" in (tmp_path / "err").read_text()
    assert not (place / "run").exists()
