"""Finished runs that get more rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.secure_runs import secure_job
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models.model_pool import ModelPool
from clients.models.starting_weights import initial_weights, pinned
from deploy.wiring import extension, run as wiring_run
from federation.clock import SystemClock
from federation.errors import CheckpointMismatch, QuorumNotMet, RunNotFound
from federation.events import (
    Event,
    RoundFinished,
    RunExtended,
    RunFinished,
    SiteAnswered,
    SiteFailed,
)
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder, leave_report

ADAM = {"training": {"local_steps": 2, "optimizer": {"name": "adam", "lr": 0.1}}}
KEPT = {
    "training": {
        "local_steps": 2,
        "optimizer": {"name": "adam", "lr": 0.1, "state": "keep"},
    },
    "aggregation": {"server_optimizer": {"name": "yogi", "lr": 0.1}},
}
EPOCHS = {"training": {"local_epochs": 1, "optimizer": {"lr": 0.1}}}


pytestmark = [pytest.mark.slow]


def job_of(rounds: int, **tables: Any) -> JobSpec:
    # One after another, so that answers land in one order.
    return small_job(num_sites=3, rounds=rounds, simulation={"workers": 1}, **tables)


def untimed(events: Sequence[Event], *, after: int = 0) -> list[Any]:
    """What sites and rounds came to, without times and what was measured."""
    found: list[Any] = []
    for event in events:
        match event:
            case SiteAnswered() if event.round_index > after:
                found.append(
                    (event.round_index, event.site, event.weight, event.training)
                )
                found.append(event.evaluation)
            case RoundFinished() if event.round_index > after:
                found.append((event.round_index, event.status, event.update_norm))
                found.append(event.training)
    return found


def extensions(run: RunFolder) -> list[RunExtended]:
    return [event for event in run.read_events() if isinstance(event, RunExtended)]


def test_the_model_before_an_extension_is_not_taken_for_the_new_one(
    tmp_path: Path,
) -> None:
    """If the process is killed after the last event, before the model is written."""
    run = RunFolder(tmp_path / "run")
    simulate(job_of(2), folder=run.path)
    leave_report(run)

    def kill(event: Event) -> None:
        if isinstance(event, RunFinished):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job_of(3), folder=run.path, extend=True, listeners=[kill])
    resumed = simulate(job_of(3), folder=run.path, resume=True)
    whole = simulate(job_of(3))
    for name, array in load_file(run.model).items():
        np.testing.assert_array_equal(array, whole.weights[name])
        np.testing.assert_array_equal(array, resumed.weights[name])


@pytest.mark.parametrize(
    "tables", [{}, ADAM, KEPT, EPOCHS], ids=["sgd", "adam", "kept", "epochs"]
)
def test_an_extended_run_equals_a_longer_one(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    """To the last bit of the model, and in every event but for times."""
    short, whole = RunFolder(tmp_path / "short"), RunFolder(tmp_path / "whole")
    simulate(job_of(6, **tables), folder=whole.path)
    simulate(job_of(3, **tables), folder=short.path)
    three = short.model.read_bytes()
    outcome = simulate(job_of(6, **tables), folder=short.path, extend=True)
    assert (outcome.status, outcome.rounds_now) == ("completed", 3)
    assert short.model.read_bytes() == whole.model.read_bytes() != three
    assert untimed(short.read_events()) == untimed(whole.read_events())
    losses = [[row.loss for row in run.view().rounds] for run in (short, whole)]
    assert losses[0] == losses[1]


def test_an_extension_is_on_record(tmp_path: Path) -> None:
    """From which round and which job, in events, result and report; told once."""
    run = RunFolder(tmp_path / "run")
    simulate(job_of(2), folder=run.path)
    for _ in range(2):
        simulate(job_of(3), folder=run.path, extend=True)
    # It is the run's job by now.
    simulate(job_of(3), folder=run.path, resume=True)
    leave_report(run)
    (event,) = extensions(run)
    assert (event.last_round, event.first_round) == (2, 3)
    assert (event.rounds_before, event.rounds) == (2, 3)
    assert event.job_before == job_digest.digest(job_of(2)).hex()
    assert event.job == job_digest.digest(job_of(3)).hex()
    assert job_file.loads(run.read_job()).rounds == 3
    assert '"rounds_before": 2' in run.result.read_text()
    assert "extended after round 2" in run.report.read_text()


def test_a_run_killed_while_it_is_extended_goes_on(tmp_path: Path) -> None:
    """After the record was written, and before the first checkpoint of the new job."""
    run = RunFolder(tmp_path / "run")
    simulate(job_of(2), folder=run.path)

    def kill(event: Event) -> None:
        if isinstance(event, SiteAnswered):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job_of(4), folder=run.path, extend=True, listeners=[kill])
    whole = simulate(job_of(4), folder=tmp_path / "whole")
    resumed = simulate(job_of(4), folder=run.path, resume=True)
    assert resumed.status == "completed"
    assert run.model.read_bytes() == RunFolder(tmp_path / "whole").model.read_bytes()
    assert whole.status == "completed"
    assert len(extensions(run)) == 1


def test_a_stopped_run_is_extended_from_where_it_is(tmp_path: Path) -> None:
    """The rounds that were left are run as well."""
    run = RunFolder(tmp_path / "run")
    simulate(job_of(4), folder=run.path, stop_requested=lambda: True)
    before = run.view().rounds_completed
    simulate(job_of(5), folder=run.path, extend=True)
    assert before < 4
    assert run.view().rounds_completed == 5
    assert extensions(run)[0].last_round == before


def test_rounds_alone_are_no_silent_edit(tmp_path: Path) -> None:
    """Without being asked to extend, a run with other rounds is another run."""
    run = RunFolder(tmp_path / "run")
    simulate(job_of(2), folder=run.path)
    with pytest.raises(CheckpointMismatch, match=r"rounds: 3 here.*--extend"):
        simulate(job_of(3), folder=run.path, resume=True)
    assert extensions(run) == []
    assert run.view().status == "completed"


LINEAR = {
    "training": {
        "local_steps": 1,
        "optimizer": {"lr": 0.5},
        "learning_rate": {"name": "linear"},
    }
}
PRIVATE = {
    "aggregation": {"weights": "uniform"},
    "privacy": {
        "differential_privacy": {
            "unit": "record",
            "target_epsilon": 8.0,
        }
    },
}


@pytest.mark.parametrize(
    ("tables", "rounds", "more", "said"),
    [
        ({}, 2, {}, "has 2 already"),
        ({}, 1, {}, "has 2 already"),
        ({}, 3, {"seed": 1}, "seed: 1 here, 0 there"),
        (LINEAR, 3, {}, "learning_rate.name = 'linear'"),
        (PRIVATE, 3, {}, "differential privacy"),
    ],
    ids=["as many", "fewer", "another key", "schedule", "private"],
)
def test_what_depends_on_the_rounds_is_refused(
    tables: dict[str, Any],
    rounds: int,
    more: dict[str, Any],
    said: str,
    tmp_path: Path,
) -> None:
    """Nothing is written."""
    run = RunFolder(tmp_path / "run")
    if "privacy" in tables:
        # As after its last round, without the minutes that a private one takes.
        job = job_of(2, **tables)
        run.path.mkdir()
        run.write_job(job)
        run.events.touch()
    else:
        simulate(job_of(2, **tables), folder=run.path)
    before = run.events.read_bytes(), run.job.read_bytes()
    with pytest.raises(CheckpointMismatch, match=said):
        simulate(job_of(rounds, **tables, **more), folder=run.path, extend=True)
    assert (run.events.read_bytes(), run.job.read_bytes()) == before


def test_no_run_is_extended_that_never_began(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no run in"):
        simulate(job_of(2), folder=tmp_path / "none", extend=True)


def test_with_secure_aggregation_a_new_contract_goes_on(tmp_path: Path) -> None:
    """The number under which the final model was evaluated is not used again."""
    run = RunFolder(tmp_path / "run")
    simulate(secure_job(3, threshold=3, rounds=2), folder=run.path)
    with pytest.raises(CheckpointMismatch, match="at least 4"):
        simulate(secure_job(3, threshold=3, rounds=3), folder=run.path, extend=True)
    outcome = simulate(
        secure_job(3, threshold=3, rounds=4), folder=run.path, extend=True
    )
    rounds = [(row.index, row.status) for row in run.view().rounds]
    assert rounds == [(i, "completed") for i in (1, 2, 4)]
    assert outcome.status == "completed"
    assert outcome.rounds_completed == 3
    assert extensions(run)[0].first_round == 4
    ends = [e for e in run.read_events() if isinstance(e, RunFinished)]
    assert [end.rounds_completed for end in ends] == [2, 3]


def test_an_extension_asks_for_no_number_twice(tmp_path: Path) -> None:
    """Sites refuse it, whatever the aggregator's record says is left."""
    run = RunFolder(tmp_path / "run")
    simulate(secure_job(3, threshold=3, rounds=2), folder=run.path)
    job = secure_job(3, threshold=3, rounds=4)
    extension.record(job, run, SystemClock())
    honest = '"first_round": 4'
    assert honest in run.events.read_text()
    run.events.write_text(run.events.read_text().replace(honest, '"first_round": 3'))
    outcome = simulate(job, folder=run.path, resume=True)
    rounds = [(row.index, row.status) for row in run.view().rounds]
    assert rounds == [(1, "completed"), (2, "completed"), (3, "lost"), (4, "completed")]
    said = [e.message for e in run.read_events() if isinstance(e, SiteFailed)]
    assert len(said) == 3
    assert all("round 3" in each for each in said), said
    assert outcome.rounds_completed == 3


