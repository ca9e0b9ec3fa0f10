"""The handshake: whom it believes, and what it keeps of the answers."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.agents import RUN_ID, Consortium, consortium
from support.small_jobs import small_job

from deploy.aggregator_host.handshake import SignedHandshake
from federation.errors import ProtocolError, SiteError, SiteNotReady
from federation.events import SitePrivacy
from federation.ids import SiteId
from federation.job import job_file
from federation.messages import NO_ANCHOR, LedgerAnchor
from privacy.membership import introduction
from privacy.membership.introduction import Introduction, SiteAnchor
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.identity import generate

JOB = small_job(num_sites=2)
PRIVATE = small_job(
    num_sites=2,
    training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
    aggregation={"weights": "uniform"},
    privacy={
        "differential_privacy": {
            "unit": "record",
            "target_epsilon": 8.0,
            "delta": 1e-5,
            "held_out": "public",
        }
    },
)


@pytest.fixture(scope="module")
def members() -> Consortium:
    return consortium("site-0", "site-1")


@pytest.fixture
def call(members: Consortium) -> SignedHandshake:
    return SignedHandshake.of(
        JOB, RUN_ID, aggregator=members.aggregator, roster=members.roster
    )


def answer(
    call: SignedHandshake, site: str, *, refused: str = "", temporary: bool = False
) -> Introduction:
    """What a site says to the question."""
    return Introduction(
        version=introduction.VERSION,
        site=site,
        proposal=introduction.digest(call.question),
        release="1",
        refused=refused,
        temporary=temporary,
        privacy=SitePrivacy(
            site=site,
            epsilon_cap=8.0,
            delta=1e-5,
            noise_multiplier=1.0,
            sampling_rate=0.5,
            steps_per_round=1,
            held_out_noise=None,
        ),
        num_examples=0,
    )


def test_question_holds_job_run_and_code(call: SignedHandshake, members: Consortium):
    """Everything a site decides by."""
    asked = introduction.open_proposal(call.question, members.roster)
    assert asked.run_id == RUN_ID
    assert job_file.loads(asked.job) == JOB
    assert asked.code_hash == code_hash().hex()
    assert asked.release == introduction.release()
    assert asked.roster_serial == members.roster.serial
    assert asked.roster_digest == members.roster.digest.hex()


def test_each_site_reads_its_own_anchor(members: Consortium):
    """The largest, should there be two; none for a site that has charged nothing."""
    known = {SiteId("site-0"): LedgerAnchor(train=3, evaluate=1)}
    call = SignedHandshake.of(
        JOB,
        RUN_ID,
        aggregator=members.aggregator,
        roster=members.roster,
        anchors=known,
    )
    asked = introduction.open_proposal(call.question, members.roster)
    assert asked.anchor_of(SiteId("site-0")) == LedgerAnchor(train=3, evaluate=1)
    assert asked.anchor_of(SiteId("site-1")) == NO_ANCHOR
    more = SiteAnchor(site="site-0", anchor=LedgerAnchor(train=2, evaluate=4))
    twice = replace(asked, anchors=(*asked.anchors, more))
    assert twice.anchor_of(SiteId("site-0")) == LedgerAnchor(train=3, evaluate=4)


def test_no_two_calls_are_the_same(call: SignedHandshake, members: Consortium):
    """Or an answer to one would do for the other."""
    other = SignedHandshake.of(
        JOB, RUN_ID, aggregator=members.aggregator, roster=members.roster
    )
    assert other.question != call.question
    sealed = introduction.seal_introduction(
        answer(call, "site-0"), members.sites["site-0"]
    )
    with pytest.raises(ProtocolError, match="answers a different proposal"):
        other.site_of(sealed)
    assert not other.introductions


def test_promises_are_in_the_order_of_names(members: Consortium):
    """Whoever answers first."""
    call = SignedHandshake.of(
        PRIVATE, RUN_ID, aggregator=members.aggregator, roster=members.roster
    )
    for site in ("site-1", "site-0"):
        found = answer(call, site)
        sealed = introduction.seal_introduction(found, members.sites[site])
        assert call.site_of(sealed) == site
    assert [promise.site for promise in call.promises()] == ["site-0", "site-1"]


def test_examples_are_those_that_sites_have_signed(
    call: SignedHandshake, members: Consortium
):
    """Also none: an update of such a site may claim none."""
    for site, number in (("site-1", 25), ("site-0", 0)):
        found = replace(answer(call, site), num_examples=number, privacy=None)
        call.site_of(introduction.seal_introduction(found, members.sites[site]))
    assert list(call.examples().items()) == [("site-0", 0), ("site-1", 25)]


def test_refusal_is_told_with_its_reason(call: SignedHandshake, members: Consortium):
    """And promises nothing."""
    found = answer(call, "site-0", refused="rounds: site 'site-0' allows 5")
    sealed = introduction.seal_introduction(found, members.sites["site-0"])
    with pytest.raises(SiteError, match="'site-0' does not take part: rounds: site"):
        call.site_of(sealed)
    assert not call.promises()


def test_run_that_spares_sites_goes_on_without_who_refuses(members: Consortium):
    """And without who was revoked, whatever that one says."""
    call = SignedHandshake.of(
        JOB,
        RUN_ID,
        aggregator=members.aggregator,
        roster=members.roster,
        revoked={"site-1", "stranger"},
        spares=True,
    )
    assert call.absent == {"site-1": "site 'site-1' was revoked"}
    found = answer(call, "site-0", refused="rounds: site 'site-0' allows 5")
    call.site_of(introduction.seal_introduction(found, members.sites["site-0"]))
    willing = answer(call, "site-1")
    call.site_of(introduction.seal_introduction(willing, members.sites["site-1"]))
    assert [*call.absent] == ["site-1", "site-0"]
    assert call.absent["site-0"].endswith("take part: rounds: site 'site-0' allows 5")
    assert not call.promises()


def test_site_that_comes_late_promises_what_the_run_has_noted(members: Consortium):
    """Its record would claim something else than what the site does."""
    call = SignedHandshake.of(
        PRIVATE,
        RUN_ID,
        aggregator=members.aggregator,
        roster=members.roster,
        spares=True,
    )
    found = answer(call, "site-0")
    sealed = introduction.seal_introduction(found, members.sites["site-0"])
    assert found.privacy is not None
    call.promised = {"site-0": replace(found.privacy, noise_multiplier=0.5)}
    call.site_of(sealed)
    assert "another promise" in call.absent.pop(SiteId("site-0"))
    call.promised = {"site-0": found.privacy}
    call.site_of(sealed)
    assert (call.absent, [*call.data]) == ({}, ["site-0"])


@pytest.mark.parametrize("spares", [False, True])
def test_temporary_refusal_makes_no_site_absent(
    call: SignedHandshake, members: Consortium, *, spares: bool
):
    """It is asked again, and then takes part."""
    call.spares = spares
    full = answer(call, "site-0", refused="the disk is full", temporary=True)
    with pytest.raises(SiteNotReady, match=r"'site-0' does not .*: the disk is full"):
        call.site_of(introduction.seal_introduction(full, members.sites["site-0"]))
    assert not call.absent
    found = replace(answer(call, "site-0"), privacy=None)
    call.site_of(introduction.seal_introduction(found, members.sites["site-0"]))
    assert [*call.introductions] == ["site-0"]


def test_site_that_the_job_does_not_name_may_refuse_it(members: Consortium):
    """A federation may be larger than a run."""
    call = SignedHandshake.of(
        small_job(num_sites=1),
        RUN_ID,
        aggregator=members.aggregator,
        roster=members.roster,
    )
    found = answer(call, "site-1", refused="site 'site-1' is not named by this job")
    sealed = introduction.seal_introduction(found, members.sites["site-1"])
    assert call.site_of(sealed) == "site-1"
    assert not call.introductions


def test_stranger_is_not_believed(call: SignedHandshake):
    """Nor is what it promises kept."""
    sealed = introduction.seal_introduction(
        answer(call, "site-0"), generate(os.urandom)
    )
    with pytest.raises(ProtocolError, match="by the pinned key"):
        call.site_of(sealed)
    assert not call.introductions


BEHIND = small_job(
    num_sites=3,
    relays=[{"name": "east", "sites": ["site-0", "site-1"]}],
    schedule={"minimum_sites": 1},
)


@pytest.fixture(scope="module")
def cloud() -> Consortium:
    return consortium(
        "site-0", "site-1", "site-2", "east", "west", relays=["east", "west"]
    )


def relay_call(cloud: Consortium) -> SignedHandshake:
    return SignedHandshake.of(
        BEHIND, RUN_ID, aggregator=cloud.aggregator, roster=cloud.roster, num_values=15
    )


def sealed(
    call: SignedHandshake, cloud: Consortium, site: str, *, key: str = "", **said: Any
) -> bytes:
    """What a party says, signed with its key or another's."""
    found = replace(answer(call, site, **said), privacy=None)
    return introduction.seal_introduction(found, cloud.sites[key or site])


