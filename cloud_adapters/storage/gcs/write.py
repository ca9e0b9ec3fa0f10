"""Writes to Google Cloud Storage that may be repeated.

An answer can be lost after the write was carried out. So no attempt but the first
goes out without a condition on the generation that it replaces, and where a condition
fails, the put-id in the object's metadata tells whether it was ours that came first.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cloud_adapters.storage.gcs.http import GcsHttp
from cloud_adapters.storage.gcs.lookup import (
    Resource,
    lookup,
)
from cloud_adapters.storage.gcs.upload import (
    PUT_ID,
    NewObject,
    Piece,
    UploadSession,
)
from cloud_adapters.storage.retry import Retry
from federation.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)

ABSENT = "0"  # The generation of what is not there.


def find(http: GcsHttp, new: NewObject) -> Resource | None:
    """Return what is under a new object's name, or None; one attempt."""
    try:
        return lookup(http, new.bucket, new.name, doing=new.doing)
    except ObjectNotFound:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectWrite:
    """One write.

    Attributes:
        http: The way to the service.
        retry: How often to try.
        new: The object.
        generation: That the object must have before; ``ABSENT``, or None for any.
    """

    http: GcsHttp
    retry: Retry
    new: NewObject
    generation: str | None

    def repeated(self, send: Callable[[str | None], Resource]) -> Resource:
        """Write, with another attempt where the last may not have arrived.

        Args:
            send: Makes one attempt, given the generation to replace.

        Raises:
            ObjectExists: Another object has the name, and none should.
            ObjectChanged: The object has not the generation that was named.
            StoreError: What ``send`` raised last.
        """
        return self.retry.call(lambda attempt: self._attempt(send, attempt))

    def through(self, session: UploadSession, parts: Iterable[Piece]) -> Resource:
        """Write by a session, which tries again by itself; errors as above."""
        try:
            return session.upload(parts, self.generation)
        except ObjectChanged as error:
            ours = self._ours_at_last()
            if ours is None:
                raise self._refusal(error) from error.__cause__
            return ours
        except StoreUnavailable:
            # The answer to the last chunk may be lost, and the session gone with it.
            ours = self._ours_at_last() if session.is_all_sent else None
            if ours is None:
                raise
            return ours

    def _attempt(self, send: Callable[[str | None], Resource], number: int) -> Resource:
        generation = self.generation
        if generation is None and number > 1:
            there = find(self.http, self.new)
            if there is not None and self._is_ours(there):
                return there
            generation = ABSENT if there is None else str(there["generation"])
        try:
            return send(generation)
        except ObjectChanged as error:
            ours = self._ours()
            if ours is None:
                raise self._refusal(error) from error.__cause__
            return ours

    def _refusal(self, error: ObjectChanged) -> StoreError:
        if self.generation is None:  # Someone wrote between our two requests.
            return StoreUnavailable(str(error), temporary=True)
        if self.generation == ABSENT:
            return ObjectExists(f"cannot {self.new.doing}: an object has this key")
        return error

    def _ours_at_last(self) -> Resource | None:
        """Return what ``_ours`` does, with further attempts."""
        return self.retry.call(lambda _: self._ours())

    def _ours(self) -> Resource | None:
        """Return the object under the name if this write made it.

        Raises:
            StoreError: It cannot be known now; taking that for a "no" would
                report a conflict with itself.
        """
        try:
            there = find(self.http, self.new)
        except StoreError as error:
            if error.temporary:
                raise
            return None  # Who may write and not read keeps the first answer.
        return there if there is not None and self._is_ours(there) else None

    def _is_ours(self, there: Resource) -> bool:
        metadata: Mapping[str, str] = there.get("metadata", {})
        return metadata.get(PUT_ID) == self.new.put_id
