"""What a site's agent takes part in, what it keeps, and what it takes up again."""

import itertools
import json
import logging
import math
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support import agents
from support.agents import OPEN_POLICY, RUN_ID, Consortium, consortium
from support.small_jobs import blobs, small_job

from clients.data.datasets import Examples
from clients.models.model_pool import ModelPool
from clients.privacy.site_plans import PrivateSites
from cloud_adapters.storage.memory import MemoryStore
from deploy.site_host import agent as site_agent, folder as site_folder, run_status
from deploy.site_host.agent import SiteAgent
from deploy.wiring import parts as wiring
from federation.clock import SystemClock
from federation.epsilon_text import format_cap
from federation.errors import FederationError, JobError, ProtocolError, SiteError
from federation.event_log import read_events
from federation.events import StoreUsed
from federation.ids import RunId, SiteId
from federation.job import code_files, job_file
from federation.job.spec import JobSpec
from federation.messages import (
    Energy,
    FailureKind,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.failures import failure
from federation.wire import frame as wire
from privacy.membership import introduction
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.identity import generate
from privacy.secagg.agreement.roster import Roster

NAME = SiteId("site-0")
LEAVES = "support.users_module:leaves"
BLOBS = "support.small_jobs:blobs"


@pytest.fixture(scope="module")
def members() -> Consortium:
    return consortium("site-0", "site-1")


@pytest.fixture
def agent(tmp_path: Path, members: Consortium) -> SiteAgent:
    """The agent of an open site."""
    return agents.agent(tmp_path, NAME, members)


def private_job(**changes: Any) -> JobSpec:
    """A job with record-level privacy, in the clear."""
    private = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0}
    tables: dict[str, Any] = {
        "num_sites": 2,
        "rounds": 3,
        "training": {"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        "aggregation": {"weights": "uniform"},
        "privacy": {"differential_privacy": private},
    }
    return small_job(**tables | changes)


def train_task(job: JobSpec, round_index: int = 1, **changes: Any) -> RoundTask:
    """The first task of a run, or a later one."""
    pool = ModelPool(job)
    weights_d, integers_m = pool.initial_weights()
    task = RoundTask(
        run_id=RUN_ID,
        round_index=round_index,
        site=NAME,
        kind=TaskKind.TRAIN,
        layout_digest=pool.layout.digest,
        weights_d=weights_d,
        integers_m=integers_m,
        evaluate=False,
        evaluate_after=False,
    )
    return replace(task, **changes)


def accepted(agent: SiteAgent, members: Consortium, job: JobSpec) -> None:
    """Have a site take part."""
    found = agents.propose(agent, members, agents.proposal(job))
    assert found.refused == ""


def left(agent: SiteAgent) -> list[str]:
    """Names of what is in a site's folder of runs."""
    return sorted(path.name for path in agent.config.folder.glob("runs/*"))


def test_site_introduces_itself_and_works(agent: SiteAgent, members: Consortium):
    """It tells how many examples it has only where its answers would tell, too."""
    job = small_job(num_sites=2)
    found = agents.propose(agent, members, agents.proposal(job))
    assert (found.site, found.refused, found.privacy) == (NAME, "", None)
    assert found.release == introduction.release()
    assert found.num_examples == len(wiring.deal_data(job)[NAME][0])
    assert isinstance(agent.answer(train_task(job)), SiteUpdate)
    secure = small_job(
        num_sites=2,
        privacy={"secure_aggregation": {"enabled": True, "two_sites_waiver": True}},
    )
    made = agents.proposal(secure, run_id="20260102-030405-000002")
    assert agents.propose(agent, members, made).num_examples == 0
    agent.close()


def test_operator_reads_when_a_run_begins_and_ends(
    agent: SiteAgent, members: Consortium
):
    """Once each, also if the coordinator restarts; with job, rounds and epsilon."""
    said: list[str] = []
    agent.listener = said.append
    job = private_job(rounds=1, evaluation={"every": 0})
    for _ in range(2):
        accepted(agent, members, job)
    taken = f"accepts run {RUN_ID}: job {job.name!r}, 1 round, epsilon at most 8 with"
    (text,) = said
    assert text.startswith(taken)
    assert "for the other sites" in text
    answer = agent.answer(train_task(job))
    assert said.pop(1) == f"run {RUN_ID} begins"
    assert isinstance(answer, SiteUpdate)
    assert answer.spent is not None
    agent.close()
    (text,) = said[1:]
    assert text.startswith(f"run {RUN_ID} is over: job {job.name!r}, 1 round, 1 ")
    spent = math.ceil(100 * answer.spent.epsilon) / 100  # As the aggregator shows it.
    assert spent > round(answer.spent.epsilon, 2)  # It is not the nearest one.
    assert f", epsilon {spent:.2f} of 8 spent on training; all" in text
    assert f" together {spent:.2f} of 1000, {1000 - spent:.2f} left (" in text


def test_operator_reads_that_a_run_was_left(agent: SiteAgent, members: Consortium):
    """For another run, or because the agent ends; or that it never started."""
    said: list[str] = []
    agent.listener = said.append
    job = small_job(num_sites=2, rounds=3)
    accepted(agent, members, job)
    agent.answer(train_task(job))
    other = agents.proposal(job, run_id="20260102-030405-000001")
    assert agents.propose(agent, members, other).refused == ""
    agent.close()
    assert "3 rounds, 1 answered by" in said[2]
    ids = re.compile(r" \d{8}-\d{6}-\w{6}")
    assert [ids.sub("", text.partition(":")[0]) for text in said] == [
        "accepts run",
        "run begins",
        "run makes way for another run, and may be resumed",
        "accepts run",
        "run did not start while this site waited for it",
    ]


@pytest.mark.parametrize(
    ("has_begun", "outcome", "how"),
    [
        (False, "failed", "failed before it began here"),
        (True, "stopped", "was stopped before its last round"),
        (True, "exhausted", "ran out of privacy budget before its last round"),
        (True, "completed", "is over"),
    ],
)
def test_operator_reads_how_a_run_ended(
    agent: SiteAgent, members: Consortium, *, has_begun: bool, outcome: str, how: str
):
    """As its aggregator has signed; a run that is resumed is accepted once more."""
    said: list[str] = []
    agent.listener = said.append
    job = small_job(num_sites=2, rounds=3)
    accepted(agent, members, job)
    if has_begun:
        agent.answer(train_task(job))
    number = len(said)
    with pytest.raises(ProtocolError, match="the aggregator"):
        agent.introduce(introduction.seal_end(RUN_ID, generate(os.urandom)))
    other = RunId("20260102-030405-000009")
    end = introduction.seal_end(other, members.aggregator, outcome=outcome)
    assert agent.introduce(end) == b""
    assert len(said) == number
    end = introduction.seal_end(RUN_ID, members.aggregator, outcome=outcome)
    assert agent.introduce(end) == b""
    (run,) = run_status.read(agent.config)
    assert run.state == outcome
    # What an agent that was restarted meanwhile reads, too.
    again = introduction.seal_end(RUN_ID, members.aggregator, outcome="completed")
    assert agent.introduce(again) == b""
    (run,) = run_status.read(agent.config)
    assert run.state == "completed"
    assert said[number].startswith(f"run {RUN_ID} {how}: job {job.name!r}, 3 rounds, ")
    accepted(agent, members, job)
    assert said[-1].startswith(f"accepts run {RUN_ID}: ")
    agent.close()


def test_run_that_needs_more_memory_than_a_site_gives_all_is_refused(
    agent: SiteAgent, members: Consortium
):
    file = replace(agent.config.file, memory_mib=500, gpu_memory_mib=0)
    agent.config = replace(agent.config, file=file)
    for needs, refused in ((501, True), (500, False)):
        job = small_job(
            num_sites=2, schedule={"memory_mib": needs, "gpu_memory_mib": 9000}
        )
        made = agents.proposal(job, run_id=f"20260102-030405-00000{refused:d}")
        found = agents.propose(agent, members, made)
        assert ("schedule.memory_mib" in found.refused) is refused
        assert (found.memory_mib, found.gpu_memory_mib) == (500, 0)
    agent.close()


def test_energy_leaves_a_site_only_if_its_operator_lets_it(
    agent: SiteAgent, members: Consortium
):
    """And never where a round's other resources may not leave."""
    counts = itertools.count(1.0)
    agent.energy = lambda: Energy(
        joules=(n := next(counts), n + 1), grams=None, method="RAPL"
    )
    path = agent.config.path
    for number, reports in enumerate((False, True)):
        text = path.read_text() + "report_energy = true\n" * reports
        path.write_text(text)
        job = small_job(num_sites=2)
        made = agents.proposal(job, run_id=f"20260102-030405-00000{number}")
        assert agents.propose(agent, members, made).refused == ""
        answer = agent.answer(train_task(job, run_id=made.run_id))
        assert isinstance(answer, SiteUpdate)
        assert answer.resources is not None
        taken = Energy(joules=(1.0, 1.0), grams=None, method="RAPL")
        assert answer.resources.energy == (taken if reports else None)
        *_, status = run_status.read(agent.config)
        assert ("energy" in " ".join(status.sent)) is reports
    accepted(agent, members, private_job())
    answer = agent.answer(train_task(private_job()))
    assert isinstance(answer, SiteUpdate)
    assert answer.resources is None
    agent.close()


def test_site_hears_why_it_cannot_join_a_run_and_its_own_runs_go_on(
    agent: SiteAgent, members: Consortium
):
    said: list[str] = []
    agent.listener = said.append
    accepted(agent, members, small_job(num_sites=2))
    other = RunId("20260102-030405-000009")
    for run_id in (other, other, RUN_ID):
        end = introduction.seal_end(
            run_id, members.aggregator, reason="others\x1b reveal it"
        )
        assert agent.introduce(end) == b""
        (known,) = run_status.status(agent.config).refused
        assert (known.run_id, known.reason.isprintable()) == (other, True)
        assert sum(f"run {other} cannot be joined" in line for line in said) == 1
    # A run of its own is over, whatever the reason.
    assert said[-1].startswith(f"run {RUN_ID} ended before it began here")
    agent.close()


@pytest.mark.parametrize("outcome", ["", "won", "completed ", "stopped\x1b[2J"])
def test_an_end_of_no_known_kind_is_refused(
    agent: SiteAgent, members: Consortium, outcome: str
):
    accepted(agent, members, small_job(num_sites=2))
    end = introduction.seal_end(RUN_ID, members.aggregator, outcome=outcome)
    with pytest.raises(ProtocolError, match="no run ends as"):
        agent.introduce(end)
    (run,) = run_status.read(agent.config)
    assert run.state == "accepted"
    agent.close()


def test_status_says_when_the_end_of_a_run_may_have_been_missed(
    agent: SiteAgent, members: Consortium
):
    """The end does not reach a site that is away."""
    accepted(agent, members, small_job(num_sites=2))
    (run,) = run_status.read(agent.config)
    for seconds, is_up, missed in (
        (60, True, False),
        (60, False, True),
        (4e3, True, True),
    ):
        text = run_status.state(run, run.at + seconds, is_up=is_up)
        assert ("end not known" in text) is missed, (seconds, is_up)
    agent.close()
    (run,) = run_status.read(agent.config)
    assert "end not known" not in run_status.state(run, run.at + 9e9, is_up=False)


def test_operator_sees_what_runs_do_and_what_leaves(
    agent: SiteAgent, members: Consortium
):
    """At any time: rounds, spending, and which numbers go with an update."""
    config = agent.config
    job = private_job(rounds=3)
    accepted(agent, members, job)
    assert "all runs" not in str([*run_status.lines(run_status.status(config), 0.0)])
    (run,) = run_status.read(config)
    assert (run.state, run.answered, run.epsilon) == ("accepted", 0, None)
    answer = agent.answer(train_task(job))
    assert isinstance(answer, SiteUpdate)
    assert answer.spent is not None
    (run,) = run_status.read(config)
    assert (run.state, run.answered, run.last_round) == ("answered", 1, 1)
    assert (run.epsilon_cap, run.epsilon) == (8.0, answer.spent.epsilon)
    # What the answer really holds, of all that it might.
    assert run.sent == (
        "its update",
        "the number of steps",
        "held-out results with noise",
        "its spent epsilon",
    )
    assert answer.training is None
    assert not answer.phases
    assert answer.resources is None
    open_job = small_job(num_sites=2)
    made = agents.proposal(open_job, run_id="20260102-030405-000001")
    assert agents.propose(agent, members, made).refused == ""
    other, _ = run_status.read(config)
    assert {"the training loss", "processor time and memory"} <= set(other.sent)
    (config.folder / "runs" / run.run_id / run_status.STATUS).write_text("{")
    found = run_status.status(config)
    assert [each.run_id for each in found.runs] == [other.run_id]
    assert [each.epsilon for each in found.datasets] == [answer.spent.epsilon]
    text = "\n".join(run_status.lines(found, other.at + 60))
    assert re.search("accepted; .* 1 min 00 s ago, end not", text)
    assert f"of {format_cap(1000.0)} spent" in text
    assert "no agent runs" in text
    site_folder.note_contact(config.folder)
    with site_folder.only_one(config.folder):
        found = run_status.status(config)
    assert found.last_contact is not None
    frozen, _ = "\n".join(run_status.lines(found, found.last_contact + 90)).split(
        "\n", 1
    )
    assert "no answer for 1 min 30 s" in frozen
    well, _ = "\n".join(run_status.lines(found, found.last_contact + 3)).split("\n", 1)
    assert well.endswith("its agent runs; last contact 3.0 s ago")
    agent.close()


def test_operator_reads_why_the_agent_has_ended(agent: SiteAgent) -> None:
    """Until one is in touch again."""
    config = agent.config
    with pytest.raises(SiteError), site_folder.noting_end(config.folder):
        raise SiteError("rejected: enrol again")
    found = run_status.status(config)
    assert found.ended is not None
    about, *_ = run_status.lines(found, found.ended[1] + 60)
    assert about.endswith("the last one ended 1 min 00 s ago: rejected: enrol again")
    os.utime(config.folder / "ended", (1.0, 1.0))
    site_folder.note_contact(config.folder)
    assert run_status.status(config).ended is None


@pytest.mark.parametrize("has_data", [False, True])
def test_operator_reads_on_which_data_a_site_trains(
    tmp_path: Path, members: Consortium, *, has_data: bool
):
    """Its own, or a share of the job's: no run mixes both unseen."""
    data = {"source": f"{__name__}:own_data"} if has_data else {}
    agent = agents.agent(tmp_path, NAME, members, data=data)
    said: list[str] = []
    agent.listener = said.append
    accepted(agent, members, small_job(num_sites=2))
    agent.close()
    assert (f"own source {__name__}:own_data" in said[0]) == has_data
    assert ("share of the job" in said[0]) == (not has_data)
    assert re.search(r"\d+ training and \d+ held-out records; waits for", said[0])


@pytest.mark.parametrize("kind", ["plain", "private", "secret"])
def test_process_that_ends_at_work_says_what_is_lost(
    agent: SiteAgent, members: Consortium, kind: str
):
    """The interrupted task is not sent again if keys or charges do not allow it."""
    secure = {"secure_aggregation": {"enabled": True, "two_sites_waiver": True}}
    jobs = {
        "plain": small_job(num_sites=2),
        "private": private_job(),
        "secret": small_job(num_sites=2, privacy=secure),
    }
    accepted(agent, members, jobs[kind])
    task, words = train_task(jobs[kind]), list[str]()
    run = agent._current(task.run_id)

    def handle(_task: object) -> SiteFailure:
        words.append(agent.departure.last_words())
        return failure(task, FailureKind.CRASHED, "of the test")

    run.handler.handle = handle  # type: ignore[method-assign,assignment]
    agent.answer(task)
    (text,) = words
    assert "round 1 of run" in text
    assert ("its charge" in text) == (kind == "private")
    assert ("asked again" in text) == (kind != "secret")
    assert "round" not in agent.departure.last_words()
    agent.close()


@pytest.mark.parametrize(("limit", "value"), [("MAX_RUNS", 2), ("MAX_SENT_BYTES", 999)])
def test_proposals_fill_no_disk(
    agent: SiteAgent,
    members: Consortium,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
):
    """A run that has begun continues."""
    monkeypatch.setattr(site_agent, limit, value)
    job = small_job(num_sites=2)
    refused = []
    for number in range(3):
        made = agents.proposal(job, run_id=f"20260102-030405-00000{number}")
        refused.append(agents.propose(agent, members, made).refused)
    assert refused[0] == ""
    assert "as many runs" in refused[2]
    assert len(left(agent)) <= 2
    again = agents.proposal(job, run_id="20260102-030405-000000")
    assert agents.propose(agent, members, again).refused == ""
    agent.close()


@pytest.mark.parametrize("hidden", [[10**7, 10**7], [40]])
def test_model_beyond_the_limit_is_refused_before_its_memory_is_taken(
    tmp_path: Path, members: Consortium, hidden: list[int]
):
    """400 TB would end the process, or the machine."""
    policy = OPEN_POLICY | {"max_values": 100}
    site = agents.agent(tmp_path, NAME, members, policy=policy)
    job = small_job(num_sites=2)
    accepted(site, members, job)
    options = {"inputs": 2, "classes": 2, "hidden": hidden}
    model = {"factory": "clients.models:mlp", "options": options}
    big = small_job(num_sites=2, model=model)
    made = agents.proposal(big, run_id="20260102-030405-000001")
    assert "policy.max_values" in agents.propose(site, members, made).refused
    site.close()


@pytest.mark.parametrize("who", ["a stranger", "another site"])
def test_forged_proposal_gets_no_answer(
    agent: SiteAgent, members: Consortium, who: str
):
    """Not even a refusal, and it leaves nothing behind."""
    key = members.sites["site-1"] if who == "another site" else generate(os.urandom)
    made = agents.proposal(small_job(num_sites=2))
    with pytest.raises(ProtocolError, match="the aggregator"):
        agent.introduce(introduction.seal_proposal(made, key))
    assert left(agent) == []


def test_refusal_travels_with_its_reason(agent: SiteAgent, members: Consortium):
    """The key of the job, the site and its own key; and nothing is kept of the run."""
    job = small_job(num_sites=2, rounds=10_001)
    found = agents.propose(agent, members, agents.proposal(job))
    expected = (
        "rounds: site 'site-0' allows 10000 (policy.max_rounds), but the job has 10001"
    )
    assert found.refused == f"{expected}. Its log has the lines for site.toml"
    assert not found.temporary
    assert found.privacy is None
    assert left(agent) == []


def test_job_that_is_none_is_refused(agent: SiteAgent, members: Consortium):
    """The aggregator may be of another mind about what a job is."""
    made = agents.proposal(small_job(num_sites=2))
    found = agents.propose(agent, members, replace(made, job="rounds = 'many'"))
    assert found.refused.startswith("name: is missing")
    assert left(agent) == []


@pytest.mark.parametrize(
    ("release", "advice"),
    [
        ("99.0", "and the aggregator 99.0: upgrade the site "),
        (introduction.release(), "install the released package"),
    ],
)
def test_other_code_says_what_to_upgrade(
    agent: SiteAgent, members: Consortium, release: str, advice: str
):
    """The hash decides; the release is for the message, which the site's log has."""
    said: list[str] = []
    agent.listener = said.append
    made = agents.proposal(small_job(num_sites=2), code_hash="00" * 32, release=release)
    found = agents.propose(agent, members, made)
    assert advice in found.refused
    assert said == [f"run {made.run_id} is refused: {found.refused}"]
    assert left(agent) == []


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        (
            {"policy": {**OPEN_POLICY, "functions": [LEAVES, BLOBS]}},
            "exited the program",
        ),
        # What code that reads data says may quote a record: it does not leave.
        ({"data": {"source": LEAVES}}, "cannot load its data"),
    ],
)
def test_code_of_a_user_cannot_end_the_agent(
    tmp_path: Path, members: Consortium, tables: dict[str, Any], expected: str
):
    """With code 0 it would look as if its operator had stopped it."""
    model = {"factory": LEAVES} if "policy" in tables else None
    agent = agents.agent(tmp_path, NAME, members, **tables)
    made = agents.proposal(small_job(num_sites=2, model=model))
    assert expected in agents.propose(agent, members, made).refused
    assert left(agent) == []


