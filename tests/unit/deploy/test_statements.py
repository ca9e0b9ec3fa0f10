"""What all sites need is believed site by site, whoever passes it on.

The aggregator signs all that is tried here: it is the adversary, and may have a site.
"""

import base64
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support import agents
from support.agents import OPEN_POLICY, RUN_ID, Consortium, consortium
from support.small_jobs import small_job

from deploy.aggregator_host.handshake import SignedHandshake
from deploy.site_host.agent import SiteAgent
from federation.errors import ProtocolError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from privacy.dp import accountant
from privacy.membership import introduction
from privacy.membership.introduction import Introduction, Statements
from privacy.secagg.agreement.identity import Label, generate

NAMES = ("site-0", "site-1", "site-2", "site-3")
SITE, ODD = SiteId("site-2"), SiteId("site-0")
OTHER_RUN = RunId("20260102-030405-000002")


def joint_job(multiplier: float | None = 2.0) -> JobSpec:
    """With a multiplier every site needs the same, and no accountant is asked."""
    private = {
        "unit": "joint",
        "target_epsilon": 8.0,
        "held_out": "public",
        **({} if multiplier is None else {"noise_multiplier": multiplier}),
    }
    return small_job(
        num_sites=len(NAMES),
        rounds=2,
        training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": private,
        },
    )


@dataclass
class Meeting:
    """A site that has answered a proposal, and what all have answered.

    Attributes:
        members: Everybody's keys.
        proposal: As it was sealed.
        signed: What each site has sent.
        folder: Of all sites.
    """

    members: Consortium
    site: SiteAgent
    proposal: bytes
    signed: dict[SiteId, bytes]
    folder: Path

    def stated(self, name: SiteId) -> Introduction:
        """What a site has sent, to be changed."""
        return introduction.open_introduction(
            self.signed[name], self.members.roster, self.proposal
        )

    def tell(self, signed: Mapping[SiteId, bytes], run_id: str = RUN_ID) -> str:
        """Pass statements on to the site; why it takes no part then, if it does not."""
        sealed = introduction.seal_statements(
            RunId(run_id), signed, self.members.aggregator
        )
        found = introduction.open_introduction(
            self.site.introduce(sealed), self.members.roster, sealed
        )
        assert (found.privacy is None) == bool(found.refused)
        return found.refused

    def restart(self) -> None:
        """Have the site forget what it has in memory."""
        self.site.close()
        self.site = agents.agent(self.folder, SITE, self.members)

    def kept(self) -> list[str]:
        """Files of the run at the site."""
        folder = self.folder / SITE / "runs" / RUN_ID
        return sorted(path.name for path in folder.rglob("*") if path.is_file())


def handshake(
    members: Consortium, run_id: RunId = RUN_ID, job: JobSpec | None = None
) -> SignedHandshake:
    """Propose the job, as an aggregator does."""
    return SignedHandshake.of(
        job or joint_job(), run_id, aggregator=members.aggregator, roster=members.roster
    )


@dataclass(frozen=True)
class Beginning:
    """A proposal, and what three of four sites have answered."""

    members: Consortium
    proposal: bytes
    signed: Mapping[SiteId, bytes]


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    members, folder = consortium(*NAMES), tmp_path_factory.mktemp("sites")
    question, signed = handshake(members).question, {}
    for name in NAMES:
        if name != SITE:
            agent = agents.agent(folder, name, members)
            signed[SiteId(name)] = agent.introduce(question)
            agent.close()
    return Beginning(members, question, signed)


@pytest.fixture
def meeting(tmp_path: Path, beginning: Beginning) -> Iterator[Meeting]:
    site = agents.agent(tmp_path, SITE, beginning.members)
    own = {SITE: site.introduce(beginning.proposal)}
    signed = {**beginning.signed, **own}
    made = Meeting(beginning.members, site, beginning.proposal, signed, tmp_path)
    yield made
    made.site.close()


def test_promise_is_the_answer_to_what_all_need(meeting: Meeting):
    """Before it a site keeps the proposal and opens no ledger."""
    assert meeting.stated(SITE).privacy is None
    assert meeting.stated(SITE).needs == 2.0
    assert meeting.kept() == ["proposal"]
    assert meeting.tell(meeting.signed) == ""
    assert {"proposal", "statements", "ledger.jsonl"} <= set(meeting.kept())


