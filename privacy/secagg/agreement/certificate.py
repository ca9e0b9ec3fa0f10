"""What the aggregator signs about a finished round, and how a site checks it.

A certificate says: in this round, of this context, the updates of these sites came
to a sum with this digest, and the model that follows has this digest. It travels
with the next round's task. Before a coordinator has opened a round, the certificate
is of round 0: the model that the setup begins with. A site checks that it fits the
model it was sent and the rounds it took part in. Where sums are in few levels, a site
may be sent the sum in place of the model: it then compares the sum's digest with the
certificate's and computes the model itself. Otherwise it does *not*, as the sum would
double what is sent down. Anyone with a transcript of the run can, and the signature
proves whose word it was.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, ClassVar

from privacy.secagg.agreement.canonical import u64
from privacy.secagg.agreement.contract import MAX_MEMBERS, Contract
from privacy.secagg.agreement.identity import Identity, Label
from privacy.secagg.agreement.message import (
    Digest,
    FieldCodec,
    SignedMessage,
    increasing,
    record,
)
from privacy.secagg.errors import CertificateRefused

MAX_CERTIFICATE_BYTES = 2048

_LARGEST_ROUND = (1 << 63) - 1
_ROUND = FieldCodec(u64, lambda reader, _: reader.u64("round", high=_LARGEST_ROUND))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRound:
    """A round whose sum was opened; ``before_rounds`` gives round 0.

    Attributes:
        round_index: r.
        context: ctx_r; h_U of the setup for round 0.
        survivors: A, numbers of the sites in the sum, increasing; nobody in round 0.
        sum_digest: SHA-256 of the integer sum, see ``MaskedSum.digest``.
        header_digest: SHA-256 of the header's sum, little-endian 64-bit words.
    """

    round_index: Annotated[int, _ROUND]
    context: Digest
    survivors: Annotated[tuple[int, ...], increasing(MAX_MEMBERS)]
    sum_digest: Digest
    header_digest: Digest

    def leaves_out(self, round_index: int, number: int) -> bool:
        """Whether a site's update of a round is known not to be in its sum.

        Of another round than this one, nobody says who is in its sum.
        """
        return round_index == self.round_index and number not in self.survivors


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(SignedMessage):
    """End of a round, aggregator to sites, with the next round's task.

    Attributes:
        opened: The round.
        model_digest: SHA-256 of the model that follows it, ``train.model_digest``:
            theta_(r+1), or theta_r where the result was not finite.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/certificate"
    LABEL: ClassVar[Label] = Label.CERTIFICATE
    opened: Annotated[OpenedRound, record(OpenedRound)]
    model_digest: Digest


def before_rounds(setup_hash: bytes) -> OpenedRound:
    """Round 0 of a setup: no sum has been opened."""
    nothing = hashlib.sha256().digest()
    return OpenedRound(
        round_index=0,
        context=setup_hash,
        survivors=(),
        sum_digest=nothing,
        header_digest=nothing,
    )


def without_sum(round_index: int) -> OpenedRound:
    """A round in which one group has no sum that counts, while others have."""
    nothing = hashlib.sha256().digest()
    return OpenedRound(
        round_index=round_index,
        context=nothing,
        survivors=(),
        sum_digest=nothing,
        header_digest=nothing,
    )


def certify(opened: OpenedRound, model_digest: bytes, identity: Identity) -> bytes:
    """Sign the result of a round; an encoded ``Certificate``."""
    message = Certificate(opened=opened, model_digest=model_digest)
    return message.signed_by(identity).to_bytes()


class ModelTrail:
    """The models that a site received since its setup, and their certificates.

    Holds digests only; nothing in it is secret.
    """

    def __init__(self, contract: Contract, *, number: int, setup_hash: bytes) -> None:
        """Begin before the first round of a setup, at site ``number``."""
        self._contract = contract
        self._number = number
        self._start = before_rounds(setup_hash)
        self._contexts: dict[int, bytes] = {}
        self._consents: dict[int, tuple[int, ...]] = {}
        self._newest: Certificate | None = None

    def note_context(self, round_index: int, context: bytes) -> None:
        """Remember a round that this site has begun."""
        self._contexts[round_index] = context

    def note_consent(self, round_index: int, survivors: tuple[int, ...]) -> None:
        """Remember the list A that this site has signed."""
        self._consents[round_index] = survivors

    def check(self, data: bytes, *, round_index: int, model_digest: bytes) -> None:
        """Check the model of a round by its certificate.

        A certificate may be of any earlier round: those in between were lost, and
        the model is still the one it names. A site that is in the sum knows the
        round's context, and in P2 the list that it signed; of other rounds, and of
        those before its setup, it checks only the signature.

        Args:
            data: Encoded ``Certificate``.
            round_index: The round that is asked for.
            model_digest: Digest of the received model, computed by this site.

        Raises:
            CertificateRefused: Model, round, context or list are other ones, or the
                certificate is older than one seen before or contradicts it.
            BadSignature: The pinned aggregator did not sign it.
            MalformedMessage: The bytes are no certificate.
        """
        certificate = Certificate.from_bytes(data)
        certificate.verify(self._contract.aggregator_key, who="the aggregator")
        self._check_order(certificate, round_index)
        self._check_round(certificate.opened)
        if certificate.model_digest != model_digest:
            raise CertificateRefused(
                f"the model of round {round_index} is not the one that the "
                f"certificate of round {certificate.opened.round_index} names"
            )
        self._newest = certificate

    def opened(self, data: bytes) -> OpenedRound:
        """Read what a certificate says of a round, after its signature.

        Raises:
            BadSignature: The pinned aggregator did not sign it.
            MalformedMessage: The bytes are no certificate.
        """
        certificate = Certificate.from_bytes(data)
        certificate.verify(self._contract.aggregator_key, who="the aggregator")
        return certificate.opened

    def _check_order(self, certificate: Certificate, round_index: int) -> None:
        certified = certificate.opened.round_index
        if certified >= round_index:
            raise CertificateRefused(
                f"round {round_index} arrived with the certificate of round {certified}"
            )
        newest = self._newest
        if newest is None or certified > newest.opened.round_index:
            return
        if certificate.signed != newest.signed:
            raise CertificateRefused(
                f"the certificate of round {certified} contradicts the earlier one of "
                f"round {newest.opened.round_index}"
            )

    def _check_round(self, opened: OpenedRound) -> None:
        index, contract = opened.round_index, self._contract
        if index == 0:
            if opened != self._start:
                raise CertificateRefused(
                    "the certificate of round 0 describes a different start than this "
                    "site's"
                )
            return
        if contract.partition and not opened.survivors:
            return  # The model is made of the sums of other groups.
        # A site outside the sum may have received something else, or nothing.
        known = self._contexts if self._number in opened.survivors else {}
        if known.get(index, opened.context) != opened.context:
            raise CertificateRefused(
                f"the certificate is for a different round {index} than this site's: a "
                "different setup, model or kind of work"
            )
        in_contract = set(opened.survivors) <= set(contract.cohort)
        if not in_contract or len(opened.survivors) < contract.quorum:
            raise CertificateRefused(
                f"the certificate of round {index} names the sites "
                f"{list(opened.survivors)}, which the contract does not allow"
            )
        if self._consents.get(index, opened.survivors) != opened.survivors:
            raise CertificateRefused(
                f"the certificate of round {index} names different sites than the list "
                "that this site signed"
            )
