"""Runs that train nothing: sites evaluate a model that is given."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.numpy import load_file, save_file
from support.secure_runs import in_the_clear, run, secure_job, silence
from support.small_jobs import blobs, small_job
from support.without_report import simulate
from torch.nn.functional import cross_entropy

from clients.models.starting_weights import pinned
from deploy.cli import commands as cli
from federation.errors import JobError, ProtocolError, QuorumNotMet
from federation.events import ModelEvaluated, RunFinished
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.evaluation_job import make_evaluation
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    LeaveReason,
    LedgerAnchor,
    RoundTask,
    SecureStep,
    SiteMessage,
    Task,
    TaskKind,
)
from federation.rounds.failures import failure
from federation.rounds.local_work import check_task
from monitoring.runs.run_folder import RunFolder, leave_report
from monitoring.terminal import outcome

pytestmark = pytest.mark.slow

NAMES = ["ash", "birch", "cedar"]
SECURE = {"enabled": True, "clip_norm": 5.0, "max_examples": 100}
PRIVATE = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    simulate(training_job(), folder=folder)
    return folder


def training_job(**tables: Any) -> JobSpec:
    training = {
        "local_steps": 5,
        "batch_size": 4,
        "optimizer": {"lr": 0.5},
        "classes": NAMES,
        "measures": ["calibration"],
    }
    usual = {"rounds": 2, "training": training, "aggregation": {"weights": "uniform"}}
    return small_job(num_sites=3, **usual | tables)


def evaluation_job(model: Path, **tables: Any) -> JobSpec:
    """The job of ``crossfed evaluate MODEL JOB``."""
    document = job_file.document(training_job(**tables))
    make_evaluation(document, str(model))
    return pinned(job_file.parse(document), Path())


def by_hand(folder: Path) -> tuple[list[list[int]], float]:
    """Confusion matrix and mean loss of a run's model on all held-out data."""
    weights = simulate(training_job(), folder=folder, resume=True).weights
    _, held_out = blobs()
    weight, bias = (a for _, a in sorted(weights.items(), key=lambda n: -n[1].ndim))
    logits = torch.tensor(held_out.inputs) @ torch.tensor(weight).T + torch.tensor(bias)
    wanted = np.zeros((3, 3), dtype=int)
    np.add.at(wanted, (held_out.targets, logits.argmax(1).numpy()), 1)
    loss = cross_entropy(logits.double(), torch.tensor(held_out.targets))
    return wanted.tolist(), float(loss)


@pytest.mark.parametrize("privacy", [{}, {"secure_aggregation": SECURE}], ids=str)
def test_results_are_those_of_pooled_data(
    privacy: dict[str, Any], model: Path, tmp_path: Path
):
    """Counts exactly, the loss to the step of the grid; and nothing is trained."""
    job = evaluation_job(model, **({"privacy": privacy} if privacy else {}))
    done = simulate(job, folder=tmp_path / "run")
    counts, loss = by_hand(model)
    final = done.summary()["final"]
    assert final["confusion"] == counts
    assert final["loss"] == pytest.approx(loss, abs=1e-6)
    assert "calibration_error" in final["metrics"]
    assert (done.status, done.rounds_completed) == ("completed", 0)
    (last,) = [e for e in RunFolder(tmp_path / "run").read_events() if is_result(e)]
    assert bool(last.by_site) == (not privacy)
    predicted = done.summary()["predicted"]
    assert predicted["bytes_down"] == [done.bytes_down] * 2
    assert "model       " in "\n".join(outcome.lines(done.view))
    leave_report(RunFolder(tmp_path / "run"))
    page = RunFolder(tmp_path / "run").report.read_text()
    assert "<h2>Evaluation</h2>" in page
    assert "only evaluated" in page
    assert "of the given model" in page


def is_result(event: object) -> bool:
    return isinstance(event, ModelEvaluated)


def test_a_site_does_no_other_work(model: Path):
    """It neither trains, nor evaluates another model than the job's."""
    job = evaluation_job(model)
    task = RoundTask(
        run_id=RunId("20260102-030405-000000"),
        round_index=1,
        site=SiteId("site-0"),
        kind=TaskKind.EVALUATE,
        layout_digest="",
        weights_d=np.zeros(1, dtype=np.float32),
        integers_m=np.zeros(0, dtype=np.int64),
        evaluate=True,
        evaluate_after=False,
    )
    check_task(job, task)
    for changes in ({"kind": TaskKind.TRAIN}, {"based_on": 1}):
        with pytest.raises(ProtocolError, match="only evaluates that model"):
            check_task(job, dataclasses.replace(task, **changes))


