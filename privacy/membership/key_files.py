"""Key files for ``crossfed keys new`` and ``show``.

What a key file is is in ``privacy.secagg.agreement.identity``. Here they are made and
shown, and errors say what to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from federation.errors import os_errors
from federation.ids import check_name
from privacy.keystream import RandomBytes
from privacy.secagg.agreement import identity
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.errors import KeyFileRefused

# The most that the library encrypts a key with.
MAX_PASSPHRASE_BYTES = 1023

_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """The public half of a key file.

    Attributes:
        file: The key file.
        public_key: In hexadecimal digits.
        fingerprint: For people to compare.
        encrypted: Whether the file has a passphrase.
    """

    file: str
    public_key: str
    fingerprint: str
    encrypted: bool


def new(
    name: str,
    *,
    random_bytes: RandomBytes,
    out: Path | None = None,
    passphrase_file: Path | None = None,
) -> KeyFacts:
    """Make an identity and its file.

    Args:
        name: Name of the site, or of the aggregator.
        random_bytes: ``os.urandom``.
        out: The file, which must not exist; ``NAME.pem`` by default.
        passphrase_file: Its first line encrypts the file.

    Raises:
        KeyFileRefused: The name or the passphrase is none, or the file exists or
            cannot be written.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise KeyFileRefused(str(error)) from None
    path = out or Path(f"{name}.pem")
    passphrase = _passphrase(passphrase_file)
    made = identity.generate(random_bytes)
    with _advice_on_keys(path):
        made.save(path, passphrase=passphrase)
    return _facts(path, made, encrypted=passphrase is not None)


def open_key(path: Path, *, passphrase_file: Path | None = None) -> Identity:
    """Read a key file, to sign with it.

    Raises:
        KeyFileRefused: As ``show``.
    """
    passphrase = _passphrase(passphrase_file)
    with _advice_on_keys(path):
        return identity.load(path, passphrase=passphrase)


def show(path: Path, *, passphrase_file: Path | None = None) -> KeyFacts:
    """The public half of a key file.

    Raises:
        KeyFileRefused: The file is missing, open to others, damaged or encrypted
            with another passphrase.
    """
    passphrase = _passphrase(passphrase_file)
    with _advice_on_keys(path):
        found = identity.load(path, passphrase=passphrase)
    return _facts(path, found, encrypted=passphrase is not None)


def is_encrypted(pem: bytes) -> bool:
    """Whether the content of a key file is encrypted with a passphrase."""
    return _ENCRYPTED in pem


def _facts(path: Path, key: Identity, *, encrypted: bool) -> KeyFacts:
    return KeyFacts(
        file=str(path),
        public_key=key.public.key.hex(),
        fingerprint=key.public.fingerprint,
        encrypted=encrypted,
    )


def _passphrase(path: Path | None) -> bytes | None:
    """The first line of a file."""
    if path is None:
        return None
    doing = f"read the passphrase file {path}"
    advice = "write the passphrase into its first line"
    with os_errors(KeyFileRefused, doing, advice), path.open("rb") as file:
        line = file.readline(MAX_PASSPHRASE_BYTES + 2).rstrip(b"\r\n")
    if not 1 <= len(line) <= MAX_PASSPHRASE_BYTES:
        raise KeyFileRefused(
            f"the first line of {path} is not a passphrase: write 1 to "
            f"{MAX_PASSPHRASE_BYTES} bytes into it"
        )
    return line


@contextmanager
def _advice_on_keys(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyFileRefused as error:
        raise KeyFileRefused(f"{error}{_advice(path, error)}") from error


def _advice(path: Path, error: KeyFileRefused) -> str:
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        if path.parent.is_dir():
            return "; create a key with `crossfed keys new`, or choose another file"
        return "; create its folder first, or choose another file"
    if isinstance(cause, OSError):
        return "; make it accessible to this user, or choose another file"
    text = str(error)
    if "passphrase" in text:
        return (
            "; give a file with the right passphrase with --passphrase-file, or the "
            "right key file"
        )
    if "belongs to user" in text or "regular file" in text or "another kind" in text:
        return "; use a key file of this user that `crossfed keys new` created"
    return ""
