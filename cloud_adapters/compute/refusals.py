"""The refusals of a compute service as this product's errors, with their messages."""

from dataclasses import dataclass

from federation.errors import ComputeError, ComputeUnavailable, NoCapacity

PASSING = (ComputeUnavailable, NoCapacity)
"""Faults of a cloud that pass without a person: throttling, outages, no capacity."""

_MAX_WORDS = 300  # Some services append kilobytes that help no reader.


@dataclass(frozen=True, slots=True)
class Refusal:
    """What an answer or an exception means to us.

    Attributes:
        error: What to raise.
        advice: What a person can do.
    """

    error: type[ComputeError]
    advice: str

    def told(self, doing: str, said: str) -> ComputeError:
        """Make the error.

        Args:
            doing: What was being done, and where: ``launch site-a in us-east-1a``.
            said: What the service says.
        """
        words = " ".join(said.split())[:_MAX_WORDS]
        return self.error(f"cannot {doing}: {self.advice} ({words})")
