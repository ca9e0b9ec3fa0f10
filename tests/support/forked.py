"""Commands that stay, as forks of one process that has imported torch already.

A real start imports for four seconds; a federation of five is there in one. What is
forked is a process like any other: it can be signalled, frozen and killed. The
programs that an aggregator's service starts are forks, too, each of its real parent.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from support import fork_root

from cloud_adapters.local import child_process

_TESTS = Path(__file__).parents[1]
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from support import forked
forked.serve(sys.argv[3:])
"""
# For all workers of a test run; the last argument is a file.
_START_FOR_ALL = """
import sys
sys.path.insert(0, sys.argv[1])
from support import fork_root, forked
fork_root.serve(sys.argv[3:-1], int(sys.argv[-1]))
forked.serve(())
"""
# For the forks, which need them soon.
_NEEDED = (
    "cloud_adapters.flower.node",
    "support.fork_imports",
    "deploy.site_host.service",
    "deploy.aggregator_host.server_app",
    "deploy.aggregator_host.service",
    "cloud_adapters.superlink.gate",
    "cloud_adapters.superlink.guard",
    "cloud_adapters.superlink.launcher",
)
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
# Flower reads them when it is imported.
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
_GRACE_SECONDS = 10.0
# Place for what `ps` shows of a fork.
_TITLE = "." * 4000
# Modules that are run with ``-m``, and the function of each that does its work.
_PROGRAMS = {
    "crossfed": "deploy.cli.commands:main",
    "cloud_adapters.compute.local_node": "cloud_adapters.compute.local_node:main",
} | {
    name: f"{name}:main"
    for name in (
        f"deploy.aggregator_host.{program}_process"
        for program in ("superlink", "superexec", "coordinator")
    )
}
_PROGRAMS["support.mirror_site"] = "support.mirror_site:serve"
# Flower's own, which are started by their names alone, and ours.
_SCRIPTS = {
    "crossfed": "deploy.cli.commands:main",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
}
_RUNNERS = {"-m", "crossfed.child"}
# Scripts that start themselves again, to measure in processes of their own.
_BENCHMARKS = _TESTS.parent / "benchmarks"
# Where a user's code is found: all that a program may not have of its parent.
_FOUND: dict[str, list[Any]] = {}


