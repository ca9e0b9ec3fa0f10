"""A site's half of a round: R1, R2 and R3 of SECURE_AGGREGATION.md, section 2.3.

``SiteSession`` holds keys and lists only. It hands out the streams that mask a
vector and takes the digests of what was masked; the vector itself is for ``ring``
and ``prg``. One round::

    P1   begin_round -> masks    finish_masked -> Masked
    P2   begin_round -> masks    finish_masked -> Masked    on_survivors -> Consent
         on_reveal -> Shares

What it releases follows from the one list A that it signed, by construction: the
share of b_j for j in A, and of k_jl for j in A and l not in A. No message can name
a secret, so none can ask for both secrets of one site.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from privacy.keystream import RandomBytes
from privacy.secagg.agreement.certificate import ModelTrail, OpenedRound
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.message import DIGEST_BYTES
from privacy.secagg.arithmetic.shamir import SHARE_BYTES, encode_secret, split
from privacy.secagg.errors import (
    BadShare,
    InconsistentSurvivors,
    OutOfOrder,
    ReplayedRound,
    TooFewSites,
    WrongCohort,
    WrongContext,
)
from privacy.secagg.protocol.commitments import (
    SECRET,
    commit,
    dealt_digest,
    dealt_digests,
    in_row,
    place_of,
    place_of_holder,
)
from privacy.secagg.protocol.key_schedule import (
    SECRET_BYTES,
    Audit,
    RoundFacts,
    RoundMasks,
    RoundPair,
    RunSecrets,
    Secret,
    channel_data,
    masks_of,
    note,
    round_context,
    seal,
    sign_of,
    unseal,
    wipe,
)
from privacy.secagg.protocol.messages import (
    Consent,
    Decline,
    Head,
    MaskedAnswer,
    Reveal,
    Shares,
    Survivors,
    verify,
)
from privacy.secagg.protocol.round_memory import RoundMemory
from privacy.secagg.protocol.setup import Steps


class _RoundStep(Enum):
    MASKED = "masked"
    SURVIVORS = "survivors"
    REVEAL = "reveal"
    DONE = "nothing: the round is over"
    ABORTED = "nothing: the round was aborted"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class _OwnShares:
    """P2: what this site sealed for the others and holds until R3."""

    sealed: Mapping[int, bytes]
    rows: Mapping[int, bytes]  # commitments, by holder
    receive: Mapping[int, Secret]  # channel keys, by sender
    own: bytearray  # this site's shares of its own secrets

    def erase(self) -> None:
        for key in self.receive.values():
            key.erase()
        wipe(self.own)


_NOTHING_SHARED = _OwnShares(sealed={}, rows={}, receive={}, own=bytearray())


class _Round:
    """One round at a site; made for it and dropped after it."""

    def __init__(
        self, facts: RoundFacts, context: bytes, masks: RoundMasks, shared: _OwnShares
    ) -> None:
        self.facts = facts
        self.context = context
        self.masks = masks
        self.shared = shared
        self.head = b""
        self.consent = b""
        self.survivors: tuple[int, ...] = ()
        self.dealt: dict[int, bytes] = {}  # To this site, as survivors signed it.
        self.steps = Steps(
            _RoundStep.MASKED, aborted=_RoundStep.ABORTED, erase=self.erase
        )

    def erase(self) -> None:
        self.masks.erase()
        self.shared.erase()


@dataclass(kw_only=True, eq=False, repr=False)
class SiteSession:
    """A site's part in all rounds of a run.

    Attributes:
        contract: What the site accepted in ``setup``.
        identity: Its long-lived key.
        secrets: What the setup made; erased by ``close``.
        memory: Where the last round's number is kept.
        random_bytes: Source of self masks and of the sharing's coefficients.
        audit: See ``keys.Audit``; tests only.
        cohort: The sites of the setup that this session rests on.
        disputes: What was wrong with shares that others dealt, in the newest reveal.

    Raises:
        WrongContext: ``secrets`` are of another contract.
    """

    contract: Contract
    identity: Identity
    secrets: RunSecrets
    memory: RoundMemory
    random_bytes: RandomBytes
    audit: Audit | None = None

    def __post_init__(self) -> None:
        """Wait for the first round."""
        if self.secrets.contract_hash != self.contract.digest:
            raise WrongContext("the run secrets belong to a different contract")
        self.cohort = self.secrets.cohort
        self._round: _Round | None = None
        self.disputes: list[str] = []
        self._trail = ModelTrail(
            self.contract,
            number=self.secrets.number,
            setup_hash=self.secrets.setup_hash,
        )

    @property
    def number(self) -> int:
        """This site's number i."""
        return self.secrets.number

    @property
    def setup_hash(self) -> bytes:
        """h_U of the setup that this session rests on."""
        return self.secrets.setup_hash

    def check_model(
        self, certificate: bytes, *, round_index: int, model_digest: bytes
    ) -> None:
        """Check a round's model by the aggregator's certificate: ``ModelTrail.check``.

        To be called before ``begin_round``, which uses the round's number up.
        """
        self._trail.check(
            certificate, round_index=round_index, model_digest=model_digest
        )

    def opened(self, certificate: bytes) -> OpenedRound:
        """Read what a signed certificate says of a round."""
        return self._trail.opened(certificate)

    @property
    def context(self) -> bytes:
        """ctx_r of the round that is in progress.

        Raises:
            OutOfOrder: None is.
        """
        return self._current().context

    def expire(self, round_index: int) -> None:
        """Erase an unfinished round when a message names another one.

        A site that was declared missing gets no message about it. It learns it from the
        first message of a later round, or of a setup, whose round index is 0.
        """
        current = self._round
        if current is None:
            return
        if round_index == 0 or round_index > current.facts.round_index:
            self._drop_round()

    def begin_round(self, facts: RoundFacts) -> RoundMasks:
        """R1: accept a round, record it, and derive what masks the answer.

        An unfinished round is given up and erased: it can no longer be answered.

        Args:
            facts: The round as *this site* sees it; the model's digest is computed
                here from the weights that will be trained.

        Returns:
            The streams to add to the encoded update and to the header. Their keys
            are overwritten by ``finish_masked``.

        Guarantee:
            The number is durable before a key exists; the keys of this and every
            earlier round cannot be derived again afterwards.

        Raises:
            ReplayedRound: The number is not above every earlier one.
            WrongCohort: The cohort is not the setup's, for example a repetition
                of a lost round without someone.
            StoreError: The number cannot be made durable.
        """
        contract = self.contract
        if not 1 <= facts.round_index <= contract.max_rounds:
            raise ReplayedRound(
                f"round {facts.round_index} is outside 1..{contract.max_rounds}, the "
                "rounds that the contract allows"
            )
        if facts.cohort != self.cohort:
            raise WrongCohort(
                f"round {facts.round_index} is for sites {list(facts.cohort)}, but the "
                f"setup is for {list(self.cohort)}: a different cohort needs a new "
                "setup"
            )
        self.memory.advance(contract.run_id, facts.round_index)
        self._drop_round()
        context = round_context(
            facts,
            contract_hash=self.secrets.contract_hash,
            setup_hash=self.secrets.setup_hash,
            job_digest=self.secrets.job_digest,
        )
        pairs = {
            peer: roots.take_round(facts.round_index, context, audit=self.audit)
            for peer, roots in self.secrets.roots.items()
        }
        self._trail.note_context(facts.round_index, context)
        try:
            self._round = self._open_round(facts, context, pairs)
        finally:
            for pair in pairs.values():
                pair.mask.erase()
                pair.send.erase()
        return self._round.masks

    def decline(self) -> bytes:
        """R1: give the round up; an encoded ``Decline`` that says so.

        Raises:
            OutOfOrder: No answer is due.
        """
        current = self._current()
        with current.steps.take(_RoundStep.MASKED, then=_RoundStep.DONE):
            message = Decline(number=self.number, context=current.context)
            data = message.signed_by(self.identity).to_bytes()
        self._drop_round()
        return data

    def finish_masked(self, *, vector_digest: bytes, header_digest: bytes) -> bytes:
        """R1: sign what was masked and erase the masks.

        Args:
            vector_digest: h_y, SHA-256 of the masked vector as it will travel.
            header_digest: SHA-256 of the masked header as it will travel.

        Returns:
            An encoded ``MaskedAnswer``.

        Raises:
            OutOfOrder: No answer is due.
        """
        if {len(vector_digest), len(header_digest)} != {DIGEST_BYTES}:
            raise ValueError(f"digests must have {DIGEST_BYTES} bytes")
        current = self._current()
        single = self.contract.setting is Setting.P1
        then = _RoundStep.DONE if single else _RoundStep.SURVIVORS
        with current.steps.take(_RoundStep.MASKED, then=then):
            head = Head(
                number=self.number,
                context=current.context,
                vector_digest=vector_digest,
                header_digest=header_digest,
                dealt=dealt_digests(current.shared.sealed, current.shared.rows),
            )
            current.head = head.signed_by(self.identity).to_bytes()
            message = MaskedAnswer(
                head=current.head,
                sealed=current.shared.sealed,
                rows=current.shared.rows,
            )
            data = message.to_bytes()
            current.masks.erase()
        if single:
            self._drop_round()
        return data

    def on_survivors(self, data: bytes) -> bytes:
        """R2: check the list of survivors and sign it, once.

        Returns:
            An encoded ``Consent``.

        Raises:
            InconsistentSurvivors: The list has strangers, lacks this site, or shows
                another head of it.
            TooFewSites: It is shorter than max(t, n_min).
            WrongContext: A head belongs to another round or model.
            BadSignature: A head is not signed by its site.
            MalformedMessage: The bytes are not a list.
            OutOfOrder: A list was signed before in this round, or none is due.
        """
        current = self._current()
        with current.steps.take(_RoundStep.SURVIVORS, then=_RoundStep.REVEAL):
            heads = Survivors.from_bytes(data).heads
            survivors = tuple(sorted(heads))
            self._check_survivors(survivors, current)
            if heads[self.number] != current.head:
                raise InconsistentSurvivors(
                    "the list shows a different head for this site"
                )
            for number, encoded in heads.items():
                if number != self.number:
                    current.dealt[number] = self._check_head(number, encoded, current)
            current.survivors = survivors
            self._trail.note_consent(current.facts.round_index, survivors)
            message = Consent(
                number=self.number, context=current.context, survivors=survivors
            )
            current.consent = message.signed_by(self.identity).to_bytes()
            return current.consent

    def on_reveal(self, data: bytes) -> bytes:
        """R3: check the consents, open the inbox and release this site's shares.

        What a survivor sealed and is not what it committed to is disputed: the answer
        names the survivor and has no share that it dealt.

        Returns:
            An encoded ``Shares``. The round is erased before it is returned.

        Raises:
            TooFewSites: Fewer than t sites consented.
            InconsistentSurvivors: A consent is about another list, or the inbox is
                not that of the survivors.
            BadShare: What the aggregator shows is not what a survivor signed.
            WrongContext: A consent belongs to another round or model.
            BadSignature: A consent is not signed by its site.
            MalformedMessage: The bytes are not a reveal.
            OutOfOrder: No reveal is due.
        """
        current = self._current()
        with current.steps.take(_RoundStep.REVEAL, then=_RoundStep.DONE):
            reveal = Reveal.from_bytes(data)
            self._check_consents(reveal.consents, current)
            opened = self._open_inbox(reveal, current)
            try:
                message = self._release(opened, current)
            finally:
                for shares in opened.values():
                    wipe(shares)
            answer = message.signed_by(self.identity).to_bytes()
        self._drop_round()
        return answer

    def close(self) -> None:
        """Erase everything: the site takes no further part in the run."""
        self._drop_round()
        self.secrets.erase()

    def _current(self) -> _Round:
        if self._round is None:
            raise OutOfOrder("no round is in progress at this site")
        return self._round

    def _drop_round(self) -> None:
        if self._round is not None:
            self._round.erase()
        self._round = None

    def _open_round(
        self, facts: RoundFacts, context: bytes, pairs: Mapping[int, RoundPair]
    ) -> _Round:
        secrets = [
            (pair.mask.buffer, sign_of(self.number, peer))
            for peer, pair in pairs.items()
        ]
        if self.contract.setting is Setting.P1:
            for pair in pairs.values():
                pair.receive.erase()
            masks = masks_of(secrets, context, audit=self.audit)
            return _Round(facts, context, masks, _NOTHING_SHARED)
        self_mask = Secret(self.random_bytes(SECRET_BYTES))
        note(self.audit, "self mask", self_mask.buffer)
        secrets.append((self_mask.buffer, 1))
        masks = masks_of(secrets, context, audit=self.audit)
        shared = self._share(self_mask, pairs, context)
        self_mask.erase()
        return _Round(facts, context, masks, shared)

    def _share(
        self, self_mask: Secret, pairs: Mapping[int, RoundPair], context: bytes
    ) -> _OwnShares:
        """Split b_i and every k_ij, and seal each site's shares for it."""
        cohort, threshold = self.cohort, self.contract.threshold
        secrets = [self_mask.buffer, *(pairs[x].mask.buffer for x in sorted(pairs))]
        bundles = split(secrets, threshold, cohort, random_bytes=self.random_bytes)
        bundles[SECRET] = bytearray().join(map(encode_secret, secrets))
        rows = {
            x: self._row(context, bundle, dealer=self.number, holder=x)
            for x, bundle in bundles.items()
        }
        wipe(bundles.pop(SECRET))
        own = bundles.pop(self.number)
        sealed = {}
        for j, bundle in bundles.items():
            data = channel_data(context, self.number, j)
            sealed[j] = seal(pairs[j].send, bundle, data)
            wipe(bundle)
        receive = {j: pairs[j].receive for j in bundles}
        return _OwnShares(sealed=sealed, rows=rows, receive=receive, own=own)

    def _row(
        self, context: bytes, bundle: bytearray, *, dealer: int, holder: int
    ) -> bytes:
        """Commitments to the shares of a bundle."""
        return commit(
            bundle,
            context=context,
            dealer=dealer,
            holder=holder,
            cohort=self.cohort,
        )

    def _check_survivors(self, survivors: tuple[int, ...], current: _Round) -> None:
        if not set(survivors) <= set(current.facts.cohort):
            raise InconsistentSurvivors(
                f"survivors {list(survivors)} are not all in the cohort "
                f"{list(current.facts.cohort)}"
            )
        if self.number not in survivors:
            raise InconsistentSurvivors(
                f"survivors {list(survivors)} omit this site, {self.number}, although "
                "it has answered"
            )
        if len(survivors) < self.contract.quorum:
            raise TooFewSites(
                f"{len(survivors)} survivors are too few: a secure sum needs "
                f"{self.contract.quorum}"
            )

    def _check_head(self, number: int, encoded: bytes, current: _Round) -> bytes:
        """Check a survivor's head; what it says of what this site is dealt."""
        head = Head.from_bytes(encoded)
        if head.number != number:
            raise InconsistentSurvivors(f"head {head.number} is shown as {number}")
        member = self.contract.member(number)
        verify(head, member)
        if head.context != current.context:
            raise WrongContext(
                f"site {member.site!r} answered a different round, model or setup than "
                "this site"
            )
        if len(head.dealt) != DIGEST_BYTES * (1 + len(self.cohort)):
            raise InconsistentSurvivors(
                f"the head of {member.site!r} has no entry for this site's shares"
            )
        return in_row(head.dealt, place_of_holder(self.number, self.cohort))

    def _check_consents(self, consents: Mapping[int, bytes], current: _Round) -> None:
        for number, encoded in consents.items():
            if (number, encoded) == (self.number, current.consent):
                continue  # Signed here.
            consent = Consent.from_bytes(encoded)
            if consent.number != number or number not in current.survivors:
                raise InconsistentSurvivors(
                    f"the consent of site {consent.number} is shown as that of site "
                    f"{number}, one of the survivors {list(current.survivors)}"
                )
            member = self.contract.member(number)
            verify(consent, member)
            if consent.context != current.context:
                raise WrongContext(
                    f"the consent of {member.site!r} belongs to a different round or "
                    "model"
                )
            if consent.survivors != current.survivors:
                raise InconsistentSurvivors(
                    f"site {member.site!r} signed the survivors "
                    f"{list(consent.survivors)}, but this site signed "
                    f"{list(current.survivors)}: the aggregator sent different lists "
                    "to different sites"
                )
        if len(consents) < self.contract.threshold:
            raise TooFewSites(
                f"{len(consents)} consents are too few: a secure sum needs "
                f"{self.contract.threshold}"
            )

    def _open_inbox(self, reveal: Reveal, current: _Round) -> dict[int, bytearray]:
        """Shares by dealer, this site's own among them, and without disputed ones."""
        senders = set(current.survivors) - {self.number}
        for shown in (reveal.inbox, reveal.rows):
            if set(shown) != senders:
                raise InconsistentSurvivors(
                    f"the inbox is from sites {sorted(shown)}, but the other survivors "
                    f"are {sorted(senders)}"
                )
        for sender in senders:
            digest = dealt_digest(reveal.inbox[sender], reveal.rows[sender])
            if digest != current.dealt[sender]:
                raise BadShare(
                    "the aggregator shows shares or commitments of "
                    f"{self.contract.member(sender).site!r} that differ from what it "
                    "signed"
                )
        opened = {self.number: bytearray(current.shared.own)}
        self.disputes = []
        for sender in sorted(senders):
            sealed, row = reveal.inbox[sender], reveal.rows[sender]
            try:
                opened[sender] = self._open_bundle(sender, sealed, row, current)
            except BadShare as error:
                self.disputes.append(str(error))
        return opened

    def _open_bundle(
        self, sender: int, sealed: bytes, row: bytes, current: _Round
    ) -> bytearray:
        """Shares as a survivor dealt them, checked against its commitments.

        Raises:
            BadShare: They are not what it committed to.
        """
        who = f"site {self.contract.member(sender).site!r}"
        shares = unseal(
            current.shared.receive[sender],
            sealed,
            channel_data(current.context, sender, self.number),
            who=who,
        )
        size = SHARE_BYTES * len(current.facts.cohort)
        if len(shares) == size and row == self._row(
            current.context, shares, dealer=sender, holder=self.number
        ):
            return shares
        wipe(shares)
        raise BadShare(f"{who} sent this site shares that do not match its commitments")

    def _release(self, opened: Mapping[int, bytearray], current: _Round) -> Shares:
        """The structural rule: b_j for j in A; k_jl for j in A and l not in A."""
        cohort = current.facts.cohort
        dropped = [x for x in cohort if x not in current.survivors]
        self_shares, pair_shares = {}, {}
        for j, shares in opened.items():
            self_shares[j] = bytes(shares[:SHARE_BYTES])
            starts = [SHARE_BYTES * place_of(j, x, cohort) for x in dropped]
            pair_shares[j] = b"".join(
                shares[start : start + SHARE_BYTES] for start in starts
            )
        return Shares(
            number=self.number,
            context=current.context,
            self_shares=self_shares,
            pair_shares=pair_shares,
            disputed=tuple(j for j in current.survivors if j not in opened),
        )
