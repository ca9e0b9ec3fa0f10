"""Buckets over a bad network: attempts are bounded, and no wrong object gets a name.

One suite for all services; what only one of them can meet is in its unit tests.
"""

from collections.abc import Callable, Iterator

import pytest
from support import tcp_proxy
from support.bad_lines import ATTEMPTS, LOST_REPLY, Line
from support.tcp_proxy import Fault

from cloud_adapters.storage import pace
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
        line.patterns.write: lambda: line.far.put("key", [b"x"], if_absent=True),
        line.patterns.stat: lambda: line.far.stat("there"),
        line.patterns.listing: lambda: list(line.far.list()),
        line.patterns.copy: lambda: line.far.copy("there", "key", if_absent=True),
    }
    for pattern, verb in verbs.items():
        line.near.delete("key")
        line.proxy.clear()
        line.proxy.fail(pattern, fault(line), times=2)
        verb()
        assert line.proxy.count(pattern) == 3
    assert line.near.read("key") == b"content"


def test_attempts_are_bounded_and_counted_once(line: Line):
    """The library's own attempts do not multiply ours; the message counts them."""
    line.proxy.fail("", line.throttled(), times=1000)
    with pytest.raises(StoreThrottled, match="tried 6 times"):
        line.far.read("key")
    assert line.proxy.count("") == ATTEMPTS


def test_deadline_ends_attempts(line: Line):
    """Where the service asks for long waits, time is up before the attempts are."""
    line.proxy.fail("", line.throttled("Retry-After: 50"), times=1000)
    with pytest.raises(StoreThrottled, match="tried 3 times"):
        line.far.read("key")
    assert line.clock.monotonic() == 100


def test_unreachable_endpoint(line: Line):
    """Nobody listens: a plain error, after all attempts."""
    store = line.at("http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match=r"read .*key.*network.*tried 6 times"):
        store.read("key")
    store.close()


@pytest.mark.parametrize("broken", [Fault(reset_down=5_000), Fault(end_down=5_000)])
def test_broken_body_is_resumed(line: Line, broken: Fault):
    """The read goes on where it broke off."""
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
    monkeypatch.setattr(pace, "BODY_SECONDS", -1.0)
    line.near.put("key", [b"content"])
    line.proxy.fail(line.patterns.read, Fault(bytes_per_second=50), times=1000)
    with pytest.raises(StoreUnavailable, match=r"only 1 bytes came.*tried 6 times"):
        line.far.read("key")
    # A read that has all its bytes is done, however slowly they came.
    assert line.far.read("key", length=3) == b"con"


def test_slow_body_is_no_failure(line: Line, monkeypatch: pytest.MonkeyPatch):
    """Above the lowest speed a read goes on as long as it takes."""
    monkeypatch.setattr(pace, "BODY_SECONDS", -1.0)
    monkeypatch.setattr(pace, "BODY_BYTES_PER_SECOND", 0.5)
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
    with pytest.raises(CorruptObject, match=r"write .*key.*tried 6 times"):
        line.far.put("key", [CONTENT])
    with pytest.raises(ObjectNotFound):
        line.near.stat("key")


def test_failed_upload_leaves_nothing(line: Line):
    """Neither an object nor parts that would be paid for."""
    line.near.put("key", [b"before"])
    line.proxy.fail(line.patterns.part, line.down, times=1000)
    with pytest.raises(StoreUnavailable, match=r"write .*key.*tried 6 times"):
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
