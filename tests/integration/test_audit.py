"""Audits of whole jobs: what is right stays below its epsilon, what is wrong does not.

Noise, sampling and canaries are drawn from fixed seeds, so every figure is that of
these very draws.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import JOB, ForkServer, workplace
from support.small_jobs import small_job
from torch import nn

from clients.privacy.site_plans import PrivateSites, SitePlan
from clients.training.local_federation import Federation
from clients.training.private_steps import sampling_rate
from deploy.audit.audit import audit, plan_sites
from deploy.audit.jobs import with_more_records
from deploy.audit.runs import Attack, guesses_for
from deploy.cli import audit_verb, commands as cli
from federation.errors import JobError, SiteError
from federation.events import RunFinished
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.protocols import Clock
from monitoring.audit_findings import AuditFindings, Verdict, document
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.poisson import poisson_indices
from privacy.dp_sgd import clipping
from privacy.dp_sgd.clipping import ClippedSum

pytestmark = pytest.mark.slow

RECORDS = 448  # On the grid of numbers of records, so that a batch can be all
SAMPLER = "clients.training.private_steps.poisson_indices"
STEPS = {"local_steps": 5, "batch_size": 100}
EPOCHS = {"local_epochs": 2, "batch_size": 130, "accumulate": 2}
ADAM = {"name": "adam", "lr": 0.1}
GPT = {
    "factory": "clients.models:gpt",
    "options": {"vocabulary": 256, "context": 8, "layers": 1, "heads": 1, "width": 8},
}


def private_job(noise: float, *, num_sites: int = 1, **training: Any) -> JobSpec:
    """One release of all records, unless told otherwise."""
    return small_job(
        num_sites=num_sites,
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": RECORDS * num_sites},
            "partition": {"kind": "iid"},
        },
        training={"batch_size": RECORDS, "optimizer": {"lr": 0.5}}
        | (training if "local_epochs" in training else {"local_steps": 1} | training),
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 60.0,
                "noise_multiplier": noise,
                "delta": 1e-5,
                "clipping": "ghost",
            }
        },
    )


def audited(
    job: JobSpec, *, canaries: int, noise_times: float = 1.0, seed: int = 0
) -> AuditFindings:
    """Audit sites whose noise is not what they tell their ledgers."""
    streams = np.random.default_rng(seed)

    def plan(federation: Federation, clock: Clock) -> PrivateSites | None:
        found = plan_sites(federation, clock)
        assert found is not None
        found.plans = {
            # Sites train side by side, so that one stream for all would not repeat.
            name: with_noise(plan, noise_times, streams.spawn(1)[0].bytes)
            for name, plan in found.plans.items()
        }
        return found

    attack = Attack(canaries=canaries, random_bytes=streams.spawn(1)[0].bytes)
    return audit(job, attack, plan_sites=plan)


def with_noise(
    plan: SitePlan, times: float, random_bytes: Callable[[int], bytes]
) -> SitePlan:
    assert plan.training is not None
    noise = times * plan.training.noise_multiplier
    training = replace(plan.training, noise_multiplier=noise, random_bytes=random_bytes)
    return replace(plan, training=training)


@pytest.mark.slow
def test_audit_separates_the_pipeline_from_one_with_half_the_noise():
    """Thirty thousand canaries through data, model, clipping and trainer."""
    job = private_job(2.0)
    kept = audited(job, canaries=30_000)
    broken = audited(job, canaries=30_000, noise_times=0.5)
    assert kept.broken == []
    assert broken.broken == broken.sites
    assert broken.sites[0].promise == kept.sites[0].promise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "clipping"),
    [
        (STEPS, "hooks"),
        (EPOCHS, "ghost"),
        ({"local_steps": 4, "batch_size": 60, "optimizer": ADAM}, "hooks"),
        ({"local_steps": 3, "batch_size": 80, "proximal_mu": 0.1}, "ghost"),
    ],
    ids=["steps", "epochs-ghost", "adam", "proximal-ghost"],
)
def test_right_pipelines_stay_below_their_epsilon(training: Any, clipping: str):
    """With sampling, several steps and rounds, and both ways to clip."""
    job = private_job(1.0, num_sites=2, **training)
    private = replace(job.privacy.differential_privacy, clipping=clipping)
    job = replace(
        job, rounds=2, privacy=replace(job.privacy, differential_privacy=private)
    )
    found = audited(job, canaries=2000)
    assert found.broken == []
    assert all(site.canaries.auc > 0.55 for site in found.sites)


def test_rounds_of_larger_steps_are_audited_at_their_own_rates():
    """A step of every fourth record, then one of all; right noise and half of it."""
    job = private_job(2.0, batch_size=RECORDS // 4)
    training = replace(job.training, accumulate_from=((2, 4),))
    job = replace(job, rounds=2, training=training)
    kept = audited(job, canaries=6000)
    broken = audited(job, canaries=6000, noise_times=0.5)
    assert kept.broken == []
    assert broken.broken == broken.sites


def test_buffered_run_is_audited_although_tasks_are_open_at_its_end():
    job = private_job(1.0, num_sites=3)
    free = replace(job.schedule, mode="buffered", buffer_size=2)
    found = audited(replace(job, rounds=3, schedule=free), canaries=500)
    assert found.broken == []
    assert len(found.sites) == 3


def person_job(noise: float) -> JobSpec:
    """One release of two records of each person."""
    job = private_job(noise)
    table = job_file.document(job)
    table["data"] = {
        "source": "support.small_jobs:visits",
        "options": {"num_persons": RECORDS},
        "partition": {"kind": "by_person"},
    }
    private = table["privacy"]["differential_privacy"]
    private |= {"unit": "person", "records_per_person": 2}
    return job_file.parse(table)


def test_audit_of_persons_separates_right_noise_from_half():
    """A canary is a person with three records, of which a step takes two."""
    kept = audited(person_job(2.0), canaries=4000)
    broken = audited(person_job(2.0), canaries=4000, noise_times=0.5)
    assert kept.broken == []
    assert broken.broken == broken.sites
    (site,) = kept.sites
    assert site.promise == broken.sites[0].promise
    assert "records of one person" in site.promise.terms
    assert site.membership.final.num_in == RECORDS
    assert site.membership.final.num_out == 20


def reused_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in every step: its keys are drawn once."""
    keys, release = [os.urandom(32), os.urandom(32)], GaussianMechanism.release_

    def planted(self: GaussianMechanism, sum_d: Any, _: Any = None) -> None:
        again = iter(keys)
        release(self, sum_d, lambda _size: next(again))

    monkeypatch.setattr(GaussianMechanism, "release_", planted)


