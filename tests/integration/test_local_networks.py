"""Nodes of this host with networks of their own."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployment import descendants, is_alive, wait_for

from cloud_adapters.compute import local_network
from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.local_files import NodeStarted, read
from cloud_adapters.compute.pool import Line, Node, NodeSpec, all_gone
from federation.clock import SystemClock
from federation.errors import MachineRefused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(local_network.refusal(Line())), reason=local_network.refusal(Line()) or "-"
    ),
]
# Sends and receives through the line, and says how long that took.
COPIES = """
import signal, socket, sys, time
host, port, num_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((host, port), timeout=30) as line:
    begin = time.monotonic()
    line.sendall(bytes(num_bytes))
    line.shutdown(socket.SHUT_WR)
    assert line.recv(1) == b"."
    print(f"took {time.monotonic() - begin} s", flush=True)
signal.pause()
"""
# Says whether somebody answers.
ASKS = """
import signal, socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), timeout=0.5)
    except ConnectionRefusedError:
        print(f"{address} is reached", flush=True)
    except OSError:
        print(f"{address} is not reached", flush=True)
signal.pause()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(
        folder=tmp_path / "nodes", working_folder=tmp_path, clock=SystemClock()
    )
    yield made
    made.terminate([node.id for node in made.nodes({})])
    wait_for(lambda: all_gone(made.nodes({})), "all nodes end", 60)
    made.clean_up()
    wait_for(lambda: devices(made) == set(), "no device is left", 60)


def devices(pool: LocalPool) -> set[str]:
    """Network devices of a pool."""
    names = {link_of(pool, node) for node in pool.nodes({})}
    names.add(local_network.device_name(pool.folder))
    return {name for name in names if (Path("/sys/class/net") / name).exists()}


def link_of(pool: LocalPool, node: Node) -> str:
    return local_network.device_name(pool.folder / node.id)


def launch(pool: LocalPool, name: str, *command: str, line: Line | None = None) -> Node:
    spec = NodeSpec(
        name=name,
        command=[sys.executable, "-c", *command],
        labels={"crossfed-deployment": "x"},
        max_seconds=600.0,
        line=line or Line(),
    )
    return pool.launch(spec, name)


def said(pool: LocalPool, node: Node, text: str) -> str:
    wait_for(lambda: text in pool.log(node.id), text, 60)
    return pool.log(node.id)


def test_a_node_reaches_this_host_and_no_other_node(pool: LocalPool):
    """Nor any other network that this host is in."""
    host = local_network.address(pool.folder)
    other = host.rpartition(".")[0] + ".2"
    launch(pool, "site-a", ASKS)
    second = launch(pool, "site-b", ASKS, host, other, "192.0.2.1")
    assert f"{host} is reached" in said(pool, second, f"{host} is")
    assert "192.0.2.1 is not reached" in said(pool, second, "192.0.2.1 is")
    assert f"{other} is not reached" in pool.log(second.id)
    with pytest.raises(ConnectionRefusedError):  # This host reaches both.
        socket.create_connection((other, 9), timeout=30)


def test_a_line_is_no_wider_than_asked(pool: LocalPool):
    """In the direction that a site sends its update in."""
    host, num_bytes, mbit = local_network.address(pool.folder), 1_000_000, 8.0
    with socket.create_server((host, 0)) as server:
        server.settimeout(60)
        port = str(server.getsockname()[1])
        line = Line(rate_mbit=mbit)
        node = launch(pool, "site-a", COPIES, host, port, str(num_bytes), line=line)
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
            connection.sendall(b".")
    took = float(said(pool, node, "took").partition("took ")[2].split()[0])
    ideal = 8 * num_bytes / mbit / 1e6
    assert 0.8 * ideal < took < 3 * ideal


def test_nothing_is_left_of_nodes_that_were_killed(pool: LocalPool):
    """Whatever killed them: the kernel removes the network with the last process."""
    node = launch(pool, "site-a", ASKS)
    assert link_of(pool, node) in devices(pool)
    started = read(pool.folder / node.id, NodeStarted)
    assert started is not None
    family = descendants(started.pid)
    for pid in (started.pid, *family):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, family)), "its processes end", 60)
    wait_for(lambda: link_of(pool, node) not in devices(pool), "its line is gone", 60)
    assert devices(pool) == {local_network.device_name(pool.folder)}
    pool.clean_up()
    assert devices(pool) == set()


def test_bridge_that_was_lost_comes_back_with_its_address(pool: LocalPool):
    """As after a restart of this host: the aggregator's certificate names it."""
    host = local_network.address(pool.folder)
    local_network.remove(pool.folder)
    assert devices(pool) == set()
    assert local_network.address(pool.folder) == host


def test_what_the_kernel_cannot_do_is_refused_by_name(pool: LocalPool):
    """Before anything is started."""
    why = local_network.refusal(Line(delay_ms=1.0))
    if not why:
        pytest.skip("this kernel has netem")
    with pytest.raises(MachineRefused, match=r"line\.delay_ms needs netem"):
        launch(pool, "site-a", ASKS, line=Line(delay_ms=1.0))
    assert pool.nodes({}) == []
