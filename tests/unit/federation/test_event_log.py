"""Events survive the way through a file; torn and foreign lines are told apart."""

import dataclasses
import json
import math
import resource
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from support import event_samples
from support.examples import few

from federation.errors import CorruptObject, RunNotFound, StoreUnavailable
from federation.event_log import KINDS, EventWriter, from_line, read_events, to_line
from federation.events import Event, RoundFinished, SiteFailed, Warned
from federation.messages import MetricSums

pytestmark = pytest.mark.slow

WARNED = Warned(at=1.5, message="low disk")


def _write(path: Path, *events: Event) -> None:
    with EventWriter(path) as emit:
        for event in events:
            emit(event)


@pytest.mark.parametrize(
    "events",
    [
        event_samples.two_sites(3),
        event_samples.troubled(),
        event_samples.resumed(),
        event_samples.language(2),
        event_samples.secure(),
    ],
    ids=["quiet", "troubled", "resumed", "language", "secure"],
)
def test_runs_round_trip(tmp_path: Path, events: list[Event]):
    """What a coordinator emits is what a reader gets, types included."""
    _write(tmp_path / "events.jsonl", *events)
    assert events == read_events(tmp_path / "events.jsonl")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@few(15)
@given(data=st.data())
def test_any_value_round_trips(kind: type[Event], data: st.DataObject):
    """Every event class survives with whatever its fields may hold."""
    event = data.draw(st.from_type(kind))
    line = to_line(event)
    again = from_line(line)
    assert type(event) is type(again)
    assert line == to_line(again)  # NaN is not equal to itself; its line is


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")],
)
def test_numbers_that_json_lacks_are_strings(value: float, text: str):
    """Non-finite floats are valid JSON in the file and floats again after it."""
    line = to_line(Warned(at=value, message=text))
    record = json.loads(line, parse_constant=pytest.fail)
    assert text == record["at"]
    again = from_line(line)
    assert repr(value) == repr(again.at)
    assert text == again.message


@given(cut=st.integers(min_value=1, max_value=1000))
def test_torn_last_line_is_left_out(cut: int, tmp_path_factory: pytest.TempPathFactory):
    """A writer killed at any byte costs at most the event it was writing."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    first, last = event_samples.two_sites(1)[:2]
    whole = (to_line(first) + "\n" + to_line(last)).encode()
    path.write_bytes(whole[: max(len(to_line(first)) + 1, len(whole) - cut)])
    assert [first] == read_events(path)


@pytest.mark.parametrize(
    ("end", "expected"),
    [('{"event": "War', 2), (to_line(WARNED), 3), ('{"event": "' + 200_000 * "x", 2)],
    ids=["torn", "whole", "longer than a block"],
)
def test_append_starts_on_a_fresh_line(tmp_path: Path, end: str, expected: int):
    """A resumed writer removes a torn line and finishes a whole one."""
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(WARNED) + "\n" + end)
    _write(path, WARNED)
    assert [WARNED] * expected == read_events(path)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_newer_kinds_and_fields_are_passed_over(tmp_path: Path):
    """A log of a newer version can be read as far as this one understands it."""
    path = tmp_path / "events.jsonl"
    newer = {**json.loads(to_line(WARNED)), "severity": {"level": 3}}
    lines = [{"event": "PrivacySpent", "epsilon": 1.0}, newer]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_events(path) == [WARNED]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", 'not an object with a string "event"'),
        ('{"event": 3}', 'not an object with a string "event"'),
        ('{"event": "Warned", "at": 1.0}', "Warned has no 'message'"),
        ('{"event": "Warned", "at": "soon", "message": ""}', "'soon', not a number"),
        ('{"event": "Warned", "at": true, "message": ""}', "True, not a number"),
        ('{"event": "Warned", "at": NaN, "message": ""}', "NaN is not JSON"),
        ('{"event": "Warned", "at": 1' + "0" * 400 + ', "message": ""}', "a float"),
        ('{"event": "Warned", "at": 1.0, "message": null}', "None, not a string"),
        (
            '{"event": "RoundStarted", "at": 1, "round_index": 1.5, "cohort": []}',
            "RoundStarted.round_index is 1.5, not a whole number",
        ),
        (
            '{"event": "RoundStarted", "at": 1, "round_index": 1, "cohort": "ab"}',
            "RoundStarted.cohort is 'ab', not a list",
        ),
        (
            '{"event": "RoundStarted", "at": 1, "round_index": 1, "cohort": [1]}',
            r"RoundStarted.cohort\[0\] is 1, not a string",
        ),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, line: str, reason: str):
    """A line that no version would write is an error with its place."""
    path = tmp_path / "events.jsonl"
    path.write_text(f"{to_line(WARNED)}\n{line}\n")
    with pytest.raises(CorruptObject, match=rf"events.jsonl, line 2: .*{reason}"):
        read_events(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "bored"}, "'bored', not a FailureKind"),
        ({"kind": ["late"]}, r"\['late'\], not a FailureKind"),
    ],
)
def test_unknown_members_are_refused(change: dict[str, object], reason: str):
    """An enum's value must be one that this version knows."""
    events = event_samples.troubled()
    failed = next(e for e in events if isinstance(e, SiteFailed))
    record = {**json.loads(to_line(failed)), **change}
    with pytest.raises(ValueError, match=reason):
        from_line(json.dumps(record))