def test_statements_may_come_twice_and_after_a_restart(meeting: Meeting):
    """Nothing is lost with a message, nor with what was in memory."""
    meeting.restart()
    assert meeting.tell(meeting.signed) == ""
    assert meeting.tell(meeting.signed) == ""


def forged(meeting: Meeting) -> dict[SiteId, bytes]:
    """Another number, under the aggregator's own key."""
    less = replace(meeting.stated(ODD), needs=0.1)
    sealed = introduction.seal_introduction(less, meeting.members.aggregator)
    return meeting.signed | {ODD: sealed}


def altered(meeting: Meeting) -> dict[SiteId, bytes]:
    """Another number, under the site's signature."""
    sealed = meeting.signed[ODD]
    assert sealed.count(b'"needs": 2.0') == 1
    return meeting.signed | {ODD: sealed.replace(b'"needs": 2.0', b'"needs": 0.1')}


def by_another_site(meeting: Meeting) -> dict[SiteId, bytes]:
    """Signed by a site that works with the aggregator."""
    less = replace(meeting.stated(ODD), needs=0.1)
    key = meeting.members.sites["site-1"]
    return meeting.signed | {ODD: introduction.seal_introduction(less, key)}


def of_another_run(meeting: Meeting) -> dict[SiteId, bytes]:
    """What the site has said of less noise, in earnest."""
    call = handshake(meeting.members, OTHER_RUN, joint_job(1.0))
    other = agents.agent(meeting.folder / "other", ODD, meeting.members)
    replayed = other.introduce(call.question)
    other.close()
    return meeting.signed | {ODD: replayed}


def of_another_start(meeting: Meeting) -> dict[SiteId, bytes]:
    """Of the same run, but answers to an earlier coordinator."""
    earlier = meeting.signed
    question = handshake(meeting.members).question
    meeting.site.introduce(question)
    return earlier


def without_one(meeting: Meeting) -> dict[SiteId, bytes]:
    return {name: each for name, each in meeting.signed.items() if name != ODD}


def of_nobody(meeting: Meeting) -> dict[SiteId, bytes]:
    return {}


def without_itself(meeting: Meeting) -> dict[SiteId, bytes]:
    return {name: each for name, each in meeting.signed.items() if name != SITE}


def one_twice(meeting: Meeting) -> dict[SiteId, bytes]:
    return meeting.signed | {SiteId("zoe"): meeting.signed[ODD]}


def one_for_another(meeting: Meeting) -> dict[SiteId, bytes]:
    return meeting.signed | {ODD: meeting.signed[SiteId("site-1")]}


def of_an_invented_site(meeting: Meeting) -> dict[SiteId, bytes]:
    zoe = replace(meeting.stated(ODD), site="zoe")
    sealed = introduction.seal_introduction(zoe, generate(os.urandom))
    return meeting.signed | {SiteId("zoe"): sealed}


def of_silence(meeting: Meeting) -> dict[SiteId, bytes]:
    """A site that works with the aggregator says nothing."""
    nothing = replace(meeting.stated(ODD), needs=None)
    key = meeting.members.sites[ODD]
    return meeting.signed | {ODD: introduction.seal_introduction(nothing, key)}


def of_infinity(meeting: Meeting) -> dict[SiteId, bytes]:
    endless = replace(meeting.stated(ODD), needs=float("inf"))
    key = meeting.members.sites[ODD]
    return meeting.signed | {ODD: introduction.seal_introduction(endless, key)}


def of_a_promise(meeting: Meeting) -> dict[SiteId, bytes]:
    """Another message of the same site."""
    return meeting.signed | {ODD: meeting.proposal}


Attempt = Callable[[Meeting], dict[SiteId, bytes]]

