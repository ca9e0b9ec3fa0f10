"""Cloud Storage over a bad network: attempts are bounded, no wrong object appears."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from support import gcs_stores, tcp_proxy
from support.fake_gcs import KIB_256, FakeGcs
from support.tcp_proxy import Fault

from cloud_adapters.storage.gcs import GcsStore
from federation.clock import VirtualClock
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)

pytestmark = pytest.mark.slow

ATTEMPTS = 6  # Of Retry, by default.
LOST_REPLY = Fault(reset_down=-1)
BIG = os.urandom(5 * KIB_256 + 12_345)  # Six chunks.


def google_error(status: int, reason: str, *headers: str) -> Fault:
    """An error as Google's services word it."""
    error = {"code": status, "message": "a fault", "errors": [{"reason": reason}]}
    body = json.dumps({"error": error}).encode()
    return tcp_proxy.answer(status, body, "Content-Type: application/json", *headers)


def big() -> Iterator[bytes]:
    """As a stream of pieces that end anywhere."""
    for start in range(0, len(BIG), 100_000):
        yield BIG[start : start + 100_000]


@dataclass
class Line:
    """A store behind a proxy, and the same store without it."""

    proxy: tcp_proxy.FaultyProxy
    far: GcsStore
    near: GcsStore
    clock: VirtualClock
    server: FakeGcs


@pytest.fixture(scope="module")
def bad_proxy(gcs_server: FakeGcs) -> Iterator[tcp_proxy.FaultyProxy]:
    with tcp_proxy.proxy(gcs_server.url) as proxy:
        yield proxy


@pytest.fixture
def line(gcs_server: FakeGcs, bad_proxy: tcp_proxy.FaultyProxy) -> Iterator[Line]:
    bad_proxy.clear()
    gcs_server.uploads.clear()
    bucket = gcs_stores.new_bucket(gcs_server)
    near = gcs_stores.store(gcs_server, "run", bucket=bucket)
    clock = VirtualClock()
    retry = gcs_stores.quick_retry(clock=clock)
    far = gcs_stores.store(
        gcs_server, "run", bucket=bucket, endpoint=bad_proxy.url, retry=retry
    )
    yield Line(bad_proxy, far, near, clock, gcs_server)
    near.close()
    far.close()


