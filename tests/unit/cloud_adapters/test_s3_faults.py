"""S3 over a bad network: attempts are bounded, and no wrong object gets a name."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support import s3_server as servers
from support import tcp_proxy
from support.tcp_proxy import Fault, s3_error

from cloud_adapters.storage.s3 import S3Store
from federation.clock import VirtualClock
from federation.errors import (
    CorruptObject,
    NotAuthenticated,
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

BIG = os.urandom(9 * 1024 * 1024)  # Two parts.


def big() -> Iterator[bytes]:
    """As a stream of pieces that end anywhere."""
    for start in range(0, len(BIG), 3_000_000):
        yield BIG[start : start + 3_000_000]


@dataclass
class Line:
    """A store behind a proxy, and the same store without it."""

    proxy: tcp_proxy.FaultyProxy
    far: S3Store
    near: S3Store
    clock: VirtualClock

    def uploads(self) -> list[str]:
        """Multipart uploads that are neither complete nor removed."""
        calls = self.near._calls
        answer = calls.client.list_multipart_uploads(Bucket=calls.bucket)
        return [upload["Key"] for upload in answer.get("Uploads", [])]


@pytest.fixture(scope="module")
def bad_proxy(s3_server: servers.S3Server) -> Iterator[tcp_proxy.FaultyProxy]:
    with tcp_proxy.proxy(s3_server.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bad_client(bad_proxy: tcp_proxy.FaultyProxy) -> object:
    return servers.client(bad_proxy.url, read_timeout=2)


@pytest.fixture
def line(
    s3_server: servers.S3Server, bad_proxy: tcp_proxy.FaultyProxy, bad_client: object
) -> Line:
    bad_proxy.clear()
    near = s3_server.store("run")
    clock = VirtualClock()
    far = s3_server.store(
        "run",
        bucket=near._calls.bucket,
        client=bad_client,
        retry=servers.quick_retry(clock=clock),
    )
    return Line(bad_proxy, far, near, clock)


PASSING = {
    "reset before the answer": LOST_REPLY,
    "500": s3_error(500, "InternalError"),
    "503": s3_error(503, "ServiceUnavailable"),
    "slow down": s3_error(503, "SlowDown"),
    "429": tcp_proxy.answer(429),
    "request timeout": s3_error(400, "RequestTimeout"),
    "conflict": s3_error(409, "ConditionalRequestConflict"),
    "not XML": tcp_proxy.answer(200, b"<html>", "Content-Type: text/html"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(line: Line, fault: Fault):
    """Every verb gets over two failures in a row, with three requests."""
    line.near.put("key", [b"content"])
    verbs = {
        "PUT .*/new": lambda: line.far.put("new", [b"x"]),
        "GET .*/key": lambda: line.far.read("key"),
        "DELETE .*/new": lambda: line.far.delete("new"),
        "GET .*list-type": lambda: list(line.far.list()),
    }
    for pattern, verb in verbs.items():
        line.proxy.fail(pattern, fault, times=2)
        verb()
        assert line.proxy.count(pattern) == 3


def test_attempts_are_bounded_and_counted_once(line: Line):
    """The library's own attempts do not multiply ours; the message counts them."""
    line.proxy.fail("", s3_error(503, "SlowDown"), times=1000)
    with pytest.raises(StoreThrottled, match=r"SlowDown.*tried 6 times"):
        line.far.read("key")
    assert line.proxy.count("") == ATTEMPTS


def test_deadline_ends_attempts(line: Line):
    """Where the service asks for long waits, time is up before the attempts are."""
    slow = s3_error(503, "SlowDown", "Retry-After: 50")
    line.proxy.fail("", slow, times=1000)
    with pytest.raises(StoreThrottled, match="tried 3 times"):
        line.far.read("key")
    assert line.clock.monotonic() == 100


def test_unreachable_endpoint():
    """Nobody listens: a plain error, after all attempts."""
    store = S3Store(
        "bucket",
        client=servers.client("http://127.0.0.1:1"),
        retry=servers.quick_retry(),
    )
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/key.*tried 6 times"):
        store.read("key")


@pytest.mark.parametrize("broken", [Fault(reset_down=5_000), Fault(end_down=5_000)])
def test_broken_body_is_resumed(line: Line, broken: Fault):
    """The read goes on where it broke off, and asks for nothing twice."""
    line.near.put("key", [BIG[:100_000]])
    line.proxy.fail("GET", broken, times=2)
    assert line.far.read("key", start=10, length=90_000) == BIG[10:90_010]
    assert line.far.read("key") == BIG[:100_000]
    assert line.proxy.count("GET") == 4


