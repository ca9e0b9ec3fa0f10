"""Keys of one run: made in memory, derived for one round, overwritten after it.

SECURE_AGGREGATION.md, section 2.2, with HKDF of RFC 5869 over SHA-256, X25519 of
RFC 7748 and ML-KEM-768 of FIPS 203. For each pair of sites two roots::

    R_ij = HKDF-Extract(salt = h_U, X25519(c_i, C_j) || ss_ij)     masks
    E_ij = HKDF-Extract(salt = h_U, X25519(e_i, E_j) || ss_ij)     share channel

where ss_ij is the ML-KEM secret that the lower number encapsulates (absent without
the hybrid). Both are ratcheted before a round's answer is made::

    k_ij^r    = HKDF-Expand(R^r, LP("mask") || ctx_r || u64 min || u64 max)
    s_i->j^r  = HKDF-Expand(E^r, LP("share channel") || ctx_r || u64 i || u64 j)
    R^(r+1)   = HKDF-Expand(R^r, LP("ratchet") || u64(r + 1)), and R^r is erased

From a round secret, which is k_ij^r or the self mask b_i, come the keys of its two
streams: ``HKDF-Expand(secret, LP("stream") || LP("vector" or "header") || ctx_r)``.
Thus no key serves two purposes, and what is shared through Shamir is one secret.

Secrets lie in byte arrays and are overwritten. Python gives no more than that: the
exchange and the extraction return immutable bytes, which live until they are
collected, and the operating system may have swapped them out.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import (
    MLKEM768PrivateKey,
    MLKEM768PublicKey,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from privacy.keystream import RandomBytes
from privacy.secagg.agreement.canonical import fields, lp, numbers, u64
from privacy.secagg.agreement.contract import SUITE
from privacy.secagg.agreement.message import DIGEST_BYTES
from privacy.secagg.errors import BadShare, OutOfOrder, WeakKey

SECRET_BYTES = 32
X25519_BYTES = 32
KEM_PUBLIC_BYTES = 1184
KEM_CIPHERTEXT_BYTES = 1088
TAG_BYTES = 16

_KEM_SEED_BYTES = 64
# Each channel key seals exactly one message, so the nonce may be constant.
_NONCE = bytes(12)

# Told the purpose and the SHA-256 of every derived key: tests prove with it that no
# key is made twice. Never set in production: it is for an auditor's own key log.
Audit = Callable[[str, bytes], None]


class Secret:
    """A secret in memory that can be overwritten; it cannot be printed or copied."""

    __slots__ = ("_buffer",)

    def __init__(self, data: bytes | bytearray) -> None:
        """Take a copy of ``data``."""
        self._buffer: bytearray | None = bytearray(data)

    @property
    def buffer(self) -> bytearray:
        """The bytes themselves, not a copy.

        Raises:
            OutOfOrder: The secret has been erased.
        """
        if self._buffer is None:
            raise OutOfOrder("a secret was used after its round or run had ended")
        return self._buffer

    @property
    def erased(self) -> bool:
        """Whether the secret was overwritten."""
        return self._buffer is None

    def erase(self) -> None:
        """Overwrite the bytes and forget them."""
        if self._buffer is not None:
            wipe(self._buffer)
        self._buffer = None

    def __repr__(self) -> str:
        """Say nothing."""
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError("a secret does not leave its process")


def wipe(buffer: bytearray) -> None:
    """Overwrite an array with zeros."""
    buffer[:] = bytes(len(buffer))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Stream:
    """One keystream of a mask: the key and whether it is added or subtracted.

    Attributes:
        key: 32 bytes, overwritten when the round has ended.
        sign: 1 or -1.
    """

    key: bytearray
    sign: Literal[1, -1]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class RoundMasks:
    """All masks of one site's answer in one round.

    Attributes:
        vector: Streams over the update, in words of the ring.
        header: Streams over the header, in 64-bit words.
    """

    vector: tuple[Stream, ...]
    header: tuple[Stream, ...]

    def erase(self) -> None:
        """Overwrite every key."""
        for stream in (*self.vector, *self.header):
            wipe(stream.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """A round's facts, as each party sees them.

    Attributes:
        round_index: r, from 1.
        cohort: U_r, numbers of the sites that are asked, increasing.
        model_digest: H(theta_r), SHA-256 of the global model.
        task_digest: task_r, SHA-256 of what is asked of the model: the kind of work
            and the clip norm.

    Digests are computed by each party that has these facts, never taken from a message.
    """

    round_index: int
    cohort: tuple[int, ...]
    model_digest: bytes
    task_digest: bytes

    def __post_init__(self) -> None:
        """Check the digests' length."""
        if {len(self.model_digest), len(self.task_digest)} != {DIGEST_BYTES}:
            raise ValueError(
                f"digests of model and task must have {DIGEST_BYTES} bytes"
            )


