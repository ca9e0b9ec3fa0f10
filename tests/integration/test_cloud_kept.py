"""Launches on two clouds that fail half-way are completed, once, by who keeps them."""

import base64
import json
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import fake_gce
from support.ec2_server import IMAGE, REGION, ZONES, Ec2Server
from support.fake_gce import FakeGce
from support.small_jobs import small_job

from cloud_adapters.compute.pool import Market, Node, NodeSpec, NodeState
from deploy.aggregator_host import run_queue
from deploy.cli import run_verbs, up_verb
from deploy.cli.terminal import tell
from deploy.exit_codes import DONE, STOPPED
from deploy.fleet import spec as fleet_spec, spending, state
from deploy.fleet.loop import NodeRequest, fill
from deploy.fleet.placement import Placement, SeenRun, WorkLeft
from deploy.fleet.prices import MachinePrice, Prices
from deploy.fleet.reconcile import DEPLOYMENT, NUMBER, ROLE
from deploy.fleet.sizes import Sizer
from deploy.fleet.spec import DeploymentPlan
from deploy.fleet.spending import MachineCost, Spending
from deploy.fleet.state import Deployment
from deploy.fleet.supervisor import Keeper, RunWatch
from federation.clock import SystemClock, VirtualClock
from federation.errors import ComputeUnavailable
from monitoring.runs.run_folder import RunFolder

pytestmark = pytest.mark.slow
SITES = ("aws-us-east-1", "gcp-us-central1")
SPECS = (
    {"machine": "m5.large", "zones": ZONES, "image": IMAGE},
    {
        "machine": fake_gce.TYPES[0],
        "zones": fake_gce.ZONES,
        "image": "projects/x/global/images/y",
    },
)


class Waiting(VirtualClock):
    """Waits for nothing; its time of day is that of the clouds, whose time is real.

    Attributes:
        slept: Called after each wait.
    """

    slept: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept()

    def now(self) -> float:
        return SystemClock().now()


class Kept:
    """A deployment of two clouds, its keeper, and the keeper's time."""

    def __init__(self, path: Path, aws: Ec2Server, gcp: FakeGce) -> None:
        self.aws, self.gcp = aws, gcp
        self.clock = Waiting(SystemClock().now())
        self.told: list[str] = []
        self.plan = fleet_spec.load(path)
        with state.opened(
            self.plan, random_bytes=os.urandom, clock=self.clock
        ) as deployment:
            self.pools = deployment.pools
            self.keeper = Keeper(
                deployment,
                self.restore,
                hourly={},
                tell=self.told.append,
            )

    def restore(self, deployment: Deployment) -> None:
        """Start both sites, in the order of the file."""
        for site, given in zip(deployment.plan.file.sites, SPECS, strict=True):
            if f"site-{site.name}" in deployment.held_back:
                continue
            market = Market(site.machine.market)
            spec = NodeSpec(
                name=f"site-{site.name}",
                labels={},
                max_seconds=600,
                market=market,
                **{**given, "zones": site.machine.zones or given["zones"]},
            )
            if site.sizes:
                spec = replace(spec, machine=site.machine.type)
            read = f"{market.value} {spec.machine}".encode()
            request = NodeRequest(site.pool, spec, read)
            fill(deployment, request, self.told.append)

    def look(self) -> None:
        """As the command that watches does, when it is time to try again."""
        self.clock.sleep(301.0)
        self.keeper.look(self.nodes())

    def nodes(self):
        return [
            node
            for pool in self.pools.values()
            for node in pool.nodes({DEPLOYMENT: "fed"})
        ]

    def alive(self) -> list[str]:
        return sorted(
            node.labels[ROLE]
            for node in self.nodes()
            if node.state is not NodeState.GONE
        )

    def launches(self) -> int:
        """Machines that were ever made, by the services' own count."""
        return len([n for n in self.nodes() if n.id.startswith("i-")]) + len(
            self.gcp.instances
        )


