"""A run on Flower's own simulation engine, Ray, without any daemon.

Nothing of Flower or Ray is imported before it is used: they are an extra. Both are
kept from calling home, from logging to the terminal and from leaving processes or
files behind.
"""

import gc
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cloud_adapters.extras import naming_extras
from federation.errors import FederationError
from federation.ids import SiteId
from federation.protocols import Clock, Grid

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid as FlowerApi

    from cloud_adapters.flower.site import HandlerFor

T = TypeVar("T")

# How long Ray's processes may take to import what sites need, on a busy machine.
START_SECONDS = 600.0
# How long the server's thread may take to notice that Flower has ended.
END_SECONDS = 10.0

# Ray's socket names add 80 characters to a path, and 107 are the most.
MAX_PARENT_CHARS = 20

# Read by Flower and Ray when they are imported, and by Ray's processes.
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Sites see the GPUs that this process sees, as in the in-process engine.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
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
        gpus_per_site: Part of a GPU that each process reserves; with 0 they share
            every GPU that there is.

    Raises:
        MissingExtra: Flower or Ray is not installed.
        FederationError: Flower's engine failed.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_short_folder())
        environment = {
            **_QUIET,
            "FLWR_HOME": folder,
            # What Ray's processes leave among temporary files is removed with it.
            "TMPDIR": folder,
            "OMP_NUM_THREADS": str(cpus_per_site),
            # Ray's processes import what this process can import.
            "PYTHONPATH": os.pathsep.join(sys.path),
            # Ray puts the working folder before all that; see the package crossfed.
            "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "crossfed._rooms.come_first",
        }
        stack.enter_context(_environment(environment))
        import_flower()
        from cloud_adapters.flower.site import client_app  # noqa: PLC0415

        stack.enter_context(_silenced("flwr", "ray"))
        stack.enter_context(_ray(workers * cpus_per_site, folder))
        return _run(
            _ServerRun(
                server,
                sites=sites,
                job_text=job_text,
                clock=clock,
                workers=workers,
            ),
            client_app(handler_for, threads=cpus_per_site),
            # Flower hands these to Ray as an actor's options. Without the last one a
            # process that dies would fail every later task.
            resources={
                "num_cpus": cpus_per_site,
                "num_gpus": gpus_per_site,
                "max_restarts": -1,
            },
        )


@dataclass(eq=False)
class _ServerRun(Generic[T]):
    """The server in Flower's thread, and its result."""

    server: Callable[[Grid], T]
    _: KW_ONLY
    sites: Sequence[SiteId]
    job_text: str
    clock: Clock
    workers: int

    def __post_init__(self) -> None:
        """Start nothing yet."""
        self.flower_ended = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self.results: list[T] = []
        self.error: BaseException | None = None

    def main(self, api: "FlowerApi", context: "Context") -> None:  # noqa: ARG002
        """Run the server; Flower calls this."""
        from cloud_adapters.flower.grid import Delivery, FlowerGrid  # noqa: PLC0415
        from cloud_adapters.flower.handshake import Attendance  # noqa: PLC0415

        self.idle.clear()
        try:
            grid = FlowerGrid(
                api,
                self.sites,
                clock=self.clock,
                attendance=Attendance(connect_seconds=START_SECONDS),
                delivery=Delivery(
                    job_text=self.job_text, ordered=True, workers=self.workers
                ),
                stopped=self.flower_ended.is_set,
            )
            self.results.append(self.server(grid))
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.idle.set()