def test_resumed_read_never_mixes_versions(line: Line):
    """An object that changed in between is read anew."""
    line.near.put("key", [b"a" * 50_000])
    line.proxy.fail("GET", Fault(end_down=20_000))
    line.proxy.fail("GET", s3_error(503, "SlowDown"))
    line.far._calls.retry.clock.sleep = lambda _: line.near.put("key", [b"b" * 9_000])  # type: ignore[method-assign]
    assert line.far.read("key") == b"b" * 9_000


def test_pinned_read_says_that_the_object_changed(line: Line):
    """A reader who named a version gets that one or an error."""
    version = line.near.put("key", [b"a" * 50_000]).version
    line.proxy.fail("GET", Fault(end_down=20_000))
    line.far._calls.retry.clock.sleep = lambda _: line.near.put("key", [b"b" * 9_000])  # type: ignore[method-assign]
    with pytest.raises(ObjectChanged):
        line.far.read("key", if_version=version)


def test_wrong_bytes_on_the_way_down(line: Line):
    """Once they are read again; if they stay wrong, nobody gets them."""
    line.near.put("key", [b"content"])
    line.proxy.fail("GET", Fault(flip_down=3), times=1)
    assert line.far.read("key") == b"content"
    line.proxy.fail("GET", Fault(flip_down=3), times=1000)
    with pytest.raises(CorruptObject, match="CRC32C"):
        line.far.read("key")
    assert line.proxy.count("GET") == 4


@pytest.mark.parametrize("size", [1_000, len(BIG)])
def test_wrong_bytes_on_the_way_up(line: Line, size: int):
    """The service refuses them; while they stay wrong, no object is there."""
    line.proxy.fail("PUT", Fault(flip_up=500), times=1)
    line.far.put("once", [BIG[:size]])
    assert line.near.read("once") == BIG[:size]
    line.proxy.fail("PUT", Fault(flip_up=500), times=1000)
    with pytest.raises(CorruptObject, match=r"write s3://.*tried 6 times"):
        line.far.put("always", [BIG[:size]])
    with pytest.raises(ObjectNotFound):
        line.near.stat("always")
    assert line.uploads() == []


@pytest.mark.slow
def test_slow_answer_is_given_up(line: Line):
    """A server that sends nothing for as long as the timeout is a broken one."""
    line.near.put("key", [b"content"])
    line.proxy.fail("GET", Fault(bytes_per_second=0.2), times=1)
    assert line.far.read("key") == b"content"
    assert line.proxy.count("GET") == 2


def test_trickling_body_is_given_up(line: Line, monkeypatch: pytest.MonkeyPatch):
    """Bytes that come in time each, but never end, do not hold a reader for ever."""
    monkeypatch.setattr("cloud_adapters.storage.s3_read._BODY_SECONDS", -1.0)
    line.near.put("key", [b"content"])
    line.proxy.fail("GET", Fault(bytes_per_second=50), times=1000)
    with pytest.raises(StoreUnavailable, match="only 1 bytes came"):
        line.far.read("key")
    # A read that has all its bytes is done, however slowly they came.
    assert line.far.read("key", length=3) == b"con"


@pytest.mark.parametrize(
    "fault",
    [Fault(reset_up=200_000), LOST_REPLY, s3_error(500, "InternalError")],
    ids=["half a part", "lost reply", "500"],
)
def test_upload_goes_on_after_a_fault(line: Line, fault: Fault):
    """Only the part that failed is sent again."""
    line.proxy.fail("partNumber=2", fault, times=2)
    line.far.put("key", big())
    assert line.near.read("key") == BIG
    parts = [line.proxy.count(f"partNumber={number}") for number in (1, 2)]
    assert parts == [1, 3]


@pytest.mark.parametrize("pattern", [r"\?uploads", "partNumber=2", r"POST .*uploadId"])
def test_failed_upload_leaves_nothing(line: Line, pattern: str):
    """Neither an object nor parts that would be paid for."""
    line.near.put("key", [b"before"])
    line.proxy.fail(pattern, s3_error(500, "InternalError"), times=1000)
    with pytest.raises(StoreUnavailable, match=r"write s3://bucket.*tried 6 times"):
        line.far.put("key", big())
    assert line.near.read("key") == b"before"
    assert line.uploads() == []


def test_parts_that_cannot_be_removed_are_told(line: Line):
    """The error says that they cost storage, and what ends them."""
    line.proxy.fail("partNumber|DELETE", s3_error(500, "InternalError"), times=1000)
    with pytest.raises(StoreUnavailable) as caught:
        line.far.put("key", big())
    assert "AbortIncompleteMultipartUpload" in "".join(caught.value.__notes__)


