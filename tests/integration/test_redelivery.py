"""Runs of real agents over a Flower that loses a part of all messages."""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support import agents
from support.agents import Consortium, consortium
from support.without_report import simulate

from cloud_adapters.flower import simulation as flower_simulation
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.aggregator_host.handshake import SignedHandshake
from federation.clock import SystemClock, VirtualClock
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import MaskedUpdate, RoundTask, SiteFailure
from federation.protocols import Grid
from federation.wire import frame as wire
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from support.lossy_flower import LossyFlower, is_task  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.grid import FlowerGrid  # noqa: E402
from cloud_adapters.flower.handshake import Attendance  # noqa: E402
from cloud_adapters.transport.redelivery import Word  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.slow]

JOBS = Path(__file__).parents[2] / "jobs"
SITES = ("aws-us-east-1", "gcp-us-central1")
IN_THE_CLEAR = "privacy.secure_aggregation.enabled=false"
JOB_CHANGES = {
    "plain": ("quickstart", IN_THE_CLEAR),
    "secure": ("quickstart",),
    "private": ("private",),
}


@dataclass(kw_only=True)
class Federation:
    """Two agents and a coordinator, with Flower's messages in virtual time between."""

    folder: Path
    flower: LossyFlower
    members: Consortium

    def run(self, job: JobSpec) -> RunResult:
        """Run a job to its end."""
        folder = RunFolder(self.folder / "run")
        folder.path.mkdir(parents=True)
        folder.write_job(job)
        coordinator = DeployedRun(
            folder,
            self.members.parties,
            clock=SystemClock(),
            report=False,
        )
        return coordinator.run(self.connect)

    def connect(
        self,
        handshake: SignedHandshake,
        sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
    ) -> Grid:
        """As ``deploy.aggregator_host.server_app``."""
        return FlowerGrid(
            self.flower,
            sites,
            clock=self.flower.clock,
            attendance=Attendance(
                handshake=handshake,
                required=required,
                quorum=quorum,
                connect_seconds=600.0,
            ),
        )

    def ledger(self, site: str) -> list[str]:
        """What a site has written of its budget, a charge a line."""
        (path,) = (self.folder / site).glob("runs/*/sites/*/ledger.jsonl")
        return path.read_text().splitlines()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    members = consortium(*SITES)
    clock = VirtualClock()
    clock.sleep(1000.0)
    found = [agents.agent(tmp_path, name, members) for name in SITES]
    apps = {10 + i: flower_site.agent_app(agent) for i, agent in enumerate(found)}
    flower = LossyFlower(apps=apps, clock=clock)
    yield Federation(folder=tmp_path, flower=flower, members=members)
    for agent in found:
        agent.close()


@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("secure", marks=pytest.mark.long), "private"]
)
def test_run_loses_messages_and_no_round(federation: Federation, kind: str):
    """A quarter of all, in both directions: no site works twice, or pays twice.

    Others overtake each other, so that tasks are sent again that were not lost.
    """
    draws = random.Random(7)  # noqa: S311 -- not for keys
    federation.flower.loses = lambda _: draws.random() < 1 / 4
    federation.flower.delay = lambda _: draws.uniform(0.0, 20.0)
    name, *changes = JOB_CHANGES[kind]
    job = job_file.load(JOBS / f"{name}.toml", [*changes, "rounds=3"])
    result = federation.run(job)
    assert (result.status, result.rounds_completed) == ("completed", 3)
    assert set(federation.flower.worked.values()) == {1}
    if kind == "plain":
        expected = simulate(job).weights
        for key, values in result.weights.items():
            assert np.array_equal(values, expected[key])
    if kind == "private":
        for site in SITES:
            rounds = [line for line in federation.ledger(site) if '"train"' in line]
            assert len(rounds) == 3


def ask(flower: LossyFlower, content: RecordDict, kind: str, name: str) -> Message:
    """Send the first site a message of one's own, and wait for the reply."""
    message = Message(content, 10, kind, ttl=600.0, group_id=name)
    (number,) = flower.push_messages([message])
    for _ in range(100):
        flower.clock.sleep(1.0)
        for reply in flower.pull_messages([number]):
            return reply
    raise AssertionError("no reply")


def test_aggregator_that_asks_again_gains_nothing(federation: Federation):
    """Under the same name it gets what it got, or a word; under another a refusal.

    No second masked update of a round exists, and the ledger is not touched.
    """
    job = job_file.load(JOBS / "private.toml", ["rounds=2"])
    assert federation.run(job).status == "completed"
    flower, site = federation.flower, SITES[0]
    before = federation.ledger(site)
    trained = [
        message
        for message in flower.sent
        if is_task(message)
        and message.metadata.dst_node_id == 10
        and isinstance(task_of(message), RoundTask)
    ]
    last = trained[-1]
    name, worked = last.metadata.group_id, flower.worked.copy()
    again = ask(flower, RecordDict(), flower_site.AGAIN, name)
    frame = flower_site.unpack(again.content)
    assert isinstance(wire.decode(frame), MaskedUpdate)
    for content, kind in (
        (RecordDict(), flower_site.PROBE),
        (last.content, "train"),
        (trained[0].content, "train"),
    ):
        word = ask(flower, content, kind, name)
        assert flower_site.read_word(word.content) is Word.ANSWERED
    assert flower.worked == worked
    for number, task in enumerate((last, trained[0])):
        refused = ask(flower, task.content, "train", f"another-{number}")
        assert isinstance(wire.decode(flower_site.unpack(refused.content)), SiteFailure)
    assert federation.ledger(site) == before


def task_of(message: Message) -> object:
    return wire.decode(flower_site.unpack(message.content))
