"""The setup of a run: from a contract to secrets that each pair of sites shares.

Steps S1 and S2 of SECURE_AGGREGATION.md, section 2.3, as two objects without I/O::

    AggregatorSetup                          SiteSetup, one for each site
    offer()                    -- Offer -->  on_offer(...)
    on_advert(...)            <-- Advert --
    book()                     -- Book -->   on_book(...)
    on_confirm(...)           <-- Confirm --
    result().confirms       -- Confirms -->  on_confirms(...) -> RunSecrets

The last arrow travels with the first round's task. The aggregator may leave sites out,
as a round may proceed without them: max(t, n_min) must be in the book. Who
is not in it has no keys and takes no part in rounds under this setup. h_U binds the
book, so all sites agree on who is in it. At a site the first wrong byte ends the setup
and erases its keys; the aggregator refuses the wrong message and may be given a right
one.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Generic, TypeVar

from federation.ids import SiteId
from privacy.keystream import RandomBytes
from privacy.secagg.agreement.contract import Contract, Member
from privacy.secagg.agreement.identity import Identity, Label, PublicIdentity
from privacy.secagg.agreement.policy import LocalPolicy, check_against_policy
from privacy.secagg.errors import (
    BookRefused,
    ContractRefused,
    OutOfOrder,
    TooFewSites,
    WrongContext,
)
from privacy.secagg.protocol.key_schedule import (
    KEM_PUBLIC_BYTES,
    Audit,
    PairRoots,
    PublicRunKeys,
    RunKeys,
    RunSecrets,
    Secret,
    encapsulate,
    note,
    pair_root,
)
from privacy.secagg.protocol.messages import (
    NONCE_BYTES,
    Advert,
    Book,
    Confirm,
    Confirms,
    Offer,
    verify,
)

StepT = TypeVar("StepT", bound=Enum)


class Steps(Generic[StepT]):
    """Which step is due. A step that fails is the last: nothing follows it.

    Args:
        first: The step that is due first.
        aborted: The step that is due, forever, after a failure.
        erase: Called after a failure, to overwrite what is secret.
    """

    def __init__(
        self, first: StepT, *, aborted: StepT, erase: Callable[[], None]
    ) -> None:
        """Make the first step due."""
        self.due = first
        self._aborted = aborted
        self._erase = erase

    @contextmanager
    def take(self, step: StepT, *, then: StepT) -> Iterator[None]:
        """Take a step and make another one due if it succeeds.

        Raises:
            OutOfOrder: Another step is due. Nothing changes then.
        """
        if self.due is not step:
            raise OutOfOrder(
                f"{step.value!r} is not due now; expected: {self.due.value!r}"
            )
        # Due again only at the very end: a failure anywhere leaves it aborted.
        self.due = self._aborted
        try:
            yield
        except BaseException:
            self._erase()
            raise
        self.due = then


class _SetupStep(Enum):
    OFFER = "offer"
    BOOK = "book"
    CONFIRMS = "confirms"
    DONE = "nothing: the setup is over"
    ABORTED = "nothing: the setup was aborted"


@dataclass(kw_only=True, eq=False, repr=False)
class SiteSetup:
    """A site's half of the setup.

    Args:
        identity: The site's long-lived key.
        site: The site's own name.
        policy: What its operator demands.
        random_bytes: Source of its run keys.
        audit: See ``keys.Audit``; tests only.
    """

    identity: Identity
    site: SiteId
    policy: LocalPolicy
    random_bytes: RandomBytes
    audit: Audit | None = None

    def __post_init__(self) -> None:
        """Wait for an offer."""
        self._steps = Steps(
            _SetupStep.OFFER, aborted=_SetupStep.ABORTED, erase=self._erase
        )
        self._contract: Contract | None = None
        self._keys: RunKeys | None = None
        self._advert = b""
        self._confirm = b""
        self._setup_hash = b""
        self._cohort: tuple[int, ...] = ()
        # X25519 secrets of each peer (masks, channel) and its ML-KEM secret.
        self._exchanges: dict[int, tuple[Secret, Secret]] = {}
        self._kem_secrets: dict[int, Secret] = {}

    @property
    def contract(self) -> Contract:
        """The contract that this site has accepted.

        Raises:
            OutOfOrder: There is none yet.
        """
        if self._contract is None:
            raise OutOfOrder("no contract has been accepted")
        return self._contract

    @property
    def setup_hash(self) -> bytes:
        """h_U of the book that this site has confirmed; empty before."""
        return self._setup_hash

    def close(self) -> None:
        """Erase every key: this setup is abandoned."""
        self._steps.due = _SetupStep.ABORTED
        self._erase()

    def on_offer(self, data: bytes) -> bytes:
        """S1: accept a contract and answer with an encoded ``Advert``.

        Raises:
            BadSignature: The pinned aggregator did not sign the offer.
            StaleRoster: The contract rests on an old roster.
            ContractRefused: It is against the policy, or pins another key for us.
            MalformedMessage: The bytes are not an offer.
            OutOfOrder: An offer was taken already.
        """
        with self._steps.take(_SetupStep.OFFER, then=_SetupStep.BOOK):
            offer = Offer.from_bytes(data)
            aggregator = PublicIdentity(self.policy.roster.aggregator_key)
            aggregator.verify(
                Label.OFFER, offer.contract, offer.signature, who="the aggregator"
            )
            contract = Contract.from_bytes(offer.contract)
            check_against_policy(contract, self.policy)
            own = self._own_member(contract)
            self._contract = contract
            self._keys = RunKeys(self.random_bytes, hybrid=contract.hybrid)
            advert = Advert(
                contract_hash=contract.digest,
                number=own.number,
                keys=self._keys.public,
                nonce=self.random_bytes(NONCE_BYTES),
            )
            self._advert = advert.signed_by(self.identity).to_bytes()
        return self._advert

    def on_book(self, data: bytes) -> bytes:
        """S2: check everybody's advert and answer with an encoded ``Confirm``.

        Raises:
            BookRefused: Fewer sites are there than a round needs, or strangers; a
                key is there twice; or our own advert is not the one that we sent.
            BadSignature: An advert is not signed by the pinned key.
            WrongContext: An advert is for another contract.
            WeakKey: A key gives a secret that others would know.
            MalformedMessage: The bytes are not a book.
            OutOfOrder: A book is not due.
        """
        with self._steps.take(_SetupStep.BOOK, then=_SetupStep.CONFIRMS):
            contract, number = self.contract, self._number
            book = Book.from_bytes(data)
            adverts = _read_adverts(contract, book)
            if book.adverts.get(number) != self._advert:
                raise BookRefused("the book shows a different advert for this site")
            self._setup_hash = book.setup_hash
            self._cohort = tuple(sorted(adverts))
            ciphertexts: dict[int, bytes] = {}
            for peer, advert in adverts.items():
                if peer == number:
                    continue
                self._exchange(peer, advert.keys)
                if contract.hybrid and peer > number:
                    secret, ciphertexts[peer] = encapsulate(advert.keys.kem)
                    self._kem_secrets[peer] = Secret(secret)
            confirm = Confirm(
                setup_hash=self._setup_hash, number=number, ciphertexts=ciphertexts
            )
            self._confirm = confirm.signed_by(self.identity).to_bytes()
        return self._confirm

    def on_confirms(self, data: bytes) -> RunSecrets:
        """R1 of the first round: check that all saw one book; make the roots.

        Raises:
            WrongContext: A site saw another book: the aggregator shows different
                keys to different sites, or replays an old advert.
            BookRefused: Someone is missing, or our own confirm was changed.
            BadSignature: A confirm is not signed by the pinned key.
            MalformedMessage: The bytes are not confirms.
            OutOfOrder: Confirms are not due.
        """
        with self._steps.take(_SetupStep.CONFIRMS, then=_SetupStep.DONE):
            confirms = Confirms.from_bytes(data)
            parsed = _read_confirms(
                self.contract, confirms, self._setup_hash, self._cohort
            )
            if confirms.confirms[self._number] != self._confirm:
                raise BookRefused("a different confirm is shown for this site")
            roots = {
                peer: self._roots(peer, confirm)
                for peer, confirm in parsed.items()
                if peer != self._number
            }
            secrets = RunSecrets(
                number=self._number,
                contract_hash=self.contract.digest,
                setup_hash=self._setup_hash,
                job_digest=self.policy.job_digest,
                roots=roots,
            )
        self._erase()
        return secrets

    @property
    def _number(self) -> int:
        return self.contract.member_named(self.site).number

    def _own_member(self, contract: Contract) -> Member:
        own = contract.member_named(self.site)
        if own.public_key != self.identity.public.key:
            raise ContractRefused(
                f"it pins a different key for {self.site!r} than this site's "
                f"{self.identity.public.fingerprint[:19]}...",
                key="members",
            )
        return own

    def _exchange(self, peer: int, keys: PublicRunKeys) -> None:
        assert self._keys is not None  # noqa: S101  # Made in on_offer.
        mask, channel = self._keys.exchange(keys)
        self._exchanges[peer] = Secret(mask), Secret(channel)

    def _roots(self, peer: int, confirm: Confirm) -> PairRoots:
        assert self._keys is not None  # noqa: S101  # Made in on_offer.
        if self.contract.hybrid and peer < self._number:
            ciphertext = confirm.ciphertexts[self._number]
            self._kem_secrets[peer] = Secret(self._keys.decapsulate(ciphertext))
        kem = self._kem_secrets.get(peer)
        roots = [
            pair_root(
                exchange=bytes(exchange.buffer),
                kem_secret=b"" if kem is None else bytes(kem.buffer),
                setup_hash=self._setup_hash,
            )
            for exchange in self._exchanges[peer]
        ]
        note(self.audit, "mask root", roots[0].buffer)
        note(self.audit, "channel root", roots[1].buffer)
        return PairRoots(
            own=self._number, peer=peer, mask_root=roots[0], channel_root=roots[1]
        )

    def _erase(self) -> None:
        for mask, channel in self._exchanges.values():
            mask.erase()
            channel.erase()
        for secret in self._kem_secrets.values():
            secret.erase()
        self._exchanges, self._kem_secrets, self._keys = {}, {}, None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupRecord:
    """What the aggregator knows after the setup; nothing in it is secret.

    Attributes:
        contract: Q.
        setup_hash: h_U.
        cohort: Numbers of the sites in the book: U_r of every round under it.
        book: Encoded ``Book``.
        confirms: Encoded ``Confirms``, to be sent with the first round's task.
    """

    contract: Contract
    setup_hash: bytes
    cohort: tuple[int, ...]
    book: bytes
    confirms: bytes


@dataclass(kw_only=True, eq=False, repr=False)
class AggregatorSetup:
    """The aggregator's half of the setup.

    Args:
        identity: The aggregator's long-lived key.
        contract: What it offers.
        left_out: Sites of the contract that are not asked.

    Raises:
        ContractRefused: The contract pins another key for the aggregator.
    """

    identity: Identity
    contract: Contract
    left_out: InitVar[Collection[SiteId]] = ()

    def __post_init__(self, left_out: Collection[SiteId]) -> None:
        """Prepare an offer."""
        if self.contract.aggregator_key != self.identity.public.key:
            raise ContractRefused(
                "it is not this aggregator's key", key="aggregator_key"
            )
        self._cohort = tuple(
            member.number
            for member in self.contract.members
            if member.site not in left_out
        )
        self._adverts: dict[int, bytes] = {}
        self._confirms: dict[int, bytes] = {}
        self._book: Book | None = None

    def offer(self) -> bytes:
        """S1: the encoded ``Offer`` for every site."""
        contract = self.contract.to_bytes()
        signature = self.identity.sign(Label.OFFER, contract)
        return Offer(contract=contract, signature=signature).to_bytes()

    def on_advert(self, data: bytes) -> SiteId:
        """S1: take a site's advert.

        Returns:
            The site that sent it.

        Raises:
            OutOfOrder: The site has sent one before, or the book is closed.
            ProtocolError: The advert is not a member's for this contract.
        """
        if self._book is not None:
            raise OutOfOrder("the book is closed: no advert is due")
        advert = Advert.from_bytes(data)
        member = _check_advert(self.contract, advert)
        if member.number not in self._cohort:
            raise BookRefused(f"site {member.site!r} is excluded from this setup")
        _add_once(self._adverts, member, data, "advert")
        return member.site

    def missing(self) -> tuple[SiteId, ...]:
        """Sites whose advert, or after ``book`` whose confirm, is awaited."""
        seen = self._adverts if self._book is None else self._confirms
        return tuple(
            self.contract.member(i).site for i in self._cohort if i not in seen
        )

    def book(self) -> bytes:
        """S2: close the book; the encoded ``Book`` for every site.

        Raises:
            TooFewSites: An advert is missing.
        """
        if self._book is None:
            self._check_complete("advert")
            book = Book(adverts=dict(self._adverts))
            _read_adverts(self.contract, book)
            self._book = book
        return self._book.to_bytes()

    def on_confirm(self, data: bytes) -> SiteId:
        """S2: take a site's confirm.

        Returns:
            The site that sent it.

        Raises:
            OutOfOrder: The site has sent one before, or the book is not closed.
            ProtocolError: The confirm is not a member's for this book.
        """
        if self._book is None:
            raise OutOfOrder("the book is not closed: no confirm is due")
        confirm = Confirm.from_bytes(data)
        member = _check_confirm(
            self.contract, confirm, self._book.setup_hash, self._cohort
        )
        _add_once(self._confirms, member, data, "confirm")
        return member.site

    def result(self) -> SetupRecord:
        """The finished setup.

        Raises:
            TooFewSites: A confirm is missing.
            OutOfOrder: The book is not closed.
        """
        if self._book is None:
            raise OutOfOrder("the setup is not over: the book is not closed")
        self._check_complete("confirm")
        return SetupRecord(
            contract=self.contract,
            setup_hash=self._book.setup_hash,
            cohort=self._cohort,
            book=self._book.to_bytes(),
            confirms=Confirms(confirms=dict(self._confirms)).to_bytes(),
        )

    def _check_complete(self, what: str) -> None:
        missing = self.missing()
        if missing:
            raise TooFewSites(
                f"the setup needs every site's {what}, but has none from "
                f"{', '.join(missing)}: see that their agents run"
            )


def _add_once(seen: dict[int, bytes], member: Member, data: bytes, what: str) -> None:
    if member.number in seen:
        raise OutOfOrder(f"site {member.site!r} has already sent its {what}")
    seen[member.number] = bytes(data)


def _check_advert(contract: Contract, advert: Advert) -> Member:
    member = contract.member(advert.number)
    # The signature first: an unsigned message proves nothing about its site.
    verify(advert, member)
    if advert.contract_hash != contract.digest:
        raise WrongContext(f"the advert of {member.site!r} is for a different contract")
    expected = KEM_PUBLIC_BYTES if contract.hybrid else 0
    if len(advert.keys.kem) != expected:
        raise BookRefused(
            f"the ML-KEM key of {member.site!r} has {len(advert.keys.kem)} bytes "
            f"instead of {expected}"
        )
    return member


def _check_confirm(
    contract: Contract, confirm: Confirm, setup_hash: bytes, cohort: Sequence[int]
) -> Member:
    member = contract.member(confirm.number)
    verify(confirm, member)
    if confirm.setup_hash != setup_hash:
        raise WrongContext(
            f"site {member.site!r} saw a different book: the aggregator shows "
            "different keys to different sites, or replays an old setup"
        )
    above = {j for j in cohort if j > member.number}
    if set(confirm.ciphertexts) != (above if contract.hybrid else set()):
        raise BookRefused(
            f"the confirm of {member.site!r} has ciphertexts for the wrong sites"
        )
    return member


def _read_adverts(contract: Contract, book: Book) -> dict[int, Advert]:
    """Read and check all adverts of a book.

    1. Members, as many as a round needs. 2. Each signed, for this contract. 3. No key
    twice.
    """
    shown = set(book.adverts)
    if not shown <= set(contract.cohort) or len(shown) < contract.quorum:
        raise BookRefused(
            f"the book shows sites {sorted(shown)}; the contract has "
            f"{list(contract.cohort)} and requires {contract.quorum} of them"
        )
    adverts: dict[int, Advert] = {}
    for number, data in book.adverts.items():
        advert = Advert.from_bytes(data)
        if advert.number != number:
            raise BookRefused(f"the book shows advert {advert.number} as {number}")
        _check_advert(contract, advert)
        adverts[number] = advert
    seen: dict[bytes, int] = {}
    for number, advert in adverts.items():
        keys = advert.keys
        for value in filter(None, (keys.mask, keys.channel, keys.kem, advert.nonce)):
            digest = hashlib.sha256(value).digest()
            if digest in seen:
                raise BookRefused(
                    f"sites {seen[digest]} and {number} show the same key or nonce"
                )
            seen[digest] = number
    return adverts


def _read_confirms(
    contract: Contract, confirms: Confirms, setup_hash: bytes, cohort: tuple[int, ...]
) -> dict[int, Confirm]:
    """Read and check the confirms of all sites of the book."""
    shown = tuple(sorted(confirms.confirms))
    if shown != cohort:
        raise BookRefused(
            f"the confirms show sites {list(shown)}, but the book has {list(cohort)}"
        )
    parsed: dict[int, Confirm] = {}
    for number, data in confirms.confirms.items():
        confirm = Confirm.from_bytes(data)
        if confirm.number != number:
            raise BookRefused(f"confirm {confirm.number} is shown as {number}")
        _check_confirm(contract, confirm, setup_hash, cohort)
        parsed[number] = confirm
    return parsed