PASSING = {
    "reset before the answer": LOST_REPLY,
    "408": tcp_proxy.answer(408),
    "429": google_error(429, "rateLimitExceeded"),
    "500": google_error(500, "backendError"),
    "502 with a page": tcp_proxy.answer(502, b"<html>", "Content-Type: text/html"),
    "503": google_error(503, "backendError"),
    "conflict": google_error(409, "conflict"),
    "rate of 403": google_error(403, "userRateLimitExceeded"),
    "not JSON": tcp_proxy.answer(200, b"<html>", "Content-Type: text/html"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(line: Line, fault: Fault):
    """Every verb gets over two failures in a row, with three requests."""
    line.near.put("key", [b"content"])
    verbs: dict[str, Callable[[], object]] = {
        "POST .*uploadType": lambda: line.far.put("new", [b"x"], if_absent=True),
        "GET .*/run%2Fkey": lambda: line.far.stat("key"),
        "GET .*/o[?]": lambda: list(line.far.list()),
        "POST .*rewriteTo": lambda: line.far.copy("key", "copy", if_absent=True),
    }
    for pattern, verb in verbs.items():
        line.proxy.clear()
        line.proxy.fail(pattern, fault, times=2)
        verb()
        assert line.proxy.count(pattern) >= 3
    assert line.near.read("new") == b"x"
    assert line.near.read("copy") == b"content"


def test_deleting_is_tried_again(line: Line):
    """What a lost answer leaves unknown, the next attempt finds done."""
    line.near.put("key", [b"content"])
    line.proxy.fail("DELETE", google_error(503, "backendError"))
    line.proxy.fail("DELETE", LOST_REPLY)
    line.far.delete("key")
    assert line.proxy.count("DELETE") == 3
    with pytest.raises(ObjectNotFound):
        line.near.stat("key")


def test_attempts_are_bounded_and_counted_once(line: Line):
    """Google's libraries make no attempts of their own; the message counts ours."""
    line.proxy.fail("", google_error(503, "backendError"), times=1000)
    with pytest.raises(StoreUnavailable, match=r"503 backendError.*tried 6 times"):
        line.far.read("key")
    assert line.proxy.count("") == ATTEMPTS


def test_deadline_ends_attempts(line: Line):
    """Where the service asks for long waits, time is up before the attempts are."""
    slow = google_error(429, "rateLimitExceeded", "Retry-After: 50")
    line.proxy.fail("", slow, times=1000)
    with pytest.raises(StoreThrottled, match="tried 3 times"):
        line.far.read("key")
    assert line.clock.monotonic() == 100


@pytest.mark.parametrize("fault", [google_error(503, "backendError"), LOST_REPLY])
@pytest.mark.parametrize("content", [b"small", BIG], ids=["small", "big"])
def test_lost_reply_of_a_create_is_recognised(line: Line, content: bytes, fault: Fault):
    """The write that got through is ours: no ObjectExists, and one object."""
    line.proxy.fail("PUT|uploadType=multipart", LOST_REPLY, times=1)
    line.proxy.fail("PUT|uploadType=multipart", fault, times=1)
    info = line.far.put("key", [content], if_absent=True)
    assert line.near.stat("key") == info
    assert line.near.read("key") == content


def test_lost_reply_behind_the_last_chunk(line: Line):
    """The session tells that the object is there."""
    line.proxy.fail("PUT", LOST_REPLY, after=5)
    info = line.far.put("key", big(), if_absent=True)
    assert line.near.read("key", if_version=info.version) == BIG


def test_session_that_is_gone_behind_the_last_chunk(line: Line):
    """The put-id tells that the object is there, and whose it is."""
    line.proxy.fail("PUT", LOST_REPLY, after=5)
    line.proxy.fail("PUT", google_error(410, "gone"), times=100)
    info = line.far.put("key", big(), if_absent=True)
    assert line.near.read("key", if_version=info.version) == BIG


def test_session_that_is_gone(line: Line):
    """An upload that the service has forgotten is said to be one."""
    line.proxy.fail("PUT", google_error(404, "notFound"), after=2, times=100)
    with pytest.raises(StoreUnavailable, match="put the object again"):
        line.far.put("key", big(), if_absent=True)
    assert list(line.near.list()) == []


def test_lost_reply_does_not_hide_a_rival(line: Line):
    """Another's object is not taken for ours, though our first answer is lost."""
    line.near.put("key", [b"rival"])
    line.proxy.fail("POST", LOST_REPLY)
    with pytest.raises(ObjectExists, match="'key'"):
        line.far.put("key", [b"ours!"], if_absent=True)
    assert line.near.read("key") == b"rival"


def test_repeated_write_spares_a_newer_one(line: Line):
    """A write whose answer was lost is not made again over what came after it."""
    version = line.near.put("key", [b"old"]).version
    line.proxy.fail("POST", LOST_REPLY)
    line.proxy.fail("GET", google_error(503, "backendError"))
    info = line.far.put("key", [b"new"])
    assert line.proxy.count("POST") == 1
    assert int(info.version) > int(version)
    with pytest.raises(ObjectChanged):
        line.far.put("key", [b"newer"], if_version=version)


@pytest.mark.parametrize("num_bytes", [0, 1000, KIB_256 - 1])
def test_upload_goes_on_where_it_broke(line: Line, num_bytes: int):
    """A reset inside a chunk costs at most that chunk."""
    line.proxy.fail("PUT", Fault(reset_up=num_bytes), after=1)
    line.proxy.fail("PUT", Fault(reset_up=num_bytes), after=2)
    line.far.put("key", big(), if_absent=True)
    assert line.near.read("key") == BIG
    # Six chunks, two of them twice, each with a question in between.
    assert line.proxy.count("PUT") == 10
    assert line.proxy.count("POST") == 1


def test_service_may_keep_a_part_of_a_chunk(
    line: Line, monkeypatch: pytest.MonkeyPatch
):
    """The rest of it is sent from where the service has it."""
    monkeypatch.setattr(line.server, "kept_at_once", 3 * KIB_256)
    bucket, url = line.near._bucket, line.proxy.url
    store = gcs_stores.store(
        line.server, bucket=bucket, endpoint=url, chunk_bytes=4 * KIB_256
    )
    store.put("run/key", big())
    store.close()
    assert line.near.read("key") == BIG
    ranges = [r.headers.get("content-range") for r in line.server.requests]
    assert f"bytes {3 * KIB_256}-{4 * KIB_256 - 1}/*" in ranges
    assert line.proxy.count("PUT") == 3


@pytest.mark.parametrize(
    "fault", [Fault(flip_up=300), Fault(flip_up=KIB_256 - 7)], ids=["early", "late"]
)
def test_changed_chunk_makes_no_object(line: Line, fault: Fault):
    """The service compares with the checksum before it gives the object its name."""
    line.proxy.fail("PUT", fault, after=1)
    with pytest.raises(CorruptObject, match="write 'key'"):
        line.far.put("key", big())
    assert list(line.near.list()) == []
    assert line.server.uploads == {}


def test_changed_small_object_is_sent_again(line: Line):
    """One request holds all of it, so another can mend it."""
    content = os.urandom(10_000)
    line.proxy.fail("uploadType=multipart", Fault(flip_up=5000))
    line.far.put("key", [content])
    assert line.near.read("key") == content


def test_upload_that_fails_leaves_nothing(line: Line):
    """Neither an object nor a session that holds its bytes."""
    down = google_error(503, "backendError")
    line.proxy.fail("PUT", down, after=3, times=100)
    with pytest.raises(StoreUnavailable, match="tried 6 times"):
        line.far.put("key", big())
    assert list(line.near.list()) == []
    assert line.server.uploads == {}


def test_failing_source_cancels_the_upload(line: Line):
    """The service need not keep what nobody will complete."""

    def broken() -> Iterator[bytes]:
        yield BIG
        raise LookupError

    with pytest.raises(LookupError):
        line.far.put("key", broken())
    assert list(line.near.list()) == []
    assert line.server.uploads == {}


@pytest.mark.parametrize(("start", "length"), [(0, None), (10, len(BIG) - 20)])
def test_read_goes_on_where_it_broke(line: Line, start: int, length: int | None):
    """What has arrived is not asked for again."""
    line.near.put("key", [BIG])
    line.proxy.fail("GET", Fault(end_down=400_000), times=2)
    expected = BIG[start : None if length is None else start + length]
    assert line.far.read("key", start=start, length=length) == expected
    ranges = [request.headers.get("range", "") for request in line.server.requests]
    assert ranges[-1].startswith(f"bytes={start + 800_000}-")


def test_read_gets_over_resets(line: Line):
    """How much of what had arrived a reset destroys depends on the system."""
    line.near.put("key", [BIG])
    line.proxy.fail("GET", Fault(reset_down=400_000), times=2)
    assert line.far.read("key") == BIG
    assert line.proxy.count("GET") == 3


def test_read_never_mixes_two_versions(line: Line):
    """A read that broke while the object was replaced begins again."""
    line.near.put("key", [BIG])
    new = os.urandom(len(BIG))
    line.proxy.fail("GET", Fault(reset_down=400_000))
    waited = threading.Event()

    def replace(_: StoreError) -> None:
        if not waited.is_set():
            waited.set()
            line.near.put("key", [new])

    retry = gcs_stores.quick_retry(listener=replace)
    bucket = line.near._bucket
    store = gcs_stores.store(
        line.server, "run", bucket=bucket, endpoint=line.proxy.url, retry=retry
    )
    assert store.read("key") == new
    store.close()


def test_changed_answer_is_read_again(line: Line):
    """A byte changed on its way down does not reach the caller."""
    line.near.put("key", [BIG])
    line.proxy.fail("GET", Fault(flip_down=1000))
    assert line.far.read("key") == BIG
    assert line.proxy.count("GET") == 2


def test_slow_answer_is_no_failure(line: Line):
    """As long as bytes keep coming, a read goes on."""
    line.near.put("key", [b"x" * 1000])
    line.proxy.fail("GET", Fault(bytes_per_second=10_000))
    assert line.far.read("key") == b"x" * 1000
    assert line.proxy.count("GET") == 1


def test_unreachable_endpoint(line: Line):
    """A refused connection is tried again and then named."""
    store = GcsStore("b", endpoint="http://127.0.0.1:9", retry=gcs_stores.quick_retry())
    with pytest.raises(StoreUnavailable, match=r"read 'key' of gs://b.*network"):
        store.read("key")
    store.close()


def test_one_of_many_big_writers_wins(line: Line):
    """Of 16 that upload in chunks one wins, whatever the network loses."""
    line.proxy.fail("PUT", LOST_REPLY, after=7, times=5)
    barrier = threading.Barrier(16)
    contents = [bytes([n]) * (2 * KIB_256 + n) for n in range(16)]

    def race(racer: int) -> bool:
        barrier.wait()
        try:
            line.far.put("prize", iter([contents[racer]]), if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert sum(won) == 1
    assert line.near.read("prize") == contents[won.index(True)]
    assert len(line.server.uploads) <= 1
