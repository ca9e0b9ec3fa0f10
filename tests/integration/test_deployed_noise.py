"""Noise that adds up inside the secure sum, planned by agents that trust nobody.

Over bytes alone, as in ``test_site_agent``.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support import agents
from support.agents import OPEN_POLICY, AgentGrid, consortium
from support.small_jobs import small_job
from support.without_report import simulate

from clients.privacy import stated_bounds
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.site_host.agent import SiteAgent
from deploy.wiring.run import SecureContext
from federation import events
from federation.clock import SystemClock
from federation.errors import FederationError, SiteError
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import SecureTask, SiteMessage, Task
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult
from privacy.membership import introduction

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
RUN = "20260102-030405-abcdef"


# The product's own, shortened: four sites, and a share of the noise at each.
JOB = job_file.load(JOBS / "joint.toml", ["rounds=3"])
SITES = tuple(site.name for site in JOB.sites)


class Place:
    """An aggregator's host and the sites of a job."""

    def __init__(self, folder: Path, job: JobSpec, **tables: Any) -> None:
        self.folder, self.job = folder, job
        self.tables = tables
        names = [site.name for site in job.sites]
        self.members = consortium(*names)
        self.grid = AgentGrid({name: self.agent(name) for name in names})
        self.run_folder = RunFolder(folder / "runs" / RUN)
        self.run_folder.path.mkdir(parents=True)
        self.run_folder.write_job(job)
        self.seen: list[events.Event] = []

    def agent(self, name: str) -> SiteAgent:
        return agents.agent(self.folder, name, self.members, **self.tables)

    def run(
        self,
        listen: Callable[[events.Event], None] = lambda _: None,
        kind: type[DeployedRun] = DeployedRun,
    ) -> RunResult:
        """Run a coordinator, as one that is started anew does."""
        coordinator = kind(
            self.run_folder,
            self.members.parties,
            clock=SystemClock(),
            listeners=[self.seen.append, listen],
            report=False,
        )
        return coordinator.run(self.grid.connect)

    def ledger(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "runs" / RUN / "sites" / name / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path, JOB)
    with found.grid.connected():
        yield found


def planned(seen: list[events.Event]) -> events.PrivacyPlanned:
    (found,) = [e for e in seen if isinstance(e, events.PrivacyPlanned)]
    return found


def test_joint_run_has_the_noise_plan_of_a_simulated_one(place: Place):
    """To the last digit, and every site's ledger shows what the simulation's does."""
    simulated: list[events.Event] = []
    simulate(JOB, folder=place.folder / "simulated", listeners=[simulated.append])
    assert place.run().status == "completed"
    deployed, expected = planned(place.seen), planned(simulated)
    by_name = tuple(sorted(expected.sites, key=lambda site: site.site))
    assert replace(deployed, at=0.0) == replace(expected, at=0.0, sites=by_name)
    for name in SITES:
        found = place.ledger(name)
        (path,) = (place.folder / "simulated").glob(f"sites/{name}/ledger.jsonl")
        other = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("epsilon_after") for line in found] == [
            line.get("epsilon_after") for line in other
        ]
        assert len(found) > JOB.rounds


class Overstating:
    """An agent that states another need of noise than its records have."""

    def __init__(self, inner: SiteAgent, needs: float) -> None:
        self.inner, self.needs = inner, needs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def introduce(self, sealed: bytes) -> bytes:
        made = introduction.kept_introduction(self.inner.introduce(sealed))
        told = made if made.needs is None else replace(made, needs=self.needs)
        return introduction.seal_introduction(told, self.inner.identity)


def test_need_that_no_site_of_the_job_has_ends_the_run_in_its_name(place: Place):
    """All others would add noise for it, and the model would be nothing else."""
    liar, most = SITES[1], stated_bounds.largest_need(JOB)
    for need in (math.nextafter(most, math.inf), 1e3, 1e300):
        place.grid.agents[liar] = cast(
            SiteAgent, Overstating(place.agent(liar), needs=need)
        )
        with pytest.raises(SiteError) as caught:
            place.run()
        assert f"site '{liar}' states that it needs" in str(caught.value)
        assert not any(f"'{name}'" in str(caught.value) for name in {*SITES} - {liar})


def test_need_that_one_site_alone_has_is_told(place: Place):
    """Within what the job allows it may be true, and costs all others."""
    name, most = SITES[1], stated_bounds.largest_need(JOB)
    place.grid.agents[name] = cast(
        SiteAgent, Overstating(place.agent(name), needs=most)
    )
    assert place.run().status == "completed"
    texts = [each.message for each in place.seen if isinstance(each, events.Warned)]
    (told,) = [text for text in texts if "noise multiplier" in text]
    assert told.startswith(f"site '{name}' needs a noise multiplier of {most:.4g}")
    found = {each.noise_multiplier for each in planned(place.seen).sites}
    assert found == {most}


