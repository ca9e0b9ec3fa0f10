"""Private selection in a search: what is refused, drawn, charged and released."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import event_samples

from deploy.tuning.ledger_marks import ATTRIBUTE, document, marks_below, parse
from deploy.tuning.selecting import (
    SelectionCost,
    SelectionDraw,
    cost,
    release,
    worst_events,
)
from deploy.tuning.selection_checks import check_sound
from deploy.tuning.space import load
from deploy.tuning.spending import spent
from deploy.tuning.trial import make_ready
from federation.clock import VirtualClock
from federation.errors import CorruptObject, JobError, PrivacyError, RunConflict
from federation.event_log import EventWriter
from monitoring.runs.run_folder import RunFolder
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_format import Terms
from privacy.dp.selection import RandomTrials, epsilon_of_best

JOB = """
name = "tiny"
rounds = 2
model.factory = "clients.models:logistic_regression"
model.options = { inputs = 30, classes = 2 }
data = { source = "clients.data:breast_cancer" }
training = { local_steps = 5, optimizer = { name = "adam", lr = 0.1 } }
aggregation = { weights = "uniform" }
sites = [{ name = "a" }, { name = "b" }]
"""
PRIVATE = """
[privacy.differential_privacy]
unit = "record"
target_epsilon = 2.0
"""
LINE = "training.optimizer.lr = { low = 1e-3, high = 1.0, log = true }"
RANDOM = 'sampler = "random"\nprivacy = { selection = "geometric" }'
TRAIN = PrivacyEvent(noise_multiplier=3.0, sampling_rate=1.0, steps=10, slack=1e-18)
LESS = PrivacyEvent(noise_multiplier=2.999, sampling_rate=1.0, steps=4, slack=1e-18)
HELD_OUT = PrivacyEvent(noise_multiplier=9.0, sampling_rate=1.0, steps=1, slack=1e-18)


def write(folder: Path, extra: str = RANDOM, line: str = LINE, job: str = PRIVATE):
    (folder / "job.toml").write_text(JOB + job)
    path = folder / "space.toml"
    path.write_text(f'job = "job.toml"\n{extra}\n[space]\n{line}\n')
    return path


def test_trials_are_a_random_number_with_the_files_as_its_mean(tmp_path: Path):
    """And a fixed one without a selection."""
    space = load(write(tmp_path, f"trials = 12\n{RANDOM}"))
    assert space.random_trials == RandomTrials(distribution="geometric", mean=12.0)
    assert load(write(tmp_path, "trials = 12")).random_trials is None


def test_the_number_of_trials_is_a_part_of_the_search(tmp_path: Path):
    """Or it could be drawn again until it is as wanted."""
    digests = {
        load(write(tmp_path, extra)).digest()
        for extra in (
            f"trials = 12\n{RANDOM}",
            f"trials = 13\n{RANDOM}",
            f"trials = 12\n{RANDOM.replace('geometric', 'poisson')}",
            'trials = 12\nsampler = "random"',
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("extra", "key", "said"),
    [
        (RANDOM.replace("random", "tpe"), "sampler", "learns from earlier trials"),
        (f"pruner = {{ min_rounds = 1 }}\n{RANDOM}", "pruner.min_rounds", "compares"),
        (f"seed = 1\n{RANDOM}", "seed", "is drawn secretly"),
        (
            RANDOM.replace(" }", ", max_epsilon = 9.0 }"),
            "privacy.max_epsilon",
            "that can be computed",
        ),
        (f"trials = 1\n{RANDOM}", "trials", "give 2 to 10000"),
        (f"trials = 10001\n{RANDOM}", "trials", "give 2 to 10000"),
    ],
)
def test_searches_without_a_bound_are_refused(
    tmp_path: Path, extra: str, key: str, said: str
):
    """With the key that would have to change."""
    with pytest.raises(JobError, match=said) as caught:
        load(write(tmp_path, extra))
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("job", "line", "said"),
    [
        ("", LINE, "no trial is charged"),
        (f"{PRIVATE}[simulation]\ntotal_epsilon = 9.0", LINE, "total_epsilon"),
        (
            f'{PRIVATE}[simulation]\nlive_metrics = ["mlflow"]',
            LINE,
            "would show every trial",
        ),
        (f"{PRIVATE}[selection]\npatience = 2", LINE, "selection.patience"),
        (PRIVATE, "rounds = { low = 1, high = 9 }", "space.rounds"),
        (PRIVATE, "training.batch_size = { low = 1, high = 9 }", "what a trial spends"),
    ],
)
def test_jobs_without_a_bound_are_refused(
    tmp_path: Path, job: str, line: str, said: str
):
    """Such as one whose trials cost more with some values than with others."""
    with pytest.raises(JobError, match=said):
        load(write(tmp_path, job=job, line=line))


def test_seed_and_number_are_drawn_anew_for_each_search():
    """32 draws: equal seeds would be a defect, equal numbers of all chance of 1e-30."""
    wanted = RandomTrials(distribution="geometric", mean=50)
    drawn = [SelectionDraw.fresh(wanted) for _ in range(32)]
    assert len({each.seed for each in drawn}) == 32
    assert len({each.trials for each in drawn}) > 1


def test_a_trial_is_charged_as_the_dearest_of_its_kind():
    """Most steps, with the least noise that another clip norm could give."""
    (found,) = worst_events([[TRAIN, TRAIN], [LESS], []], best=[LESS])
    assert (found.steps, found.sampling_rate, found.slack) == (20, 1.0, 1e-18)
    assert found.noise_multiplier == LESS.noise_multiplier * (1 - 2**-10)


def test_noise_of_other_trials_does_not_show_in_what_is_released():
    """The least of all would be less, the more trials there were."""
    alone = worst_events([[TRAIN]], best=[TRAIN])
    assert worst_events([[LESS], [TRAIN], [LESS]], best=[TRAIN]) == alone


def test_cost_is_that_of_the_dearest_site_and_purpose():
    """Beside the composition of as many trials as expected, whatever their number."""
    wanted = RandomTrials(distribution="geometric", mean=5)
    trials: list[dict[Any, Any]] = [
        {("a", "train"): [TRAIN], ("a", "evaluate"): [HELD_OUT]},
        {("a", "train"): [TRAIN], ("b", "train"): [TRAIN] * 2},
    ]
    found = cost(trials, trials[0], wanted, 1e-5)
    (worst,) = worst_events([[TRAIN] * 2], best=[TRAIN])
    assert found.epsilon == epsilon_of_best([worst], 1e-5, wanted)
    assert found.composed == accountant.epsilon([worst] * 5, 1e-5)
    assert (found.mean, found.distribution, found.delta) == (5.0, "geometric", 1e-5)


def test_nothing_is_released_without_a_bound(tmp_path: Path):
    """Such as of trials with hardly any noise."""
    space = load(write(tmp_path))
    bound = SelectionCost(
        distribution="geometric", mean=20.0, epsilon=math.inf, composed=9.0, delta=1e-5
    )
    with pytest.raises(PrivacyError, match="so nothing is released"):
        release(
            tmp_path, space, run=RunFolder(tmp_path), values={}, value=1.0, found=bound
        )
    assert not (tmp_path / "selected").exists()


def test_what_is_released_says_nothing_of_other_trials(tmp_path: Path):
    """Neither their number, nor which the best one was, nor when it ran."""
    space = load(write(tmp_path, f"trials = 12\n{RANDOM}"))
    run = RunFolder(tmp_path / "trials" / "0017")
    run.path.mkdir(parents=True)
    run.model.write_bytes(b"model")
    wanted = space.random_trials
    assert wanted is not None
    trial: dict[Any, Any] = {("a", "train"): [TRAIN]}
    found = release(
        tmp_path,
        space,
        run=run,
        values={"training.optimizer.lr": 0.25},
        value=0.5,
        found=cost([trial], trial, wanted, 1e-5),
    )
    assert found.folder == tmp_path / "selected"
    assert sorted(p.name for p in found.folder.iterdir()) == [
        "model.safetensors",
        "result.json",
    ]
    document = json.loads((found.folder / "result.json").read_text())
    assert set(document) == {
        "name",
        "metric",
        "value",
        "values",
        "unit",
        "epsilon",
        "delta",
        "distribution",
        "expected_trials",
    }
    assert document["expected_trials"] == 12.0
    written = [found.folder, *found.folder.iterdir()]
    assert {p.stat().st_mtime for p in written} == {0.0}
    assert "17" not in json.dumps(document | {"epsilon": 0.0})


def test_a_search_does_not_go_on_without_the_ledger_of_a_site(tmp_path: Path):
    """What the other sites have spent says nothing of it."""
    terms = Terms(
        run_id="0000", site="a", job_digest="ab" * 32, delta=1e-5, epsilon_cap=9.0
    )
    ledger = FileLedger(tmp_path / "sites" / "a", terms, clock=VirtualClock(1e9))
    ledger.charge(TRAIN, round_index=1)
    ledger.close()
    found = spent({tmp_path: {"a": None}})
    assert found is not None
    assert found.trials == [{("a", "train"): (TRAIN,), ("a", "evaluate"): ()}]
    with pytest.raises(CorruptObject, match=r"ledger of b .*missing"):
        spent({tmp_path: {"a": None, "b": None}})


def ledger_of(folder: Path, charges: int) -> Path:
    """A trial whose site was charged so often; its times are those of the folder."""
    terms = Terms(
        run_id="0000", site="a", job_digest="ab" * 32, delta=1e-5, epsilon_cap=9.0
    )
    clock = VirtualClock(1e9 + len(folder.name))
    with closing(FileLedger(folder / "sites" / "a", terms, clock=clock)) as ledger:
        for number in range(charges):
            ledger.charge(TRAIN, round_index=number + 1)
    return folder


def test_an_older_ledger_with_its_head_is_no_ledger_of_the_trial(tmp_path: Path):
    """Both are sound; only the search knows that more was spent."""
    marks = marks_below(ledger_of(tmp_path / "trial", 2))
    assert marks == parse({ATTRIBUTE: json.loads(json.dumps(document(marks)))})
    assert marks["a"].seq == 2
    assert spent({tmp_path / "trial": marks}) is not None
    assert spent({ledger_of(tmp_path / "later", 3): {"a": None}}) is not None
    older = ledger_of(tmp_path / "older", 1)
    with pytest.raises(CorruptObject, match=r"has 1 entries, .*has seen 2"):
        spent({older: marks})
    assert marks_below(older, marks) == marks  # Nor is it marked in its place.
    other = ledger_of(tmp_path / "continued otherwise", 3)
    with pytest.raises(CorruptObject, match="entry 2 is not the one"):
        spent({other: marks})


@pytest.mark.parametrize("written", [b"", b'{"at":1'])
def test_a_ledger_that_was_being_created_has_spent_nothing(
    tmp_path: Path, written: bytes
):
    """A process was killed then, or another worker is about to write; it can go on."""
    begun = ledger_of(tmp_path / "begun", 1)
    killed = tmp_path / "killed"
    ledger = killed / "sites" / "a" / "ledger.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_bytes(written)
    found = spent({begun: {"a": None}, killed: {}})
    assert found is not None
    assert found.trials[1] == {}
    with pytest.raises(CorruptObject, match=r"ledger of a .*missing"):
        spent({killed: {"a": None}})
    (ledger.parent / "ledger.head").write_text("any")
    with pytest.raises(CorruptObject, match="is unknown"):
        spent({killed: {}})


def test_a_trial_that_was_killed_before_its_run_started_begins_again(tmp_path: Path):
    """Its ledger names a run that is not continued; one with a charge stays."""
    unstarted, charged = ledger_of(tmp_path / "0", 0), ledger_of(tmp_path / "1", 1)
    started = ledger_of(tmp_path / "2", 0)
    for folder in (unstarted, charged):
        (folder / "events.jsonl").touch()
    event = event_samples.two_sites(1)[0]
    with EventWriter(started / "events.jsonl") as write:
        write(event)
    damaged = ledger_of(tmp_path / "3", 1)  # It may have held a charge.
    (damaged / "events.jsonl").touch()
    (path,) = damaged.rglob("ledger.jsonl")
    path.write_bytes(path.read_bytes()[:-9] + b"\n")
    for folder in (unstarted, charged, started, damaged, tmp_path / "never made"):
        make_ready(RunFolder(folder))
    left = [each.exists() for each in (unstarted, charged, started, damaged)]
    assert left == [False, True, True, True]
    run = RunFolder(started)
    with run.locked(), pytest.raises(RunConflict, match="wait until it ends"):
        make_ready(run)


def test_a_metric_that_no_trial_can_have_is_refused(tmp_path: Path):
    """Every trial would fail, and be charged: failures no longer end such a search."""
    extra = f'metric = "recall"\ngoal = "max"\n{RANDOM}'
    with pytest.raises(JobError, match="metric: 'recall' is not a result") as caught:
        load(write(tmp_path, extra))
    assert "choose" in str(caught.value)
    load(write(tmp_path, f'metric = "accuracy"\n{RANDOM}'))
    with pytest.raises(JobError, match="every is 0"):
        load(write(tmp_path, job=f"{PRIVATE}[evaluation]\nevery = 0"))


def test_values_that_are_no_sound_job_end_a_search(tmp_path: Path):
    """No record decides that."""
    space = load(write(tmp_path))
    check_sound(space, 0, {"training.optimizer.lr": 0.5})
    with pytest.raises(JobError, match="trial 3 is no sound job: rounds") as caught:
        check_sound(space, 2, {"rounds": -1})
    assert "releases nothing" in str(caught.value)