def unclipped(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a kind add their gradients as they are."""
    add = ClippedSum._add_calls_

    def planted(self: ClippedSum, calls: Any, persons: Any) -> None:
        skipped = [call for call in calls if isinstance(call[0].layer, kind)]
        self._workspace.begin()
        found = clipping._sum_by_parameter(skipped, self._workspace, persons)
        for parameter, rows in found.items():
            part = self._parts[parameter].view(parameter.shape)
            part.add_(rows.double().sum(0))
        kept = [call for call in calls if not isinstance(call[0].layer, kind)]
        if kept:
            add(self, kept, persons)

    monkeypatch.setattr(ClippedSum, "_add_calls_", planted)


def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps work through a shuffled list, and shuffle it again at its end."""
    left: dict[int, Any] = {}
    rng = np.random.default_rng(5)

    def planted(num_records: int, rate: float, _: Any) -> Any:
        size = max(1, round(num_records * rate))
        order = left.get(num_records)
        if order is None or len(order) < size:
            order = rng.permutation(num_records)
        left[num_records] = order[size:]
        return np.sort(order[:size])

    monkeypatch.setattr(SAMPLER, planted)


def one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of a round take the records that its first one has drawn."""
    last: list[Any] = [None, None]

    def planted(num_records: int, rate: float, keystream: Any) -> Any:
        if keystream is not last[0]:
            last[:] = keystream, poisson_indices(num_records, rate, keystream)
        return last[1]

    monkeypatch.setattr(SAMPLER, planted)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "reused noise": reused_noise,
    "unclipped linear layers": partial(unclipped, nn.Linear),
    "unclipped embeddings": partial(unclipped, nn.Embedding),
    "shuffled list": shuffled,
    "one sample a round": one_sample,
}


def faulty_job(noise: float = 0.8) -> JobSpec:
    """Two rounds at an epsilon near 8, in which a record is drawn twice on average."""
    job = private_job(noise, local_steps=5, batch_size=100)
    private = replace(job.privacy.differential_privacy, clipping="hooks")
    privacy = replace(job.privacy, differential_privacy=private)
    return replace(job, rounds=2, privacy=privacy)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Each leaves the bound and the noise of the sum as they should be, or larger."""
    FAULTS[fault](monkeypatch)
    (site,) = audited(faulty_job(), canaries=1000).sites
    assert site.verdict is Verdict.BROKEN
    assert site.p_value < 1e-4


@pytest.mark.parametrize("seed", range(2))
def test_steps_as_they_should_be_are_not_called_broken(seed: int):
    """None of the tests says that something of them repeats."""
    (site,) = audited(faulty_job(), canaries=1000, seed=seed).sites
    assert site.curve is not None
    assert site.verdict is Verdict.NOT_BROKEN
    assert min(site.curve.repeated_noise, site.curve.sampling) > 0.01


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9, "state": "keep"}},
        {"local_steps": 2, "overlap_steps": 1},
    ],
)
def test_what_a_site_keeps_is_no_repeated_noise(training: dict[str, Any]):
    """It carries noise over into later rounds, which is post-processing."""
    job = replace(private_job(2.0, num_sites=2, **training), rounds=4)
    assert audited(job, canaries=1000).broken == []


