"""The format of an encrypted object: header, segments, trailer; no I/O.

::

    header   1,024 bytes   magic "crossfed", version (1 byte), segment size (4), length
                           of the wrapped data key (2), the wrapped key, zeros
    segment  s + 16 bytes  s bytes of content under AES-256-GCM; the last may be shorter
    trailer  92 bytes      size (8), CRC32C (4) and SHA-256 (32) of the content and
                           SHA-256 of the metadata (32), under the same key, and a tag

All numbers are big-endian. The data key is the object's own: a nonce is used once
because no two segments of an object have the same. It is 4 zeros, the number of
segments before (7 bytes) and 1 for the trailer or 0 (1 byte): the construction STREAM
of Hoang, Reyhanitabar, Rogaway and Vizár, "Online Authenticated-Encryption and its
Nonce-Reuse Misuse-Resistance" (CRYPTO 2015), with a prefix of zeros.
Associated data are magic, version, segment size, two zeros where the length is, and
what the object is bound to: its place and its key. docs/explanation/encrypted-format.md
says all of it for who writes a reader, and a test is one.

Guarantee: content that decrypts is what the owner of the data key wrote, at this
place, under this key. Segments that were swapped, repeated, or taken from another
object do not decrypt. Where an object ends only its trailer says: to know
that, open it. Not hidden: key, size, time and metadata of an object. Metadata are
authenticated by a digest in the trailer.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloud_adapters.storage.checksums import Checksums, summed
from federation.errors import CorruptObject
from federation.protocols import Buffer

MAGIC = b"crossfed"
VERSION = 1
HEADER_BYTES = 1024
SEGMENT_BYTES = 4 << 20
MAX_SEGMENT_BYTES = 64 << 20  # What a header may make its reader allocate.
TAG_BYTES = 16

_FIXED = struct.Struct(">8sBIH")
MAX_WRAPPED_BYTES = HEADER_BYTES - _FIXED.size
_TRAILER = struct.Struct(">QI32s32s")
TRAILER_BYTES = _TRAILER.size + TAG_BYTES
OVERHEAD_BYTES = HEADER_BYTES + TRAILER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header before the content.

    Attributes:
        segment_bytes: Content bytes in each segment but the last.
        wrapped: The data key under the lock of a key service.
    """

    segment_bytes: int
    wrapped: bytes

    def encode(self) -> bytes:
        """Write the header."""
        fixed = _FIXED.pack(MAGIC, VERSION, self.segment_bytes, len(self.wrapped))
        if len(self.wrapped) > MAX_WRAPPED_BYTES:
            raise ValueError(f"a wrapped key of {len(self.wrapped)} bytes is too long")
        return (fixed + self.wrapped).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, content: bytes, where: str) -> "Header":
        """Read a header.

        Raises:
            CorruptObject: There is none, or one that no version of ours writes.
        """
        if not content.startswith(MAGIC):
            raise CorruptObject(
                f"{where} is not encrypted, but reading with a key requires it: it was "
                "written without a key, or by someone else"
            )
        if len(content) < HEADER_BYTES:
            raise CorruptObject(f"{where} is truncated in its header")
        _, version, segment_bytes, length = _FIXED.unpack_from(content)
        if version != VERSION:
            raise CorruptObject(
                f"{where} is encrypted with version {version} of the format, but this "
                f"crossfed reads version {VERSION}: use the release that wrote it"
            )
        wrapped = content[_FIXED.size : _FIXED.size + length]
        header = cls(segment_bytes=segment_bytes, wrapped=wrapped)
        is_ours = 0 < segment_bytes <= MAX_SEGMENT_BYTES and length <= MAX_WRAPPED_BYTES
        if not is_ours or header.encode() != content[:HEADER_BYTES]:
            raise CorruptObject(f"{where} has a modified header")
        return header


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """The trailer after the content.

    Attributes:
        size: Bytes of the content.
        crc32c: CRC32C of the content, as 8 hexadecimal digits.
        sha256: SHA-256 of the content, as 64 hexadecimal digits.
        metadata_digest: SHA-256 of the object's metadata; 32 bytes.
    """

    size: int
    crc32c: str
    sha256: str
    metadata_digest: bytes

    def encode(self) -> bytes:
        """Write the trailer."""
        return _TRAILER.pack(
            self.size,
            int(self.crc32c, 16),
            bytes.fromhex(self.sha256),
            self.metadata_digest,
        )

    @classmethod
    def decode(cls, content: bytes) -> "Trailer":
        """Read what ``encode`` wrote and a data key has authenticated."""
        size, crc, sha256, digest = _TRAILER.unpack(content)
        return cls(
            size=size,
            crc32c=f"{crc:08x}",
            sha256=sha256.hex(),
            metadata_digest=digest,
        )