@pytest.mark.parametrize("run_id", ["../../elsewhere", "", "a/b", "..", "a" * 65])
def test_run_is_no_path(agent: SiteAgent, members: Consortium, run_id: str):
    """Its name becomes a folder's."""
    made = agents.proposal(small_job(num_sites=2), run_id=run_id)
    assert "without a valid name" in agents.propose(agent, members, made).refused
    with pytest.raises(ProtocolError, match="without a valid name"):
        agent.answer(train_task(small_job(num_sites=2), run_id=RunId(run_id)))
    assert left(agent) == []
    assert not (agent.config.folder.parent / "elsewhere").exists()


def test_task_of_another_site_is_refused(agent: SiteAgent, members: Consortium):
    """Whoever brought it."""
    job = small_job(num_sites=2)
    accepted(agent, members, job)
    with pytest.raises(
        ProtocolError, match="site 'site-0' received a task for 'site-1'"
    ):
        agent.answer(train_task(job, site=SiteId("site-1")))
    agent.close()


def test_task_of_a_run_that_nobody_proposed_is_refused(
    agent: SiteAgent, members: Consortium
):
    """Also while the site takes part in another one."""
    job = small_job(num_sites=2)
    with pytest.raises(ProtocolError, match="been proposed to site 'site-0'"):
        agent.answer(train_task(job))
    accepted(agent, members, job)
    with pytest.raises(ProtocolError, match="'run-2' has not been proposed"):
        agent.answer(train_task(job, run_id=RunId("run-2")))
    assert isinstance(agent.answer(train_task(job)), SiteUpdate)
    agent.close()


