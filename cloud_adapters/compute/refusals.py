"""The refusals of a compute service as this product's errors, with their messages."""

import re
from dataclasses import dataclass

from federation.errors import ComputeError, ComputeUnavailable, NoCapacity

PASSING = (ComputeUnavailable, NoCapacity)
"""Faults of a cloud that pass without a person: throttling, outages, no capacity."""

# Why something is refused stands last, behind long names of resources and persons.
_MAX_CHARS = 1500
_BLOB = re.compile(r"(Encoded authorization failure message: )?[\w+/=-]{200,}")


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
        words = _BLOB.sub("", " ".join(said.split())).strip()[:_MAX_CHARS]
        return self.error(f"cannot {doing}: {self.advice} ({words})")
