"""Messages whose large vectors travel through an object store, and not with them.

A message up to a threshold goes as one frame of ``federation.wire.frame``. Of a larger
one the vectors become objects in a store that both sides reach, and the frame holds the
rest, with empty vectors; beside it goes a ``Reference`` to each. Keys::

    model/RUN/ROUND/NAME          the aggregator's: one copy for all sites
    sites/SITE/RUN/ROUND/NAME     a site's

A reference is hostile input. It has no key, only a name of 32 hexadecimal digits: run,
round and site are those of the frame, so nothing else can be asked for. Its size is
checked against the model's before a byte is fetched, its digest before a value is used.
A vector that arrives is a read-only view into a file of a scratch folder that has lost
its name already: memory holds a few parts while it is fetched, and the disk's space is
free again when the vector is.

Not here: how frames and references travel (``flower_site``), which store
(``deploy.wiring.exchange``).
"""

import contextlib
import hashlib
import logging
import math
import mmap
import secrets
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cloud_adapters.storage.disk.files import write_all
from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.storage.disk.transfer import stream
from cloud_adapters.storage.retry import Retry
from cloud_adapters.transport.frame_references import (
    PackedFrame,
    Reference,
    Sizes,
    check,
    folder_of,
    inline,
    vectors_of,
)
from federation.errors import (
    CorruptObject,
    JobError,
    ObjectExists,
    ProtocolError,
    StoreError,
)
from federation.ids import RunId, SiteId
from federation.mapped import give_back
from federation.protocols import ObjectInfo, ObjectStore
from federation.wire import frame as wire
from federation.wire.frame import WireMessage

THRESHOLD_BYTES = 64 << 20
# Smaller vectors stay in the frame of a large message.
LEAST_BYTES = 1 << 20
# Parts of an object that are fetched at the same time, and held in memory. Larger ones
# would be given back to the system after each, which takes as long as decrypting them.
AHEAD, PART_BYTES = 8, 4 << 20
PIECE_BYTES = 4 << 20  # Of a vector on its way into the store.
# Outages of minutes are waited out; a round's own deadline still holds.
RETRY = Retry(attempts=8, base_seconds=2.0, cap_seconds=30.0, deadline_seconds=180.0)

_LOG = logging.getLogger(__name__)

_NAME_BYTES = 16
_Message = TypeVar("_Message", bound=WireMessage)