def test_job_may_not_change_under_its_run(agent: SiteAgent, members: Consortium):
    """Neither before nor after a restart; the run continues as it was."""
    job = small_job(num_sites=2, rounds=2)
    accepted(agent, members, job)
    other = small_job(num_sites=2, rounds=2, seed=1)
    found = agents.propose(agent, members, agents.proposal(other))
    assert "with a different job:" in found.refused
    assert "seed: 1 here, 0 there" in found.refused
    assert isinstance(agent.answer(train_task(job)), SiteUpdate)
    agent.close()
    again = agents.agent(agent.config.folder.parent, NAME, members)
    found = agents.propose(again, members, agents.proposal(other))
    assert "seed: 1 here, 0 there" in found.refused
    accepted(again, members, job)
    again.close()


def test_a_run_is_extended_and_never_shortened(agent: SiteAgent, members: Consortium):
    """A site compares with the job that it has agreed to last."""
    accepted(agent, members, small_job(num_sites=2, rounds=2))
    accepted(agent, members, small_job(num_sites=2, rounds=3))
    shorter = agents.proposal(small_job(num_sites=2, rounds=2))
    assert "has 3 already" in agents.propose(agent, members, shorter).refused
    agent.close()


LINEAR = {"local_steps": 1, "learning_rate": {"name": "linear"}}
PAIR: Any = {"num_sites": 2, "rounds": 2}
OTHER_WEIGHTS = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4, "classes": 3},
    "weights": f"x@{'0' * 64}",
}


