"""One round of one secure sum at the aggregator: fold masked updates, open the sum.

A run has one such sum, or one for each group of sites: ``secure_sum``, ``group_sums``.

Shape suffixes: d float values of the model, h words of the header.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from aggregator.sum_bounds import SumTerms, check_totals
from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.mapped import sha256
from federation.messages import MaskedUpdate
from federation.vectors import HeaderVector, Vector
from privacy.keystream import apply_masks_
from privacy.secagg.agreement.certificate import OpenedRound
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.header import decode_header
from privacy.secagg.arithmetic.level_sum import LevelSum
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.messages import MaskedAnswer
from privacy.secagg.protocol.server import AggregatorRound
from privacy.secagg.protocol.setup import SetupRecord

SecretSum = MaskedSum | LevelSum


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSum:
    """The result of a sum.

    Attributes:
        opened: The round, for the certificate of the next.
        mean_d: Mean of the updates, shape ``(d,)``; None if sites only evaluated.
        totals: Sums of the header, by slot.
        total: The sum itself, without masks.
    """

    opened: OpenedRound
    mean_d: Vector | None
    totals: Mapping[str, float]
    total: SecretSum | None


class MaskedRound:
    """Folds each masked update as it lands, and unmasks the sum at the end.

    Attributes:
        protocol: The round as the protocol sees it.
    """

    def __init__(
        self,
        setup: SetupRecord,
        facts: RoundFacts,
        *,
        total: SecretSum | None,
    ) -> None:
        """Begin with nothing.

        Args:
            setup: What the round rests on.
            facts: The round.
            total: An empty sum of updates; None for evaluations.
        """
        self.protocol = AggregatorRound(setup=setup, facts=facts)
        self._contract = contract = setup.contract
        self._header = train.header_spec(contract.num_sites, contract.header_slots)
        self._header_h: HeaderVector = np.zeros(len(self._header.slots), np.uint64)
        self._total = total
        self._num_bytes = 0 if total is None else total.num_bytes

    def fold(self, update: MaskedUpdate) -> None:
        """Add a site's masked update.

        Raises:
            ProtocolError: It does not belong to this round; nothing was added.
        """
        self._check_sizes(update)
        # Who signed is checked before it counts: no site speaks for another.
        number = MaskedAnswer.read_number(update.body)
        check_sender(update.site, self._contract.member(number).site)
        self.protocol.on_masked(
            update.body,
            vector_digest=sha256(update.words),
            header_digest=hashlib.sha256(update.header_h.data).digest(),
        )
        self._add(update, count=1)

    def fold_relayed(self, update: MaskedUpdate, parts: Sequence[MaskedUpdate]) -> None:
        """Add the sum that a relay has made of several sites' masked updates.

        Args:
            update: The sum, in the relay's name.
            parts: What each of the sites sent beside its words.

        Raises:
            ProtocolError: It does not belong to this round; nothing was added.
        """
        self._check_sizes(update)
        numbered = sorted(
            ((MaskedAnswer.read_number(part.body), part) for part in parts),
            key=itemgetter(0),
        )
        for number, part in numbered:
            check_sender(part.site, self._contract.member(number).site)
        self.protocol.on_relayed(
            update.body,
            [part.body for _, part in numbered],
            vector_digest=sha256(update.words),
            header_digest=hashlib.sha256(update.header_h.data).digest(),
        )
        self._add(update, count=len(parts))

    def _add(self, update: MaskedUpdate, *, count: int) -> None:
        self._header_h += update.header_h
        if self._total is not None:
            self._total.fold_(update.words, count=count)

    def open(
        self,
        job: JobSpec,
        *,
        evaluation: bool,
        update_clip: float,
        steps: range | None = None,
    ) -> OpenedSum:
        """Remove the remaining masks and read the sum.

        Args:
            job: Says what honest sites may have reported.
            evaluation: Whether the sites evaluated the model.
            update_clip: What each update was clipped to.
            steps: Local steps that were chosen for the round.

        Raises:
            TooFewSites: Too few sites have answered.
            BadShare: The shares of a secret contradict one another.
            SumOutOfRange: Honest sites do not make such a sum.
        """
        total = self._total
        corrections = self.protocol.corrections()
        if total is not None:
            total.apply_masks_(train.masks(corrections.vector))
        apply_masks_(self._header_h, train.masks(corrections.header))
        corrections.erase()
        opened = self.protocol.opened(
            sum_digest=hashlib.sha256().digest() if total is None else total.digest(),
            header_digest=hashlib.sha256(self._header_h.astype("<u8").data).digest(),
        )
        num_updates = len(opened.survivors)
        header = replace(self._header, num_sites=num_updates)
        totals = decode_header(header, self._header_h)
        asked = SumTerms(
            job=job,
            contract=self._contract,
            num_updates=num_updates,
            round_index=opened.round_index,
            training=total is not None,
            evaluation=evaluation,
            steps=steps,
        )
        check_totals(totals, asked)
        mean_d = None
        if total is not None:
            weight = totals[train.WEIGHT]
            # Updates of a smaller clip norm were scaled up to the contract's.
            scale = self._contract.clip_norm / update_clip
            mean_d = total.decode(divisor=weight * scale, weight=weight)
        return OpenedSum(opened=opened, mean_d=mean_d, totals=totals, total=total)

    def _check_sizes(self, update: MaskedUpdate) -> None:
        if update.words.size != self._num_bytes:
            raise ProtocolError(
                f"sent {update.words.size} bytes of masked words instead of "
                f"{self._num_bytes}"
            )
        if update.header_h.size != self._header_h.size:
            raise ProtocolError(
                f"sent a header of {update.header_h.size} words instead of "
                f"{self._header_h.size}"
            )


def check_sender(site: SiteId, signer: SiteId) -> None:
    """Check that an answer was signed by the site that sent it.

    Raises:
        ProtocolError: It was not.
    """
    if signer != site:
        raise ProtocolError(f"sent an answer that {signer!r} signed")
