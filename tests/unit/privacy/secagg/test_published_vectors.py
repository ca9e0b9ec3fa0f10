"""Vectors that others have published, for every primitive that the protocol uses.

Each is run on the library as the product calls it, and on the plain implementations
in ``support``, with which the protocol's own vectors are checked.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vectors
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from support import plain_crypto, plain_mlkem

from privacy import keystream as prg
from privacy.secagg.protocol import key_schedule as keys

PUBLISHED = json.loads(
    (Path(vectors.__path__[0]) / "published.json").read_text(encoding="ascii")
)

Row = dict[str, bytes]


def published(name: str) -> Any:
    """One test for each vector of a kind, with its fields as bytes."""
    rows = PUBLISHED[name]["vectors"]
    values = [{k: bytes.fromhex(v) for k, v in row.items()} for row in rows]
    return pytest.mark.parametrize("row", values, ids=range(len(values)))


@published("sha256")
def test_sha256(row: Row):
    """FIPS 180-4, by NIST's validation programme."""
    assert row["digest"] == hashlib.sha256(row["message"]).digest()


@published("hkdf_sha256")
def test_hkdf(row: Row):
    """RFC 5869; and what the product cuts to 32 bytes begins alike."""
    prk, size = HKDF.extract(SHA256(), row["salt"], row["ikm"]), len(row["okm"])
    assert row["prk"] == prk == plain_crypto.extract(row["salt"], row["ikm"])
    assert row["okm"] == HKDFExpand(SHA256(), size, row["info"]).derive(prk)
    assert row["okm"] == plain_crypto.expand(prk, row["info"], size)
    assert row["okm"][: keys.SECRET_BYTES] == bytes(
        keys.expand(bytearray(prk), row["info"])
    )


@published("hkdf_sha256")
def test_root_is_hkdf_extract(row: Row):
    """What becomes R_ij: both secrets, one after another, under h_U as salt."""
    root = keys.pair_root(
        exchange=row["ikm"][:5], kem_secret=row["ikm"][5:], setup_hash=row["salt"]
    )
    assert row["prk"] == bytes(root.buffer)


@published("x25519")
def test_x25519(row: Row):
    """RFC 7748."""
    key = X25519PrivateKey.from_private_bytes(row["scalar"])
    point = X25519PublicKey.from_public_bytes(row["point"])
    assert row["result"] == key.exchange(point)
    assert row["result"] == plain_crypto.x25519(row["scalar"], row["point"])


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (1, "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"),
        (1000, "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"),
    ],
)
def test_x25519_iterated(iterations: int, expected: str):
    """RFC 7748, section 5.2: a result is the next scalar, its scalar the point."""
    scalar = point = bytes([9]) + bytes(31)
    for _ in range(iterations):
        key = X25519PrivateKey.from_private_bytes(scalar)
        following = key.exchange(X25519PublicKey.from_public_bytes(point))
        scalar, point = following, scalar
    assert expected == scalar.hex()


@published("ed25519")
def test_ed25519(row: Row):
    """RFC 8032."""
    key = Ed25519PrivateKey.from_private_bytes(row["secret"])
    assert row["public"] == key.public_key().public_bytes_raw()
    assert row["public"] == plain_crypto.ed25519_public(row["secret"])
    assert row["signature"] == key.sign(row["message"])
    assert row["signature"] == plain_crypto.ed25519_sign(row["secret"], row["message"])
    key.public_key().verify(row["signature"], row["message"])


def product_stream(key: bytes, num_bytes: int, counter: int) -> bytes:
    """The keystream as masks have it."""
    words = np.zeros(-(-num_bytes // 8), np.uint64)
    prg.apply_masks_(words, [prg.Mask(key=key, sign=1)], first_word=2 * counter)
    return words.astype("<u8").tobytes()[:num_bytes]


@pytest.mark.parametrize("stream", [product_stream, plain_crypto.ctr_stream])
@published("aes256_ctr")
def test_aes_256_ctr(row: Row, stream: Callable[[bytes, int, int], bytes]):
    """SP 800-38A, F.5.5 and F.5.6, and RFC 3686."""
    counter = int.from_bytes(row["counter"], "big")
    mask = stream(row["key"], len(row["plaintext"]), counter)
    encrypted = bytes(a ^ b for a, b in zip(row["plaintext"], mask, strict=True))
    assert row["ciphertext"] == encrypted
    decrypted = bytes(a ^ b for a, b in zip(row["ciphertext"], mask, strict=True))
    assert row["plaintext"] == decrypted


@published("aes256_gcm")
def test_aes_256_gcm(row: Row):
    """McGrew and Viega's cases with a nonce of 96 bits, and NIST's."""
    sealed = row["ciphertext"] + row["tag"]
    cipher, data = AESGCM(row["key"]), row["data"]
    assert sealed == cipher.encrypt(row["nonce"], row["plaintext"], data)
    assert row["plaintext"] == cipher.decrypt(row["nonce"], sealed, data)
    plain = plain_crypto.gcm_seal(row["key"], row["nonce"], row["plaintext"], data)
    assert sealed == plain


@published("aes256_gcm_refused")
def test_aes_256_gcm_refuses_what_was_changed(row: Row):
    """NIST's cases that must fail."""
    with pytest.raises(InvalidTag):
        AESGCM(row["key"]).decrypt(
            row["nonce"], row["ciphertext"] + row["tag"], row["data"]
        )


@published("mlkem768_keys")
def test_mlkem_768_keys(row: Row):
    """FIPS 203, by NIST's validation programme: the public key of a seed."""
    seed = row["d"] + row["z"]
    key = MLKEM768PrivateKey.from_seed_bytes(seed).public_key().public_bytes_raw()
    assert row["public_sha3_256"] == hashlib.sha3_256(key).digest()
    assert key == plain_mlkem.public_key(seed)


@published("mlkem768")
def test_mlkem_768(row: Row):
    """FIPS 203: keys from a seed, decapsulation, and implicit rejection."""
    key = MLKEM768PrivateKey.from_seed_bytes(row["d"] + row["z"])
    assert row["public"] == key.public_key().public_bytes_raw()
    assert row["secret"] == key.decapsulate(row["ciphertext"])
    assert row["rejection_secret"] == key.decapsulate(row["wrong_ciphertext"])


@published("mlkem768")
def test_mlkem_768_with_given_randomness(row: Row):
    """FIPS 203: the plain implementation's keys and encapsulation."""
    assert row["public"] == plain_mlkem.public_key(row["d"] + row["z"])
    expected = row["secret"], row["ciphertext"]
    assert expected == plain_mlkem.encapsulate(row["public"], row["message"])