@pytest.mark.parametrize(
    ("job", "changes", "said"),
    [
        (small_job(**PAIR), {"seed": 1}, "seed: 1 here, 0 there"),
        (small_job(**PAIR), {"model": OTHER_WEIGHTS}, "model.weights"),
        (small_job(**PAIR, training=LINEAR), {}, "learning_rate.name = 'linear'"),
        (private_job(rounds=2), {}, "privacy cannot be extended"),
    ],
    ids=["another key", "different weights", "schedule", "private"],
)
def test_an_extension_brings_nothing_but_rounds(
    job: JobSpec,
    changes: dict[str, Any],
    said: str,
    agent: SiteAgent,
    members: Consortium,
):
    """The site compares for itself, whatever the aggregator's record says."""
    accepted(agent, members, job)
    document = job_file.document(job) | changes | {"rounds": 3}
    more = agents.proposal(job_file.parse(document))
    assert said in agents.propose(agent, members, more).refused
    agent.close()


def test_an_earlier_proposal_takes_no_extension_back(
    agent: SiteAgent, members: Consortium
):
    """Of a run that was extended twice, also after a restart."""
    proposals = [
        agents.proposal(small_job(num_sites=2, rounds=rounds)) for rounds in (2, 3, 4)
    ]
    for each in proposals:
        assert not agents.propose(agent, members, each).refused
    agent.close()
    again = agents.agent(agent.config.folder.parent, NAME, members)
    for each in proposals[:2]:
        assert "has 4 already" in agents.propose(again, members, each).refused
    assert not agents.propose(again, members, proposals[2]).refused
    again.close()


def test_where_a_run_is_kept_may_change(agent: SiteAgent, members: Consortium):
    """A coordinator may move to another place; no result depends on it."""
    accepted(agent, members, small_job(num_sites=2))
    moved = small_job(num_sites=2, storage={"keep_checkpoints": 7})
    accepted(agent, members, moved)
    agent.close()


def test_restarted_agent_takes_up_its_run(
    agent: SiteAgent, tmp_path: Path, members: Consortium
):
    """From its folder, without a word of the coordinator; it trains to the same."""
    job = small_job(num_sites=2)
    accepted(agent, members, job)
    first = agent.answer(train_task(job))
    agent.close()
    again = agents.agent(tmp_path, NAME, members)
    second = again.answer(train_task(job))
    again.close()
    assert isinstance(first, SiteUpdate)
    assert isinstance(second, SiteUpdate)
    assert first.delta_d.tobytes() == second.delta_d.tobytes()


def test_policy_that_was_tightened_holds_for_a_run_that_goes_on(
    agent: SiteAgent, tmp_path: Path, members: Consortium
):
    """An operator restarts the agent to be heard immediately."""
    job = small_job(num_sites=2)
    accepted(agent, members, job)
    agent.close()
    policy = {**OPEN_POLICY, "privacy": "record"}
    again = agents.agent(tmp_path, NAME, members, policy=policy)
    with pytest.raises(FederationError, match=r"requires 'record' \(policy\.privacy\)"):
        again.answer(train_task(job))


def test_two_runs_in_turns(agent: SiteAgent, members: Consortium):
    """One is open at a time; the other is taken up when its task comes."""
    job, other = small_job(num_sites=2), RunId("20260102-030405-000002")
    accepted(agent, members, job)
    agents.propose(agent, members, agents.proposal(job, run_id=other))
    for run_id in (RUN_ID, other, RUN_ID):
        answer = agent.answer(train_task(job, run_id=run_id))
        assert isinstance(answer, SiteUpdate)
        assert answer.run_id == run_id
    assert left(agent) == sorted([RUN_ID, other])
    agent.close()


def test_runs_at_once_are_kept_apart(
    tmp_path: Path, members: Consortium, monkeypatch: pytest.MonkeyPatch
):
    """Each has its own policy and answers; a third makes room for itself."""
    agent = agents.agent(tmp_path, NAME, members, max_runs=2)
    job, loads = small_job(num_sites=2), list[RunId]()
    ids = [RunId(f"20260102-030405-00000{n}") for n in range(3)]
    meet = SiteAgent._meet

    def counted(self: SiteAgent, proposal: Any, *rest: Any, **more: Any) -> Any:
        loads.append(RunId(proposal.run_id))
        return meet(self, proposal, *rest, **more)

    monkeypatch.setattr(SiteAgent, "_meet", counted)
    said: list[str] = []
    agent.listener = said.append
    for run_id in ids[:2]:
        found = agents.propose(agent, members, agents.proposal(job, run_id=run_id))
        assert (found.refused, found.max_runs) == ("", 2)
    for index in (1, 2):
        for run_id in ids[:2]:
            task = train_task(job, run_id=run_id, round_index=index)
            answer = agent.answer(task)
            assert isinstance(answer, SiteUpdate)
            assert answer.run_id == run_id
    assert loads == ids[:2]  # Neither was closed for the other.
    assert not [line for line in said if "is left" in line]
    agents.propose(agent, members, agents.proposal(job, run_id=ids[2]))
    assert [line for line in said if "is left" in line] == [
        line for line in said if ids[0] in line and "is left" in line
    ]
    agent.answer(train_task(job, run_id=ids[1], round_index=3))
    assert loads == ids
    agent.answer(train_task(job, run_id=ids[0], round_index=3))
    assert loads == [*ids, ids[0]]
    agent.close()


