"""How a site, or the grid on its behalf, reports that a task has no answer."""

from federation.messages import FailureKind, RoundMessage, SiteFailure
from federation.wire.wire_values import one_line

_RAISE = "raise schedule.round_deadline_seconds if a round takes longer"


def no_answer(seconds: float) -> str:
    """Say that a site has missed the deadline of its task."""
    return f"gave no answer within {round(seconds, 2):g} s: {_RAISE}"


def still_working(round_index: int) -> str:
    """Say that a site works on a task of an earlier round."""
    return f"is still working on round {round_index}: {_RAISE}"


def failure(about: RoundMessage, kind: FailureKind, text: str) -> SiteFailure:
    """Say why a task has no result, or why an answer does not count.

    Any text is made safe to send.
    """
    return SiteFailure(
        run_id=about.run_id,
        round_index=about.round_index,
        site=about.site,
        kind=kind,
        message=one_line(text),
    )
