"""Uploads to Google Cloud Storage.

What fits in one chunk goes in one request. What does not goes through an upload
session: the service keeps what has arrived, says how much that is, and gives the
object its name when all is there, so that a broken connection costs a part of a
chunk. One chunk is in memory.

Source: https://cloud.google.com/storage/docs/resumable-uploads.
"""

import base64
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import requests

from cloud_adapters.storage.checksums import Checksums, Crc32c
from cloud_adapters.storage.gcs.http import Ask, GcsHttp, json_of
from cloud_adapters.storage.gcs.lookup import Resource
from cloud_adapters.storage.retry import Retry
from federation.errors import CorruptObject, StoreError, StoreUnavailable
from federation.protocols import Buffer

BLOCK_BYTES = 256 * 1024  # Chunks are multiples of this, but for the last.
# Each waits for an answer, so few and large ones: benchmarks/storage_cloud.py.
CHUNK_BYTES = 32 * 1024 * 1024

PUT_ID = "crossfed-put-id"
SHA256 = "crossfed-sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """An object to create.

    Attributes:
        bucket: Where.
        name: The whole of it.
        metadata: As the caller gave it.
        put_id: Random: tells this write from every other.
        kms_key: Customer-managed key to encrypt it with; None for the bucket's.
        doing: For messages.
    """

    bucket: str
    name: str
    metadata: Mapping[str, str]
    put_id: str
    kms_key: str | None
    doing: str

    def resource(self, sums: Checksums | None) -> Resource:
        """The resource to send; the service checks the checksum."""
        metadata = {**self.metadata, PUT_ID: self.put_id}
        resource = {"name": self.name, "metadata": metadata}
        if sums is None:
            return resource
        metadata[SHA256] = sums.sha256
        return {**resource, "crc32c": encoded(sums.crc32c)}

    def params(self, kind: str, generation: str | None) -> Mapping[str, str]:
        """The query of the request that creates it, with its condition."""
        params = {"uploadType": kind}
        if generation is not None:
            params["ifGenerationMatch"] = generation
        if self.kms_key is not None:
            params["kmsKeyName"] = self.kms_key
        return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a content.

    Attributes:
        begin: Where in the content it is.
        content: The bytes, until the next chunk is made.
        is_last: Whether the content ends with it.
    """

    begin: int
    content: memoryview
    is_last: bool

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.begin + len(self.content)

    @property
    def total(self) -> str:
        """The content's size, in the form of Content-Range."""
        return str(self.end) if self.is_last else "*"


def chunks(data: Iterable[Buffer], size: int) -> Iterator[Piece]:
    """Cut a content into chunks of ``size`` bytes; the last may have fewer.

    A chunk is good until the next one is asked for: they share one buffer.
    """
    held = _buffer(min(size, BLOCK_BYTES))  # Most contents are small.
    begin = num_held = 0
    for piece in data:
        view = memoryview(piece)
        rest = view.cast("B") if view.nbytes else memoryview(b"")
        while rest.nbytes:
            # Only now it is known that the full chunk is not the last.
            if num_held == size:
                yield Piece(begin=begin, content=held, is_last=False)
                begin, num_held = begin + size, 0
            elif num_held == held.nbytes:
                larger = _buffer(size)
                larger[:num_held] = held
                held = larger
            taken = rest[: held.nbytes - num_held]
            held[num_held : num_held + taken.nbytes] = taken
            num_held += taken.nbytes
            rest = rest[taken.nbytes :]
    yield Piece(begin=begin, content=held[:num_held], is_last=True)


def _buffer(size: int) -> memoryview:
    """Unlike bytearray(size), this touches no memory before it is filled."""
    return np.empty(size, np.uint8).data


def insert(
    http: GcsHttp,
    new: NewObject,
    content: Buffer,
    sums: Checksums,
    generation: str | None,
) -> Resource:
    """Write an object in one request, once.

    Args:
        http: The way to the service.
        new: The object.
        content: All of it.
        sums: Checksums of the content; the service compares.
        generation: That the object must have now; ``0`` for none, None for any.

    Raises:
        ObjectChanged: It has another.
        StoreError: See ``gcs_errors``.
    """
    boundary = secrets.token_hex(16)
    head = (
        f"--{boundary}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps(new.resource(sums))}\r\n"
        f"--{boundary}\r\ncontent-type: application/octet-stream\r\n\r\n"
    )
    ask = Ask(
        doing=new.doing,
        method="POST",
        url=f"/upload/storage/v1/b/{new.bucket}/o",
        params=new.params("multipart", generation),
        headers={"content-type": f"multipart/related; boundary={boundary}"},
        body=b"".join((head.encode(), content, f"\r\n--{boundary}--".encode())),
    )
    return json_of(http.send(ask), new.doing)


