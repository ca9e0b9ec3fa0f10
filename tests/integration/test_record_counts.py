"""What leaves a site does not tell how many records it holds, under privacy of records.

Two sites with one record more or less are compared byte for byte, over a whole run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import agents
from support.agents import OPEN_POLICY, AgentGrid, Consortium, consortium
from support.small_jobs import small_job

from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.site_host.agent import SiteAgent
from federation import events
from federation.clock import SystemClock
from federation.errors import FederationError
from federation.job.spec import JobSpec
from federation.messages import MaskedUpdate, SecureAnswer, SiteMessage, Task
from federation.wire import frame as wire
from monitoring.runs.run_folder import RunFolder
from privacy.membership import introduction

pytestmark = pytest.mark.slow

RUN = "20260102-030405-abcdef"
NAMES = [f"site-{i}" for i in range(4)]
# Noised, masked, or a time: their forms alone are compared.
HIDDEN = {
    *("delta_d", "words", "header_h", "body", "evaluation", "evaluation_after"),
    *("proposal", "phases"),
}
# Without the grid the two of fifty and fifty-one differ in their delta as well.
DEAL = {"num_train": 50, "num_held_out": 41}


@dataclass
class Overheard:
    """A site's agent, and every message that leaves it.

    Attributes:
        said: Each message, with the form alone of what is hidden.
    """

    agent: SiteAgent
    said: list[dict[str, Any]] = field(default_factory=list)

    def introduce(self, question: bytes) -> bytes:
        answer = self.agent.introduce(question)
        found = json.loads(introduction._body(answer))
        self.said.append(in_form(found))
        return answer

    def answer(self, task: Task) -> SiteMessage:
        try:
            answer = self.agent.answer(task)
        except FederationError as error:
            self.said.append({"refused": str(error)})
            raise
        found = {name: getattr(answer, name) for name in answer.__dataclass_fields__}
        self.said.append({"kind": type(answer).__name__} | in_form(found))
        if isinstance(answer, MaskedUpdate | SecureAnswer):
            assert len(wire.encode_bytes(answer)) < 1 << 20
        return answer

    def close(self) -> None:
        self.agent.close()


def in_form(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave of a message what has neither noise nor mask."""
    return {
        name: _form(value) if name in HIDDEN else str(value)
        for name, value in message.items()
    }


def _form(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape
    return len(value) if isinstance(value, bytes) else type(value).__name__


def private_job(unit: str, *, secure: bool, held_out: str) -> JobSpec:
    """A job of four sites, each with data of its own; record privacy has epochs."""
    one_step = {"local_steps": 1} if unit != "record" else {"local_epochs": 2}
    return small_job(
        num_sites=4,
        rounds=2,
        training={**one_step, "batch_size": 8, "optimizer": {"lr": 0.5}},
        evaluation={"every": 1},
        aggregation={"weights": "uniform"},
        privacy={
            "secure_aggregation": {"enabled": secure},
            "differential_privacy": {
                "unit": unit,
                "target_epsilon": 30.0,
                "held_out": held_out,
                "accept_low_signal": unit == "site",
            },
        },
    )


def overheard(
    folder: Path, members: Consortium, job: JobSpec, deal: Mapping[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a job whose first site holds so many records.

    Returns:
        What that site said, and what was planned for all.
    """
    deals = [deal, *[DEAL] * 3]
    found = {
        name: agents.agent(
            folder,
            name,
            members,
            policy={**OPEN_POLICY, "accept_dropouts": True},
            data={"source": "support.small_jobs:blobs", "options": dict(each)},
        )
        for name, each in zip(NAMES, deals, strict=True)
    }
    first = Overheard(found[NAMES[0]])
    grid = AgentGrid({**found, NAMES[0]: first})  # type: ignore[dict-item]
    run_folder = RunFolder(folder / "runs" / RUN)
    run_folder.path.mkdir(parents=True)
    run_folder.write_job(job)
    seen: list[events.Event] = []
    coordinator = DeployedRun(
        run_folder,
        members.parties,
        clock=SystemClock(),
        listeners=[seen.append],
        report=False,
    )
    with grid.connected():
        assert coordinator.run(grid.connect).status == "completed"
    planned = [asdict(e) for e in seen if isinstance(e, events.PrivacyPlanned)]
    assert len(planned) == 1
    return first.said, [{**each, "at": 0.0} for each in planned]


CASES = [
    private_job("record", secure=False, held_out="noise"),
    private_job("record", secure=True, held_out="noise"),
    private_job("joint", secure=True, held_out="noise"),
    private_job("site", secure=True, held_out="public"),
]


@pytest.mark.parametrize("job", CASES, ids=["clear", "record", "joint", "site"])
def test_one_record_more_changes_no_byte_that_has_no_noise(
    tmp_path: Path, job: JobSpec
):
    """Rate, delta, noise, steps, epsilon and sizes: the same for n and n + 1."""
    members = consortium(*NAMES)
    is_hidden = job.privacy.differential_privacy.held_out == "noise"
    more = {"num_train": 51, "num_held_out": 42 if is_hidden else 41}
    one = overheard(tmp_path / "one", members, job, DEAL)
    other = overheard(tmp_path / "other", members, job, more)
    assert len(one[0]) > 3
    assert one == other


def test_numbers_of_records_far_apart_may_be_told_apart(tmp_path: Path):
    """So that the test above would see what it looks for."""
    members = consortium(*NAMES)
    job = private_job("record", secure=True, held_out="noise")
    one = overheard(tmp_path / "one", members, job, DEAL)
    far = {**DEAL, "num_train": 57}
    other = overheard(tmp_path / "other", members, job, far)
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("batch", [42, 64])
def test_refusals_do_not_tell_the_number_either(tmp_path: Path, batch: int):
    """At whatever batch: neighbours are refused alike, or both take part."""
    members = consortium(*NAMES)
    job = private_job("record", secure=False, held_out="noise")
    job = replace(job, training=replace(job.training, batch_size=batch))
    said = []
    for num_train in (41, 42):
        site = agents.agent(
            tmp_path / str(num_train),
            NAMES[0],
            members,
            data={
                "source": "support.small_jobs:blobs",
                "options": {"num_train": num_train},
            },
        )
        said.append(agents.propose(site, members, agents.proposal(job)))
        site.close()
    assert said[0] == said[1]
    assert bool(said[0].refused) == (batch == 64)