class Forked:
    """A process of a server, used as a ``subprocess.Popen``."""

    def __init__(self, server: "Server", number: int, out: Path, err: Path) -> None:
        """Note where it is; see ``Server.start``."""
        self._server = server
        self._number = number
        self._out, self._err = out, err
        self.pid: int = server.wait_for("pid", number)

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self._number)

    def poll(self) -> int | None:
        self._server.read(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._server.wait_for("code", self._number, timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # As Popen does: it may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks(subprocess.Popen[Any]):
    """Forks programs that a command starts and whose modules are known.

    Those are the nodes of this host, what runs on them, the programs of an
    aggregator's service, those of Flower's node, and benchmarks. All others are
    started.
    """

    def _execute_child(self, *given: Any) -> None:
        command, passed, cwd, env = given[0], given[4], given[5], given[6]
        stdin, _, _, stdout, _, stderr = pipes = given[10:16]
        entry, words = program(command)
        has_session = given[21]
        if not entry:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ready, begun = os.pipe()
        sys.stdout.flush()  # Or the fork would write it, too.
        self.pid = os.fork()
        if self.pid == 0:
            if has_session:
                os.setsid()
            _enter(network_of(command))
            if child_process._STARTER in command:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            for number, file in enumerate((stdin, stdout, stderr)):
                if file != -1:
                    os.dup2(file, number)
            _become(entry, words, cwd, env, passed)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        os.close(begun)
        os.read(ready, 1)  # It leads its own group now, if it is to.
        os.close(ready)


def program(command: Sequence[object]) -> tuple[str, list[str]]:
    """Function of a program that can be forked, if a command starts one.

    Returns:
        ``module:function`` or the file of a script, empty if there is none, and the
        program's name and arguments.
    """
    words = [str(word) for word in command]
    starts_python = words[0] == sys.executable and len(words) > 1
    if starts_python and Path(words[1]).parent == _BENCHMARKS:
        return words[1], words[1:]
    for place, (runner, word) in enumerate(itertools.pairwise(words), 1):
        if runner in _RUNNERS and word in _PROGRAMS:
            return _PROGRAMS[word], words[place:]
    return _SCRIPTS.get(Path(words[0]).name, ""), words


def network_of(command: Sequence[object]) -> str:
    """File of the network namespace that a node's program starts in, if it has one."""
    words, option = [str(word) for word in command], "--net="
    if "nsenter" not in words:
        return ""
    return words[words.index("nsenter") + 1].removeprefix(option)


def fork_ranks() -> None:
    """Have this process fork its ranks, too: one that has no threads when it does."""
    _PROGRAMS["deploy.site_host.rank_process"] = "deploy.site_host.rank_process:main"


def _become(
    entry: str,
    words: list[str],
    cwd: Any,
    env: Mapping[str, str] | None,
    passed: Sequence[int],
) -> NoReturn:
    """Do in a fork what a new interpreter would."""
    from support import fork_server  # noqa: PLC0415 -- imports torch

    atexit._clear()  # What is to be done at the parent's end.
    for last, file in itertools.pairwise(
        [2, *sorted(passed), os.sysconf("SC_OPEN_MAX")]
    ):
        os.closerange(last + 1, file)
    for number in signal.valid_signals():
        is_int = number == signal.SIGINT
        # Under nohup or in the background, the suite was told to ignore these.
        may_be_ignored = is_int or number == signal.SIGHUP
        if may_be_ignored or callable(signal.getsignal(number)):
            signal.signal(
                number, signal.default_int_handler if is_int else signal.SIG_DFL
            )
    tempfile.tempdir = None  # It is looked for again, where it may be another's.
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    _show([sys.executable, "-m", *words])
    _forget_users_code()
    run = fork_server.call_entry if ":" in entry else fork_server.run_script
    fork_server.finish(lambda: run(entry, words[1:]))


def _forget_users_code() -> None:
    """Forget what the parent has imported from elsewhere than this installation."""
    sys.path[:], sys.meta_path[:] = _FOUND["path"], _FOUND["meta_path"]
    ours = tuple(path for path in sys.path if path)
    files = {n: getattr(m, "__file__", None) or "" for n, m in sys.modules.items()}
    theirs = {
        name.partition(".")[0]
        for name, file in files.items()
        if file.startswith("/") and not file.startswith(ours)
    }
    for name in files:
        if name.partition(".")[0] in theirs:
            del sys.modules[name]


def _show(words: Sequence[str]) -> None:
    """Have ``ps`` show what this fork is."""
    text = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, text[45:47])
    line = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


class Server:
    """Starts ``crossfed`` with arguments; for any thread."""

    def __init__(self, needed: Sequence[str] = _NEEDED) -> None:
        """Start to import what is needed; the first command waits for that.

        Where all workers need it, one process imports it; see ``fork_root``.
        """
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self._numbers = itertools.count()
        self._rest = b""
        self._reading = threading.Lock()
        words = [str(_TESTS), _TITLE, *needed]
        root = [sys.executable, "-I", "-c", _START_FOR_ALL, *words]
        found = None
        if needed == _NEEDED:
            found = fork_root.connect(root, os.environ | _QUIET)
        self._orders, self._answers = found or _start_alone(words)

    def start(
        self,
        *arguments: str,
        out: Path,
        err: Path,
        environment: Mapping[str, str],
        namespace: str = "",
        call: str = "",
        folder: Path | None = None,
        files: Sequence[int] = (),
        misfortune: str = "",
        script: Path | None = None,
    ) -> Forked:
        """Start a command, or a function of its arguments, or a script.

        Args:
            arguments: What follows ``crossfed``.
            out: File that its standard output is appended to.
            err: File for its errors.
            environment: All that it sees.
            namespace: Of the network.
            call: The function instead, as ``module:name``.
            folder: Where it runs, if not here.
            files: Open files that it has under the same numbers.
            misfortune: Kills it; see ``support.misfortunes``.
            script: File of the script instead.
        """
        number = next(self._numbers)
        for path in (out, err):
            path.touch(mode=0o600)  # A reader need not wait for the fork.
        order = {
            "number": number,
            "arguments": arguments,
            "folder": str(folder or Path.cwd()),
            "stdout": str(out),
            "stderr": str(err),
            "appends": True,
            "misfortune": misfortune,
            "environment": dict(environment),
            "namespace": namespace,
            "files": files,
            "script": str(script or ""),
            "call": call,
        }
        socket.send_fds(self._orders, [json.dumps(order).encode()], files)
        return Forked(self, number, out, err)

    def imports(self, name: str) -> None:
        """Have a module imported before the next fork, for all that follow."""
        self._orders.send(json.dumps({"imports": name}).encode())

    def wait_for(self, what: str, number: int, timeout: float | None = None) -> int:
        """Wait for a process's id or exit code."""
        found = {"pid": self.pids, "code": self.codes}[what]
        end = None if timeout is None else time.monotonic() + timeout
        while number not in found:
            if end is not None and time.monotonic() > end:
                raise TimeoutError
            self.read(0.1)
        return found[number]

    def read(self, seconds: float) -> None:
        """Read what the server has said, or says within so many seconds."""
        select.select([self._answers], [], [], seconds)
        with self._reading:
            while select.select([self._answers], [], [], 0)[0]:
                some = os.read(self._answers, 1 << 16)
                assert some, "the server of forks has ended"
                *lines, self._rest = (self._rest + some).split(b"\n")
                for said in map(json.loads, lines):
                    found = self.pids if "pid" in said else self.codes
                    found[said["number"]] = said.get("pid", said.get("code"))

    def close(self) -> None:
        """End the server, and what it has started that is still there."""
        self._orders.close()
        while os.read(self._answers, 1 << 16):
            pass  # Until it has ended.
        os.close(self._answers)


def _start_alone(words: Sequence[str]) -> tuple[socket.socket, int]:
    """Start a server that imports for itself: its orders, and its answers."""
    orders, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    answers, their = os.pipe()
    with its:
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-I", "-c", _START, *words],
            env=os.environ | _QUIET,
            stdin=its.fileno(),
            stdout=their,
            # Ctrl-C is for the tests, which end what they have started.
            start_new_session=True,
        )
    os.close(their)
    process.returncode = 0  # It ends when its answers do.
    return orders, answers


