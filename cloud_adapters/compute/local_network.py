"""Networks of nodes of this host: each node has its own, on a bridge of their folder.

A node's network is a namespace without a name. The kernel removes it, and its line to
the bridge, with the last process in it, whatever ended that. The bridge is named after
the folder, so that ``remove`` finds it; nodes on it reach this host, but not each other
and nothing else. Needs root, iproute2 and util-linux.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

from cloud_adapters.compute.pool import Line
from federation import durable_json
from federation.errors import ComputeError, StoreUnavailable
from federation.os_errors import os_errors

# For tests between networks (RFC 2544): no cloud or office uses them.
_RANGE = IPv4Network("198.18.0.0/15")
_PREFIX = 24
_DEVICES = Path("/sys/class/net")
_FILE, _LOCK = "network.json", "network.lock"
_DIGITS = 12
# Of a router before the narrow part, and what it lets through at once.
_QUEUE, _LEAST_BURST_BYTES = "200ms", 32_000
_BITS_PER_MBIT = 1_000_000
# Keeps a namespace until its input ends: when the process that started it ends.
_HOLDER = ("unshare", "--net", "sh", "-c", "echo; exec cat > /dev/null")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    subnet: str


def refusal(line: Line) -> str:
    """Why nodes of this host cannot have such a network; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is missing: install iproute2 and util-linux"
    wanted = {
        "line.rate_mbit": (line.rate_mbit, "tbf rate 1mbit burst 32k latency 1s"),
        "line.delay_ms": (line.delay_ms, "netem delay 1ms"),
    }
    for key, (value, discipline) in wanted.items():
        name = discipline.partition(" ")[0]
        probe = f"unshare --net tc qdisc add dev lo root {discipline}"
        if value and _run(*probe.split(), check=False):
            return f"{key} needs {name}, which this kernel does not have"
    return ""


def address(folder: Path) -> str:
    """Have the bridge of a folder of nodes; its address, which is this host's.

    Raises:
        ComputeError: It cannot be made.
        StoreUnavailable: The folder cannot be written.
    """
    with _locked(folder):
        return str(next(_bridge(folder).hosts()))


def remove(folder: Path) -> None:
    """Remove the bridge of a folder, if there is one; no node may be at work.

    Raises:
        ComputeError: It cannot be removed.
    """
    name = device_name(folder)
    # There is none, or the folder was never made.
    if not (_DEVICES / name).exists():
        return
    with _locked(folder):
        # What the kernel has not removed yet of networks that ended is no matter.
        _run("ip", "link", "delete", name)


