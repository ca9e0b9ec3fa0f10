"""Results by subgroup: records split by a public column before they are evaluated.

Each subgroup is walked through by itself, so an objective knows nothing of it, and all
records are evaluated once.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from clients.data.datasets import Dataset, Indices
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.metrics import has_noised_results, subgroups_of
from federation.job.spec import JobSpec
from federation.messages import MetricSums


def split(job: JobSpec, site: SiteId, data: Dataset) -> Sequence[Indices]:
    """Places of each subgroup's records, and then of those in none.

    Raises:
        SiteError: The site's data do not have the column.
    """
    names = job.training.subgroups
    if not names:
        return [np.arange(len(data))]
    column = job.training.subgroup_column
    number_n = _by_column(job, site, data) if column else _by_group(job, site, data)
    return [np.flatnonzero(number_n == each) for each in (*range(len(names)), -1)]


def _by_group(job: JobSpec, site: SiteId, data: Dataset) -> Indices:
    """Number of each record's subgroup by the groups that the source names."""
    if data.groups is None:
        raise SiteError(
            f"site {site!r}: training.subgroups needs data that name the group of each "
            "held-out record: return clients.data.Examples with groups and "
            "group_names, or set training.subgroup_column to a column of the inputs"
        )
    names = job.training.subgroups
    number = {name: index for index, name in enumerate(names)}
    numbers = np.array([number.get(name, -1) for name in data.group_names], np.int64)
    return numbers[data.groups]


def _by_column(job: JobSpec, site: SiteId, data: Dataset) -> Indices:
    """Number of each record's subgroup by the value of an input."""
    training, size = job.training, job.evaluation.batch_size
    wanted = np.array([float(value) for value in training.subgroups])
    found = []
    for start in range(0, len(data), size):
        inputs, _ = data.batch(np.arange(start, min(start + size, len(data))))
        column = training.subgroup_column
        if not isinstance(inputs, Mapping) or column not in inputs:
            raise SiteError(
                f"site {site!r} has no column {column!r} among its inputs "
                "(training.subgroup_column): return a dict of columns with it, or "
                "remove training.subgroups"
            )
        values = inputs[column].double().numpy()
        if values.size != len(values):
            raise SiteError(
                f"site {site!r}: column {column!r} (training.subgroup_column) must "
                f"have one value for each record, not rows of {values.shape[1:]}"
            )
        found.append(values.reshape(-1))
    is_equal = np.concatenate(found)[:, None] == wanted
    return np.where(is_equal.any(1), is_equal.argmax(1), -1)


def pooled(
    job: JobSpec, sizes: Sequence[int], parts: Sequence[MetricSums]
) -> MetricSums:
    """Add up the subgroups' sums, and report those that are large enough by themselves.

    Args:
        job: Names the subgroups.
        sizes: Numbers of records of each subgroup, and of those in none.
        parts: Their sums, in the same order.
    """
    total = parts[0]
    for part in parts[1:]:
        total += part
    if not job.training.subgroups:
        return total
    # With noise nothing is left out: whether it is would depend on single records.
    least = 0 if has_noised_results(job) else job.training.min_subgroup
    hidden, by_name = suppressed(sizes, least), {}
    for name, metric in subgroups_of(job.training).items():
        _, number, what = name.split("_")
        part = parts[int(number)]
        value = {"count": part.count, "loss": part.loss_sum}.get(what)
        value = part.metrics["correct"] if value is None else value
        if int(number) in hidden:
            value = 0
        if what == "loss" and part.count:  # NaN is in the whole loss.
            value = float(np.clip(np.nan_to_num(value), 0, metric.high * part.count))
        by_name[name] = value
    metrics = {**total.metrics, **by_name}
    return MetricSums(count=total.count, loss_sum=total.loss_sum, metrics=metrics)


def suppressed(sizes: Sequence[int], least: int) -> set[int]:
    """Subgroups that are not reported: those with fewer than ``least`` records.

    The total less the others would reveal them. So more are left out, the smallest
    first, until those that are left out have as many records together (complementary
    suppression).
    """
    order = sorted((n for n, size in enumerate(sizes) if size), key=sizes.__getitem__)
    hidden = {number for number in order if sizes[number] < least}
    for number in order:
        if not hidden or sum(sizes[each] for each in hidden) >= least:
            break
        hidden.add(number)
    return hidden
