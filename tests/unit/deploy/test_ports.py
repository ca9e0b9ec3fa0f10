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
