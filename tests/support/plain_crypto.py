"""Symmetric and curve primitives in plain Python, for tests only.

Slow, and not in constant time. Written from the standards, with integers and
``hashlib`` alone, so that vectors made with a library can be checked without it:

* AES-256 of FIPS 197, counter mode of SP 800-38A, GCM of SP 800-38D
* HKDF over SHA-256 of RFC 5869
* X25519 of RFC 7748 and Ed25519 of RFC 8032
* Shamir's secret sharing over the field of 2^256 + 297
"""

import hashlib
import hmac
import itertools
from collections.abc import Mapping, Sequence

# --- AES-256, FIPS 197 ---------------------------------------------------------


def _double(value: int) -> int:
    value <<= 1
    return value ^ 0x11B if value & 0x100 else value


def _product(left: int, right: int) -> int:
    """Multiplication in the field of 2^8, section 4.2."""
    result = 0
    while right:
        if right & 1:
            result ^= left
        left, right = _double(left), right >> 1
    return result


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> (8 - by)) & 0xFF


def _make_sbox() -> list[int]:
    """Inverse, then the affine map of section 5.1.1."""
    inverses = [0] * 256
    for a in range(1, 256):
        inverses[a] = next(b for b in range(1, 256) if _product(a, b) == 1)
    return [
        0x63 ^ v ^ _rotated(v, 1) ^ _rotated(v, 2) ^ _rotated(v, 3) ^ _rotated(v, 4)
        for v in inverses
    ]


_SBOX = _make_sbox()
_TWICE = [_double(v) for v in range(256)]


def _round_keys(key: bytes) -> list[bytes]:
    """KeyExpansion for 256 bits: 15 round keys, section 5.2."""
    words = [list(key[at : at + 4]) for at in range(0, 32, 4)]
    constant = 1
    for i in range(8, 60):
        word = list(words[i - 1])
        if i % 8 == 0:
            word = [_SBOX[v] for v in word[1:] + word[:1]]
            word[0] ^= constant
            constant = _double(constant)
        elif i % 8 == 4:
            word = [_SBOX[v] for v in word]
        words.append([a ^ b for a, b in zip(word, words[i - 8], strict=True)])
    flat = bytes(itertools.chain.from_iterable(words))
    return [flat[at : at + 16] for at in range(0, len(flat), 16)]


def _mixed(column: list[int]) -> list[int]:
    """MixColumns of one column, section 5.1.3."""
    total = column[0] ^ column[1] ^ column[2] ^ column[3]
    return [
        column[i] ^ total ^ _TWICE[column[i] ^ column[(i + 1) % 4]] for i in range(4)
    ]


def _encrypt(round_keys: list[bytes], block: bytes) -> bytes:
    state = [a ^ b for a, b in zip(block, round_keys[0], strict=True)]
    for at, round_key in enumerate(round_keys[1:], start=1):
        state = [_SBOX[v] for v in state]
        # ShiftRows: byte r of column c comes from column c + r.
        state = [state[(i + 4 * (i % 4)) % 16] for i in range(16)]
        if at < 14:
            columns = (_mixed(state[c : c + 4]) for c in range(0, 16, 4))
            state = list(itertools.chain.from_iterable(columns))
        state = [a ^ b for a, b in zip(state, round_key, strict=True)]
    return bytes(state)


def aes256(key: bytes, block: bytes) -> bytes:
    """One block of 16 bytes."""
    return _encrypt(_round_keys(key), block)


