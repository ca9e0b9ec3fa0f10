"""Sites that keep to the protocol and lie about what it sums.

A lie is added to words that are masked already, which is all that it takes: masks are
added too. Signatures, digests, shares: the rest is an honest site's own code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clients.privacy.ring_seal import RingRound, RingSeal
from clients.training.site import Site
from federation.vectors import ByteVector, HeaderVector

FRACTION = 1 << 32  # Steps of a fraction in the header.
Lie = Callable[[np.ndarray], None]


def the_truth(_words: np.ndarray) -> None:
    """Leave the words as they are."""


@dataclass(frozen=True, kw_only=True)
class Lies:
    """What a site adds to its answers.

    Attributes:
        header: Steps that are added to slots of the header, by name.
        vector: Changes the masked words of the update, in place.
        round_index: The round in which it lies.
    """

    header: Mapping[str, int] = field(default_factory=dict)
    vector: Lie = the_truth
    round_index: int = 2

    def told_by(self, site: Site) -> Site:
        """Have a site tell them."""
        seal: Any = site._seal
        self.told_with(seal)
        return site

    def told_with(self, seal: RingSeal) -> RingSeal:
        """Have a site of this seal tell them."""
        honest = seal._work

        def lie(round_: RingRound) -> tuple[ByteVector, HeaderVector]:
            words, header_h = honest(round_)
            if round_.task.round_index != self.round_index:
                return words, header_h
            contract = round_.masking.contract
            slots = contract.header_slots
            for name, steps in self.header.items():
                at = slots.index(name)
                header_h[at] = (int(header_h[at]) + steps) % (1 << 64)
            bits = contract.word_bits
            self.vector(words.view(f"u{bits // 8}"))
            return words, header_h

        patched: Any = seal
        patched._work = lie
        return seal


def beside(values_d: np.ndarray | float) -> Lie:
    """Add whole steps of the ring to every element of the update."""

    def add(words: np.ndarray) -> None:
        steps = np.broadcast_to(np.asarray(values_d, np.float64), words.shape)
        words += steps.astype(np.int64).astype(words.dtype)

    return add


def weight_of(wanted: float) -> Mapping[str, int]:
    """Make the weight of a site that would say 1 another one."""
    return {"weight": round((wanted - 1) * FRACTION)}
