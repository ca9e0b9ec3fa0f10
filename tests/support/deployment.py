"""A whole federation on this machine: real processes, real sockets, real keys."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from support import superlink_state
from support.forked import Forked, Server, shared

from cloud_adapters.net.ports import free_port
from deploy.cli import commands
from federation.clock import SystemClock
from federation.job import code_files

CLOCK = SystemClock()
CROSSFED = [str(Path(sys.executable).with_name("crossfed"))]
SITES = ("aws-us-east-1", "gcp-us-central1")
_PREPARING = threading.Lock()


def wait_for(holds: Callable[[], bool], what: str, seconds: float = 280.0) -> None:
    """Wait until something holds."""
    deadline = CLOCK.monotonic() + seconds
    while not holds():
        assert CLOCK.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        CLOCK.sleep(0.1)


def crossfed(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line, in a fork."""
    with tempfile.TemporaryDirectory() as name:
        out, err = (Path(name) / each for each in ("out", "err"))
        process = shared().start(*arguments, out=out, err=err, environment=os.environ)
        stdout, stderr = process.communicate(300)
    assert process.returncode == code, stdout + stderr
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def crossfed_here(
    *arguments: str, code: int = 0, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a short command in this process, which has imported what others would."""
    out, err = io.StringIO(), io.StringIO()
    typed = sys.stdin if given is None else io.StringIO(given)
    path = [*sys.path]
    with (
        _PREPARING,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", typed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Those of libraries, as for a user.
        found = commands.main(arguments)
    sys.path[:] = path  # The command line has added the working folder.
    # Nor may a party find its code in another's folder, which `enroll` has looked in.
    os.environ.pop(code_files.FOLDERS, None)
    done = subprocess.CompletedProcess(arguments, found, out.getvalue(), err.getvalue())
    assert found == code, done
    return done


def _prepare(*arguments: str, given: str | None = None) -> str:
    return crossfed_here(*arguments, given=given).stdout


@dataclass(kw_only=True)
class Deployment:
    """An aggregator and its sites."""

    folder: Path
    port: int
    host: str = "127.0.0.1"
    namespaces: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    server: Server | None = None
    processes: dict[str, "subprocess.Popen[bytes] | Forked"] = field(
        default_factory=dict
    )
    followers: list["subprocess.Popen[str] | Forked"] = field(default_factory=list)

    @property
    def config(self) -> str:
        return str(self.folder / "aggregator" / "aggregator.toml")

    def start(
        self, name: str, *arguments: str, anew: bool = False, **environment: str
    ) -> None:
        """Start a process that stays, in its network namespace if it has one.

        ``anew`` as a person does, also where the others are forks.
        """
        namespace = self.namespaces.get(name, "")
        variables = {**os.environ, **self.environment, **environment}
        path = self.folder / f"{name}.log"
        if self.server is not None and not anew:
            self.processes[name] = self.server.start(
                *arguments,
                out=path,
                err=path,
                environment=variables,
                namespace=namespace,
            )
            return
        where = ["ip", "netns", "exec", namespace] if namespace else []
        with path.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*where, *CROSSFED, *arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start_aggregator(self) -> None:
        self.start("aggregator", "aggregator", "up", "--config", self.config)

    def enrol(self, site: str, *role: str) -> None:
        """Invite and enrol a site, as a person would on its machine."""
        invited = _prepare("aggregator", "invite", site, *role, "--config", self.config)
        _prepare("enroll", "--folder", str(self.folder / site), given=invited)

    def equip(self, site: str, policy: str) -> None:
        """Accept the newest roster for a site, and set its policy."""
        _accept_roster(self.folder / site)
        _set_policy(self.folder / site / "site.toml", policy)

    def start_site(self, name: str, *, anew: bool = False, **environment: str) -> None:
        config = self.folder / name / "site.toml"
        words = ("site", "up", "--config", str(config))
        self.start(name, *words, anew=anew, **environment)

    def end(self, name: str) -> None:
        """End a process of ours as a supervisor does."""
        process = self.processes.pop(name)
        process.terminate()
        # Before it has begun to serve, the signal itself ends it.
        assert process.wait(30) in {0, -signal.SIGTERM}

    def kill(self, name: str) -> None:
        """End a process of ours as the kernel would."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def kill_any(self, name: str) -> None:
        """End a site, or a program of the aggregator's."""
        if name in self.processes:
            self.kill(name)
        else:
            self.kill_child(name)

    def kill_child(self, program: str) -> None:
        """End a process that the service has started, or one below it."""
        for pid in self.children(program):
            os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def frozen(self, program: str) -> Iterator[None]:
        """Freeze such a process for a while."""
        found = self.children(program)
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in found:
                os.kill(pid, signal.SIGCONT)

    def children(self, program: str) -> list[int]:
        """Processes that the service has started, and those below them."""
        found = [
            pid
            for pid in descendants(self.processes["aggregator"].pid)
            if program in command_of(pid)
        ]
        assert found, f"no {program} runs"
        return found

    def run(
        self,
        job: Path,
        *settings: str,
        resume: bool = False,
        extend: int | None = None,
    ) -> "subprocess.Popen[str] | Forked":
        """Hand a job over, or its newest run anew, and follow it."""
        words = ["run", str(job), "--aggregator", self.config, "--json"]
        words += [w for setting in settings for w in ("--set", setting)]
        words += ["--resume"] * resume
        words += [] if extend is None else ["--extend", str(extend)]
        return self.follow(*words)

    def follow(self, *words: str) -> "subprocess.Popen[str] | Forked":
        """Start a command line that may take long."""
        follower: subprocess.Popen[str] | Forked
        if self.server is None:
            follower = subprocess.Popen(
                [*CROSSFED, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        else:
            place = self.folder / f"follower-{len(self.followers)}"
            out, err = place.with_suffix(".out"), place.with_suffix(".err")
            follower = self.server.start(
                *words, out=out, err=err, environment=os.environ
            )
        self.followers.append(follower)
        return follower

    def num_runs(self) -> int:
        """Runs that have begun."""
        return len([*(self.folder / "aggregator" / "runs").glob("*/*/events.jsonl")])

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What happened in the newest run, or events of one kind."""
        runs = (self.folder / "aggregator" / "runs").glob("*/*/events.jsonl")
        newest = max(runs, key=lambda path: path.parent.name, default=None)
        if newest is None:
            return []
        *lines, _ = newest.read_text().split("\n")
        # Who waits for rounds asks ten times a second, and most lines are about sites.
        mark = f'{{"event": "{kind}"' if kind else ""
        return [json.loads(line) for line in lines if line.startswith(mark)]

    def rounds(self, status: str = "") -> int:
        """Rounds of the newest run that have ended, or have ended so."""
        return sum(
            status in {"", event["status"]} for event in self.events("RoundFinished")
        )

    def stop(self) -> None:
        """End everything, and see that nothing is left."""
        for follower in self.followers:
            follower.kill()
            follower.communicate()
        family = {pid for p in self.processes.values() for pid in descendants(p.pid)}
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not any(map(is_alive, family)), "children end", 20)
        left = [command_of(pid) for pid in family if is_alive(pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left


def descendants(pid: int) -> set[int]:
    """Processes below one."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(words[1])
    found: set[int] = set()
    while (
        more := {p for p, parent in parents.items() if parent in {pid, *found}} - found
    ):
        found |= more
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that waits to be collected does not."""
    return bool(command_of(pid))


@contextlib.contextmanager
def deployed(
    folder: Path,
    policy: str,
    *,
    host: str = "127.0.0.1",
    namespaces: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    sites: Sequence[str] = SITES,
    relays: Sequence[str] = (),
    forked: bool = True,
    started: bool = True,
) -> Iterator[Deployment]:
    """Make a federation as the how-to says, and end it; its sites may be started later.

    Relays are sites of it, too, which are invited as such.

    Its processes are started as people do, or as forks of one; see ``support.forked``.
    """
    port = free_port()
    made = Deployment(
        folder=folder,
        port=port,
        host=host,
        namespaces=namespaces or {},
        environment=environment or {},
        server=shared() if forked else None,
    )
    address = f"{host}:{port}"
    home = str(folder / "aggregator")
    _prepare("aggregator", "init", home, "--host", host, "--listen", address)
    if forked:
        superlink_state.place(folder / "aggregator" / "flower" / "state.db")
    try:
        made.start_aggregator()
        _await_health(made)
        for site in sites:
            made.enrol(site, *(["--relay"] if site in relays else []))
        for site in sites:
            made.equip(site, policy)
            if started:
                made.start_site(site)
        yield made
    finally:
        made.stop()


def _await_health(made: Deployment) -> None:
    process, log = made.processes["aggregator"], made.folder / "aggregator.log"
    with contextlib.suppress(AssertionError):
        wait_for(lambda: _is_healthy(made) or process.poll() is not None, "it answers")
    assert _is_healthy(made), f"the aggregator does not answer: {log.read_text()}"


def _is_healthy(made: Deployment) -> bool:
    import ssl  # noqa: PLC0415

    authority = str(made.folder / "aggregator" / "ca.crt")
    context = ssl.create_default_context(cafile=authority)
    try:
        # Closed whatever a bad line does: urllib leaves some sockets to the collector.
        with (
            socket.create_connection((made.host, made.port), 5) as plain,
            context.wrap_socket(plain, server_hostname=made.host) as line,
        ):
            line.sendall(f"GET /health HTTP/1.0\r\nHost: {made.host}\r\n\r\n".encode())
            return b" 200 " in line.recv(64)
    except OSError:
        return False


def _accept_roster(folder: Path) -> None:
    shown = _prepare("enroll", "--roster", "--folder", str(folder))
    if "--accept" in shown:
        digest = shown.split("--accept")[1].split()[0]
        _prepare("enroll", "--roster", "--accept", digest, "--folder", str(folder))


def _set_policy(path: Path, policy: str) -> None:
    before, _, _ = path.read_text().partition("[policy]")
    path.write_text(f"{before}[policy]\n{policy}")
