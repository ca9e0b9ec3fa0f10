"""Who keeps a deployment ends what bills, and never works against another command."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_adapters.compute.pool import (
    Node,
    NodeSpec,
    NodeState,
    all_gone,
    wait_for,
)
from deploy.aggregator_host.alert_delivery import AlertDelivery
from deploy.fleet import (
    down,
    loop,
    prices,
    spec as fleet_spec,
    spending,
    state as fleet_state,
)
from deploy.fleet.loop import NodeRequest
from deploy.fleet.preflight import check_budget, check_start_budget
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, NodeRole, labels
from deploy.fleet.spending import MachineCost, Spending, observed
from deploy.fleet.state import Deployment, PoolPlace
from deploy.fleet.supervisor import Keeper, Restore, TakenDown
from federation import folder_lock
from federation.clock import SystemClock, VirtualClock
from federation.errors import (
    ComputeError,
    ComputeUnavailable,
    JobError,
    NoCapacity,
    StoreUnavailable,
)

JOBS = Path(__file__).parents[3] / "jobs"
FILE = """
name = "kept"
job = "{job}"
{more}
[[sites]]
name = "aws-us-east-1"
"""


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def plan(tmp_path: Path) -> fleet_spec.DeploymentPlan:
    return written(tmp_path, "max_dollars = 5.0")


def written(folder: Path, more: str = "") -> fleet_spec.DeploymentPlan:
    path = folder / "kept.toml"
    path.write_text(FILE.format(job=JOBS / "quickstart.toml", more=more))
    return fleet_spec.load(path)


def opened(plan: fleet_spec.DeploymentPlan) -> AbstractContextManager[Deployment]:
    return fleet_state.opened(plan, random_bytes=os.urandom, clock=SystemClock())


def launched(deployment: Deployment) -> Node:
    """A node that does nothing, in the role of the aggregator."""
    role = NodeRole(name=AGGREGATOR, settings="0")
    spec = NodeSpec(
        name=AGGREGATOR,
        command=["sleep", "60"],
        labels=labels("kept", deployment.owner, role, 1),
        max_seconds=60.0,
    )
    return deployment.pools["local"].launch(spec, "token")


def refuse(_: Deployment) -> None:
    raise NoCapacity("us-east-1a has no g5.xlarge now")


def keeper(
    deployment: Deployment,
    told: list[str],
    hourly: float = 0.0,
    restore: Restore = refuse,
) -> Keeper:
    return Keeper(
        deployment,
        restore,
        hourly={AGGREGATOR: hourly},
        tell=told.append,
    )


def states(deployment: Deployment) -> set[NodeState]:
    found = deployment.pools["local"].nodes({DEPLOYMENT: "kept"})
    return {node.state for node in found}


@pytest.mark.slow  # It starts a node.
def test_budget_that_is_spent_ends_all_machines(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """And none is started again until it is raised."""
    with opened(plan) as deployment:
        node = launched(deployment)
    kept = keeper(deployment, told, hourly=1e9)
    with pytest.raises(ComputeError, match=r"were ended: the budget is spent: \$"):
        kept.look([node])
    assert states(deployment) == {NodeState.GONE}
    assert any("ended aggregator-" in line for line in told)
    assert spending.read(plan.folder).dollars >= 5.0
    with opened(plan) as deployment, pytest.raises(JobError, match="so far, and may"):
        check_budget(deployment)


def test_costs_are_written_down_while_machines_run(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """When a machine is new, each minute, and before all of them are ended."""
    clock, path = VirtualClock(1e9), plan.folder / "spending.json"
    with fleet_state.opened(plan, random_bytes=os.urandom, clock=clock) as deployment:
        kept = keeper(deployment, told, hourly=1.0)
    nodes = [node(launched=clock.now())]

    def written_after(seconds: float) -> bool:
        path.unlink(missing_ok=True)
        clock.sleep(seconds)
        kept.look(nodes)
        return path.exists()

    assert [written_after(seconds) for seconds in (0, 10, 10)] == [True, False, False]
    nodes.append(node(id="b", launched=clock.now()))
    assert [written_after(seconds) for seconds in (0, 10, 50)] == [True, False, True]
    clock.sleep(3 * 3600.0)  # The budget is spent.
    with folder_lock.hold(plan.folder / "lock", "taken"):
        kept.look(nodes)  # The other command ends them, or not.
    path.unlink()
    with pytest.raises(ComputeError, match="the budget is spent"):
        kept.look(nodes)
    assert spending.read(plan.folder).dollars >= 5.0
    assert deployment.is_ended  # For those who keep it elsewhere.


@pytest.mark.parametrize(
    ("more", "key", "seconds"),
    [
        ("max_dollars = 5.0\nmax_hours = 100.0", "max_dollars = 5", 5 * 3600.0),
        ("max_hours = 2.0", "max_hours = 2", 2 * 3600.0),
    ],
)
def test_people_are_told_once_of_most_and_all_of_a_cap(
    tmp_path: Path, told: list[str], more: str, key: str, seconds: float
):
    """Also by a command that was started again, and before the machines end."""
    clock, texts = VirtualClock(1e9), list[str]()
    plan = written(tmp_path, more)
    with fleet_state.opened(plan, random_bytes=os.urandom, clock=clock) as deployment:
        pass
    nodes = [node(launched=clock.now())]

    def look() -> None:
        delivery = AlertDelivery(
            places={"phone": texts.append},
            path=tmp_path / "alerts.json",
            clock=clock,
            listener=told.append,
        )
        kept = keeper(deployment, told, hourly=1.0)
        kept._alerts = delivery
        kept.look(nodes)
        kept.look(nodes)

    for share, expected in ((0.79, 0), (0.02, 1), (0.1, 1)):
        clock.sleep(share * seconds)
        look()
        assert len(texts) == expected
    clock.sleep(0.1 * seconds)
    with pytest.raises(ComputeError, match="were ended"):
        look()
    assert [key in text for text in texts] == [True, True]
    assert "(81%)" in texts[0]
    assert "All machines end" in texts[1]


@pytest.mark.timeout(30)
def test_a_run_that_is_taken_down_while_it_pauses_is_not_resumed(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """No machine is launched again, and nobody tries it for ever."""

    def restore(_: Deployment) -> None:
        raise AssertionError("launched again")

    clock = VirtualClock(1e9)
    with fleet_state.opened(plan, random_bytes=os.urandom, clock=clock) as deployment:
        deployment.note_ended()
        kept = keeper(deployment, told, restore=restore)
    with pytest.raises(TakenDown, match="has ended kept"):
        kept.resume()


@pytest.mark.slow  # It starts a node.
def test_hours_that_are_over_end_all_machines(tmp_path: Path, told: list[str]):
    """A replacement would otherwise run for as long again."""
    plan = written(tmp_path, "max_hours = 1e-9")
    with opened(plan) as deployment:
        node = launched(deployment)
    with pytest.raises(ComputeError, match="were ended: max_hours = 1e-09 are over"):
        keeper(deployment, told).look([node])
    assert states(deployment) == {NodeState.GONE}


def test_a_deployment_that_was_taken_down_is_not_brought_up_again(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    with opened(plan) as deployment:
        deployment.note_ended()
    with pytest.raises(TakenDown, match="down has ended kept"):
        keeper(deployment, told).look([])
    assert states(deployment) == set()


@pytest.mark.slow  # It starts a node.
def test_nothing_is_done_while_another_command_works(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """Neither against `up` nor against `down`, which may be half done."""
    with opened(plan) as deployment:
        node = launched(deployment)
        keeper(deployment, told, hourly=1e9).look([node])
        keeper(deployment, told).look([])
        assert states(deployment) == {NodeState.RUNNING}
        deployment.pools["local"].terminate({node.id})
    assert not told


def test_a_service_that_refuses_is_reported_once_and_tried_again(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    with opened(plan) as deployment:
        kept = keeper(deployment, told)
    kept.look([])
    kept.look([])
    refused = [line for line in told if "not replaced" in line]
    (line,) = refused
    assert line.startswith("aggregator, site-aws-us-east-1: not replaced: us-east-1a")
    assert line.endswith("tried again until it succeeds")
    assert not folder_lock.is_held(plan.folder / "lock")
    kept._next_try = 0.0
    kept.look([])
    assert [line for line in told if "to be replaced" in line] == told[:1]


def test_a_node_that_is_gone_is_replaced_once(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """At the next look both roles are filled, and nothing is done."""
    calls: list[Deployment] = []
    with opened(plan) as deployment:
        kept = keeper(deployment, told, restore=calls.append)
    gone = node(state=NodeState.GONE)
    now = SystemClock().now()
    role = {"crossfed-role": "site-aws-us-east-1"}
    site = node(id="s", labels=role, launched=now)
    kept.look([gone, site])
    kept.look([node(id="b", launched=now), site])
    assert len(calls) == 1
    assert told == ["aggregator: gone; to be replaced"]


def node(**changes: object) -> Node:
    values = {
        "id": "a",
        "name": "aggregator",
        "state": NodeState.RUNNING,
        "labels": {"crossfed-role": AGGREGATOR},
        "launched": 0.0,
    }
    return Node(**(values | changes))


def test_machines_that_are_no_longer_listed_keep_what_they_have_cost():
    """Compute Engine lists none that is gone."""
    hourly = {AGGREGATOR: 2.0}
    first = observed(Spending(), [node()], hourly, 3600.0)
    assert first.dollars == 2.0
    then = observed(first, [node(id="b", launched=3600.0)], hourly, 5400.0)
    assert then.dollars == 3.0
    assert [each.id for each in then.machines] == ["a", "b"]


def test_a_machine_that_was_seen_without_a_budget_has_its_price_with_one():
    """From its launch on: the budget is for all that a deployment costs."""
    free = observed(Spending(), [node()], {}, 3600.0)
    assert free.dollars == 0.0
    hourly = {AGGREGATOR: 2.0}
    then = observed(free, [node()], hourly, 7200.0)
    assert then.dollars == 4.0
    dearer = observed(then, [node()], {AGGREGATOR: 3.0}, 7200.0)
    assert dearer.dollars == 4.0  # It keeps the price that it had.


def test_a_machine_whose_end_is_unknown_costs_what_it_had_when_last_seen():
    seen = MachineCost(id="a", role=AGGREGATOR, dollars_per_hour=1.0, seconds=3600.0)
    gone = node(state=NodeState.GONE)
    later = observed(Spending(machines=(seen,)), [gone], {}, 36000.0)
    assert later.dollars == 1.0
    known = observed(later, [node(state=NodeState.GONE, ended=7200.0)], {}, 36000.0)
    assert known.dollars == 2.0


def test_costs_are_written_down_before_another_machine_is_launched(tmp_path: Path):
    """A service may list machines no longer when the budget is looked at next."""
    more = "max_dollars = 10.0\n[aggregator]\ndollars_per_hour = 1.0"
    plan = written(tmp_path, more)
    plan.folder.mkdir(parents=True)
    left = spending.seconds_left(plan, [node()], now=7200.0)
    assert left == 8 * 3600.0
    assert spending.read(plan.folder).dollars == 2.0
    assert spending.seconds_left(plan, [], now=36000.0) == left


def test_a_budget_needs_prices_that_are_new(tmp_path: Path):
    """Unless all are stated."""
    more = 'max_dollars = 5.0\n[[sites]]\nname = "gcp-us-central1"\nprovider = "aws"\n'
    machine = '[sites.machine]\nregion = "us-east-1"\ntype = "g5.xlarge"\n'
    plan = written(tmp_path, more + machine)
    with pytest.raises(JobError, match="needs new prices, but"):
        spending.budget_prices(plan, now=4e9)
    new = spending.budget_prices(plan, now=1.782e9)
    # With its disk of 50 GB.
    assert new["site-gcp-us-central1"] == pytest.approx(1.006 + 50 * 0.08 / 730)
    stated = more + "dollars_per_hour = 3.0\n" + machine
    found = spending.budget_prices(written(tmp_path, stated), now=4e9)
    assert found["site-gcp-us-central1"] == 3.0


class OnDemand:
    """Moves every site, as a deadline does.

    Attributes:
        waits: Whether that may wait for the end of the round.
    """

    def __init__(self) -> None:
        self.waits = False

    def placed(
        self, plan: fleet_spec.DeploymentPlan, *_: object
    ) -> fleet_spec.DeploymentPlan:
        sites = tuple(
            replace(site, machine=replace(site.machine, market="on-demand"))
            for site in plan.file.sites
        )
        return replace(plan, file=replace(plan.file, sites=sites))

    def may_wait(self, *_: object) -> bool:
        return self.waits


class Silent:
    """A compute service whose machines have written nothing."""

    def log(self, _: str) -> str:
        return ""


@pytest.mark.slow
def test_a_machine_that_was_moved_is_counted_at_its_own_price(
    tmp_path: Path, told: list[str]
):
    """Otherwise a budget would last three times as long as its dollars."""
    cloud = (
        'max_dollars = 900.0\n[[sites]]\nname = "gcp-us-central1"\nprovider = "aws"\n'
    )
    machine = '[sites.machine]\nregion = "us-east-1"\ntype = "p5.48xlarge"\n'
    plan = written(tmp_path, f'{cloud}{machine}market = "spot"\n')
    role, clock = "site-gcp-us-central1", VirtualClock(1.782e9)
    now = clock.now()
    with opened(written(tmp_path)):
        pass  # Makes the folder: without one, the cloud is asked for nodes.
    kept = Keeper(
        Deployment(plan=plan, pools={"aws us-east-1": Silent()}, clock=clock, owner=""),
        lambda _: None,
        hourly=spending.budget_prices(plan, now=now),
        tell=told.append,
        placement=OnDemand(),
    )
    spot = node(id="a", labels={"crossfed-role": role}, launched=now - 3600)
    kept.look([spot])
    moved = node(id="b", labels={"crossfed-role": role}, launched=now - 3600)
    kept.look([moved])
    costs = {each.id: each.dollars_per_hour for each in kept._spending.machines}
    assert costs["b"] > 2 * costs["a"] > 0


def test_a_node_ends_by_itself_when_the_budget_is_spent(tmp_path: Path):
    """Though nobody watches: all nodes together would have spent it then."""
    more = "max_dollars = 6.0\n[aggregator]\ndollars_per_hour = 2.0\n"
    plan = written(tmp_path, f"{more}[[sites]]\nname = 'b'\ndollars_per_hour = 4.0\n")
    spec = NodeSpec(
        name=AGGREGATOR, command=["sleep", "60"], labels={}, max_seconds=1e5
    )
    request = NodeRequest("local", spec, b"", lambda seconds: f"ends {seconds:.0f}")
    with opened(plan) as deployment:
        whole = loop._within_budget(deployment, request)
        assert whole.max_seconds == pytest.approx(3600.0)
        assert whole.user_data == "ends 3600"
        # What has been spent before shortens the next one.
        spent = MachineCost(id="x", role="b", dollars_per_hour=4.0, seconds=2700.0)
        spending.write(plan.folder, Spending(machines=(spent,)))
        assert loop._within_budget(deployment, request).max_seconds == pytest.approx(
            1800.0
        )
        used = replace(spent, seconds=5380.0)
        spending.write(plan.folder, Spending(machines=(used,)))
        with pytest.raises(ComputeError, match=r"spent the rest in 13 s\. Raise it"):
            loop._within_budget(deployment, request)


def test_what_is_left_of_a_budget_lasts_at_the_price_of_the_machine_that_runs(
    tmp_path: Path,
):
    """A machine that costs more than the file says ends all the earlier."""
    plan = written(tmp_path, "max_dollars = 10.0\n[aggregator]\ndollars_per_hour = 1.0")
    cost = MachineCost(id="i", role=AGGREGATOR, dollars_per_hour=4.0, seconds=3600.0)
    plan.folder.mkdir(parents=True, exist_ok=True)
    for state, hours in ((NodeState.RUNNING, 1.5), (NodeState.GONE, 6.0)):
        spending.write(plan.folder, Spending(machines=(cost,)))
        seen = [node(id="i", state=state, launched=3600.0, ended=7200.0)]
        left = spending.seconds_left(plan, seen, now=7200.0)
        assert left == pytest.approx(hours * 3600.0), state


def test_a_budget_replaces_no_node_that_runs(tmp_path: Path):
    """What is left shrinks with every minute, and is no change of settings."""
    plan = written(tmp_path, "max_dollars = 6.0\n[aggregator]\ndollars_per_hour = 2.0")
    spec = NodeSpec(
        name=AGGREGATOR, command=["sleep", "60"], labels={}, max_seconds=1e5
    )
    request = NodeRequest("local", spec, b"")
    told: list[str] = []
    with opened(plan) as deployment:
        node = loop.fill(deployment, request, told.append)
        spent = MachineCost(id="x", role="b", dollars_per_hour=4.0, seconds=2700.0)
        spending.write(plan.folder, Spending(machines=(spent,)))
        assert loop.fill(deployment, request, told.append).id == node.id
        deployment.pools["local"].terminate({node.id})
    ids = [each.id for each in spending.read(plan.folder).machines]
    assert ids == ["x"]


@pytest.mark.slow
def test_a_node_that_is_replaced_later_ends_and_its_launch_is_noted(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """Two would cost; and another command gives the next launch another number."""
    spec = NodeSpec(name=AGGREGATOR, command=["sleep", "60"], labels={}, max_seconds=60)
    with opened(plan) as deployment:
        pool = deployment.pools["local"]
        loop.fill(deployment, NodeRequest("local", spec, b"1"), told.append)
        deployment.launch_first = frozenset({AGGREGATOR})
        node = loop.fill(deployment, NodeRequest("local", spec, b"2"), told.append)
        alive = [n.id for n in pool.nodes({}) if n.state is not NodeState.GONE]
        assert alive == [node.id]
        pool.terminate({node.id})
    with opened(plan) as deployment:
        assert deployment.launched(AGGREGATOR) == 2


@pytest.mark.slow
def test_a_node_that_a_killed_launch_has_made_is_started(
    plan: fleet_spec.DeploymentPlan, told: list[str]
):
    """Nobody else would: it is listed as one that starts."""
    spec = NodeSpec(name=AGGREGATOR, command=["sleep", "60"], labels={}, max_seconds=60)
    request = NodeRequest("local", spec, b"")
    with opened(plan) as deployment:
        pool = deployment.pools["local"]
        node = loop.fill(deployment, request, told.append)
        pool.terminate({node.id})
        wait_for(pool, {}, all_gone, what="it ends", seconds=30, clock=deployment.clock)
        # What there is between making its folder and starting its process.
        for path in (plan.folder / "nodes" / node.id).iterdir():
            if path.name != "node.json":
                path.unlink()
        again = loop.fill(deployment, request, told.append)
        assert (again.id, again.state) == (node.id, NodeState.RUNNING)
        pool.terminate({node.id})


def test_prices_of_a_deployment_are_in_a_table_of_its_own(tmp_path: Path):
    """That of the release becomes too old for a budget."""
    more = (
        'max_dollars = 5.0\nprices = "mine.toml"\n[[sites]]\n'
        'name = "gcp-us-central1"\nprovider = "aws"\n'
        '[sites.machine]\nregion = "us-east-1"\ntype = "g5.xlarge"\n'
    )
    text = prices.PACKAGED.read_text().replace('as_of = "2026-06-17"', "as_of = 'D'")
    (tmp_path / "mine.toml").write_text(text.replace("'D'", '"2096-06-08"'))
    plan = written(tmp_path, more)
    found = spending.budget_prices(plan, now=3.99e9)
    # With the machine's disk of 50 GB.
    assert found["site-gcp-us-central1"] == pytest.approx(1.006 + 50 * 0.08 / 730)


class Listing:
    """A compute service that lists a node, and fails after so many answers."""

    def __init__(self, found: Node, answers: int) -> None:
        self.found, self.answers = found, answers

    def nodes(self, asked: Mapping[str, str]) -> list[Node]:
        self.answers -= 1
        if self.answers < 0:
            raise ComputeUnavailable("no route to the service")
        owner = self.found.labels.get("crossfed-owner")
        return [self.found] if asked.get("crossfed-owner", owner) == owner else []

    def clean_up(self) -> None:
        pass


@pytest.mark.parametrize(
    ("more", "answers", "why"),
    [
        ("max_dollars = 5.0", 1_000, r"the budget is spent: \$5\."),
        ("max_dollars = 5.0", 1, r"the budget is spent: \$5\."),
        ("max_hours = 0.1", 1_000, r"max_hours = 0\.1 are over"),
    ],
)
def test_limits_are_kept_while_a_run_cannot_be_resumed(
    tmp_path: Path, told: list[str], more: str, answers: int, why: str
):
    """What was seen last counts if the service does not answer; one refusal is told."""
    plan, clock = written(tmp_path, more), VirtualClock(1.7e9)
    pool = Listing(node(launched=clock.now()), answers)

    def restore(deployment: Deployment) -> None:
        assert clock.now() < 1.7e9 + 3600.0, "it is tried without end"
        refuse(deployment)

    kept = Keeper(
        Deployment(plan=plan, pools={"cloud": pool}, clock=clock, owner=""),
        restore,
        hourly={AGGREGATOR: 60.0},
        tell=told.append,
    )
    with pytest.raises(ComputeError, match=f"were ended: {why}"):
        kept.resume()
    # It looks more often than it tries, which is after minutes by then.
    assert clock.now() - 1.7e9 <= (370.0 if "hours" in why else 310.0)
    (line,) = told
    assert "kept: not resumed: us-east-1a has no g5.xlarge" in line


class Moving:
    """A keeper of a site that is to move, and what it brings up."""

    def __init__(self, plan: fleet_spec.DeploymentPlan, told: list[str]) -> None:
        self.placement, self.told = OnDemand(), told
        self.placement.waits = True
        self.markets: list[str] = []
        self.first: list[frozenset[str]] = []
        self.refusals = 0
        with opened(plan) as deployment:
            self.keeper = Keeper(
                deployment,
                self.restore,
                hourly={},
                tell=told.append,
                placement=self.placement,
                pause=lambda: told.append("asked to pause"),
            )

    def restore(self, deployment: Deployment) -> None:
        if self.refusals:
            self.refusals -= 1
            raise NoCapacity("us-east-1a has no g5.xlarge now")
        (site,) = deployment.plan.file.sites
        self.markets.append(site.machine.market)
        self.first.append(deployment.launch_first)

    def look(self) -> None:
        now = SystemClock().now()
        roles = (AGGREGATOR, "site-aws-us-east-1")
        self.keeper.look(
            [node(id=r, labels={"crossfed-role": r}, launched=now) for r in roles]
        )


@pytest.fixture
def moving(plan: fleet_spec.DeploymentPlan, told: list[str]) -> Moving:
    spot = replace(plan.file.sites[0].machine, market="spot")
    sites = (replace(plan.file.sites[0], machine=spot),)
    return Moving(replace(plan, file=replace(plan.file, sites=sites)), told)


def test_a_move_that_may_wait_is_made_while_the_run_pauses(moving: Moving):
    """The run is asked once; the new machine is launched before the old one ends."""
    for _ in range(3):
        moving.look()
    assert moving.told.count("asked to pause") == 1
    assert moving.markets == []
    moving.keeper.resume()
    assert moving.markets == ["on-demand"]
    assert moving.first == [{"site-aws-us-east-1"}]
    moving.look()
    assert moving.told.count("asked to pause") == 1


def test_a_move_that_may_wait_no_longer_is_made_in_the_round(moving: Moving):
    """The run may still pause, and is resumed then."""
    moving.look()
    moving.placement.waits = False
    moving.look()
    assert moving.markets == ["on-demand"]
    moving.keeper.resume()
    assert moving.markets == ["on-demand", "on-demand"]


def test_a_move_that_is_refused_is_decided_again(moving: Moving):
    """And the run goes on with the machine that it has."""
    moving.look()
    moving.refusals = 1
    moving.keeper.resume()
    assert moving.markets == ["spot"]
    assert "kept: the machines stay for now: us-east-1a has no" in moving.told[-1]


def test_what_a_failed_command_leaves_running_is_named(tmp_path: Path):
    """Also if one service does not answer; machines of another folder are not ours."""
    plan = written(tmp_path)
    mine = {"crossfed-owner": "me"}
    pools = {
        "aws": Listing(node(id="i-1", labels=mine), 1_000),
        "aws us-east-2": Listing(node(id="i-2", labels={"crossfed-owner": "x"}), 9),
        "gcp": Listing(node(), 0),
    }
    deployment = Deployment(
        plan=plan, pools=pools, clock=VirtualClock(1.7e9), owner="me"
    )
    found = down.still_running(deployment)
    assert found.startswith(
        "still running: aggregator (i-1); not known, because the service fails: gcp. "
    )
    assert "crossfed down" in found
    told: list[str] = []
    with (
        pytest.raises(NoCapacity),
        down.naming_what_runs(deployment, told.append),
    ):
        raise NoCapacity("us-east-1b has none")
    assert told == [found]
    gone = node(state=NodeState.GONE, labels=mine)
    deployment.pools = {"aws": Listing(gone, 9)}
    assert not down.still_running(deployment)


def test_a_budget_that_ends_before_machines_work_is_refused(tmp_path: Path):
    """With the least that would do; one whose machines run is spent to its end."""
    more = (
        'max_dollars = {}\n[[sites]]\nname = "gcp-us-central1"\nprovider = "aws"\n'
        "dollars_per_hour = 4.0\n"
        '[sites.machine]\nregion = "us-east-1"\ntype = "g5.xlarge"\n'
    )

    def check(dollars: float, state: NodeState) -> None:
        deployment = Deployment(
            plan=written(tmp_path, more.format(dollars)),
            pools={"aws us-east-1": Listing(node(state=state), 9)},
            clock=VirtualClock(1.782e9),
            owner="",
        )
        check_budget(deployment)

    with pytest.raises(JobError, match=r"\$4\.00 an hour .* at least 1\.00") as caught:
        check(0.99, NodeState.GONE)
    assert caught.value.key == "max_dollars"
    check(0.99, NodeState.RUNNING)
    check(1.0, NodeState.GONE)


def test_a_budget_that_starts_no_machine_of_this_host_is_refused(tmp_path: Path):
    """With the least that would do, and before there is a folder."""
    more = "max_dollars = {}\n[aggregator]\ndollars_per_hour = 6.0"
    plan = written(tmp_path, more.format(0.19))
    with pytest.raises(JobError, match=r"take 2 minutes to start.* at least 0\.20"):
        check_start_budget(plan, now=1.782e9)
    with opened(plan) as deployment, pytest.raises(JobError, match="2 minutes"):
        check_budget(deployment)
    check_start_budget(written(tmp_path, more.format(0.2)), now=1.782e9)


class Full(Listing):
    """A compute service of a host whose disk is full."""

    def nodes(self, _: object) -> list[Node]:
        raise StoreUnavailable("cannot write stop: No space left on device")


def test_a_full_disk_keeps_no_machine_of_a_cloud(tmp_path: Path, told: list[str]):
    """Nor does one on which nothing can be noted hide that all have ended."""
    plan, gone = written(tmp_path), node(state=NodeState.GONE)
    asked = Listing(gone, 9)
    deployment = Deployment(
        plan=plan,
        pools={"aws": asked, "local": Full(gone, 0)},
        clock=VirtualClock(1.7e9),
        owner="me",
    )
    with pytest.raises(StoreUnavailable, match="No space left"):
        down.take_down(deployment, any_owner=False, tell=told.append)
    assert asked.answers < 9


def test_what_has_not_changed_is_not_noted_again(tmp_path: Path, told: list[str]):
    """A full disk is no reason for an error after everything has ended."""
    with opened(written(tmp_path)) as deployment:
        record = deployment.plan.folder / "deployment.json"
        before = record.stat().st_ino
        assert down.take_down(deployment, any_owner=False, tell=told.append) == 0
        assert record.stat().st_ino == before
        place = PoolPlace(pool="x", provider="aws", region="", project="", endpoint="")
        deployment._write({"x": place})
        record.with_name(f".{record.name}.tmp").mkdir()  # Nothing can be written.
        with pytest.raises(StoreUnavailable, match="could not be noted"):
            down.take_down(deployment, any_owner=False, tell=told.append)
