"""All methods at the aggregator, in the order in which they change a model."""

from collections.abc import Callable, Sequence

from aggregator.methods import (
    capacity,
    chosen_steps,
    clipped_updates,
    counted,
    history,
    kept_zeros,
    model_changes,
    selection,
    site_times,
    statistics,
)
from aggregator.methods.selection import MetricOf
from federation.job.spec import JobSpec
from federation.rounds.guest import ServerGuest

Begin = Callable[[JobSpec], ServerGuest | None]

SERVER_METHODS: Sequence[Begin] = (
    chosen_steps.begin,
    capacity.begin,
    site_times.begin,
    clipped_updates.begin,
    kept_zeros.begin,
    model_changes.begin,
    counted.begin,
    history.begin,
    statistics.begin,
)


def begin(job: JobSpec, metric_of: MetricOf) -> Sequence[ServerGuest]:
    """Begin a run of every method that the job uses.

    Args:
        job: A checked job.
        metric_of: Finds a metric in pooled results by its name, for the selection.
    """
    found = (*(each(job) for each in SERVER_METHODS), selection.begin(job, metric_of))
    return [guest for guest in found if guest is not None]