def test_nested_shapes_are_checked():
    """Pairs have two items and records are objects."""
    finished = next(
        e for e in event_samples.two_sites(1) if isinstance(e, RoundFinished)
    )
    record = json.loads(to_line(finished))
    with pytest.raises(ValueError, match=r"failed\[0\] is .*, not a list of 2"):
        from_line(json.dumps({**record, "failed": [["late"]]}))
    with pytest.raises(ValueError, match=r"training is 3, not an object"):
        from_line(json.dumps({**record, "training": 3}))


def test_missing_log_says_so(tmp_path: Path):
    """No file is no run."""
    with pytest.raises(RunNotFound, match="is no event log"):
        read_events(tmp_path / "events.jsonl")


def test_full_disk_is_a_store_error():
    """An event that could not be written is not lost in silence."""
    with (
        EventWriter(Path("/dev/full")) as emit,
        pytest.raises(StoreUnavailable, match="No space left"),
    ):
        emit(WARNED)


def test_line_that_did_not_fit_leaves_no_half(tmp_path: Path):
    """Once there is room again, the log continues with whole lines."""
    path = tmp_path / "events.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventWriter(path) as emit:
        emit(WARNED)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
            with pytest.raises(StoreUnavailable):
                emit(WARNED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        emit(WARNED)
    assert read_events(path) == [WARNED, WARNED]


def test_events_hold_only_what_the_log_can_rebuild():
    """Every field of every event has a type that reading knows."""
    for kind in KINDS.values():
        fields = {field.name for field in dataclasses.fields(kind)}
        assert "event" not in fields
        assert "at" in fields


def test_metrics_lie_beside_the_loss():
    """The number of right predictions is one of them."""
    line = (
        '{"event": "RoundFinished", "at": 1.0, "round_index": 1, '
        '"status": "completed", '
        '"asked": [], "answered": [], "failed": [], "training": {"count": 4, '
        '"loss_sum": 1.5, "correct": 3, "absolute_error": 0.5, "far": "Infinity"}, '
        '"bytes_down": 0, "bytes_up": 0, "seconds": 1.0, "phases": [], '
        '"update_norm": null, "update_clip": null, "epsilon": null}'
    )
    event = from_line(line)
    assert isinstance(event, RoundFinished)
    assert event.training is not None
    assert event.training.metrics == {
        "correct": 3,
        "absolute_error": 0.5,
        "far": math.inf,
    }
    assert json.loads(to_line(event))["training"] == json.loads(line)["training"]


@pytest.mark.parametrize("name", ["count", "loss_sum", "metrics", "metrics.count"])
def test_a_metric_may_have_the_name_of_a_field(name: str):
    """No job can name one so, but a log that holds one must be readable."""
    sums = MetricSums(count=4, loss_sum=1.5, metrics={name: 0.5, "correct": 3})
    finished = next(
        e for e in event_samples.two_sites(1) if isinstance(e, RoundFinished)
    )
    event = dataclasses.replace(finished, training=sums)
    assert from_line(to_line(event)) == event
