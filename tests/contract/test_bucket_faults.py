"""Buckets over a bad network: attempts are bounded, and no wrong object gets a name.

One suite for all services; what only one of them can meet is in its unit tests.
"""

import re
import time
from collections.abc import Callable, Iterator

import pytest
from support import tcp_proxy
from support.bad_lines import CORRUPT_ATTEMPTS, LOST_REPLY, Line
from support.tcp_proxy import Fault

from cloud_adapters.storage import min_throughput
from federation.clock import VirtualClock
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreThrottled,
    StoreUnavailable,
)

pytestmark = pytest.mark.slow

CONTENT = bytes(range(250)) * 400


@pytest.fixture(params=["gcs", "s3"])
def line(request: pytest.FixtureRequest) -> Line:
    line: Line = request.getfixturevalue(f"{request.param}_line")
    return line


def contents(line: Line, size: str) -> Iterator[bytes]:
    return line.pieces() if size == "parts" else iter([CONTENT])


SIZES = pytest.mark.parametrize("size", ["whole", "parts"])

PASSING: dict[str, Callable[[Line], Fault]] = {
    "reset before the answer": lambda _: LOST_REPLY,
    "408": lambda _: tcp_proxy.answer(408),
    "429": lambda _: tcp_proxy.answer(429),
    "500": lambda _: tcp_proxy.answer(500),
    "502 with a page": lambda _: tcp_proxy.answer(
        502, b"<html>", "Content-Type: text/html"
    ),
    "503": lambda _: tcp_proxy.answer(503),
    "throttled": lambda line: line.throttled(),
    "down": lambda line: line.down,
    "a page": lambda _: tcp_proxy.answer(200, b"<html>", "Content-Type: text/html"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(line: Line, fault: Callable[[Line], Fault]):
    """Every verb gets over two failures in a row, with three requests."""
    line.near.put("there", [b"content"])
    verbs: dict[str, Callable[[], object]] = {
        line.patterns.stat: lambda: line.far.stat("there"),
        line.patterns.listing: lambda: list(line.far.list()),
        line.patterns.write: lambda: line.far.put("key", [b"x"], if_absent=True),
    }
    for pattern, verb in verbs.items():
        line.near.delete("key")
        line.proxy.clear()
        line.proxy.fail(pattern, fault(line), times=2)
        verb()
        assert line.proxy.count(pattern) == 3
    assert line.near.read("key") == b"x"


def test_attempts_are_bounded_and_counted_once(line: Line):
    """The library's own attempts do not multiply ours; the message counts them."""
    line.proxy.fail("", line.throttled(), times=1000)
    with pytest.raises(StoreThrottled, match=r"tried \d+ times in 120 s") as caught:
        line.far.read("key")
    tried = re.search(r"tried (\d+) times", str(caught.value))
    assert tried is not None
    assert line.proxy.count("") == int(tried[1]) < 100
    assert line.clock.monotonic() == 120


def time_passes(line: Line) -> None:
    """Let the time of bodies count for real, while waits still take none."""
    clock = line.clock
    clock.monotonic = lambda: clock.now() + time.monotonic()  # type: ignore[method-assign]


@SIZES
def test_outage_of_90_seconds_is_outlasted(line: Line, size: str):
    """Reads and writes wait until the service is back, and nothing is lost."""
    line.near.put("there", [CONTENT])
    outage(line, 90)
    assert line.far.read("there") == CONTENT
    assert 90 <= line.clock.monotonic() <= 100
    outage(line, 90)
    line.far.put("key", contents(line, size), if_absent=True)
    assert line.near.read("key") == b"".join(contents(line, size))


def outage(line: Line, seconds: float) -> None:
    """Let everything fail from now on for so many seconds of the line's clock."""
    sleep, back = VirtualClock.sleep, line.clock.monotonic() + seconds

    def awake(wait_seconds: float) -> None:
        sleep(line.clock, wait_seconds)
        if line.clock.monotonic() >= back:
            line.proxy.clear()

    line.clock.sleep = awake  # type: ignore[method-assign]
    line.proxy.fail("", line.down, times=1000)


def test_the_service_may_ask_for_long_waits(line: Line):
    """They are kept to, and a wait that would pass the deadline is not begun."""
    line.proxy.fail("", line.throttled("Retry-After: 50"), times=1000)
    with pytest.raises(StoreThrottled, match="tried 3 times"):
        line.far.read("key")
    assert line.clock.monotonic() == 100


def test_unreachable_endpoint(line: Line):
    """Nobody listens: a plain error, when the deadline has passed."""
    store = line.at("http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match=r"read .*key.*network.*tried \d+ times"):
        store.read("key")
    store.close()


@pytest.mark.parametrize("broken", [Fault(reset_down=5_000), Fault(end_down=5_000)])
def test_broken_body_is_resumed(line: Line, broken: Fault):
    """The read continues where it broke off."""
    line.near.put("key", [CONTENT])
    line.proxy.fail(line.patterns.read, broken, times=2)
    assert line.far.read("key", start=10, length=90_000) == CONTENT[10:90_010]
    assert line.proxy.count(line.patterns.read) == 3
    line.proxy.fail(line.patterns.read, broken, times=2)
    assert line.far.read("key") == CONTENT


def test_resumed_read_never_mixes_versions(line: Line):
    """An object that changed in between is read anew."""
    line.near.put("key", [b"a" * 50_000])
    line.proxy.fail(line.patterns.read, Fault(end_down=20_000))
    line.proxy.fail(line.patterns.read, line.throttled())
    line.meanwhile(lambda: line.near.put("key", [b"b" * 9_000]))
    assert line.far.read("key") == b"b" * 9_000


def test_pinned_read_says_that_the_object_changed(line: Line):
    """A reader who named a version gets that one or an error."""
    version = line.near.put("key", [b"a" * 50_000]).version
    line.proxy.fail(line.patterns.read, Fault(end_down=20_000))
    line.meanwhile(lambda: line.near.put("key", [b"b" * 9_000]))
    with pytest.raises(ObjectChanged):
        line.far.read("key", if_version=version)


def test_trickling_body_is_given_up(line: Line, monkeypatch: pytest.MonkeyPatch):
    """Bytes that come in time each, but never end, do not hold a reader for ever."""
    monkeypatch.setattr(min_throughput, "WINDOW_SECONDS", 0.05)
    time_passes(line)
    line.near.put("key", [b"x" * 1000])
    line.proxy.fail(line.patterns.read, Fault(bytes_per_second=50), times=1000)
    with pytest.raises(
        StoreUnavailable, match=r"bytes arrived.*tried \d+ times in 120 s"
    ):
        line.far.read("key")
    # A read that has all its bytes is done, however slowly they came.
    assert line.far.read("key", length=1) == b"x"


def test_trickling_body_gets_another_attempt(
    line: Line, monkeypatch: pytest.MonkeyPatch
):
    """It continues behind what has arrived, long before the time for a read is up."""
    monkeypatch.setattr(min_throughput, "WINDOW_SECONDS", 0.5)
    time_passes(line)
    content = CONTENT[:5_000]
    line.near.put("key", [content])
    line.proxy.fail(line.patterns.read, Fault(bytes_per_second=10))
    begin = time.monotonic()
    assert line.far.read("key") == content
    assert time.monotonic() - begin < 60
    assert line.proxy.count(line.patterns.read) == 2


def test_slow_body_is_no_failure(line: Line, monkeypatch: pytest.MonkeyPatch):
    """Above the lowest speed a read continues as long as it takes."""
    monkeypatch.setattr(min_throughput, "WINDOW_SECONDS", 0.01)
    monkeypatch.setattr(min_throughput, "BYTES_PER_SECOND", 10)
    time_passes(line)
    line.near.put("key", [b"x" * 1000])
    line.proxy.fail(line.patterns.read, Fault(bytes_per_second=10_000))
    assert line.far.read("key") == b"x" * 1000
    assert line.proxy.count(line.patterns.read) == 1


def test_wrong_bytes_on_the_way_down(line: Line):
    """Once they are read again; if they stay wrong, nobody gets them."""
    line.near.put("key", [CONTENT])
    line.proxy.fail(line.patterns.read, Fault(flip_down=3))
    assert line.far.read("key") == CONTENT
    assert line.proxy.count(line.patterns.read) == 2
    line.proxy.fail(line.patterns.read, Fault(flip_down=3), times=1000)
    with pytest.raises(CorruptObject, match="CRC32C"):
        line.far.read("key")


def test_wrong_bytes_on_the_way_up(line: Line):
    """The service refuses them; while they stay wrong, no object is there."""
    line.proxy.fail(line.patterns.write, Fault(flip_up=5_000))
    line.far.put("key", [CONTENT])
    assert line.near.read("key") == CONTENT
    line.near.delete("key")
    line.proxy.fail(line.patterns.write, Fault(flip_up=5_000), times=1000)
    with pytest.raises(
        CorruptObject, match=rf"write .*key.*tried {CORRUPT_ATTEMPTS} t"
    ):
        line.far.put("key", [CONTENT])
    with pytest.raises(ObjectNotFound):
        line.near.stat("key")


def test_failed_upload_leaves_nothing(line: Line):
    """Neither an object nor parts that would be paid for."""
    line.near.put("key", [b"before"])
    line.proxy.fail(line.patterns.part, line.down, times=1000)
    with pytest.raises(StoreUnavailable, match=r"write .*key.*tried \d+ times"):
        line.far.put("key", line.pieces())
    assert line.near.read("key") == b"before"
    assert line.unfinished() == []


def test_failing_source_leaves_nothing(line: Line):
    """The service need not keep what nobody will complete."""

    def broken() -> Iterator[bytes]:
        yield line.big
        yield line.big
        raise LookupError

    with pytest.raises(LookupError):
        line.far.put("key", broken())
    assert list(line.near.list()) == []
    assert line.unfinished() == []


@SIZES
def test_lost_reply_of_a_create_is_no_conflict_with_oneself(line: Line, size: str):
    """The object is there with our put-id: the write went well."""
    line.proxy.fail(line.patterns.write, LOST_REPLY, times=2)
    info = line.far.put("key", contents(line, size), if_absent=True)
    assert line.near.stat("key").version == info.version
    assert line.near.read("key") == b"".join(contents(line, size))


@SIZES
def test_lost_reply_of_a_change_is_no_conflict_with_oneself(line: Line, size: str):
    """The same for a write that names a version."""
    before = line.near.put("key", [b"before"])
    line.proxy.fail(line.patterns.write, LOST_REPLY)
    info = line.far.put("key", contents(line, size), if_version=before.version)
    assert line.near.stat("key").version == info.version != before.version


@SIZES
def test_lost_reply_within_an_outage(line: Line, size: str):
    """Whether the object is ours cannot be asked either for a while: that is no no."""
    line.proxy.fail(line.patterns.write, LOST_REPLY)
    line.proxy.fail("(HEAD|GET) .*[/F]key", line.down, times=3)
    info = line.far.put("key", contents(line, size), if_absent=True)
    assert line.near.stat("key").version == info.version


@SIZES
def test_same_content_of_another_writer_is_a_conflict(line: Line, size: str):
    """If somebody else won while we tried again, it is they who won."""
    line.proxy.fail(line.patterns.write, line.down)
    line.meanwhile(lambda: line.near.put("key", contents(line, size)))
    with pytest.raises(ObjectExists, match="'key'"):
        line.far.put("key", contents(line, size), if_absent=True)
    assert line.unfinished() == []


def test_lost_reply_does_not_hide_a_rival(line: Line):
    """Another's object is not taken for ours, though our first answer is lost."""
    line.near.put("key", [b"rival"])
    line.proxy.fail(line.patterns.write, LOST_REPLY)
    with pytest.raises(ObjectExists, match="'key'"):
        line.far.put("key", [b"ours!"], if_absent=True)
    assert line.near.read("key") == b"rival"