def test_runs_at_once_keep_their_own_rosters_and_policies(
    tmp_path: Path, members: Consortium
):
    """Also when the other began with newer ones."""
    agent = agents.agent(tmp_path, NAME, members, max_runs=2)
    job, path = small_job(num_sites=2), agent.config.path
    accepted(agent, members, job)
    strict = tomllib.loads(path.read_text())
    strict["policy"]["max_clip_norm"] = 3.0
    path.write_text(tomli_w.dumps(strict))
    newer = replace(members.roster, serial=2)
    roster.save(newer, agent.config.roster)
    other = RunId("20260102-030405-000002")
    found = agents.propose(agent, members, agents.proposal(job, run_id=other))
    assert found.refused == ""
    met = {run_id: run.met for run_id, run in agent._runs.items()}  # type: ignore[union-attr]
    assert [met[run].roster.serial for run in (RUN_ID, other)] == [1, 2]
    norms = [met[run].config.file.policy.max_clip_norm for run in (RUN_ID, other)]
    assert norms == [100.0, 3.0]
    accepted(agent, members, job)  # Its coordinator has restarted.
    met = {run_id: run.met for run_id, run in agent._runs.items()}  # type: ignore[union-attr]
    assert met[RUN_ID].roster.serial == 1
    agent.close()


def successor(members: Consortium) -> Consortium:
    """The same sites in a newer roster, with another key of the aggregator."""
    aggregator = generate(os.urandom)
    newer = replace(
        members.roster,
        serial=members.roster.serial + 1,
        aggregator_key=aggregator.public.key,
    )
    return replace(members, aggregator=aggregator, roster=newer)


def test_newer_roster_is_taken_with_a_new_run(agent: SiteAgent, members: Consortium):
    """Without a restart, and not by the run that continues, which keeps its own."""
    job, newer = small_job(num_sites=2), successor(members)
    accepted(agent, members, job)
    roster.save(newer.roster, agent.config.roster)
    accepted(agent, members, job)  # Its coordinator was started again.
    assert agent.roster == members.roster
    with pytest.raises(ProtocolError, match="the aggregator"):
        agents.propose(agent, newer, agents.proposal(job))
    second = agents.proposal(job, run_id="20260102-030405-000002")
    with pytest.raises(ProtocolError, match="the aggregator"):
        agents.propose(agent, members, second)
    assert agent.roster == members.roster
    assert isinstance(agent.answer(train_task(job)), SiteUpdate)
    assert agents.propose(agent, newer, second).refused == ""
    assert agent.roster == newer.roster
    agent.close()


def test_roster_is_looked_for_before_a_proposal_is_read(
    agent: SiteAgent, members: Consortium
):
    """The operator has signed a newer one, and nobody is there to accept it."""
    newer = successor(members)
    agent.refresh = lambda: roster.save(newer.roster, agent.config.roster)
    job = agents.proposal(small_job(num_sites=2))
    assert agents.propose(agent, newer, job).refused == ""
    assert agent.roster == newer.roster
    agent.close()


def test_run_that_is_refused_brings_no_roster(agent: SiteAgent, members: Consortium):
    """The one before it continues."""
    job, newer = small_job(num_sites=2), successor(members)
    accepted(agent, members, job)
    roster.save(newer.roster, agent.config.roster)
    other = agents.proposal(
        small_job(num_sites=2, rounds=10_001), run_id="20260102-030405-000002"
    )
    assert "policy.max_rounds" in agents.propose(agent, newer, other).refused
    assert agent.roster == members.roster
    assert isinstance(agent.answer(train_task(job)), SiteUpdate)
    agent.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path, old: roster.save(replace(old, serial=1), path), "roster 1 was"),
        (lambda path, _: path.write_text("serial = 'x"), "is not TOML"),
        (lambda path, _: path.unlink(), "cannot read"),
        (
            lambda path, old: roster.save(
                replace(old, serial=3, sites=old.sites[1:]), path
            ),
            "this site was removed",
        ),
    ],
    ids=["older", "damaged", "missing", "without the site"],
)
def test_roster_that_cannot_be_taken_is_told_and_left(
    tmp_path: Path,
    members: Consortium,
    change: Callable[[Path, Roster], object],
    reason: str,
):
    """The one in use stays, and the site still takes part in runs."""
    said: list[str] = []
    held = replace(members, roster=replace(members.roster, serial=2))
    agent = agents.agent(tmp_path, NAME, held)
    agent.listener = said.append
    change(agent.config.roster, held.roster)
    accepted(agent, held, small_job(num_sites=2))
    agent.close()
    assert agent.roster == held.roster
    line, _, _ = said  # The run begins, and is left.
    assert line.startswith(f"roster 2 stays in use, {agent.config.roster} is refused: ")
    assert reason in line


@pytest.mark.parametrize(
    ("serial", "what"),
    [(2, "another roster 2: its"), (3, "roster 3: its"), (1, "roster 1: submit the")],
)
def test_another_roster_is_refused_with_everything_else(
    tmp_path: Path, members: Consortium, serial: int, what: str
):
    """Or the run would lose its first rounds; the log has the command that helps."""
    said: list[str] = []
    held = replace(members, roster=replace(members.roster, serial=2))
    agent = agents.agent(tmp_path, NAME, held)
    agent.listener = said.append
    secure = {"secure_aggregation": {"enabled": True, "two_sites_waiver": True}}
    privacy = job_file.document(private_job())["privacy"] | secure
    weights = {"weights": "uniform"}
    job = small_job(num_sites=2, rounds=10_001, privacy=privacy, aggregation=weights)
    other = replace(held.roster, serial=serial, aggregator_organisation="offices")
    rests_on = {"roster_serial": serial, "roster_digest": other.digest.hex()}
    refused = agents.propose(agent, held, agents.proposal(job, **rests_on)).refused
    assert "policy.max_rounds" in refused
    assert f"has roster 2, but the run has {what}" in refused
    assert ("crossfed enroll --roster --folder DIR" in refused) == (serial > 1)
    command = f"crossfed enroll --roster --folder {agent.config.folder}"
    assert (command in said[0]) == (serial > 1)
    in_the_clear = agents.proposal(small_job(num_sites=2), **rests_on)
    assert agents.propose(agent, held, in_the_clear).refused == ""
    same = {"roster_serial": 2, "roster_digest": held.roster.digest.hex()}
    made = agents.proposal(job, **same)
    assert "roster" not in agents.propose(agent, held, made).refused
    agent.close()


@pytest.mark.slow
def test_promise_is_that_of_a_simulation(
    agent: SiteAgent, tmp_path: Path, members: Consortium
):
    """From the same records come the same noise, delta and cap."""
    job = private_job()
    found = agents.propose(agent, members, agents.proposal(job))
    agent.close()
    with PrivateSites(
        wiring.build_federation(job),
        run_id=RUN_ID,
        folder=tmp_path / "simulated",
        clock=SystemClock(),
    ) as simulated:
        assert found.privacy == simulated.promises()[0]
    assert found.num_examples == 0


@pytest.mark.parametrize(("most", "delta"), [(1e-4, 1e-4), (0.01, 3e-3)])
def test_default_delta_is_no_larger_than_the_policy_allows(
    tmp_path: Path, members: Consortium, most: float, delta: float
):
    """A site with few records promises more than 1 / (10 n), and is not refused."""
    policy = {**OPEN_POLICY, "privacy": "record", "max_delta": most}
    agent = agents.agent(tmp_path, NAME, members, policy=policy)
    found = agents.propose(agent, members, agents.proposal(private_job()))
    assert found.refused == ""
    assert found.privacy is not None
    assert found.privacy.delta == delta
    agent.close()


