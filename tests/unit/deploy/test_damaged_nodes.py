"""A node of this host whose files are damaged: it is named, and hides no other."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cloud_adapters.compute.local_files import (
    LOCK,
    STOP,
    LocalNode,
    NodeEnded,
    NodeStarted,
    write,
)
from deploy.cli import commands
from deploy.exit_codes import DONE
from deploy.fleet import down, reconcile, spec, state
from deploy.fleet.reconcile import NodeRole, labels
from deploy.fleet.spec import DeploymentPlan
from federation import folder_lock
from federation.clock import SystemClock
from federation.errors import ComputeError

JOBS = Path(__file__).parents[3] / "jobs"
ROLES = ("aggregator", "site-aws-us-east-1", "site-gcp-us-central1")


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    path = tmp_path / "fed.toml"
    names = "".join(f'[[sites]]\nname = "{role[5:]}"\n' for role in ROLES[1:])
    path.write_text(f'name = "fed"\njob = "{JOBS / "quickstart.toml"}"\n{names}')
    return spec.load(path)


class Nodes:
    """Nodes that work, without processes; their owner's name is `me`."""

    def __init__(self, folder: Path) -> None:
        self.places = {role: folder / f"{role}-0" for role in ROLES}
        self._locks: dict[str, ExitStack] = {}
        for number, (role, place) in enumerate(self.places.items()):
            place.mkdir(parents=True)
            found = labels("fed", "me", NodeRole(name=role, settings="0"), 1)
            node = LocalNode(
                name=role,
                command=("sleep", "60"),
                environment=(),
                labels=tuple(found.items()),
                max_seconds=60.0,
                market="on-demand",
                launched=1.7e9 + number,
            )
            write(place, node)
            write(place, NodeStarted(at=1.7e9, pid=7_000_000 + number))
            self._locks[role] = ExitStack()
            self._locks[role].enter_context(folder_lock.hold(place / LOCK, "twice"))

    def damage(self, role: str) -> None:
        (self.places[role] / "node.json").write_text("{")

    def end_asked(self) -> list[str]:
        """Have those end that were asked to, and name them."""
        asked = [r for r in self._locks if (self.places[r] / STOP).exists()]
        for role in asked:
            write(self.places[role], NodeEnded(at=1.7e9 + 60.0, why=""))
            self._locks.pop(role).close()
        return asked

    def close(self) -> None:
        for lock in self._locks.values():
            lock.close()


@contextmanager
def working(plan: DeploymentPlan) -> Iterator[Nodes]:
    nodes = Nodes(plan.folder / "nodes")
    try:
        yield nodes
    finally:
        nodes.close()


def test_a_damaged_node_is_named_beside_the_others(
    plan: DeploymentPlan, capsys: pytest.CaptureFixture[str]
):
    with working(plan) as nodes:
        nodes.damage(ROLES[1])
        assert commands.main(["nodes", str(plan.path), "--json"]) == DONE
        rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows.keys() == {f"{role}-0" for role in ROLES}
        assert "node.json is damaged" in rows[f"{ROLES[1]}-0"]["trouble"]


class Ending(SystemClock):
    """A clock that has nodes end which were asked to.

    Attributes:
        order: Names of those, as they did.
    """

    def __init__(self, nodes: Nodes, *, but: str = "") -> None:
        self.order: list[str] = []
        self._nodes, self._but, self._skipped = nodes, but, 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds
        if self._but:
            self._skipped += 60.0
            (self._nodes.places[self._but] / STOP).unlink(missing_ok=True)
        self.order += self._nodes.end_asked()


@pytest.mark.parametrize("stuck", ["", ROLES[1]])
def test_a_damaged_node_ends_with_its_deployment(plan: DeploymentPlan, stuck: str):
    """One that does not end is named."""
    told: list[str] = []
    with working(plan) as nodes:
        nodes.damage(ROLES[1])
        clock = Ending(nodes, but=stuck)
        with state.opened(plan, random_bytes=os.urandom, clock=clock) as deployment:
            deployment.owner = "me"
            assert f"{ROLES[1]}-0 ({ROLES[1]}-0)" in down.still_running(deployment)
            if stuck:
                with pytest.raises(ComputeError, match=f"not within.*{ROLES[1]}-0"):
                    down.take_down(deployment, any_owner=False, tell=told.append)
            else:
                ended = down.take_down(deployment, any_owner=False, tell=told.append)
                assert ended == 3
        sites = [each for each in ROLES[1:] if each != stuck]
        assert clock.order == [*sites, *([ROLES[0]] if not stuck else [])]


def test_nothing_is_launched_beside_a_damaged_node(plan: DeploymentPlan):
    """Neither its role nor its owner is known."""
    with working(plan) as nodes:
        nodes.damage(ROLES[0])
        clock = SystemClock()
        with state.opened(plan, random_bytes=os.urandom, clock=clock) as deployment:
            listed = deployment.listed()["local"]
            known = [each for each in listed if each.name != f"{ROLES[0]}-0"]
            reconcile.check_owner(known, "me", "fed")
            with pytest.raises(ComputeError, match=r"json is damaged.*--any-owner"):
                reconcile.check_owner(listed, "me", "fed")
