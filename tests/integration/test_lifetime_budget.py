"""The budget that all runs at a site share: counted once, and refilled by nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import agents
from support.agents import OPEN_POLICY, Consortium, consortium
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models.model_pool import ModelPool
from clients.privacy.ledger_memory import LifetimeBudget, LifetimeSpent, lifetime
from clients.privacy.site_memory import FileMemory
from deploy.cli import commands as cli
from deploy.site_host.agent import SiteAgent
from federation.errors import JobError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    RoundTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from privacy.dp import accountant
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.membership import introduction

NAME = SiteId("site-0")
RUNS = [RunId(f"20260102-030405-00000{n}") for n in range(4)]


def private_job(unit: str = "record", epsilon: float = 4.0, **tables: Any) -> JobSpec:
    """Two sites, two rounds, and an evaluation that is charged with each."""
    private = {"unit": unit, "target_epsilon": epsilon, "clip_norm": 1.0}
    usual: dict[str, Any] = {
        "rounds": 2,
        "training": {"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 1},
        "privacy": {"differential_privacy": {**private, "delta": 1e-3}},
    }
    return small_job(num_sites=2, **usual | tables)


class Operator:
    """A site with a limit, and the aggregator that proposes runs to it."""

    def __init__(self, folder: Path, members: Consortium, **policy: Any) -> None:
        self._where, self._members = folder, members
        self.policy = {**OPEN_POLICY, **policy}
        self.tables: dict[str, Any] = {}
        self.agent = self._start()

    def _start(self) -> SiteAgent:
        policy = {k: v for k, v in self.policy.items() if v is not None}
        tables = {"policy": policy, **self.tables}
        return agents.agent(self._where, NAME, self._members, **tables)

    @property
    def folder(self) -> Path:
        return self._where / NAME

    def restart(self, **tables: Any) -> None:
        """Stop the agent, and start it with another ``site.toml``."""
        self.agent.close()
        self.tables |= tables
        self.agent = self._start()

    def propose(self, run: RunId, job: JobSpec) -> str:
        """Why the site refuses; empty if it takes part."""
        made = agents.proposal(job, run_id=run, nonce=os.urandom(16).hex())
        return agents.propose(self.agent, self._members, made).refused

    def train(
        self, run: RunId, job: JobSpec, rounds: int = 2, first: int = 1
    ) -> list[SiteUpdate | SiteFailure]:
        """Have the site do so many rounds."""
        pool = ModelPool(job)
        weights_d, integers_m = pool.initial_weights()
        found = []
        for index in range(first, first + rounds):
            task = RoundTask(
                run_id=run,
                round_index=index,
                site=NAME,
                kind=TaskKind.TRAIN,
                layout_digest=pool.layout.digest,
                weights_d=weights_d,
                integers_m=integers_m,
                evaluate=True,
                evaluate_after=False,
            )
            answer = self.agent.answer(task)
            assert isinstance(answer, SiteUpdate | SiteFailure)
            found.append(answer)
        return found

    def run(self, run: RunId, job: JobSpec) -> None:
        """A whole run of which nothing is refused."""
        assert self.propose(run, job) == ""
        answers = self.train(run, job)
        assert all(isinstance(answer, SiteUpdate) for answer in answers)

    def spent(self) -> LifetimeSpent | None:
        memory = FileMemory(self.folder / "memory")
        return lifetime(memory, LifetimeBudget(dataset="records"))


@pytest.fixture(scope="module")
def members() -> Consortium:
    return consortium("site-0", "site-1")


@pytest.fixture
def site(tmp_path: Path, members: Consortium) -> Iterator[Operator]:
    """A site that has trained one run of epsilon 4, and allows 12 in all."""
    made = Operator(tmp_path, members, total_epsilon=11.0)
    made.run(RUNS[0], private_job())
    yield made
    made.agent.close()


def test_site_must_state_a_limit(tmp_path: Path, members: Consortium):
    """For jobs with a unit of privacy; others have no budget."""
    site = Operator(tmp_path, members, total_epsilon=None)
    refused = site.propose(RUNS[0], private_job())
    assert "its operator must set policy.total_epsilon in site.toml" in refused
    assert refused.startswith("privacy.differential_privacy.unit")
    assert site.propose(RUNS[1], small_job(num_sites=2)) == ""
    site.agent.close()


def test_runs_are_composed_and_not_added(site: Operator):
    """Three promises of 4 on training and 4 on held-out records would be 24."""
    job = private_job()
    site.run(RUNS[1], job)
    spent = site.spent()
    assert spent is not None
    charges = [
        charge
        for run in RUNS[:2]
        for charge in read_file(
            site.folder / "runs" / run / "sites" / NAME / LEDGER_NAME
        ).charges
    ]
    want = accountant.epsilon([charge.event for charge in charges], 1e-3)
    assert (spent.num_runs, spent.delta) == (2, 1e-3)
    assert spent.epsilon == pytest.approx(want, rel=1e-9)
    assert 4.0 < want < 12.0
    # A third would take it beyond 11; a smaller one would not.
    for run in RUNS[2:]:
        if refused := site.propose(run, private_job(epsilon=7.0)):
            break
    assert "11 is allowed (policy.total_epsilon)" in refused


def test_runs_at_once_count_with_what_they_have_planned(
    tmp_path: Path, members: Consortium
):
    """Or both would begin, and neither could be finished."""
    site = Operator(tmp_path, members, total_epsilon=8.0)
    site.restart(max_runs=2)
    job = private_job()
    assert site.propose(RUNS[0], job) == ""
    refused = site.propose(RUNS[1], job)
    assert "spent or planned epsilon" in refused
    assert "8 is allowed (policy.total_epsilon)" in refused
    assert site.propose(RUNS[0], job) == ""  # It does not count against itself.
    cheap = private_job(epsilon=0.5)
    assert site.propose(RUNS[2], cheap) == ""
    for index in (1, 2):  # In turns, and each to its end.
        for run, done in ((RUNS[0], job), (RUNS[2], cheap)):
            (answer,) = site.train(run, done, rounds=1, first=index)
            assert isinstance(answer, SiteUpdate)
    charges = [
        charge
        for run in (RUNS[0], RUNS[2])
        for charge in read_file(
            site.folder / "runs" / run / "sites" / NAME / LEDGER_NAME
        ).charges
    ]
    spent = site.spent()
    assert spent is not None
    want = accountant.epsilon([charge.event for charge in charges], 1e-3)
    assert spent.epsilon == pytest.approx(want, rel=1e-9)
    assert want < 8.0
    site.agent.close()


def test_a_run_that_has_ended_frees_what_it_had_planned(
    tmp_path: Path, members: Consortium
):
    site = Operator(tmp_path, members, total_epsilon=8.0)
    site.restart(max_runs=2)
    job = private_job()
    assert site.propose(RUNS[0], job) == ""
    assert site.propose(RUNS[1], job) != ""
    end = introduction.seal_end(RUNS[0], members.aggregator, outcome="failed")
    assert site.agent.introduce(end) == b""
    assert site.propose(RUNS[1], job) == ""
    site.agent.close()


def test_deleted_runs_refill_nothing(site: Operator):
    """Neither do a new process or a new version of the data."""
    job = private_job(epsilon=7.0)
    before = site.spent()
    assert "is allowed (policy.total_epsilon)" in site.propose(RUNS[1], job)
    site.agent.close()
    shutil.rmtree(site.folder / "runs")
    data = {"source": "support.small_jobs:blobs", "options": {"num_train": 61}}
    site.restart(data=data)
    assert "is allowed (policy.total_epsilon)" in site.propose(RUNS[2], job)
    assert site.spent() == before


def test_other_data_have_their_own_budget(site: Operator):
    """By the operator's word, and by nothing else."""
    job, other = private_job(epsilon=7.0), "other people's records"
    site.restart(data={"name": other, "source": "support.small_jobs:blobs"})
    assert site.propose(RUNS[1], job) == ""


