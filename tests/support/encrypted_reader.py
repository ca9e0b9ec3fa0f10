"""A reader of encrypted objects, from ``docs/explanation/encrypted-format.md`` alone.

It shares no code with the product: whoever changes it looks at the page, and not at
``encrypted_format``.
"""

import base64
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HEADER, TRAILER, TAG = 1024, 92, 16
LARGEST_SEGMENT = 67_108_864

Unwrap = Callable[[bytes, str], bytes]


class Refused(Exception):
    """The bytes are not what the page describes."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What an object holds."""

    content: bytes
    metadata_digest: bytes


def key_file(path: Path) -> Unwrap:
    """Unwrap data keys with the keys of a file."""
    keys = {
        entry["id"]: base64.b64decode(entry["secret"])
        for entry in tomllib.loads(path.read_text())["keys"]
    }

    def unwrap(wrapped: bytes, bound: str) -> bytes:
        if not wrapped.startswith(b"file:"):
            raise Refused("wrapped by another kind of service")
        blob = wrapped[len(b"file:") :]
        secret = keys[blob[:8].hex()]
        return AESGCM(secret).decrypt(blob[8:20], blob[20:], context(bound))

    return unwrap


def context(bound: str) -> bytes:
    """What a data key is bound to."""
    return f'{{"crossfed":"object","key":{json.dumps(bound)}}}'.encode("ascii")


def digest_of_metadata(metadata: Mapping[str, str]) -> bytes:
    """What the trailer has of an object's metadata."""
    named = (f"{json.dumps(n)}:{json.dumps(metadata[n])}" for n in sorted(metadata))
    return hashlib.sha256(f"{{{','.join(named)}}}".encode("ascii")).digest()


@dataclass(frozen=True)
class Reader:
    """One object's bytes, as somebody found them in a store."""

    stored: bytes
    bound: str
    unwrap: Unwrap

    def header(self) -> tuple[int, bytes]:
        """Segment size and wrapped key."""
        head = self.stored[:HEADER]
        if len(head) < HEADER or head[:8] != b"crossfed" or head[8] != 1:
            raise Refused("no header of version 1")
        size = int.from_bytes(head[9:13], "big")
        length = int.from_bytes(head[13:15], "big")
        if not 1 <= size <= LARGEST_SEGMENT or length > 1009:
            raise Refused("a number out of range")
        if any(head[15 + length :]):
            raise Refused("the padding is not of zeros")
        return size, head[15 : 15 + length]

    def shape(self) -> tuple[int, int]:
        """Bytes of content, and segments."""
        size, _ = self.header()
        rest = len(self.stored) - HEADER - TRAILER
        if rest < 0:
            raise Refused("too short")
        number = math.ceil(rest / (size + TAG))
        content = rest - TAG * number
        if content < 0 or math.ceil(content / size) != number:
            raise Refused("no content has this size")
        return content, number

    def part(self, index: int, flag: int, begin: int, end: int) -> bytes:
        """Decrypt a segment or the trailer."""
        size, wrapped = self.header()
        nonce = bytes(4) + index.to_bytes(7, "big") + bytes([flag])
        associated = (
            b"crossfed"
            + bytes([1])
            + size.to_bytes(4, "big")
            + bytes(2)
            + self.bound.encode("utf-8")
        )
        data_key = self.unwrap(wrapped, self.bound)
        return AESGCM(data_key).decrypt(nonce, self.stored[begin:end], associated)

    def segment(self, index: int) -> bytes:
        """Decrypt a segment."""
        size, _ = self.header()
        begin = HEADER + index * (size + TAG)
        end = min(begin + size + TAG, len(self.stored) - TRAILER)
        return self.part(index, 0, begin, end)

    def trailer(self) -> bytes:
        """Decrypt the trailer, and compare the size that it tells."""
        content, number = self.shape()
        end = len(self.stored)
        found = self.part(number, 1, end - TRAILER, end)
        if int.from_bytes(found[:8], "big") != content:
            raise Refused("the trailer tells another size")
        return found

    def whole(self) -> Content:
        """Everything, with every check of the page."""
        _, number = self.shape()
        found = self.trailer()
        content = b"".join(self.segment(index) for index in range(number))
        if google_crc32c.value(content) != int.from_bytes(found[8:12], "big"):
            raise Refused("another CRC32C")
        if hashlib.sha256(content).digest() != found[12:44]:
            raise Refused("another SHA-256")
        return Content(content=content, metadata_digest=found[44:76])

    def range(self, start: int, stop: int) -> bytes:
        """Bytes from ``start`` to before ``stop``, from the touched segments alone."""
        size, _ = self.header()
        content, number = self.shape()
        if stop >= content:
            self.trailer()
        first, last = start // size, min(number, math.ceil(min(stop, content) / size))
        joined = b"".join(self.segment(index) for index in range(first, last))
        return joined[start - first * size : min(stop, content) - first * size]
