"""The table of what events may reveal: complete, and obeyed."""

import dataclasses
import itertools
from typing import get_args, get_type_hints

import pytest
from support import event_samples

from federation.event_log import from_line, to_line
from federation.events import Event, RoundFinished, SiteAnswered
from federation.job import disclosure
from federation.job.disclosure import Exposure, Form, conceal, hidden

SETTINGS = [
    Exposure(private=private, secure=secure, deployed=deployed)
    for private, secure, deployed in itertools.product((False, True), repeat=3)
]
OPEN, *_ = SETTINGS


def test_every_field_of_an_event_has_one_row() -> None:
    """Whoever adds a field says what it may reveal."""
    for kind in get_args(Event):
        rows = disclosure.TABLE.get(kind.__name__, {}).values()
        listed = sorted(name for names in rows for name in names.split())
        assert listed == sorted(each.name for each in dataclasses.fields(kind)), kind


def test_every_field_inside_an_event_is_judged() -> None:
    """A part that several events share is in the table as well."""
    found: dict[str, list[str]] = {}

    def walk(hint: object) -> None:
        for inner in get_args(hint):
            walk(inner)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            names = [field.name for field in dataclasses.fields(hint)]
            found[hint.__name__] = sorted(names)
            for inner in get_type_hints(hint).values():
                walk(inner)

    walk(Event)
    parts = {
        kind: names for kind, names in found.items() if kind not in disclosure.TABLE
    }
    assert parts == {k: sorted(names.split()) for k, names in disclosure.PARTS.items()}


def test_table_names_no_other_events() -> None:
    """A row of an event that is gone is gone."""
    assert set(disclosure.TABLE) == {kind.__name__ for kind in get_args(Event)}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_concealed_events_can_be_written_and_read(setting: Exposure) -> None:
    """An empty field is one that the event log knows."""
    for event in (*event_samples.two_sites(2), *event_samples.troubled()):
        left = conceal(event, setting)
        for name in hidden(type(event).__name__, setting):
            assert getattr(left, name) in {None, ()}
        assert from_line(to_line(left)) == left or "NaN" in to_line(left)


def test_nothing_is_concealed_in_an_open_simulation() -> None:
    """Its user holds all the data."""
    assert not any(hidden(kind, OPEN) for kind in disclosure.TABLE)


def test_what_settings_hide_of_an_answer() -> None:
    """By hand, from the threat model."""
    private = Exposure(private=True, secure=False, deployed=False)
    secure = Exposure(private=False, secure=True, deployed=False)
    own = {"num_examples", "training"}
    work = {"num_steps", "weight", "evaluation"}
    times = {"phases", "resources"}  # They grow with the batches that are drawn.
    assert hidden("SiteAnswered", private) == own | times
    assert hidden("SiteAnswered", secure) == own | work | times
    assert hidden("RoundFinished", private) == {"training"}
    assert hidden("RoundFinished", secure) == set()
    assert hidden("ModelEvaluated", secure) == {"by_site"}
    deployed = Exposure(private=False, secure=False, deployed=True)
    for setting in (deployed, private):
        assert hidden("DataDistributed", setting) == {"shares"}
    assert hidden("DataDistributed", secure) == set()


def test_strictest_of_several_settings_counts() -> None:
    """Sums would do under secure aggregation, but not under differential privacy."""
    both = Exposure(private=True, secure=True, deployed=False)
    assert disclosure.LOSSES.allowed(both) is Form.NEVER


def test_samples_hold_what_is_concealed() -> None:
    """Or the tests above would conceal nothing."""
    samples = event_samples.two_sites(2)
    answered = next(e for e in samples if isinstance(e, SiteAnswered))
    assert answered.training is not None
    assert answered.num_examples
    finished = next(e for e in samples if isinstance(e, RoundFinished))
    assert finished.training is not None
