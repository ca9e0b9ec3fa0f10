"""What a relay refuses: of its aggregator, and of its sites."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import agents, toy
from support.agents import RUN_ID, Consortium, consortium
from support.secagg_parties import Parties
from support.small_jobs import small_job

from cloud_adapters.relays.task_queue import QuestionKind, RelayQuestion
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.transport.frames import INLINE, Frames
from deploy import audit_log
from deploy.aggregator_host.config import AggregatorFile
from deploy.site_host.relay_agent import (
    INTRODUCE_SECONDS,
    MAX_INTRODUCTION_BYTES,
    SITES_SHARE,
    RelayAgent,
)
from federation.clock import VirtualClock
from federation.errors import JobError, ProtocolError
from federation.ids import RunId, SiteId
from federation.job import job_digest
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    MetricSums,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.rounds.failures import failure
from federation.wire import frame as wire
from federation.wire.relayed import answers_in, down_frames
from privacy.membership import introduction
from privacy.membership.introduction import Introduction
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.contract import MAX_MEMBERS, RelayMember
from privacy.secagg.agreement.identity import Label, generate
from privacy.secagg.protocol.messages import Book, Offer

EAST, SITES = SiteId("east"), ("site-0", "site-1")
RELAYS = [{"name": EAST, "sites": [*SITES]}]
JOB = small_job(num_sites=3, relays=RELAYS, schedule={"minimum_sites": 1})
SECRET = {"secure_aggregation": {"enabled": True, "threshold": 6}}
Answer = Callable[[SiteId, RelayQuestion], bytes | None]


def silent(_site: SiteId, _question: RelayQuestion) -> None:
    """Give no answer."""


@dataclass
class Cloud:
    """A relay whose sites answer what a test says."""

    members: Consortium
    agent: RelayAgent = field(init=False)
    answer: Answer = silent
    asked: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def ask(
        self, questions: Mapping[SiteId, RelayQuestion], *, seconds: float, **_: Any
    ) -> dict[SiteId, bytes | None]:
        self.asked.append(seconds)
        return {site: self.answer(site, each) for site, each in questions.items()}

    def propose(self, job: JobSpec = JOB, **changes: Any) -> tuple[bytes, list[bytes]]:
        """Bring a proposal, and read what the relay answers."""
        made = agents.proposal(job, num_values=15, **changes)
        sealed = introduction.seal_proposal(made, self.members.aggregator)
        found = introduction.open_bundle(self.agent.introduce(sealed))
        assert found is not None
        own, sites = found
        return own, [*sites]

    def exchange(self, *tasks: Task) -> list[SiteMessage]:
        """Bring tasks, and read the answers."""
        packed = INLINE.send_whole(tasks)
        found = self.agent.answer(packed, seconds=10.0)
        return answers_in(found.frame, limit=10)


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    members = consortium(*(f"site-{n}" for n in range(8)), EAST, relays=[EAST])
    serve = {"listen": "127.0.0.1:1", "hosts": ["h"], "sites": [*SITES]}
    config = agents.site_config(tmp_path / EAST, EAST, serve=serve)
    roster.save(members.roster, config.roster)
    made = Cloud(members)
    made.agent = RelayAgent(
        config=config,
        identity=members.sites[EAST],
        roster=members.roster,
        ask=made.ask,
        served={SiteId(site) for site in SITES},
        clock=VirtualClock(1e9),
        listener=made.said.append,
    )
    return made


def task(site: str, **changes: Any) -> RoundTask:
    made = RoundTask(
        run_id=RUN_ID,
        round_index=1,
        site=SiteId(site),
        kind=TaskKind.EVALUATE,
        layout_digest="00" * 32,
        weights_d=np.zeros(15, np.float32),
        integers_m=np.zeros(0, np.int64),
        evaluate=True,
        evaluate_after=False,
    )
    return replace(made, **changes)


def introduced(
    members: Consortium,
    site: str,
    question: RelayQuestion,
    *,
    key: str = "",
    num_examples: int = 0,
) -> bytes:
    made = Introduction(
        version=introduction.VERSION,
        site=site,
        proposal=introduction.digest(question.body),
        release="1",
        refused="",
        privacy=None,
        num_examples=num_examples,
    )
    return introduction.seal_introduction(made, members.sites[key or site])


@pytest.mark.parametrize(
    ("job", "changes", "text"),
    [
        (small_job(num_sites=3), {}, "relay 'east' is not named"),
        (
            small_job(
                num_sites=3,
                relays=[{"name": EAST, "sites": ["site-2"]}],
                schedule={"minimum_sites": 1},
            ),
            {},
            "relay 'east' does not serve site-2: add them to serve.sites",
        ),
        (JOB, {"code_hash": "00" * 32}, "not the same code"),
    ],
)
def test_jobs_that_a_relay_refuses(
    cloud: Cloud, job: JobSpec, changes: dict[str, Any], text: str
):
    """It says so to the aggregator, and asks no site."""
    refused = cloud.propose(job, **changes)
    assert not refused[1]
    assert not cloud.asked
    assert text in cloud.said[-1]


def test_run_is_on_record_once_at_its_relay(cloud: Cloud):
    """With the newest digest of the aggregator's own log; and again in no restart."""
    cloud.answer = lambda site, q: introduced(cloud.members, site, q)
    for _ in range(2):
        cloud.propose(audit_head="ab" * 32)
    path = cloud.agent.config.folder / audit_log.FILE
    (entry,) = audit_log.read(path).entries
    assert (entry.action, entry.subject, entry.who) == (
        "run.accept",
        RUN_ID,
        "the relay",
    )
    assert entry.details[audit_log.HEAD] == "ab" * 32


