"""Proposals and introductions are believed from whom the roster pins, and no one else.

All of it is bytes that anybody could send.
"""

import json
import os
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from support.agents import Consortium, consortium, proposal
from support.small_jobs import small_job

from federation.errors import ProtocolError
from federation.events import SitePrivacy
from privacy.membership import introduction
from privacy.membership.introduction import Introduction
from privacy.secagg.agreement.identity import (
    SIGNATURE_BYTES,
    Identity,
    Label,
    generate,
)

PROMISE = SitePrivacy(
    site="one",
    epsilon_cap=8.0,
    delta=1e-5,
    noise_multiplier=1.1,
    sampling_rate=0.25,
    steps_per_round=4,
    held_out_noise=None,
)


@pytest.fixture(scope="module")
def members() -> Consortium:
    return consortium("one", "two")


@pytest.fixture
def asked(members: Consortium) -> bytes:
    """A proposal, sealed."""
    made = proposal(small_job(num_sites=1))
    return introduction.seal_proposal(made, members.aggregator)


def introduced(asked: bytes, **changes: Any) -> Introduction:
    """What site one answers."""
    made = Introduction(
        version=introduction.VERSION,
        site="one",
        proposal=introduction.digest(asked),
        release="1",
        refused="",
        privacy=PROMISE,
        num_examples=0,
    )
    return replace(made, **changes)


def sealed_text(text: str, key: Identity, label: Label = Label.PROPOSAL) -> bytes:
    """Any text under a right signature."""
    return key.sign(label, text.encode()) + text.encode()


def test_both_come_through_whole(members: Consortium, asked: bytes):
    """Every field."""
    made = proposal(small_job(num_sites=1))
    assert introduction.open_proposal(asked, members.roster) == made
    answer = introduced(asked)
    sealed = introduction.seal_introduction(answer, members.sites["one"])
    assert introduction.open_introduction(sealed, members.roster, asked) == answer


@pytest.mark.parametrize("who", ["stranger", "one"])
def test_proposal_of_anybody_else_is_refused(members: Consortium, who: str):
    """A site's key does not make it the aggregator."""
    forger = members.sites.get(who) or generate(os.urandom)
    forged = introduction.seal_proposal(proposal(small_job()), forger)
    with pytest.raises(ProtocolError, match="the aggregator under 'proposal'"):
        introduction.open_proposal(forged, members.roster)


def test_proposal_for_another_roster_is_refused(asked: bytes):
    """A site of one federation takes no part in another."""
    other = consortium("one", "two")
    with pytest.raises(ProtocolError, match="by the pinned key"):
        introduction.open_proposal(asked, other.roster)


def test_flipped_bit_is_seen(members: Consortium, asked: bytes):
    """In the signature, in the body and at the end."""
    for at in (0, SIGNATURE_BYTES - 1, SIGNATURE_BYTES, len(asked) - 1):
        spoilt = bytearray(asked)
        spoilt[at] ^= 1
        with pytest.raises(ProtocolError):
            introduction.open_proposal(bytes(spoilt), members.roster)


def test_introduction_does_not_pass_for_a_proposal(members: Consortium, asked: bytes):
    """What a key signs says what it is for."""
    sealed = introduction.seal_introduction(introduced(asked), members.aggregator)
    with pytest.raises(ProtocolError, match="under 'proposal'"):
        introduction.open_proposal(sealed, members.roster)


def test_site_cannot_speak_for_another(members: Consortium, asked: bytes):
    """Nor can a name that the roster does not have."""
    sealed = introduction.seal_introduction(introduced(asked), members.sites["two"])
    with pytest.raises(ProtocolError, match="signature of site 'one'"):
        introduction.open_introduction(sealed, members.roster, asked)
    unknown = introduction.seal_introduction(
        introduced(asked, site="zoe"), members.sites["two"]
    )
    with pytest.raises(ProtocolError, match="'zoe' is not in roster 1"):
        introduction.open_introduction(unknown, members.roster, asked)


