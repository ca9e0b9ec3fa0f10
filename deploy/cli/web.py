"""The live page of runs, served while a verb works: ``--web``."""

import argparse
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.terminal import tell

if TYPE_CHECKING:
    from monitoring.runs.run_folder import RunFolder
    from monitoring.web.app import Action


@contextmanager
def live_page(
    options: argparse.Namespace,
    root: Path,
    actions: Mapping[str, "Action"],
    *,
    run: "RunFolder | None" = None,
) -> Iterator[None]:
    """Serve the page while the context lasts, if ``--web`` asks for it.

    Args:
        options: Those of the verb.
        root: Folder of all runs.
        actions: What the page may do with a run that goes on.
        run: The run to begin with, which may be outside ``root`` and not begun; by
            default the list of all runs.

    Raises:
        FederationError: The port is taken.
    """
    if not options.web:
        yield
        return
    from deploy.aggregator_host.run_list import shown  # noqa: PLC0415 -- imports much
    from deploy.web_server import serving  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.web.app import live_app  # noqa: PLC0415 -- imports much

    token = secrets.token_urlsafe(32)
    pages = shown(root, actions, run)
    with serving(
        lambda port: live_app(pages, token=token, port=port, clock=options.clock),
        options.port,
        clock=options.clock,
    ) as port:
        place = "" if run is None else f"runs/{run.path.name}"
        tell(f"live page: http://127.0.0.1:{port}/{place}?token={token}")
        yield


def stop_once(ask: Callable[[], None]) -> "Action":
    """The action ``stop`` of the only run that goes on here."""
    asked = threading.Event()

    def stop(_: "RunFolder") -> None:
        # A second signal would end the process at once.
        if not asked.is_set():
            asked.set()
            ask()

    return stop
