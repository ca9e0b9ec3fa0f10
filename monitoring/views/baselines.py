"""Results of a job's baselines: pooled data, each site alone and the federation."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from federation.messages import MetricSums
from monitoring.units import format_bytes, format_duration
from monitoring.views.round_view import accuracy_of, loss_of

ALL = "all"  # The held-out data of all sites together.


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One model that was trained, with one seed.

    Attributes:
        results: Results on the held-out data of each site and of ``ALL``.
        epsilon: What it guarantees; None without differential privacy.
        num_bytes: Sent between sites and aggregator; None if there was nothing to send.
        seconds: How long its training took.
    """

    results: Mapping[str, MetricSums]
    epsilon: float | None
    num_bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A way of training, with each seed.

    Attributes:
        name: ``federation``, ``pooled data`` or ``only SITE``.
        steps: Optimiser steps that its data are trained for; None if epochs count.
        trainings: One for each seed.
    """

    name: str
    steps: int | None
    trainings: Sequence[Training]

    def values(self, metric: str, place: str) -> list[float]:
        """A metric's values on some data, by seed; empty if the task has none."""
        of = {"loss": loss_of, "accuracy": accuracy_of}[metric]
        found = (of(training.results[place]) for training in self.trainings)
        return [value for value in found if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """All baselines of a job.

    Attributes:
        job: Its name.
        seeds: Of data split, first model and order of examples.
        work: What is equal between the rows, in a sentence.
        notes: What else a reader must know.
        rows: The baselines.
        sites: Names of the sites.
    """

    job: str
    seeds: Sequence[int]
    work: str
    notes: Sequence[str]
    rows: Sequence[Baseline]
    sites: Sequence[str]

    @property
    def places(self) -> Sequence[str]:
        """The data that every model is evaluated on."""
        return (ALL, *self.sites)

    @property
    def metrics(self) -> Sequence[str]:
        """The metrics that the task has."""
        known = ("loss", "accuracy")
        return [name for name in known if self.rows[0].values(name, ALL)]

    def document(self) -> dict[str, Any]:
        """All results for JSON."""
        return {
            "job": self.job,
            "seeds": list(self.seeds),
            "work": self.work,
            "notes": list(self.notes),
            "rows": [
                {
                    "name": row.name,
                    "steps": row.steps,
                    **{
                        metric: {
                            place: _spread(row.values(metric, place))
                            for place in self.places
                        }
                        for metric in self.metrics
                    },
                    "epsilon": [one.epsilon for one in row.trainings],
                    "bytes": [one.num_bytes for one in row.trainings],
                    "seconds": [one.seconds for one in row.trainings],
                }
                for row in self.rows
            ],
        }

    def table(
        self, metric: str, most_sites: int | None = None
    ) -> tuple[list[str], list[list[str]]]:
        """Heads and cells of a metric's table: who trained by whose data.

        With more than ``most_sites`` sites, only the results on all data.
        """
        is_wide = most_sites is not None and len(self.sites) > most_sites
        places = (ALL,) if is_wide else self.places
        heads = [metric, *places, "epsilon", "bytes", "time"]
        return heads, [
            [
                row.name,
                *(_text(metric, row.values(metric, place)) for place in places),
                *_costs(row),
            ]
            for row in self.rows
        ]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


def _text(metric: str, values: Sequence[float]) -> str:
    """A mean, and with several seeds the standard deviation, in nats or percent."""
    scale, unit, digits = (100, " %", 2) if metric == "accuracy" else (1, "", 4)
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return f"{mean}{unit}"
    return f"{mean} +-{scale * statistics.stdev(values):.{digits}f}{unit}"


def _costs(row: Baseline) -> list[str]:
    """Epsilon, bytes and time: the largest, and means over the seeds."""
    epsilons = [one.epsilon for one in row.trainings if one.epsilon is not None]
    sent = [one.num_bytes for one in row.trainings if one.num_bytes is not None]
    seconds = statistics.fmean(one.seconds for one in row.trainings)
    return [
        f"{max(epsilons):.2f}" if epsilons else "none",
        format_bytes(statistics.fmean(sent)) if sent else "-",
        format_duration(seconds),
    ]
