"""A coordinator and site agents, each with its own keys and folder, over bytes alone.

Flower is not in it: see ``tests/contract/test_flower_node.py``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support import agents
from support.agents import OPEN_POLICY, AgentGrid, Consortium, consortium
from support.small_jobs import regression_job
from support.without_report import simulate

from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.site_host.agent import SiteAgent
from deploy.wiring.parts import deal_data
from federation import events
from federation.clock import SystemClock
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job import code_files, job_file
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    MetricSums,
    SecureTask,
    SiteEvaluation,
    SiteMessage,
    SiteUpdate,
    Task,
)
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
SITES = ("aws-us-east-1", "gcp-us-central1")
RUN = "20260102-030405-abcdef"
IN_THE_CLEAR = "privacy.secure_aggregation.enabled=false"


class Killed(BaseException):
    """Ends a coordinator as a signal would: nothing tidies up after it."""


@dataclass
class Place:
    """An aggregator's host and two sites.

    Attributes:
        folder: Holds everything.
        members: Everybody's keys.
        grid: The way to the agents.
        seen: Events of all coordinators so far.
    """

    folder: Path
    members: Consortium
    grid: AgentGrid
    seen: list[events.Event] = field(default_factory=list)

    @property
    def run_folder(self) -> RunFolder:
        """Of the run."""
        return RunFolder(self.folder / "runs" / RUN)

    def run(
        self,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        listen: Callable[[events.Event], None] = lambda _: None,
    ) -> RunResult:
        """Run a coordinator, as one that is started anew does."""
        coordinator = DeployedRun(
            self.run_folder,
            self.members.parties,
            clock=SystemClock(),
            listeners=[self.seen.append, listen],
            stop_requested=stop_requested,
            report=False,
        )
        return coordinator.run(self.grid.connect)

    def submit(self, job: JobSpec) -> None:
        """Leave a job for the coordinator."""
        self.run_folder.path.mkdir(parents=True)
        self.run_folder.write_job(job)

    def restart(self, name: str) -> None:
        """Have an agent forget what it has in memory."""
        self.grid.agents[name].close()
        self.grid.agents[name] = agents.agent(self.folder, name, self.members)

    def rounds(self) -> list[tuple[int, str]]:
        """Each finished round, and how."""
        finished = [e for e in self.seen if isinstance(e, events.RoundFinished)]
        return [(e.round_index, e.status) for e in finished]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    members = consortium(*SITES, legal_form=" Ltd")
    found = {name: agents.agent(tmp_path, name, members) for name in SITES}
    with AgentGrid(found).connected() as grid:
        yield Place(tmp_path, members, grid)


def job(name: str, *changes: str) -> JobSpec:
    """One of the jobs that come with the product, shortened."""
    return job_file.load(JOBS / f"{name}.toml", ["training.local_steps=4", *changes])


def same(one: RunResult, other: RunResult) -> bool:
    """Whether two models are the same, bit for bit."""
    assert one.weights.keys() == other.weights.keys()
    return all(np.array_equal(one.weights[k], other.weights[k]) for k in one.weights)


def test_plain_run_is_the_simulated_one_bit_for_bit(place: Place):
    """Agents without data of their own take their part of the job's."""
    plain = job("quickstart", IN_THE_CLEAR, "rounds=3")
    place.submit(plain)
    deployed, simulated = place.run(), simulate(plain)
    assert deployed.status == simulated.status == "completed"
    assert same(deployed, simulated)
    check_bytes(deployed)
    files = {path.name for path in place.run_folder.path.iterdir()}
    assert {"model.safetensors", "result.json"} <= files


def check_bytes(result: RunResult) -> None:
    """A deployed run predicts its bytes as a simulated one, to the byte or the span."""
    view = result.view
    assert view.predicted is not None
    for found, (low, high) in (
        (view.bytes_down, view.predicted.bytes_down),
        (view.bytes_up, view.predicted.bytes_up),
    ):
        assert low <= found <= high
        assert high - low < 0.02 * high


