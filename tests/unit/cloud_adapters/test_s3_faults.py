"""What only S3 does over a bad network; see also tests/contract."""

from collections.abc import Callable

import pytest
from support import tcp_proxy
from support.bad_lines import LOST_REPLY, Line
from support.tcp_proxy import Fault, s3_error

from federation.errors import (
    CorruptObject,
    NotAuthenticated,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)

pytestmark = pytest.mark.slow


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
def test_what_passes_is_tried_again(s3_line: Line, fault: Fault):
    """Reads and deletions get over two failures in a row, with three requests."""
    s3_line.near.put("key", [b"content"])
    verbs = {
        "GET .*/key": lambda: s3_line.far.read("key"),
        "DELETE .*/key": lambda: s3_line.far.delete("key"),
    }
    for pattern, verb in verbs.items():
        s3_line.proxy.fail(pattern, fault, times=2)
        verb()
        assert s3_line.proxy.count(pattern) == 3


def test_wrong_bytes_of_a_part(s3_line: Line):
    """The service refuses it; while it stays wrong, no object is there."""
    s3_line.proxy.fail("partNumber=2", Fault(flip_up=500))
    s3_line.far.put("once", s3_line.pieces())
    assert s3_line.near.read("once") == s3_line.big
    s3_line.proxy.fail("partNumber=2", Fault(flip_up=500), times=1000)
    with pytest.raises(CorruptObject, match=r"write s3://.*tried 6 times"):
        s3_line.far.put("always", s3_line.pieces())
    with pytest.raises(ObjectNotFound):
        s3_line.near.stat("always")
    assert s3_line.unfinished() == []


def test_slow_answer_is_given_up(s3_line: Line):
    """A server that sends nothing for as long as the timeout is a broken one."""
    s3_line.near.put("key", [b"content"])
    s3_line.proxy.fail("GET", Fault(bytes_per_second=0.2), times=1)
    assert s3_line.far.read("key") == b"content"
    assert s3_line.proxy.count("GET") == 2


@pytest.mark.parametrize(
    "fault",
    [Fault(reset_up=200_000), LOST_REPLY, s3_error(500, "InternalError")],
    ids=["half a part", "lost reply", "500"],
)
def test_upload_goes_on_after_a_fault(s3_line: Line, fault: Fault):
    """Only the part that failed is sent again."""
    s3_line.proxy.fail("partNumber=2", fault, times=2)
    s3_line.far.put("key", s3_line.pieces())
    assert s3_line.near.read("key") == s3_line.big
    parts = [s3_line.proxy.count(f"partNumber={number}") for number in (1, 2)]
    assert parts == [1, 3]


@pytest.mark.parametrize("pattern", [r"\?uploads", "partNumber=2", r"POST .*uploadId"])
def test_failed_upload_leaves_nothing(s3_line: Line, pattern: str):
    """Neither an object nor parts that would be paid for."""
    s3_line.near.put("key", [b"before"])
    s3_line.proxy.fail(pattern, s3_error(500, "InternalError"), times=1000)
    with pytest.raises(
        StoreUnavailable, match=r"write s3://bucket.*tried \d+ times in 120 s"
    ):
        s3_line.far.put("key", s3_line.pieces())
    assert s3_line.near.read("key") == b"before"
    assert s3_line.unfinished() == []


def test_parts_that_cannot_be_removed_are_told(s3_line: Line):
    """The error says that they cost storage, and what ends them."""
    s3_line.proxy.fail("partNumber|DELETE", s3_error(500, "InternalError"), times=1000)
    with pytest.raises(StoreUnavailable) as caught:
        s3_line.far.put("key", s3_line.pieces())
    assert "AbortIncompleteMultipartUpload" in "".join(caught.value.__notes__)


def test_completed_upload_whose_reply_was_lost_may_be_forgotten(s3_line: Line):
    """Services that say NoSuchUpload to a repeated completion are understood."""
    s3_line.proxy.fail(r"POST .*uploadId", LOST_REPLY)
    s3_line.proxy.fail(r"POST .*uploadId", s3_error(404, "NoSuchUpload"))
    s3_line.far.put("key", s3_line.pieces())
    assert s3_line.near.read("key") == s3_line.big


def test_upload_that_somebody_ended(s3_line: Line):
    """A lifecycle rule of too few hours is named as what it may be."""
    s3_line.proxy.fail("partNumber=2", s3_error(404, "NoSuchUpload"))
    with pytest.raises(StoreUnavailable, match="lifecycle rule"):
        s3_line.far.put("key", s3_line.pieces())


