"""What systemd hears of a process that it has started."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.service_manager import ALIVE, READY, notify_from_environment, status


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """The manager's end, as systemd and containers have it."""
    is_path = request.param == "path"
    name = str(tmp_path / "notify") if is_path else f"@crossfed-{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name if is_path else "\0" + name[1:])
        end.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield end


def test_states_arrive_one_by_one(manager: socket.socket):
    notify = notify_from_environment()
    for state in (READY, ALIVE, status("two\nlines")):
        notify(state)
    received = [manager.recv(100) for _ in range(3)]
    assert received == [b"READY=1", b"WATCHDOG=1", b"STATUS=two lines"]


def test_a_manager_that_does_not_read_keeps_nobody_waiting(manager: socket.socket):
    notify = notify_from_environment()
    for _ in range(10_000):  # More than a socket's queue holds.
        notify(ALIVE)
    assert manager.recv(100) == b"WATCHDOG=1"
