"""The sums of a job of statistics: how they travel, and jobs that are refused."""

from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from federation.errors import JobError
from federation.job import job_file
from federation.job.statistics_checks import table
from federation.job.statistics_table import Sums, Table


def job(*columns: dict[str, Any], sites: int = 3, **tables: Any) -> Any:
    asked = {"columns": list(columns), **tables.pop("statistics", {})}
    names = [{"name": f"site-{at}"} for at in range(sites)]
    return job_file.parse({"name": "s", "statistics": asked, "sites": names, **tables})


AGE = {"names": ["age"], "low": 0.0, "high": 100.0}
ALREADY_TRAINED = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4, "classes": 3},
    "weights": "model.safetensors",
}


@pytest.mark.parametrize("sites", [1, 3, 64, 500])
def test_sums_over_sites_are_exact_after_a_mean_in_float32(sites: int):
    everything = {**AGE, "names": ["age", "bmi"], "bins": 5}
    asked = table(job(everything, sites=sites, statistics={"covariances": True}))
    rng = np.random.default_rng(0)
    for stage in asked.stages:
        mean_d = np.zeros(asked.num_values, np.float32)
        totals: dict[str, list[int]] = {}
        for _ in range(sites):
            sums: Sums = {
                p.name: [
                    int(x * p.largest)
                    for x in [*rng.uniform(-1, 1, p.size).tolist(), 1, -1][-p.size :]
                ]
                if p.most
                else [1] * p.size
                for p in stage.parts
            }
            update_d = asked.write(stage, sums)
            assert np.abs(update_d).max() <= asked.element_bound
            assert np.linalg.norm(update_d) <= 8.0
            mean_d += update_d
            for name, part in sums.items():
                before = totals.get(name, [0] * len(part))
                totals[name] = [a + b for a, b in zip(before, part, strict=True)]
        mean_d /= np.float32(sites)
        asked.total_(stage, mean_d, sites)
        assert asked.read(stage, mean_d) == totals


def test_each_stage_is_due_once():
    asked: Table = table(job({**AGE, "quantiles": [0.5]}))
    table_d = np.zeros(asked.num_values, np.float32)
    for stage in asked.stages:
        assert asked.due(table_d) is stage
        sums = {p.name: [1] * p.size for p in stage.parts}
        table_d += asked.write(stage, sums)
    assert asked.due(table_d) is None


def test_a_job_of_statistics_reads_back_what_it_wrote():
    before = job({**AGE, "bins": 4}, privacy={"secure_aggregation": {"enabled": True}})
    assert job_file.parse(job_file.document(before)) == before


@pytest.mark.parametrize(
    ("column", "key", "said"),
    [
        ({"low": None}, "low", "never from the data"),
        ({"high": 0.0}, "high", "above low"),
        ({"edges": [0.0, 1.0]}, "edges", "remove low"),
        ({"quantiles": [1.0]}, "quantiles", "between 0 and 1"),
        ({"names": ["age", "age"]}, "statistics.columns", "'age'.*twice"),
        (
            {"categories": [str(n) for n in range(5000)], "low": None, "high": None},
            "categories",
            "5,000.*4,096.*counted together",
        ),
        ({"categories": ["a"]}, "low", "no bounds"),
        ({"categories": ["(other)"]}, "categories", "all others"),
        ({"bins": 4096, "names": [f"c{n}" for n in range(60)]}, "statistics", "fewer"),
    ],
)
def test_columns_that_cannot_be_counted_are_refused(
    column: dict[str, Any], key: str, said: str
):
    asked = {k: v for k, v in {**AGE, **column}.items() if v is not None}
    with pytest.raises(JobError, match=said) as caught:
        job(asked)
    assert str(caught.value).startswith("statistics")
    assert key in str(caught.value)


def test_what_follows_from_statistics_is_not_another_table_of_the_job():
    cases: dict[str, dict[str, Any]] = {
        "model": {"model": {"factory": "clients.models:mlp"}},
        "training": {"training": {"local_steps": 2}},
        "rounds": {"rounds": 1},
    }
    for key, tables in cases.items():
        with pytest.raises(JobError, match=key):
            job({**AGE, "quantiles": [0.5]}, **tables)
    with pytest.raises(JobError, match=r"statistics.split.means"):
        job(AGE, statistics={"split": {"means": 1.0}})


def test_private_training_takes_no_moments_that_its_epsilon_does_not_cover():
    """An evaluation takes those of the model's training, and trains on none."""
    moments = {"0": [0.0, 1.0]}
    training = {"local_steps": 1, "standardise": "stats:s", "moments": moments}

    def made(unit: str, *limits: float, **tables: Any) -> None:
        private = {"unit": unit, "target_epsilon": 1.0}
        private |= {"accept_low_signal": True} if unit == "site" else {}
        document = {
            "training": {**training, "moments_privacy": limits},
            "privacy": {"differential_privacy": private if unit != "none" else {}},
            "aggregation": {"weights": "uniform"},
            "evaluation": {"every": 0},
        }
        small_job(**document | tables)

    made("none")
    made("record", 1.0, 1e-5)
    ends = {"rounds": 0, "evaluation": {"every": 1}}
    made("record", model=ALREADY_TRAINED, **ends)
    with pytest.raises(JobError, match=r"training.standardise: .*exact"):
        made("record")
    with pytest.raises(JobError, match=r"training.standardise: .*hides one record"):
        made("site", 1.0, 1e-5)
    for limits in ((1.0,), (0.0, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(JobError, match=r"training.moments_privacy: .*epsilon"):
            made("record", *limits)