def test_run_that_has_begun_goes_on_without_a_site_that_is_not_served(cloud: Cloud):
    """Its operator removes one that was revoked, and restarts the relay."""
    cloud.answer = lambda site, q: introduced(cloud.members, site, q)
    assert len(cloud.propose()[1]) == len(SITES)
    cloud.agent.served = {SiteId("site-1")}
    crashed = failure(task("site-1"), FailureKind.CRASHED, "no memory")
    asked: list[SiteId] = []

    def answer(site: SiteId, question: RelayQuestion) -> bytes:
        asked.append(site)
        if question.kind is QuestionKind.INTRODUCE:
            return introduced(cloud.members, site, question)
        return wire.encode_bytes(crashed)

    cloud.answer = answer
    gone, there = cloud.exchange(task("site-0"), task("site-1"))
    assert isinstance(gone, SiteFailure)
    assert (gone.site, gone.kind) == ("site-0", FailureKind.UNREACHABLE)
    assert there == crashed
    assert len(cloud.propose()[1]) == 1
    assert {*asked} == {"site-1"}


@pytest.mark.parametrize("name", ["proposal", "introductions"])
def test_a_full_disk_of_a_relay_is_a_temporary_refusal(cloud: Cloud, name: str):
    """Whatever it could not write; then the same proposal is taken."""
    cloud.answer = lambda site, q: introduced(cloud.members, site, q)
    path = cloud.agent.config.folder / "runs" / RUN_ID / f".{name}.tmp"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    own, sites = cloud.propose()
    assert introduction.kept_introduction(own).temporary
    assert not sites
    own, sites = cloud.propose()
    assert not introduction.kept_introduction(own).refused
    assert len(sites) == len(SITES)


def test_another_aggregator_is_refused(cloud: Cloud):
    made = introduction.seal_proposal(agents.proposal(JOB), generate(os.urandom))
    with pytest.raises(ProtocolError, match="signature"):
        cloud.agent.introduce(made)
    assert cloud.asked == []


def test_the_end_of_a_run_is_passed_on(cloud: Cloud):
    """As the aggregator has signed it, to the sites of that run; none need be there."""
    cloud.propose()
    brought = dict[SiteId, bytes]()
    cloud.answer = lambda site, asked: brought.setdefault(site, asked.body) and None
    end = introduction.seal_end(RUN_ID, cloud.members.aggregator, outcome="stopped")
    assert cloud.agent.introduce(end) == b""
    assert brought == dict.fromkeys(map(SiteId, SITES), end)
    assert cloud.asked[-1] < 10.0
    brought.clear()
    with pytest.raises(ProtocolError, match="aggregator"):
        cloud.agent.introduce(introduction.seal_end(RUN_ID, generate(os.urandom)))
    assert not brought


