"""Alerts reach each place once, whatever fails."""

import contextlib
import email
import email.utils
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cloud_adapters.net import short_requests
from cloud_adapters.net.ports import free_port
from deploy.aggregator_host.alert_delivery import (
    MAX_ATTEMPTS,
    QUIET_SECONDS,
    AlertDelivery,
    places,
)
from deploy.aggregator_host.config import AlertSpec
from federation.clock import VirtualClock
from federation.errors import FederationError, JobError
from monitoring.web.alerts import Alert

STALLED = Alert(key="r/stalled/3", text="run r: round 3 goes on. See who.")


class Phone:
    """A place that can be off."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_off, self.calls = False, 0

    def __call__(self, text: str) -> None:
        self.calls += 1
        if self.is_off:
            raise FederationError("no signal")
        self.texts.append(text)


@pytest.fixture
def phone() -> Phone:
    return Phone()


Make = Callable[[], AlertDelivery]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1e9)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, phone: Phone, clock: VirtualClock, said: list[str]) -> Make:
    return lambda: AlertDelivery(
        places={"the phone": phone},
        path=tmp_path / "alerts.json",
        clock=clock,
        listener=said.append,
    )


def test_alert_is_told_once(make: Make, phone: Phone, clock: VirtualClock) -> None:
    """Also by the next process; and again when it comes back after a while."""
    delivery = make()
    for _ in range(3):
        delivery.deliver([STALLED])
        clock.sleep(2)
    make().deliver([STALLED])
    assert phone.texts == [f"crossfed: {STALLED.text}"]
    again = make()
    clock.sleep(QUIET_SECONDS / 2)
    again.deliver([])
    again.deliver([STALLED])
    assert len(phone.texts) == 1
    clock.sleep(QUIET_SECONDS + 1)
    again.deliver([])
    again.deliver([STALLED])
    assert len(phone.texts) == 2


def test_place_that_is_down_is_tried_again(
    make: Make, phone: Phone, clock: VirtualClock, said: list[str]
) -> None:
    """Less and less often, and the log says so once."""
    delivery, phone.is_off = make(), True
    delivery.deliver([STALLED])
    delivery.deliver([STALLED])
    assert phone.calls == 1
    clock.sleep(31)
    delivery.deliver([STALLED])
    assert phone.calls == 2
    phone.is_off = False
    clock.sleep(61)
    delivery.deliver([STALLED])
    assert len(phone.texts) == 1
    assert said == ["an alert did not reach the phone: no signal; it is tried again"]


def test_place_that_stays_down_is_given_up(
    make: Make, phone: Phone, clock: VirtualClock, said: list[str]
) -> None:
    delivery, phone.is_off = make(), True
    for _ in range(2 * MAX_ATTEMPTS):
        delivery.deliver([STALLED])
        clock.sleep(3000)
    assert phone.calls == MAX_ATTEMPTS
    assert said[-1].endswith("it is given up")
    assert len(said) == 2


def test_passing_cause_is_told_once_the_place_is_back(
    make: Make, phone: Phone, clock: VirtualClock
) -> None:
    """A knock lasts for a moment; restarts in between forget nothing of it."""
    phone.is_off = True
    make().deliver([STALLED])
    for _ in range(9):
        clock.sleep(10)
        make().deliver([])
    phone.is_off, calls = False, phone.calls
    for _ in range(30):
        clock.sleep(10)
        make().deliver([])
    assert phone.texts == [f"crossfed: {STALLED.text}"]
    assert phone.calls == calls + 1


def test_clock_that_is_set_back_delays_no_alert(
    make: Make, phone: Phone, clock: VirtualClock
) -> None:
    phone.is_off = True
    make().deliver([STALLED])
    phone.is_off = False
    earlier = make()
    earlier.clock = VirtualClock(clock.now() - 86_400)
    earlier.deliver([STALLED])
    earlier.deliver([STALLED])
    assert len(phone.texts) == 1


def test_place_that_is_down_does_not_keep_the_others_waiting(
    tmp_path: Path, phone: Phone, clock: VirtualClock
) -> None:
    """Of many alerts at once, one is tried there, and all are told elsewhere."""
    other = Phone()
    phone.is_off = True
    delivery = AlertDelivery(
        places={"the phone": phone, "the other": other},
        path=tmp_path / "alerts.json",
        clock=clock,
        listener=lambda _: None,
    )
    storm = [Alert(key=f"r/silent/{site}", text=f"{site} is gone") for site in "abcdef"]
    delivery.deliver(storm)
    assert (phone.calls, len(other.texts)) == (1, 6)
    phone.is_off = False
    for _ in range(20):
        clock.sleep(10)
        delivery.deliver([])
    assert (len(phone.texts), len(other.texts)) == (6, 6)


def test_outage_of_many_sites_is_one_message(
    make: Make, phone: Phone, clock: VirtualClock
) -> None:
    """Also after a time in which nobody could be told; later ones are told anew."""
    down, phone.is_off = make(), True
    sites = [f"site-{index}" for index in range(1000)]
    storm = [
        Alert(key=f"r/{site}", text=f"{site} is gone.", crowd="r/silent", member=site)
        for site in sites
    ]
    down.deliver([*storm[:999], STALLED])
    phone.is_off = False
    clock.sleep(31)
    delivery = make()
    delivery.deliver([*storm[:999], STALLED])
    delivery.deliver([*storm[:999], STALLED])
    together, stalled = phone.texts
    assert stalled == f"crossfed: {STALLED.text}"
    assert together.startswith("crossfed: 999 ")
    assert "site-0, site-1, " in together
    assert "and 994 more" in together
    assert together.endswith("site-0 is gone.")
    delivery.deliver(storm)
    make().deliver(storm)
    assert phone.texts[2:] == ["crossfed: site-999 is gone."]


def test_damaged_record_costs_no_alert(
    make: Make, phone: Phone, tmp_path: Path
) -> None:
    for text in (b"", b"[]", b'{"x": 3}', b'{"x": {"y": 1}}'):
        (tmp_path / "alerts.json").write_bytes(text)
        make().deliver([STALLED])
    assert len(phone.texts) == 4


class _HookServer(HTTPServer):
    got: list[tuple[str, object]]
    status = 200


class _MailServer(socketserver.TCPServer):
    got: list[str]


class _Hook(BaseHTTPRequestHandler):
    server: _HookServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Mail(socketserver.StreamRequestHandler):
    server: _MailServer

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        body = False
        for line in self.rfile:
            self.server.got.append(line.decode().strip())
            if body and line != b".\r\n":
                continue
            body = line.upper() == b"DATA\r\n"
            if line.upper() == b"QUIT\r\n":
                self.wfile.write(b"221 bye\r\n")
                return
            self.wfile.write(b"354 go on\r\n" if body else b"250 fine\r\n")


@contextmanager
def _served(server: _HookServer | _MailServer) -> Iterator[str]:
    server.got = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_webhook_gets_json() -> None:
    """Its address, whose path is often a secret, is in no message."""
    server = _HookServer(("127.0.0.1", 0), _Hook)
    with _served(server) as place:
        url = f"http://{place}/services/secret?code=1"
        ((name, send),) = places([AlertSpec(webhook=url)]).items()
        send("hello")
        assert server.got == [("/services/secret?code=1", {"text": "hello"})]
        assert "secret" not in name
        server.status = 403
        with pytest.raises(FederationError, match="403") as raised:
            send("hello")
        assert "secret" not in str(raised.value)


class _SlowHook(_Hook):
    """Sends a byte of its answer now and then."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)