def test_without_privacy_canaries_are_read_off():
    """Every guess is right, and nothing is broken: nothing was promised."""
    job = small_job(num_sites=2, rounds=2, training={"local_epochs": 1})
    attack = Attack(canaries=300, random_bytes=np.random.default_rng(1).bytes)
    found = audit(job, attack)
    for site in found.sites:
        assert site.guesses.correct == site.guesses.guesses
        assert site.bound == site.largest_bound > 2
        assert site.promise.epsilon == math.inf
    assert found.broken == []
    assert document(found)["sites"][0]["epsilon"] is None


@pytest.mark.parametrize("unit", ["none", "record"])
def test_language_models_are_audited(unit: str, request: pytest.FixtureRequest):
    """Windows of tokens carry canaries in their first token."""
    private = {"unit": "record", "target_epsilon": 200.0, "noise_multiplier": 0.6}
    job = small_job(
        model=GPT,
        data={
            "source": "clients.data:text_folder",
            "options": {
                "context": 8,
                "path": str(request.config.rootpath / "docs" / "adr"),
                "pattern": "[a-w]*.md",
            },
        },
        training={"task": "causal_lm", "local_steps": 2, "batch_size": 64},
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={
            "differential_privacy": {"unit": "none"} if unit == "none" else private
        },
    )
    found = audit(job, Attack(canaries=100))
    (site,) = found.sites
    assert site.membership.final.num_in > 100
    assert site.promise.is_private == (unit == "record")


def test_sites_that_are_not_audited_have_no_canaries():
    """They train as ever; only the named one is reported."""
    job = private_job(2.0, num_sites=2)
    found = audit(job, Attack(canaries=100, sites=("site-1",)))
    assert [site.site for site in found.sites] == ["site-1"]


