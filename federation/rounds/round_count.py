"""How many rounds of a run are completed, from its events."""

from collections.abc import Iterable

from federation.events import Event, RoundFinished, RunStarted

# What a round is called after which the model has changed.
COMPLETED = "completed"


def completed_rounds(events: Iterable[Event]) -> int:
    """Count the rounds after which the model changed, each of them once.

    A coordinator that resumes repeats the rounds after its checkpoint: what it says of
    them replaces what the one before it said.

    Args:
        events: Events of all coordinators of one run, in their order.
    """
    completed: set[int] = set()
    for event in events:
        match event:
            case RunStarted(first_round=first):
                completed = {index for index in completed if index < first}
            case RoundFinished(round_index=index, status=status):
                completed |= {index} if status == COMPLETED else set()
            case _:
                pass
    return len(completed)