def test_a_run_starts_from_the_model_of_another(tmp_path: Path) -> None:
    """As it was exported; the record says where it came from."""
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    simulate(job_of(2), folder=first.path)
    document = job_file.document(job_of(1))
    document["model"]["weights"] = "first"
    job = pinned(job_file.parse(document), tmp_path)
    outcome = simulate(job, folder=second.path)
    (start,) = [e for e in outcome.view.evaluations() if e.round_index == 0]
    last = first.view().last_evaluated
    assert last is not None
    assert start.pooled == last.pooled
    weights = second.view().started.weights
    assert weights.startswith("first@")
    assert weights in leave_report(second).read_text()
    # Once it has begun, it continues without the file.
    first.model.unlink()
    resumed = simulate(job, folder=second.path, resume=True)
    assert resumed.status == "completed"


@pytest.mark.parametrize(
    "job", [job_of(1), secure_job(3, threshold=3, rounds=1)], ids=["plain", "secure"]
)
def test_sites_refuse_another_first_model_than_the_jobs(
    job: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an aggregator that starts from weights of its own under the job's name."""
    simulate(job_of(1), folder=tmp_path / "first")
    document = job_file.document(job)
    document["model"]["weights"] = "first"
    job = pinned(job_file.parse(document), tmp_path)
    assert simulate(job).status == "completed"

    def other(job: JobSpec, pool: ModelPool) -> Any:
        weights_d, integers_m = initial_weights(job, pool)
        weights_d[3] += 1e-6
        return weights_d, integers_m

    monkeypatch.setattr(wiring_run, "initial_weights", other)
    with pytest.raises(QuorumNotMet) as caught:
        simulate(job)
    assert "site-0: received a first model" in str(caught.value)


def with_own_data(*names: str, rounds: int) -> JobSpec:
    sites = [
        {
            "name": name,
            "data": {
                "source": "support.small_jobs:blobs",
                "options": {"num_train": 60 + n},
            },
        }
        for n, name in enumerate(names)
    ]
    return small_job(sites=sites, rounds=rounds, simulation={"workers": 1})


def test_a_site_joins_between_two_rounds(tmp_path: Path) -> None:
    """Rounds before are of the others alone; and the run is resumed with all."""
    run = RunFolder(tmp_path / "run")
    simulate(with_own_data("a", "b", rounds=2), folder=run.path)
    more = with_own_data("a", "b", "c", rounds=4)
    simulate(more, folder=run.path, extend=True)
    (event,) = extensions(run)
    assert (event.joined, event.last_round) == (("c",), 2)
    rounds = [e for e in run.read_events() if isinstance(e, RoundFinished)]
    assert [len(e.answered) for e in rounds] == [2, 2, 3, 3]
    assert run.view().sites[-1].answered == 2
    simulate(more, folder=run.path, resume=True)


def test_nobody_joins_a_run_that_deals_its_data(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    simulate(job_of(2), folder=run.path)
    more = small_job(num_sites=4, rounds=3, simulation={"workers": 1})
    with pytest.raises(CheckpointMismatch, match="other records"):
        simulate(more, folder=run.path, extend=True)
    assert not extensions(run)
