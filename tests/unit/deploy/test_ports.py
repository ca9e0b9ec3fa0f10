"""Ports that are free, and ports that are not."""

import socket
import threading

import pytest

from cloud_adapters.net import ports
from cloud_adapters.net.ports import PortTaken
from federation.clock import SystemClock, VirtualClock


def test_free_port_is_free():
    """Immediately."""
    clock = VirtualClock(0.0)
    ports.await_free(ports.LOOPBACK, ports.free_port(), advice="", clock=clock)
    assert clock.monotonic() == 0.0


def test_port_that_is_taken_says_what_to_do():
    """After a time, in which what was left over might have ended."""
    clock = VirtualClock(0.0)
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match="Address already in use"):
            ports.await_free(ports.LOOPBACK, port, advice="stop it", clock=clock)
    assert clock.monotonic() >= ports.PATIENCE_SECONDS


def test_port_that_becomes_free_is_waited_for():
    """As by an nginx that is on its way out."""
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        ending = threading.Timer(0.2, server.close)
        ending.start()
        ports.await_free(ports.LOOPBACK, port, advice="", clock=SystemClock())
    ending.join()


def test_port_that_was_just_used_is_free():
    """Connections that wait out their time are no server."""
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((ports.LOOPBACK, port)):
            server.accept()[0].close()
    clock = VirtualClock(0.0)
    ports.await_free(ports.LOOPBACK, port, advice="", clock=clock)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_address_of_another_machine(host: str):
    """A name that nobody knows needs no waiting."""
    with pytest.raises(PortTaken, match=f"cannot listen on {host}:1024"):
        ports.await_free(
            host, 1024, advice="", clock=VirtualClock(0.0), patience_seconds=1.0
        )