def test_each_evaluation_is_charged(model: Path, tmp_path: Path):
    """Also of the same model, until the total of all runs on the data is spent."""
    job = evaluation_job(
        model,
        privacy={"differential_privacy": PRIVATE},
        simulation={"total_epsilon": 8.1, "vouch_for_sources": True},
    )
    simulate(job, folder=tmp_path / "first")
    (last,) = filter(is_result, RunFolder(tmp_path / "first").read_events())
    for each in last.spent:
        assert each.epsilon == 0  # Nothing was trained.
        assert each.anchor == LedgerAnchor(train=0, evaluate=1)
        assert 0 < each.held_out_epsilon <= PRIVATE["target_epsilon"]
    with pytest.raises(JobError, match=r"have spent epsilon [1-9].*total_epsilon"):
        simulate(job, folder=tmp_path / "second")


def test_a_run_that_is_killed_repeats_its_evaluation_and_charges_it(
    model: Path, tmp_path: Path
):
    """A site charges before it evaluates, so what was interrupted counts."""
    job = evaluation_job(model, privacy={"differential_privacy": PRIVATE})

    def die(event: object) -> None:
        if isinstance(event, ModelEvaluated):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job, folder=tmp_path / "run", listeners=[die])
    done = simulate(job, folder=tmp_path / "run", resume=True)
    assert done.status == "completed"
    found = [e for e in RunFolder(tmp_path / "run").read_events() if is_result(e)]
    assert [e.spent[0].anchor.evaluate for e in found] == [1, 2]


def test_with_masks_a_resumed_evaluation_is_another_round(model: Path, tmp_path: Path):
    """A site answers each number once, and its sum may be what was lost."""
    job, folder = evaluation_job(model, privacy={"secure_aggregation": SECURE}), "run"
    asked: list[int] = []

    def die(event: object) -> None:
        if isinstance(event, ModelEvaluated):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            simulate(job, folder=tmp_path / folder, listeners=[die], resume=bool(asked))
        asked.append(1)
    done = simulate(job, folder=tmp_path / folder, resume=True)
    assert done.status == "completed"
    results = [e for e in RunFolder(tmp_path / folder).read_events() if is_result(e)]
    assert len(results) == 3
    assert results[0].pooled == results[2].pooled


def secure_evaluation(model: Path, **tables: Any) -> JobSpec:
    """Five sites with masks, of which four are enough."""
    document = job_file.document(secure_job(**tables))
    make_evaluation(document, str(model))
    return pinned(job_file.parse(document), Path())


SITE = "site-2"


@pytest.mark.parametrize("step", [SecureStep.ADVERTISE, SecureStep.CONFIRM])
@pytest.mark.parametrize(("times", "attempts"), [(1, 2), (99, 3)])
def test_an_evaluation_survives_a_site_that_is_silent_in_the_setup(
    step: SecureStep, times: int, attempts: int, model: Path
):
    """The setup asks it twice; then the others evaluate without it."""
    job = secure_evaluation(model)
    done = run(job, fault=silence(step.value, [SITE], times=times))
    (result,) = filter(is_result, done.seen)
    assert (SITE in result.sites) == (times == 1)
    assert len({*result.sites} - {SITE}) == 4
    again = [text for text in done.warnings() if "evaluate the model again" in text]
    assert len(again) == attempts - 1


class Missing:
    """A site's evaluation tasks that get no answer, for a number of times."""

    def __init__(self, times: int) -> None:
        self.times, self.rounds = times, list[int]()

    def __call__(self, task: Task, answer: Callable[[], SiteMessage]) -> Any:
        evaluates = getattr(task, "kind", None) is TaskKind.EVALUATE
        if task.site == SITE and evaluates and len(self.rounds) < self.times:
            self.rounds.append(task.round_index)
            return ()
        return (answer(),)


def test_an_evaluation_without_quorum_is_repeated(model: Path):
    """As a round of training would be, under another number."""
    fault = Missing(2)
    done = run(in_the_clear(secure_evaluation(model, threshold=5)), fault=fault)
    *_, result = filter(is_result, done.seen)
    assert len(result.sites) == 5
    assert fault.rounds == [1, 2]


def test_an_evaluation_is_repeated_as_often_as_rounds_may_be_lost(model: Path):
    fault = Missing(99)
    schedule = {"max_lost_rounds": 2}
    with pytest.raises(QuorumNotMet, match="quorum is 5 of 5 sites"):
        run(secure_evaluation(model, threshold=5, schedule=schedule), fault=fault)
    assert fault.rounds == [1, 2]


