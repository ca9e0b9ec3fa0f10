"""Who a site is: a long-lived Ed25519 key, its file and its signatures.

The private key is at the site, in a PEM file that only its owner can read; the
public half is pinned in the roster. Signatures are RFC 8032 over ``LP("xsa-v1
signature") || LP(label) || LP(bytes)``, so that a signature on one kind of message
never passes for another. Keys that live for one run are in ``keys``, not here.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from privacy.keystream import RandomBytes
from privacy.secagg.agreement.canonical import fields
from privacy.secagg.errors import BadSignature, KeyFileRefused
from privacy.secret_files import read_private, write_new

KEY_BYTES = 32
SIGNATURE_BYTES = 64

_DOMAIN = b"xsa-v1 signature"


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
    PROPOSAL = "proposal"  # of a run, by the aggregator
    PROMISE = "promise"  # of a site, for a run
    STATEMENTS = "statements"  # of all sites, passed on by the aggregator
    END = "end of a run"  # before its last round, by the aggregator
    DRAW = "draw"  # of groups: what a site commits itself with
    ENROLMENT = "enrolment"  # of a site: all its public keys
    LEDGER = "ledger head"  # of a site's privacy ledger, for itself
    RELAYED = "relayed sum"  # of a relay, over its sites' heads
    ROSTER = "roster"  # of a federation, by the operator of its sites
    EXPORT = "exported model"  # of all files of an export, by who gives it away


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
            _parsed(self.key)
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
        try:
            _parsed(self.key).verify(signature, _signed(label, body))
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
            write_new(path, pem)
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
    pem = read_private(path)
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The library's own text is left out: it may quote what it read.
        raise KeyFileRefused(
            f"{path} holds no private key that this passphrase opens"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileRefused(f"{path} holds a key that is not Ed25519")
    return Identity(key)


@lru_cache(maxsize=256)
def _parsed(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key)


def _signed(label: Label, body: bytes) -> bytes:
    return fields(_DOMAIN, label.value.encode(), body)