def test_introduction_of_another_is_dropped(cloud: Cloud):
    """One site cannot speak for its neighbour, nor spoil what the relay sends."""

    def answer(site: SiteId, question: RelayQuestion) -> bytes:
        if site == "site-0":
            return introduced(cloud.members, "site-1", question, key="site-0")
        return introduced(cloud.members, site, question)

    cloud.answer = answer
    _, sites = cloud.propose()
    assert len(sites) == 1
    assert "the introduction of site 'site-0' is dropped" in cloud.said[-1]
    cloud.answer = lambda _site, q: introduced(cloud.members, "site-1", q)
    assert len(cloud.propose()[1]) == 1  # Its own, which the other has copied.


def test_update_that_claims_more_examples_than_signed_is_left_out(cloud: Cloud):
    """Or the aggregator would refuse the sum, with those of the neighbours."""

    def answer(site: SiteId, question: RelayQuestion) -> bytes:
        if question.kind is QuestionKind.INTRODUCE:
            return introduced(cloud.members, site, question, num_examples=10)
        claims = 10 if site == "site-0" else 11
        made = toy.update(
            site,
            run_id=RUN_ID,
            layout_digest="00" * 32,
            delta_d=np.ones(15, np.float32),
            integers_m=np.zeros(0, np.int64),
            num_examples=claims,
        )
        return wire.encode_bytes(made)

    cloud.answer = answer
    cloud.propose()
    train = replace(task("site-0"), kind=TaskKind.TRAIN)
    found = cloud.exchange(train, replace(train, site=SiteId("site-1")))
    total, first, second = found
    assert isinstance(total, SiteUpdate)
    assert isinstance(first, SiteUpdate)
    assert (total.site, total.delta_d.tolist()) == (EAST, [1.0] * 15)
    assert (first.site, first.delta_d.size) == ("site-0", 0)
    assert isinstance(second, SiteFailure)
    assert "claims 11 training examples" in second.message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"round_index": 2}, "site, run or round"),
        ({"run_id": RunId("other")}, "site, run or round"),
        ({"layout_digest": "11" * 32}, "different layout"),
        ({"based_on": 1}, "based on round 1"),
        ({"integers_m": np.zeros(1, np.int64)}, "1 integers, not 0"),
        ({"num_examples": 1}, "claims 1 training examples"),
        (
            {"training": MetricSums(count=10, loss_sum=1.0, metrics={"correct": 11})},
            "impossible number of predictions",
        ),
    ],
)
def test_update_that_the_aggregator_would_refuse_is_left_out(
    cloud: Cloud, changes: dict[str, Any], text: str
):
    """One site cannot have the sum of its neighbours refused."""

    def answer(site: SiteId, question: RelayQuestion) -> bytes:
        if question.kind is QuestionKind.INTRODUCE:
            number = 10 if site == "site-0" else 0
            return introduced(cloud.members, site, question, num_examples=number)
        usual: dict[str, Any] = {
            "run_id": RUN_ID,
            "layout_digest": "00" * 32,
            "delta_d": np.ones(15, np.float32),
            "integers_m": np.zeros(0, np.int64),
            "num_examples": 10 if site == "site-0" else 0,
            "based_on": 0,
        }
        more = {} if site == "site-0" else changes
        return wire.encode_bytes(toy.update(site, **usual | more))

    cloud.answer = answer
    cloud.propose(JOB)
    train = replace(task("site-0"), kind=TaskKind.TRAIN)
    found = cloud.exchange(train, replace(train, site=SiteId("site-1")))
    total, first, second = found
    assert isinstance(total, SiteUpdate)
    assert isinstance(first, SiteUpdate)
    assert isinstance(second, SiteFailure)
    assert text in second.message


def test_one_site_that_hangs_does_not_make_its_relay_late():
    """The coordinator waits longer for a relay than that for its sites."""
    longest = AggregatorFile.__dataclass_fields__["connect_seconds"].default
    assert 0.9 * longest >= INTRODUCE_SECONDS


def test_introductions_of_all_sites_fit_into_one_message():
    """However long one of them makes its own."""
    longest = [bytes(MAX_INTRODUCTION_BYTES)] * (MAX_MEMBERS + 1)
    assert introduction.open_bundle(introduction.bundle(longest[0], longest[1:]))