@pytest.fixture
def kept(
    ec2_server: Ec2Server,
    gce_server: FakeGce,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Kept:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    path = tmp_path / "fed.toml"
    path.write_text(f"""
name = "fed"
job = "job.toml"

[[sites]]
name = "{SITES[0]}"
provider = "aws"
[sites.machine]
region = "{REGION}"
type = "m5.large"
endpoint = "{ec2_server.url}"

[[sites]]
name = "{SITES[1]}"
provider = "gcp"
[sites.machine]
region = "europe-west4"
project = "{fake_gce.PROJECT}"
zones = ["europe-west4-a", "europe-west4-b"]
type = "e2-standard-4"
endpoint = "{gce_server.url}"
""")
    return Kept(path, ec2_server, gce_server)


NONE_THERE = ("ZONE_RESOURCE_POOL_EXHAUSTED", "told by a test")
ROLES = sorted(f"site-{site}" for site in SITES)


def test_second_choice_of_a_zone_is_taken(kept: Kept):
    kept.gcp.refusal = lambda zone, _: NONE_THERE if zone == fake_gce.ZONES[0] else None
    kept.look()
    assert kept.alive() == ROLES
    zones = {node.zone for node in kept.nodes()}
    assert fake_gce.ZONES[1] in zones


def test_half_of_a_launch_is_completed_when_there_is_capacity_again(kept: Kept):
    """What was launched stays; what was refused is reported once and tried again."""
    kept.gcp.refusal = lambda *_: NONE_THERE
    kept.look()
    kept.look()
    assert kept.alive() == [f"site-{SITES[0]}"]
    refused = [line for line in kept.told if "not replaced" in line]
    assert len(refused) <= 2  # The roles that are missing have changed in between.
    assert "europe-west4-b" in refused[-1]
    kept.gcp.refusal = lambda *_: None
    kept.look()
    assert kept.alive() == ROLES
    assert kept.launches() == len(ROLES)


@pytest.mark.parametrize("operation", ["RunInstances", "DescribeInstances"])
def test_credentials_that_expire_in_a_launch_are_named(kept: Kept, operation: str):
    """After a login, the same command continues: none is unseen, none there twice."""
    real = kept.restore

    def expire(deployment: Deployment) -> None:
        kept.aws.refusal = lambda form: (
            "RequestExpired" if form["Action"] == operation else None
        )
        real(deployment)

    kept.keeper._restore = expire
    kept.look()
    (line,) = [line for line in kept.told if "not replaced" in line]
    assert "credentials" in line
    kept.aws.refusal = lambda _: None
    kept.keeper._restore = real
    kept.look()
    kept.look()
    assert kept.alive() == ROLES
    assert kept.launches() == len(ROLES)


def test_a_launch_whose_answer_is_lost_is_not_made_twice(kept: Kept):
    """Though the service does not list the machine for a while."""
    kept.aws.loses = lambda form: form["Action"] == "RunInstances"
    kept.aws.is_blind = True
    kept.look()
    assert any("not replaced" in line for line in kept.told)
    kept.aws.mend()
    kept.look()
    assert kept.alive() == ROLES
    assert kept.launches() == len(ROLES)


def spend(kept: Kept, dollars: float) -> None:
    """As machines that are gone have."""
    one = MachineCost(id="x", role="y", dollars_per_hour=dollars, seconds=3600.0)
    spending.write(kept.plan.folder, Spending(machines=(one,)))


def refill(kept: Kept, settings: bytes = b"1") -> Node:
    """Fill the role of the site on AWS within a budget, as a new command does."""
    spec = NodeSpec(
        name=ROLES[0], labels={}, max_seconds=1e5, user_data="whole", **SPECS[0]
    )
    pool = kept.plan.file.sites[0].pool
    request = NodeRequest(
        pool, spec, settings, lambda seconds: f"ends after {seconds:.0f} s"
    )
    with state.opened(
        kept.plan, random_bytes=os.urandom, clock=kept.clock
    ) as deployment:
        return fill(deployment, request, kept.told.append)


@pytest.fixture
def budgeted(kept: Kept) -> Kept:
    """With ten hours for both machines, whose first launch on AWS was not answered."""
    text = kept.plan.path.read_text().replace(
        'provider = "', 'dollars_per_hour = 1.0\nprovider = "'
    )
    kept.plan.path.write_text(f"max_dollars = 20.0\n{text}")
    kept.plan = fleet_spec.load(kept.plan.path)
    kept.aws.loses = lambda form: form["Action"] == "RunInstances"
    with pytest.raises(ComputeUnavailable):
        refill(kept)
    kept.aws.mend()
    return kept


def said(kept: Kept) -> list[str]:
    """What launches on AWS were to read, one by one."""
    return [base64.b64decode(form["UserData"]).decode() for form in kept.aws.launches()]


def test_a_repeated_launch_says_what_was_written_down_with_it(budgeted: Kept):
    """What is left of a budget is less by then, and EC2 refuses a changed request."""
    begin = budgeted.clock.monotonic()
    spend(budgeted, 0.1)
    budgeted.aws.is_blind = True
    node = refill(budgeted)
    assert {*said(budgeted)} == {"ends after 36000 s"}
    assert budgeted.clock.monotonic() == begin
    budgeted.aws.mend()
    assert [each.id for each in budgeted.nodes()] == [node.id]


def test_a_launch_that_is_repeated_much_later_has_the_time_that_is_left_then(
    budgeted: Kept,
):
    """Though EC2 refuses it: the first machine has ended, and is no longer listed."""
    spend(budgeted, 10.0)
    (first,) = budgeted.nodes()
    budgeted.pools[budgeted.plan.file.sites[0].pool].terminate({first.id})
    budgeted.aws.is_blind = True
    node = refill(budgeted)
    assert node.labels[NUMBER] == "2"
    assert said(budgeted)[-1] == "ends after 18000 s"
    budgeted.aws.mend()
    assert budgeted.alive() == ROLES[:1]


def test_a_machine_of_earlier_settings_that_is_listed_late_is_replaced(
    budgeted: Kept,
):
    """It is the one that the number has launched, but not the one that is wanted."""
    (first,) = budgeted.nodes()
    budgeted.aws.is_blind = True
    budgeted.clock.slept = lambda: setattr(budgeted.aws, "is_blind", False)
    node = refill(budgeted, b"2")
    states = {each.id: each.state for each in budgeted.nodes()}
    assert states == {first.id: NodeState.GONE, node.id: NodeState.RUNNING}
    assert node.labels[NUMBER] == "2"


PRICES = Prices(
    as_of="2026-11-01",
    machines=(
        MachinePrice(
            provider="aws", region=REGION, machine="m5.large", on_demand=0.1, spot=0.04
        ),
    ),
    egress=(),
)


def test_a_deadline_moves_a_site_from_a_spot_machine_to_one_on_demand(kept: Kept):
    """Once: the first machine is ended before the second is started."""
    text = kept.plan.path.read_text()
    home = 'market = "spot"\n[sites.home]\nurl = "file:///mnt/home"\n\n[[sites]]'
    at = text.index("[[sites]]", text.index("[sites.machine]"))
    text = f"{text[:at]}{home}{text[at + 9 :]}"
    kept.plan.path.write_text(
        text.replace("[[sites]]", "deadline_hours = 12\n[[sites]]", 1)
    )
    kept.plan = fleet_spec.load(kept.plan.path)
    kept.keeper._plan = kept.plan
    kept.look()
    kept.keeper._placement = Placement(
        kept.plan,
        lambda: WorkLeft(
            started=kept.clock.now() - 3.8 * 3600, rounds_left=8, round_seconds=3600.0
        ),
        kept.told.append,
    )
    kept.look()
    kept.look()
    mine = [node for node in kept.nodes() if node.labels[ROLE] == ROLES[0]]
    # The service tells times to the second: both may be as old.
    assert {(node.market, node.state) for node in mine} == {
        (Market.SPOT, NodeState.GONE),
        (Market.ON_DEMAND, NodeState.RUNNING),
    }
    assert len(mine) == 2
    (moved,) = [line for line in kept.told if "on demand from now on" in line]
    assert moved.startswith(f"{ROLES[0]}: ")


class Growing(Sizer):
    """Wants the larger machine, unless it was refused; the rule has its own tests."""

    def wanted(self, plan: DeploymentPlan, now: float) -> DeploymentPlan:
        del now
        if self._refused:
            return plan
        first, *others = plan.file.sites
        file = replace(plan.file, sites=(first.sized("m5.xlarge"), *others))
        return replace(plan, file=file)


@pytest.fixture
def growing(kept: Kept, tmp_path: Path) -> Kept:
    """Both sites run, and the keeper has asked the run to pause."""
    text = kept.plan.path.read_text()
    more = """sizes = [
    { type = "m5.large", speed = 1.0, dollars_per_hour = 0.1 },
    { type = "m5.xlarge", speed = 2.0, dollars_per_hour = 0.2 },
]
home = { url = "file:///mnt/home" }
"""
    text = text.replace('provider = "aws"\n', f'provider = "aws"\n{more}', 1)
    kept.plan.path.write_text(text)
    kept.plan = fleet_spec.load(kept.plan.path)
    kept.keeper._plan = kept.plan
    kept.look()
    run = RunFolder(tmp_path / "run")
    kept.keeper._sizer = Growing(kept.plan, PRICES, SeenRun(run), 10, kept.told.append)
    kept.keeper._ask_to_pause = lambda: kept.told.append("asked to pause")
    kept.look()
    kept.look()
    # The aggregator is no machine here, so each look replaces it, and asks again.
    assert kept.told.count("asked to pause") == 2
    assert kept.keeper._resized is not None
    return kept


def sizes(kept: Kept) -> list[tuple[str, NodeState]]:
    mine = [node for node in kept.nodes() if node.labels[ROLE] == ROLES[0]]
    return sorted((node.machine, node.state) for node in mine)


def test_a_larger_machine_takes_over_while_no_round_runs(growing: Kept):
    """Nothing is replaced before the run has paused, and nothing else after it."""
    assert sizes(growing) == [("m5.large", NodeState.RUNNING)]
    growing.keeper.resume()
    grown = [("m5.large", NodeState.GONE), ("m5.xlarge", NodeState.RUNNING)]
    assert sizes(growing) == grown
    assert growing.keeper._resized is None
    assert len(growing.gcp.inserted) == 1


def test_a_machine_stays_if_a_larger_one_cannot_be_had(growing: Kept):
    """It is never ended in between."""
    growing.aws.refusal = lambda form: (
        "InsufficientInstanceCapacity" if form["Action"] == "RunInstances" else None
    )
    growing.keeper.resume()
    assert sizes(growing) == [("m5.large", NodeState.RUNNING)]
    assert any("keeps m5.large: m5.xlarge is not available" in x for x in growing.told)


def test_a_change_that_was_killed_after_the_launch_is_completed(
    growing: Kept, monkeypatch: pytest.MonkeyPatch
):
    """Between the launch and the end of the old machine; then one of two is left."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    pool = growing.pools[growing.plan.file.sites[0].pool]
    new = growing.keeper._resized
    with monkeypatch.context() as patched:
        patched.setattr(type(pool), "terminate", killed)
        with pytest.raises(KeyboardInterrupt):
            growing.keeper.resume()
    both = [("m5.large", NodeState.RUNNING), ("m5.xlarge", NodeState.RUNNING)]
    assert sizes(growing) == both
    assert new is not None
    with state.opened(new, random_bytes=os.urandom, clock=growing.clock) as again:
        growing.restore(again)
    grown = [("m5.large", NodeState.GONE), ("m5.xlarge", NodeState.RUNNING)]
    assert sizes(growing) == grown


class Paused:
    """A run whose aggregator is as quick as the clock, and the command that keeps it.

    Attributes:
        meanwhile: Called once the run was asked to pause, before it has.
        starts: How often it was taken up again.
    """

    def __init__(self, kept: Kept, folder: Path) -> None:
        self.kept, self.starts = kept, 0
        self.meanwhile: Callable[[], object] = lambda: None
        config = folder / "fed" / "aggregator.toml"
        config.parent.mkdir()
        config.write_text('listen = "127.0.0.1:1"\nhosts = ["127.0.0.1"]\n')
        job = small_job()
        self.run = RunFolder(config.parent / "runs" / job.name / "one")
        run_queue.submit(job, self.run, at=0.0)
        self.options = Namespace(aggregator=config, clock=kept.clock, json=True)
        kept.clock.slept = self.work
        kept.keeper._restore = self.restore
        kept.keeper._ask_to_pause = lambda: run_queue.ask_to_pause(self.run)

    def work(self) -> None:
        """End the run after its round if it is to pause, or else at its end."""
        handed = run_queue.read(self.run)
        if handed is None or handed.outcome is not None:
            return
        if handed.stop:
            self.meanwhile()
        if handed.stop or self.starts:
            code = STOPPED if handed.stop else DONE
            outcome = run_queue.Outcome(code=code, message="told by a test")
            run_queue.leave_outcome(self.run, outcome)

    def restore(self, deployment: Deployment) -> None:
        self.kept.restore(deployment)
        if run_verbs.is_over(self.run):
            run_queue.take_up(self.run, at=1.0)
            self.starts += 1

    def watched(self) -> int:
        with state.opened(
            self.kept.plan, random_bytes=os.urandom, clock=self.kept.clock
        ) as deployment:
            watch = RunWatch(deployment, tell)
        watch.keeper = self.kept.keeper
        return up_verb._watched(self.options, self.run, watch)


@pytest.fixture
def paused(growing: Kept, tmp_path: Path) -> Paused:
    growing.keeper._resized = None
    return Paused(growing, tmp_path)


def test_a_run_is_taken_up_again_on_its_larger_machine(
    paused: Paused, capsys: pytest.CaptureFixture[str]
):
    """Its pause is no outcome: one is written, at the end."""
    assert paused.watched() == DONE
    assert paused.starts == 1
    grown = [("m5.large", NodeState.GONE), ("m5.xlarge", NodeState.RUNNING)]
    assert sizes(paused.kept) == grown
    assert json.loads(capsys.readouterr().out)["status"] == "completed"


def test_a_person_who_stops_a_run_that_is_to_pause_is_obeyed(paused: Paused):
    paused.meanwhile = lambda: run_queue.ask_to_stop(paused.run, at=0.0)
    assert paused.watched() == STOPPED
    assert paused.starts == 0
    assert sizes(paused.kept) == [("m5.large", NodeState.RUNNING)]


def test_a_pause_of_a_command_that_was_killed_is_ended_by_the_next(paused: Paused):
    """Though that one has decided on nothing."""
    paused.kept.keeper._sizer = None
    run_queue.ask_to_pause(paused.run)
    assert paused.watched() == DONE
    assert paused.starts == 1


def test_a_pause_outlasts_a_service_that_fails(paused: Paused):
    """Neither the larger machine nor the old ones can be asked for, for a while."""
    real, fails = paused.restore, iter(range(3))

    def restore(deployment: Deployment) -> None:
        if run_verbs.is_over(paused.run) and next(fails, None) is not None:
            raise ComputeUnavailable("no route to the service")
        real(deployment)

    paused.kept.keeper._restore = restore
    assert paused.watched() == DONE
    assert paused.starts == 1
    assert sizes(paused.kept) == [("m5.large", NodeState.RUNNING)]
    (line,) = [line for line in paused.kept.told if "not resumed" in line]
    assert line.endswith("tried again until it succeeds")


def test_a_machine_that_is_lost_in_a_pause_does_not_lose_the_change(paused: Paused):
    """Its replacement resumes the run, which is then asked to pause again."""
    keeper, kept = paused.kept.keeper, paused.kept
    kept.clock.slept = lambda: None
    keeper.look(kept.nodes())
    assert run_queue.is_pause(paused.run)
    pool = kept.pools[kept.plan.file.sites[0].pool]
    pool.terminate({n.id for n in kept.nodes() if n.labels[ROLE] == ROLES[0]})
    paused.work()
    kept.look()
    assert paused.starts == 1
    assert run_queue.is_pause(paused.run)


def test_machines_that_cannot_start_are_not_launched_without_end(kept: Kept):
    """Each launch succeeds, so nothing else would slow it down, or say why."""
    failed = "pip: no such wheel\ncrossfed: the site was not started: line 9 failed"
    kept.gcp.console = failed
    for _ in range(10):
        kept.look()  # Launches one,
        kept.look()  # and sees it.
        kept.gcp.instances.clear()  # It has ended itself, and is no longer listed.
    assert len(kept.gcp.inserted) == 3
    (first, *_, last) = [line for line in kept.told if "could not start" in line]
    assert "pip: no such wheel" in first
    assert "no more are launched" in last
    assert kept.alive() == [ROLES[0]]
