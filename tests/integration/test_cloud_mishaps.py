"""What may go wrong around a command that launches machines of clouds.

Two people bring up one federation at the same time, each from a folder of their own:
each command has looked before the other has launched anything, and found nobody. A
laptop is lost with its folder, or its clock is wrong.
"""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from integration.test_cloud_nodes import (
    SITES,
    Clouds,
    clouds as clouds,  # noqa: PLC0414 -- a fixture
)
from support.ec2_server import IMAGE
from support.enrolments import Federation
from support.fake_platforms import ACCOUNT, EMAIL, ROLE as ROLE_NAME
from support.fleets import bring_up

from cloud_adapters.compute.pool import NodeSpec, NodeState, all_gone, wait_for
from deploy.fleet import cloud_sites, down, reconcile, spec as fleet_spec, state
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, OWNER, ROLE, NodeRole
from deploy.fleet.state import Deployment
from federation.clock import SystemClock, VirtualClock
from federation.errors import ComputeError

pytestmark = pytest.mark.slow

RELEASE = f"""
[release]
wheel = "https://example.org/x.whl"
sha256 = "{"ab" * 32}"
"""
MACHINES = {
    'type = "m5.large"': f"""image = "{IMAGE}"
identity = "crossfed-profile"
role = "arn:aws:iam::{ACCOUNT}:role/{ROLE_NAME}"
""",
    'type = "e2-standard-4"': f'identity = "{EMAIL}"',
}
ROLES = [f"site-{site}" for site in SITES]


class Pausing(VirtualClock):
    """Has something happen while its owner waits for the first time."""

    def __init__(self) -> None:
        super().__init__(SystemClock().now())
        self.pause, self.wrong = cloud_sites.ENROL_SECONDS, 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def now(self) -> float:
        return super().now() + self.wrong

    def sleep(self, seconds: float) -> None:
        what, self.meanwhile = self.meanwhile, lambda: None
        what()
        super().sleep(max(seconds, self.pause))
        if not self.pause:  # Something real is awaited.
            SystemClock().sleep(seconds)


class Person:
    """One who has the deployment file, and has just given ``crossfed up``."""

    def __init__(self, folder: Path, text: str, owner: bytes, stack: ExitStack) -> None:
        folder.mkdir()
        path = folder / "fed.toml"
        path.write_text(text)
        self.clock, self.told = Pausing(), list[str]()
        self.config = Federation(folder=folder).config
        plan = fleet_spec.load(path)
        # EC2 tells times to the second, so that names may decide.
        self.deployment: Deployment = stack.enter_context(
            state.opened(plan, random_bytes=lambda n: owner * n, clock=self.clock)
        )

    def up(self) -> str:
        """Have the sites work; why that failed: no machine boots here."""
        with pytest.raises(ComputeError) as raised:
            bring_up(self.deployment, self.config, self.told.append)
        return str(raised.value)

    def start_aggregator(self) -> None:
        """As ``up`` does before all else, on a host that the other cannot see."""
        owner = self.deployment.owner
        role = NodeRole(name=AGGREGATOR, settings="0")
        spec = NodeSpec(
            name=AGGREGATOR,
            command=[sys.executable, "-c", "import signal; signal.pause()"],
            labels=reconcile.labels("fed", owner, role, 1),
            max_seconds=600,
        )
        self.clock.wrong, self.clock.pause = -60.0, 0.0
        self.deployment.pools[LOCAL].launch(spec, f"{owner}/{AGGREGATOR}/1")
        self.clock.wrong = 0.0

    def end(self) -> None:
        """End what it has on its host."""
        pool, labels = self.deployment.pools[LOCAL], {DEPLOYMENT: "fed"}
        pool.terminate([node.id for node in pool.nodes(labels)])
        clock = SystemClock()
        wait_for(pool, labels, all_gone, what="it ended", seconds=60, clock=clock)

    def alive(self) -> list[str]:
        """Roles of the machines that anybody has, if all are this person's."""
        found = [
            node
            for name, pool in self.deployment.pools.items()
            for node in pool.nodes({DEPLOYMENT: "fed"})
            if name != LOCAL and node.state is not NodeState.GONE
        ]
        assert {node.labels[OWNER] for node in found} <= {self.deployment.owner}
        return sorted(node.labels[ROLE] for node in found)


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


@pytest.fixture
def people(clouds: Clouds, tmp_path: Path, stack: ExitStack) -> list[Person]:
    clouds.aws.make_profile("crossfed-profile")
    text = clouds.path.read_text()
    for machine, more in MACHINES.items():
        assert machine in text
        text = text.replace(machine, f"{machine}\n{more}")
    text += RELEASE
    return [
        Person(tmp_path / name, text, owner, stack)
        for name, owner in (("first", b"a"), ("second", b"b"))
    ]


