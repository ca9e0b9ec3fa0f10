"""What may name an object, in every store.

The rules are the narrowest of the stores that we know, so that a run can be
copied from one to another; a key that passes is also a safe relative path.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_KEY_BYTES = 1024  # of S3 and of Google Cloud Storage
MAX_METADATA_BYTES = 1500  # S3 allows 2,048, and stores add some of their own

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # Unicode's category Cc.
_METADATA_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# Neither end is a space: servers cut those off.
_METADATA_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")


def check_key(key: str) -> str:
    """Return ``key`` if it may name an object.

    A key is ``/``-separated UTF-8 of 1 to 1024 bytes, without control characters
    and without empty, ``.`` or ``..`` segments.

    Raises:
        ValueError: ``key`` is not such a name; the message says why.
    """
    if (fault := _fault(key)) is not None:
        raise ValueError(f"{key[:80]!r} cannot be an object's key: it {fault}")
    return key


def _fault(key: str) -> str | None:
    if not key:
        return "is empty"
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if num_bytes > MAX_KEY_BYTES:
        return f"has {num_bytes} bytes, more than {MAX_KEY_BYTES}"
    if _CONTROL_CHARACTER.search(key):
        return "holds a control character"
    for segment in key.split("/"):
        if segment in {"", ".", ".."}:
            return f"has a segment {segment!r} between its slashes"
    return None


def folder_of(prefix: str) -> str:
    """Return what every key under a prefix begins with: nothing, or it and a slash.

    Raises:
        ValueError: ``prefix`` is neither empty nor a key.
    """
    return f"{check_key(prefix)}/" if prefix else ""


def name_in(folder: str, key: str) -> str:
    """Return the name of a key's object in its bucket, which has the keys' limits too.

    Raises:
        ValueError: ``key`` cannot be a key there.
    """
    return check_key(folder + check_key(key))


def key_in(folder: str, name: str) -> str | None:
    """Return the key of an object that a bucket lists; None if it cannot have one.

    Others may write there, and consoles make "folders" that end with a slash.
    """
    key = name.removeprefix(folder)
    return key if _fault(key) is None and _fault(folder + key) is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRead:
    """A read that any store can make; see ``federation.protocols.ReadArguments``."""

    start: int = 0
    length: int | None = None
    if_version: str | None = None

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ValueError: ``start`` or ``length`` is negative.
        """
        if self.start < 0 or (self.length is not None and self.length < 0):
            raise ValueError(
                f"cannot read {self.length} bytes from {self.start}: negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPut:
    """A write that any store can make; see ``federation.protocols.PutArguments``."""

    if_absent: bool = False
    if_version: str | None = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Check the conditions.

        Raises:
            ValueError: Both are given.
        """
        if self.if_absent and self.if_version is not None:
            raise ValueError("an object cannot be both absent and of a version")

    @property
    def kept(self) -> Mapping[str, str]:
        """The metadata; see ``check_metadata``."""
        return check_metadata(self.metadata)


def check_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return a copy of an object's metadata if every store can keep it.

    Raises:
        ValueError: A name is not of lower-case letters, digits and ``-``, a value is
            not of printable ASCII characters, or all together have more than
            ``MAX_METADATA_BYTES``.
    """
    kept = dict(metadata or {})
    for name, value in kept.items():
        if not _METADATA_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} cannot be a name of metadata")
        if not _METADATA_VALUE.fullmatch(value):
            raise ValueError(f"the metadata {name!r} must be of printable ASCII")
    if sum(len(name) + len(value) for name, value in kept.items()) > MAX_METADATA_BYTES:
        raise ValueError(f"metadata has more than {MAX_METADATA_BYTES} bytes")
    return kept
