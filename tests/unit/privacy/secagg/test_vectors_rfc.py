"""Published vectors of every primitive that the protocol rests on."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand


def x25519(scalar: bytes, point: bytes) -> bytes:
    """The function of RFC 7748, section 5."""
    key = X25519PrivateKey.from_private_bytes(scalar)
    return key.exchange(X25519PublicKey.from_public_bytes(point))


def test_x25519_of_rfc_7748():
    """Section 5.2, first vector."""
    scalar = "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4"
    point = "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c"
    expected = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    actual = x25519(bytes.fromhex(scalar), bytes.fromhex(point))
    assert expected == actual.hex()


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (1, "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"),
        (1000, "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"),
    ],
)
def test_x25519_iterated(iterations: int, expected: str):
    """Section 5.2, the iterated function."""
    scalar = point = bytes([9]) + bytes(31)
    for _ in range(iterations):
        scalar, point = x25519(scalar, point), scalar
    assert expected == scalar.hex()


def test_hkdf_of_rfc_5869():
    """Appendix A.1."""
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    prk = HKDF.extract(SHA256(), salt, b"\x0b" * 22)
    expected = "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    assert expected == prk.hex()
    okm = HKDFExpand(SHA256(), 42, info).derive(prk)
    assert okm.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
        "34007208d5b887185865"
    )


@pytest.mark.parametrize(
    ("secret", "public", "message", "expected"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            (
                "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
                "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
            ),
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            (
                "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
                "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
            ),
        ),
    ],
)
def test_ed25519_of_rfc_8032(secret: str, public: str, message: str, expected: str):
    """Section 7.1, tests 1 and 3."""
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    assert public == key.public_key().public_bytes_raw().hex()
    assert expected == key.sign(bytes.fromhex(message)).hex()


def test_aes_256_gcm_of_mcgrew_and_viega():
    """The GCM specification, test case 14."""
    sealed = AESGCM(bytes(32)).encrypt(bytes(12), bytes(16), None)
    assert sealed.hex() == (
        "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"
    )