def bundled(
    call: SignedHandshake, cloud: Consortium, *sites: str, relay: str = "east"
) -> bytes:
    own = sealed(call, cloud, relay)
    return introduction.bundle(own, [sealed(call, cloud, site) for site in sites])


def test_relay_introduces_its_sites(cloud: Consortium):
    """Each has signed for itself; one that is missing is absent."""
    call = relay_call(cloud)
    asked = introduction.open_proposal(call.question, cloud.roster)
    assert asked.num_values == 15
    assert call.site_of(bundled(call, cloud, "site-1")) == "east"
    assert call.introductions.keys() == {"site-1"}
    assert call.absent == {"site-0": "site 'site-0' did not connect to relay 'east'"}
    call.check_present(1)
    with pytest.raises(SiteError, match="cannot start: site 'site-0' did not connect"):
        call.check_present(2)


def test_relay_of_another_job_is_ignored(cloud: Consortium):
    call = relay_call(cloud)
    assert call.site_of(bundled(call, cloud, "site-1", relay="west")) == "west"
    assert not call.introductions


@pytest.mark.parametrize("name", ["site-0", "site-2"])
def test_site_that_answers_as_a_relay_is_refused(cloud: Consortium, name: str):
    """Or it would be there without having promised anything."""
    call = relay_call(cloud)
    with pytest.raises(SiteError, match=rf"'{name}' answers as a relay: remove \[ser"):
        call.site_of(bundled(call, cloud, relay=name))
    call.spares = True
    assert call.site_of(bundled(call, cloud, relay=name)) == name
    assert call.absent.keys() == {name}
    assert not call.introductions


