"""Records standardised by the public moments of a run of statistics.

They are in the job: every site takes the same, and whoever has the model can prepare
records for it. Sites' own noised statistics are in ``clients.privacy.standardise``.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from clients.data.datasets import Dataset
from clients.data.persons import COLUMN
from clients.data.pooled import PooledDataset
from clients.data.table_inputs import as_listed
from clients.data.tables import Table, Words
from clients.privacy.standardise import Statistics
from federation.errors import JobError, SiteError
from federation.job.spec import JobSpec

_KEY = "training.standardise"

Moments = Mapping[str, tuple[float, ...]]


def standardised(
    job: JobSpec, pair: tuple[Dataset, Dataset], whose: str = "the data source"
) -> tuple[Dataset, Dataset]:
    """Return training and held-out data as the job's model takes them.

    Args:
        job: Has the mean and the deviation of each column, if records are standardised.
        pair: Training and held-out data.
        whose: Whose data they are, for messages.

    Raises:
        JobError: The job names a run whose moments were not read when it was loaded,
            or does not list what a model takes of a table.
        SiteError: The records have other columns.
    """
    if job.statistics is not None:
        return pair
    train, held_out = (as_listed(job, part, whose) for part in pair)
    if not job.training.standardise:
        return train, held_out
    moments = job.training.moments
    if not moments:
        raise JobError(
            "names a run of statistics that was not read: load the job where the run "
            "is kept",
            key=_KEY,
        )
    moments = {n: moments[n] for n in job.training.inputs or sorted(moments)}
    return _apply(moments, train), _apply(moments, held_out)


def _apply(moments: Moments, data: Dataset) -> Dataset:
    if isinstance(data, PooledDataset):
        return replace(data, parts=[_apply(moments, part) for part in data.parts])
    if isinstance(data, Table):
        return _of_table(moments, data)
    names = sorted(moments, key=lambda name: (len(name), name))
    if names != [str(at) for at in range(len(names))]:
        raise SiteError(
            f"the moments of {_KEY} are of named columns, and the records have none: "
            "return a clients.data.Table from the data source, or ask the statistics "
            "of the columns 0, 1 and so on"
        )
    found = Statistics(
        centre=tuple(moments[name][0] for name in names),
        spread=tuple(moments[name][1] for name in names),
    )
    return found.apply(data)


def _of_table(moments: Moments, data: Table) -> Table:
    """The named columns alone; 0 for a missing value."""
    names = [*moments]
    columns = dict(data.columns)
    wrong = [n for n in names if isinstance(columns.get(n, Words), Words | type)]
    if wrong or data.target in names:
        raise SiteError(
            f"the moments of {_KEY} are of the columns {', '.join(names)}, of which "
            f"{', '.join(wrong) or data.target} is no column of numbers besides the "
            "target here"
        )
    found = {
        name: np.nan_to_num(
            (np.asarray(columns[name], np.float64) - centre) / spread, nan=0.0
        )
        for name in names
        for centre, spread in [moments[name]]
    }
    kept = {n: c for n, c in columns.items() if n in {data.target, COLUMN}}
    return data.with_columns({**found, **kept})