@pytest.mark.parametrize(
    ("then", "refused"),
    [(0.01, ""), (1e-5, "comes to 1.0e-04 at site 'site-0', which allows 1e-05")],
)
def test_a_run_keeps_its_delta_when_its_operator_allows_another(
    tmp_path: Path, members: Consortium, then: float, refused: str
):
    """The agent restarts in its middle; what was promised first stands in a ledger."""
    policy = {**OPEN_POLICY, "privacy": "record", "max_delta": 1e-4}
    agent = agents.agent(tmp_path, NAME, members, policy=policy)
    job = private_job()
    assert agents.propose(agent, members, agents.proposal(job)).refused == ""
    agent.close()
    again = agents.agent(tmp_path, NAME, members, policy={**policy, "max_delta": then})
    found = agents.propose(again, members, agents.proposal(job))
    assert refused in found.refused if refused else found.refused == ""
    assert refused or (found.privacy is not None and found.privacy.delta == 1e-4)
    again.close()


MINE = """
import numpy as np
from clients.models import logistic_regression


def net():
    return logistic_regression(8, 3)


def rows():
    inputs = np.eye(8, dtype="float32")[np.arange(100) % 8]
    return (inputs, np.arange(100) % 3), (inputs[:9], np.arange(9) % 3)
"""


def mine_job(folder: Path) -> JobSpec:
    """A private job with code of its author, in a folder of theirs."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE)
    document = job_file.document(private_job())
    del document["data"]
    document["model"] = {"factory": "./mine.py:net"}
    document["data"] = {"source": "./mine.py:rows"}
    (folder / "job.toml").write_text(tomli_w.dumps(document))
    return job_file.load(folder / "job.toml")


def advised(said: list[str]) -> list[str]:
    """The lines that follow a refusal in a site's log."""
    return [each.strip() for text in said[1:] for each in text.splitlines()]


def mended(agent: SiteAgent, said: list[str], **changes: str) -> None:
    """Do to a site's ``site.toml`` what its log says; the first lines win."""
    text = "\n".join(each for each in advised(said) if each[0] == "[" or " = " in each)
    path = agent.config.path
    document = tomllib.loads(path.read_text())
    text = text.replace('preprocessing = "FILL IN"', 'preprocessing = "none"')
    for table, values in tomllib.loads(text).items():
        document.setdefault(table, {}).update(values)
    path.write_text(tomli_w.dumps(document | changes))


@pytest.mark.parametrize("has_data", [False, True])
def test_one_refusal_names_all_that_an_operator_has_to_change(
    tmp_path: Path,
    members: Consortium,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_data: bool,
):
    """File, functions, preprocessing, delta and limits; then the agent just goes on."""
    monkeypatch.setenv(code_files.FOLDERS, "")
    job = mine_job(tmp_path / "office")
    monkeypatch.setenv(code_files.FOLDERS, "")
    policy = {**OPEN_POLICY, "privacy": "record", "max_rounds": 1, "total_epsilon": 1.0}
    data = {"source": "./mine.py:rows"} if has_data else {}
    data_lines = ("preprocessing = ", "total_epsilon = ")
    said: list[str] = []
    agent = agents.agent(tmp_path, NAME, members, policy=policy, data=data)
    folder, agent.listener = agent.config.folder, said.append
    if has_data:  # Its operator has a file, and the author another.
        (folder / "mine.py").write_text(MINE + "\n")
    found = agents.propose(agent, members, agents.proposal(job))
    for word in (
        "max_rounds",
        "does not accept './mine.py:net'",
        "is not the file" if has_data else "is no file ./mine.py",
        "data.preprocessing",
    ):
        assert word in found.refused
    if has_data:
        assert "policy.total_epsilon" in found.refused
    else:
        assert "data.source in site.toml is unset" in found.refused
    assert str(tmp_path) not in found.refused
    assert said[0].count(str(folder)) == 1
    assert not any(str(folder) in each for each in said[1:])
    assert any("not restart" in each for each in said)
    (folder / "mine.py").write_text(MINE)
    assert any(each.startswith(data_lines[0]) for each in advised(said))
    for line in data_lines[1:]:  # A guess would weaken the promise for nothing.
        assert any(each.startswith(line) for each in advised(said)) == has_data
    assert any("were not loaded" in each for each in said) == (not has_data)
    for number in range(1, 2 if has_data else 3):
        assert found.refused
        mended(agent, said)
        del said[:]
        run_id = RunId(f"20260102-030405-00000{number}")
        found = agents.propose(agent, members, agents.proposal(job, run_id=run_id))
    assert found.refused == ""
    agent.close()


def test_lines_that_are_no_cause_are_not_offered(
    tmp_path: Path, members: Consortium, monkeypatch: pytest.MonkeyPatch
):
    """A site whose limits suffice keeps them: only its functions are the cause."""
    monkeypatch.setenv(code_files.FOLDERS, "")
    job = mine_job(tmp_path / "office")
    policy = {
        **OPEN_POLICY,
        "privacy": "record",
        "max_delta": 0.1,
        "total_epsilon": 4.0,
    }
    agent = agents.agent(tmp_path, NAME, members, policy=policy)
    said: list[str] = []
    agent.listener = said.append
    (agent.config.folder / "mine.py").write_text(MINE)
    found = agents.propose(agent, members, agents.proposal(job))
    assert "policy.functions" in found.refused
    lines = [each.partition(" = ")[0] for each in advised(said) if " = " in each]
    assert lines == ["functions", "source", "options", "preprocessing"]
    share = "# without source, the site trains on its share of the job's dataset"
    assert advised(said)[advised(said).index("[data]") + 1] == share
    agent.close()


def test_a_job_with_data_for_single_sites_is_refused_at_once(
    tmp_path: Path, members: Consortium, monkeypatch: pytest.MonkeyPatch
):
    """A deployed site uses only its own; what to set is among the lines."""
    monkeypatch.setenv(code_files.FOLDERS, "")
    folder = tmp_path / "office"
    mine_job(folder)
    document = tomllib.loads((folder / "job.toml").read_text())
    del document["data"]
    for site in document["sites"]:
        site["data"] = {"source": "./mine.py:rows"}
    (folder / "job.toml").write_text(tomli_w.dumps(document))
    job = job_file.load(folder / "job.toml")
    agent = agents.agent(tmp_path, NAME, members, policy={**OPEN_POLICY})
    said: list[str] = []
    agent.listener = said.append
    (agent.config.folder / "mine.py").write_text(MINE)
    found = agents.propose(agent, members, agents.proposal(job))
    assert "model.factory: " in found.refused
    assert "must set data.source in site.toml" in found.refused
    assert "sites[" not in found.refused
    assert any(each.startswith('source = "./mine.py:rows"') for each in advised(said))
    (functions,) = (each for each in advised(said) if each.startswith("functions = "))
    assert "./mine.py:net" in functions
    assert "./mine.py:rows" not in functions
    mended(agent, said)
    run_id = RunId("20260102-030405-000001")
    found = agents.propose(agent, members, agents.proposal(job, run_id=run_id))
    assert "data.source" not in found.refused
    assert "policy.functions" not in found.refused
    agent.close()


PATIENTS = f"""{MINE}

def scale(values):
    return values


def patients(file, prepare, seed=0):
    open(file).close()
    return rows()
"""


