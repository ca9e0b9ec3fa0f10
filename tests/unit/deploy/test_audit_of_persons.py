"""What an audit of persons plants, and whom it compares; the audits are slow."""

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.data.datasets import Dataset, Examples, as_dataset
from deploy.audit.jobs import meaning_of, records_of_canary
from deploy.audit.plain_run import not_trained_on
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.spec import JobSpec

SITE = SiteId("site-0")


def job_of(unit: str, **private: int) -> JobSpec:
    table = {"unit": unit, "target_epsilon": 8.0, **private}
    return small_job(
        aggregation={"weights": "uniform"}, privacy={"differential_privacy": table}
    )


def of(*persons: int) -> Dataset:
    examples = Examples(inputs=np.zeros((len(persons), 2)), persons=np.array(persons))
    return as_dataset(examples, name="data")


def test_canary_of_a_person_has_more_records_than_a_step_takes():
    """Unless these are many: then enough to be clipped together."""
    found = [
        records_of_canary(job_of("person", records_per_person=most))
        for most in (1, 2, 3, 8)
    ]
    assert found == [2, 3, 4, 4]
    assert records_of_canary(job_of("record")) == 1


def test_terms_say_what_neighbours_differ_in():
    for unit, said in (("person", "records of one person"), ("record", "one record")):
        relation, sampling = meaning_of(job_of(unit).privacy.differential_privacy)
        assert said in relation
        assert unit in sampling


def test_persons_who_are_trained_on_are_no_outsiders():
    """Their held-out records are those of members."""
    kept = not_trained_on(job_of("person"), (of(1, 1, 2), of(3, 2, 3, 1)), SITE)
    assert kept.persons is not None
    assert kept.persons.tolist() == [3, 3]
    held_out = of(1)
    data = of(1, 1, 2), held_out
    assert not_trained_on(job_of("record"), data, SITE) is held_out
    with pytest.raises(JobError, match="hold out whole persons"):
        not_trained_on(job_of("person"), data, SITE)
    nameless = as_dataset((np.zeros((2, 2), np.float32), None), name="data")
    with pytest.raises(JobError, match="held-out ones too"):
        not_trained_on(job_of("person"), (of(1), nameless), SITE)