def digest_of_metadata(metadata: Mapping[str, str]) -> bytes:
    """SHA-256 of an object's metadata, whatever their order."""
    text = json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).digest()


def content_bytes(stored_bytes: int, segment_bytes: int) -> int:
    """Content of an object of ``stored_bytes``; 0 if it is too small for one."""
    inner = max(0, stored_bytes - OVERHEAD_BYTES)
    full, rest = divmod(inner, segment_bytes + TAG_BYTES)
    return full * segment_bytes + max(0, rest - TAG_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cipher:
    """Encrypts and decrypts the parts of one object.

    Attributes:
        key: What the object is bound to: its place and its key in the store.
        segment_bytes: Content bytes in each segment but the last.
        data_key: 32 bytes, only for this object.
        where: The object, for messages.
    """

    key: str
    segment_bytes: int
    data_key: bytes = field(repr=False)
    where: str

    def encrypt(
        self, data: Iterable[Buffer], checksums: Checksums, metadata: Mapping[str, str]
    ) -> Iterator[bytes]:
        """Yield segments and trailer of a content; ``checksums`` are made on the way.

        Not more than two segments are held at a time, and what ``summed`` holds.
        """
        index = 0
        buffer = bytearray()
        for piece in summed(data, checksums):
            view = memoryview(piece)
            view = view.cast("B") if view.nbytes else memoryview(b"")
            while view.nbytes:
                taken = min(view.nbytes, self.segment_bytes - len(buffer))
                buffer += view[:taken]
                view = view[taken:]
                if len(buffer) == self.segment_bytes:
                    yield self._seal(index, buffer)
                    index += 1
                    buffer.clear()
        if buffer:
            yield self._seal(index, buffer)
            index += 1
        trailer = Trailer(
            size=checksums.size,
            crc32c=checksums.crc32c,
            sha256=checksums.sha256,
            metadata_digest=digest_of_metadata(metadata),
        )
        yield self._seal(index, trailer.encode(), is_trailer=True)

    def num_segments(self, size: int) -> int:
        """Segments of a content of ``size`` bytes."""
        return -(-size // self.segment_bytes)

    def offset(self, index: int) -> int:
        """Where a segment begins in the stored object."""
        return HEADER_BYTES + index * (self.segment_bytes + TAG_BYTES)

    def trailer_offset(self, size: int) -> int:
        """Where the trailer begins behind a content of ``size`` bytes."""
        return HEADER_BYTES + size + self.num_segments(size) * TAG_BYTES

    def decrypt_into(self, index: int, sealed: Buffer, out: memoryview) -> None:
        """Write the content of a segment to memory of its size.

        Raises:
            CorruptObject: It is not what was written there.
        """
        nonce = _nonce(index, is_trailer=False)
        with self._damaged(f"segment {index}"):
            AESGCM(self.data_key).decrypt_into(nonce, sealed, self._associated(), out)

    def open_trailer(self, sealed: Buffer, size: int) -> Trailer:
        """Read the trailer behind a content of ``size`` bytes.

        Raises:
            CorruptObject: It is not what was written there: the object was changed,
                or its end is missing.
        """
        nonce = _nonce(self.num_segments(size), is_trailer=True)
        with self._damaged("its end"):
            content = AESGCM(self.data_key).decrypt(nonce, sealed, self._associated())
        trailer = Trailer.decode(content)
        if trailer.size != size:
            raise CorruptObject(
                f"{self.where} holds {size} bytes of the {trailer.size} that were "
                "written: restore it from a copy"
            )
        return trailer

    def _seal(self, index: int, content: Buffer, *, is_trailer: bool = False) -> bytes:
        nonce = _nonce(index, is_trailer=is_trailer)
        return AESGCM(self.data_key).encrypt(nonce, content, self._associated())

    @contextmanager
    def _damaged(self, part: str) -> Iterator[None]:
        try:
            yield
        except (InvalidTag, ValueError) as error:  # ValueError: shorter than a tag.
            raise CorruptObject(
                f"{self.where} is damaged: {part} does not decrypt; it was modified, "
                "truncated or moved; restore it from a copy"
            ) from error

    def _associated(self) -> bytes:
        fixed = _FIXED.pack(MAGIC, VERSION, self.segment_bytes, 0)
        return fixed + self.key.encode()


def _nonce(index: int, *, is_trailer: bool) -> bytes:
    return bytes(4) + index.to_bytes(7, "big") + bytes([is_trailer])
