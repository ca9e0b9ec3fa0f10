"""A combine rule of the user's own, from a file beside the job."""

from pathlib import Path

import numpy as np
import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from clients.factories import import_factory
from federation.errors import JobError
from federation.job import code_files, job_digest, job_file

RULES = """
import numpy as np


def middle(updates, weights):
    return np.median(updates, axis=0)
"""


def job_with(rule: str, folder: Path):
    training = {"local_steps": 2, "optimizer": {"lr": 0.1}}
    plain = small_job(num_sites=3, training=training, rounds=2)
    document = job_file.document(plain)
    document["aggregation"] |= {"combine": rule, "weights": "uniform"}
    code_files.pin(document, folder)
    return job_file.parse(document)


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(code_files.FOLDERS, ".")


def test_a_rule_in_a_file_combines_what_our_own_would(tmp_path: Path):
    (tmp_path / "rules.py").write_text(RULES, encoding="utf-8")
    ours = simulate(job_with("median", tmp_path))
    theirs = simulate(job_with("./rules.py:middle", tmp_path))
    assert theirs.rounds_completed == 2
    for name, values in ours.weights.items():
        np.testing.assert_allclose(values, theirs.weights[name], atol=1e-6)


def test_a_changed_rule_is_another_job(tmp_path: Path):
    file = tmp_path / "rules.py"
    file.write_text(RULES, encoding="utf-8")
    before = job_with("./rules.py:middle", tmp_path)
    file.write_text(RULES.replace("median", "mean"), encoding="utf-8")
    after = job_with("./rules.py:middle", tmp_path)
    assert job_digest.digest(before) != job_digest.digest(after)
    with pytest.raises(JobError, match="has changed since") as caught:
        simulate(before)
    assert caught.value.key == "aggregation.combine"


def test_a_rule_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(JobError, match="has no 'median_of_three'") as caught:
        simulate(job_with("statistics:median_of_three", tmp_path))
    assert caught.value.key == "aggregation.combine"


def test_the_rule_of_the_how_to_bounds_one_site(tmp_path: Path):
    page = Path(__file__).parents[2] / "docs/howto/own-objective.md"
    _, _, section = page.read_text(encoding="utf-8").partition("## Your own combine")
    code = section.split("```python\n")[1].split("```")[0]
    (tmp_path / "rules.py").write_text(code, encoding="utf-8")
    name = job_with("./rules.py:norm_capped", tmp_path).aggregation.combine
    rule = import_factory(name)
    updates = [np.full(4, value, np.float32) for value in (1.0, 2.0, 1e6)]
    np.testing.assert_allclose(rule(updates, np.ones(3)), np.full(4, 5 / 3), rtol=1e-6)
