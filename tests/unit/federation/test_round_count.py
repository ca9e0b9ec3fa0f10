"""How many rounds of a run are completed."""

from dataclasses import replace

from support import event_samples

from federation.events import Event, RoundFinished
from federation.rounds.round_sums import completed_rounds
from monitoring.views.run_fold import RunFold


def _view(events: list[Event]) -> int:
    fold = RunFold()
    for event in events:
        fold.add(event)
    return sum(row.status == "completed" for row in fold.view().rounds)


def test_repeated_rounds_count_once():
    """A coordinator that resumes repeats what came after its checkpoint."""
    events = event_samples.resumed()
    finished = [event for event in events if isinstance(event, RoundFinished)]
    assert len({event.round_index for event in finished}) < len(finished)
    assert completed_rounds(events) == len({event.round_index for event in finished})


def test_a_round_without_a_result_does_not_count():
    """Also where an earlier coordinator had one."""
    events = event_samples.two_sites(3)
    lost = [
        replace(event, status="lost")
        if isinstance(event, RoundFinished) and event.round_index == 2
        else event
        for event in events
    ]
    assert completed_rounds(lost) == 2
    assert completed_rounds([*events, *lost]) == 2


def test_it_is_the_number_of_the_report():
    """``ps`` and the report of the same run agree."""
    for events in (
        event_samples.two_sites(),
        event_samples.troubled(),
        event_samples.resumed(),
    ):
        for end in range(1, len(events) + 1):
            assert completed_rounds(events[:end]) == _view(events[:end])


def test_nothing_has_no_rounds():
    """Before the first coordinator has begun."""
    assert completed_rounds([]) == 0
