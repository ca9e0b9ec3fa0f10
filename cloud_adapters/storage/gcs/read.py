"""Downloads from Google Cloud Storage."""

import io
import re
from dataclasses import dataclass

import requests

from cloud_adapters.storage.checksums import Crc32c
from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.gcs.http import Ask, GcsHttp, pieces
from cloud_adapters.storage.gcs.upload import decoded
from cloud_adapters.storage.pace import in_time
from federation.errors import ObjectChanged, StoreUnavailable
from federation.protocols import Clock

_OK = frozenset({200, 206, 416})
_BEYOND = 416  # The range begins behind the object's end.


@dataclass(eq=False)
class ObjectRead:
    """One read, which continues where a broken connection stopped.

    It is of one generation of the object: the caller's, or the first that answers.

    Attributes:
        http: The way to the service.
        path: Path of the object, below the endpoint.
        doing: For messages.
        version: The generation that it must be of, or None.
        clock: Tells how long a body takes.
    """

    http: GcsHttp
    path: str
    doing: str
    version: str | None
    clock: Clock

    def __post_init__(self) -> None:
        """Start empty."""
        self._generation = self.version
        self._forget()

    def attempt(self, start: int, length: int | None) -> bytes:
        """Ask for what has not arrived yet, once, and return the whole.

        Raises:
            ObjectChanged: The object is not of the caller's generation.
            CorruptObject: It is whole, and has not the service's checksum.
            StoreUnavailable: It came too slowly; see ``pace``.
            StoreError: See ``gcs_errors``. What has arrived is kept for the next
                attempt.
        """
        if self._generation is None:
            self._forget()  # What has arrived may be of another generation.
        try:
            response = self.http.send(self._ask(start, length))
        except ObjectChanged as error:
            if self.version is not None:
                raise
            # Overwritten since the first piece: begin again with what is there now.
            self._forget()
            self._generation = None
            raise StoreUnavailable(str(error), temporary=True) from error
        self._generation = response.headers.get("X-Goog-Generation", self._generation)
        if response.status_code != _BEYOND:
            body = pieces(response, self.doing)
            for piece in in_time(body, doing=self.doing, clock=self.clock):
                self._content.write(piece)
                self._sums.update(piece)
        response.close()
        return self._checked(response, start)

    def _ask(self, start: int, length: int | None) -> Ask:
        # "gzip": the service sends what is stored, whatever its encoding.
        headers = {"accept-encoding": "gzip"}
        begin = start + self._sums.size
        if begin or length is not None:
            end = "" if length is None else str(start + length - 1)
            headers["range"] = f"bytes={begin}-{end}"
        params = {"alt": "media"}
        if self._generation is not None:
            params["ifGenerationMatch"] = self._generation
        return Ask(
            doing=self.doing,
            method="GET",
            url=self.path,
            params=params,
            headers=headers,
            ok=_OK,
            is_stream=True,
        )

    def _checked(self, response: requests.Response, start: int) -> bytes:
        content = self._content.getvalue()
        # "bytes 3-7/10", or all there is.
        size = response.headers.get("Content-Range", f"/{len(content)}").split("/")[-1]
        found = re.search(r"crc32c=([^,]+)", response.headers.get("X-Goog-Hash", ""))
        if start == 0 and found is not None and size == str(len(content)):
            expected, actual = decoded(found[1]), self._sums.crc32c
            if actual != expected:
                self._forget()
                details = f"CRC32C {actual} instead of {expected}"
                raise gcs_errors.corrupt(self.doing, details)
        return content

    def _forget(self) -> None:
        # Grows in place; joining pieces would take the memory twice.
        self._content = io.BytesIO()
        self._sums = Crc32c()