class UploadSession:
    """The upload of one object, chunk by chunk.

    Attributes:
        sums: Checksums of what has been sent.
        is_all_sent: Whether the last chunk is on its way, or has arrived.
    """

    def __init__(
        self, http: GcsHttp, retry: Retry, new: NewObject, known: Checksums | None
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            http: The way to the service.
            retry: How often to try each request.
            new: The object.
            known: Of the whole content, where it was read before; otherwise None.
        """
        self._http = http
        self._retry = retry
        self._new = new
        self._known = known
        self._url = ""
        self.sums = Crc32c()
        self.is_all_sent = False

    def upload(self, parts: Iterable[Piece], generation: str | None) -> Resource:
        """Send a content; after an error, the service drops what it received.

        Args:
            parts: The content.
            generation: That the object must have now; ``0`` for none, None for any.

        Raises:
            ObjectChanged: It has another.
            CorruptObject: Other bytes arrived than were sent.
            StoreError: See ``gcs_errors``.
        """
        self._open(generation)
        resource: Resource | None = None
        try:
            for chunk in parts:
                self.sums.update(chunk.content)
                self.is_all_sent = chunk.is_last
                # A service that ends early has made an object of another checksum.
                if resource is None:
                    resource = self._send(chunk)
        except BaseException:
            self._cancel()
            raise
        if resource is None:
            raise AssertionError("the last chunk makes the object")
        return resource

    def _open(self, generation: str | None) -> None:
        # An abandoned session leaves no object: repeating is safe.
        ask = Ask(
            doing=self._new.doing,
            method="POST",
            url=f"/upload/storage/v1/b/{self._new.bucket}/o",
            params=self._new.params("resumable", generation),
            headers={"x-upload-content-type": "application/octet-stream"},
            json=self._new.resource(self._known),
        )
        response = self._retry.call(lambda _: self._http.send(ask))
        self._url = response.headers.get("Location", "")
        if not self._url:
            raise StoreUnavailable(
                f"cannot {self._new.doing}: the endpoint started no upload session; it "
                "must provide Cloud Storage's JSON API"
            )

    def _send(self, chunk: Piece) -> Resource | None:
        """Send a chunk, and return the object if it was the last."""
        headers = {}
        if chunk.is_last:
            headers["x-goog-hash"] = f"crc32c={encoded(self.sums.crc32c)}"
        try:
            return self._retry.call(lambda n: self._attempt(chunk, headers, n))
        except CorruptObject as error:
            # A chunk before this one may be at fault: sending it again is no use.
            raise CorruptObject(str(error)) from error.__cause__

    def _attempt(
        self, chunk: Piece, headers: Mapping[str, str], attempt: int
    ) -> Resource | None:
        offset = chunk.begin
        if attempt > 1:  # An earlier one may have arrived, in part or whole.
            answer = self._put(b"", f"bytes */{chunk.total}", headers)
            if answer.status_code != _GO_ON:
                return json_of(answer, self._new.doing)
            offset = self._arrived(answer, chunk)
        while offset < chunk.end or chunk.is_last:
            rest = chunk.content[offset - chunk.begin :]
            span = f"{offset}-{chunk.end - 1}" if rest.nbytes else "*"
            answer = self._put(rest, f"bytes {span}/{chunk.total}", headers)
            if answer.status_code != _GO_ON:
                return json_of(answer, self._new.doing)
            arrived = self._arrived(answer, chunk)
            if arrived <= offset:
                raise self._stuck("took nothing of a chunk", temporary=True)
            offset = arrived
        return None

    def _put(
        self, content: Buffer, content_range: str, headers: Mapping[str, str]
    ) -> requests.Response:
        ask = Ask(
            doing=self._new.doing,
            method="PUT",
            url=self._url,
            headers={**headers, "content-range": content_range},
            body=content,
            ok=_TAKEN,
            is_session=True,
        )
        return self._http.send(ask)

    def _arrived(self, answer: requests.Response, chunk: Piece) -> int:
        """Read how many bytes of the content the service has."""
        found = re.fullmatch(r"bytes=0-(\d+)", answer.headers.get("Range", ""))
        arrived = int(found[1]) + 1 if found else 0
        if not chunk.begin <= arrived <= chunk.end:
            raise self._stuck(f"has {arrived} bytes where {chunk.begin} were taken")
        return arrived

    def _stuck(self, what: str, *, temporary: bool = False) -> StoreUnavailable:
        return StoreUnavailable(
            f"cannot {self._new.doing}: the service {what}; put the object again",
            temporary=temporary,
        )

    def _cancel(self) -> None:
        ask = Ask(
            doing=f"cancel: {self._new.doing}",
            method="DELETE",
            url=self._url,
            ok=range(600),
            is_session=True,
        )
        # One attempt, which may not hang for long: the caller waits for its error.
        once = replace(self._retry, deadline_seconds=0.0)
        try:
            once.call(lambda _: self._http.send(ask))
        except StoreError:
            return  # It ends by itself after a week, and nothing shows it.


_GO_ON = 308
_TAKEN = frozenset({200, 201, _GO_ON})


def encoded(crc32c: str) -> str:
    """Write a checksum in the service's form: base64 of 4 bytes."""
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


def decoded(crc32c: str) -> str:
    """Write a checksum of the service as 8 hexadecimal digits."""
    return base64.b64decode(crc32c).hex()