ATTEMPTS: Mapping[Attempt, str] = {
    forged: "the signature of site 'site-0' under 'promise' is not by the pinned key",
    altered: "the signature of site 'site-0' under 'promise' is not by the pinned key",
    by_another_site: "the signature of site 'site-0' under 'promise'",
    of_another_run: "site 'site-0' answers a different proposal",
    of_another_start: "site 'site-0' answers a different proposal",
    without_one: "but these differ: site-0",
    without_itself: "but these differ: site-2",
    of_nobody: "but these differ: site-0, site-1, site-2, site-3",
    one_twice: "site 'site-0' states what noise it needs more than once",
    one_for_another: "site 'site-1' states what noise it needs more than once",
    of_an_invented_site: "'zoe' is not in roster 1",
    of_silence: "site 'site-0' does not state what noise it needs",
    of_infinity: "site 'site-0' states impossible numbers",
    of_a_promise: "a malformed Introduction",
}


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda each: each.__name__)
def test_aggregator_cannot_thin_out_the_noise(meeting: Meeting, attempt: Attempt):
    """The site says why it takes no part, promises nothing and opens no ledger."""
    assert ATTEMPTS[attempt] in meeting.tell(attempt(meeting))
    assert meeting.kept() == ["proposal"]


def test_limit_of_all_runs_is_held_against_the_plan(
    beginning: Beginning, tmp_path: Path
):
    """What a run will release is known when all sites have stated what they need."""
    policy = {**agents.OPEN_POLICY, "total_epsilon": 0.1}
    site = agents.agent(tmp_path, SITE, beginning.members, policy=policy)
    signed = {**beginning.signed, SITE: site.introduce(beginning.proposal)}
    meeting = Meeting(beginning.members, site, beginning.proposal, signed, tmp_path)
    assert "and 0.1 is allowed (policy.total_epsilon)" in meeting.tell(signed)
    site.close()


def test_changed_roster_is_seen(meeting: Meeting):
    """A site that trusts other keys by now does not believe the old ones."""
    names, sites = sorted(meeting.members.sites), dict(meeting.members.sites)
    sites["site-1"] = generate(os.urandom)
    entries = tuple(
        replace(entry, public_key=sites[name].public.key)
        for name, entry in zip(names, meeting.members.roster.sites, strict=True)
    )
    roster = replace(meeting.members.roster, serial=2, sites=entries)
    meeting.site.close()
    changed = replace(meeting.members, roster=roster)
    meeting.site = agents.agent(meeting.folder, SITE, changed)
    assert "the signature of site 'site-1'" in meeting.tell(meeting.signed)


def test_statements_of_a_run_that_nobody_proposed(meeting: Meeting):
    """There is nothing to hold them against."""
    refusal = meeting.tell(meeting.signed, run_id=OTHER_RUN)
    assert f"run '{OTHER_RUN}' has not been proposed" in refusal
    assert "without a valid name" in meeting.tell(meeting.signed, run_id="../x")


@pytest.mark.parametrize("who", ["a stranger", "another site"])
def test_statements_of_anybody_else_get_no_answer(meeting: Meeting, who: str):
    """Not even a refusal."""
    key = meeting.members.sites["site-1"] if who != "a stranger" else None
    sealed = introduction.seal_statements(
        RUN_ID, meeting.signed, key or generate(os.urandom)
    )
    with pytest.raises(ProtocolError, match="the aggregator under 'statements'"):
        meeting.site.introduce(sealed)


def test_statements_are_text(meeting: Meeting):
    """Whatever else the aggregator signs is refused, with a reason."""
    for texts in (("*",), ("é",), (base64.b64encode(b"x").decode(),)):
        found = Statements(version=1, run_id=RUN_ID, introductions=texts)
        with pytest.raises(ProtocolError):
            introduction.stated_needs(
                found, proposal=meeting.proposal, roster=meeting.members.roster
            )


def test_text_of_a_job_does_not_make_statements(meeting: Meeting):
    """What an aggregator asks is told apart by what it is, not by what is in it."""
    words = 'name = "x" # "introductions": ['
    made = replace(agents.proposal(joint_job()), job=words)
    sealed = introduction.seal_proposal(made, meeting.members.aggregator)
    assert not introduction.are_statements(sealed)
    signed = meeting.members.aggregator.sign(Label.PROPOSAL, words.encode())
    with pytest.raises(ProtocolError, match="under 'statements'"):
        meeting.site.introduce(signed + words.encode())


def test_restarted_site_refuses_tasks_before_it_knows_what_others_need(
    meeting: Meeting,
):
    """It cannot say what its noise would be worth."""
    meeting.restart()
    with pytest.raises(
        ProtocolError, match="not received the other sites' noise statements"
    ):
        meeting.site.layout(RUN_ID)