def round_context(
    facts: RoundFacts, *, contract_hash: bytes, setup_hash: bytes, job_digest: bytes
) -> bytes:
    """ctx_r of section 2.2: one hash of everything that a round is about.

    Args:
        facts: The round.
        contract_hash: h_Q.
        setup_hash: h_U.
        job_digest: h_job of the job that the caller works on. It is in h_Q too, where
            a site has compared it with its own; here it needs no comparison.
    """
    return hashlib.sha256(
        fields(
            SUITE.encode(),
            contract_hash,
            setup_hash,
            u64(facts.round_index),
            facts.model_digest,
            numbers(facts.cohort),
            facts.task_digest,
            job_digest,
        )
    ).digest()


def expand(secret: bytearray, info: bytes) -> bytearray:
    """HKDF-Expand to 32 bytes, RFC 5869 section 2.3."""
    out = bytearray(SECRET_BYTES)
    HKDFExpand(SHA256(), SECRET_BYTES, info).derive_into(secret, out)
    return out


def masks_of(
    secrets: Iterable[tuple[bytearray, Literal[1, -1]]],
    context: bytes,
    *,
    audit: Audit | None = None,
) -> RoundMasks:
    """The vector and header streams of round secrets, each with its sign."""
    vector: list[Stream] = []
    header: list[Stream] = []
    for secret, sign in secrets:
        for part, streams in (("vector", vector), ("header", header)):
            key = expand(secret, fields(b"stream", part.encode()) + context)
            note(audit, f"{part} stream", key)
            streams.append(Stream(key=key, sign=sign))
    return RoundMasks(vector=tuple(vector), header=tuple(header))


def sign_of(own: int, peer: int) -> Literal[1, -1]:
    """Sign of a pair's stream at ``own``: plus towards higher numbers."""
    return 1 if peer > own else -1


def note(audit: Audit | None, purpose: str, key: bytearray) -> None:
    """Report a derived key to an auditor, by its hash."""
    if audit is not None:
        audit(purpose, hashlib.sha256(key).digest())


def pair_root(*, exchange: bytes, kem_secret: bytes, setup_hash: bytes) -> Secret:
    """R_ij^(1) or E_ij^(1): HKDF-Extract with h_U as salt, RFC 5869 section 2.2."""
    material = bytearray(exchange + kem_secret)
    root = Secret(HKDF.extract(SHA256(), setup_hash, material))
    wipe(material)
    return root


def encapsulate(peer_key: bytes) -> tuple[bytes, bytes]:
    """ML-KEM-768 encapsulation: the secret and its ciphertext.

    The randomness is the library's own, from the OS: it cannot be injected.

    Raises:
        WeakKey: ``peer_key`` is not an encapsulation key (FIPS 203, section 7.2).
    """
    try:
        return MLKEM768PublicKey.from_public_bytes(peer_key).encapsulate()
    except ValueError:
        raise WeakKey("a site's ML-KEM key is not an encapsulation key") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicRunKeys:
    """The public half of a site's keys for one run.

    Attributes:
        mask: C_i, X25519, 32 bytes.
        channel: E_i, X25519, 32 bytes.
        kem: K_i, ML-KEM-768, 1184 bytes; empty without the hybrid.
    """

    mask: bytes
    channel: bytes
    kem: bytes


class RunKeys:
    """The private half: it lives from the advert until the roots are made."""

    __slots__ = ("_channel", "_kem", "_mask", "public")

    def __init__(self, random_bytes: RandomBytes, *, hybrid: bool) -> None:
        """Make fresh keys."""
        mask = X25519PrivateKey.from_private_bytes(random_bytes(X25519_BYTES))
        channel = X25519PrivateKey.from_private_bytes(random_bytes(X25519_BYTES))
        kem = (
            MLKEM768PrivateKey.from_seed_bytes(random_bytes(_KEM_SEED_BYTES))
            if hybrid
            else None
        )
        self._mask, self._channel, self._kem = mask, channel, kem
        self.public = PublicRunKeys(
            mask=mask.public_key().public_bytes_raw(),
            channel=channel.public_key().public_bytes_raw(),
            kem=b"" if kem is None else kem.public_key().public_bytes_raw(),
        )

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """ML-KEM-768 decapsulation; a wrong ciphertext gives a random secret.

        Raises:
            WeakKey: The ciphertext has the wrong length.
        """
        if self._kem is None:
            raise WeakKey("there is no ML-KEM key in a run without the hybrid")
        try:
            return self._kem.decapsulate(ciphertext)
        except ValueError:
            raise WeakKey("an ML-KEM ciphertext has the wrong length") from None

    def exchange(self, peer: PublicRunKeys) -> tuple[bytes, bytes]:
        """The X25519 secrets with a peer: of the masks and of the share channel.

        Raises:
            WeakKey: A peer's key is of small order: the secret would be zero.
        """
        return _exchange(self._mask, peer.mask), _exchange(self._channel, peer.channel)

    def __repr__(self) -> str:
        """Say nothing."""
        return "RunKeys(...)"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError("run keys do not leave their process")


