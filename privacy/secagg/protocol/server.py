"""The aggregator's half of a round: R1, R2 and R3 of section 2.3.

``AggregatorRound`` is made for one round and holds keys and lists only; masked
vectors are folded into an accumulator by the caller, one as it lands. After
the last step ``corrections`` gives the streams to apply to the accumulator, and it
is the sum of the survivors' updates::

    P1   on_masked ...    close_masked -> A      corrections -> nothing
    P2   on_masked ...    close_masked -> A      survivors -> bytes for each of A
         on_consent ...   close_consents -> C    reveal(i) -> bytes for each i of C
         on_shares ...    corrections

A wrong message is refused and changes nothing; its site counts as silent unless it
sends a right one. Exchanges may lose sites as long as t are left.

Every share is compared with its dealer's signed commitment before it is used. What
that shows of sites is in ``faults``, which nobody can bring upon an honest site, and
in ``disputes``, where one of two sites is at fault and it is unknown which.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal

from federation.ids import SiteId
from privacy.secagg.agreement.certificate import OpenedRound
from privacy.secagg.agreement.contract import Contract, Member, Setting
from privacy.secagg.arithmetic.shamir import SHARE_BYTES, combine, encode_secret
from privacy.secagg.errors import (
    BadShare,
    InconsistentSurvivors,
    OutOfOrder,
    TooFewSites,
    WrongCohort,
    WrongContext,
)
from privacy.secagg.protocol.commitments import (
    SECRET,
    commit_one,
    in_row,
    place_of,
)
from privacy.secagg.protocol.key_schedule import (
    RoundFacts,
    RoundMasks,
    masks_of,
    round_context,
    sign_of,
    wipe,
)
from privacy.secagg.protocol.masked_answers import (
    CheckedAnswer,
    check_context,
    read_answer,
)
from privacy.secagg.protocol.messages import (
    Consent,
    Decline,
    RelayedHead,
    Reveal,
    Shares,
    Survivors,
    verify,
)
from privacy.secagg.protocol.setup import SetupRecord


class _RoundPhase(Enum):
    MASKED = "masked answers"
    CONSENTS = "consents"
    SHARES = "shares"
    DONE = "nothing more"
    LOST = "nothing: the round is lost"


class AggregatorRound:
    """One round at the aggregator.

    Args:
        setup: What the setup gave.
        facts: The round as the aggregator sees it.

    Attributes:
        faults: What a site has signed that no honest site signs, by its name.
        disputes: Pairs of sites: the first says that the second dealt it other
            shares than it committed to. One of the two lies, or both do.

    Raises:
        WrongCohort: The cohort is not the setup's: sites would refuse it.
    """

    def __init__(self, *, setup: SetupRecord, facts: RoundFacts) -> None:
        """Wait for masked answers."""
        if facts.cohort != setup.cohort:
            raise WrongCohort(
                f"the cohort {list(facts.cohort)} differs from the setup's "
                f"{list(setup.cohort)}"
            )
        self._cohort = setup.cohort
        self._contract: Contract = setup.contract
        self._context = round_context(
            facts,
            contract_hash=setup.contract.digest,
            setup_hash=setup.setup_hash,
            job_digest=setup.contract.job_digest,
        )
        self._round_index = facts.round_index
        self._phase = _RoundPhase.MASKED
        self._heads: dict[int, bytes] = {}
        self._sealed: dict[int, Mapping[int, bytes]] = {}
        self._rows: dict[int, Mapping[int, bytes]] = {}
        self._declined: set[int] = set()
        self._survivors: tuple[int, ...] = ()
        self._consents: dict[int, bytes] = {}
        self._shares: dict[int, Shares] = {}
        self._released: set[int] = set()  # Who sent them; they are not kept.
        self.faults: dict[SiteId, str] = {}
        self.disputes: list[tuple[SiteId, SiteId]] = []

    @property
    def threshold(self) -> int:
        """t, consents and shares without which no sum is opened."""
        return self._contract.threshold

    @property
    def silent(self) -> frozenset[SiteId]:
        """Sites that have not answered the current step of this round."""
        missing = set(self._cohort) - self._heads.keys()
        if self._contract.setting is Setting.P2:
            missing |= set(self._survivors) - self._consents.keys()
            if self._phase in {_RoundPhase.SHARES, _RoundPhase.DONE}:
                missing |= self._consents.keys() - self._released
        return frozenset(self._contract.member(i).site for i in missing)

    def on_masked(
        self, data: bytes, *, vector_digest: bytes, header_digest: bytes
    ) -> SiteId:
        """R1: take a site's masked answer.

        Args:
            data: Encoded ``MaskedAnswer``.
            vector_digest: SHA-256 of the masked vector that came with it.
            header_digest: SHA-256 of the masked header that came with it.

        Returns:
            The site. Only now may its vector be added to the accumulator.

        Raises:
            OutOfOrder: The answers are closed, or the site has answered.
            WrongContext: The vector is not the signed one, or of another round.
            BadShare: The sealed shares are not those that the round needs.
            ProtocolError: The message is malformed or not signed by its site.
        """
        found = self._checked(data)
        head, member = found.head, found.member
        if (head.vector_digest, head.header_digest) != (vector_digest, header_digest):
            raise WrongContext(
                f"the vector or header of {member.site!r} differs from the one that it "
                "signed"
            )
        self._take(found)
        return member.site

    def on_relayed(
        self,
        relayed: bytes,
        answers: Sequence[bytes],
        *,
        vector_digest: bytes,
        header_digest: bytes,
    ) -> tuple[SiteId, ...]:
        """R1: take the masked answers of several sites, whose vectors a relay added.

        That each vector was the one that its site signed is for the relay to check. In
        a sum that lacks one the masks do not cancel, and it is out of range; what a
        relay adds within the sum's bound is not found.

        Args:
            relayed: Encoded ``RelayedHead``.
            answers: Encoded ``MaskedAnswer`` of each site, in the order of the numbers.
            vector_digest: SHA-256 of the sum of the vectors that came with it.
            header_digest: SHA-256 of the sum of the headers that came with it.

        Returns:
            The sites. Only now may the sum be added to the accumulator.

        Raises:
            OutOfOrder: The answers are closed, or a site has answered.
            WrongContext: The relay signed another sum, or other sites than these.
            WrongCohort: A site is not behind this relay.
            BadSignature: It was not signed by the relay that the contract pins.
            ProtocolError: As in ``on_masked``, of any site; nothing was taken.
        """
        head = RelayedHead.from_bytes(relayed)
        relay = self._contract.relay_named(head.relay)
        head.verify(relay.public_key, who=f"relay {relay.name!r}")
        found = [self._checked(data) for data in answers]
        signed = hashlib.sha256(b"".join(each.masked.head for each in found))
        if (head.heads_digest, head.vector_digest, head.header_digest) != (
            signed.digest(),
            vector_digest,
            header_digest,
        ):
            raise WrongContext(
                f"relay {relay.name!r} signed another sum, or one of other sites"
            )
        numbers = [each.member.number for each in found]
        if numbers != sorted(set(numbers)) or not {*numbers} <= {*relay.numbers}:
            raise WrongCohort(
                f"relay {relay.name!r} sent the answers of clients {numbers}, and its "
                f"sites are {list(relay.numbers)}"
            )
        for each in found:
            self._take(each)
        return tuple(each.member.site for each in found)

    def _checked(self, data: bytes) -> CheckedAnswer:
        """Check everything of a masked answer but its vector."""
        self._check_phase(_RoundPhase.MASKED)
        found = read_answer(
            data, contract=self._contract, context=self._context, cohort=self._cohort
        )
        self._check_first(found.member)
        return found

    def _take(self, answer: CheckedAnswer) -> None:
        number, masked = answer.member.number, answer.masked
        self._heads[number] = masked.head
        self._sealed[number] = masked.sealed
        self._rows[number] = masked.rows

    def on_decline(self, data: bytes) -> SiteId:
        """R1: take a site's message that no answer will come.

        Raises:
            OutOfOrder: The answers are closed, or the site has answered.
            ProtocolError: The message is malformed, of another round or unsigned.
        """
        self._check_phase(_RoundPhase.MASKED)
        decline = Decline.from_bytes(data)
        member = self._contract.member(decline.number)
        verify(decline, member)
        self._check_context(decline.context, member)
        self._check_first(member)
        self._declined.add(member.number)
        return member.site

    def close_masked(self) -> tuple[SiteId, ...]:
        """End of R1: fix the survivors A.

        Returns:
            Their names, in the order of their numbers.

        Raises:
            TooFewSites: There are fewer than max(t, n_min): the round is lost, and
                what was accumulated must be thrown away.
        """
        self._check_phase(_RoundPhase.MASKED)
        if len(self._heads) < self._contract.quorum:
            absent = [
                self._contract.member(i).site
                for i in self._cohort
                if i not in self._heads
            ]
            self._phase = _RoundPhase.LOST
            raise TooFewSites(
                f"{len(self._heads)} of {len(self._cohort)} sites answered, but a "
                f"secure sum needs {self._contract.quorum}; missing: "
                f"{', '.join(absent)}"
            )
        self._survivors = tuple(sorted(self._heads))
        single = self._contract.setting is Setting.P1
        self._phase = _RoundPhase.DONE if single else _RoundPhase.CONSENTS
        return tuple(self._contract.member(i).site for i in self._survivors)

    def survivors(self) -> bytes:
        """R2: the encoded ``Survivors`` for every survivor."""
        self._check_phase(_RoundPhase.CONSENTS)
        return Survivors(heads=self._heads).to_bytes()

    def on_consent(self, data: bytes) -> SiteId:
        """R2: take a survivor's signature over A.

        Raises:
            InconsistentSurvivors: It signed another list, or is no survivor.
            OutOfOrder: Consents are not due, or it has consented.
            ProtocolError: The message is malformed, of another round or unsigned.
        """
        self._check_phase(_RoundPhase.CONSENTS)
        consent = Consent.from_bytes(data)
        member = self._survivor(consent.number)
        verify(consent, member)
        self._check_context(consent.context, member)
        if consent.survivors != self._survivors:
            raise InconsistentSurvivors(f"site {member.site!r} signed a different list")
        if member.number in self._consents:
            raise OutOfOrder(f"site {member.site!r} has already consented")
        self._consents[member.number] = bytes(data)
        return member.site

    def close_consents(self) -> tuple[SiteId, ...]:
        """End of R2: fix whose consents count.

        Returns:
            The sites that consented, which are to be asked for their shares.

        Raises:
            TooFewSites: They are fewer than t: the round is lost.
        """
        self._check_phase(_RoundPhase.CONSENTS)
        self._check_enough(len(self._consents), "consents")
        self._phase = _RoundPhase.SHARES
        return tuple(self._contract.member(i).site for i in sorted(self._consents))

    def reveal(self, site: SiteId) -> bytes:
        """R3: the encoded ``Reveal`` for one survivor.

        Raises:
            InconsistentSurvivors: The site is no survivor.
            OutOfOrder: It is not due.
        """
        self._check_phase(_RoundPhase.SHARES)
        number = self._survivor(self._contract.member_named(site).number).number
        others = [j for j in self._survivors if j != number]
        return Reveal(
            consents=self._consents,
            inbox={j: self._sealed[j][number] for j in others},
            rows={j: self._rows[j][number] for j in others},
        ).to_bytes()

    def on_shares(self, data: bytes) -> SiteId:
        """R3: take a survivor's shares.

        Raises:
            BadShare: They are not exactly those that A opens, or not those that were
                committed to: the site is at fault, and none of them is used.
            InconsistentSurvivors: The site is no survivor.
            OutOfOrder: Shares are not due, or it has sent them.
            ProtocolError: The message is malformed, of another round or unsigned.
        """
        self._check_phase(_RoundPhase.SHARES)
        shares = Shares.from_bytes(data)
        member = self._survivor(shares.number)
        verify(shares, member)
        self._check_context(shares.context, member)
        if member.number in self._shares:
            raise OutOfOrder(f"site {member.site!r} has already sent its shares")
        try:
            self._check_shares(shares, member)
        except BadShare as error:
            self.faults[member.site] = str(error)
            raise
        self._shares[member.number] = shares
        self._released.add(member.number)
        self.disputes += [
            (member.site, self._contract.member(j).site) for j in shares.disputed
        ]
        return member.site

    def corrections(self) -> RoundMasks:
        """The streams that turn the accumulator into the sum; ends the round.

        Apply each to the accumulator with its sign. P1 needs none. P2: minus b_i of
        the survivors, and minus what they added for the pairs with dropped sites.
        Erase them with ``RoundMasks.erase`` after use.

        Raises:
            TooFewSites: Fewer than t survivors have sent shares, or have shares that
                a survivor dealt and they do not dispute.
            BadShare: The shares of a survivor do not meet in the secret that it
                committed to: it is at fault.
            OutOfOrder: The round is not that far, or the corrections were given.
        """
        if self._contract.setting is Setting.P1:
            self._check_phase(_RoundPhase.DONE)
            return RoundMasks(vector=(), header=())
        self._check_phase(_RoundPhase.SHARES)
        self._check_enough(len(self._shares), "sets of shares")
        self._phase = _RoundPhase.DONE
        secrets: list[tuple[bytearray, Literal[1, -1]]] = []
        try:
            wrong = self._restore_into(secrets)
            if wrong:
                raise BadShare("; ".join(wrong))
            return masks_of(secrets, self._context)
        finally:
            for secret, _ in secrets:
                wipe(secret)
            self._shares.clear()

    def opened(self, *, sum_digest: bytes, header_digest: bytes) -> OpenedRound:
        """After ``corrections``: the round as a certificate describes it.

        Args:
            sum_digest: SHA-256 of the unmasked integer sum.
            header_digest: SHA-256 of the header's unmasked sum.

        Raises:
            OutOfOrder: The round is not over.
        """
        self._check_phase(_RoundPhase.DONE)
        return OpenedRound(
            round_index=self._round_index,
            context=self._context,
            survivors=self._survivors,
            sum_digest=sum_digest,
            header_digest=header_digest,
        )

    def _restore_into(
        self, secrets: list[tuple[bytearray, Literal[1, -1]]]
    ) -> list[str]:
        """Restore all that A opens, each with the sign that takes its mask away.

        Returns:
            What is wrong with the secrets that did not come out.
        """
        dropped = [x for x in self._cohort if x not in self._survivors]
        wrong = []
        for j in self._survivors:
            holders = [
                i for i, shares in self._shares.items() if j in shares.self_shares
            ]
            if len(holders) < self._contract.threshold:
                raise TooFewSites(
                    f"{len(holders)} sites released shares from site "
                    f"{self._contract.member(j).site!r}: a secure sum needs "
                    f"{self._contract.threshold}"
                )
            try:
                secrets.append((self._restore(j, j, holders, 0), -1))
                for at, x in enumerate(dropped):
                    secret = self._restore(j, x, holders, 1 + at)
                    secrets.append((secret, sign_of(x, j)))  # What j added, less.
            except BadShare as error:
                wrong.append(str(error))
        return wrong

    def _restore(
        self, dealer: int, about: int, holders: Sequence[int], at: int
    ) -> bytearray:
        """Restore one secret; ``at`` is its place in what a holder releases."""
        threshold = self._contract.threshold
        shares = [
            (i, _pieces(self._shares[i], dealer)[at])
            for i in sorted(holders)[:threshold]
        ]
        member = self._contract.member(dealer)
        try:
            secret = combine(shares, threshold)
            self._check_share(encode_secret(secret), dealer, SECRET, about)
        except BadShare:
            self.faults[member.site] = (
                f"site {member.site!r} sent shares that do not combine to the secret "
                "that it committed to"
            )
            raise BadShare(self.faults[member.site]) from None
        return secret

    def _check_phase(self, phase: _RoundPhase) -> None:
        if self._phase is not phase:
            raise OutOfOrder(
                f"{phase.value!r} are not due now in this round; expected: "
                f"{self._phase.value!r}"
            )

    def _check_context(self, context: bytes, member: Member) -> None:
        check_context(context, self._context, member)

    def _check_first(self, member: Member) -> None:
        if member.number not in self._cohort:
            raise WrongCohort(f"site {member.site!r} has no keys in this setup")
        if member.number in self._heads or member.number in self._declined:
            raise OutOfOrder(f"site {member.site!r} has already answered this round")

    def _check_shares(self, shares: Shares, member: Member) -> None:
        """Check released shares: those that A opens, as their dealers committed."""
        dropped = [x for x in self._cohort if x not in self._survivors]
        dealers = set(self._survivors) - set(shares.disputed)
        if (
            set(shares.self_shares) != dealers
            or set(shares.pair_shares) != dealers
            or not set(shares.disputed) <= set(self._survivors) - {member.number}
        ):
            raise BadShare(f"site {member.site!r} sent shares of other sites")
        for dealer in dealers:
            released = _pieces(shares, dealer)
            if len(shares.pair_shares[dealer]) != SHARE_BYTES * len(dropped):
                raise BadShare(f"site {member.site!r} sent too few or too many shares")
            for share, about in zip(released, (dealer, *dropped), strict=True):
                self._check_share(share, dealer, member.number, about)

    def _check_share(self, share: bytes, dealer: int, holder: int, about: int) -> None:
        """Compare a share with its dealer's commitment.

        Raises:
            BadShare: It is another.
        """
        found = commit_one(
            share, context=self._context, dealer=dealer, holder=holder, about=about
        )
        row = self._rows[dealer][holder]
        if found != in_row(row, place_of(dealer, about, self._cohort)):
            raise BadShare(
                f"site {self._contract.member(holder or dealer).site!r} released a "
                f"different share than site {self._contract.member(dealer).site!r} "
                "sent it"
            )

    def _check_enough(self, count: int, what: str) -> None:
        if count < self._contract.threshold:
            raise TooFewSites(
                f"{count} {what} are too few: a secure sum needs "
                f"{self._contract.threshold}"
            )

    def _survivor(self, number: int) -> Member:
        member = self._contract.member(number)
        if number not in self._survivors:
            raise InconsistentSurvivors(
                f"site {member.site!r} is not a survivor of this round"
            )
        return member


def _pieces(shares: Shares, dealer: int) -> list[bytes]:
    """What was released of a dealer's secrets: of its self mask, then of pairs."""
    joined = shares.self_shares[dealer] + shares.pair_shares[dealer]
    return [joined[at : at + SHARE_BYTES] for at in range(0, len(joined), SHARE_BYTES)]