@pytest.mark.parametrize("names_source", [False, True])
@pytest.mark.parametrize("names_data", ["for sites", "for all", "none"])
def test_the_lines_for_a_sites_own_data_are_complete(
    tmp_path: Path,
    members: Consortium,
    monkeypatch: pytest.MonkeyPatch,
    names_data: str,
    *,
    names_source: bool,
):
    """Source, options and preprocessing: the second proposal is accepted."""
    monkeypatch.setattr(f"{__name__}.MINE", PATIENTS)
    monkeypatch.setenv(code_files.FOLDERS, "")
    folder = tmp_path / "office"
    mine_job(folder)
    document = tomllib.loads((folder / "job.toml").read_text())
    del document["data"]
    options = {"file": "of-the-author.csv", "prepare": "./mine.py:scale"}
    data = {"source": "./mine.py:patients", "options": options}
    if names_data == "for all":
        document["data"] = data
    for site in document["sites"] if names_data == "for sites" else ():
        site["data"] = data
    (folder / "job.toml").write_text(tomli_w.dumps(document))
    job = job_file.load(folder / "job.toml")
    own = {"source": "./mine.py:patients"} if names_source else {}
    policy = {**OPEN_POLICY, "privacy": "record", "max_delta": 0.1}
    agent = agents.agent(tmp_path, NAME, members, policy=policy, data=own)
    said: list[str] = []
    agent.listener = said.append
    (agent.config.folder / "mine.py").write_text(PATIENTS)
    found = agents.propose(agent, members, agents.proposal(job))
    assert "data.preprocessing" in found.refused
    lines = dict(each.split(" = ", 1) for each in advised(said) if " = " in each)
    unknown = {"none": "FILL IN: ./file.py:function"}
    source = f'"{unknown.get(names_data, "./mine.py:patients")}"  # '
    assert own or lines["source"].startswith(source)
    assert lines["preprocessing"].startswith('"FILL IN"  # ')
    text = '{ file = "FILL IN", prepare = "./mine.py:scale" }  # '
    if names_data == "none":
        text = '{ file = "FILL IN", prepare = "FILL IN" }  # ' if own else '{ file = "F'
    assert lines["options"].startswith(text)
    mended(agent, said)
    (tmp_path / "mine.csv").touch()
    filled = tomllib.loads(agent.config.path.read_text())
    here = {"options": options | {"file": str(tmp_path / "mine.csv")}}
    filled["data"] |= here if "prepare" in lines["options"] else data | here
    agent.config.path.write_text(tomli_w.dumps(filled))
    made = agents.proposal(job, run_id=RunId("20260102-030405-000001"))
    assert agents.propose(agent, members, made).refused == ""
    agent.close()


def test_nothing_of_a_job_is_called_before_its_operator_accepts_it(
    tmp_path: Path, members: Consortium, monkeypatch: pytest.MonkeyPatch
):
    """Not even where the file of the job's author is at the site."""
    mark = tmp_path / "mark"
    monkeypatch.setattr(f"{__name__}.MINE", f"open({str(mark)!r}, 'w').close()\n{MINE}")
    job = mine_job(tmp_path / "office")
    for functions, is_called in (([], False), (["./mine.py:net"], True)):
        policy = {**OPEN_POLICY, "functions": [*functions, "./mine.py:rows"]}
        agent = agents.agent(tmp_path, NAME, members, policy=policy)
        (agent.config.folder / "mine.py").write_text(MINE)
        assert agents.propose(agent, members, agents.proposal(job)).refused
        assert mark.exists() == is_called


def test_a_run_that_is_open_keeps_the_policy_that_it_began_with(
    agent: SiteAgent, members: Consortium
):
    """As it keeps its roster; the next run is held to the new one."""
    job = small_job(num_sites=2)
    path = agent.config.path
    assert agents.propose(agent, members, agents.proposal(job)).refused == ""
    strict = tomllib.loads(path.read_text())
    strict["policy"]["functions"] = []
    path.write_text(tomli_w.dumps(strict))
    assert agents.propose(agent, members, agents.proposal(job)).refused == ""
    made = agents.proposal(job, run_id=RunId("20260102-030405-000001"))
    assert "policy.functions" in agents.propose(agent, members, made).refused
    path.write_text("policy = 3")
    said: list[str] = []
    agent.listener = said.append
    assert "site.toml is wrong" in agents.propose(agent, members, made).refused
    assert str(path) in said[0]
    agent.close()


@pytest.mark.slow
def test_all_runs_share_a_total(tmp_path: Path, members: Consortium):
    """A new run is a new ledger of the same records; the same run is not."""
    policy = {
        **OPEN_POLICY,
        "privacy": "record",
        "max_delta": 0.1,
        "total_epsilon": 15.0,
    }
    agent = agents.agent(tmp_path, NAME, members, policy=policy)
    first, second, third = (RunId(f"20260102-030405-00000{n}") for n in range(3))
    job = private_job()
    for run_id in (first, first):
        assert not agents.propose(
            agent, members, agents.proposal(job, run_id=run_id)
        ).refused
    for index in range(1, 4):
        task = train_task(job, round_index=index, run_id=first, evaluate=True)
        assert isinstance(agent.answer(task), SiteUpdate)
    found = agents.propose(agent, members, agents.proposal(job, run_id=second))
    assert "and 15 is allowed (policy.total_epsilon)" in found.refused
    cheap = private_job(
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 0.5,
                "clip_norm": 1.0,
            }
        }
    )
    again = agents.agent(tmp_path, NAME, members, policy=policy)
    assert not agents.propose(
        again, members, agents.proposal(cheap, run_id=third)
    ).refused
    assert left(agent) == [first, third]
    for one in (agent, again):
        one.close()


def ledger(agent: SiteAgent) -> list[Any]:
    """What a site's ledger of the run holds."""
    path = agent.config.folder / "runs" / RUN_ID / "sites" / NAME / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ledger_outlives_the_agent(
    agent: SiteAgent, tmp_path: Path, members: Consortium
):
    """What was spent stays spent, whoever forgets it."""
    job = private_job()
    accepted(agent, members, job)
    first = agent.answer(train_task(job))
    before = ledger(agent)
    agent.close()
    again = agents.agent(tmp_path, NAME, members)
    second = again.answer(train_task(job, round_index=2))
    again.close()
    assert isinstance(first, SiteUpdate)
    assert isinstance(second, SiteUpdate)
    assert first.spent is not None
    assert second.spent is not None
    assert second.spent.epsilon > first.spent.epsilon
    after = ledger(again)
    assert after[: len(before)] == before
    assert len(after) > len(before)


@pytest.mark.slow
def test_budget_ends_with_the_run_however_often_the_agent_starts(
    tmp_path: Path, members: Consortium
):
    """Three rounds were promised, and one is held in reserve."""
    job, answers = private_job(), []
    for round_index in range(1, 7):
        agent = agents.agent(tmp_path, NAME, members)
        accepted(agent, members, job)
        answers.append(agent.answer(train_task(job, round_index=round_index)))
        agent.close()
    over = [a for a in answers if isinstance(a, SiteFailure)]
    assert {failure.kind for failure in over} == {FailureKind.BUDGET}
    assert len(over) == 2


def test_folder_that_cannot_be_written_is_a_refusal(
    agent: SiteAgent, members: Consortium
):
    """The aggregator hears why; nothing is promised that would not be remembered."""
    runs = agent.config.folder / "runs"
    runs.symlink_to(agent.config.folder / "no disk")
    found = agents.propose(agent, members, agents.proposal(small_job(num_sites=2)))
    assert "file of the site" in found.refused
    assert str(runs) not in found.refused
    runs.unlink()