def test_evaluations_pass_unchanged(cloud: Cloud):
    """In the order of the tasks; sites have a share of the time."""
    cloud.propose()
    found = failure(task("site-0"), FailureKind.CRASHED, "no memory")
    cloud.answer = lambda site, _: wire.encode_bytes(replace(found, site=site))
    answers = cloud.exchange(task("site-1"), task("site-0"))
    assert answers == [
        replace(found, site=SiteId(site)) for site in ("site-1", "site-0")
    ]
    assert cloud.asked[-1] == 10.0 * SITES_SHARE


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (None, FailureKind.UNREACHABLE),
        (b"", FailureKind.INVALID),
        (wire.encode_bytes(task("site-0")), FailureKind.INVALID),
        (
            wire.encode_bytes(failure(task("site-1"), FailureKind.BUSY, "x")),
            FailureKind.INVALID,
        ),
    ],
)
def test_what_is_no_answer_is_a_failure_of_its_site(
    cloud: Cloud, answer: bytes | None, kind: FailureKind
):
    cloud.propose()
    cloud.answer = lambda _site, _question: answer
    (found,) = cloud.exchange(task("site-0"))
    assert isinstance(found, SiteFailure)
    assert (found.site, found.kind) == ("site-0", kind)


@pytest.mark.parametrize(
    "tasks",
    [
        [task("site-2")],
        [task("site-0"), task("site-0")],
        [task("site-0"), task("site-1", round_index=2)],
        [
            task("site-0"),
            SecureTask(
                run_id=RUN_ID,
                round_index=1,
                site=SiteId("site-1"),
                step=SecureStep.REVEAL,
                body=b"",
            ),
        ],
    ],
)
def test_tasks_of_one_round_for_its_own_sites(cloud: Cloud, tasks: list[Task]):
    cloud.propose()
    with pytest.raises(ProtocolError, match="tasks of"):
        cloud.exchange(*tasks)
    assert len(cloud.asked) == 1


def test_run_must_have_been_proposed(cloud: Cloud):
    with pytest.raises(ProtocolError, match="been proposed to relay 'east'"):
        cloud.exchange(task("site-0"))
    with pytest.raises(ProtocolError, match="without a valid name"):
        cloud.propose(run_id=RunId("../x"))


def test_no_words_are_added_without_the_contract(cloud: Cloud):
    """And an offer that the aggregator has not signed is none."""
    job = small_job(num_sites=8, relays=RELAYS, privacy=SECRET, schedule={}, rounds=1)
    cloud.propose(job)
    with pytest.raises(ProtocolError, match="not seen the contract"):
        cloud.exchange(task("site-0"))
    forged = Offer(
        contract=b"any", signature=generate(os.urandom).sign(Label.OFFER, b"any")
    )
    offer = SecureTask(
        run_id=RUN_ID,
        round_index=0,
        site=SiteId("site-0"),
        step=SecureStep.ADVERTISE,
        body=forged.to_bytes(),
    )
    with pytest.raises(ProtocolError, match="signature"):
        cloud.exchange(offer)
    assert len(cloud.asked) == 1  # For introductions: no site works in vain.


@pytest.mark.parametrize("wrong", ["", "key", "run", "job", "relay"])
def test_only_the_contract_of_the_run_is_taken(cloud: Cloud, wrong: str):
    """With this relay's key: it checks its sites' words by what is in it."""
    job = small_job(num_sites=8, relays=RELAYS, privacy=SECRET, schedule={}, rounds=1)
    cloud.propose(job)
    key = cloud.members.sites["site-0" if wrong == "key" else EAST].public.key
    name = SiteId("west") if wrong == "relay" else EAST
    contract = replace(
        Parties(5).contract(),
        run_id=RunId("another") if wrong == "run" else RUN_ID,
        job_digest=bytes(32) if wrong == "job" else job_digest.digest(job),
        relays=(RelayMember(name=name, public_key=key, numbers=(1, 2)),),
    ).to_bytes()
    signature = cloud.members.aggregator.sign(Label.OFFER, contract)
    offer = SecureTask(
        run_id=RUN_ID,
        round_index=0,
        site=SiteId("site-0"),
        step=SecureStep.ADVERTISE,
        body=Offer(contract=contract, signature=signature).to_bytes(),
    )
    if wrong:
        with pytest.raises(ProtocolError):
            cloud.exchange(offer)
        assert cloud.agent._contract is None
    else:
        cloud.exchange(offer)
        assert cloud.agent._contract is not None
        cloud.propose(
            small_job(num_sites=3, relays=RELAYS, schedule={"minimum_sites": 1})
        )
        assert cloud.agent._contract is None  # It was that of another job.