@dataclass(kw_only=True, eq=False)
class Frames:
    """Sends and receives messages, large ones through a store.

    Attributes:
        threshold_bytes: A larger frame goes through the store.

    Attributes:
        store: Where large vectors go; None for nowhere.
        scratch: Folder only for this object, on a disk with room for the vectors
            that are in use at the same time; needed with a store.
        threshold_bytes: See above.
        retry: Attempts beyond the store's own.

    Raises:
        ValueError: There is a store and no scratch folder.
    """

    store: ObjectStore | None = None
    scratch: Path | None = None
    threshold_bytes: int = THRESHOLD_BYTES
    retry: Retry = RETRY

    def __post_init__(self) -> None:
        """Open nothing yet."""
        if self.store is not None and self.scratch is None:
            raise ValueError("a store needs a scratch folder")
        self._shared = _WrittenVectors()
        self._is_used = False

    def send(self, message: WireMessage) -> PackedFrame:
        """Pack a message; write what is large to the store.

        The vectors of a task are written once for all sites: they must not change
        while one of its kind is sent.

        Raises:
            JobError: It is too large to go without a store, and there is none.
            StoreError: The store does not take it.
            WireError: See ``wire.encode``.
        """
        size = wire.encoded_size(message)
        if size <= self.threshold_bytes:
            return inline(message)
        head, references = self._detached(self._needed(size), message)
        return PackedFrame(frame=wire.encode_bytes(head), references=references)

    def send_whole(self, messages: Sequence[WireMessage]) -> PackedFrame:
        """Pack messages one after another, as they travel to a relay and from it.

        Integers of the model stay in the frame: a relay does not know how many there
        are, so it could not check a reference to them.

        Raises:
            JobError: Together they are too large to go without a store, and there is
                none.
            StoreError: The store does not take a vector.
            WireError: See ``wire.encode``.
        """
        size = sum(wire.encoded_sizes(messages))
        heads, references = messages, list[Reference]()
        if size > self.threshold_bytes:
            store, heads = self._needed(size), []
            for index, message in enumerate(messages):
                head, found = self._detached(store, message, but=("integers_m",))
                heads.append(head)
                references.extend(replace(each, message=index) for each in found)
        frames = (piece for each in heads for piece in wire.encode(each))
        return PackedFrame(frame=b"".join(frames), references=tuple(references))

    def receive(
        self, head: _Message, references: Sequence[Reference], sizes: Sizes
    ) -> _Message:
        """Fetch the vectors that a frame refers to.

        Args:
            head: The message of the frame; who sent it is for the caller to know.
            references: What came beside it.
            sizes: Those of the run's model.

        Raises:
            ProtocolError: The references are not those of such a message.
            JobError: There is no store here.
            CorruptObject: An object is not what the reference says.
            StoreError: The store does not give it, or the scratch folder is full.
        """
        if not references:
            return head
        limits = {each.field: check(head, each, sizes) for each in references}
        if len(limits) != len(references):
            raise ProtocolError("two references are to the same vector")
        if self.store is None or self.scratch is None:
            raise JobError(
                "a message refers to a store, but this side has none: set the store "
                "that the others use",
                key="exchange.url",
            )
        folder, empty = folder_of(head), vectors_of(head)
        vectors: dict[str, Any] = {
            each.field: self._fetch(self.store, self.scratch, folder, each).view(
                empty[each.field].dtype
            )
            for each in references
        }
        return replace(head, **vectors)

    def receive_whole(
        self, heads: Sequence[_Message], references: Sequence[Reference], sizes: Sizes
    ) -> list[_Message]:
        """Fetch the vectors of messages that came one after another; see ``receive``.

        Raises:
            ProtocolError: A reference is to none of these messages.
        """
        places = range(len(heads))
        if not all(each.message in places for each in references):
            raise ProtocolError(f"a reference to none of {len(heads)} messages")
        return [
            self.receive(head, [r for r in references if r.message == index], sizes)
            for index, head in enumerate(heads)
        ]

    def discard(self, head: WireMessage, references: Sequence[Reference]) -> None:
        """Remove from the store what a message refers to: it has been received."""
        for each in references:
            self._delete(f"{folder_of(head)}/{each.name}")

    def end_rounds(
        self, run_id: RunId, sites: Sequence[SiteId], *, before: int
    ) -> None:
        """Remove what rounds before one have left; the aggregator's task.

        Without a request if nothing has gone through the store since it was opened.
        """
        if self._is_used:
            self._tidy(run_id, sites, before=before)

    def end_run(self, run_id: RunId, sites: Sequence[SiteId]) -> None:
        """Remove all that a run has left; the aggregator's task."""
        self._tidy(run_id, sites, before=math.inf)

    @property
    def _url(self) -> str:
        return "" if self.store is None else self.store.url

    def _needed(self, size: int) -> ObjectStore:
        """The store, for a message of so many bytes.

        Raises:
            JobError: There is none.
        """
        if self.store is None:
            raise JobError(
                f"a message of {size >> 20} MiB is too large to send without a store, "
                f"which is needed above {self.threshold_bytes >> 20} MiB: set "
                "[exchange] in aggregator.toml and in every site.toml to a store that "
                "all of them can reach",
                key="exchange.url",
            )
        self._is_used = True
        return self.store

    def _detached(
        self, store: ObjectStore, message: _Message, but: Sequence[str] = ()
    ) -> tuple[_Message, tuple[Reference, ...]]:
        """Write large vectors of a message to the store; return it without them."""
        folder = folder_of(message)
        least = min(LEAST_BYTES, self.threshold_bytes)
        large = {
            name: vector
            for name, vector in vectors_of(message).items()
            if vector.nbytes > least and name not in but
        }
        references = tuple(
            self._put(store, folder, name, vector) for name, vector in large.items()
        )
        empty: dict[str, Any] = {name: vector[:0] for name, vector in large.items()}
        return replace(message, **empty), references

    def _put(
        self, store: ObjectStore, folder: str, name: str, vector: NDArray[Any]
    ) -> Reference:
        """Write a vector, or remember what came of it a moment ago."""
        known = self._shared.get(folder, vector)
        if known is None:
            try:
                known = self._write(store, folder, vector)
            except StoreError as error:
                known = error  # Another site's task need not wait for it again.
            self._shared.keep(folder, vector, known)
        if isinstance(known, StoreError):
            raise known
        return replace(known, field=name)

    def _write(
        self, store: ObjectStore, folder: str, vector: NDArray[Any]
    ) -> Reference:
        name = secrets.token_hex(_NAME_BYTES)
        key = f"{folder}/{name}"
        pieces = _Pieces(vector)

        def put(_: int) -> ObjectInfo:
            try:
                return store.put(key, pieces, if_absent=True)
            except ObjectExists:  # An earlier attempt, whose answer was lost.
                return store.stat(key)

        info = self.retry.call(put)
        sha256 = info.sha256 or pieces.sha256()  # Some stores take it on the way.
        return Reference(field="", name=name, size=vector.nbytes, sha256=sha256)

    def _fetch(
        self, store: ObjectStore, scratch: Path, folder: str, reference: Reference
    ) -> NDArray[Any]:
        key = f"{folder}/{reference.name}"
        info = self.retry.call(lambda _: store.stat(key))
        if info.size != reference.size:
            raise CorruptObject(
                f"{key!r} in {store.url} has {info.size} bytes instead of the "
                f"announced {reference.size}: check that [exchange] and its encryption "
                "are the same at all parties"
            )
        parts = cast(
            "Generator[bytes]",
            stream(
                store,
                key,
                if_version=info.version,
                part_bytes=PART_BYTES,
                ahead=AHEAD,
                retry=self.retry,
            ),
        )
        digest = hashlib.sha256()
        with contextlib.closing(parts), file_errors("write below", scratch):
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Without a name from the start: a killed process leaves nothing.
            with tempfile.TemporaryFile(dir=scratch, buffering=0) as file:
                for part in parts:
                    digest.update(part)
                    write_all(file.fileno(), part)
                if digest.hexdigest() != reference.sha256:
                    raise CorruptObject(
                        f"{key!r} in {store.url} does not have the digest that was "
                        "announced: someone writes to the store who should not, or the "
                        "store has lost data"
                    )
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=np.uint8)

    def _tidy(self, run_id: RunId, sites: Sequence[SiteId], *, before: float) -> None:
        if self.store is None:
            return
        for writer in ("model", *(f"sites/{site}" for site in sites)):
            prefix = f"{writer}/{run_id}/"
            try:
                keys = [info.key for info in self.store.list(prefix)]
            except StoreError as error:
                _LOG.warning("cannot clean up %s in %s: %s", prefix, self._url, error)
                continue
            for key in keys:
                index = key.removeprefix(prefix).partition("/")[0]
                if index.isdecimal() and int(index) < before:
                    self._delete(key)

    def _delete(self, key: str) -> None:
        try:
            if self.store is not None:
                self.store.delete(key)
        except StoreError as error:
            # It is deleted at the end of the run, or by the bucket's own rule.
            _LOG.warning("cannot delete %s in %s: %s", key, self._url, error)