@contextmanager
def joined(folder: Path, node_id: str, line: Line) -> Iterator[str]:
    """Have a network for one node, until no process is left in it.

    Args:
        folder: Folder of all nodes.
        node_id: ID of this node.
        line: What connects it to the bridge.

    Yields:
        The file that stands for it. A process must enter it before the block ends.

    Raises:
        ComputeError: It cannot be made.
        StoreUnavailable: The folder cannot be written.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(_HOLDER, stdin=pipe, stdout=pipe) as by:  # noqa: S603 -- ours
        if by.stdout is None or not by.stdout.readline():
            raise ComputeError(f"no network for {node_id}: unshare --net failed")
        with _locked(folder):
            _plug(folder, device_name(folder / node_id), by.pid, line)
        yield f"/proc/{by.pid}/ns/net"


def _plug(folder: Path, link: str, pid: int, line: Line) -> None:
    """Connect the namespace of a process to the bridge."""
    network, bridge = _bridge(folder), device_name(folder)
    _ours, *free = map(str, network.hosts())
    used = {port.get("ifalias") for port in _ports(bridge)}
    place = next((each for each in free if each not in used), None)
    if place is None:
        raise ComputeError(f"{folder} has more nodes than its network {network}")
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net", "--")
    if (_DEVICES / link).exists():  # The kernel has yet to remove that of a killed one.
        _run("ip", "link", "delete", link)
    ends = f"{link} type veth peer name eth0 netns {pid}"
    _run("ip", "link", "add", *ends.split())
    # The alias tells the next one that the address is taken.
    _run("ip", "link", "set", link, "alias", place, "master", bridge, "up")
    # Ports that are isolated reach only others.
    _run("ip", "link", "set", link, "type", "bridge_slave", "isolated", "on")
    _run(*inside, "ip", "address", "add", f"{place}/{_PREFIX}", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    for command, device in (((), link), (inside, "eth0")):
        for words in _disciplines(line):
            _run(*command, *f"tc qdisc add dev {device} {words}".split())


def _disciplines(line: Line) -> Iterator[str]:
    """What shapes the packets that leave one end of a line, for ``tc``."""
    parent = "root handle 1:"
    if line.delay_ms:
        yield f"{parent} netem delay {line.delay_ms}ms limit 100000"
        parent = "parent 1:1 handle 2:"
    if line.rate_mbit:
        bits = round(line.rate_mbit * _BITS_PER_MBIT)
        burst = max(_LEAST_BURST_BYTES, bits // 8 // 100)
        yield f"{parent} tbf rate {bits}bit burst {burst}b latency {_QUEUE}"


def _bridge(folder: Path) -> IPv4Network:
    """Have the bridge of a folder; its network, the same as ever."""
    name = device_name(folder)
    kept = durable_json.read(
        folder / _FILE, _Network, advice="remove it", refusal=ComputeError
    )
    taken = {
        IPv4Interface(f"{each['local']}/{each['prefixlen']}").network: device["ifname"]
        for device in json.loads(_output("ip", "-json", "-4", "address", "show"))
        for each in device.get("addr_info", ())
    }
    if kept is None:
        network = _free_network(name, [*taken])
        durable_json.write(folder / _FILE, _Network(subnet=str(network)))
    else:
        network = IPv4Network(kept.subnet)
    if taken.get(network) == name:
        return network
    if network in taken:
        raise ComputeError(f"{taken[network]} has the network {network} of {folder}")
    if (_DEVICES / name).exists():  # The process that made it was killed.
        _run("ip", "link", "delete", name)
    _run("ip", "link", "add", name, "type", "bridge")
    first = next(network.hosts())
    _run("ip", "link", "set", name, "up")
    # The last step: who finds the address finds a bridge that works.
    _run("ip", "address", "add", f"{first}/{_PREFIX}", "dev", name)
    return network


def _free_network(name: str, taken: list[IPv4Network]) -> IPv4Network:
    """A network that this host does not have, for a bridge."""
    every = [*_RANGE.subnets(new_prefix=_PREFIX)]
    begin = int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(every)
    for network in every[begin:] + every[:begin]:
        if not any(network.overlaps(other) for other in taken):
            return network
    raise ComputeError(f"no network of {_RANGE} is free on this host")


def device_name(folder: Path) -> str:
    """Name of the bridge of a folder of nodes, or of the line of one node's folder."""
    # At most 15 characters.
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return f"cf{digest[:_DIGITS]}"


def _ports(bridge: str) -> list[dict[str, Any]]:
    said = _output("ip", "-json", "link", "show", "master", bridge)
    found: list[dict[str, Any]] = json.loads(said or "[]")
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Change the network of a folder alone; others wait, which takes milliseconds."""
    with os_errors(StoreUnavailable, f"lock {folder / _LOCK}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.closing(os.fdopen(handle)) as file:
        with os_errors(StoreUnavailable, f"lock {folder / _LOCK}"):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(*command: str, check: bool = True) -> str:
    """Run a command; why it failed, if it may.

    Raises:
        ComputeError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    if not done.returncode:
        return ""
    said = done.stderr.strip() or f"it ended with {done.returncode}"
    if check:
        raise ComputeError(f"{' '.join(command)}: {said}")
    return said


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    if done.returncode:
        raise ComputeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