def test_data_with_another_name_are_not_other_data(site: Operator):
    """Else a word in a file would refill the budget."""
    site.restart(data={"name": "other people's records"})
    refused = site.propose(RUNS[1], private_job())
    assert "Set data.name to 'records'" in refused


@pytest.mark.parametrize("held_out", ["noise", "public"])
def test_run_without_evaluations_does_none(
    tmp_path: Path, members: Consortium, held_out: str
):
    """An aggregator that asks all the same would get results without noise."""
    policy = {"privacy": "record", "public_held_out": True, "max_delta": 1e-3}
    site = Operator(tmp_path, members, **policy)
    made = private_job(evaluation={"every": 0})
    private = replace(made.privacy.differential_privacy, held_out=held_out)
    job = replace(made, privacy=replace(made.privacy, differential_privacy=private))
    assert site.propose(RUNS[0], job) == ""
    (answer,) = site.train(RUNS[0], job, rounds=1)
    assert isinstance(answer, SiteFailure)
    assert "job has no evaluations" in answer.message
    assert site.spent() is None
    site.agent.close()


def test_budget_ends_in_the_middle_of_a_run(site: Operator):
    """A run that repeats rounds beyond its plan is charged, and then refused."""
    job = private_job()
    site.run(RUNS[1], job)
    memory = FileMemory(site.folder / "memory")
    # As if another run had charged much meanwhile.
    noisy = {"delta": 1e-3, "events": [[0.4, 1.0, 0.0, 4]]}

    def spend(document: dict[str, Any]) -> dict[str, Any]:
        document["datasets"]["records"]["runs"]["elsewhere"] = noisy
        return document

    memory.update("ledgers", spend)
    (answer,) = site.train(RUNS[1], job, rounds=1, first=3)
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.BUDGET
    assert "beyond 11 (policy.total_epsilon); nothing was released" in answer.message
    ledger = site.folder / "runs" / RUNS[1] / "sites" / NAME / LEDGER_NAME
    assert len(read_file(ledger).charges) == 4


