"""Messages of secure aggregation: what each one says, and its one encoding.

The table of SECURE_AGGREGATION.md, section 2.3. Masked vectors are not here: they
travel beside these messages, and a ``Head`` signs their digests. Every message is
checked for form when it is read; who may say it, and when, is checked by the state
machines in ``setup``, ``client`` and ``server``.

A message is LP of its tag, then its attributes in the order in which they are listed,
in the spelling of ``canonical``: bytes as LP, a number as u64, a list as numbers, a
mapping as map. A signature comes last, as LP, and is over everything between the tag
and itself; that of an ``Offer`` is over the contract's bytes alone.

A network observer who reads these messages *and* the masked vectors learns what the
aggregator learns. Transport encryption is required, and is not done here.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from privacy.secagg.agreement.canonical import (
    MAX_MESSAGE_BYTES,
    Reader,
    byte_map,
    fields,
    lp,
    numbers,
    u64,
)
from privacy.secagg.agreement.contract import DIGEST_BYTES, MAX_MEMBERS, Member
from privacy.secagg.agreement.identity import (
    SIGNATURE_BYTES,
    Identity,
    Label,
    PublicIdentity,
)
from privacy.secagg.arithmetic.shamir import SHARE_BYTES
from privacy.secagg.protocol.key_schedule import (
    KEM_CIPHERTEXT_BYTES,
    KEM_PUBLIC_BYTES,
    TAG_BYTES,
    X25519_BYTES,
    PublicRunKeys,
)

NONCE_BYTES = 32
MAX_CONTRACT_BYTES = 1 << 16

_MAX_SHARES_BYTES = MAX_MEMBERS * SHARE_BYTES
_MAX_SEALED_BYTES = _MAX_SHARES_BYTES + TAG_BYTES
_MAX_ADVERT_BYTES = 2048
_MAX_ROW_BYTES = MAX_MEMBERS * DIGEST_BYTES
_MAX_DEALT_BYTES = (MAX_MEMBERS + 1) * DIGEST_BYTES
_MAX_HEAD_BYTES = _MAX_DEALT_BYTES + 512


def _number(reader: Reader) -> int:
    return reader.u64("number", low=1, high=MAX_MEMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """S1, aggregator to sites: the contract, signed.

    Attributes:
        contract: Canonical bytes of Q.
        signature: By the aggregator, over ``contract``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/offer"
    contract: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return fields(self.TAG, self.contract, self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Offer":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            contract=reader.field("contract", limit=MAX_CONTRACT_BYTES),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Advert:
    """S1, site to aggregator: its public keys for this run.

    Attributes:
        contract_hash: h_Q of the contract that the site accepts.
        number: The site's number i.
        keys: C_i, E_i and K_i.
        nonce: 32 random bytes, so that no two setups are alike.
        signature: By the site, over ``signed``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/advert"
    LABEL: ClassVar[Label] = Label.ADVERT
    contract_hash: bytes
    number: int
    keys: PublicRunKeys
    nonce: bytes
    signature: bytes = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        keys = fields(self.keys.mask, self.keys.channel, self.keys.kem)
        return lp(self.contract_hash) + u64(self.number) + keys + lp(self.nonce)

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + self.signed + lp(self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Advert":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            contract_hash=reader.field("contract_hash", size=DIGEST_BYTES),
            number=_number(reader),
            keys=PublicRunKeys(
                mask=reader.field("mask key", size=X25519_BYTES),
                channel=reader.field("channel key", size=X25519_BYTES),
                kem=reader.field("ML-KEM key", limit=KEM_PUBLIC_BYTES),
            ),
            nonce=reader.field("nonce", size=NONCE_BYTES),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """S2, aggregator to sites: everybody's advert.

    Attributes:
        adverts: Encoded adverts by number.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/book"
    adverts: Mapping[int, bytes]

    @property
    def setup_hash(self) -> bytes:
        """h_U: SHA-256 of the encoded book."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + byte_map(self.adverts)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Book":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        adverts = reader.byte_map(
            "adverts", max_entries=MAX_MEMBERS, limit=_MAX_ADVERT_BYTES
        )
        reader.end()
        return cls(adverts=adverts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """S2, site to aggregator: it saw this book, and its half of the hybrid.

    Attributes:
        setup_hash: h_U of the book that the site saw.
        number: The site's number i.
        ciphertexts: ML-KEM ciphertexts for each j > i; empty without the hybrid.
        signature: By the site, over ``signed``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/confirm"
    LABEL: ClassVar[Label] = Label.CONFIRM
    setup_hash: bytes
    number: int
    ciphertexts: Mapping[int, bytes]
    signature: bytes = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        ciphertexts = byte_map(self.ciphertexts)
        return lp(self.setup_hash) + u64(self.number) + ciphertexts

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + self.signed + lp(self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Confirm":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            setup_hash=reader.field("setup_hash", size=DIGEST_BYTES),
            number=_number(reader),
            ciphertexts=reader.byte_map(
                "ciphertexts", max_entries=MAX_MEMBERS, size=KEM_CIPHERTEXT_BYTES
            ),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirms:
    """R1 of the first round, aggregator to sites: everybody's confirm.

    Attributes:
        confirms: Encoded confirms by number.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/confirms"
    confirms: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + byte_map(self.confirms)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Confirms":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        confirms = reader.byte_map(
            "confirms", max_entries=MAX_MEMBERS, limit=MAX_MESSAGE_BYTES
        )
        reader.end()
        return cls(confirms=confirms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """R1, the signed part of a masked answer.

    Attributes:
        number: The site's number i.
        context: ctx_r as the site sees it.
        vector_digest: h_y, SHA-256 of the masked vector as it travels.
        header_digest: SHA-256 of the masked header as it travels.
        dealt: P2: ``commitments.dealt_digests`` of all holders. Empty in P1.
        signature: By the site, over ``signed``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/head"
    LABEL: ClassVar[Label] = Label.HEAD
    number: int
    context: bytes
    vector_digest: bytes
    header_digest: bytes
    dealt: bytes
    signature: bytes = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        return u64(self.number) + fields(
            self.context, self.vector_digest, self.header_digest, self.dealt
        )

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + self.signed + lp(self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Head":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            number=_number(reader),
            context=reader.field("context", size=DIGEST_BYTES),
            vector_digest=reader.field("vector_digest", size=DIGEST_BYTES),
            header_digest=reader.field("header_digest", size=DIGEST_BYTES),
            dealt=reader.field("dealt", limit=_MAX_DEALT_BYTES),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """R1, site to aggregator: the head, and P2's sealed shares and commitments.

    Attributes:
        head: Encoded ``Head``.
        sealed: For each other site j, what ``keys.seal`` makes of its shares: of b_i,
            then of k_il for every l but i, in the order of l, one after another.
            Empty in P1.
        rows: For each holder, this site and 0 among them, the commitments to what it
            is dealt: ``commitments.commit``. Empty in P1.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/masked"
    head: bytes
    sealed: Mapping[int, bytes]
    rows: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        dealt = byte_map(self.sealed) + byte_map(self.rows)
        return fields(self.TAG, self.head) + dealt

    @classmethod
    def from_bytes(cls, data: bytes) -> "Masked":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            head=reader.field("head", limit=_MAX_HEAD_BYTES),
            sealed=_sealed(reader),
            rows=_rows(reader),
        )
        reader.end()
        return message

    @classmethod
    def read_number(cls, data: bytes) -> int:
        """Read who says that it has sent this, and nothing else of it.

        What follows the head is long with many sites, and is read once, by
        ``from_bytes``.

        Raises:
            MalformedMessage: It does not begin with a head.
        """
        head = Reader(data, cls.TAG).field("head", limit=_MAX_HEAD_BYTES)
        return Head.from_bytes(head).number


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """R1, site to aggregator: no answer will come in this round.

    Attributes:
        number: The site's number i.
        context: ctx_r as the site sees it.
        signature: By the site, over ``signed``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/decline"
    LABEL: ClassVar[Label] = Label.DECLINE
    number: int
    context: bytes
    signature: bytes = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        return u64(self.number) + lp(self.context)

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + self.signed + lp(self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decline":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            number=_number(reader),
            context=reader.field("context", size=DIGEST_BYTES),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """R2, aggregator to survivors: A, as the signed heads of its sites.

    Attributes:
        heads: Encoded heads by number. Their numbers are A: there is no other
            list that could contradict them.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/survivors"
    heads: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + byte_map(self.heads)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Survivors":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        heads = reader.byte_map("heads", max_entries=MAX_MEMBERS, limit=_MAX_HEAD_BYTES)
        reader.end()
        return cls(heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """R2, site to aggregator: Cons, its signature over the one list A.

    Attributes:
        number: The site's number i.
        context: ctx_r.
        survivors: A, increasing.
        signature: By the site, over ``signed``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/consent"
    LABEL: ClassVar[Label] = Label.SURVIVORS
    number: int
    context: bytes
    survivors: tuple[int, ...]
    signature: bytes = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        return u64(self.number) + lp(self.context) + numbers(self.survivors)

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + self.signed + lp(self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Consent":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            number=_number(reader),
            context=reader.field("context", size=DIGEST_BYTES),
            survivors=reader.numbers("survivors", limit=MAX_MEMBERS),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Reveal:
    """R3, aggregator to a survivor: the consents, and the shares sealed for it.

    It names no secret that is wanted: what is released follows from A alone.

    Attributes:
        consents: Encoded consents by number.
        inbox: For each other survivor j, what j sealed for this site.
        rows: For each other survivor j, its commitments to these shares.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/reveal"
    consents: Mapping[int, bytes]
    inbox: Mapping[int, bytes]
    rows: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        maps = map(byte_map, (self.consents, self.inbox, self.rows))
        return lp(self.TAG) + b"".join(maps)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Reveal":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            consents=reader.byte_map(
                "consents", max_entries=MAX_MEMBERS, limit=_MAX_ADVERT_BYTES
            ),
            inbox=_sealed(reader),
            rows=_rows(reader),
        )
        reader.end()
        return message


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shares:
    """R3, site to aggregator: its shares of what A opens.

    Attributes:
        number: The site's number i.
        context: ctx_r.
        self_shares: For each j in A that is not disputed, the share of b_j.
        pair_shares: For each of them, the shares of k_jl for every l that dropped
            out, in the order of l, one after another.
        disputed: Survivors that dealt this site something else than they committed
            to, increasing. No share of theirs is released, and none is opened.
        signature: By the site, over ``signed``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/shares"
    LABEL: ClassVar[Label] = Label.SHARES
    number: int
    context: bytes
    self_shares: Mapping[int, bytes]
    pair_shares: Mapping[int, bytes]
    disputed: tuple[int, ...] = ()
    signature: bytes = b""

    @property
    def signed(self) -> bytes:
        """What ``signature`` is over."""
        return b"".join(
            [
                u64(self.number),
                lp(self.context),
                byte_map(self.self_shares),
                byte_map(self.pair_shares),
                numbers(self.disputed),
            ]
        )

    def to_bytes(self) -> bytes:
        """The canonical encoding."""
        return lp(self.TAG) + self.signed + lp(self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Shares":
        """Read the canonical encoding; ``MalformedMessage`` if it is none."""
        reader = Reader(data, cls.TAG)
        message = cls(
            number=_number(reader),
            context=reader.field("context", size=DIGEST_BYTES),
            self_shares=reader.byte_map(
                "self_shares", max_entries=MAX_MEMBERS, size=SHARE_BYTES
            ),
            pair_shares=reader.byte_map(
                "pair_shares", max_entries=MAX_MEMBERS, limit=_MAX_SHARES_BYTES
            ),
            disputed=reader.numbers("disputed", limit=MAX_MEMBERS),
            signature=reader.field("signature", size=SIGNATURE_BYTES),
        )
        reader.end()
        return message


def _rows(reader: Reader) -> dict[int, bytes]:
    return reader.byte_map("rows", max_entries=MAX_MEMBERS + 1, limit=_MAX_ROW_BYTES)


def _sealed(reader: Reader) -> dict[int, bytes]:
    return reader.byte_map(
        "sealed shares", max_entries=MAX_MEMBERS, limit=_MAX_SEALED_BYTES
    )


_Signed = TypeVar("_Signed", Advert, Confirm, Head, Decline, Consent, Shares)


def sign(message: _Signed, identity: Identity) -> _Signed:
    """Fill in the signature of a message."""
    signature = identity.sign(message.LABEL, message.signed)
    return dataclasses.replace(message, signature=signature)


def verify(message: _Signed, member: Member) -> None:
    """Check that a member signed a message with the key that is pinned for it.

    Raises:
        BadSignature: It did not.
    """
    PublicIdentity(member.public_key).verify(
        message.LABEL, message.signed, message.signature, who=f"site {member.site!r}"
    )