def test_both_runs_are_seen_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Listeners hear of two runs that end; no folder appears."""
    monkeypatch.chdir(tmp_path)
    seen: list[object] = []
    audit(private_job(2.0), Attack(canaries=100), listeners=[seen.append])
    assert sum(isinstance(event, RunFinished) for event in seen) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("records", [256, 653, 50_000])
@pytest.mark.parametrize("extra", [100, 5000, 60_000])
@pytest.mark.parametrize("batch", [(1, 1), (8, 1), (32, 4), (256, 1)])
def test_more_records_keep_sampling_rate_and_steps(
    records: int, extra: int, batch: tuple[int, int]
):
    """Never a higher rate than the ledger is charged for, nor a lower one."""
    size, accumulate = batch
    job = private_job(1.0, batch_size=size, accumulate=accumulate, local_steps=3)
    new, num_empty = with_more_records(job, records, extra)
    total = records + extra + num_empty
    charged = sampling_rate(job, records)
    assert 0.99 * charged <= sampling_rate(new, total) <= charged
    assert 0 <= num_empty <= max(records + extra, 1.25 * records)
    assert new.training.batch_size <= size
    assert new.training.local_steps == 3


def test_steps_of_too_many_canaries_are_refused():
    """The rounding of their sum would take away from each of them."""
    job = private_job(1.0)
    with pytest.raises(JobError, match=r"draws \d+ records: use fewer canaries"):
        audit(job, Attack(canaries=300_000))


def test_number_of_guesses_depends_on_the_number_of_canaries_alone():
    """A tenth of few canaries, a twentieth of many."""
    assert [guesses_for(n) for n in (100, 5000, 10_000, 100_000)] == [
        10,
        500,
        500,
        5000,
    ]


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (Attack(sites=("nowhere",)), "no site 'nowhere'; it has site-0"),
        (Attack(canaries=99), "100 to 1000000 canaries, not 99"),
        (Attack(confidence=1.0), "between 0 and 1, not 1.0"),
    ],
)
def test_attacks_that_make_no_sense_are_refused(attack: Attack, message: str):
    """Before anything is trained."""
    with pytest.raises(JobError, match=message):
        audit(small_job(), attack)


def test_objective_of_a_users_own_is_not_audited():
    """Canaries push along a cross-entropy, and the scores are one."""
    job = small_job(training={"local_steps": 1, "task": "m:f"})
    with pytest.raises(JobError, match="only with the cross-entropy"):
        audit(job, Attack())


def test_a_model_with_personal_parts_is_not_audited():
    """What is attacked is the model that leaves the sites."""
    model = {"factory": "clients.models:mlp", "personal": ["3.*"]}
    with pytest.raises(JobError, match="without their personal parts"):
        audit(small_job(model=model), Attack())


def test_steps_that_follow_lines_are_not_audited():
    """Runs of an audit have none, and no option --engine."""
    schedule = {"local_work": "auto", "max_local_steps": 20}
    job = small_job(schedule=schedule, training={"local_steps": 5})
    with pytest.raises(JobError, match="runs of an audit"):
        audit(job, Attack())


def test_records_of_different_shapes_cannot_carry_canaries():
    """A linear model would take them, flattened, but one code has one place."""
    sites = [
        {"name": name, "data": {"source": f"support.small_jobs:{source}"}}
        for name, source in (("flat", "blobs"), ("square", "square_blobs"))
    ]
    job = small_job(sites=sites)
    with pytest.raises(JobError, match="different shapes"):
        audit(job, Attack(canaries=100))


@pytest.mark.slow
def test_private_job_is_audited_without_its_masks():
    """Two rounds of jobs/private.toml, secure aggregation and all."""
    job = job_file.load(
        Path(__file__).parents[2] / "jobs" / "private.toml", ["rounds=2"]
    )
    attack = Attack(canaries=300, random_bytes=np.random.default_rng(1).bytes)
    found = audit(job, attack)
    assert found.broken == []
    assert [site.site for site in found.sites] == [site.name for site in job.sites]
    assert all(0.5 < site.canaries.auc < 1 for site in found.sites)
    assert all(abs(site.membership.final.auc - 0.5) < 0.1 for site in found.sites)


def test_site_that_fails_ends_the_audit():
    """Its scores would say that it is safe."""
    model = {"factory": "clients.models:mlp", "options": {"inputs": 4, "classes": 3}}
    training = {"local_steps": 3, "optimizer": {"lr": 1e38}}
    job = small_job(model=model, training=training)
    with pytest.raises(SiteError, match=r"site-0.*did not take part.*NaN"):
        audit(replace(job, rounds=4), Attack(canaries=100))


def test_exit_code_of_a_broken_promise_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It says which site, and by how much."""
    found = audited(private_job(3.0), canaries=20_000, noise_times=0.25)
    audit_verb.leave(found, tmp_path / "new")
    assert audit_verb.show(found, tmp_path / "new", as_json=False) == 1
    streams = capsys.readouterr()
    assert "BROKEN" in streams.out
    assert "site 'site-0' reports epsilon 1.28" in streams.err
    assert "does not hold" in (tmp_path / "new" / "audit.html").read_text()
    assert json.loads((tmp_path / "new" / "audit.json").read_text())["broken"] == [
        "site-0"
    ]