@pytest.mark.parametrize("pattern", ["partNumber=2", r"POST .*uploadId"])
def test_token_that_expires_during_an_upload(s3_line: Line, pattern: str):
    """It is no use to try again; the message says what to renew."""
    s3_line.proxy.fail(pattern, s3_error(400, "ExpiredToken"), times=1000)
    with pytest.raises(NotAuthenticated, match=r"expired.*ExpiredToken"):
        s3_line.far.put("key", s3_line.pieces())
    assert s3_line.proxy.count(pattern) == 1
    assert s3_line.unfinished() == []


def test_wrong_region_is_named(s3_line: Line):
    """Wherever the service says it: in the error, or in a header."""
    region = "<Region>eu-west-3</Region>"
    s3_line.proxy.fail(
        "GET", s3_error(400, "AuthorizationHeaderMalformed", more=region), times=9
    )
    with pytest.raises(StoreError, match="the bucket is in eu-west-3"):
        s3_line.far.read("key")
    s3_line.proxy.clear()
    header = "x-amz-bucket-region: ap-south-1"
    s3_line.proxy.fail("", s3_error(301, "PermanentRedirect", header), times=9)
    with pytest.raises(StoreError, match="the bucket is in ap-south-1"):
        s3_line.far.put("key", [b""])


def test_failed_head_is_followed_by_a_question_with_words(s3_line: Line):
    """HEAD has no body: what is wrong comes from a GET of one byte."""
    s3_line.proxy.fail("HEAD", tcp_proxy.answer(400), times=9)
    s3_line.proxy.fail("GET", s3_error(400, "ExpiredToken"), times=9)
    with pytest.raises(NotAuthenticated, match="ExpiredToken"):
        s3_line.far.stat("key")


def test_forbidden_may_mean_absent(s3_line: Line):
    """S3 says 403 to who may not list the bucket; the listing of the key decides."""
    s3_line.near.put("key", [b"content"])
    s3_line.proxy.fail(r"(GET|HEAD) .*/run/", s3_error(403, "AccessDenied"), times=1000)
    for verb in (s3_line.far.read, s3_line.far.stat):
        with pytest.raises(ObjectNotFound):
            verb("ke")
        with pytest.raises(StoreUnavailable, match=r"grant it.*AccessDenied"):
            verb("key")


HEAD = "HTTP/1.1 200 OK\r\n"
LISTED = (
    "<ListBucketResult><IsTruncated>false</IsTruncated>"
    "<Contents><Key>run/key</Key>{}</Contents></ListBucketResult>"
)
TRUNCATED = "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"


def said(headers: str, body: str = "") -> Fault:
    """An answer with these headers and no others."""
    return Fault(answer=f"{HEAD}{headers}Connection: close\r\n\r\n{body}".encode())


SHORT: dict[str, tuple[str, Fault, str]] = {
    "no size": ("HEAD", said('ETag: "a"\r\n'), "no ContentLength"),
    "no ETag": ("HEAD", said("Content-Length: 7\r\n"), "no ETag"),
    "an empty ETag": ("HEAD", said("Content-Length: 7\r\nETag: \r\n"), "no ETag"),
    "quotes alone": ("HEAD", said('Content-Length: 7\r\nETag: ""\r\n'), "no ETag"),
    "read without size": ("GET", said('ETag: "a"\r\n', "content"), "no ContentLength"),
    "read without ETag": ("GET", said("Content-Length: 1\r\n", "c"), "no ETag"),
    "written without ETag": ("PUT", said("Content-Length: 0\r\n"), "no ETag"),
    "listed without size": (
        "LIST",
        said("", LISTED.format("<ETag>a</ETag>")),
        "no Size",
    ),
    "listed without ETag": (
        "LIST",
        said("", LISTED.format("<Size>7</Size>")),
        "no ETag",
    ),
    "cut without a token": ("LIST", said("", TRUNCATED), "no NextContinuationToken"),
}


@pytest.mark.parametrize(("verb", "answer", "text"), SHORT.values(), ids=SHORT)
def test_answer_that_leaves_out_what_is_needed(
    s3_line: Line, verb: str, answer: Fault, text: str
):
    """Is an endpoint that does not answer as S3 does: no KeyError, no version ""."""
    s3_line.proxy.fail("", answer, times=1000)
    verbs: dict[str, Callable[[], object]] = {
        "HEAD": lambda: s3_line.far.stat("key"),
        "GET": lambda: s3_line.far.read("key"),
        "PUT": lambda: s3_line.far.put("key", [b"content"]),
        "LIST": lambda: list(s3_line.far.list()),
    }
    with pytest.raises(StoreUnavailable, match=f"{text} in its answer"):
        verbs[verb]()
