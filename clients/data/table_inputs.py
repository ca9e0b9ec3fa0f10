"""What a model takes from a table: columns in the job's order, and codes of a target.

Each site's file has its own order of columns and of words, so neither may decide what a
number means: the job does, which all sites accept.
"""

from dataclasses import replace

from clients.data.datasets import Dataset
from clients.data.persons import COLUMN
from clients.data.pooled import PooledDataset
from clients.data.tables import Table, Words, with_codes
from federation.errors import JobError, SiteError
from federation.job.spec import JobSpec

_INPUTS, _CLASSES = "training.inputs", "training.classes"
_MOST_NAMED = 64


def as_listed(job: JobSpec, data: Dataset, whose: str) -> Dataset:
    """Return the columns of a table that the job lists; other data as they are.

    Args:
        job: Lists inputs and classes.
        data: Training or held-out data.
        whose: Whose data they are, for messages.

    Raises:
        JobError: The job must list inputs or classes, or must list none.
        SiteError: A column is missing or has another kind, or its words are not those
            that the job lists. No message holds a value.
    """
    if isinstance(data, PooledDataset):
        return replace(data, parts=[as_listed(job, p, whose) for p in data.parts])
    if isinstance(data, Table):
        return _with_codes(job, _with_inputs(job, data, whose), whose)
    if job.training.inputs:
        raise JobError(
            f"lists columns of a table, and {whose} has none: remove this key, or "
            "return a clients.data.Table from the data source",
            key=_INPUTS,
        )
    return data


def _with_inputs(job: JobSpec, data: Table, whose: str) -> Table:
    listed = job.training.inputs
    if not listed:
        if not job.training.standardise:  # Which names columns, too.
            _check_order(data, whose)
        return data
    faults = [fault for name in listed if (fault := _fault(data, name))]
    if faults:
        raise SiteError(f"{whose} {'; '.join(faults)} ({_INPUTS})")
    kept = [name for name in (data.target, COLUMN) if name in data.columns]
    return data.with_columns({n: data.columns[n] for n in (*listed, *kept)})


def _fault(data: Table, name: str) -> str:
    """Why a column cannot be an input; empty if it can."""
    column, known = data.columns.get(name), f"has column {name!r:.80}"
    if name in {data.target, COLUMN}:
        return f"{known} as target or persons, which are no inputs"
    if column is None:
        return data.without(name)
    if isinstance(column, Words):
        return f"{known} of text: write its codes into the file, as numbers"
    return "" if column.ndim == 1 else f"{known} with several values a record"


def _check_order(data: Table, whose: str) -> None:
    """Refuse columns of which only the file decides the order.

    Those of an array are numbered: there, a place is all that a column has.
    """
    names = data.inputs
    numbered = (str(at) for at in range(len(names) + 1))
    if not names or names == [n for n in numbered if n != data.target][: len(names)]:
        return
    many = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    shown = ", ".join(f'"{name}"' for name in names[:_MOST_NAMED])
    why = "list the columns that the model takes: files have them in different orders"
    raise JobError(
        f"{why}. Those of {whose} are inputs = [{shown}]{many}",
        key=_INPUTS,
        outside=f"{why}. Those of {whose} are in its log",
    )


def _with_codes(job: JobSpec, data: Table, whose: str) -> Table:
    """Give the words of a target the codes that the job lists."""
    target, listed = data.columns.get(data.target), job.training.classes
    if not isinstance(target, Words):
        return data
    which = f"column {data.target!r:.80} of {whose}"
    if target.is_listed:
        if listed and target.values != listed:
            raise SiteError(
                f"the categories of {which} are not {_CLASSES}: list the same words in "
                "the same order"
            )
        return data
    if not listed:
        raise JobError(
            f"{which}, the target, is text: list all its words, in the order of their "
            'codes, such as classes = ["no", "yes"]; if the job can have no classes, '
            "list them as categories in the options of each site's data source",
            key=_CLASSES,
        )
    coded = with_codes(target, listed)
    if coded is None:
        raise SiteError(f"{which}, the target, has words that are not in {_CLASSES}")
    return data.with_columns({**data.columns, data.target: coded})