def test_objective_of_ones_own_at_agents(tmp_path: Path):
    """Model, data, loss and metric are the user's; the numbers are a simulation's."""
    members, allowed = consortium("site-0", "site-1"), ["support.users_module:*"]
    policy = {**OPEN_POLICY, "functions": allowed}
    found = {
        name: agents.agent(tmp_path, name, members, policy=policy)
        for name in members.sites
    }
    own = regression_job(num_sites=2)
    with AgentGrid(found).connected() as grid:
        place = Place(tmp_path, members, grid)
        place.submit(own)
        deployed, simulated = place.run(), simulate(own)
    assert same(deployed, simulated)
    assert deployed.metrics == simulated.metrics
    assert deployed.metrics["absolute_error"] > 0


def test_secure_run_comes_to_the_model_of_a_simulated_one(place: Place):
    """To within the grid, on which words are rounded at random.

    Every step takes all of a site's examples: their order is each site's secret.
    """
    whole = ("training.batch_size=2000", "training.local_steps=2")
    plain = ("training.optimizer.name=sgd", "training.optimizer.lr=0.1")
    secure = job("quickstart", "rounds=2", *whole, *plain)
    place.submit(secure)
    deployed, simulated = place.run(), simulate(secure)
    assert [status for _, status in place.rounds()] == ["completed"] * 2
    for name, expected in simulated.weights.items():
        assert np.allclose(deployed.weights[name], expected, atol=1e-3), name


def test_private_run_keeps_the_promise_of_a_simulated_one(place: Place):
    """And each site's ledger is at that site, not with the aggregator."""
    private = job("private", "rounds=2")
    place.submit(private)
    simulated: list[events.Event] = []
    simulate(private, listeners=[simulated.append])
    deployed = place.run()
    assert deployed.status == "completed"
    check_bytes(deployed)
    (planned,) = [e for e in place.seen if isinstance(e, events.PrivacyPlanned)]
    (expected,) = [e for e in simulated if isinstance(e, events.PrivacyPlanned)]
    assert planned.sites == expected.sites
    assert planned.holds_against == expected.holds_against
    assert planned.withheld == expected.withheld
    for name in SITES:
        ledger = place.folder / name / "runs" / RUN / "sites" / name / "ledger.jsonl"
        assert len(ledger.read_text().splitlines()) > 2
    assert not list(place.run_folder.path.rglob("ledger*"))


def stop_after(rounds: int, place: Place) -> Callable[[], bool]:
    """Ask to stop once so many rounds are done."""
    return lambda: len(place.rounds()) >= rounds


def test_run_that_was_stopped_goes_on_to_the_same_model(place: Place):
    """Another coordinator proposes the run again, and the sites know it."""
    plain = job("quickstart", IN_THE_CLEAR, "rounds=4")
    place.submit(plain)
    assert place.run(stop_requested=stop_after(2, place)).status == "stopped"
    resumed = place.run()
    assert resumed.status == "completed"
    assert [index for index, _ in place.rounds()] == [1, 2, 3, 4]
    assert same(resumed, simulate(plain))


def test_kept_optimisers_outlive_coordinator_and_agents(place: Place):
    """Both end in the middle of a round that a site has answered. The round is done
    again, with the optimisers that it began with."""
    keep = 'training.optimizer.state="keep"'
    plain = job("quickstart", IN_THE_CLEAR, "rounds=4", keep)
    place.submit(plain)

    def kill(event: events.Event) -> None:
        if isinstance(event, events.SiteAnswered) and event.round_index == 3:
            raise Killed

    with pytest.raises(Killed):
        place.run(listen=kill)
    for name in SITES:
        place.restart(name)
    resumed = place.run()
    assert [index for index, _ in place.rounds()] == [1, 2, 3, 4]
    assert same(resumed, simulate(plain))
    assert not same(resumed, simulate(job("quickstart", IN_THE_CLEAR, "rounds=4")))


