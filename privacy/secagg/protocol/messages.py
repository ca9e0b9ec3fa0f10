"""Messages of secure aggregation: what each one says, and its one encoding.

The table of SECURE_AGGREGATION.md, section 2.3. Masked vectors are not here: they
travel beside these messages, and a ``Head`` signs their digests. Every message is
checked for form when it is read; who may say it, and when, is checked by the state
machines in ``setup``, ``client`` and ``server``.

How a message is spelt, ``agreement.message`` says; the signature of an ``Offer`` is
over the contract's bytes alone.

A network observer who reads these messages *and* the masked vectors learns what the
aggregator learns. Transport encryption is required, and is not done here.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from federation.ids import SiteId
from privacy.secagg.agreement.canonical import MAX_MESSAGE_BYTES, Reader, fields
from privacy.secagg.agreement.contract import MAX_MEMBERS, Member
from privacy.secagg.agreement.identity import SIGNATURE_BYTES, Label
from privacy.secagg.agreement.message import (
    DIGEST_BYTES,
    NAME,
    Digest,
    FieldCodec,
    Message,
    SignedMessage,
    increasing,
    octet_map,
    octets,
    whole,
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


MemberNumber = Annotated[int, whole(1, MAX_MEMBERS)]

_SEALED = octet_map(MAX_MEMBERS, limit=_MAX_SEALED_BYTES, named="sealed shares")
_ROWS = octet_map(MAX_MEMBERS + 1, limit=_MAX_ROW_BYTES)
_KEYS = FieldCodec(
    lambda keys: fields(keys.mask, keys.channel, keys.kem),
    lambda reader, _: PublicRunKeys(
        mask=reader.field("mask key", size=X25519_BYTES),
        channel=reader.field("channel key", size=X25519_BYTES),
        kem=reader.field("ML-KEM key", limit=KEM_PUBLIC_BYTES),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """S1, aggregator to sites: the contract, signed.

    Attributes:
        contract: Canonical bytes of Q.
        signature: By the aggregator, over ``contract``.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/offer"
    contract: Annotated[bytes, octets(limit=MAX_CONTRACT_BYTES)]
    signature: Annotated[bytes, octets(size=SIGNATURE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advert(SignedMessage):
    """S1, site to aggregator: its public keys for this run.

    Attributes:
        contract_hash: h_Q of the contract that the site accepts.
        number: The site's number i.
        keys: C_i, E_i and K_i.
        nonce: 32 random bytes, so that no two setups are alike.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/advert"
    LABEL: ClassVar[Label] = Label.ADVERT
    contract_hash: Digest
    number: MemberNumber
    keys: Annotated[PublicRunKeys, _KEYS]
    nonce: Annotated[bytes, octets(size=NONCE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Book(Message):
    """S2, aggregator to sites: everybody's advert.

    Attributes:
        adverts: Encoded adverts by number.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/book"
    adverts: Annotated[
        Mapping[int, bytes], octet_map(MAX_MEMBERS, limit=_MAX_ADVERT_BYTES)
    ]

    @property
    def setup_hash(self) -> bytes:
        """h_U: SHA-256 of the encoded book."""
        return hashlib.sha256(self.to_bytes()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm(SignedMessage):
    """S2, site to aggregator: it saw this book, and its half of the hybrid.

    Attributes:
        setup_hash: h_U of the book that the site saw.
        number: The site's number i.
        ciphertexts: ML-KEM ciphertexts for each j > i; empty without the hybrid.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/confirm"
    LABEL: ClassVar[Label] = Label.CONFIRM
    setup_hash: Digest
    number: MemberNumber
    ciphertexts: Annotated[
        Mapping[int, bytes], octet_map(MAX_MEMBERS, size=KEM_CIPHERTEXT_BYTES)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirms(Message):
    """R1 of the first round, aggregator to sites: everybody's confirm.

    Attributes:
        confirms: Encoded confirms by number.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/confirms"
    confirms: Annotated[
        Mapping[int, bytes], octet_map(MAX_MEMBERS, limit=MAX_MESSAGE_BYTES)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(SignedMessage):
    """R1, the signed part of a masked answer.

    Attributes:
        number: The site's number i.
        context: ctx_r as the site sees it.
        vector_digest: h_y, SHA-256 of the masked vector as it travels.
        header_digest: SHA-256 of the masked header as it travels.
        dealt: P2: ``commitments.dealt_digests`` of all holders. Empty in P1.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/head"
    LABEL: ClassVar[Label] = Label.HEAD
    number: MemberNumber
    context: Digest
    vector_digest: Digest
    header_digest: Digest
    dealt: Annotated[bytes, octets(limit=_MAX_DEALT_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedAnswer(Message):
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
    head: Annotated[bytes, octets(limit=_MAX_HEAD_BYTES)]
    sealed: Annotated[Mapping[int, bytes], _SEALED]
    rows: Annotated[Mapping[int, bytes], _ROWS]

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
class RelayedHead(SignedMessage):
    """R1, relay to aggregator: which sites' words its sum is of.

    A site's head holds the context of the run and the round.

    Attributes:
        relay: Its name.
        heads_digest: SHA-256 of the sites' heads, one after another, in the order of
            their numbers.
        vector_digest: SHA-256 of the sum of the masked vectors as it travels.
        header_digest: SHA-256 of the sum of the masked headers as it travels.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/relayed"
    LABEL: ClassVar[Label] = Label.RELAYED
    relay: Annotated[SiteId, NAME]
    heads_digest: Digest
    vector_digest: Digest
    header_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline(SignedMessage):
    """R1, site to aggregator: no answer will come in this round.

    Attributes:
        number: The site's number i.
        context: ctx_r as the site sees it.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/decline"
    LABEL: ClassVar[Label] = Label.DECLINE
    number: MemberNumber
    context: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Message):
    """R2, aggregator to survivors: A, as the signed heads of its sites.

    Attributes:
        heads: Encoded heads by number. Their numbers are A: there is no other
            list that could contradict them.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/survivors"
    heads: Annotated[Mapping[int, bytes], octet_map(MAX_MEMBERS, limit=_MAX_HEAD_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(SignedMessage):
    """R2, site to aggregator: Cons, its signature over the one list A.

    Attributes:
        number: The site's number i.
        context: ctx_r.
        survivors: A, increasing.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/consent"
    LABEL: ClassVar[Label] = Label.SURVIVORS
    number: MemberNumber
    context: Digest
    survivors: Annotated[tuple[int, ...], increasing(MAX_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reveal(Message):
    """R3, aggregator to a survivor: the consents, and the shares sealed for it.

    It names no requested secret: only A determines what is released.

    Attributes:
        consents: Encoded consents by number.
        inbox: For each other survivor j, what j sealed for this site.
        rows: For each other survivor j, its commitments to these shares.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/reveal"
    consents: Annotated[
        Mapping[int, bytes], octet_map(MAX_MEMBERS, limit=_MAX_ADVERT_BYTES)
    ]
    inbox: Annotated[Mapping[int, bytes], _SEALED]
    rows: Annotated[Mapping[int, bytes], _ROWS]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shares(SignedMessage):
    """R3, site to aggregator: its shares of what A opens.

    Attributes:
        number: The site's number i.
        context: ctx_r.
        self_shares: For each j in A that is not disputed, the share of b_j.
        pair_shares: For each of them, the shares of k_jl for every l that dropped
            out, in the order of l, one after another.
        disputed: Survivors that dealt this site something else than they committed
            to, increasing. No share of theirs is released, and none is opened.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/shares"
    LABEL: ClassVar[Label] = Label.SHARES
    number: MemberNumber
    context: Digest
    self_shares: Annotated[
        Mapping[int, bytes], octet_map(MAX_MEMBERS, size=SHARE_BYTES)
    ]
    pair_shares: Annotated[
        Mapping[int, bytes], octet_map(MAX_MEMBERS, limit=_MAX_SHARES_BYTES)
    ]
    disputed: Annotated[tuple[int, ...], increasing(MAX_MEMBERS)] = ()


def verify(message: SignedMessage, member: Member) -> None:
    """Check that a member signed a message with the key that is pinned for it.

    Raises:
        BadSignature: It did not.
    """
    message.verify(member.public_key, who=f"site {member.site!r}")
