"""Hosts of their own on one machine: network namespaces on a bridge.

A cable is pulled by taking down the bridge's end of it: packets of either side vanish,
and nobody is told. Where a host is far away, a process carries its packets, as a line
of some length, width and quality would (``line``).
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support import line, programs
from support.line import Line

# At a time in one process.
MOST_NETWORKS = 4
_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts by name, on a bridge where this process is, too.

    Attributes:
        address: Of the bridge.
        namespaces: Of each host; its cable's end at the bridge has the same name.
        addresses: Of each host.
    """

    address: str
    namespaces: dict[str, str]
    addresses: dict[str, str]
    _lines: dict[str, subprocess.Popen[str]] = field(default_factory=dict, repr=False)

    def pull(self, hosts: Sequence[str]) -> None:
        """Pull the cables of some hosts."""
        for host in hosts:
            _ip("link", "set", self.namespaces[host], "down")

    def plug(self, hosts: Sequence[str]) -> None:
        """Put them back."""
        for host in hosts:
            _ip("link", "set", self.namespaces[host], "up")

    def shape(self, host: str, wanted: Line) -> None:
        """Change the line of a distant host, for the packets from now on."""
        pipe = self._lines[host].stdin
        assert pipe is not None
        pipe.write(json.dumps(asdict(wanted)) + "\n")
        pipe.flush()

    def narrow(self, host: str, mbit: float) -> None:
        """Have the kernel limit the width of a near host's cable, in each direction."""
        bits = round(mbit * 1_000_000)
        burst = max(32_000, bits // 8 // 100)
        shape = f"root tbf rate {bits}bit burst {burst}b latency 200ms".split()
        device = self.namespaces[host]
        for where in (["dev", device], ["dev", "eth0"]):
            inside = self.inside(host) if where[1] == "eth0" else []
            command = [*inside, "tc", "qdisc", "replace", *where, *shape]
            subprocess.run(command, check=True)

    def num_bytes(self, host: str) -> int:
        """What its cable has carried in both directions, since it is there."""
        place = Path("/sys/class/net") / self.namespaces[host] / "statistics"
        return sum(int((place / f"{w}_bytes").read_text()) for w in ("rx", "tx"))

    def num_bytes_sent(self, host: str) -> int:
        """What has arrived here from a host, since it is there."""
        statistics = Path("/sys/class/net") / self.namespaces[host] / "statistics"
        return int((statistics / "rx_bytes").read_text())

    def inside(self, host: str) -> list[str]:
        """What a command is preceded by to run at a host."""
        return ["ip", "netns", "exec", self.namespaces[host]]


def refusal() -> str:
    """Why this machine has no networks with narrow cables; empty if it has."""
    if lacking := programs.missing("root", "ip"):
        return lacking
    probe = "unshare --net tc qdisc add dev lo root tbf rate 1mbit burst 32k latency 1s"
    done = subprocess.run(probe.split(), capture_output=True, check=False)
    return "this kernel has no tbf" if done.returncode else ""


@contextmanager
def network(hosts: Sequence[str], *, distant: Sequence[str] = ()) -> Iterator[Network]:
    """Make a network until the end of the block.

    Args:
        hosts: Their names.
        distant: Those of them with a line, which is a perfect one at first.
    """
    pid, number = os.getpid(), next(_NUMBERS) % MOST_NETWORKS
    mark = f"cf{pid % 1_000_000}{'abcd'[number]}"
    subnet = f"10.{80 + pid % 100}.{MOST_NETWORKS * (pid // 100 % 60) + number}"
    made = Network(
        address=f"{subnet}.1",
        # Names of devices have at most 15 characters.
        namespaces={host: f"{mark}n{i}" for i, host in enumerate(hosts)},
        addresses={host: f"{subnet}.{i + 10}" for i, host in enumerate(hosts)},
    )
    bridge = f"{mark}b"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{made.address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host, name in made.namespaces.items():
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            if host in distant:
                made._lines[host] = stack.enter_context(_line(name))
            else:
                _cable(name)
            _ip("link", "set", name, "master", bridge, "up")
            address = f"{made.addresses[host]}/24"
            _ip("-n", name, "addr", "add", address, "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made


def _cable(name: str) -> None:
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)


@contextmanager
def _line(name: str) -> Iterator[subprocess.Popen[str]]:
    far_end = f"{name}f"
    command = [sys.executable, "-I", line.__file__, name, far_end]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == line.READY
        _ip("link", "set", far_end, "netns", name, "name", "eth0")
        yield process
        # The end of its input ends it, and with it both ends of the line.


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)  # noqa: S607 -- where it is differs
