"""What may name an object, in every store.

The rules are the narrowest of the stores that we know, so that a run can be
copied from one to another; a key that passes is also a safe relative path.
"""

import unicodedata

MAX_KEY_BYTES = 1024  # of S3 and of Google Cloud Storage


def check_key(key: str) -> str:
    """Return ``key`` if it may name an object.

    A key is ``/``-separated UTF-8 of 1 to 1024 bytes, without control characters
    and without empty, ``.`` or ``..`` segments.

    Raises:
        ValueError: ``key`` is not such a name; the message says why.
    """
    fault = _fault(key)
    if fault is not None:
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
    if any(unicodedata.category(char) == "Cc" for char in key):
        return "holds a control character"
    for segment in key.split("/"):
        if segment in {"", ".", ".."}:
            return f"has a segment {segment!r} between its slashes"
    return None


def check_range(start: int, length: int | None) -> None:
    """Check the range of a read.

    Raises:
        ValueError: ``start`` or ``length`` is negative.
    """
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"cannot read {length} bytes from {start}: negative")