class _Pieces:
    """The bytes of a vector in pieces, uncopied, as often as they are asked for."""

    def __init__(self, vector: NDArray[Any]) -> None:
        little = vector.dtype.newbyteorder("<")
        content = np.ascontiguousarray(vector, dtype=little)
        self._view = content.view(np.uint8).data.toreadonly()

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._view), PIECE_BYTES):
            piece = self._view[start : start + PIECE_BYTES]
            yield piece
            give_back(np.frombuffer(piece, np.uint8))

    def sha256(self) -> str:
        """Digest of all of them, 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for piece in self:
            digest.update(piece)
        return digest.hexdigest()


@dataclass
class _WrittenVectors:
    """What came of writing the vectors of one round's tasks."""

    folder: str = ""
    found: dict[int, tuple[weakref.ref[Any], Reference | StoreError]] = field(
        default_factory=dict
    )

    def get(self, folder: str, vector: NDArray[Any]) -> Reference | StoreError | None:
        """What came of the same vector in the same round; None if it is another."""
        kept = self.found.get(id(vector)) if folder == self.folder else None
        # Another array may have been given the place of one that is gone.
        return kept[1] if kept is not None and kept[0]() is vector else None

    def keep(
        self, folder: str, vector: NDArray[Any], result: Reference | StoreError
    ) -> None:
        """Remember it until the round is over."""
        if folder != self.folder:
            self.folder = folder
            self.found.clear()
        self.found[id(vector)] = weakref.ref(vector), result


INLINE = Frames(threshold_bytes=sys.maxsize)  # However large: within one machine.
