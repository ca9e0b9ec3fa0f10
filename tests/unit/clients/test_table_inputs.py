"""What a model takes from a table: the same columns and codes at every site."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from clients.data.pooled import PooledDataset
from clients.data.tables import table
from clients.privacy.public_moments import standardised
from clients.training.local_federation import SiteData
from deploy.wiring.parts import build_federation
from deploy.wiring.statistics_moments import check_alike
from federation.errors import JobError, SiteError
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec

NORTH = "age,sodium,ward,label,person_id,seen\n50,140,icu,0,7,2024-01-31\n"
SOUTH = "sodium,label,age,person_id,ward\n141,1,60,8,surgery\n142,0,70,9,icu\n"
WARDS = ["icu", "surgery"]


def job_of(
    folder: Path, options: dict[str, Any] | None = None, **training: Any
) -> JobSpec:
    sites = []
    for name, text in (("north", NORTH), ("south", SOUTH)):
        file = folder / f"{name}.csv"
        file.write_text(text)
        used = {"path": str(file), "target": "label", **(options or {})}
        data = {"source": "clients.data:table", "options": used}
        sites.append({"name": name, "data": data})
    return job_file.parse(
        {
            "name": "t",
            "rounds": 1,
            "model": {
                "factory": "clients.models:logistic_regression",
                "options": {"inputs": 2, "classes": 2},
            },
            "training": {"local_steps": 1, **training},
            "evaluation": {"every": 0},
            "sites": sites,
        }
    )


def data_of(job: JobSpec) -> list[SiteData]:
    return [*build_federation(job).site_data.values()]


def batch_of(pair: SiteData) -> tuple[list[Any], list[Any]]:
    inputs, targets = pair[0].batch(np.arange(len(pair[0])))
    return inputs.tolist(), targets.tolist()


def test_inputs_have_the_order_of_the_job_in_any_file(tmp_path: Path):
    job = job_of(tmp_path, inputs=["sodium", "age"])
    north, south = data_of(job)
    assert batch_of(north) == ([[140, 50]], [0])
    assert batch_of(south) == ([[141, 60], [142, 70]], [1, 0])
    persons = south[0].persons
    assert persons is not None
    assert persons.tolist() == [8, 9]
    pooled = standardised(job, (PooledDataset.of([south[0], north[0]]), south[1]))
    assert batch_of(pooled)[0] == [[141, 60], [142, 70], [140, 50]]
    other = job_of(tmp_path, inputs=["age", "sodium"])
    assert job_digest.digest(job) != job_digest.digest(other)
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job_file.document(job)))
    check_alike(job, str(tmp_path))
    with pytest.raises(JobError, match=r"training.inputs: is not as"):
        check_alike(other, str(tmp_path))


def test_moments_are_of_the_listed_columns_in_their_order(tmp_path: Path):
    moments = {"age": [50.0, 10.0], "sodium": [140.0, 1.0], "const": [1.0, 1.0]}
    found = {"standardise": "stats:a", "moments": moments}
    _, south = data_of(job_of(tmp_path, inputs=["sodium", "age"], **found))
    assert batch_of(south)[0] == [[1, 1], [2, 2]]
    moments.pop("const")
    _, south = data_of(job_of(tmp_path, **found))
    assert batch_of(south)[0] == [[1, 1], [2, 2]]  # Without the number of a person.
    with pytest.raises(JobError, match=r"training.inputs.* none"):
        job_of(tmp_path, inputs=["weight"], **found)


def test_a_job_that_lists_no_inputs_is_refused_with_the_line_to_write(tmp_path: Path):
    with pytest.raises(JobError) as caught:
        data_of(job_of(tmp_path))
    assert caught.value.key == "training.inputs"
    assert """'north' are inputs = ["age", "sodium"]""" in str(caught.value)
    assert "sodium" not in caught.value.outside
    assert "site 'north' are in its log" in caught.value.outside
    with pytest.raises(JobError, match=r"training.inputs.* twice"):
        job_of(tmp_path, inputs=["age", "age"])


def test_columns_of_an_array_need_no_list(tmp_path: Path):
    file = tmp_path / "site.npy"
    np.save(file, np.arange(8.0).reshape(2, 4))
    job = job_of(tmp_path, {"path": str(file), "target": "2"})
    assert batch_of(data_of(job)[0])[0] == [[0, 1, 3], [4, 5, 7]]
    file.with_suffix(".csv").write_text("0,3,1,2\n1,2,3,4\n")
    other = job_of(tmp_path, {"path": str(tmp_path / "site.csv"), "target": "2"})
    with pytest.raises(JobError, match=r"training\.inputs"):
        data_of(other)


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (["age", "crp", "bmi"], r"'north' has no column 'crp'; has no column 'bmi'"),
        (["age", "seen"], r"'north' has column 'seen' of 'date32\[day\]'"),
        (["ward"], r"'north' has column 'ward' of text"),
        (["label"], r"'north' has column 'label' as target"),
        (["person_id"], r"'north' .*'person_id' as target or persons"),
    ],
)
def test_a_column_that_is_no_input_is_named(
    tmp_path: Path, inputs: list[str], why: str
):
    with pytest.raises(SiteError, match=f"^site {why}.*training.inputs"):
        data_of(job_of(tmp_path, inputs=inputs))


def test_other_data_have_no_columns_to_list(tmp_path: Path):
    job = job_of(tmp_path, inputs=["age"])
    document = job_file.document(job)
    document["sites"][0]["data"] = {"source": "clients.data:breast_cancer"}
    with pytest.raises(JobError, match=r"training.inputs.* 'north' has none"):
        data_of(job_file.parse(document))


def test_words_of_a_target_have_the_codes_of_the_job(tmp_path: Path):
    options: dict[str, Any] = {"target": "ward"}
    ages: dict[str, Any] = {"inputs": ["age"]}
    for classes in (WARDS, WARDS[::-1]):
        north, south = data_of(job_of(tmp_path, options, **ages, classes=classes))
        assert batch_of(north)[1] == [classes.index("icu")]
        assert batch_of(south)[1] == [classes.index("surgery"), classes.index("icu")]
    with pytest.raises(SiteError, match=r"'ward' of site 'south'.* not in") as caught:
        data_of(job_of(tmp_path, options, **ages, classes=["icu", "medicine"]))
    assert "surgery" not in str(caught.value)
    with pytest.raises(JobError, match=r"training.classes: .*'ward' of site 'north'"):
        data_of(job_of(tmp_path, options, **ages))


def test_listed_categories_are_the_classes_of_the_job(tmp_path: Path):
    options = {"target": "ward", "categories": {"ward": WARDS}}
    for classes in ([], WARDS):
        _, south = data_of(job_of(tmp_path, options, inputs=["age"], classes=classes))
        assert batch_of(south)[1] == [1, 0]
    with pytest.raises(SiteError, match=r"'ward' of site 'north'.* training.classes"):
        data_of(job_of(tmp_path, options, inputs=["age"], classes=WARDS[::-1]))


def test_persons_are_no_input(tmp_path: Path):
    file = tmp_path / "site.csv"
    file.write_text("person_id,age\n7,50\n")
    whole, _ = table(str(file))
    assert whole.batch(whole.index)[0].tolist() == [[50]]
