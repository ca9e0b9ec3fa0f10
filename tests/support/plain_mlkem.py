"""ML-KEM-768 of FIPS 203 in plain Python, for tests only.

Slow, and not in constant time. Keys and encapsulation alone: their randomness is an
argument, which the library's encapsulation does not have. Polynomials are lists of
256 integers modulo 3329; algorithms are numbered as in the standard.
"""

import hashlib

Q = 3329
_K, _DU, _DV = 3, 10, 4

Poly = list[int]


def _bit_reversed(value: int) -> int:
    return int(f"{value:07b}"[::-1], 2)


_ZETAS = [pow(17, _bit_reversed(i), Q) for i in range(128)]
_GAMMAS = [pow(17, 2 * _bit_reversed(i) + 1, Q) for i in range(128)]


def _ntt(poly: Poly) -> Poly:
    """Algorithm 9."""
    f, i, length = list(poly), 1, 128
    while length >= 2:
        for start in range(0, 256, 2 * length):
            zeta, i = _ZETAS[i], i + 1
            for j in range(start, start + length):
                t = zeta * f[j + length] % Q
                f[j + length], f[j] = (f[j] - t) % Q, (f[j] + t) % Q
        length //= 2
    return f


def _inverse_ntt(poly: Poly) -> Poly:
    """Algorithm 10."""
    f, i, length = list(poly), 127, 2
    while length <= 128:
        for start in range(0, 256, 2 * length):
            zeta, i = _ZETAS[i], i - 1
            for j in range(start, start + length):
                t = f[j]
                f[j] = (t + f[j + length]) % Q
                f[j + length] = zeta * (f[j + length] - t) % Q
        length *= 2
    return [v * 3303 % Q for v in f]  # 3303 is the inverse of 128.


def _multiply(f: Poly, g: Poly) -> Poly:
    """Algorithms 11 and 12."""
    result = []
    for i, gamma in enumerate(_GAMMAS):
        a, b, c, d = f[2 * i], f[2 * i + 1], g[2 * i], g[2 * i + 1]
        result += [(a * c + b * d * gamma) % Q, (a * d + b * c) % Q]
    return result


def _plus(f: Poly, g: Poly) -> Poly:
    return [(a + b) % Q for a, b in zip(f, g, strict=True)]


def _inner(left: list[Poly], right: list[Poly]) -> Poly:
    total = [0] * 256
    for f, g in zip(left, right, strict=True):
        total = _plus(total, _multiply(f, g))
    return total


def _sample_ntt(seed: bytes) -> Poly:
    """Algorithm 7."""
    stream = hashlib.shake_128(seed).digest(3 * 1024)
    poly: Poly = []
    for a, b, c in zip(stream[::3], stream[1::3], stream[2::3], strict=True):
        poly += [v for v in (a + 256 * (b % 16), b // 16 + 16 * c) if v < Q]
    return poly[:256]


def _sample_cbd(seed: bytes, number: int) -> Poly:
    """Algorithm 8 with eta = 2, on PRF(seed, number)."""
    data = hashlib.shake_256(seed + bytes([number])).digest(128)
    bits = int.from_bytes(data, "little")
    poly = []
    for i in range(256):
        four = bits >> 4 * i & 15
        poly.append(((four & 1) + (four >> 1 & 1) - (four >> 2 & 1) - (four >> 3)) % Q)
    return poly


def _encode(poly: Poly, width: int) -> bytes:
    """Algorithm 5."""
    bits = sum(v << width * i for i, v in enumerate(poly))
    return bits.to_bytes(32 * width, "little")


def _decode(data: bytes, width: int) -> Poly:
    """Algorithm 6."""
    bits, mask = int.from_bytes(data, "little"), (1 << width) - 1
    return [(bits >> width * i & mask) % Q for i in range(256)]


def _compress(poly: Poly, width: int) -> Poly:
    """Equation 4.7: round(2^width / q * x) modulo 2^width."""
    return [((2 * (v << width) + Q) // (2 * Q)) % (1 << width) for v in poly]


def _matrix(rho: bytes) -> list[list[Poly]]:
    return [[_sample_ntt(rho + bytes([j, i])) for j in range(_K)] for i in range(_K)]


def public_key(seed: bytes) -> bytes:
    """Encapsulation key of the seed d || z; algorithm 13."""
    expanded = hashlib.sha3_512(seed[:32] + bytes([_K])).digest()
    rho, sigma = expanded[:32], expanded[32:]
    secret = [_ntt(_sample_cbd(sigma, n)) for n in range(_K)]
    noise = [_ntt(_sample_cbd(sigma, _K + n)) for n in range(_K)]
    matrix = _matrix(rho)
    rows = [_plus(_inner(matrix[i], secret), noise[i]) for i in range(_K)]
    return b"".join(_encode(row, 12) for row in rows) + rho


def encapsulate(key: bytes, message: bytes) -> tuple[bytes, bytes]:
    """Shared secret and ciphertext of the randomness ``message``; algorithm 17."""
    digest = hashlib.sha3_256(key).digest()
    expanded = hashlib.sha3_512(message + digest).digest()
    return expanded[:32], _encrypt(key, message, expanded[32:])


def _encrypt(key: bytes, message: bytes, coins: bytes) -> bytes:
    """Algorithm 14."""
    rows = [_decode(key[384 * i : 384 * (i + 1)], 12) for i in range(_K)]
    matrix = _matrix(key[384 * _K :])
    y = [_ntt(_sample_cbd(coins, n)) for n in range(_K)]
    noise = [_sample_cbd(coins, _K + n) for n in range(_K + 1)]
    columns = [[matrix[j][i] for j in range(_K)] for i in range(_K)]
    u = [_plus(_inverse_ntt(_inner(columns[i], y)), noise[i]) for i in range(_K)]
    # Decompress of single bits: 1 becomes round(q / 2).
    lifted = [1665 * bit for bit in _decode(message, 1)]
    v = _plus(_plus(_inverse_ntt(_inner(rows, y)), noise[_K]), lifted)
    pieces = [_encode(_compress(poly, _DU), _DU) for poly in u]
    return b"".join([*pieces, _encode(_compress(v, _DV), _DV)])