def test_thousandth_of_the_noise_is_found_at_a_large_epsilon():
    """Every guess is right; the bound on epsilon alone could not say more.

    Without the tests of the trade-off curve the audit has to be inconclusive.
    """
    found = audited(private_job(0.62), canaries=2000, noise_times=0.001)
    (site,) = found.sites
    assert site.guesses.correct == site.guesses.guesses
    assert site.largest_bound < 7.5 < site.promise.epsilon < 9
    assert site.verdict is Verdict.BROKEN
    assert replace(site, curve=None).verdict is Verdict.INCONCLUSIVE


def test_exit_code_of_an_audit_that_could_find_nothing_is_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A hundred canaries, at an epsilon that only thousands can contradict."""
    found = audited(private_job(0.25), canaries=100, noise_times=0.001)
    assert found.inconclusive == found.sites
    audit_verb.leave(found, tmp_path / "new")
    assert audit_verb.show(found, tmp_path / "new", as_json=False) == 4
    streams = capsys.readouterr()
    assert "not broken" not in streams.out
    assert "--canaries" in streams.err


@pytest.mark.parametrize(
    "training",
    [{}, {"local_steps": 8, "batch_size": 100}],
    ids=["one-release", "sampling"],
)
def test_half_the_noise_is_found_at_an_epsilon_of_eight(training: Any):
    """By the trade-off curve; guesses alone are too few for such an epsilon."""
    job = private_job(0.62 if not training else 0.8, **training)
    kept = audited(job, canaries=2000)
    halved = audited(job, canaries=2000, noise_times=0.5)
    (site,) = kept.sites
    assert 6 < site.promise.epsilon < 9
    assert site.verdict is Verdict.NOT_BROKEN
    assert site.p_value > 0.5
    (site,) = halved.sites
    assert site.bound < site.promise.epsilon
    assert site.verdict is Verdict.BROKEN
    assert site.p_value < 0.01


@pytest.mark.slow
def test_command_leaves_its_own_folder_and_no_run(server: ForkServer, tmp_path: Path):
    """As a person calls it."""
    place = workplace(tmp_path, JOB.replace("rounds = 6", "rounds = 2"))
    done = server.run(
        *("audit", "job.toml", "--site", "left", "--canaries", "200", "--json"),
        folder=place,
    )
    assert done.code == 0, done.stderr
    assert "round 2 of 2" in done.stderr
    told = json.loads(done.stdout)
    assert [site["site"] for site in told["sites"]] == ["left"]
    folder = place / told.pop("folder")
    assert folder.parent == place / "audits" / "small"
    assert json.loads((folder / "audit.json").read_text()) == told
    assert (folder / "audit.html").exists()
    made = [place / "audits", folder.parent, folder, *folder.iterdir()]
    assert not [path for path in made if path.stat().st_mode & 0o077]
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--out", "taken"), 1, "taken is not empty:"),
        (("--site", "middle"), 2, "no site 'middle'; it has left, right"),
        (("--canaries", "0"), 2, "100 to 1000000 canaries, not 0"),
        (("--set", "rounds=0"), 2, "rounds"),
    ],
)
def test_command_explains_what_is_wrong(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Before anything is trained, and without a folder."""
    place = workplace(tmp_path)
    (place / "taken").mkdir()
    (place / "taken" / "note").touch()
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert cli.main(["audit", "job.toml", *arguments]) == code
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.out == ""
    assert not (place / "audits").exists()


def test_ledger_epsilon_is_what_the_plan_says():
    """One release of noise 2: the closed form at this delta."""
    found = audited(private_job(2.0), canaries=100)
    assert found.sites[0].promise.epsilon == pytest.approx(1.993, abs=1e-3)
    assert found.sites[0].site == SiteId("site-0")
