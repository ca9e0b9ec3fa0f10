"""How many rounds of a run are completed."""

from dataclasses import replace

from support import event_samples

from federation.events import RoundFinished
from federation.rounds.round_sums import completed_rounds


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
