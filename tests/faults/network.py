"""Hosts of their own on one machine: network namespaces on a bridge.

A cable is pulled by taking down the bridge's end of it: packets of either side vanish,
and nobody is told.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


def possible() -> bool:
    """Whether this process may make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts by name; the aggregator is where the bridge is.

    Attributes:
        address: Of the bridge.
        namespaces: Of each host.
        addresses: Of each host.
    """

    address: str
    namespaces: dict[str, str]
    addresses: dict[str, str]

    def pull(self, hosts: Sequence[str]) -> None:
        """Pull the cables of some hosts."""
        for host in hosts:
            _ip("link", "set", self.namespaces[host], "down")

    def plug(self, hosts: Sequence[str]) -> None:
        """Put them back."""
        for host in hosts:
            _ip("link", "set", self.namespaces[host], "up")


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """Make a network until the end of the block."""
    mark = f"cf{os.getpid() % 1_000_000}"
    subnet = f"10.{80 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    made = Network(
        address=f"{subnet}.1",
        # Also the name of the cable's end at the bridge: at most 15 characters.
        namespaces={host: f"{mark}n{i}" for i, host in enumerate(hosts)},
        addresses={host: f"{subnet}.{i + 10}" for i, host in enumerate(hosts)},
    )
    bridge = f"{mark}b"
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{made.address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host, name in made.namespaces.items():
            _add(name, bridge, made.addresses[host])
        yield made
    finally:
        _ip("link", "del", bridge)
        for name in made.namespaces.values():
            subprocess.run(["ip", "netns", "del", name], check=False)  # noqa: S607


def _add(name: str, bridge: str, address: str) -> None:
    _ip("netns", "add", name)
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", name, "master", bridge, "up")
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)  # noqa: S607 -- where it is differs
