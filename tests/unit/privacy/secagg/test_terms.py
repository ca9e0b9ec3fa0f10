"""What a contract says of differential privacy: one spelling, no contradiction."""

import dataclasses
import math
from typing import Any

import pytest
from support.secagg_parties import RECORD

from privacy.secagg.agreement.canonical import Reader, lp
from privacy.secagg.agreement.message import read_record, write_record
from privacy.secagg.agreement.terms import NO_PRIVACY, PROFILES, PrivacyTerms
from privacy.secagg.errors import MalformedMessage

JOINT = dataclasses.replace(
    RECORD, profile="joint", steps_per_round=1, ring_noise_std=4.0
)
SITE = dataclasses.replace(RECORD, profile="site", ring_noise_std=4.0)
PERSON = dataclasses.replace(RECORD, profile="person")
TERMS = {
    "none": NO_PRIVACY,
    "record": RECORD,
    "person": PERSON,
    "joint": JOINT,
    "site": SITE,
}
TAG = b"test/terms"


def _read(data: bytes) -> PrivacyTerms:
    reader = Reader(lp(TAG) + data, TAG)
    terms: PrivacyTerms = read_record(PrivacyTerms, reader)
    reader.end()
    return terms


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_can_be_said_and_read(profile: str):
    """Without a fault, and back to the same terms."""
    terms = TERMS[profile]
    assert list(terms.faults()) == []
    assert terms == _read(write_record(terms))


def test_cut_terms_are_refused():
    """Whatever is missing."""
    data = write_record(RECORD)
    for end in range(len(data)):
        with pytest.raises(MalformedMessage):
            _read(data[:end])


@pytest.mark.parametrize(
    ("key", "terms", "changes"),
    [
        ("profile", NO_PRIVACY, {"profile": "user"}),
        ("profile", NO_PRIVACY, {"mechanism": "dp-sgd"}),
        ("profile", NO_PRIVACY, {"epsilon_cap": 1.0}),
        ("profile", RECORD, {"profile": "none"}),
        ("mechanism", RECORD, {"mechanism": ""}),
        ("mechanism", RECORD, {"mechanism": "x" * 65}),
        ("noise_multiplier", RECORD, {"noise_multiplier": 0.0}),
        ("noise_multiplier", RECORD, {"noise_multiplier": math.inf}),
        ("sampling_rate", RECORD, {"sampling_rate": 0.0}),
        ("sampling_rate", RECORD, {"sampling_rate": 1.01}),
        ("steps_per_round", RECORD, {"steps_per_round": 0}),
        ("delta", RECORD, {"delta": 0.0}),
        ("delta", RECORD, {"delta": 1.0}),
        ("epsilon_cap", RECORD, {"epsilon_cap": 0.0}),
        ("epsilon_cap", RECORD, {"epsilon_cap": math.nan}),
        ("epsilon_cap", RECORD, {"epsilon_cap": math.inf}),
        ("clip_norm", RECORD, {"clip_norm": -1.0}),
        ("ring_noise_std", RECORD, {"ring_noise_std": 4.0}),
        ("ring_noise_std", SITE, {"ring_noise_std": -1.0}),
        ("ring_noise_std", JOINT, {"ring_noise_std": 0.0}),
        ("steps_per_round", JOINT, {"steps_per_round": 2}),
    ],
)
def test_contradiction_is_named(key: str, terms: PrivacyTerms, changes: dict[str, Any]):
    """By the attribute that is wrong."""
    faults = list(dataclasses.replace(terms, **changes).faults())
    assert [key] == [name for name, _ in faults]


def test_no_privacy_is_infinite_epsilon():
    """So that a policy with any number refuses it."""
    assert (math.inf, 1.0) == (NO_PRIVACY.largest_epsilon, NO_PRIVACY.largest_delta)
    assert (RECORD.largest_epsilon, RECORD.largest_delta) == (4.0, 1e-6)
