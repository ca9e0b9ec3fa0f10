"""The live page of runs, served while a verb works: ``--web``."""

import argparse
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deploy.cli.terminal import tell
from federation.errors import FederationError

if TYPE_CHECKING:
    from monitoring.runs.run_folder import RunFolder
    from monitoring.web.app import Action, Shown


@contextmanager
def live_page(
    options: argparse.Namespace,
    pages: Callable[[], "Shown"],
    *,
    run: "RunFolder | None" = None,
) -> Iterator[None]:
    """Serve the page while the context lasts, if ``--web`` asks for it.

    Args:
        options: Those of the verb.
        pages: Returns what they show; called if they are asked for.
        run: The run to begin with; by default the list of all runs.

    Raises:
        FederationError: The port is taken.
    """
    if not options.web:
        yield
        return
    from deploy.web_server import serving  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.web.app import live_app  # noqa: PLC0415 -- imports much

    token = secrets.token_urlsafe(32)
    shown = pages()
    with serving(
        lambda port: live_app(shown, token=token, port=port, clock=options.clock),
        options.port,
        clock=options.clock,
    ) as port:
        place = "" if run is None else f"runs/{run.path.name}"
        tell(f"live page: http://127.0.0.1:{port}/{place}?token={token}")
        yield


def stop_once(mine: "RunFolder", ask: Callable[[], None]) -> "Action":
    """The action ``stop`` of the only run that goes on here."""
    asked = threading.Event()

    def stop(run: "RunFolder") -> None:
        if run != mine:
            raise FederationError("this page can stop only the run that it began with")
        # A second signal would end the process at once.
        if not asked.is_set():
            asked.set()
            ask()

    return stop
