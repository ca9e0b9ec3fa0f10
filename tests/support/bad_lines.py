"""Stores in buckets behind a bad network, so that one suite can test all of them."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support import gcs_stores, s3_server, tcp_proxy
from support.buckets import quick_retry
from support.fake_gcs import KIB_256, FakeGcs
from support.tcp_proxy import Fault, FaultyProxy, s3_error

from cloud_adapters.storage.retry import Retry
from federation.clock import VirtualClock
from federation.protocols import ObjectStore

LOST_REPLY = Fault(reset_down=-1)
CORRUPT_ATTEMPTS = Retry().corrupt_attempts


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """First lines of a service's requests, as regular expressions.

    Attributes:
        write: Of ``key``: the one of a small object, and those that end a large one.
        part: Of an object that takes several.
        read: Of a content.
        stat: Of ``there``.
        listing: Of a page.
    """

    write: str
    part: str
    read: str
    stat: str
    listing: str


@dataclass(kw_only=True)
class Line:
    """A store behind a proxy, and the same store without it.

    Attributes:
        proxy: Lets requests fail.
        far: Behind it.
        near: The same bucket, without it.
        clock: Of ``far``: its waits take no time.
        at: Makes a store like ``far`` at another endpoint.
        patterns: Of the service's requests.
        throttled: How the service asks for patience; may have headers.
        down: How it says that it has a fault.
        bucket: The bucket's name.
        unfinished: Uploads that were begun, and neither completed nor removed.
        big: A content of several parts.
    """

    proxy: FaultyProxy
    far: ObjectStore
    near: ObjectStore
    clock: VirtualClock
    at: Callable[[str], ObjectStore]
    patterns: Patterns
    throttled: Callable[..., Fault]
    down: Fault
    bucket: str
    unfinished: Callable[[], Sequence[str]]
    big: bytes

    def pieces(self) -> Iterator[bytes]:
        """The large content as a stream of pieces that end anywhere."""
        step = len(self.big) // 3 - 7
        for start in range(0, len(self.big), step):
            yield self.big[start : start + step]

    def meanwhile(self, act: Callable[[], object]) -> None:
        """Do something each time that ``far`` waits to try again."""
        self.clock.sleep = lambda _: act()  # type: ignore[method-assign,assignment]


def google_error(status: int, reason: str, *headers: str) -> Fault:
    """An error as Google's services word it."""
    error = {"code": status, "message": "a fault", "errors": [{"reason": reason}]}
    body = json.dumps({"error": error}).encode()
    return tcp_proxy.answer(status, body, "Content-Type: application/json", *headers)


@functools.cache
def _s3_client(url: str) -> Any:
    """Making one takes long."""
    return s3_server.client(url, read_timeout=2)


@contextlib.contextmanager
def s3_line(server: s3_server.S3Server, proxy: FaultyProxy) -> Iterator[Line]:
    """A line to S3."""
    near, clock = server.store("run"), VirtualClock()
    bucket, retry = near._calls.bucket, quick_retry(clock=clock)

    def at(url: str) -> ObjectStore:
        client = _s3_client(url)
        return server.store("run", bucket=bucket, client=client, retry=retry)

    def unfinished() -> Sequence[str]:
        answer = near._calls.client.list_multipart_uploads(Bucket=bucket)
        return [upload["Key"] for upload in answer.get("Uploads", [])]

    yield Line(
        proxy=proxy,
        near=near,
        far=at(proxy.url),
        clock=clock,
        at=at,
        patterns=Patterns(
            write=r"PUT .*/key$|POST .*uploadId",
            part="partNumber=2",
            read="GET .*/key",
            stat="HEAD .*/there",
            listing="GET .*list-type",
        ),
        throttled=lambda *headers: s3_error(503, "SlowDown", *headers),
        down=s3_error(500, "InternalError"),
        bucket=bucket,
        unfinished=unfinished,
        big=BIG,
    )


@contextlib.contextmanager
def gcs_line(server: FakeGcs, proxy: FaultyProxy) -> Iterator[Line]:
    """A line to Cloud Storage."""
    server.uploads.clear()
    bucket, clock = gcs_stores.new_bucket(server), VirtualClock()
    retry = quick_retry(clock=clock)

    def at(url: str) -> ObjectStore:
        return gcs_stores.store(server, "run", bucket=bucket, endpoint=url, retry=retry)

    line = Line(
        proxy=proxy,
        near=gcs_stores.store(server, "run", bucket=bucket),
        far=at(proxy.url),
        clock=clock,
        at=at,
        patterns=Patterns(
            write="PUT|uploadType=multipart",
            part="PUT",
            read="GET .*alt=media",
            stat="GET .*/run%2Fthere",
            listing="GET .*/o[?]",
        ),
        throttled=lambda *headers: google_error(429, "rateLimitExceeded", *headers),
        down=google_error(503, "backendError"),
        bucket=bucket,
        unfinished=lambda: [
            name for name, upload in server.uploads.items() if upload.answer is None
        ],
        big=BIG[: 5 * KIB_256 + 12_345],  # Six chunks.
    )
    yield line
    line.near.close()
    line.far.close()


BIG = os.urandom(9 * 1024 * 1024)  # Two parts of S3.