def ctr_stream(key: bytes, num_bytes: int, counter: int = 0) -> bytes:
    """Keystream of counter mode; the counter is 128 bits, big-endian."""
    round_keys = _round_keys(key)
    blocks = [
        _encrypt(round_keys, ((counter + i) % (1 << 128)).to_bytes(16, "big"))
        for i in range(-(-num_bytes // 16))
    ]
    return b"".join(blocks)[:num_bytes]


# --- AES-256-GCM, SP 800-38D ---------------------------------------------------


def _ghash(subkey: int, data: bytes) -> int:
    """Algorithm 2, over the field of 2^128 with bits in reflected order."""
    digest = 0
    for at in range(0, len(data), 16):
        digest ^= int.from_bytes(data[at : at + 16], "big")
        result, factor = 0, subkey
        for bit in range(127, -1, -1):
            if digest >> bit & 1:
                result ^= factor
            factor = factor >> 1 ^ (0xE1 << 120 if factor & 1 else 0)
        digest = result
    return digest


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def gcm_seal(key: bytes, nonce: bytes, plaintext: bytes, data: bytes) -> bytes:
    """Ciphertext and 16-byte tag, for a nonce of 12 bytes; algorithm 4."""
    first = int.from_bytes(nonce + b"\0\0\0\1", "big")
    stream = ctr_stream(key, len(plaintext), first + 1)
    sealed = bytes(a ^ b for a, b in zip(plaintext, stream, strict=True))
    lengths = (8 * len(data)).to_bytes(8, "big") + (8 * len(sealed)).to_bytes(8, "big")
    subkey = int.from_bytes(aes256(key, bytes(16)), "big")
    digest = _ghash(subkey, _padded(data) + _padded(sealed) + lengths)
    tag = digest ^ int.from_bytes(aes256(key, first.to_bytes(16, "big")), "big")
    return sealed + tag.to_bytes(16, "big")


# --- HKDF, RFC 5869 ------------------------------------------------------------


def extract(salt: bytes, material: bytes) -> bytes:
    """HKDF-Extract over SHA-256."""
    return hmac.new(salt or bytes(32), material, hashlib.sha256).digest()


def expand(key: bytes, info: bytes, num_bytes: int = 32) -> bytes:
    """HKDF-Expand over SHA-256."""
    out = piece = b""
    for number in range(1, -(-num_bytes // 32) + 1):
        piece = hmac.new(key, piece + info + bytes([number]), hashlib.sha256).digest()
        out += piece
    return out[:num_bytes]


# --- Curve25519, RFC 7748 and RFC 8032 -----------------------------------------

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)  # a square root of -1


def _clamped(data: bytes) -> int:
    scalar = int.from_bytes(data, "little")
    return scalar & ~7 & (1 << 255) - 1 | 1 << 254


def x25519(secret: bytes, point: bytes) -> bytes:
    """The Montgomery ladder of RFC 7748, section 5."""
    scalar = _clamped(secret)
    x1 = int.from_bytes(point, "little") & (1 << 255) - 1
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        swap = scalar >> bit & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb, aa, bb = d * a % _P, c * b % _P, a * a % _P, b * b % _P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _P, x1 * (da - cb) ** 2 % _P
        x2, z2 = aa * bb % _P, e * (aa + 121665 * e) % _P
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, _P) % _P).to_bytes(32, "little")


_Point = tuple[int, int, int, int]  # extended coordinates X, Y, Z, T


def _add(p: _Point, q: _Point) -> _Point:
    """RFC 8032, section 5.1.4."""
    a = (p[1] - p[0]) * (q[1] - q[0]) % _P
    b = (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(scalar: int, point: _Point) -> _Point:
    result: _Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point, scalar = _add(point, point), scalar >> 1
    return result


def _base() -> _Point:
    y = 4 * pow(5, -1, _P) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _ROOT % _P
    x = x if x % 2 == 0 else _P - x
    return x, y, 1, x * y % _P


_BASE = _base()


def _compressed(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def ed25519_public(secret: bytes) -> bytes:
    """RFC 8032, section 5.1.5."""
    scalar = _clamped(hashlib.sha512(secret).digest()[:32])
    return _compressed(_times(scalar, _BASE))


def ed25519_sign(secret: bytes, message: bytes) -> bytes:
    """RFC 8032, section 5.1.6."""
    digest = hashlib.sha512(secret).digest()
    scalar, public = _clamped(digest[:32]), ed25519_public(secret)
    nonce = int.from_bytes(hashlib.sha512(digest[32:] + message).digest(), "little")
    first = _compressed(_times(nonce % _ORDER, _BASE))
    challenge = hashlib.sha512(first + public + message).digest()
    second = (nonce + int.from_bytes(challenge, "little") * scalar) % _ORDER
    return first + second.to_bytes(32, "little")


# --- Shamir's secret sharing ---------------------------------------------------

_FIELD = 2**256 + 297


def share(secret: bytes, higher: Sequence[int], holder: int) -> bytes:
    """Value at ``holder`` of secret + c_1 x + c_2 x^2 + ..., ``higher`` the c_k."""
    value = int.from_bytes(secret, "big")
    for k, coefficient in enumerate(higher, start=1):
        value += coefficient * holder**k
    return (value % _FIELD).to_bytes(33, "big")


def restore(shares: Mapping[int, bytes]) -> bytes:
    """The value at 0 of the polynomial through all points."""
    total = 0
    for x, data in shares.items():
        weight = 1
        for other in shares:
            if other != x:
                weight = weight * other * pow(other - x, -1, _FIELD) % _FIELD
        total += weight * int.from_bytes(data, "big")
    return (total % _FIELD).to_bytes(32, "big")