BOOK = Book(adverts={1: b"an advert"}).to_bytes()


def confirm(body: bytes, site: str = "site-0") -> SecureTask:
    """The aggregator shows a book of keys."""
    return SecureTask(
        run_id=RUN_ID,
        round_index=0,
        site=SiteId(site),
        step=SecureStep.CONFIRM,
        body=body,
    )


def test_the_book_of_a_setup_outlives_a_restart(cloud: Cloud):
    """Or one site that answers wrongly would make all of its cloud absent."""
    cloud.propose()
    cloud.exchange(confirm(BOOK))
    again = replace(cloud.agent)
    assert again._book == b""
    again._current(RUN_ID)
    assert again._book == BOOK


def test_a_book_that_is_none_is_the_fault_of_the_aggregator(cloud: Cloud):
    """No site is asked for anything; each failure says whose fault it is."""
    cloud.propose()
    cloud.exchange(confirm(BOOK))
    num_asked = len(cloud.asked)
    tasks = [confirm(body, f"site-{i}") for i, body in enumerate((BOOK, b"no book"))]
    found = cloud.exchange(*tasks)
    assert len(cloud.asked) == num_asked
    for answer in found:
        assert isinstance(answer, SiteFailure)
        assert answer.kind is FailureKind.AGGREGATOR
        assert "else than a book" in answer.message
    assert cloud.agent._book == BOOK


def test_a_damaged_book_of_the_relay_is_not_blamed_on_others(cloud: Cloud):
    cloud.propose()
    cloud.exchange(confirm(BOOK))
    (path,) = cloud.agent.config.folder.rglob("book")
    path.write_bytes(BOOK[:-1])
    said: list[str] = []
    again = replace(cloud.agent, listener=said.append)
    again._current(RUN_ID)
    assert again._book == b""
    assert "book is damaged" in said[-1]


def test_a_large_model_and_its_sum_go_through_the_exchange(
    cloud: Cloud, tmp_path: Path
):
    """Sites get it whole, as they do not need the store."""
    sides = [
        Frames(store=LocalStore(tmp_path / "s"), scratch=tmp_path, threshold_bytes=59)
        for _ in range(2)
    ]
    cloud.agent.frames = sides[0]
    model_d = np.arange(15, dtype=np.float32)

    def answer(site: SiteId, question: RelayQuestion) -> bytes:
        if question.kind is QuestionKind.INTRODUCE:
            return introduced(cloud.members, site, question, num_examples=1)
        asked = wire.decode(question.body)
        assert isinstance(asked, RoundTask)
        fields = {"run_id": RUN_ID, "layout_digest": "00" * 32, "based_on": 0}
        none = np.zeros(0, np.int64)
        made = toy.update(site, delta_d=asked.weights_d, integers_m=none, **fields)
        return wire.encode_bytes(replace(made, num_examples=1))

    cloud.answer = answer
    cloud.propose()
    tasks = [
        task(site, kind=TaskKind.TRAIN, weights_d=model_d) for site in reversed(SITES)
    ]
    packed = sides[1].send_whole(down_frames(tasks))
    assert len(packed.references) == 1
    up = cloud.agent.answer(packed, seconds=10.0)
    (reference,) = up.references
    assert (reference.field, reference.size) == ("delta_d", 60)
    lone = replace(packed.references[0], size=64)
    with pytest.raises(ProtocolError, match="this run's model needs 60"):
        cloud.agent.answer(replace(packed, references=(lone,)), seconds=10.0)
    cloud.agent.frames = INLINE
    with pytest.raises(JobError, match=r"that the others use"):
        cloud.agent.answer(packed, seconds=10.0)
