"""Jobs of statistics: the tables that follow from ``[statistics]``, and its faults."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from federation.errors import JobError, broken, joined
from federation.job.evaluation_job import evaluates_only
from federation.job.metrics import STATISTICS
from federation.job.spec import JobSpec, ModelSpec
from federation.job.statistics_job import (
    CATEGORY,
    MAX_CATEGORIES,
    MAX_QUANTILES,
    OTHER,
    ColumnSpec,
    StatisticsSpec,
)
from federation.job.statistics_table import (
    KINDS,
    Table,
    table_of,
)

FACTORY = "clients.models:sums"
_PAIR = 2
_UNITS = ("none", "record")  # Of privacy. For others, sums have no noise of their own.
_NOISED_FOR = ("record", "joint")  # Units of privacy that noised moments keep.
_SPARE_ROUNDS = 2  # Lost rounds that a run survives.
_MOST_VALUES = 250_000  # That an update has, of 4 bytes each.


def table(job: JobSpec) -> Table:
    """The sums that a job asks for.

    Raises:
        ValueError: It asks for none.
    """
    if job.statistics is None:
        raise ValueError("this job asks for no statistics")
    noised = job.privacy.differential_privacy.enabled
    return table_of(job.statistics, len(job.sites), noised=noised)


def planned_rounds(job: JobSpec) -> int:
    """Rounds of a job in which none is lost."""
    return job.rounds if job.statistics is None else len(table(job).stages)


def filled(document: Mapping[str, Any], spec: StatisticsSpec) -> dict[str, Any]:
    """Fill in what follows from the statistics that a job's document asks for.

    Raises:
        JobError: The table asks for what cannot be computed.
    """
    faults = list(_faults(spec))
    if faults:
        raise joined(faults)
    found = dict(document)
    privacy = dict(_table(document, "privacy"))
    private = dict(_table(privacy, "differential_privacy"))
    secure = dict(_table(privacy, "secure_aggregation"))
    sites = document.get("sites")
    num_sites = len(sites) if isinstance(sites, list | tuple) and sites else 1
    unit = private.get("unit", "none")
    asked = table_of(spec, num_sites, noised=unit != "none")
    if private:
        private.setdefault("reserve_rounds", 0)
        privacy["differential_privacy"] = private
    if secure.get("enabled") and unit in _UNITS:
        secure.setdefault("element_bound", asked.element_bound)
        privacy["secure_aggregation"] = secure
    if privacy:
        found["privacy"] = privacy
    found.setdefault("rounds", len(asked.stages) + _SPARE_ROUNDS)
    options = {"values": asked.num_values}
    found.setdefault("model", {"factory": FACTORY, "options": options})
    found.setdefault(
        "training", {"task": STATISTICS, "local_steps": 1, "batch_size": 1}
    )
    found.setdefault("evaluation", {"every": 0})
    found.setdefault("aggregation", {"weights": "uniform"})
    return found


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key, {})
    return found if isinstance(found, Mapping) else {}


def check_statistics(job: JobSpec) -> Iterator[JobError]:
    """Refuse tables that would change what the statistics are.

    Yields:
        An error for each.
    """
    yield from _check_moments(job)
    if job.statistics is None:
        if job.training.task == STATISTICS:
            yield JobError(
                "is the task of jobs with a [statistics] table: add it, or name "
                "another task",
                key="training.task",
            )
        return
    asked = table(job)
    if asked.num_values > _MOST_VALUES:
        yield JobError(
            f"takes {asked.num_values:,} values, and a site sends at most "
            f"{_MOST_VALUES:,}: ask about fewer columns, bins, categories or "
            "covariances in one job",
            key="statistics",
        )
    plain = ModelSpec(factory=FACTORY, options={"values": asked.num_values})
    training, needed = job.training, len(asked.stages)
    steps = (training.local_steps, training.batch_size)
    is_plain = training.task == STATISTICS and steps == (1, 1)
    is_plain = is_plain and not training.standardise and not training.inputs
    wrong = {
        "model": job.model != plain,
        "training": not is_plain,
        "evaluation": job.evaluation.every != 0,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            yield JobError(
                "follows from [statistics], which trains no model: remove this table",
                key=key,
            )
    secure = job.privacy.secure_aggregation
    is_allowed = job.privacy.differential_privacy.unit in _UNITS
    bound = asked.element_bound if is_allowed else None
    if secure.enabled and secure.element_bound != bound:
        yield JobError(
            "element_bound follows from [statistics]: remove it",
            key="privacy.secure_aggregation",
        )
    if job.rounds < needed:
        yield JobError(f"these statistics take {needed} rounds", key="rounds")


def _check_moments(job: JobSpec) -> list[JobError]:
    """Refuse moments that are none, or that the job's epsilon would not cover.

    An evaluation trains on no record, and takes the moments of the model's training.
    """
    training, private = job.training, job.privacy.differential_privacy
    moments, noised = training.moments, training.moments_privacy
    inputs = training.inputs
    trains = bool(moments) and private.enabled and not evaluates_only(job)
    rules = {
        "training.standardise: records are standardised once: remove this key or "
        "privacy.differential_privacy.standardise": training.standardise
        and private.standardise is not None,
        "training.moments: must be [mean, deviation] of each column, with a "
        "deviation above 0": not all(map(_is_moment, moments.values())),
        "training.moments: are those of training.standardise: set that": bool(moments)
        and not training.standardise,
        "training.moments_privacy: must be [epsilon, delta] of the run that found "
        "training.moments, or empty if its sums are exact": bool(noised)
        and not (moments and len(noised) == _PAIR and noised[0] > 0 < noised[1] < 1),
        "training.standardise: the moments are exact, and the job has the unit "
        f"{private.unit!r}: its epsilon would not cover what they show of a record. "
        'Run the statistics with unit = "record", or remove this key and set '
        "privacy.differential_privacy.standardise": trains and not noised,
        "training.standardise: the noise of statistics hides one record, and the job "
        f"has the unit {private.unit!r}: remove this key": trains
        and bool(noised)
        and private.unit not in _NOISED_FOR,
        "training.inputs: lists a column twice": len(set(inputs)) != len(inputs),
        "training.inputs: lists columns of which training.moments has none": bool(
            moments
        )
        and not moments.keys() >= {*inputs},
    }
    return broken(rules)


def _is_moment(pair: Sequence[float]) -> bool:
    return len(pair) == _PAIR and pair[1] > 0


def _faults(spec: StatisticsSpec) -> Iterator[JobError]:
    names = [name for column in spec.columns for name in column.names]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    rules: dict[str, object] = {
        "statistics.columns: add at least one table": not spec.columns,
        f"statistics.columns: {twice!r:.80} is there twice": twice is not None,
    }
    for index, column in enumerate(spec.columns):
        key = f"statistics.columns[{index}]"
        rules[f"{key}.names: name at least one column"] = not column.names
        of = _of_words if column.kind == CATEGORY else _of_numbers
        rules |= {f"{key}.{text}": fault for text, fault in of(column).items()}
    rules |= {
        f"statistics.split.{name}: is not a number above 0 for one of "
        f"{', '.join(KINDS)}": name not in KINDS or share <= 0
        for name, share in spec.split.items()
    }
    yield from broken(rules)


def _of_words(column: ColumnSpec) -> Mapping[str, object]:
    """What would be wrong with a column of categories, and whether it is."""
    listed = column.categories
    return {
        f"categories: lists {len(listed):,}, and at most {MAX_CATEGORIES:,} are "
        "possible: list the common ones, all others are counted "
        "together": len(listed) > MAX_CATEGORIES,
        "categories: lists one twice": len(set(listed)) < len(listed),
        f"categories: {OTHER} is how results name all others": OTHER in listed,
        "low: categories have no bounds, bins and quantiles: remove them": column.low
        is not None
        or column.high is not None
        or column.bins
        or column.edges
        or column.quantiles,
    }


def _of_numbers(column: ColumnSpec) -> Mapping[str, object]:
    """The same of a column of numbers."""
    edges, low, high = column.edges, column.low, column.high
    is_bounded = low is not None and high is not None
    rises = len(edges) != 1 and all(a < b for a, b in pairwise(edges))
    quantiles = column.quantiles
    return {
        "low: set low and high, which bound what a record can change, or list "
        "categories; take them from what is known of such data, never from the "
        "data": not (edges or is_bounded),
        "edges: are bounds and bins: remove low, high and bins": bool(edges)
        and (low is not None or high is not None or column.bins),
        "edges: must be two numbers or more, each larger than the last": not rises,
        "high: must be above low": not edges
        and is_bounded
        and not 0 < (high or 0.0) - (low or 0.0) < math.inf,
        f"quantiles: must be at most {MAX_QUANTILES} numbers between 0 and 1": len(
            quantiles
        )
        > MAX_QUANTILES
        or not all(0 < q < 1 for q in quantiles),
    }