def test_who_launches_second_ends_its_own_machines_alone(
    people: list[Person], clouds: Clouds
):
    """It names the machine that was there first; that one never notices."""
    first, second = people
    seen: list[str] = []
    first.clock.meanwhile = lambda: seen.append(second.up())
    # Nothing boots here: that it waits to the end shows that it goes on.
    assert "not ready in time" in first.up()
    (refusal,) = seen
    assert "which was first: site-" in refusal
    assert any("is ended" in line for line in second.told)
    assert any("ended i-" in line for line in second.told)
    assert first.alive() == ROLES
    # The second had launched one machine before it looked again.
    assert (len(clouds.aws.launches()), len(clouds.gcp.inserted)) == (2, 1)


def test_an_aggregator_makes_nobody_first(
    people: list[Person], clouds: Clouds, stack: ExitStack
):
    """Each has the oldest node by its own account; only one may go on."""
    first, second = people
    for person in people:
        stack.callback(person.end)
        person.start_aggregator()
        clouds.launch(person.deployment.owner)
    with pytest.raises(ComputeError, match="which was first: site-"):
        down.give_way(second.deployment, second.told.append)
    assert any("ended aggregator-" in line for line in second.told)
    down.give_way(first.deployment, first.told.append)
    assert (first.told, first.alive()) == ([], ROLES)


def test_nobody_ends_the_machines_of_the_other(people: list[Person], clouds: Clouds):
    """Though they fill the same roles, with other settings."""
    first, second = people
    clouds.launch(first.deployment.owner)
    assert "which was first" in second.up()
    assert "its settings have changed" not in "".join(second.told)
    assert first.alive() == ROLES


def test_a_machine_that_has_ended_is_named_as_such(
    people: list[Person], clouds: Clouds
):
    """And not one that its service lists late, as EC2 does."""
    first, _ = people
    first.clock.pause = 1.0
    clouds.aws.is_blind = True

    def appear() -> None:
        clouds.aws.mend()
        first.clock.meanwhile = end

    def end() -> None:
        pool = clouds.aws.pool()
        pool.terminate([node.id for node in pool.nodes({})])

    first.clock.meanwhile = appear
    begin = first.clock.monotonic()
    assert f"{ROLES[0]}: its machine has ended" in first.up()
    assert first.clock.monotonic() - begin < 10
    assert first.alive() == ROLES[1:]


def test_who_was_first_is_seen_late(people: list[Person], clouds: Clouds):
    """The service lists no machine for a while: each goes on until it does."""
    first, second = people
    clouds.launch(first.deployment.owner)
    clouds.aws.is_blind = True
    second.clock.pause = 1.0
    hidden = clouds.gcp.instances.copy()
    clouds.gcp.instances.clear()

    def appear() -> None:
        clouds.aws.mend()
        clouds.gcp.instances.update(hidden)

    second.clock.meanwhile = appear
    assert "which was first" in second.up()
    assert first.alive() == ROLES


@pytest.mark.parametrize(
    ("hours", "words"), [(3, "180 minutes ahead of"), (-3, "180 minutes behind")]
)
def test_a_wrong_clock_is_named_and_costs_nothing(
    people: list[Person], clouds: Clouds, hours: int, words: str
):
    """The machine would refuse the aggregator's certificate, and wait in vain.

    Nor would hours and dollars be right. When the clock is, the same command goes on.
    """
    first, _ = people
    first.clock.wrong = 3600.0 * hours
    refusal = first.up()
    assert f"this host's clock is {words} that of aws us-east-1" in refusal
    assert first.alive() == []
    assert clouds.gcp.inserted == []
    first.clock.wrong = 0.0
    assert "not ready in time" in first.up()
    assert first.alive() == ROLES
    assert len(clouds.aws.launches()) == 2


def test_machines_of_a_lost_laptop_are_found_and_ended(
    people: list[Person], clouds: Clouds, tmp_path: Path, stack: ExitStack
):
    """From any other folder that has the file: their labels are all that is needed."""
    first, _ = people

    def lose() -> None:
        raise KeyboardInterrupt

    first.clock.meanwhile = lose
    with pytest.raises(KeyboardInterrupt):
        first.up()
    assert first.alive() == ROLES
    plan = first.deployment.plan
    stack.close()
    shutil.rmtree(plan.folder)

    def other(**options: bool) -> AbstractContextManager[Deployment]:
        moved = replace(plan, folder=tmp_path / "other")
        return state.opened(
            moved, random_bytes=os.urandom, clock=SystemClock(), **options
        )

    with pytest.raises(ComputeError, match="was brought up from") as refused:
        other().__enter__()
    assert "--any-owner" in str(refused.value)
    with other(any_owner=True, make=False) as found:
        ended = down.take_down(found, any_owner=True, tell=first.told.append)
    assert ended == len(ROLES)
    assert first.alive() == []
    with other():  # Now the name is free.
        pass