def test_full_disk_is_a_temporary_refusal(agent: SiteAgent, members: Consortium):
    """Asked again when there is space, the site takes part."""
    made = agents.proposal(small_job(num_sites=2))
    path = agent.config.folder / "runs" / made.run_id / ".proposal.tmp"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")  # It goes with the first attempt.
    found = agents.propose(agent, members, made)
    assert "No space left" in found.refused
    assert found.temporary
    again = agents.propose(agent, members, made)
    assert (again.refused, again.temporary) == ("", False)
    agent.close()


def test_what_stores_were_used_for_stays_at_the_site(
    agent: SiteAgent, members: Consortium
):
    """In the folder of the run, in the words of a run's events; no answer holds it."""
    store = agent.watch(MemoryStore(), "", None)
    job = small_job(num_sites=2)
    accepted(agent, members, job)
    store.put("a", [b"123"])
    first = agent.answer(train_task(job))
    store.read("a")
    agent.close()
    path = agent.config.folder / "runs" / RUN_ID / "storage.jsonl"
    told = read_events(path)
    assert [e.who for e in told if isinstance(e, StoreUsed)] == [NAME] * 2
    uses = [use for e in told if isinstance(e, StoreUsed) for use in e.uses]
    assert [(u.operation, u.sent_bytes, u.received_bytes) for u in uses] == [
        ("put", 3, 0),
        ("read", 0, 3),
    ]
    assert b"storage" not in wire.encode_bytes(first)


def test_full_disk_costs_no_round_for_a_note(
    agent: SiteAgent, members: Consortium, caplog: pytest.LogCaptureFixture
):
    """The log says what is missing."""
    job = small_job(num_sites=2)
    accepted(agent, members, job)
    (agent.config.folder / "runs" / RUN_ID / "storage.jsonl").mkdir()
    agent.watch(MemoryStore(), "", None).put("a", [b"123"])
    assert isinstance(agent.answer(train_task(job)), SiteUpdate)
    assert "record how stores were" in caplog.text
    agent.close()


def unreadable() -> tuple[Examples, Examples]:
    """Data with a mistake in it."""
    raise ValueError("could not convert 'Jane Doe, 1962' to a number")


def missing_file() -> tuple[Examples, Examples]:
    """A file that is at another site."""
    with Path("no-such.csv").open() as file:
        raise AssertionError(file)


def own_data() -> tuple[Examples, Examples]:
    """A site's own records: fewer than a simulation would deal to it."""
    return blobs(num_train=9)


def test_site_uses_its_own_data(tmp_path: Path, members: Consortium):
    """Whatever the job says of data."""
    source = {"source": f"{__name__}:own_data"}
    # Tests are no package: the module is there under its name all the same.
    agent = agents.agent(tmp_path, NAME, members, data=source)
    found = agents.propose(agent, members, agents.proposal(small_job(num_sites=2)))
    agent.close()
    assert (found.refused, found.num_examples) == ("", 9)


def test_what_is_wrong_with_data_stays_at_the_site(
    tmp_path: Path, members: Consortium, caplog: pytest.LogCaptureFixture
):
    """An error may quote a record."""
    data = {"source": f"{__name__}:unreadable"}
    agent = agents.agent(tmp_path, NAME, members, data=data)
    with caplog.at_level(logging.ERROR):
        found = agents.propose(agent, members, agents.proposal(small_job(num_sites=2)))
    assert found.refused == "site 'site-0' cannot load its data; its log says why"
    assert "Jane Doe" in caplog.text
    assert f"({Path(__file__).name}, line " in caplog.text


def test_a_jobs_dataset_that_fails_is_reported_like_a_sites_own(
    tmp_path: Path, members: Consortium, caplog: pytest.LogCaptureFixture
):
    source = f"{__name__}:missing_file"
    policy = {**OPEN_POLICY, "functions": [*OPEN_POLICY["functions"], source]}
    agent = agents.agent(tmp_path, NAME, members, policy=policy)
    job = small_job(num_sites=2, data={"source": source})
    with caplog.at_level(logging.ERROR):
        found = agents.propose(agent, members, agents.proposal(job))
    assert found.refused == "site 'site-0' cannot load its data; its log says why"
    assert str(Path("no-such.csv").absolute()) in caplog.text


def test_a_deployed_job_needs_no_data(agent: SiteAgent, members: Consortium):
    """Only a simulation does; and a site that has no data of its own says so."""
    job = replace(small_job(num_sites=2), data=None)
    found = agents.propose(agent, members, agents.proposal(job))
    assert found.refused.startswith("data.source: site 'site-0' has no data of its own")
    with pytest.raises(JobError, match="site 'site-0' has no data: add a") as caught:
        wiring.deal_data(job)
    assert caught.value.key == "data"


@pytest.mark.parametrize(
    "tables",
    [
        {"data": {"source": "s3://somebody/else"}},
        {"data": {"source": "file:///etc"}},
        {"sites": [{"name": "site-0", "data": {"source": "file:///etc"}}]},
        {"sites": [{"name": "site-0", "data": {"source": "s3://somebody/else"}}]},
    ],
)
def test_job_opens_no_address_at_a_site(
    agent: SiteAgent, members: Consortium, tables: dict[str, Any]
):
    """The site's credentials would open what the aggregator's do not."""
    made = agents.proposal(small_job(**tables))
    found = agents.propose(agent, members, made)
    assert "its operator must set data.source in site.toml" in found.refused


def test_secure_site_refuses_to_work_in_the_clear(
    agent: SiteAgent, members: Consortium
):
    """Its job said that updates are summed in secret."""
    job = small_job(
        num_sites=2,
        privacy={"secure_aggregation": {"enabled": True, "two_sites_waiver": True}},
    )
    accepted(agent, members, job)
    answer = agent.answer(train_task(job))
    agent.close()
    assert isinstance(answer, SiteFailure)
    assert "only with secure aggregation" in answer.message


def test_contract_against_the_policy_is_refused(agent: SiteAgent, members: Consortium):
    """And one that is none at all, in the first step of the protocol."""
    job = small_job(
        num_sites=2,
        privacy={
            "secure_aggregation": {
                "enabled": True,
                "two_sites_waiver": True,
                "max_examples": 60,
            }
        },
    )
    accepted(agent, members, job)
    task = SecureTask(
        run_id=RUN_ID,
        round_index=0,
        site=NAME,
        step=SecureStep.ADVERTISE,
        body=b"no contract",
    )
    answer = agent.answer(task)
    agent.close()
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.INVALID


def test_one_agent_works_in_a_folder(tmp_path: Path):
    """And the next one may when it has ended."""
    folder = tmp_path / "not" / "there yet"
    with (
        site_folder.only_one(folder),
        pytest.raises(FederationError, match="another agent or relay"),
        site_folder.only_one(folder),
    ):
        pass
    with site_folder.only_one(folder):
        pass


def test_damaged_proposal_is_told(agent: SiteAgent, members: Consortium):
    """Nobody can put another job into a site's folder and have it run."""
    job = small_job(num_sites=2)
    accepted(agent, members, job)
    agent.close()
    path = agent.config.folder / "runs" / RUN_ID / "proposal"
    path.write_bytes(path.read_bytes().replace(b"rounds = 1", b"rounds = 9"))
    with pytest.raises(ProtocolError, match="by the pinned key"):
        agent.answer(train_task(job))


def test_job_text_means_what_the_aggregator_sent():
    """The text that travels is the job, key for key."""
    job = private_job()
    assert job_file.loads(agents.proposal(job).job) == job