def test_webhook_that_never_ends_its_answer_keeps_no_other_place_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(short_requests, "REQUEST_SECONDS", 0.3)
    server = _HookServer(("127.0.0.1", 0), _SlowHook)
    with _served(server) as place:
        ((_, send),) = places([AlertSpec(webhook=f"http://{place}/x")]).items()
        began = time.monotonic()
        with pytest.raises(FederationError, match="does not end"):
            send("hello")
        assert time.monotonic() - began < 5.0


def test_email_is_sent() -> None:
    server = _MailServer(("127.0.0.1", 0), _Mail)
    with _served(server) as place:
        spec = AlertSpec(email="ops@example.org", smtp=place)
        ((_, send),) = places([spec]).items()
        send("crossfed: run r has failed. Look.")
        assert "subject: crossfed: run r has failed" in server.got
        assert server.got.count("") == 1  # Between head and text.
        head = email.message_from_string(
            "\n".join(server.got[server.got.index("data") + 1 :])
        )
        sent = email.utils.parsedate_to_datetime(head["date"]).timestamp()
        assert abs(sent - time.time()) < 60
        assert head["message-id"].endswith("@example.org>")


@pytest.mark.parametrize(
    "spec",
    [
        AlertSpec(),
        AlertSpec(email="a@example.org", webhook="https://b"),
        AlertSpec(webhook="hooks.example.org/x"),
        AlertSpec(webhook="https:///x"),
        AlertSpec(webhook="https://example.org:99999/x"),
        AlertSpec(webhook="https://ann:secret@example.org/x"),
        AlertSpec(webhook="https://example.org/a b"),
        AlertSpec(webhook="file:///etc/passwd"),
        AlertSpec(command=("",)),
        AlertSpec(email="ops"),
        AlertSpec(email="a@example.org, b@example.org"),
        AlertSpec(email="a@example.org\nbcc: b@example.org"),
        AlertSpec(email="\u00f6ps@example.org"),
        AlertSpec(email="a@example.org", sender="ops"),
        AlertSpec(email="a@example.org", smtp="mail.example.org"),
        AlertSpec(email="a@example.org", smtp="mail.example.org:smtp"),
    ],
)
def test_entry_that_would_tell_nobody_is_refused(spec: AlertSpec) -> None:
    with pytest.raises(JobError, match=r"alerts\[0\]"):
        places([spec])


