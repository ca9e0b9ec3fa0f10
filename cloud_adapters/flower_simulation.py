"""A run on Flower's own simulation engine, Ray, without any daemon.

Nothing of Flower or Ray is imported before it is used: they are an extra. Both are
kept from calling home, from logging to the terminal and from leaving processes or
files behind.
"""

import importlib.util
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from federation.errors import FederationError, JobError
from federation.ids import SiteId
from federation.protocols import Clock, Grid

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid as FlowerApi

    from cloud_adapters.flower_site import HandlerFor

T = TypeVar("T")

# How long the server's thread may take to notice that Flower has ended.
END_SECONDS = 10.0

# Read by Flower and Ray when they are imported, and by Ray's processes.
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_DEDUP_LOGS": "0",
}


def run_on_flower_simulation(
    server: Callable[[Grid], T],
    handler_for: "HandlerFor",
    *,
    sites: Sequence[SiteId],
    job_text: str,
    clock: Clock,
    workers: int = 1,
    cpus_per_site: int = 1,
    gpus_per_site: float = 0.0,
) -> T:
    """Run a server against simulated sites in Ray's processes.

    Args:
        server: Called once, in a thread of this process, with the grid; what it
            returns or raises is returned or raised here.
        handler_for: See ``flower_site.client_app``; called in Ray's processes.
        sites: In the order of the job.
        job_text: Handed to ``handler_for``.
        clock: Measures deadlines and durations.
        workers: Sites that work at the same time, each in a process.
        cpus_per_site: Threads of arithmetic in each process.
        gpus_per_site: Part of a GPU that each process gets; without one it sees
            none.

    Raises:
        JobError: Flower is not installed.
        FederationError: Flower's engine failed.
    """
    with ExitStack() as stack:
        threads = str(cpus_per_site)
        stack.enter_context(_environment({**_QUIET, "OMP_NUM_THREADS": threads}))
        _require_flower()
        stack.enter_context(_silenced("flwr", "ray"))
        folder = stack.enter_context(_ray_folder())
        return _run(
            _Server(
                server,
                sites=sites,
                job_text=job_text,
                clock=clock,
                max_in_flight=workers,
            ),
            handler_for,
            backend={
                "init_args": {
                    # A cluster of our own, whatever RAY_ADDRESS says.
                    "address": "local",
                    "num_cpus": workers * cpus_per_site,
                    "include_dashboard": False,
                    "log_to_driver": False,
                    "logging_level": logging.CRITICAL,
                    **folder,
                },
                "client_resources": {
                    "num_cpus": cpus_per_site,
                    "num_gpus": gpus_per_site,
                },
            },
            threads=cpus_per_site,
        )


class _Server(Generic[T]):
    """The server as Flower's thread runs it, and what came of it."""

    def __init__(
        self,
        server: Callable[[Grid], T],
        *,
        sites: Sequence[SiteId],
        job_text: str,
        clock: Clock,
        max_in_flight: int,
    ) -> None:
        self.server = server
        self.sites = sites
        self.job_text = job_text
        self.clock = clock
        self.max_in_flight = max_in_flight
        self.flower_ended = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self.results: list[T] = []
        self.error: BaseException | None = None

    def main(self, api: "FlowerApi", context: "Context") -> None:  # noqa: ARG002
        """Run the server; Flower calls this."""
        from cloud_adapters.flower_grid import FlowerGrid  # noqa: PLC0415

        self.idle.clear()
        try:
            grid = FlowerGrid(
                api,
                self.sites,
                job_text=self.job_text,
                clock=self.clock,
                ordered=True,
                max_in_flight=self.max_in_flight,
                stopped=self.flower_ended.is_set,
            )
            self.results.append(self.server(grid))
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.idle.set()


def _run(
    server: _Server[T],
    handler_for: "HandlerFor",
    *,
    backend: Mapping[str, object],
    threads: int,
) -> T:
    from flwr.serverapp import ServerApp  # noqa: PLC0415

    # Private in name only: deprecated in favour of `flwr run`, which starts a daemon
    # and takes neither closures nor results. tests/contract/test_grid.py watches it.
    from flwr.simulation import run_simulation  # noqa: PLC0415

    from cloud_adapters.flower_site import client_app  # noqa: PLC0415

    app = ServerApp()
    app.main()(server.main)
    try:
        run_simulation(
            server_app=app,
            client_app=client_app(handler_for, threads=threads),
            num_supernodes=len(server.sites),
            backend_config=dict(backend),
        )
    except RuntimeError as error:
        if server.error is None:
            raise FederationError(
                f"Flower's simulation engine failed: {error.__cause__ or error}"
            ) from error
    finally:
        # The server's thread must not wait for answers that cannot come.
        server.flower_ended.set()
        server.idle.wait(END_SECONDS)
    if server.error is not None:
        raise server.error
    return server.results[0]


def _require_flower() -> None:
    missing = [n for n in ("flwr", "ray") if importlib.util.find_spec(n) is None]
    if missing:
        raise JobError(
            f"the Flower engine needs {' and '.join(missing)}, which this "
            'installation lacks: pip install "crossfed[flower]"'
        )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while; also undo Flower's change of PYTHONPATH."""
    names = {*values, "PYTHONPATH"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _silenced(*names: str) -> Iterator[None]:
    """Keep libraries off the terminal; what matters of it is raised or replied."""
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, (level, disabled) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.disabled = disabled


@contextmanager
def _ray_folder() -> Iterator[Mapping[str, str]]:
    """Give Ray a folder for its sockets and logs that goes away afterwards."""
    with tempfile.TemporaryDirectory(
        prefix="crossfed-", ignore_cleanup_errors=True
    ) as folder:
        yield {"_temp_dir": folder}