def visits_job(unit: str) -> JobSpec:
    """Two sites whose data name persons, each with noise of its own."""
    private = {"unit": unit, "target_epsilon": 8.0}
    return small_job(
        num_sites=2,
        data={
            "source": "support.small_jobs:visits",
            "partition": {"kind": "by_person"},
        },
        training={"local_steps": 2, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        privacy={
            "differential_privacy": private,
            "secure_aggregation": {"enabled": True},
        },
    )


OF_PERSONS = {
    **OPEN_POLICY,
    "privacy": "person",
    "max_delta": 0.01,
    "functions": ["clients.models:*", "support.small_jobs:visits"],
}


def test_persons_are_planned_likewise(tmp_path: Path):
    """By the noise of each site alone, where the operator demands this unit."""
    job = visits_job("person")
    place = Place(tmp_path, job, policy=OF_PERSONS)
    with place.grid.connected():
        assert place.run().status == "completed"
    simulated: list[events.Event] = []
    simulate(job, listeners=[simulated.append], report=False)
    assert replace(planned(place.seen), at=0.0) == replace(planned(simulated), at=0.0)
    assert place.ledger("site-0")[0]["unit"] == "person"


def test_an_operator_may_demand_that_persons_are_protected(tmp_path: Path):
    """And refuses a job that protects their single records."""
    place = Place(tmp_path, visits_job("record"), policy=OF_PERSONS)
    with (
        place.grid.connected(),
        pytest.raises(FederationError, match="requires 'person'"),
    ):
        place.run()


def test_whole_sites_are_planned_likewise(tmp_path: Path):
    """From the number of sites alone; the bits that the clip norm follows, too."""
    adaptive = "privacy.differential_privacy.adaptive_clip=true"
    job = job_file.load(JOBS / "sites.toml", ["rounds=2", adaptive])
    policy = {
        **OPEN_POLICY,
        "privacy": "site",
        "public_held_out": True,
        "max_delta": 0.01,
    }
    simulated: list[events.Event] = []
    simulate(job, listeners=[simulated.append])
    assert job.data is not None
    functions = [job.model.factory, job.data.source]
    place = Place(tmp_path, job, policy={**policy, "functions": functions})
    with place.grid.connected():
        assert place.run().status == "completed"
    deployed, expected = planned(place.seen), planned(simulated)
    assert len(place.grid.questions) == 2
    assert deployed.signal_to_noise == expected.signal_to_noise
    assert set(deployed.sites) == set(expected.sites)
    clips = [e.update_clip for e in place.seen if isinstance(e, events.RoundFinished)]
    assert len(set(clips)) == 2


def test_site_that_restarts_plans_the_same_noise(place: Place):
    """From its folder: what the others need is kept with the proposal."""

    def restart(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished) and event.round_index == 1:
            place.grid.agents[SITES[0]].close()
            place.grid.agents[SITES[0]] = place.agent(SITES[0])

    assert place.run(listen=restart).status == "completed"
    multipliers = {
        line["event"]["noise_multiplier"]
        for line in place.ledger(SITES[0])
        if line.get("purpose") == "train"
    }
    assert len(multipliers) == 1


class Killed(BaseException):
    """Ends a coordinator as a signal would."""


def test_run_goes_on_with_another_coordinator(place: Place):
    """Which asks again, and is answered again."""

    def kill(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished) and event.round_index == 1:
            raise Killed

    with pytest.raises(Killed):
        place.run(listen=kill)
    assert place.run().status == "completed"
    assert len(place.grid.questions) == len(set(place.grid.questions)) == 4


class Absent:
    """An agent that answers no task of the second round."""

    def __init__(self, agent: SiteAgent) -> None:
        self._agent = agent
        self.introduce, self.close = agent.introduce, agent.close

    def answer(self, task: Task) -> SiteMessage:
        if task.round_index == 2 and not isinstance(task, SecureTask):
            raise SiteError("is not there")
        return self._agent.answer(task)


def test_noise_is_enough_without_those_who_may_drop_out(tmp_path: Path):
    """Shares are made for the smallest sum; a round continues without a site."""
    threshold = "privacy.secure_aggregation.threshold=3"
    place = Place(tmp_path, job_file.load(JOBS / "joint.toml", ["rounds=3", threshold]))
    absent = Absent(place.grid.agents[SITES[0]])
    place.grid.agents[SITES[0]] = cast("SiteAgent", absent)
    with place.grid.connected():
        assert place.run().status == "completed"
    finished = [e for e in place.seen if isinstance(e, events.RoundFinished)]
    assert [e.status for e in finished] == ["completed"] * 3
    answered = [e for e in place.seen if isinstance(e, events.SiteAnswered)]
    assert sum(e.round_index == 2 for e in answered) == 3
    simulated: list[events.Event] = []
    simulate(place.job, listeners=[simulated.append])
    assert set(planned(place.seen).sites) == set(planned(simulated).sites)


class Thrifty(DeployedRun):
    """A coordinator that has planned with everybody, and asks for half the noise."""

    def _secret(self) -> SecureContext | None:
        assert self._in_sum is not None
        ring = replace(self._in_sum.ring, noise_std=self._in_sum.ring.noise_std / 2)
        self._in_sum = replace(self._in_sum, ring=ring)
        return super()._secret()


def test_contract_with_less_noise_than_was_planned_is_refused(place: Place):
    """By every site, before it trains; the message says what it counts on."""
    with pytest.raises(FederationError, match="no round was completed"):
        place.run(kind=Thrifty)
    failed = [e for e in place.seen if isinstance(e, events.SiteFailed)]
    assert {each.site for each in failed} == set(SITES)
    assert all("site relies on 0.86" in each.message for each in failed)
    for name in SITES:
        assert not [line for line in place.ledger(name) if "purpose" in line]
