"""Hosts of one study on this machine, each at the end of a line of its own.

A switch and every host are network namespaces without names: the kernel removes them,
and all that is in them, with the process that holds them, whatever ends that. Packets
of a host leave and reach it at the rate of its line (``tc tbf``). A delay is added by a
process that carries the packets (``tests/support/line.py``), since many kernels cannot.
Needs root, iproute2 and util-linux; ``Loopback`` needs nothing, and shapes nothing.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_LONG_LINE = Path(__file__).resolve().parents[2] / "tests" / "support" / "line.py"
_HOLDER = ("unshare", "--net", "sh", "-c", "echo; exec cat > /dev/null")
_CLONE_NEWNET = 0x40000000
# What goes through at once, and how long a packet may wait before the narrow part.
_LEAST_BURST_BYTES, _BURST_SECONDS, _QUEUE = 32_000, 0.01, "200ms"
_FREE_PORT = 29_500  # In a namespace all are.
_PROBE = "unshare --net tc qdisc add dev lo root tbf rate 1mbit burst 32k latency 1s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line in both directions.

    Attributes:
        mbit: Megabits per second; 0 for no limit.
        delay_ms: One way; half of a round trip.
    """

    mbit: float = 0.0
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where processes of a study run.

    Attributes:
        addresses: Of each host.
        interface: Its name at every host.
        holders: Processes in each host's namespace; empty on loopback.
        port: That a host can listen on.
    """

    addresses: Sequence[str]
    interface: str
    holders: Sequence[int]
    port: int

    def enter(self, host: int) -> None:
        """Move this process's network, and that of its later threads, to a host."""
        if not self.holders:
            return
        with Path(f"/proc/{self.holders[host]}/ns/net").open() as space:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(space.fileno(), _CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")

    def counted(self) -> tuple[int, int] | None:
        """Bytes received and sent by the interface of the host where this process is.

        None on loopback, which all of a machine's processes share. A large packet that
        the kernel cuts up later counts once, so little of TCP's headers is in them.
        """
        if not self.holders:
            return None
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
        raise OSError(f"there is no interface {self.interface} in this namespace")


def refusal() -> str:
    """Why this process cannot make lines; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is missing: install iproute2 and util-linux"
    done = subprocess.run(_PROBE.split(), capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    return done.stderr.strip() if done.returncode else ""


def loopback(num_hosts: int) -> Hosts:
    """Hosts that are all this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return Hosts(
        addresses=["127.0.0.1"] * num_hosts, interface="lo", holders=(), port=port
    )


@contextmanager
def joined(lines: Sequence[Line]) -> Iterator[Hosts]:
    """Have a host at the end of each line, until the end of the block."""
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        inside = _inside(switch)
        for words in ("ip link add bridge type bridge", "ip link set bridge up"):
            _run(*inside, *words.split())
        holders = [stack.enter_context(_namespace()) for _ in lines]
        addresses = [f"10.99.0.{number + 1}" for number in range(len(lines))]
        for number, (line, holder) in enumerate(zip(lines, holders, strict=True)):
            port = f"port{number}"
            if line.delay_ms:
                stack.enter_context(_long_line(switch, holder, port, line))
            else:
                ends = f"{port} netns {switch} type veth peer name eth0 netns {holder}"
                _run(*f"ip link add {ends}".split())
            _run(*inside, *f"ip link set {port} master bridge up".split())
            at_host = _inside(holder)
            for words in (
                f"ip address add {addresses[number]}/24 dev eth0",
                "ip link set eth0 up",
                "ip link set lo up",
            ):
                _run(*at_host, *words.split())
            if line.mbit:
                _run(*inside, *_shape(port, line).split())
                _run(*at_host, *_shape("eth0", line).split())
        yield Hosts(
            addresses=addresses, interface="eth0", holders=holders, port=_FREE_PORT
        )


def _shape(device: str, line: Line) -> str:
    bits = round(line.mbit * 1e6)
    burst = max(_LEAST_BURST_BYTES, round(bits / 8 * _BURST_SECONDS))
    tbf = f"tbf rate {bits}bit burst {burst}b latency {_QUEUE}"
    return f"tc qdisc add dev {device} root {tbf}"


@contextmanager
def _namespace() -> Iterator[int]:
    """Make a network namespace; a process in it, which ends with this one."""
    pipe = subprocess.PIPE
    with subprocess.Popen(_HOLDER, stdin=pipe, stdout=pipe) as holder:  # noqa: S603 -- ours
        if holder.stdout is None or not holder.stdout.readline():
            raise OSError("unshare --net failed")
        yield holder.pid


@contextmanager
def _long_line(switch: int, host: int, port: str, line: Line) -> Iterator[None]:
    """Connect a host to the switch by a process that delays packets."""
    pipe, far = subprocess.PIPE, f"far{port}"
    command = [*_inside(switch), sys.executable, "-I", str(_LONG_LINE), port, far]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as carrier:  # noqa: S603 -- ours
        if carrier.stdin is None or carrier.stdout is None:
            raise OSError("the line has no pipes")
        if not carrier.stdout.readline():
            raise OSError("the line did not start: is there /dev/net/tun?")
        carrier.stdin.write(json.dumps({"delay_seconds": line.delay_ms / 1e3}) + "\n")
        carrier.stdin.flush()
        moved = f"ip link set {far} netns {host} name eth0"
        _run(*_inside(switch), *moved.split())
        yield


def _inside(holder: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder}/ns/net", "--")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