def _exchange(own: X25519PrivateKey, peer: bytes) -> bytes:
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise WeakKey("an X25519 key is of small order or malformed") from None
    # RFC 7748, section 6.1. The library refuses this itself; a later one may not.
    if not any(shared):
        raise WeakKey("an X25519 key is of small order")
    return shared


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class RoundPair:
    """A site's keys for one peer in one round.

    Attributes:
        mask: k_ij^r.
        send: Channel key from this site to the peer.
        receive: Channel key from the peer to this site.
    """

    mask: Secret
    send: Secret
    receive: Secret


class PairRoots:
    """R_ij and E_ij of one pair at one site, and the round that they stand at."""

    __slots__ = ("_channel", "_mask", "_own", "_peer", "round_index")

    def __init__(
        self, *, own: int, peer: int, mask_root: Secret, channel_root: Secret
    ) -> None:
        """Start at round 1."""
        self._own, self._peer = own, peer
        self._mask, self._channel = mask_root, channel_root
        self.round_index = 1

    def take_round(
        self, round_index: int, context: bytes, *, audit: Audit | None = None
    ) -> RoundPair:
        """Derive a round's keys and move on, so that they cannot be derived again.

        Raises:
            OutOfOrder: The roots are past this round, or erased.
        """
        if round_index < self.round_index:
            raise OutOfOrder(
                f"the keys of round {round_index} are erased: the run is at round "
                f"{self.round_index}"
            )
        while self.round_index < round_index:
            self._ratchet()
        low, high = sorted((self._own, self._peer))
        pair = RoundPair(
            mask=self._derive(self._mask, b"mask", context, low, high),
            send=self._channel_key(context, self._own, self._peer),
            receive=self._channel_key(context, self._peer, self._own),
        )
        self._ratchet()
        note(audit, "pair secret", pair.mask.buffer)
        note(audit, "share channel", pair.send.buffer)
        note(audit, "share channel", pair.receive.buffer)
        note(audit, "mask root", self._mask.buffer)
        note(audit, "channel root", self._channel.buffer)
        return pair

    def erase(self) -> None:
        """Overwrite both roots."""
        self._mask.erase()
        self._channel.erase()

    def _channel_key(self, context: bytes, sender: int, receiver: int) -> Secret:
        return self._derive(self._channel, b"share channel", context, sender, receiver)

    @staticmethod
    def _derive(
        root: Secret, label: bytes, context: bytes, first: int, second: int
    ) -> Secret:
        key = expand(root.buffer, lp(label) + context + u64(first) + u64(second))
        secret = Secret(key)
        wipe(key)
        return secret

    def _ratchet(self) -> None:
        following = self.round_index + 1
        self._mask = _next_root(self._mask, following)
        self._channel = _next_root(self._channel, following)
        self.round_index = following


def _next_root(root: Secret, round_index: int) -> Secret:
    key = expand(root.buffer, lp(b"ratchet") + u64(round_index))
    following = Secret(key)
    wipe(key)
    root.erase()
    return following


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class RunSecrets:
    """A site's secrets in memory, from the setup to the end of the run.

    Attributes:
        number: The site's own number i.
        contract_hash: h_Q.
        setup_hash: h_U.
        job_digest: h_job of the job that this site works on.
        roots: For each other site, R_ij and E_ij.
    """

    number: int
    contract_hash: bytes
    setup_hash: bytes
    job_digest: bytes
    roots: Mapping[int, PairRoots]

    @property
    def cohort(self) -> tuple[int, ...]:
        """The sites that the setup has keys of: U_r of every round under it."""
        return tuple(sorted({self.number, *self.roots}))

    def erase(self) -> None:
        """Overwrite every root: the site takes no further part in the run."""
        for pair in self.roots.values():
            pair.erase()


def channel_data(context: bytes, sender: int, receiver: int) -> bytes:
    """Associated data of a sealed message: ctx_r || u64 i || u64 j."""
    return context + u64(sender) + u64(receiver)


def seal(key: Secret, plaintext: bytearray, data: bytes) -> bytes:
    """AES-256-GCM with a key that is used once: ciphertext, then 16 bytes of tag.

    The nonce is 12 bytes of zero.
    """
    return AESGCM(key.buffer).encrypt(_NONCE, plaintext, data)


def unseal(key: Secret, ciphertext: bytes, data: bytes, *, who: str) -> bytearray:
    """Open what ``seal`` made.

    Raises:
        BadShare: The ciphertext was changed, or was made for someone or something
            else.
    """
    size = len(ciphertext) - TAG_BYTES
    if size < 0:
        raise BadShare(f"the sealed shares of {who} are too short")
    plaintext = bytearray(size)
    try:
        AESGCM(key.buffer).decrypt_into(_NONCE, ciphertext, data, plaintext)
    except InvalidTag:
        raise BadShare(
            f"the sealed shares of {who} were modified, or made for a different site "
            "or round"
        ) from None
    return plaintext