def test_units_do_not_mix(site: Operator):
    """Epsilon of records and epsilon of whole sites say different things."""
    path = site.folder / "memory" / "ledgers.json"
    memory = FileMemory(path.parent)

    def about_sites(document: dict[str, Any]) -> dict[str, Any]:
        document["datasets"]["records"]["relation"] = accountant.SITE_RELATION
        return document

    memory.update("ledgers", about_sites)
    refused = site.propose(RUNS[1], private_job())
    assert "added into one epsilon." in refused
    assert refused.startswith("privacy.differential_privacy.unit")


def test_ledgers_of_before_are_counted(site: Operator):
    """The memory was lost, and the ledgers are in the folders of their runs."""
    before = site.spent()
    site.agent.close()
    (site.folder / "memory" / "ledgers.json").unlink()
    site.restart()
    assert site.propose(RUNS[1], private_job(epsilon=1.0)) == ""
    after = site.spent()
    assert before is not None
    assert after is not None
    assert (after.num_runs, after.epsilon) == (1, before.epsilon)


def test_charge_that_the_memory_could_not_hold_releases_nothing(site: Operator):
    """The ledger is ahead then, and the memory follows when it is opened again."""
    job = private_job()
    assert site.propose(RUNS[1], job) == ""
    memory = site.folder / "memory"
    away = memory.rename(site.folder / "away")
    memory.write_text("not a folder")
    (answer,) = site.train(RUNS[1], job, rounds=1)
    assert isinstance(answer, SiteFailure)
    memory.unlink()
    away.rename(memory)
    site.restart()
    assert site.propose(RUNS[1], job) == ""
    spent = site.spent()
    ledgers = sorted(site.folder.glob(f"runs/*/sites/{NAME}/{LEDGER_NAME}"))
    charges = [c.event for path in ledgers for c in read_file(path).charges]
    assert spent is not None
    assert spent.epsilon == pytest.approx(accountant.epsilon(charges, 1e-3), rel=1e-9)


# Simulations.


def test_simulation_counts_and_limits_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What runs beside it have spent, also those that were deleted."""
    job = private_job()
    for name in ("first", "second"):
        assert simulate(job, folder=tmp_path / name).status == "completed"
    assert cli.main(["ledger", str(tmp_path / "second"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ledgers"][0]["lifetime"]
    assert (found["num_runs"], found["dataset"]) == (2, "support.small_jobs:blobs")
    assert found["epsilon"] > 4.0
    shutil.rmtree(tmp_path / "first")
    limited = replace(
        job, simulation=replace(job.simulation, total_epsilon=found["epsilon"])
    )
    with pytest.raises(JobError, match=r"simulation\.total_epsilon") as caught:
        simulate(limited, folder=tmp_path / "third")
    assert caught.value.key == "privacy.differential_privacy.target_epsilon"


def test_changed_data_are_told_once_and_refill_nothing(
    site: Operator, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    """With what to do; the budget goes by the name alone."""

    def own(num_train: int) -> str:
        options = {"num_train": num_train}
        site.restart(data={"source": "support.small_jobs:blobs", "options": options})
        caplog.clear()
        assert site.propose(RUNS[1], private_job(rounds=1)) == ""
        return "".join(r.getMessage() for r in caplog.records if r.levelname > "INFO")

    assert own(60) == ""
    told = own(59)
    assert "site-0" in told
    assert "the budget of 'records' continues" in told
    assert own(59) == own(60) == ""
    assert site.train(RUNS[1], private_job(rounds=1), rounds=1)
    spent = site.spent()
    assert spent is not None
    assert (spent.num_runs, spent.num_contents) == (2, 2)
    assert cli.main(["ledger", str(site.folder / "runs" / RUNS[1])]) == 0
    assert "contents    2 since the first run;" in capsys.readouterr().out
