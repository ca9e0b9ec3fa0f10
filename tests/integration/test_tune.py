"""Searches over the keys of a job, as runs on this machine."""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.commands import main
from deploy.tuning.search import Search
from deploy.tuning.selecting import SelectionDraw
from deploy.tuning.space import load
from federation.clock import VirtualClock
from federation.errors import CorruptObject, FederationError, JobError, RunConflict
from federation.folder_lock import hold
from monitoring.pages.tuning_page import Tuning

pytestmark = [
    pytest.mark.slow,
    # Not imported here: each worker would pay for it when it collects the tests.
    pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra tune"),
    # Optuna's own, and of the libraries under it.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

JOB = """
name = "tiny"
rounds = 3
model.factory = "clients.models:logistic_regression"
model.options = { inputs = 30, classes = 2 }
data = { source = "clients.data:breast_cancer" }
training = { local_steps = 2, batch_size = 16, optimizer = { name = "adam", lr = 0.1 } }
sites = [{ name = "a" }, { name = "b" }]
"""
PRIVATE = """
[aggregation]
weights = "uniform"
[privacy.differential_privacy]
unit = "record"
target_epsilon = 4.0
delta = 1e-5
"""
SPACE = """
job = "job.toml"
trials = {trials}
{keys}
[space]
training.optimizer.lr = { low = 1e-3, high = 1.0, log = true }
training.local_steps = { low = 1, high = 8 }
"""


def write(folder: Path, *, trials: int = 4, keys: str = "", job: str = JOB) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(job)
    path = folder / "space.toml"
    path.write_text(SPACE.replace("{trials}", str(trials)).replace("{keys}", keys))
    return path


def search(
    folder: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    workers: int = 1,
    **keys: Any,
) -> Tuning:
    space = load(write(folder, **keys))
    return Search(
        space=space,
        folder=folder / "search",
        say=lambda _: None,
        clock=VirtualClock(),
        stop_requested=stop,
        workers=workers,
    ).run()


def after(calls: int) -> Callable[[], bool]:
    """Ask for a stop from that call on."""
    count = itertools.count(1)
    return lambda: next(count) >= calls


def results(tuning: Tuning) -> list[Any]:
    return [(t.number, t.state, dict(t.values), t.value) for t in tuning.trials]


@pytest.mark.parametrize(
    ("sampler", "trials"),
    [
        pytest.param("cma_es", 8, marks=pytest.mark.long),
        ("tpe", 4),
        pytest.param("evolutionary", 4, marks=pytest.mark.long),
    ],
)
def test_a_search_that_was_stopped_finds_the_same(
    sampler: str, trials: int, tmp_path: Path
) -> None:
    """CMA-ES draws from its second generation after six trials."""
    keys: dict[str, Any] = {"keys": f'sampler = "{sampler}"', "trials": trials}
    whole = search(tmp_path / "whole", **keys)
    assert [t.state for t in whole.trials] == ["completed"] * trials
    assert len({t.values["training.optimizer.lr"] for t in whole.trials}) == trials
    # In the middle of a trial, then in a later one.
    parts = [
        search(tmp_path / "parts", stop=after(calls), **keys) for calls in (3, 6, 99)
    ]
    assert parts[0].trials[-1].state == "not finished"
    assert results(parts[-1]) == results(whole)
    assert whole.best is not None
    assert whole.best.value == min(t.value or math.inf for t in whole.trials)
    # Its run is where the page says, and is complete.
    result = json.loads((whole.best.folder / "result.json").read_text())
    assert result["status"] == "completed"
    assert result["final"]["loss"] == whole.best.value
    # Optuna's own sampler would keep its state there, with pickle.
    assert b"cma:" not in (tmp_path / "parts" / "search" / "study.db").read_bytes()


@pytest.mark.long
def test_more_trials_continue_a_search(tmp_path: Path) -> None:
    few = search(tmp_path, trials=2)
    more = search(tmp_path, trials=3)
    assert results(more)[:2] == results(few)
    assert len(more.trials) == 3


def test_another_search_does_not_continue_it(tmp_path: Path) -> None:
    search(tmp_path, trials=1)
    with pytest.raises(RunConflict, match="job: seed: 0 before, 1 now"):
        search(tmp_path, trials=1, keys="seed = 1")
    with (
        hold(tmp_path / "search" / ".lock", "busy"),
        pytest.raises(FederationError, match="another process searches"),
    ):
        search(tmp_path, trials=2)


@pytest.mark.long
def test_poor_trials_end_early(tmp_path: Path) -> None:
    keys = 'metric = "accuracy"\nsampler = "random"\npruner = { min_rounds = 1 }'
    tuning = search(
        tmp_path, trials=8, keys=keys, job=JOB.replace("rounds = 3", "rounds = 4")
    )
    early = [t for t in tuning.trials if t.state == "ended early"]
    assert early
    assert all(t.value is None and t.rounds < 4 for t in early)
    best = tuning.best
    assert best is not None
    assert best.value is not None
    assert all(best.value >= (t.last or 0) for t in early)


MACHINES = """
[[simulation.machines]]
site = "a"
examples_per_second = 16.0
[[simulation.machines]]
site = "b"
examples_per_second = 1.6
"""


def test_trials_in_virtual_time(tmp_path: Path):
    """A round takes what the slowest site needs at the stated speed."""
    job = "evaluation.every = 3\n" + JOB + MACHINES  # Not in the second round.
    done = search(tmp_path, keys='engine = "virtual"', job=job, trials=2)
    assert done.best is not None
    for trial in done.trials:
        events = (trial.folder / "events.jsonl").read_text().splitlines()
        _, second, _ = (json.loads(e) for e in events if '"RoundFinished"' in e)
        records = 16 * int(trial.values["training.local_steps"])
        assert second["seconds"] == pytest.approx(records / 1.6, rel=0.01)


@pytest.mark.long
def test_trials_in_processes(tmp_path: Path) -> None:
    tuning = search(tmp_path, trials=2, workers=2)
    assert [t.state for t in tuning.trials] == ["completed"] * 2


def test_first_failures_end_a_search_with_their_reason(tmp_path: Path) -> None:
    job = JOB.replace("breast_cancer", "no_such_data")
    with pytest.raises(FederationError, match="no_such_data"):
        search(tmp_path, job=job)
    assert "no_such_data" in (tmp_path / "search" / "tuning.html").read_text()


def test_a_metric_that_the_job_lacks(tmp_path: Path) -> None:
    keys = 'metric = "recall"\ngoal = "max"'
    with pytest.raises(FederationError, match="no metric 'recall'; it has accuracy"):
        search(tmp_path, keys=keys)


def test_all_trials_are_charged(tmp_path: Path) -> None:
    one = search(tmp_path / "one", trials=1, job=JOB + PRIVATE)
    three = search(tmp_path / "three", trials=3, job=JOB + PRIVATE)
    assert one.epsilon is not None
    assert three.epsilon is not None
    assert one.epsilon <= 4.0 < three.epsilon
    assert three.delta == 2e-5
    # A lost ledger, and a lost study, hide nothing.
    for lost in (lambda p: p / "trials/0001/sites", lambda p: p / "study.db"):
        folder = tmp_path / "three" / "search"
        kept = tmp_path / "kept"
        lost(folder).rename(kept)
        with pytest.raises(CorruptObject, match=r"unknown|count what both"):
            search(tmp_path / "three", trials=4, job=JOB + PRIVATE)
        if lost(folder).exists():
            lost(folder).unlink()  # A new study, which was begun in its place.
        kept.rename(lost(folder))
    ledger = next((tmp_path / "three").rglob("ledger.jsonl"))
    ledger.write_text(ledger.read_text().replace("1", "2"))
    with pytest.raises(CorruptObject, match="unknown"):
        search(tmp_path / "three", trials=4, job=JOB + PRIVATE)


def test_a_study_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search/study.db").write_text("not a database")
    with pytest.raises(CorruptObject, match=r"study\.db cannot be read"):
        search(tmp_path)


def test_no_trial_starts_beyond_the_budget_of_all(tmp_path: Path) -> None:
    keys = "privacy = { max_epsilon = 9.0 }"
    tuning = search(tmp_path / "some", trials=9, keys=keys, job=JOB + PRIVATE)
    assert 1 < len(tuning.trials) < 9
    assert tuning.epsilon is not None
    assert tuning.epsilon <= 9.0
    with pytest.raises(JobError, match="--workers"):
        search(tmp_path / "some", workers=2, keys=keys, job=JOB + PRIVATE)
    with pytest.raises(JobError, match="max_epsilon"):
        search(
            tmp_path / "none",
            keys="privacy = { max_epsilon = 3.9 }",
            job=JOB + PRIVATE,
        )


def test_the_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, trials=2)
    assert main(["tune", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in found["trials"]] == ["completed"] * 2
    assert found["folder"] == "searches/tiny"
    assert main(["tune", str(path)]) == 0
    out = capsys.readouterr().out
    number = int(re.findall(r"best +trial (\d+):", out)[0])
    assert f"trials/{number:04d}\n" in out
    best = found["trials"][found["best"]]["values"]
    assert f"--set training.local_steps={best['training.local_steps']}" in out
    page = (tmp_path / "searches/tiny/tuning.html").read_text()
    assert "training.optimizer.lr" in page
    assert "<script" not in page


SELECTION = """
job = "job.toml"
trials = 30
sampler = "random"
privacy = { selection = "geometric" }
[space]
training.optimizer.lr = { low = 1e-3, high = 1.0, log = true }
privacy.differential_privacy.clip_norm = { low = 0.1, high = 1.0 }
"""


def test_the_best_of_a_random_number_is_released_alone(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB + PRIVATE)
    (tmp_path / "space.toml").write_text(SELECTION)
    space = load(tmp_path / "space.toml")

    def part(draws: list[SelectionDraw], stop: Callable[[], bool]) -> Search:
        return Search(
            space=space,
            folder=tmp_path / "search",
            say=lambda _: None,
            clock=VirtualClock(),
            stop_requested=stop,
            draw=lambda _: draws.pop(),
        )

    begun = part([SelectionDraw(trials=3, seed=5)], after(3))
    assert begun.select(begun.run()) is None
    # The number was drawn once, when the search began.
    search = part([], lambda: False)
    found = search.run()
    assert [t.state for t in found.trials] == ["completed"] * found.wanted
    assert found.wanted == 3
    selected = search.select(found)
    assert selected is not None
    assert found.best is not None
    released = json.loads((selected.folder / "result.json").read_text())
    assert released["value"] == found.best.value
    assert released["values"] == dict(found.best.values)
    model = (selected.folder / "model.safetensors").read_bytes()
    assert model == (found.best.folder / "model.safetensors").read_bytes()
    assert found.epsilon is not None
    assert 0 < released["epsilon"] == selected.cost.epsilon < selected.cost.composed
    assert "stay private" in found.page.read_text()


def test_failing_trials_do_not_end_a_private_selection(tmp_path: Path) -> None:
    """How many there are must not depend on records."""
    job = (JOB + PRIVATE).replace("clients.data:breast_cancer", f"{__name__}:nothing")
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "space.toml").write_text(SELECTION)

    search = Search(
        space=load(tmp_path / "space.toml"),
        folder=tmp_path / "search",
        say=lambda _: None,
        clock=VirtualClock(),
        draw=lambda _: SelectionDraw(trials=4, seed=5),
    )
    found = search.run()
    assert [t.state for t in found.trials] == ["failed"] * 4
    assert search.select(found) is None


def nothing() -> None:
    raise ValueError("these records")


def test_an_older_copy_of_a_trial_is_refused(tmp_path: Path) -> None:
    """Its ledger and its head fit together."""
    job = (JOB + PRIVATE).replace("rounds = 3", "rounds = 2")
    search(tmp_path, trials=1, job=job, stop=after(2))
    trial = tmp_path / "search/trials/0001"
    shutil.copytree(trial, tmp_path / "older")
    search(tmp_path, trials=1, job=job)
    shutil.rmtree(trial)
    (tmp_path / "older").rename(trial)
    with pytest.raises(CorruptObject, match=r"older copy .*its place"):
        search(tmp_path, trials=2, job=job)
