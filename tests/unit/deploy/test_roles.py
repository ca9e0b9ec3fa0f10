"""Roles in the roster: a relay has no update, so it stands in no sum."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from support import agents
from support.agents import OPEN_POLICY, RUN_ID, Consortium, consortium, proposal
from support.enrolments import Federation
from support.small_jobs import small_job

from deploy.aggregator_host import enrolment_operator, parties
from deploy.site_host import enrolment_roster
from federation.errors import JobError
from federation.ids import SiteId
from privacy.membership import roster_file
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.contract import members_of
from privacy.secagg.errors import RosterRefused
from privacy.secagg.protocol.of_job import relays_of

HOSPITAL, RELAYS = "site-0", ("site-1", "site-2")
SECRET = {"secure_aggregation": {"enabled": True, "clip_norm": 8.0}}
JOB = small_job(
    num_sites=3, privacy=SECRET, aggregation={"weights": "uniform"}, rounds=1
)


@pytest.fixture
def members() -> Consortium:
    return consortium(HOSPITAL, *RELAYS, relays=RELAYS)


def test_relays_do_not_count_as_sites(members: Consortium):
    """Neither in a contract, nor for the aggregator that is honest."""
    found = members_of(members.roster, {HOSPITAL, *RELAYS})
    assert [each.site for each in found] == [HOSPITAL]
    assert members_of(members.roster) == found
    with pytest.raises(JobError, match="'site-1' is a relay"):
        parties.check(JOB, members.parties)


def test_a_site_refuses_a_job_whose_sites_are_relays(
    members: Consortium, tmp_path: Path
):
    """Whatever its aggregator says: with or without masks."""
    policy = {**OPEN_POLICY, "min_sites": 3}
    for job in (JOB, small_job(num_sites=3)):
        site = agents.agent(tmp_path, HOSPITAL, members, policy=policy)
        found = agents.propose(site, members, proposal(job))
        site.close()
        assert "'site-1' is a relay" in found.refused
        assert not (tmp_path / HOSPITAL / "runs" / RUN_ID).exists()


def test_a_site_is_no_relay_of_a_job():
    """It would add up its neighbours' words under the role of a site."""
    job = small_job(
        num_sites=3,
        relays=[{"name": "east", "sites": ["site-0"]}],
        schedule={"minimum_sites": 1},
    )
    names = ("site-0", "site-1", "site-2", "east")
    with pytest.raises(JobError, match=r"'east' is a site .*--relay"):
        relays_of(job, consortium(*names).roster)
    assert relays_of(job, consortium(*names, relays=["east"]).roster)[0].name == "east"


def test_the_role_is_shown_and_in_the_digest(members: Consortium, tmp_path: Path):
    """People compare the digest, and see which parties are relays."""
    before = members.roster
    again = roster.parse(roster.dumps(before))
    assert (again, again.digest) == (before, before.digest)
    as_sites = replace(
        before, sites=tuple(replace(each, role="site") for each in before.sites)
    )
    assert as_sites.digest != before.digest
    changes = enrolment_roster.differences(as_sites, before)
    assert [line.partition(" of ")[0] for line in changes] == [
        "changes relay 'site-1'",
        "changes relay 'site-2'",
    ]
    only = replace(before, sites=before.sites[:1])
    changes = enrolment_roster.differences(only, before)
    assert [line.partition(" of ")[0] for line in changes] == [
        "adds relay 'site-1'",
        "adds relay 'site-2'",
    ]
    odd = roster.dumps(before).replace('"relay"', '"boss"')
    with pytest.raises(RosterRefused, match="role of 'site-1'"):
        roster.parse(odd)
    path = tmp_path / "roster.toml"
    roster.save(before, path)
    for name, role in ((HOSPITAL, "site"), ("site-1", "relay")):
        found = roster_file.pinned(path, site=name)
        assert found is not None
        assert found.role == role


def test_the_invitation_gives_the_role(tmp_path: Path):
    """The operator's, and not the party's that enrols; another takes a revocation."""
    found = Federation(folder=tmp_path)
    token = enrolment_operator.invite(
        found.config,
        "east",
        random_bytes=os.urandom,
        clock=found.clock,
        role=roster.RELAY,
    )
    (row,) = enrolment_operator.overview(found.config, clock=found.clock).sites
    assert (row.state, row.role) == ("invited", "relay")
    found.enroll(token)
    members = roster.load(found.aggregator / "roster.toml")
    assert members.entry(SiteId("east")).role == "relay"
    (row,) = enrolment_operator.overview(found.config, clock=found.clock).sites
    assert (row.state, row.role) == ("enrolled", "relay")
    pinned = roster_file.pinned(found.aggregator / "roster.toml", site="east")
    assert pinned is not None
    with pytest.raises(RosterRefused, match=r"as a relay of .*'east'"):
        roster_file.trust(
            found.aggregator / "roster.toml",
            site="east",
            organisation="east",
            key=pinned.public_key,
        )
    found.clock.sleep(400 * 86400.0)  # It may come back with its keys.
    with pytest.raises(EnrolmentRefused, match=r"as a site, and .* a relay of this"):
        found.enroll(found.invite("east"))
