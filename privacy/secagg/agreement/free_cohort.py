"""Cohorts of whichever sites are ready: who is in a sum, and what each has trained on.

In buffered rounds with differential privacy for records each site trains on the newest
model without any keys, and keeps its update. As soon as ``schedule.buffer_size`` sites
have one, they form a cohort and make keys for a single sum::

    aggregator                                                      each site i
        |-- model ---------------------------------------------------->|  trains
        |<-- ready ----------------------------------------------------|  keeps u_i
        |-- FreeCohort, and the offer of its contract ---------------->|  u_i is in it?
        |<-- Advert ---------------------------------------------------|
        |-- Book ----------------------------------------------------->|
        |<-- Confirm --------------------------------------------------|
        |-- everybody's Confirm -------------------------------------->|  seals u_i and
        |<-- masked update --------------------------------------------|  forgets it

All sites must answer (P1), and all of them are idle: nobody waits for one that trains.
The cohort's digest is the contract's ``partition``, hence in every mask key: all sites
of a sum have seen the same list, or their masks do not cancel.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from federation.ids import SiteId
from privacy.secagg.agreement.canonical import Reader, lp
from privacy.secagg.agreement.contract import MAX_MEMBERS
from privacy.secagg.agreement.groups import MAX_OFFER_BYTES
from privacy.secagg.agreement.message import (
    DIGEST_BYTES,
    NAME,
    Digest,
    Message,
    listed,
    record,
    whole,
)
from privacy.secagg.errors import MalformedMessage

_OFFER = b"xsa-v2/free offer"
_MAX_COHORT_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedUpdate:
    """An update that its site keeps, and what it has trained on.

    Attributes:
        round_index: The round of the task; 0 where the sites of a cohort only evaluate.
        based_on: The round whose model it was sent.
        model_digest: ``train.model_digest`` of that model.
    """

    site: Annotated[SiteId, NAME]
    round_index: Annotated[int, whole()]
    based_on: Annotated[int, whole()] = 0
    model_digest: Digest = bytes(DIGEST_BYTES)


@dataclass(frozen=True, kw_only=True)
class FreeCohort(Message):
    """The sites of one sum. Its encoding has the attributes in this order.

    Attributes:
        round_index: The round whose model the sum is for. It is the sum's number.
        updates: One for each site, in the order of their names.

    Raises:
        MalformedMessage: A site is there twice, or has trained on a later model.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/free cohort"
    round_index: Annotated[int, whole(1)]
    updates: Annotated[
        tuple[FinishedUpdate, ...],
        listed(record(FinishedUpdate), MAX_MEMBERS, named="update"),
    ]

    def __post_init__(self) -> None:
        """Refuse what no honest aggregator sends."""
        names = [update.site for update in self.updates]
        if names != sorted(set(names)):
            raise MalformedMessage(
                f"a cohort of {', '.join(names)}: its sites must be distinct and in "
                "the order of their names"
            )
        for each in () if self.evaluates else self.updates:
            if not each.based_on < each.round_index <= self.round_index:
                raise MalformedMessage(
                    f"a cohort for round {self.round_index} has an update of round "
                    f"{each.round_index}, based on the model of round {each.based_on}"
                )

    @property
    def sites(self) -> tuple[SiteId, ...]:
        """Their names."""
        return tuple(update.site for update in self.updates)

    @property
    def evaluates(self) -> bool:
        """Whether its sites evaluate a model, without an update of any."""
        return not any(update.round_index for update in self.updates)

    @property
    def is_fresh(self) -> bool:
        """Whether all of them have trained on the newest model."""
        return not any(map(self.age, self.updates))

    def age(self, update: FinishedUpdate) -> int:
        """Models that are newer than the one that an update is based on."""
        return self.round_index - 1 - update.based_on

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical encoding, the contract's ``partition``."""
        return hashlib.sha256(self.to_bytes()).digest()


def write_free_offer(cohort: FreeCohort, offer: bytes) -> bytes:
    """Encode the offer of a cohort's contract, with the cohort."""
    return lp(_OFFER) + lp(cohort.to_bytes()) + lp(offer)


def read_free_offer(data: bytes) -> tuple[FreeCohort, bytes]:
    """Decode ``write_free_offer``.

    Raises:
        MalformedMessage: The bytes are something else, or no cohort.
    """
    reader = Reader(data, _OFFER)
    cohort = reader.field("cohort", limit=_MAX_COHORT_BYTES)
    offer = reader.field("offer", limit=MAX_OFFER_BYTES)
    reader.end()
    return FreeCohort.from_bytes(cohort), offer
