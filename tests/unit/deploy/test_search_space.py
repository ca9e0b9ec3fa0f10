"""Files of searches, and what a budget leaves room for."""

from pathlib import Path
from typing import Any

import pytest

from deploy.tuning.space import changes, load
from deploy.tuning.spending import SearchSpending, refusal
from federation.errors import JobError
from federation.job import job_file
from federation.job.selection_checks import counts_for_nan
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent

MACHINES = """
[[simulation.machines]]
site = "a"
examples_per_second = 100.0
[[simulation.machines]]
site = "b"
examples_per_second = 50.0
"""


JOB = """
name = "tiny"
rounds = 2
model.factory = "clients.models:logistic_regression"
model.options = { inputs = 30, classes = 2 }
data = { source = "clients.data:breast_cancer" }
training = { local_steps = 5, optimizer = { name = "adam", lr = 0.1 } }
sites = [{ name = "a" }, { name = "b" }]
"""


def write(folder: Path, space: str, extra: str = "") -> Path:
    (folder / "job.toml").write_text(JOB)
    path = folder / "space.toml"
    path.write_text(f'job = "job.toml"\n{extra}\n[space]\n{space}\n')
    return path


@pytest.mark.parametrize(
    ("line", "key", "said"),
    [
        ("training.lr = { low = 1e-3, high = 1.0 }", "space.training.lr", "lr"),
        ("rounds = { low = 0, high = 3 }", "space.rounds", "does not take 0"),
        ("rounds = { low = 3, high = 3 }", "space.rounds", "below high"),
        ("rounds = { low = 3 }", "space.rounds", "low and high"),
        ("rounds = { low = 1, high = true }", "space.rounds", "low and high"),
        ("rounds = { low = 1, high = 9, step = 0 }", "space.rounds", "step"),
        ("rounds = { low = 1, high = 9, step = 2, log = true }", "rounds", "no step"),
        ("rounds = { low = 1, choices = [1] }", "space.rounds", "nothing else"),
        ("rounds = { choices = [[1]] }", "space.rounds", "texts, numbers"),
        (
            'training.optimizer.name = { choices = ["adam", "none"] }',
            "space.training.optimizer.name",
            "'none'",
        ),
        ("rounds = 3", "space.rounds", "table"),
    ],
)
def test_ranges_that_cannot_be_searched(
    tmp_path: Path, line: str, key: str, said: str
) -> None:
    with pytest.raises(JobError) as found:
        load(write(tmp_path, line))
    assert "space.toml" in str(found.value)
    assert key in str(found.value)
    assert said in str(found.value)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('metric = "recall"', "smaller or larger"),
        ("trials = 0", "trials"),
        ('sampler = "grid"', "sampler"),
        ("pruner = { factor = 1 }", "pruner.factor"),
        ('sampler = "cma_es"', "numbers only"),
    ],
)
def test_searches_that_cannot_begin(tmp_path: Path, extra: str, said: str) -> None:
    line = "training.shuffle = { choices = [true, false] }"
    with pytest.raises(JobError, match=said):
        load(write(tmp_path, line, extra))


def test_an_empty_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no key to search"):
        load(write(tmp_path, ""))


def test_digest_is_of_all_but_the_number_of_trials(tmp_path: Path) -> None:
    line = "rounds = { low = 1, high = 9 }"
    first = load(write(tmp_path, line)).digest()
    assert load(write(tmp_path, line, "trials = 99")).digest() == first
    for other in ("seed = 1", 'sampler = "random"', 'metric = "accuracy"'):
        assert load(write(tmp_path, line, other)).digest() != first
    assert load(write(tmp_path, "rounds = { low = 1, high = 8 }")).digest() != first
    path = write(tmp_path, line)
    (tmp_path / "job.toml").write_text(JOB.replace("0.1", "0.2"))
    assert load(path).digest() != first


def private(**keys: Any) -> Any:
    document = job_file.parse_toml(JOB)
    terms = {"unit": "record", "target_epsilon": 2.0, "delta": 1e-5} | keys
    given = {name: value for name, value in terms.items() if value is not None}
    document["privacy"] = {"differential_privacy": given}
    document["aggregation"] = {"weights": "uniform"}
    return job_file.parse(document)


EVENT = PrivacyEvent(noise_multiplier=1.0, sampling_rate=0.1, steps=50)
SPENT = SearchSpending(
    events={("a", "train"): [EVENT], ("b", "train"): [EVENT] * 2}, delta=1e-5
)


def test_spent_is_that_of_the_site_that_spent_most() -> None:
    assert SPENT.epsilon(1e-5) == accountant.epsilon([EVENT, EVENT], 1e-5)