def test_a_repeated_evaluation_does_not_ask_a_site_that_has_left(model: Path):
    asked: list[tuple[str, int]] = []

    def fault(task: Task, answer: Callable[[], SiteMessage]) -> Any:
        asked.append((task.site, task.round_index))
        if task.site == SITE:
            return (failure(task, FailureKind.LEAVING, LeaveReason.SPOT),)
        return () if asked[-1] == ("site-0", 1) else (answer(),)

    job = in_the_clear(secure_evaluation(model))
    done = run(job, fault=fault, returned=lambda _sites, _index: ())
    *_, result = filter(is_result, done.seen)
    assert len(result.sites) == 4
    assert [index for site, index in asked if site == SITE] == [1]
    assert ("site-0", 2) in asked


def test_too_few_sites_are_no_result(model: Path, tmp_path: Path):
    """The run fails, and says whose answer is missing and why."""
    sites: list[dict[str, Any]] = [{"name": f"site-{i}"} for i in range(3)]
    sites[1]["data"] = {"source": "support.users_module:two_parts"}  # Other records.
    job = evaluation_job(model, sites=sites)
    with pytest.raises(QuorumNotMet, match=r"quorum is 3 of 3 .*site-1"):
        simulate(job, folder=tmp_path / "run")
    last = [*RunFolder(tmp_path / "run").read_events()][-1]
    assert isinstance(last, RunFinished)
    assert last.status == "failed"


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"rounds": 0}, "model.weights"),
        ({"rounds": 0, "evaluation": {"every": 0}}, "evaluation.every"),
        ({"rounds": 0, "model.personal": ["*bias"]}, "model.personal"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tables: dict[str, Any], key: str):
    document = job_file.document(training_job())
    if key != "model.weights":
        document["model"]["weights"] = "somewhere"
    for name, value in tables.items():
        job_file.override(document, name, value)
    with pytest.raises(JobError) as caught:
        job_file.parse(document)
    assert caught.value.key == key


def test_the_command_takes_a_run_a_file_or_a_url(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = tmp_path / "job.toml"
    job.write_text(RunFolder(model).job.read_text())
    found = []
    for at, name in enumerate((model, model / "model.safetensors", model.as_uri())):
        out = str(tmp_path / f"out-{at}")
        words = ["evaluate", str(name), str(job), "--out", out, "--no-report", "--json"]
        assert cli.main(words) == 0
        found.append(json.loads(capsys.readouterr().out)["final"])
    assert found[0] == found[1] == found[2]
    assert cli.main(["evaluate", str(tmp_path / "nothing"), str(job)]) == 2
    assert "there is no run" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_names_its_sites(model: Path, tmp_path: Path):
    """Without masks, which refuse it."""
    weights = load_file(model / "model.safetensors")
    wild = {name: np.full_like(array, 3e38) for name, array in weights.items()}
    save_file(wild, tmp_path / "model.safetensors")
    done = simulate(evaluation_job(tmp_path))
    assert "not finite at site-0, site-1, site-2" in "\n".join(outcome.lines(done.view))


def test_records_are_standardised_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run says how its model knows them; a file of it says nothing."""
    job = training_job()
    moments = {str(at): (0.5, 2.0) for at in range(4)}
    scaled = dataclasses.replace(job.training, standardise="stats:a", moments=moments)
    run = tmp_path / "run"
    simulate(dataclasses.replace(job, training=scaled), folder=run)
    plain, file = tmp_path / "plain.toml", run / "model.safetensors"
    plain.write_text(tomli_w.dumps(job_file.document(job)))
    outputs = (str(tmp_path / f"out-{at}") for at in range(3))
    losses = []
    for model, of in ((run, run / "job.toml"), (file, plain)):
        words = ["evaluate", str(model), str(of), "--out", next(outputs), "--json"]
        assert cli.main([*words, "--no-report"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["final"]["loss"])
    final = RunFolder(run).view().last_evaluated
    assert final is not None
    assert losses[0] == final.pooled.loss_sum / final.pooled.count
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)
    assert cli.main(["evaluate", str(run), str(plain), "--out", next(outputs)]) == 2
    assert "training.standardise: is not as" in capsys.readouterr().err


def test_a_run_with_personal_parts_names_the_verb_that_writes_a_whole_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job, run = training_job(), tmp_path / "run"
    personal = dataclasses.replace(job.model, personal=("*bias",))
    simulate(dataclasses.replace(job, model=personal), folder=run)
    plain = tmp_path / "plain.toml"
    plain.write_text(tomli_w.dumps(job_file.document(job)))
    assert cli.main(["evaluate", str(run), str(plain)]) == 2
    assert "crossfed site model" in capsys.readouterr().err