def test_two_places_with_one_name_are_both_told(
    tmp_path: Path, clock: VirtualClock
) -> None:
    """Two channels of one chat have one host; the rest of the address is secret."""
    server = _HookServer(("127.0.0.1", 0), _Hook)
    with _served(server) as place:
        urls = [f"http://{place}/{path}" for path in "abc"]
        delivery = AlertDelivery(
            places=places([AlertSpec(webhook=url) for url in urls]),
            path=tmp_path / "alerts.json",
            clock=clock,
            listener=lambda _: None,
        )
        delivery.deliver([STALLED])
        assert [path for path, _ in server.got] == ["/a", "/b", "/c"]


def test_place_with_a_fault_of_its_own_does_not_end_the_others(
    tmp_path: Path, phone: Phone, clock: VirtualClock
) -> None:
    def faulty(text: str) -> None:
        raise ValueError(text)

    delivery = AlertDelivery(
        places={"faulty": faulty, "the phone": phone},
        path=tmp_path / "alerts.json",
        clock=clock,
        listener=lambda _: None,
    )
    delivery.deliver([STALLED])
    assert len(phone.texts) == 1


def test_webhook_that_is_down_for_90_seconds_gets_each_alert_once(
    tmp_path: Path, clock: VirtualClock, said: list[str]
) -> None:
    """In the order in which they came; another place does not wait for it."""
    port, other = free_port(), Phone()
    hook = places([AlertSpec(webhook=f"http://127.0.0.1:{port}/x")])
    delivery = AlertDelivery(
        places={**hook, "other": other},
        path=tmp_path / "alerts.json",
        clock=clock,
        listener=said.append,
    )
    alerts = [STALLED, Alert(key="r/failed", text="run r has failed")]
    for _ in range(45):
        delivery.deliver(alerts)
        clock.sleep(2.0)
    assert len(other.texts) == 2
    server = _HookServer(("127.0.0.1", port), _Hook)
    with _served(server):
        for _ in range(90):
            delivery.deliver(alerts)
            clock.sleep(2.0)
    texts = [f"crossfed: {alert.text}" for alert in alerts]
    assert server.got == [("/x", {"text": text}) for text in texts]
    assert all("it is tried again" in text for text in said)