@pytest.mark.parametrize("name", ["quickstart", "private"])
def test_secure_run_whose_coordinator_is_killed_goes_on(place: Place, name: str):
    """In the middle of a round that sites have answered: they do not answer it twice.

    So it is lost, and the one after it is under a new setup.
    """
    place.submit(job(name, "rounds=3"))

    def kill(event: events.Event) -> None:
        if isinstance(event, events.SiteAnswered) and event.round_index == 2:
            raise Killed

    with pytest.raises(Killed):
        place.run(listen=kill)
    assert [index for index, _ in place.rounds()] == [1]
    result = place.run()
    assert result.status == "completed"
    statuses = dict(place.rounds())
    assert len(place.rounds()) == len(statuses) == 3
    assert [statuses[1], statuses[3]] == ["completed"] * 2
    assert statuses[2] != "completed"
    assert result.rounds_completed == 2


@pytest.mark.parametrize("name", ["quickstart", "private"])
def test_secure_run_goes_on_when_an_agent_restarts(place: Place, name: str):
    """Its keys are gone: the next round is lost, then all have new ones.

    Nothing of a ledger is.
    """
    place.submit(job(name, "rounds=4"))

    def restart(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished) and event.round_index == 2:
            place.restart(SITES[0])

    result = place.run(listen=restart)
    assert result.status == "completed"
    completed = [index for index, status in place.rounds() if status == "completed"]
    assert completed == [1, 2, 4]
    assert result.rounds_completed == 3
    setups = [t for t in place.grid.seen if _begins_setup(t) and t.site == SITES[0]]
    assert len(setups) == 2
    if name == "private":
        spent = [
            event.spent.epsilon
            for event in place.seen
            if isinstance(event, events.SiteAnswered)
            and event.site == SITES[0]
            and event.spent is not None
        ]
        assert spent == sorted(set(spent))


def _begins_setup(task: Task) -> bool:
    return isinstance(task, SecureTask) and task.step.value == "advertise"


def test_plain_run_goes_on_when_agents_restart(place: Place):
    """After every round, and to the same bits."""
    plain = job("quickstart", IN_THE_CLEAR, "rounds=3")
    place.submit(plain)

    def restart(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished):
            for name in SITES:
                place.restart(name)

    assert same(place.run(listen=restart), simulate(plain))


class Boaster(SiteAgent):
    """The agent of a site that would rather count for all."""

    def answer(self, task: Task) -> SiteMessage:
        """Train, and claim more than the site has."""
        answer = super().answer(task)
        assert isinstance(answer, SiteUpdate)
        return replace(answer, num_examples=10**9)


class Judge(SiteAgent):
    """The agent of a site that would have its held-out results count for all."""

    def answer(self, task: Task) -> SiteMessage:
        """Evaluate, and claim more hits than it has examples."""
        answer = super().answer(task)
        assert isinstance(answer, SiteUpdate | SiteEvaluation)
        lie = MetricSums(count=10**15, loss_sum=0.0, metrics={"correct": 10**15})
        return replace(answer, evaluation=lie)


def test_site_evaluates_on_no_more_than_it_introduced_itself_with(place: Place):
    """Beside an update and alone: the metrics are those of the honest site."""
    plain = job("quickstart", IN_THE_CLEAR, "rounds=1", "schedule.minimum_sites=1")
    place.submit(plain)
    honest = place.grid.agents[SITES[1]]
    place.grid.agents[SITES[1]] = Judge(
        config=honest.config,
        identity=honest.identity,
        roster=honest.roster,
        clock=honest.clock,
    )
    assert place.run().status == "completed"
    held_out = [len(held_out) for _, held_out in deal_data(plain).values()]
    failed = [e for e in place.seen if isinstance(e, events.SiteFailed)]
    assert {each.site for each in failed} == {SITES[1]}
    assert [each.round_index for each in failed] == [1, 2]
    most = f"but its data allows at most {held_out[1]}"
    expected = f"counts {10**15} predictions in evaluation, {most}"
    for each in failed:
        assert each.kind == FailureKind.INVALID
        assert expected in each.message
    evaluated = [e for e in place.seen if isinstance(e, events.ModelEvaluated)]
    assert [each.pooled.count for each in evaluated] == [held_out[0]] * 2


