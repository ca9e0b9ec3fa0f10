"""Releases of a site as an accountant sees them: mechanisms without their data.

An event says how a release was made and nothing of what was released, so that it may
be written down, sent and added up. What the events add up to is in ``accountant``.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

MAX_STEPS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyEvent:
    """A release, possibly repeated: the Poisson-sampled Gaussian.

    Each step takes every record with probability ``sampling_rate``, adds up one
    contribution of each and adds Gaussian noise (DP-SGD, arXiv:1607.00133,
    Algorithm 1). Neighbouring relation: add or remove one record.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity of
            the sum, > 0, both after rounding: the one that was really in force.
        sampling_rate: Probability q of each record to be in a step, in (0, 1];
            1 is a release from all records, without amplification.
        steps: How often; 0 for a round that only ends steps which an earlier event has.
        slack: Probability that a step is not covered by ``noise_multiplier``, in
            [0, 1); an accountant takes ``steps * slack`` from delta.

    Raises:
        ValueError: A value is out of its range.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    slack: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that no mechanism has."""
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ValueError(
                f"noise_multiplier is {self.noise_multiplier}: a release needs noise"
            )
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate is {self.sampling_rate}, not in (0, 1]")
        if not 0 <= self.steps <= MAX_STEPS:
            raise ValueError(f"steps is {self.steps}, not from 0 to {MAX_STEPS}")
        if not 0 <= self.slack < 1:
            raise ValueError(f"slack is {self.slack}, not in [0, 1)")

    def document(self) -> dict[str, float | int]:
        """Plain values, for JSON."""
        # A whole number of the caller's must not become a second spelling.
        return {
            name: value if name == "steps" else float(value)
            for name, value in asdict(self).items()
        }

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read exactly what ``document`` wrote.

        Raises:
            ValueError: It is not such a value.
        """
        kinds = {
            "noise_multiplier": float,
            "sampling_rate": float,
            "steps": int,
            "slack": float,
        }
        if not isinstance(document, Mapping) or set(document) != set(kinds):
            raise ValueError(
                f"an event must have exactly the fields {', '.join(kinds)}"
            )
        for name, kind in kinds.items():
            if type(document[name]) is not kind:
                raise ValueError(
                    f"{name} of an event has the wrong type: {document[name]!r}"
                )
        return cls(**document)


def total_slack(events: tuple[PrivacyEvent, ...]) -> float:
    """Probability that any step of any event is not covered (a union bound)."""
    return math.fsum(event.steps * event.slack for event in events)
