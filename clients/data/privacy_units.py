"""The units that a private step samples at a site: records, or persons with theirs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.datasets import Dataset
from clients.data.persons import numbered_alike
from federation.errors import JobError
from federation.job.spec import JobSpec
from privacy.dp.persons import Persons

UNIT = "privacy.differential_privacy.unit"


def persons_of(job: JobSpec, train: Dataset) -> Persons | None:
    """Group training records by person; None where every record is a unit.

    Args:
        job: Sets the unit of privacy.
        train: Training records of a site.

    Raises:
        JobError: The job protects persons, and the data does not name them.
    """
    if not job.privacy.differential_privacy.of_persons:
        return None
    return Persons.of(_ids_of(train))


def _ids_of(data: Dataset) -> NDArray[Any]:
    ids = data.persons
    if ids is None:
        raise JobError(
            'unit = "person" needs data that names the person of each record, with one '
            "integer or text each: return clients.data.Examples with `persons`, give "
            "the dataset an attribute `persons`, or a table a column `person_id`; then "
            "write shards again",
            key=UNIT,
        )
    return ids


def num_units(job: JobSpec, train: Dataset) -> int:
    """Number of records that steps sample from, or of persons.

    Raises:
        JobError: As ``persons_of``.
    """
    persons = persons_of(job, train)
    return len(train) if persons is None else persons.count


def plural_of_units(job: JobSpec) -> str:
    """What the units of a job are called in a message."""
    of_persons = job.privacy.differential_privacy.of_persons
    return "persons" if of_persons else "training records"


def note_on_persons(job: JobSpec, train: Dataset) -> str:
    """Say that a person with several records is protected less than a record.

    Args:
        job: Sets the unit of privacy.
        train: Training records of a site.

    Returns:
        A text for those who may see the data; empty if there is nothing to say.
    """
    unit, ids = job.privacy.differential_privacy.unit, train.persons
    if unit not in {"record", "joint"} or ids is None:
        return ""
    if Persons.of(ids).count == len(train):
        return ""
    return (
        f'the data names persons with several training records, and unit = "{unit}" '
        'protects single records, so such a person less: use unit = "person"'
    )


def held_out_units(job: JobSpec, train: Dataset, held_out: Dataset) -> Dataset:
    """The held-out records whose results get noise: of a person, at most one.

    Where persons are protected, a person who is trained on has no held-out record here,
    and any other has the first one. So what one person more adds is either a person of
    the training records or one held-out record, and the two budgets hold side by side.

    Args:
        job: Sets the unit of privacy.
        train: Training records of a site.
        held_out: Its held-out records.

    Raises:
        JobError: The job protects persons, and the data does not name them, or holds
            out no person.
    """
    private = job.privacy.differential_privacy
    is_noised = private.held_out == "noise" and job.evaluation.every > 0
    if not private.of_persons or not is_noised:
        return held_out
    trained, held = numbered_alike(_ids_of(train), _ids_of(held_out))
    _, first = np.unique(held, return_index=True)
    kept = np.sort(first[~np.isin(held[first], trained)])
    if len(kept) == 0:
        raise JobError(
            "with noise, held-out results are of persons who are not trained on, and "
            "this site has none: hold out whole persons, declare the held-out data "
            '"public" if it is, or set evaluation.every = 0',
            key="privacy.differential_privacy.held_out",
        )
    return held_out.subset(kept)
