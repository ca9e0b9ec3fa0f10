"""Who a site is: a long-lived Ed25519 key, its file and its signatures.

The private key lies at the site, in a PEM file that only its owner can read; the
public half is pinned in the roster. Signatures are RFC 8032 over ``LP("xsa-v1
signature") || LP(label) || LP(bytes)``, so that a signature on one kind of message
never passes for another. Keys that live for one run are in ``keys``, not here.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from privacy.secagg.canonical import fields
from privacy.secagg.errors import BadSignature, KeyFileRefused

# Bytes that nobody can predict, as many as asked for: ``os.urandom`` in
# production, a keyed stream in tests.
RandomBytes = Callable[[int], bytes]

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 1 << 14

_DOMAIN = b"xsa-v1 signature"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Label(StrEnum):
    """What a signature is about."""

    OFFER = "offer"
    ADVERT = "advert"
    CONFIRM = "confirm"
    HEAD = "masked head"
    SURVIVORS = "survivors"
    SHARES = "shares"
    DECLINE = "decline"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True)
class PublicIdentity:
    """The public half of an identity.

    Attributes:
        key: Raw Ed25519 public key, 32 bytes.
    """

    key: bytes

    def __post_init__(self) -> None:
        """Refuse bytes that are not a key."""
        try:
            Ed25519PublicKey.from_public_bytes(self.key)
        except ValueError:
            raise ValueError(
                f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(self.key)}"
            ) from None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key as 16 groups of 4 hexadecimal digits."""
        digits = hashlib.sha256(self.key).hexdigest()
        return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))

    def verify(self, label: Label, body: bytes, signature: bytes, *, who: str) -> None:
        """Check a signature.

        Args:
            label: What the signature must be about.
            body: The signed bytes.
            signature: 64 bytes.
            who: The alleged signer, for the message.

        Raises:
            BadSignature: This key did not sign these bytes under this label.
        """
        key = Ed25519PublicKey.from_public_bytes(self.key)
        try:
            key.verify(signature, _signed(label, body))
        except InvalidSignature:
            raise BadSignature(
                f"the signature of {who} under {label.value!r} is not by the pinned "
                f"key {self.fingerprint[:19]}..."
            ) from None


class Identity:
    """A long-lived signing key. It cannot be printed, copied or pickled."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        """Hold a key; see ``generate`` and ``load``."""
        self._key = key
        self.public = PublicIdentity(key.public_key().public_bytes_raw())

    def sign(self, label: Label, body: bytes) -> bytes:
        """Sign bytes under a label: 64 bytes, RFC 8032 Ed25519."""
        return self._key.sign(_signed(label, body))

    def save(self, path: Path, *, passphrase: bytes | None = None) -> None:
        """Write a new PEM PKCS#8 file that only its owner can read.

        Args:
            path: Where; the file must not exist.
            passphrase: Encrypts the file if given.

        Raises:
            KeyFileRefused: The file exists or cannot be written.
        """
        protection: serialization.KeySerializationEncryption = (
            serialization.NoEncryption()
            if passphrase is None
            else serialization.BestAvailableEncryption(passphrase)
        )
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
        )
        try:
            _write_new(path, pem)
        except FileExistsError:
            raise KeyFileRefused(
                f"{path} exists: an identity is never overwritten; move it away first"
            ) from None
        except OSError as error:
            raise KeyFileRefused(f"cannot write {path}: {error.strerror}") from error

    def __repr__(self) -> str:
        """Show the public half only."""
        return f"Identity({self.public.fingerprint[:19]}...)"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError("an identity does not leave its process")


def generate(random_bytes: RandomBytes) -> Identity:
    """Make a new identity from 32 random bytes."""
    return Identity(Ed25519PrivateKey.from_private_bytes(random_bytes(KEY_BYTES)))


def load(path: Path, *, passphrase: bytes | None = None) -> Identity:
    """Read an identity that ``Identity.save`` wrote.

    Guarantee:
        Owner and mode are those of the opened file itself, not of a name that
        could be exchanged between the check and the reading.

    Raises:
        KeyFileRefused: The file is missing, is not the caller's own regular file,
            may be read or written by others, or holds no Ed25519 key that the
            passphrase opens.
    """
    pem = _read_private(path)
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The library's own text is left out: it may quote what it read.
        raise KeyFileRefused(
            f"{path} holds no private key that this passphrase opens"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileRefused(f"{path} holds a key of another kind than Ed25519")
    return Identity(key)


def _signed(label: Label, body: bytes) -> bytes:
    return fields(_DOMAIN, label.value.encode(), body)


def _write_new(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)  # Whatever the umask is.
        file.write(data)
        file.flush()
        os.fsync(handle)


def _read_private(path: Path) -> bytes:
    # O_NONBLOCK: a pipe in the key's place must not hang the agent.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(path, flags)
    except OSError as error:
        raise KeyFileRefused(f"cannot open {path}: {error.strerror}") from error
    try:
        _check_private(path, os.fstat(handle))
        data = os.read(handle, MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileRefused(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(handle)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise KeyFileRefused(f"{path} is too long for a key file")
    return data


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileRefused(f"{path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileRefused(
            f"{path} belongs to user {status.st_uid}, not to this process's user"
        )
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileRefused(
            f"{path} has mode {mode:04o}: others may reach the key; chmod it to 0600 "
            "and, if anyone else had access, make a new identity"
        )
