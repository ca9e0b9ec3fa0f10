"""A wrapper around any store that encrypts objects on this machine.

Each object has a data key of its own, which a key service wraps and which is stored
in the object's header ("envelope encryption"); see ``encrypted_format`` for the bytes
and what they guarantee, and ``federation.protocols.KeyService`` for the keys.

Against whom: who can read or write the store, but not use the key. They cannot read
a content, change it, cut it off or pass it off as another object. They can
delete an object or put an older content of it back, which is as well encrypted
as the newest: what has to be the newest needs a digest or a number elsewhere.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Unpack

from cloud_adapters.storage.checksums import Checksums
from cloud_adapters.storage.encrypted_format import (
    HEADER_BYTES,
    MAX_SEGMENT_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    TRAILER_BYTES,
    Cipher,
    Header,
    Trailer,
    content_bytes,
    digest_of_metadata,
)
from cloud_adapters.storage.object_keys import (
    CheckedPut,
    CheckedRead,
    check_key,
)
from federation.errors import CorruptObject, ObjectChanged
from federation.protocols import (
    Buffer,
    KeyService,
    ObjectInfo,
    ObjectStore,
    PutArguments,
    ReadArguments,
)

# Opened objects whose data keys are kept, so that ranges of one object do not each
# ask the key service.
_NUM_OPENED = 32
# How often an object may change under a read that did not ask for a version.
_NUM_CHANGES = 8
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenObject:
    """An object whose header has been read."""

    key: str
    cipher: Cipher
    version: str
    size: int


@dataclass(eq=False, repr=False)
class EncryptedStore:
    """A ``federation.protocols.ObjectStore`` that encrypts what another one stores.

    Keys, metadata and (to the byte) sizes are not hidden. Checksums that it tells are
    those of the content; the store below has the encrypted bytes' own.

    Attributes:
        store: Closed with this one.
        keys: Wraps the data keys; closed with this one.
        prefix: Put before an object's key where the object is bound to it: tells
            apart what has the same key in different places of a larger store.
        segment_bytes: Content that is encrypted in one go, and read at least.

    Raises:
        ValueError: ``segment_bytes`` is not between 1 and 64 MiB.
    """

    store: ObjectStore
    keys: KeyService
    _: KW_ONLY
    prefix: str = ""
    segment_bytes: int = SEGMENT_BYTES

    def __post_init__(self) -> None:
        """Encrypt objects for ``store``."""
        if not 0 < self.segment_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"segments cannot have {self.segment_bytes} bytes")
        self._lock = threading.Lock()
        self._opened: OrderedDict[tuple[str, str], _OpenObject] = OrderedDict()

    @property
    def url(self) -> str:
        """Where the encrypted objects are."""
        return self.store.url

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``.

        Raises:
            KeyRefused: The key service does not give a key; nothing is written.
        """
        check_key(key)
        put = CheckedPut(**options)
        kept = put.kept
        bound = self.prefix + key
        made = self.keys.generate(context_of(bound))
        cipher = Cipher(
            key=bound,
            segment_bytes=self.segment_bytes,
            data_key=made.plaintext,
            where=self._where(key),
        )
        header = Header(segment_bytes=self.segment_bytes, wrapped=made.wrapped)
        checksums = Checksums()

        # A generator: bytes can be asked for once. Were other content encrypted
        # under the same nonces, both would be exposed.
        def stored() -> Iterator[bytes]:
            yield header.encode()
            yield from cipher.encrypt(data, checksums, kept)

        options["metadata"] = kept
        info = self.store.put(key, stored(), **options)
        self._remember(
            _OpenObject(
                key=key, cipher=cipher, version=info.version, size=checksums.size
            )
        )
        return replace(
            info,
            size=checksums.size,
            crc32c=checksums.crc32c,
            sha256=checksums.sha256,
            metadata=kept,
        )

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``.

        Only the segments are read that hold them, and the end of the object if they
        reach it. A whole object is one request.
        """
        part = CheckedRead(**options)
        if part.start == 0 and part.length is None:
            return self._read_whole(key, part.if_version)
        for _ in range(_NUM_CHANGES):
            try:
                opened = self._open(key, part.if_version)
                return self._read_range(opened, part.start, part.length)
            except ObjectChanged as error:
                if part.if_version is not None:
                    raise
                changed = error
        raise changed

    def stat(self, key: str) -> ObjectInfo:
        """All that is known of an object; see ``ObjectStore.stat``.

        Up to three requests: checksums are in the object.
        """
        for _ in range(_NUM_CHANGES):
            info = self.store.stat(key)
            try:
                opened = self._open_version(info)
                trailer = self._read_trailer(opened)
            except ObjectChanged as error:
                changed = error
                continue
            if trailer.metadata_digest != digest_of_metadata(info.metadata):
                raise CorruptObject(
                    f"{self._where(key)} has different metadata than it was written "
                    "with"
                )
            return replace(
                info, size=trailer.size, crc32c=trailer.crc32c, sha256=trailer.sha256
            )
        raise changed

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects under a prefix; see ``ObjectStore.list``.

        Sizes are computed from the stored ones, without a look at the object: they
        are right for what was written with this store's segment size.
        """
        for info in self.store.list(prefix, start_after=start_after):
            size = content_bytes(info.size, self.segment_bytes)
            yield replace(info, size=size, crc32c=None, sha256=None)

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        self.store.delete(key)

    def rewrap(self, key: str, *, keys: KeyService | None = None) -> ObjectInfo:
        """Wrap an object's data key again, as after the change of a wrapping key.

        The content stays encrypted as it is, but has to be read and written once,
        since stores cannot change the beginning of an object. It is decrypted on the
        way, to check what takes the place of the object. An object that changes
        meanwhile stays as it then is.

        Args:
            key: The object.
            keys: Wraps from now on; by default the service that the store has.

        Raises:
            ObjectChanged: Someone wrote it meanwhile.
            CorruptObject: It is damaged, or was on its way; nothing is written.
            KeyRefused: The old or the new key is unavailable; nothing is written.
        """
        info = self.store.stat(key)
        opened = self._open_version(info)
        wrapped = (keys or self.keys).wrap(
            opened.cipher.data_key, context_of(opened.cipher.key)
        )
        header = Header(segment_bytes=opened.cipher.segment_bytes, wrapped=wrapped)

        def stored() -> Iterator[bytes]:
            yield header.encode()
            yield from self._stored(opened)

        written = self.store.put(
            key, stored(), if_version=info.version, metadata=info.metadata
        )
        self._remember(replace(opened, version=written.version))
        return self.stat(key)

    def _stored(self, opened: _OpenObject) -> Iterator[bytes]:
        """Segments and trailer as they are stored, each checked before it is passed on.

        Raises:
            CorruptObject: They are not what was written.
        """
        cipher = opened.cipher
        end = cipher.trailer_offset(opened.size)
        step = cipher.offset(1) - cipher.offset(0)
        num_segments = max(1, _COPY_BYTES // step)
        for start in range(cipher.offset(0), end, num_segments * step):
            stop = min(end, start + num_segments * step)
            stored = self.store.read(
                opened.key, start=start, length=stop - start, if_version=opened.version
            )
            if len(stored) != stop - start:
                raise CorruptObject(
                    f"{cipher.where} ended early while it was being read"
                )
            first = (start - cipher.offset(0)) // step
            _decrypted(cipher, first, memoryview(stored))  # It is checked.
            yield stored
        trailer = self.store.read(
            opened.key, start=end, length=TRAILER_BYTES, if_version=opened.version
        )
        cipher.open_trailer(trailer, opened.size)
        yield trailer

    def close(self) -> None:
        """Close the store below and the key service, and forget all data keys."""
        with self._lock:
            self._opened.clear()
        self.store.close()
        self.keys.close()

    def _where(self, key: str) -> str:
        return f"{key!r} in {self.store.url}"

    def _read_whole(self, key: str, if_version: str | None) -> bytes:
        stored = memoryview(self.store.read(key, if_version=if_version))
        header = Header.decode(bytes(stored[:HEADER_BYTES]), self._where(key))
        cipher = self._cipher(key, header)
        size = content_bytes(len(stored), header.segment_bytes)
        _check_size(cipher, size, len(stored))
        cipher.open_trailer(stored[-TRAILER_BYTES:], size)
        return _decrypted(cipher, 0, stored[HEADER_BYTES:-TRAILER_BYTES]).getvalue()

    def _read_range(self, opened: _OpenObject, start: int, length: int | None) -> bytes:
        """Decrypt the touched segments; the position of the end is authenticated."""
        cipher, size = opened.cipher, opened.size
        stop = size if length is None else min(size, start + length)
        if start >= stop:
            self._read_trailer(opened)
            return b""
        first = start // cipher.segment_bytes
        offset = cipher.offset(first)
        end = cipher.offset((stop - 1) // cipher.segment_bytes + 1)
        trailer_at = cipher.trailer_offset(size)
        tells_end = length is None or start + length > size
        if tells_end:
            end = trailer_at + TRAILER_BYTES
        stored = memoryview(
            self.store.read(
                opened.key,
                start=offset,
                length=min(end, trailer_at + TRAILER_BYTES) - offset,
                if_version=opened.version,
            )
        )
        if tells_end:
            cipher.open_trailer(stored[trailer_at - offset :], size)
        content = _decrypted(cipher, first, stored[: trailer_at - offset])
        skip = start - first * cipher.segment_bytes
        if skip == 0 and content.getbuffer().nbytes == stop - start:
            return content.getvalue()
        return bytes(content.getbuffer()[skip : skip + stop - start])

    def _read_trailer(self, opened: _OpenObject) -> Trailer:
        stored = self.store.read(
            opened.key,
            start=opened.cipher.trailer_offset(opened.size),
            length=TRAILER_BYTES,
            if_version=opened.version,
        )
        return opened.cipher.open_trailer(stored, opened.size)

    def _open(self, key: str, if_version: str | None) -> _OpenObject:
        """Read an object's header, or remember it if its version is named."""
        check_key(key)
        if if_version is not None:
            with self._lock:
                known = self._opened.get((key, if_version))
            if known is not None:
                return known
        info = self.store.stat(key)
        if if_version not in {None, info.version}:
            raise ObjectChanged(f"{self._where(key)} has changed")
        return self._open_version(info)

    def _open_version(self, info: ObjectInfo) -> _OpenObject:
        with self._lock:
            known = self._opened.get((info.key, info.version))
        if known is not None:
            return known
        content = self.store.read(
            info.key, start=0, length=HEADER_BYTES, if_version=info.version
        )
        header = Header.decode(content, self._where(info.key))
        opened = _OpenObject(
            key=info.key,
            cipher=self._cipher(info.key, header),
            version=info.version,
            size=content_bytes(info.size, header.segment_bytes),
        )
        _check_size(opened.cipher, opened.size, info.size)
        self._remember(opened)
        return opened

    def _cipher(self, key: str, header: Header) -> Cipher:
        bound = self.prefix + key
        try:
            data_key = self.keys.unwrap(header.wrapped, context_of(bound))
        except CorruptObject as error:
            raise CorruptObject(f"{self._where(key)} is damaged: {error}") from error
        return Cipher(
            key=bound,
            segment_bytes=header.segment_bytes,
            data_key=data_key,
            where=self._where(key),
        )

    def _remember(self, opened: _OpenObject) -> None:
        with self._lock:
            self._opened[opened.key, opened.version] = opened
            while len(self._opened) > _NUM_OPENED:
                self._opened.popitem(last=False)


def _check_size(cipher: Cipher, size: int, stored_bytes: int) -> None:
    """Check that header, segments and trailer of a content fill an object."""
    if cipher.trailer_offset(size) + TRAILER_BYTES != stored_bytes:
        raise CorruptObject(
            f"{cipher.where} is damaged: no encrypted object has {stored_bytes} bytes; "
            "restore it from a copy"
        )


def _decrypted(cipher: Cipher, first: int, stored: memoryview) -> io.BytesIO:
    """Decrypt consecutive segments, of which the last may be short.

    They are written to their places in one buffer, whose ``getvalue()`` does not copy.
    """
    content = io.BytesIO()
    step = cipher.offset(1) - cipher.offset(0)
    size = len(stored) - -(-len(stored) // step) * TAG_BYTES
    if size > 0:
        content.seek(size - 1)
        content.write(b"\0")
    with content.getbuffer() as view:
        for at, begin in enumerate(range(0, len(stored), step)):
            place = view[at * cipher.segment_bytes : (at + 1) * cipher.segment_bytes]
            cipher.decrypt_into(first + at, stored[begin : begin + step], place)
            place.release()
    return content


def context_of(key: str) -> Mapping[str, str]:
    """The context of a data key: an object's key, and its place."""
    return {"crossfed": "object", "key": key}
