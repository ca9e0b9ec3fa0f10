"""Bodies of objects: resumed where they broke off, of one version, checked.

Own code on both clouds, since a download of boto3 or of google-cloud-storage keeps
nothing of a body that broke off (``test_read_goes_on_where_it_broke``), and waits for
ever for one that trickles in (``test_trickling_body_is_given_up``).
"""

import io
from collections.abc import Callable, Generator
from dataclasses import dataclass

from cloud_adapters.storage.checksums import Crc32c
from cloud_adapters.storage.error_table import CORRUPT
from cloud_adapters.storage.min_throughput import in_time
from federation.errors import ObjectChanged, StoreUnavailable
from federation.protocols import Clock

PIECE_BYTES = 1024 * 1024  # Taken from a socket at once.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A service's answer to a request for bytes of an object.

    Attributes:
        version: The version of the object; None if the service does not say it.
        size: Bytes of the whole object; None if the service does not say it.
        crc32c: Checksum of the whole object; None if the service does not say it.
        pieces: The requested bytes, to be read once.
    """

    version: str | None
    size: int | None
    crc32c: str | None
    pieces: Generator[bytes, None, None]


# Asks for the bytes from a place on, up to another or the end, of a version or of any;
# None if the object ends before.
Ask = Callable[[int, int | None, str | None], Answer | None]


class ResumedRead:
    """One read of an object or of a range, over as many requests as it takes.

    1. The first request may be for any version, unless the caller names one.
    2. Every further one begins where the last broke off, and only continues the
       same version; if the object has changed in between, the read starts again.
    3. A whole object is checked against its CRC32C where that is known.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        doing: str,
        start: int,
        length: int | None,
        version: str | None,
        clock: Clock,
    ) -> None:
        """Read nothing yet.

        Args:
            ask: Makes one request.
            doing: For messages: ``read s3://bucket/key``.
            start: The first byte.
            length: How many bytes; None for all up to the end.
            version: The version that the object must be of; None for any.
            clock: Tells how long a body takes.
        """
        self._ask = ask
        self._doing = doing
        self._start = start
        self._end = None if length is None else start + length
        self._wanted_version = version
        self._clock = clock
        self._begin_again()

    def _begin_again(self) -> None:
        # Grows in place; joining pieces would take the memory twice.
        self._content = io.BytesIO()
        self._sums = Crc32c()
        self._found: Answer | None = None

    def attempt(self) -> bytes:
        """Ask once for what has not arrived yet, and return the whole.

        Raises:
            ObjectChanged: The object is not of the caller's version.
            CorruptObject: It is whole, and does not have the service's checksum.
            StoreUnavailable: It came too slowly; see ``min_throughput``.
            StoreError: What ``ask`` raises. What has arrived is kept for the next
                attempt.
        """
        version = self._wanted_version
        if self._found is not None and version is None:
            version = self._found.version
            if version is None:  # What has arrived may be of another version.
                self._begin_again()
        begin = self._start + self._sums.size
        if self._end is None or begin < self._end:
            try:
                answer = self._ask(begin, self._end, version)
            except ObjectChanged as error:
                if self._wanted_version is not None or self._found is None:
                    raise
                # Overwritten since the first piece: begin again with what is there.
                self._begin_again()
                raise StoreUnavailable(
                    f"cannot {self._doing}: it keeps being overwritten ({error})",
                    temporary=True,
                ) from error
            if answer is not None:
                self._take(answer)
        return self._checked()

    def _take(self, answer: Answer) -> None:
        self._found = self._found or answer
        pieces = in_time(answer.pieces, doing=self._doing, clock=self._clock)
        for piece in pieces:
            self._content.write(piece)
            self._sums.update(piece)

    def _checked(self) -> bytes:
        content, found = self._content.getvalue(), self._found
        if found is None or self._start or found.size not in {None, len(content)}:
            return content
        if found.crc32c not in {None, self._sums.crc32c}:
            details = (
                f"CRC32C {self._sums.crc32c} instead of {found.crc32c}; if that does "
                "not change, write the object again"
            )
            self._begin_again()
            raise CORRUPT.told(self._doing, details)
        return content
