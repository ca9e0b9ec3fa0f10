"""Bodies of objects in S3: bounded in time, resumed where they broke off, checked."""

import io
from collections.abc import Generator
from typing import Any

from cloud_adapters.storage.checksums import Crc32c
from cloud_adapters.storage.pace import in_time
from cloud_adapters.storage.s3 import errors as s3_errors
from cloud_adapters.storage.s3.calls import Answer, S3Calls, if_match, info_of
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    StoreForbidden,
    StoreUnavailable,
)
from federation.protocols import ObjectInfo

_PIECE_BYTES = 1024 * 1024


class Read:
    """One read of an object or of a range, over as many requests as it takes.

    1. The first request may be for any version, unless one was named.
    2. Every further one begins where the last broke off, and only continues the
       same version; if the object has changed in between, it starts again.
    3. A whole object is checked against its CRC32C where that is known.
    """

    def __init__(
        self, calls: S3Calls, key: str, *, start: int, length: int | None
    ) -> None:
        """Read bytes ``[start, start + length)``, to the end by default."""
        self._calls = calls
        self._key = key
        self._start = start
        self._length = length
        self._doing = f"read {calls.where(key)}"
        self._num_mismatches = 0
        self._begin_again()

    def _begin_again(self) -> None:
        # Grows in place; joining pieces would take the memory twice.
        self._content = io.BytesIO()
        self._sums = Crc32c()
        self._info: ObjectInfo | None = None

    def attempt(self, if_version: str | None) -> bytes:
        """Go on with the read; called by ``Retry`` until it returns.

        Raises:
            StoreError: It broke off, or cannot be done.
        """
        version = if_version
        if self._info is not None:
            if not self._num_missing(self._info):
                return self._checked()
            version = self._info.version
        try:
            answer = self._request(version)
        except ObjectChanged as error:
            if if_version is not None or self._info is None:
                raise
            self._begin_again()
            raise StoreUnavailable(
                f"cannot {self._doing}: it keeps being overwritten",
                temporary=True,
            ) from error
        except StoreForbidden as error:
            self._calls.check_absent(self._key, error)
            raise
        if answer is not None:
            self._take(answer)
        return self._checked()

    def _request(self, version: str | None) -> Answer | None:
        """Ask for what is missing; None if that is behind the object's end."""
        wanted = self._range()
        try:
            answer = self._calls.once(
                "get_object",
                self._doing,
                Key=self._calls.prefix + self._key,
                ChecksumMode="ENABLED",
                **wanted,
                **if_match(version),
            )
        except StoreUnavailable as error:
            if _is_behind_end(error):
                return None
            raise
        if wanted and "ContentRange" not in answer:
            answer["Body"].close()
            raise StoreUnavailable(
                f"cannot {self._doing}: the endpoint does not support ranges"
            )
        return answer

    def _num_missing(self, info: ObjectInfo) -> int:
        wanted = info.size - self._start
        if self._length is not None:
            wanted = min(wanted, self._length)
        return max(0, wanted) - self._sums.size

    def _range(self) -> Answer:
        first = self._start + self._sums.size
        if self._length is not None:
            last = self._start + self._length - 1
            return {"Range": f"bytes={first}-{last}"}
        return {"Range": f"bytes={first}-"} if first else {}

    def _take(self, answer: Answer) -> None:
        if self._info is None:
            self._info = info_of(self._key, answer)
        missing = int(answer["ContentLength"])
        pieces = _pieces(self._calls, self._doing, answer["Body"])
        clock = self._calls.retry.clock
        for piece in in_time(pieces, doing=self._doing, clock=clock):
            self._content.write(piece)
            self._sums.update(piece)
            missing -= len(piece)
        if missing:
            raise StoreUnavailable(
                f"cannot {self._doing}: the connection broke with {missing} bytes "
                "missing; check network and proxy",
                temporary=True,
            )

    def _checked(self) -> bytes:
        content = self._content.getvalue()
        info = self._info
        is_whole = info is not None and self._start == 0 and len(content) == info.size
        if info is None or not is_whole or info.crc32c is None:
            return content
        if self._sums.crc32c != info.crc32c:
            self._begin_again()
            self._num_mismatches += 1
            raise CorruptObject(
                f"cannot {self._doing}: its {len(content)} bytes do not have the "
                f"CRC32C {info.crc32c} that they were written with; write the object "
                "again",
                # Once it may have been the way; twice it is what is stored.
                temporary=self._num_mismatches == 1,
            )
        return content


def _pieces(calls: S3Calls, doing: str, body: Any) -> Generator[bytes, None, None]:
    """The pieces of a body as they come."""
    # read() of the public stream waits for all that it is asked for, and no timeout
    # ends that; read1() gives what is there.
    read = getattr(body._raw_stream, "read1", body.read)  # noqa: SLF001
    try:
        while piece := calls.understand(doing, lambda: read(_PIECE_BYTES)):
            yield piece
    finally:
        body.close()


def _is_behind_end(error: StoreUnavailable) -> bool:
    return s3_errors.code_of(error.__cause__) in {"InvalidRange", "416"}