def test_no_trial_starts_that_could_go_beyond_the_budget() -> None:
    # One trial may spend 2 at 1e-5; what was spent counts at the rest of the delta.
    so_far = SPENT.epsilon(1e-5)
    job = private()
    assert not refusal(job, SPENT, epsilon_cap=so_far + 2.0, delta=2e-5)
    assert not refusal(job, SPENT, epsilon_cap=so_far + 2.0, delta=None)
    assert "beyond" in refusal(job, SPENT, epsilon_cap=so_far + 1.99, delta=2e-5)
    assert not refusal(job, None, epsilon_cap=2.0, delta=2e-5)
    assert "beyond" in refusal(job, None, epsilon_cap=1.99, delta=2e-5)


def test_a_budget_needs_a_larger_delta_than_a_trial() -> None:
    assert "larger" in refusal(private(), None, epsilon_cap=9.0, delta=1e-5)


PRIVATE = """
[aggregation]
weights = "uniform"
[privacy.differential_privacy]
unit = "record"
target_epsilon = 2.0
"""


@pytest.mark.parametrize(
    ("tail", "line", "said"),
    [
        ("", "rounds = { low = 1, high = 9 }", "differential privacy"),
        (PRIVATE, "rounds = { low = 1, high = 9 }", "delta"),
        (
            f"{PRIVATE}delta = 1e-5",
            "privacy.differential_privacy.target_epsilon = { low = 1.0, high = 99.0 }",
            "cannot be searched",
        ),
    ],
)
def test_a_budget_needs_to_know_what_a_trial_may_spend(
    tmp_path: Path, tail: str, line: str, said: str
) -> None:
    path = write(tmp_path, line, "privacy = { max_epsilon = 9.0 }")
    (tmp_path / "job.toml").write_text(JOB + tail)
    with pytest.raises(JobError, match=said):
        load(path)


def test_changed_code_of_the_user_is_another_search(tmp_path: Path) -> None:
    path = write(tmp_path, "rounds = { low = 1, high = 9 }")
    code = tmp_path / "mine.py"
    code.write_text("net = 1\n")
    job = JOB.replace("clients.models:logistic_regression", "./mine.py:net")
    (tmp_path / "job.toml").write_text(job)
    first, before = load(path).digest(), load(path).facts()
    code.write_text("net = 2\n")
    assert load(path).digest() != first
    assert changes(before, load(path).facts()) == [
        "job.model.factory: the code of ./mine.py:net has changed"
    ]


OWN = JOB.replace(
    "training = {",
    'training = { task = "./mine.py:hits", metrics = { loss = [0.0, 9.0], '
    "hits = [0.0, 1.0] }, ",
)
MINE = "def hits(model, inputs, targets):\n    return {}\n"


def test_a_trial_knows_which_way_a_metric_of_ones_own_is_better(tmp_path: Path) -> None:
    """Or a model that returns NaN would have the best value; nothing else changes."""
    path = write(tmp_path, "rounds = { choices = [2, 5] }", 'metric = "hits"')
    path.write_text(path.read_text().replace("[space]", 'goal = "max"\n[space]'))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.toml").write_text(OWN)
    found = load(path).job({"rounds": 5})
    assert found.selection is not None
    assert (found.selection.metric, found.selection.goal) == ("hits", "max")
    assert (found.selection.model, found.selection.patience) == ("last", 6)
    assert counts_for_nan(found)["hits"] == 0.0
    (tmp_path / "job.toml").write_text(f"{OWN}\n[selection]\npatience = 2\n")
    with pytest.raises(JobError, match=r"selection: the search compares hits"):
        load(path)


def test_local_steps_that_follow_lines_are_not_searched(tmp_path: Path) -> None:
    """Trials have no lines; what to write instead is a key of the job."""
    path = write(tmp_path, "training.batch_size = { low = 4, high = 8 }")
    schedule = 'schedule = { local_work = "auto", max_local_steps = 20 }\n'
    (tmp_path / "job.toml").write_text(schedule + JOB)
    with pytest.raises(JobError, match=r"schedule.local_work: 'auto' .*trials have"):
        load(path)


def test_virtual_time_has_lines_if_every_site_has_a_speed(tmp_path: Path) -> None:
    """Also for steps that follow lines; the search is another one."""
    keys = "training.batch_size = { low = 4, high = 8 }"
    path = write(tmp_path, keys)
    before = load(path).digest()
    path.write_text('engine = "inproc"\n' + path.read_text())
    assert load(path).digest() == before
    path.write_text(path.read_text().replace("inproc", "virtual"))
    with pytest.raises(JobError, match=r"machines: virtual time needs .* and 'a' has"):
        load(path)
    schedule = 'schedule = { local_work = "auto", max_local_steps = 20 }\n'
    (tmp_path / "job.toml").write_text(schedule + JOB + MACHINES)
    assert load(path).digest() != before
    assert load(path).job({"training.batch_size": 5}).training.batch_size == 5
