"""As many browsers as like may ask for a page: a run and a scrape do not notice."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from faults import disks
from support import event_samples
from support.deployment import wait_for
from support.event_samples import Script
from support.programs import needs

from deploy import web_connections, web_server
from federation.clock import SystemClock
from federation.errors import StoreUnavailable
from federation.event_log import EventWriter
from federation.events import Event
from monitoring.runs import fold_cache, run_reader
from monitoring.runs.run_folder import RunFolder
from monitoring.web import app
from monitoring.web.app import Shown, live_app
from monitoring.web.run_metrics import RunsCollector

pytestmark = [pytest.mark.slow]

TOKEN, BEARER, NAME = "a-token-of-many-bits", "another", "20260101-000000-abcdef"
CHANGES = f"/runs/{NAME}/changes"
SCRAPE = {"authorization": f"Bearer {BEARER}"}
EVENTS = event_samples.run(Script(sites=tuple(f"site-{n}" for n in range(60))))


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "job" / NAME)
    write(run, EVENTS[: len(EVENTS) // 2])
    return run


@pytest.fixture(name="port")
def _port(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(web_server, "STUCK_SECONDS", 2.0)
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.05)
    shown = Shown(rows=list, find={NAME: run}.get, actions={})
    with web_server.serving(
        lambda port: live_app(
            shown,
            token=TOKEN,
            port=port,
            clock=SystemClock(),
            metrics=RunsCollector(lambda: [run]),
            metrics_token=BEARER,
        ),
        0,
        clock=SystemClock(),
        last_look_seconds=0.0,
    ) as port:
        yield port


def write(run: RunFolder, events: list[Event]) -> None:
    with EventWriter(run.events) as log:
        for event in events:
            log(event)


def opened(port: int, *, receive_bytes: int = 0) -> socket.socket:
    """Ask for the changes of a page; nothing of the answer is read."""
    found = socket.socket()
    if receive_bytes:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    found.settimeout(60)
    found.connect(("127.0.0.1", port))
    found.sendall(
        f"GET {CHANGES} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Cookie: crossfed-{port}={TOKEN}\r\n\r\n".encode()
    )
    return found


def read_to_its_end(page: socket.socket) -> None:
    """Read changes until one says that the run has ended."""
    text = b""
    while b'"state": "ended"' not in text:
        block = page.recv(1 << 16)
        assert block
        text = text[-100:] + block


def write_until_full(run: RunFolder, events: list[Event]) -> list[Event]:
    """Write events while the disk has room; what is left of them."""
    with EventWriter(run.events) as log:
        for at, event in enumerate(events):
            try:
                log(event)
            except StoreUnavailable:
                return events[at:]
    return []


def test_page_that_is_one_too_many_is_told_so(port: int, run: RunFolder) -> None:
    """Nine hundred more are told the same; memory stays, and scrapes come through."""
    host = f"http://127.0.0.1:{port}"
    client = httpx.Client(base_url=host, timeout=60)
    with ExitStack() as stack:
        stack.enter_context(client)
        client.get(f"/?token={TOKEN}")
        readers = []
        for _ in range(app.MAX_OPEN):
            reader = stack.enter_context(contextlib.closing(opened(port)))
            assert reader.recv(15) == b"HTTP/1.1 200 OK"
            readers.append(reader)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(936):
            place = CHANGES if number % 2 else f"/runs/{NAME}"
            answer = client.get(place)
            assert answer.status_code == 503
            assert f"{app.MAX_OPEN} pages of runs are open: close one" in answer.text
        assert client.get("/").status_code == 200
        scrape = client.get("/metrics", headers=SCRAPE)
        assert scrape.status_code == 200
        assert "crossfed_run_loss" in scrape.text
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 << 10, f"{grown} KiB"
        readers[0].close()

        def has_room() -> bool:
            return client.get(f"/runs/{NAME}").status_code == 200

        wait_for(has_room, "room for another page", 60)


def test_connections_that_ask_for_nothing_do_not_blind_monitoring(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither new ones, nor those that send a byte after a request that was refused."""
    monkeypatch.setattr(web_connections, "REQUEST_SECONDS", 60.0)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    with ExitStack() as stack:
        stack.enter_context(client)
        idle = []
        for number in range(web_connections.MAX_CONNECTIONS + 40):
            found = socket.create_connection(("127.0.0.1", port), timeout=10)
            idle.append(stack.enter_context(contextlib.closing(found)))
            if number % 2:
                found.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert found.recv(9) == b"HTTP/1.1 "
                found.sendall(b"G")
        scrape = client.get("/metrics", headers=SCRAPE)
        assert scrape.status_code == 200
        assert "crossfed_run_loss" in scrape.text
        client.get(f"/?token={TOKEN}")
        assert client.get("/").status_code == 200
        assert idle[0].recv(1) == b""  # The oldest has given way.
    monkeypatch.setattr(web_connections, "REQUEST_SECONDS", 0.05)
    for sent in (b"", b"GET /metrics HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
            slow.sendall(sent)
            assert slow.recv(1) == b""


def test_reader_that_takes_nothing_is_dropped(
    port: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get what is new, and its place is free again."""
    monkeypatch.setattr(app, "MAX_OPEN", 2)
    stuck = opened(port, receive_bytes=4096)
    with contextlib.closing(stuck), contextlib.closing(opened(port)) as reader:
        write(run, EVENTS[len(EVENTS) // 2 :])
        read_to_its_end(reader)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            client.get(f"/?token={TOKEN}")
            assert client.get(f"/runs/{NAME}").status_code == 503

            def has_room() -> bool:
                return client.get(f"/runs/{NAME}").status_code == 200

            wait_for(has_room, "the place of the reader that is stuck", 60)


def test_browser_that_closes_its_page_takes_nothing_from_another(
    port: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of what it is sent; its place is free at once."""
    monkeypatch.setattr(app, "MAX_OPEN", 2)
    with (
        contextlib.closing(opened(port)) as stays,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        client.get(f"/?token={TOKEN}")
        with contextlib.closing(opened(port, receive_bytes=4096)) as goes:
            assert goes.recv(100)
            assert client.get(f"/runs/{NAME}").status_code == 503
        wait_for(lambda: client.get(f"/runs/{NAME}").status_code == 200, "room", 60)
        write(run, EVENTS[len(EVENTS) // 2 :])
        read_to_its_end(stays)


@needs("root", "mount")
def test_full_disk_closes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows what is whole, leaves no file behind, and goes on when there is room."""
    monkeypatch.setattr(fold_cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.05)
    disk = tmp_path / "disk"
    with disks.disks([disk], size=8 << 20):
        run = RunFolder(disk / NAME)
        write(run, EVENTS[: len(EVENTS) // 2])
        shown = Shown(rows=list, find={NAME: run}.get, actions={})
        with (
            web_server.serving(
                lambda port: live_app(
                    shown, token=TOKEN, port=port, clock=SystemClock()
                ),
                0,
                clock=SystemClock(),
                last_look_seconds=0.0,
            ) as port,
            contextlib.closing(opened(port)) as page,
        ):
            assert page.recv(1 << 16)
            cache = run.path / run_reader.NAME
            wait_for(cache.exists, "what the page leaves", 60)
            before = cache.read_bytes()
            disks.leave(disk, 8192)
            rest = write_until_full(run, EVENTS[len(EVENTS) // 2 :])
            assert rest
            assert page.recv(1 << 20)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as other:
                other.get(f"/?token={TOKEN}")
                assert other.get(f"/runs/{NAME}").status_code == 200
            assert cache.read_bytes() == before
            assert {each.name for each in run.path.iterdir()} == {
                cache.name,
                run.events.name,
            }
            disks.clear(disk)
            write(run, rest)
            read_to_its_end(page)
