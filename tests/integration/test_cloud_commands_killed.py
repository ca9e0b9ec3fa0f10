"""``crossfed up`` and ``down`` of two clouds, killed at many moments, and given again.

Moments are events and not seconds, so that a busy machine kills no sooner: a request
that a cloud has carried out and not answered, or a line that the command has written,
and what it does right after.
"""

import itertools
import os
import random
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest
from integration.test_cloud_sites import (
    RELEASE,
    Clouds,
    clouds as clouds,  # noqa: PLC0414 -- a fixture
)
from support.deployment import (
    CLOCK,
    crossfed_here as crossfed,
    wait_for,
)
from support.forked import Forked, shared
from support.programs import needs

from cloud_adapters.net.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("fleet"),
    needs("nginx"),
]

# What ``up`` tells in the course of its work; the first one whenever it is given.
LINES = (
    "aggregator: ready after",
    "aggregator: launched",
    "site-aws-us-east-1: launched",
    "site-gcp-us-central1: launched",
    "is enrolled",
    "is signed",
    "is submitted",
)


class Moment(NamedTuple):
    """When a command is killed.

    Attributes:
        request: When so many requests have been carried out; 0 for any number.
        line: When it has written this; empty for nothing.
        seconds: So long after that.
    """

    request: int
    line: str
    seconds: float


FIRST_REQUEST = Moment(1, "", 0.0)


def moment_of_up(rng: random.Random, told: str) -> Moment:
    """Half of them in a request, the others after a line that is still to come."""
    if rng.random() < 0.5:
        return Moment(rng.randint(1, 30), "", 0.0)
    new = [line for line in LINES if line not in told]
    return Moment(0, rng.choice([LINES[0], *new]), rng.uniform(0.0, 0.5))


def moment_of_down(rng: random.Random) -> Moment:
    if rng.random() < 0.7:
        return Moment(rng.randint(1, 12), "", 0.0)
    return Moment(0, ": ended", rng.uniform(0.0, 0.2))


class Killer:
    """Gives commands, kills them, and has machines boot meanwhile."""

    def __init__(self, clouds: Clouds) -> None:
        self.clouds = clouds
        self.booted: set[str] = set()
        self.told = ""
        self.kills = 0

    def give(self, *words: str, at: Moment) -> None:
        """Give a command and kill it, unless it has ended before."""
        number = len(self.clouds.ups)
        out, err = (self.clouds.folder / f"{number}.{each}" for each in ("out", "err"))
        command = shared().start(*words, out=out, err=err, environment=os.environ)
        self.clouds.ups.append(command)
        reached = self._dies_in_request(command, at.request)

        def is_over() -> bool:
            self.boot()
            is_told = bool(at.line) and at.line in err.read_text()
            return is_told or reached() or command.poll() is not None

        wait_for(is_over, f"{words[0]} is at {at}", 120)
        CLOCK.sleep(at.seconds)
        command.kill()
        code = command.wait(60)
        self.clouds.aws.mend()
        self.clouds.gcp.mend()
        self.kills += code == -signal.SIGKILL
        # Nothing but the kill may end it badly.
        assert code in {0, -signal.SIGKILL}, err.read_text()
        self.told += err.read_text()

    def _dies_in_request(self, command: Forked, number: int) -> Callable[[], bool]:
        """Kill it when a cloud has carried out its request, before the answer."""
        counted = itertools.count(1)
        reached: list[bool] = []

        def dies(_: object) -> bool:
            if number and next(counted) == number:
                command.kill()
                reached.append(True)
            return False

        self.clouds.aws.loses = self.clouds.gcp.loses = dies
        return lambda: bool(reached)

    def boot(self) -> None:
        """Boot every machine that was launched since, as clouds do by themselves."""
        for cloud, nodes in (
            ("aws", self.clouds.aws_nodes()),
            ("gcp", [name for _, name in self.clouds.gcp.instances]),
        ):
            for node in nodes:
                if node not in self.booted:
                    self.booted.add(node)
                    self.clouds.boot(cloud).enrol()

    def launched(self) -> tuple[int, int]:
        """How many machines each cloud ever had, those that have ended too."""
        aws = self.clouds.aws.pool().nodes({"crossfed-deployment": "fed"})
        return len(aws), len(self.clouds.gcp.inserted)


@pytest.fixture
def killer(clouds: Clouds) -> Killer:
    clouds.write(f"127.0.0.1:{free_port()}", more=RELEASE)
    return Killer(clouds)


# Each command that is killed takes as much as what it has started.
_MANY = [(seed, 3, 2) for seed in range(2, 22)]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "num_ups", "num_downs"), [(1, 2, 1), *_MANY])
def test_killed_commands_converge_and_nothing_bills_twice(
    killer: Killer, seed: int, num_ups: int, num_downs: int
):
    """One machine for each site whatever was killed, one run, and nothing after it."""
    rng = random.Random(seed)  # noqa: S311 -- when to kill a test's process
    clouds, path = killer.clouds, str(killer.clouds.path)
    for _ in range(num_ups):
        killer.give("up", path, "--detach", at=moment_of_up(rng, killer.told))
    for _ in range(num_ups - killer.kills):  # On a fast machine, some have ended.
        killer.give("up", path, "--detach", at=FIRST_REQUEST)
    assert killer.kills == num_ups
    last = clouds.up("--detach")

    def is_up() -> bool:
        killer.boot()
        return last.poll() is not None

    wait_for(is_up, "the last one ends", 200)
    assert last.wait() == 0, clouds.told
    assert sorted(node["node"] for node in clouds.nodes()) == [
        "aggregator",
        "site-aws-us-east-1",
        "site-gcp-us-central1",
    ]
    assert killer.launched() == (1, 1)
    assert len([*clouds.aggregator.glob("runs/*/*/request.json")]) == 1
    for machine in clouds.machines:
        machine.end()

    for _ in range(num_downs):
        killer.give("down", path, at=moment_of_down(rng))
    for _ in range(num_ups + num_downs - killer.kills):
        killer.give("down", path, at=FIRST_REQUEST)
    assert killer.kills == num_ups + num_downs
    crossfed("down", path)
    assert clouds.nodes() == []
    assert (clouds.aws_nodes(), clouds.gcp.instances) == ([], {})
    assert killer.launched() == (1, 1)