SIZES = pytest.mark.parametrize("size", [100, len(BIG)], ids=["whole", "parts"])


@SIZES
def test_lost_reply_of_a_create_is_no_conflict_with_oneself(line: Line, size: int):
    """The object is there with our put-id: the write went well."""
    line.proxy.fail(r"PUT .*key$|POST .*uploadId", LOST_REPLY)
    info = line.far.put("key", iter([BIG[:size]]), if_absent=True)
    assert line.near.stat("key").version == info.version
    assert line.near.read("key") == BIG[:size]


@SIZES
def test_lost_reply_of_a_change_is_no_conflict_with_oneself(line: Line, size: int):
    """The same for a write that names a version."""
    before = line.near.put("key", [b"before"])
    line.proxy.fail(r"PUT .*key$|POST .*uploadId", LOST_REPLY)
    info = line.far.put("key", iter([BIG[:size]]), if_version=before.version)
    assert line.near.stat("key").version == info.version


@SIZES
def test_same_content_of_another_writer_is_a_conflict(line: Line, size: int):
    """If somebody else won while we tried again, it is they who won."""
    line.proxy.fail(r"PUT .*key$|POST .*uploadId", s3_error(500, "InternalError"))
    line.far._calls.retry.clock.sleep = lambda _: line.near.put("key", [BIG[:size]])  # type: ignore[method-assign]
    with pytest.raises(ObjectExists, match="'key' exists already"):
        line.far.put("key", iter([BIG[:size]]), if_absent=True)
    assert line.uploads() == []


def test_completed_upload_whose_reply_was_lost_may_be_forgotten(line: Line):
    """Services that say NoSuchUpload to a repeated completion are understood."""
    line.proxy.fail(r"POST .*uploadId", LOST_REPLY)
    line.proxy.fail(r"POST .*uploadId", s3_error(404, "NoSuchUpload"))
    line.far.put("key", big())
    assert line.near.read("key") == BIG


def test_upload_that_somebody_ended(line: Line):
    """A lifecycle rule of too few hours is named as what it may be."""
    line.proxy.fail("partNumber=2", s3_error(404, "NoSuchUpload"))
    with pytest.raises(StoreUnavailable, match="lifecycle rule"):
        line.far.put("key", big())


@pytest.mark.parametrize("pattern", ["partNumber=2", r"POST .*uploadId"])
def test_token_that_expires_during_an_upload(line: Line, pattern: str):
    """It is no use to try again; the message says what to renew."""
    line.proxy.fail(pattern, s3_error(400, "ExpiredToken"), times=1000)
    with pytest.raises(NotAuthenticated, match=r"expired.*ExpiredToken"):
        line.far.put("key", big())
    assert line.proxy.count(pattern) == 1
    assert line.uploads() == []


def test_wrong_region_is_named(line: Line):
    """Wherever the service says it: in the error, or in a header."""
    region = "<Region>eu-west-3</Region>"
    line.proxy.fail(
        "GET", s3_error(400, "AuthorizationHeaderMalformed", more=region), times=9
    )
    with pytest.raises(StoreError, match="the bucket is in eu-west-3"):
        line.far.read("key")
    line.proxy.clear()
    header = "x-amz-bucket-region: ap-south-1"
    line.proxy.fail("", s3_error(301, "PermanentRedirect", header), times=9)
    with pytest.raises(StoreError, match="the bucket is in ap-south-1"):
        line.far.put("key", [b""])


def test_failed_head_is_followed_by_a_question_with_words(line: Line):
    """HEAD has no body: what is wrong comes from a GET of one byte."""
    line.proxy.fail("HEAD", tcp_proxy.answer(400), times=9)
    line.proxy.fail("GET", s3_error(400, "ExpiredToken"), times=9)
    with pytest.raises(NotAuthenticated, match="ExpiredToken"):
        line.far.stat("key")


def test_forbidden_may_mean_absent(line: Line):
    """S3 says 403 to who may not list the bucket; the listing of the key decides."""
    line.near.put("key", [b"content"])
    line.proxy.fail(r"(GET|HEAD) .*/run/", s3_error(403, "AccessDenied"), times=1000)
    for verb in (line.far.read, line.far.stat):
        with pytest.raises(ObjectNotFound):
            verb("ke")
        with pytest.raises(StoreUnavailable, match=r"grant it.*AccessDenied"):
            verb("key")