def test_aggregator_asks_for_what_sites_need(meeting: Meeting):
    """A site that states nothing takes no part in planning."""
    call = handshake(meeting.members)
    silent = Introduction(
        version=introduction.VERSION,
        site=ODD,
        proposal=introduction.digest(call.question),
        release="1",
        refused="",
        privacy=None,
        num_examples=0,
    )
    key = meeting.members.sites[ODD]
    with pytest.raises(ProtocolError, match="state its noise plan"):
        call.site_of(introduction.seal_introduction(silent, key))


@pytest.mark.parametrize("name", ["site-0", "site-2", "site-3"])
def test_the_largest_need_decides(tmp_path: Path, beginning: Beginning, name: str):
    """Whoever has it; what sites state in earnest is all that counts."""
    members, site = beginning.members, agents.agent(tmp_path, SITE, beginning.members)
    question = handshake(members, job=joint_job(None)).question
    own = introduction.open_introduction(
        site.introduce(question), members.roster, question
    )
    assert own.needs is not None
    needs = {"site-1": own.needs / 2, name: own.needs * 1.2}
    signed = {
        SiteId(one): introduction.seal_introduction(
            replace(own, site=SiteId(one), needs=needs.get(one, own.needs)),
            members.sites[one],
        )
        for one in NAMES
    }
    sealed = introduction.seal_statements(RUN_ID, signed, members.aggregator)
    answer = introduction.open_introduction(
        site.introduce(sealed), members.roster, sealed
    )
    site.close()
    assert answer.privacy is not None
    assert answer.privacy.noise_multiplier == own.needs * 1.2


def test_no_site_needs_more_noise_than_the_job_allows(
    tmp_path: Path, beginning: Beginning
):
    """A site does not rely on the aggregator, which may collude with the other."""
    members, site = beginning.members, agents.agent(tmp_path, SITE, beginning.members)
    question = handshake(members, job=joint_job(None)).question
    own = introduction.open_introduction(
        site.introduce(question), members.roster, question
    )
    signed = {
        SiteId(one): introduction.seal_introduction(
            replace(own, site=SiteId(one), needs=1e3 if one == ODD else own.needs),
            members.sites[one],
        )
        for one in NAMES
    }
    meeting = Meeting(members, site, question, signed, tmp_path)
    refused = meeting.tell(signed)
    site.close()
    assert refused.startswith("site 'site-0' states that it needs"), refused
    assert meeting.kept() == ["proposal"]


def test_noise_that_the_job_sets_is_not_restated(meeting: Meeting):
    """A colluding site would choose by results, at each resume, how a cap is filled."""
    more = replace(meeting.stated(ODD), needs=3.5)
    key = meeting.members.sites[ODD]
    signed = meeting.signed | {ODD: introduction.seal_introduction(more, key)}
    refused = meeting.tell(signed)
    assert "'site-0' states that it needs" in refused
    assert "the job sets 2 for all" in refused
    assert meeting.tell(meeting.signed) == ""


def test_runs_that_state_what_they_need_together_count_each_other(tmp_path: Path):
    """The plan of the other exists only once its statements have come, too."""
    members = consortium(*NAMES)
    runs = (RUN_ID, OTHER_RUN)

    def refused(epsilon: float) -> tuple[list[str], SiteAgent]:
        policy = {**OPEN_POLICY, "total_epsilon": epsilon}
        folder = tmp_path / f"{epsilon:g}"
        sites = {
            name: agents.agent(folder, name, members, policy=policy, max_runs=2)
            for name in NAMES
        }
        questions = {run: handshake(members, run).question for run in runs}
        signed = {
            run: {
                SiteId(name): site.introduce(question) for name, site in sites.items()
            }
            for run, question in questions.items()
        }
        found = []
        for run in runs:
            sealed = introduction.seal_statements(run, signed[run], members.aggregator)
            answer = sites[SITE].introduce(sealed)
            told = introduction.open_introduction(answer, members.roster, sealed)
            found.append(told.refused)
        for name in NAMES:
            if name != SITE:
                sites[name].close()
        return found, sites[SITE]

    told, site = refused(1000.0)
    assert told == ["", ""]
    plans = [run.reservation for run in site._runs.values()]  # type: ignore[union-attr]
    site.close()
    first, second = (plan for plan in plans if plan is not None)
    both = accountant.epsilon([*first.planned, *second.planned], first.delta)
    told, site = refused(0.99 * both)
    site.close()
    assert told[0] == ""
    assert "policy.total_epsilon" in told[1]
