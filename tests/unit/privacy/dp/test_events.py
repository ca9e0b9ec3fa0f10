"""Events refuse what no mechanism does, and have one spelling."""

import math

import pytest

from privacy.dp.events import MAX_STEPS, PrivacyEvent, total_slack

EVENT = PrivacyEvent(noise_multiplier=1.1, sampling_rate=0.02, steps=20, slack=1e-18)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", 0.0),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.inf),
        ("noise_multiplier", math.nan),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.01),
        ("sampling_rate", math.nan),
        ("steps", -1),
        ("steps", MAX_STEPS + 1),
        ("slack", -1e-9),
        ("slack", 1.0),
        ("slack", math.nan),
    ],
)
def test_out_of_range_is_refused(name: str, value: float):
    """The message names the value."""
    with pytest.raises(ValueError, match=name):
        PrivacyEvent.parse(EVENT.document() | {name: value})


def test_documents_come_back():
    """What was written is what is read, whole numbers or not."""
    whole = PrivacyEvent(noise_multiplier=1, sampling_rate=1, steps=3, slack=0)
    for event in (EVENT, whole):
        assert PrivacyEvent.parse(event.document()) == event
    assert type(whole.document()["sampling_rate"]) is float


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        EVENT.document() | {"more": 1.0},
        EVENT.document() | {"steps": True},
        EVENT.document() | {"steps": 2.0},
        EVENT.document() | {"noise_multiplier": "1"},
    ],
)
def test_other_documents_are_refused(document: object):
    """Neither more nor less, and of the right kinds."""
    with pytest.raises(ValueError, match="event"):
        PrivacyEvent.parse(document)


def test_slack_adds_up_over_steps():
    """A union bound."""
    assert total_slack((EVENT, EVENT)) == pytest.approx(4e-17)
