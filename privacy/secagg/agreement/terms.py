"""A contract's terms of differential privacy, and their encoding.

DP in SECURE_AGGREGATION.md, section 2.1: {profile, mechanism, sigma, q, steps/round,
delta, eps_cap}. Here are the words and their contradictions, in the canonical
encoding. Not here: mechanisms, accountants and ledgers. A site's own ledger decides
what it spends; these terms are the most that the run may ask it for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from privacy.secagg.agreement.message import FLOAT, text, whole

# none    nothing is claimed
# record  each site makes its own training private for its own records
# person  the same, for all training records of a person
# joint   for records too, with noise shares that add up inside the secure sum
# site    for a whole site
PROFILES = ("none", "record", "person", "joint", "site")
_BY_ITSELF = ("record", "person")

_MAX_WORD_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyTerms:
    """The differential-privacy section of a contract; nothing is claimed by default.

    Its encoding has the attributes in this order.

    Attributes:
        profile: One of ``PROFILES``; what the unit of privacy is and whose noise
            counts.
        mechanism: Name of the mechanism, for example ``dp-sgd``.
        steps_per_round: Noisy steps of a site in a round.
        noise_multiplier: sigma, standard deviation of the noise over the clip norm.
        sampling_rate: q, the largest probability in (0, 1] with which any site
            draws a record, or a person, into a step.
        delta: The delta of the guarantee, in (0, 1).
        epsilon_cap: What no site's epsilon may exceed over the run, at ``delta``; a
            site's own ledger may stop earlier.
        clip_norm: Largest Euclidean norm of one unit's contribution to a step, in
            weight units; not the clip norm of the update.
        ring_noise_std: Standard deviation of one site's noise inside the sum, in
            steps of the ring's grid; 0 where noise is added in training.
    """

    profile: Annotated[str, text(_MAX_WORD_BYTES)] = "none"
    mechanism: Annotated[str, text(_MAX_WORD_BYTES)] = ""
    steps_per_round: Annotated[int, whole()] = 0
    noise_multiplier: Annotated[float, FLOAT] = 0.0
    sampling_rate: Annotated[float, FLOAT] = 0.0
    delta: Annotated[float, FLOAT] = 0.0
    epsilon_cap: Annotated[float, FLOAT] = 0.0
    clip_norm: Annotated[float, FLOAT] = 0.0
    ring_noise_std: Annotated[float, FLOAT] = 0.0

    @property
    def is_none(self) -> bool:
        """Whether nothing is claimed."""
        return self.profile == "none"

    @property
    def hides_records_alone(self) -> bool:
        """Whether a site's update hides its records from every other single site.

        Only the noise of the site's own training does: of joint noise with two
        sites, the other site knows its own half.
        """
        return self.profile in _BY_ITSELF

    @property
    def largest_epsilon(self) -> float:
        """What a site must reckon with; infinite if nothing is claimed."""
        return math.inf if self.is_none else self.epsilon_cap

    @property
    def largest_delta(self) -> float:
        """What a site must reckon with; 1 if nothing is claimed."""
        return 1.0 if self.is_none else self.delta

    def faults(self) -> Iterator[tuple[str, str]]:
        """Find contradictions: the attribute, and what is wrong with it."""
        if self.profile not in PROFILES:
            yield "profile", f"{self.profile[:64]!r} is not in {PROFILES}"
        elif not self.is_none:
            yield from self._claim_faults()
        elif self != PrivacyTerms():  # One spelling of nothing.
            yield "profile", "it is none, but a mechanism or a number is given"

    def _claim_faults(self) -> Iterator[tuple[str, str]]:
        if not 0 < len(self.mechanism.encode()) <= _MAX_WORD_BYTES:
            yield "mechanism", f"it must have 1 to {_MAX_WORD_BYTES} bytes"
        for name in ("noise_multiplier", "epsilon_cap", "clip_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                yield name, f"{value} is not a positive number"
        if not 0 < self.sampling_rate <= 1:
            yield "sampling_rate", f"{self.sampling_rate} is not in (0, 1]"
        if not 0 < self.delta < 1:
            yield "delta", f"{self.delta} is not in (0, 1)"
        if self.steps_per_round < 1:
            yield "steps_per_round", "a round must have at least one step"
        yield from self._profile_faults()

    def _profile_faults(self) -> Iterator[tuple[str, str]]:
        if self.profile == "joint" and self.steps_per_round > 1:
            # Of several local steps the later ones do not hold the others' noise.
            yield "steps_per_round", "joint noise requires rounds of one step"
        if not 0 <= self.ring_noise_std < math.inf:
            yield "ring_noise_std", f"{self.ring_noise_std} is not a number of steps"
        elif self.profile in _BY_ITSELF and self.ring_noise_std:
            yield "ring_noise_std", f"the noise of {self.profile} is added in training"
        elif self.profile == "joint" and not self.ring_noise_std:
            yield (
                "ring_noise_std",
                ("joint noise adds up inside the sum: give its standard deviation"),
            )


NO_PRIVACY = PrivacyTerms()