def _run(
    server: _ServerRun[T], app: "ClientApp", *, resources: dict[str, int | float]
) -> T:
    from flwr.serverapp import ServerApp  # noqa: PLC0415

    # Deprecated in favour of `flwr run`, which starts a daemon and takes neither
    # closures nor results. tests/contract/test_grid.py watches it.
    from flwr.simulation import run_simulation  # noqa: PLC0415

    server_app = ServerApp()
    server_app.main()(server.main)
    try:
        run_simulation(
            server_app=server_app,
            client_app=app,
            num_supernodes=len(server.sites),
            backend_config={"client_resources": {**resources}},
        )
    except RuntimeError as error:
        if server.error is None:
            raise FederationError(
                f"Flower's simulation engine failed: {_origin(error)}"
            ) from error
    finally:
        # The server's thread must not wait for answers that cannot come.
        server.flower_ended.set()
        server.idle.wait(END_SECONDS)
    if server.error is not None:
        raise server.error
    return server.results[0]


@contextmanager
def _ray(num_cpus: int, folder: str) -> Iterator[None]:
    """Start Ray here, before the server's clock runs; Flower uses what it finds."""
    import ray  # noqa: PLC0415

    if ray.is_initialized():
        raise FederationError(
            "Ray already runs in this process, and Flower's simulation engine starts "
            "its own: call ray.shutdown() first, or simulate with engine inproc"
        )
    from ray._private import worker  # noqa: PLC0415 -- only for the next line

    # Deaths of processes would be printed on standard output, which is for data;
    # the grid reports them. Ray's own debugger uses this switch.
    worker._worker_logs_enabled = False  # noqa: SLF001
    with warnings.catch_warnings():
        # Ray leaves closing its files and children to the interpreter.
        for message in ("unclosed file .*/dev/null", "subprocess .* still running"):
            warnings.filterwarnings("ignore", message, ResourceWarning)
        try:
            with _signals_kept(), _few_processes():
                try:
                    ray.init(
                        address="local",  # Of our own, whatever RAY_ADDRESS says.
                        num_cpus=num_cpus,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.CRITICAL,
                        _temp_dir=folder,
                    )
                # Ray raises bare exceptions, for instance on a busy machine.
                except Exception as error:
                    _end_what_started(error)
                    raise FederationError(
                        f"Ray, which runs Flower's simulation engine, did not start: "
                        f"{error}; if the processors are busy, try again later, or "
                        f"simulate with engine inproc"
                    ) from error
            yield
        finally:
            ray.shutdown()
            # What Ray left open must go here, where its warnings are expected, and
            # not at some later moment of the caller's.
            gc.collect()
            worker._worker_logs_enabled = True  # noqa: SLF001


def _end_what_started(error: BaseException) -> None:
    """End Ray's processes if it failed among them: ``ray.shutdown`` does not know them.

    Otherwise they last as long as this process, and write to a folder that is gone.
    """
    node = importlib.import_module("ray._private.node")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = frame.f_locals.get("self")
        if isinstance(found, node.Node):
            found.kill_all_processes(check_alive=False, wait=True)


def import_flower() -> None:
    """Import Flower and Ray without their deprecation warnings.

    Raises:
        MissingExtra: They are not installed.
    """
    with naming_extras(), _environment(_QUIET), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in ("flwr.serverapp", "flwr.simulation", "ray"):
            importlib.import_module(name)


def _origin(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while; one that Ray adds is removed with them."""
    names = {*values, "PYTHONBREAKPOINT"}
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
def _few_processes() -> Iterator[None]:
    """Start neither Ray's autoscaler nor its reader of logs, which no run here needs.

    Each is an interpreter that imports Ray: two seconds of processor time in all.
    """
    # ``ray.init`` has no argument for that.
    parameter: Any = importlib.import_module("ray._private.parameter")
    before = parameter.RayParams
    parameter.RayParams = partial(before, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = before


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by one that exits."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _silenced(*names: str) -> Iterator[None]:
    """Keep libraries off the terminal; errors are raised or answered."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _short_folder() -> Iterator[str]:
    """Make a temporary folder for sockets and logs."""
    parent = tempfile.gettempdir()
    if len(parent) > MAX_PARENT_CHARS:
        parent = "/tmp"  # noqa: S108 -- the folder in it has a random name
    with tempfile.TemporaryDirectory(
        prefix="crossfed-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield folder
