"""Noised statistics are charged once to a run and to all runs, and are in epsilon."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import agents, ranked_sites
from support.agents import OPEN_POLICY, Consortium, consortium
from support.killed_runs import kill_in_round_2
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models.model_pool import ModelPool
from clients.models.starting_weights import pinned
from clients.privacy import standardise
from clients.privacy.ledger_memory import LifetimeBudget, lifetime
from clients.privacy.site_memory import FileMemory
from clients.privacy.site_plans import PrivateSites
from clients.privacy.standardise import Statistics
from clients.ranks import group
from clients.training.trainer import TorchTrainer
from deploy.audit.audit import audit
from deploy.audit.runs import Attack
from deploy.site_host.ranks import ranked_trainer
from deploy.tools import ledger_recovery
from deploy.wiring import parts as wiring
from deploy.wiring.job_data import load_data
from federation.clock import SystemClock
from federation.errors import SiteError
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.evaluation_job import make_evaluation
from federation.job.spec import EvaluationSpec, JobSpec
from privacy.dp import accountant
from privacy.dp.ledger.ledger_files import HEAD_NAME, LEDGER_NAME, read_file
from privacy.dp.ledger.ledger_format import Charge

pytestmark = [pytest.mark.slow]

SITES = [SiteId(f"site-{n}") for n in range(3)]
BOUNDS = {"low": [-4.0], "high": [5.0], "noise_multiplier": 4.0}


def private_job(unit: str = "record", **private: Any) -> JobSpec:
    table = {"unit": unit, "target_epsilon": 4.0, "delta": 1e-3}
    return small_job(
        num_sites=3,
        rounds=3,
        training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={
            "secure_aggregation": {"enabled": unit == "joint"},
            "differential_privacy": {**table, "standardise": BOUNDS, **private},
        },
    )


def charges(folder: Path, site: SiteId) -> tuple[Charge, ...]:
    return read_file(folder / "sites" / site / LEDGER_NAME).charges


def of_statistics(folder: Path, site: SiteId) -> list[Charge]:
    return [c for c in charges(folder, site) if c.round_index == standardise.ROUND]


def remembered(memory: Path, site: SiteId, job: JobSpec) -> Any:
    assert job.data is not None
    found = FileMemory(memory / site)
    return lifetime(found, LifetimeBudget(dataset=job.data.source, delta=1e-3))


@pytest.mark.parametrize("unit", ["record", "joint"])
def test_epsilon_of_a_run_holds_its_statistics(tmp_path: Path, unit: str):
    """They come first, and the noise of training leaves room for them."""
    job = private_job(unit)
    folder = tmp_path / "run"
    simulate(job, folder=folder)
    for site in SITES:
        found = charges(folder, site)
        assert [c.round_index for c in found] == [standardise.ROUND, 1, 2, 3]
        statistics, *rounds = (c.event for c in found)
        assert statistics.sampling_rate == 1.0
        assert statistics.noise_multiplier == pytest.approx(4.0, rel=2e-3)
        together = accountant.epsilon([statistics, *rounds], 1e-3)
        assert found[-1].epsilon_after == together
        assert together > accountant.epsilon(rounds, 1e-3) * 1.01
    # With the round in reserve the site that needs most noise is at the target.
    most = max(
        accountant.epsilon(
            [c.event for c in charges(folder, site)]
            + [charges(folder, site)[-1].event],
            1e-3,
        )
        for site in SITES
    )
    assert 3.99 < most <= 4.0


def test_training_pays_for_its_statistics_with_more_noise():
    def noise(job: JobSpec) -> list[float]:
        with PrivateSites(
            wiring.build_federation(job),
            run_id=RunId("run-1"),
            folder=None,
            clock=SystemClock(),
        ) as sites:
            planned = sites.planned(at=0.0)
        said = any("mean and deviation" in text for text in planned.withheld)
        assert said == (job.privacy.differential_privacy.standardise is not None)
        return [site.noise_multiplier for site in planned.sites]

    job = private_job()
    document = job_file.document(job)
    document["privacy"]["differential_privacy"].pop("standardise")
    without = noise(job_file.parse(document))
    assert all(a > b for a, b in zip(noise(job), without, strict=True))


def test_killed_run_resumes_with_the_same_statistics(tmp_path: Path):
    job, folder = private_job(), tmp_path / "run"
    kill_in_round_2(job_file.document(job), folder)
    before = {site: of_statistics(folder, site) for site in SITES}
    memory = {
        site: FileMemory(tmp_path / ".memory" / site).read(standardise.DOCUMENT)
        for site in SITES
    }
    simulate(job, folder=folder, resume=True)
    for site in SITES:
        assert len(before[site]) == 1
        assert of_statistics(folder, site) == before[site]
        now = FileMemory(tmp_path / ".memory" / site).read(standardise.DOCUMENT)
        assert now == memory[site]
        (entry,) = now.values()
        assert len(entry["result"]["centre"]) == 4


def test_second_run_is_charged_and_all_runs_are_not_again(tmp_path: Path):
    job = private_job()
    simulate(job, folder=tmp_path / "one")
    simulate(job, folder=tmp_path / "two")
    for site in SITES:
        one, two = (charges(tmp_path / name, site) for name in ("one", "two"))
        assert one[0].event == two[0].event
        events = [c.event for c in (*one, *two[1:])]
        found = remembered(tmp_path / ".memory", site, job)
        assert found.num_runs == 2
        assert found.epsilon == pytest.approx(accountant.epsilon(events, 1e-3))


def test_lost_ledger_is_charged_for_statistics_too(tmp_path: Path):
    """As they were, and not as a step, which may cost less."""
    job, root = private_job(), tmp_path
    simulate(job, folder=root / "run")
    site = SITES[0]
    whole = charges(root / "run", site)
    for name in (LEDGER_NAME, HEAD_NAME):
        (root / "run" / "sites" / site / name).unlink()
    ledger_recovery.in_simulation("run", root, clock=SystemClock())
    again = charges(root / "run", site)
    assert {c.event for c in again} == {c.event for c in whole}
    assert again[-1].epsilon_after == pytest.approx(whole[-1].epsilon_after)


def test_ranks_standardise_as_one_process_does(monkeypatch: pytest.MonkeyPatch):
    """They read the data themselves, and are given the numbers."""
    monkeypatch.setenv("PYTHONPATH", str(ranked_sites.TESTS))
    monkeypatch.setattr(group, "subprocess", ranked_sites.ForkedRanks)
    job = small_job()
    pool = ModelPool(job)
    train, held_out = load_data(ranked_sites.BLOBS, {})
    statistics = Statistics(centre=(1.0, -1.0, 0.5, 2.0), spread=(0.5, 2.0, 1.0, 4.0))
    one = TorchTrainer(
        job,
        SITES[0],
        pool=pool,
        train=statistics.apply(train),
        held_out=statistics.apply(held_out),
    )
    file = ranked_sites.site_file(ranked_sites.BLOBS)
    with ranked_trainer(job, file, pool.layout, statistics=statistics) as trainer:
        pids = ranked_sites.pids_of(trainer)
        ranked_sites.assert_like_one(trainer, one, pool)
    ranked_sites.wait_until_gone(pids)


def test_audit_standardises_as_a_run_does():
    """And tests what the steps cost, with the noise that the statistics leave them."""
    found = audit(private_job(), Attack(sites=(SITES[0],), canaries=200))
    assert not found.broken
    (site,) = found.sites
    assert 0 < site.promise.epsilon < 4.0


@pytest.fixture(scope="module")
def members() -> Consortium:
    return consortium(*SITES)


@pytest.fixture
def agent(tmp_path: Path, members: Consortium) -> Iterator[Any]:
    tables = {"policy": {**OPEN_POLICY, "total_epsilon": 20.0}}
    yield lambda: agents.agent(tmp_path, SITES[0], members, **tables)
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_deployed_site_that_restarts_is_not_charged_again(
    agent: Any, members: Consortium, tmp_path: Path
):
    run = RunId("20260102-030405-000000")
    nonce = "ab" * 16
    for _ in range(2):
        site = agent()
        made = agents.proposal(private_job(), run_id=run, nonce=nonce)
        assert agents.propose(site, members, made).refused == ""
        site.close()
    folder = tmp_path / SITES[0]
    found = of_statistics(folder / "runs" / run, SITES[0])
    assert len(found) == 1
    (entry,) = FileMemory(folder / "memory").read(standardise.DOCUMENT).values()
    assert entry["run_id"] == run


def evaluated_job(model: Path, **private: Any) -> JobSpec:
    """The job of ``crossfed evaluate MODEL JOB``."""
    document = job_file.document(evaluating(**private))
    make_evaluation(document, str(model))
    return pinned(job_file.parse(document), Path())


def evaluating(**private: Any) -> JobSpec:
    return replace(
        private_job(held_out="public", **private), evaluation=EvaluationSpec(every=1)
    )


def test_an_evaluation_takes_the_statistics_of_training(tmp_path: Path):
    """The records are those that the model knows; nothing is released again."""
    trained = simulate(evaluating(), folder=tmp_path / "trained")
    memories = [FileMemory(tmp_path / ".memory" / site) for site in SITES]
    before = [memory.read(standardise.DOCUMENT) for memory in memories]
    spent = [remembered(tmp_path / ".memory", site, evaluating()) for site in SITES]
    job = evaluated_job(tmp_path / "trained")
    found = simulate(job, folder=tmp_path / "evaluated").summary()["final"]
    assert found == {**trained.summary()["final"], "round": 0}
    assert [memory.read(standardise.DOCUMENT) for memory in memories] == before
    after = [remembered(tmp_path / ".memory", site, job) for site in SITES]
    assert [each.epsilon for each in after] == [each.epsilon for each in spent]
    for site in SITES:
        assert len(of_statistics(tmp_path / "evaluated", site)) == 1
    other = {"standardise": {**BOUNDS, "high": [6.0]}}
    for made, folder in (
        (job, tmp_path / "elsewhere" / "run"),
        (evaluated_job(tmp_path / "trained", **other), tmp_path / "other"),
    ):
        with pytest.raises(SiteError, match=r"site-0.*remembers no statistics"):
            simulate(made, folder=folder)


def test_a_deployed_site_evaluates_only_with_statistics_of_training(
    members: Consortium, tmp_path: Path
):
    own = {"source": "support.small_jobs:blobs", "name": "own"}
    policy = {**OPEN_POLICY, "total_epsilon": 20.0}
    site = agents.agent(tmp_path, SITES[0], members, data=own, policy=policy)
    simulate(evaluating(), folder=tmp_path / "model")
    evaluates = evaluated_job(tmp_path / "model")
    answers = []
    for at, job in enumerate((evaluates, evaluating(), evaluates)):
        run = RunId(f"20260102-030405-00000{at}")
        made = agents.proposal(job, run_id=run, nonce="ab" * 16)
        answers.append(agents.propose(site, members, made).refused)
    site.close()
    assert "remembers no statistics" in answers[0]
    assert answers[1:] == ["", ""]