@functools.cache
def shared(needed: Sequence[str] = _NEEDED) -> Server:
    """One for all tests of a worker, which need the same."""
    made = Server(needed)
    atexit.register(made.close)
    return made


def wait_for_a_signal(_: Sequence[str]) -> None:
    """Say so, and stay, as a site does that has no task."""
    _say(waits=True)
    signal.pause()


def serve(needed: Sequence[str]) -> None:
    """Import, then fork for every order that comes in; say what comes of it."""
    for name in needed:
        importlib.import_module(name)
    _FOUND.update(path=[*sys.path], meta_path=[*sys.meta_path])
    # A child neither looks through what all of them share nor copies it.
    gc.freeze()
    children: dict[int, _Child] = {}
    orders = socket.socket(fileno=0)
    is_open, grace = True, None
    while is_open or children:
        # A child's file can be read from when it has ended.
        awaited = [*children, *([orders] if is_open else ())]
        ready = select.select(awaited, [], [], grace)[0]
        if not ready:
            _signal(children, signal.SIGKILL)
        if orders in ready:
            some, files, _, _ = socket.recv_fds(orders, 1 << 20, 16)
            is_open = bool(some)
            if is_open:
                _begin(json.loads(some), files, children)
            else:  # Nobody waits for them any more, as when the tests were killed.
                _signal(children, signal.SIGTERM)
                grace = _GRACE_SECONDS
        for file in {*children} & {*ready}:
            child = children.pop(file)
            os.close(file)
            code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            _say(number=child.number, code=code)


class _Child(NamedTuple):
    """A fork, and the number of its order."""

    pid: int
    number: int


def _signal(children: Mapping[int, _Child], number: int) -> None:
    for child in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _begin(
    order: dict[str, Any], files: Sequence[int], children: dict[int, _Child]
) -> None:
    from support import fork_server  # noqa: PLC0415 -- imports torch

    if "imports" in order:
        importlib.import_module(order["imports"])
        gc.freeze()
        return
    pid = os.fork()
    if pid == 0:
        _take(files, order["files"])
        namespace = order["namespace"]
        _enter(namespace and f"/run/netns/{namespace}")
        os.environ.clear()
        words = [order["call"] or "crossfed", *order["arguments"]]
        _show([sys.executable, *words])
        subprocess.Popen = Forks  # type: ignore[misc]
        fork_server._child(order)
    for file in files:
        os.close(file)
    children[os.pidfd_open(pid)] = _Child(pid, order["number"])
    _say(number=order["number"], pid=pid)


def _take(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give files the numbers that they have where they come from."""
    above = max([*files, *numbers, 2]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number, inheritable=False)
        os.close(file)
    for file in set(files) - set(numbers):
        os.close(file)


def _say(**words: int) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _enter(network: str) -> None:
    """Move this process to the network of a namespace's file, if it is to be in one."""
    if not network:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(file)
