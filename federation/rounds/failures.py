"""How a site, or the grid on its behalf, reports that a task has no answer."""

from federation.messages import FailureKind, RoundMessage, SiteFailure
from federation.wire.wire_values import one_line


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