def test_site_cannot_promise_for_another(members: Consortium, asked: bytes):
    """Its name is in its promise, too."""
    answer = introduced(asked, privacy=replace(PROMISE, site="two"))
    sealed = introduction.seal_introduction(answer, members.sites["one"])
    with pytest.raises(ProtocolError, match="for another site"):
        introduction.open_introduction(sealed, members.roster, asked)


def test_replayed_introduction_is_refused(members: Consortium, asked: bytes):
    """Every start of a coordinator asks anew, and an old answer is none."""
    sealed = introduction.seal_introduction(introduced(asked), members.sites["one"])
    again = introduction.seal_proposal(
        proposal(small_job(num_sites=1), nonce="01" * 16), members.aggregator
    )
    with pytest.raises(ProtocolError, match="answers a different proposal"):
        introduction.open_introduction(sealed, members.roster, again)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, 2.5])
def test_other_version_says_what_to_install(members: Consortium, version: Any):
    """The signature is right, so it is one of ours, of another release."""
    body = json.dumps({"version": version, "new": "field"})
    with pytest.raises(ProtocolError, match="install the same release"):
        introduction.open_proposal(
            sealed_text(body, members.aggregator), members.roster
        )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"version"',
        '{"version": 2}',
        '{"version": 2, "run_id": 7}',
        '{"version": 2, "run_id": NaN}',
        "[" * 100_000,
    ],
)
def test_malformed_text_is_refused(members: Consortium, text: str):
    """Whatever it is, it is an error that a person can read."""
    with pytest.raises(ProtocolError):
        introduction.open_proposal(
            sealed_text(text, members.aggregator), members.roster
        )
    sealed = sealed_text(text, members.sites["one"], Label.PROMISE)
    with pytest.raises(ProtocolError):
        introduction.open_introduction(sealed, members.roster, b"")


@pytest.mark.parametrize("size", [0, SIGNATURE_BYTES, introduction.MAX_BYTES + 1])
def test_impossible_size_is_refused_unread(members: Consortium, size: int):
    """Before its signature is looked at."""
    with pytest.raises(ProtocolError, match=rf"{size} bytes .*a signed message"):
        introduction.open_proposal(bytes(size), members.roster)
    with pytest.raises(ProtocolError, match=rf"{size} bytes .*a signed message"):
        introduction.open_introduction(bytes(size), members.roster, b"")


def test_body_that_is_not_text_is_refused(members: Consortium):
    """JSON is UTF-8."""
    body = b'{"version": "\xff"}'
    sealed = members.aggregator.sign(Label.PROPOSAL, body) + body
    with pytest.raises(ProtocolError, match="malformed Proposal"):
        introduction.open_proposal(sealed, members.roster)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon_cap": float("nan")},
        {"epsilon_cap": float("inf")},
        {"epsilon_cap": -1.0},
        {"delta": 0.0},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": float("inf")},
        {"sampling_rate": -0.1},
        {"sampling_rate": float("nan")},
        {"steps_per_round": -4},
        {"held_out_noise": float("nan")},
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    members: Consortium, asked: bytes, change: dict[str, float]
):
    """A site's own, honestly signed: they would go into everybody's contract."""
    answer = introduced(asked, privacy=replace(PROMISE, **change))
    sealed = introduction.seal_introduction(answer, members.sites["one"])
    with pytest.raises(ProtocolError, match="site 'one' states impossible numbers"):
        introduction.open_introduction(sealed, members.roster, asked)


@pytest.mark.parametrize("number", [-1, 2**63, 10**400])
def test_number_of_examples_that_cannot_be_is_refused(
    members: Consortium, asked: bytes, number: int
):
    """Zero says that it is not told; and JSON has integers of any size."""
    answer = introduced(asked, num_examples=number, privacy=None)
    sealed = introduction.seal_introduction(answer, members.sites["one"])
    with pytest.raises(ProtocolError, match="impossible number of examples"):
        introduction.open_introduction(sealed, members.roster, asked)


def test_an_agent_reports_the_release_that_it_runs(monkeypatch: pytest.MonkeyPatch):
    """Not one that was installed beside it since it was started."""
    before = introduction.release()
    monkeypatch.setattr(metadata, "version", lambda _: "99.0")
    assert introduction.release() == before