def test_site_counts_with_no_more_than_it_introduced_itself_with(place: Place):
    """Its update is refused with both numbers; the one of an honest site is used."""
    short = ("rounds=1", "evaluation.every=0", "schedule.minimum_sites=1")
    plain = job("quickstart", IN_THE_CLEAR, *short)
    place.submit(plain)
    honest = place.grid.agents[SITES[1]]
    boaster = Boaster(
        config=honest.config,
        identity=honest.identity,
        roster=honest.roster,
        clock=honest.clock,
    )
    place.grid.agents[SITES[1]] = boaster
    assert place.run().status == "completed"
    (told,) = [e for e in place.seen if isinstance(e, events.SitesIntroduced)]
    held = [len(train) for train, _ in deal_data(plain).values()]
    assert (told.sites, list(told.num_examples)) == (SITES, held)
    (failed,) = [e for e in place.seen if isinstance(e, events.SiteFailed)]
    expected = f"claims {10**9} training examples, but introduced itself with {held[1]}"
    assert (failed.site, failed.kind) == (SITES[1], FailureKind.INVALID)
    assert expected in failed.message
    (counted,) = [e for e in place.seen if isinstance(e, events.SiteAnswered)]
    assert (counted.site, counted.num_examples) == (SITES[0], held[0])


def test_site_that_refuses_ends_the_run_before_it_begins(place: Place):
    """With the site, the key of the job and that of the policy."""
    policy = {**OPEN_POLICY, "privacy": "record"}
    place.grid.agents[SITES[1]] = agents.agent(
        place.folder, SITES[1], place.members, policy=policy
    )
    place.submit(job("quickstart", "rounds=3"))
    expected = (
        r"does not take part: privacy\.differential_privacy\.unit: .*policy\.priv"
    )
    with pytest.raises(SiteError, match=expected):
        place.run()
    assert not place.run_folder.exists()
    assert SiteId(SITES[1]) not in {task.site for task in place.grid.seen}


@pytest.mark.parametrize("name", ["quickstart", "private"])
def test_run_that_has_begun_goes_on_without_a_site_that_refuses(
    place: Place, name: str
):
    """With what that site promised before, and a word about it."""
    place.submit(job(name, IN_THE_CLEAR, "rounds=3", "schedule.minimum_sites=1"))
    assert place.run(stop_requested=stop_after(1, place)).status == "stopped"
    policy = {**OPEN_POLICY, "functions": []}
    place.grid.agents[SITES[1]] = agents.agent(
        place.folder, SITES[1], place.members, policy=policy
    )
    assert place.run().status == "completed"
    assert [status for _, status in place.rounds()] == ["completed"] * 3
    (warned,) = [e.message for e in place.seen if isinstance(e, events.Warned)]
    assert f"{SITES[1]!r} does not take part" in warned
    assert warned.endswith("the run continues without it")
    plans = [e.sites for e in place.seen if isinstance(e, events.PrivacyPlanned)]
    assert plans[1:] == plans[:1] * (name == "private")


MODEL = """
from clients.models import digits_cnn

def net():
    return digits_cnn()
"""


def job_of_a_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job with a model by file, which the sites' operators have installed, too."""
    monkeypatch.setenv(code_files.FOLDERS, "/nowhere")
    home = place.folder / "home"
    for folder in (home, *(place.folder / site for site in SITES)):
        folder.mkdir(exist_ok=True)
        (folder / "my_model.py").write_text(MODEL)
    text = (JOBS / "quickstart.toml").read_text()
    file, name = home / "job.toml", "./my_model.py:net"
    file.write_text(text.replace("clients.models:digits_cnn", name))
    functions = [name, "clients.data:digits"]
    for site in SITES:
        place.grid.agents[site] = agents.agent(
            place.folder,
            site,
            place.members,
            policy={**OPEN_POLICY, "functions": functions},
        )
    found = job_file.load(file, ["rounds=2"])
    (home / "my_model.py").unlink()  # The rest of this process must not find it.
    return found


def test_sites_load_their_own_file(place: Place, monkeypatch: pytest.MonkeyPatch):
    """Which its operator has installed and listed; the job names its digest."""
    place.submit(job_of_a_file(place, monkeypatch))
    assert place.run().status == "completed"
