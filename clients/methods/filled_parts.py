"""Refuses an open secure sum of parts that only some sites train.

A sum hides an update among those that fill the same values. Where data, or a model
that the aggregator has made, decide which part of the model a site trains (clusters,
branches, experts), a part of the sum may hold a single site's update. No site knows
what the others train, so each one that leaves out a part declines the round.
"""

import json
from collections.abc import Iterable

from clients.methods.guest import Guest, LocalRound
from federation.errors import SiteError
from federation.job.spec import JobSpec

_SHOWN = 4  # Names in the advice.


class FilledParts(Guest):
    """Sees which parts of an open secure sum a round's gradients reach."""

    def __init__(self, start: LocalRound) -> None:
        """Begin a round that has reached none."""
        self._idle = start.shared

    def gradient_(self) -> None:
        """Note what has a gradient; one of zeros counts."""
        self._idle = {name: p for name, p in self._idle.items() if p.grad is None}

    def end_(self, _num_steps: int) -> None:
        """Check that the steps have reached every part.

        Raises:
            SiteError: Some part has no gradient here.
        """
        check_filled(self._idle)


def begin(start: LocalRound) -> FilledParts | None:
    """Begin a round, if its update goes into an open secure sum."""
    return FilledParts(start) if is_open_sum(start.job) else None


def check_filled(idle: Iterable[str]) -> None:
    """Check that a round's training has reached every part of an open secure sum.

    Args:
        idle: Names of shared parameters that no step's gradient has reached.

    Raises:
        SiteError: Some part has no gradient here.
    """
    names = [*idle]
    if names:
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise SiteError(
            f"training reached no gradient of {names[0]!r} here (of {len(names)} "
            "tensors), so a secure sum of it could hold the update of one other site. "
            f"If no site trains them, add {json.dumps(names[:_SHOWN])}{rest} to "
            "model.frozen; otherwise make them model.personal, use "
            'unit = "site", or do without secure aggregation'
        )


def is_open_sum(job: JobSpec) -> bool:
    """Whether updates go into a secure sum without noise, which hides who fills it."""
    privacy = job.privacy
    return (
        privacy.secure_aggregation.enabled and not privacy.differential_privacy.enabled
    )