def test_relay_that_answers_as_a_site_is_refused(cloud: Consortium):
    """Its operator has left out what makes it a relay."""
    call = relay_call(cloud)
    with pytest.raises(SiteError, match=r"'east' answers as a site: add \[serve\]"):
        call.site_of(sealed(call, cloud, "east"))


@pytest.mark.parametrize("site", ["site-2", "west"])
def test_relay_speaks_for_no_site_of_others(cloud: Consortium, site: str):
    call = relay_call(cloud)
    with pytest.raises(ProtocolError, match="relay 'east' speaks for site"):
        call.site_of(bundled(call, cloud, site))
    assert not call.introductions


def test_impostor_of_a_relay_is_not_believed(cloud: Consortium):
    """With all that its sites have signed, but without the key of the roster."""
    call = relay_call(cloud)
    forged = sealed(call, cloud, "east", key="west")
    with pytest.raises(ProtocolError, match="signature"):
        call.site_of(introduction.bundle(forged, [sealed(call, cloud, "site-0")]))
    assert not call.introductions


def test_relay_that_refuses_ends_the_handshake(cloud: Consortium):
    call = relay_call(cloud)
    refused = sealed(call, cloud, "east", refused="serves others")
    with pytest.raises(SiteError, match="relay 'east' does not take part: serves oth"):
        call.site_of(introduction.bundle(refused, []))


def test_relay_and_its_sites_are_asked_again_unless_they_are_spared(
    cloud: Consortium,
):
    """A full disk of a relay, or of one of its sites."""
    call = relay_call(cloud)
    passing = {"refused": "the disk is full", "temporary": True}
    own = sealed(call, cloud, "east", **passing)
    with pytest.raises(SiteNotReady, match="relay 'east' does not"):
        call.site_of(introduction.bundle(own, []))
    sites = [sealed(call, cloud, "site-0", **passing), sealed(call, cloud, "site-1")]
    both = introduction.bundle(sealed(call, cloud, "east"), sites)
    with pytest.raises(SiteNotReady, match="site 'site-0' does not"):
        call.site_of(both)
    call.spares = True
    assert call.site_of(both) == "east"
    assert call.absent.keys() == {"site-0"}
    assert call.introductions.keys() == {"site-1"}


def test_site_behind_a_relay_does_not_come_by_itself(cloud: Consortium):
    """Its update would leave the cloud alone."""
    call = relay_call(cloud)
    with pytest.raises(SiteError, match=r"behind relay 'east' .*relay\.address"):
        call.site_of(sealed(call, cloud, "site-0"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda whole: whole[:-1], "malformed bundle"),
        (lambda whole: whole.replace(b'"', b"'"), "malformed bundle"),
        (lambda whole: whole + b" " * introduction.MAX_BYTES, "too many"),
        (lambda whole: whole.partition(b"[")[0] + b"[]", "malformed bundle"),
    ],
)
def test_damaged_bundles_are_refused(
    cloud: Consortium, damage: Callable[[bytes], bytes], text: str
):
    call = relay_call(cloud)
    with pytest.raises(ProtocolError, match=text):
        call.site_of(damage(bundled(call, cloud, "site-0")))
