"""How a site, or the grid on its behalf, says that no answer to a task will come."""

from typing import Protocol

from federation.ids import RunId, SiteId
from federation.messages import FailureKind, SiteFailure
from federation.wire.wire_values import one_line


class About(Protocol):
    """What a failure may be about: a task, or an answer that does not count."""

    @property
    def run_id(self) -> RunId:
        """The run."""
        ...

    @property
    def round_index(self) -> int:
        """The round."""
        ...

    @property
    def site(self) -> SiteId:
        """Who was asked."""
        ...


def failure(about: About, kind: FailureKind, text: str) -> SiteFailure:
    """Say why nothing comes of a task; any text is made fit to travel."""
    return SiteFailure(
        run_id=about.run_id,
        round_index=about.round_index,
        site=about.site,
        kind=kind,
        message=one_line(text),
    )
