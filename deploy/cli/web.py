"""The live page of runs, served while a verb works: ``--web``."""

import argparse
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.terminal import tell
from federation.errors import FederationError

if TYPE_CHECKING:
    from monitoring.runs.run_folder import RunFolder
    from monitoring.web.app import Action, Shown

MAX_CONNECTIONS = 64
LAST_LOOK_SECONDS = 2.5  # For browsers to get how the run ended.


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
    import uvicorn  # noqa: PLC0415 -- keeps `--help` fast

    from monitoring.web.app import live_app  # noqa: PLC0415 -- imports much

    token = secrets.token_urlsafe(32)
    with _listening(options.port) as (listener, port):
        app = live_app(
            _shown(root, run, actions), token=token, port=port, clock=options.clock
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(
            target=server.run, args=([listener],), name="web", daemon=True
        )
        thread.start()
        place = "" if run is None else f"runs/{run.path.name}"
        tell(f"live page: http://127.0.0.1:{port}/{place}?token={token}")
        try:
            yield
        finally:
            if server.server_state.connections:
                options.clock.sleep(LAST_LOOK_SECONDS)
            server.should_exit = True
            thread.join(timeout=5)


@contextmanager
def _listening(port: int) -> Iterator[tuple[socket.socket, int]]:
    """A socket that listens on the loopback interface, and its port; 0: a free one."""
    with contextlib.closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()  # A browser may be faster than the server's thread.
        except OSError as error:
            raise FederationError(
                f"cannot serve the live page on port {port}: {error.strerror}; give "
                "--port another number, or leave it out for a free one"
            ) from error
        yield listener, listener.getsockname()[1]


def _shown(
    root: Path, run: "RunFolder | None", actions: Mapping[str, "Action"]
) -> "Shown":
    from deploy.tools.runs import summary  # noqa: PLC0415 -- imports much
    from monitoring.runs.find import find_runs  # noqa: PLC0415
    from monitoring.web.app import Shown  # noqa: PLC0415 -- imports much

    def all_runs() -> dict[str, "RunFolder"]:
        found = {each.path.name: each for each in find_runs(root)}
        return found if run is None else {**found, run.path.name: run}

    return Shown(
        rows=lambda: [summary(each) for each in all_runs().values()],
        find=lambda name: all_runs().get(name),
        actions=actions,
    )


def stop_once(ask: Callable[[], None]) -> "Action":
    """The action ``stop`` of the only run that goes on here."""
    asked = threading.Event()

    def stop(_: "RunFolder") -> None:
        # A second signal would end the process at once.
        if not asked.is_set():
            asked.set()
            ask()

    return stop
