"""A long line: carries the packets of two network devices to each other, late or never.

    python line.py NEAR FAR

makes two TAP devices and carries what is sent through one to the other, until its
input ends. Each line of the input is a ``Line`` in JSON: how packets fare from now on.
Kernels can do that by themselves (netem), where it is compiled in.

A process of its own, so that a test that is busy does not delay packets.
"""

import collections
import fcntl
import json
import math
import os
import random
import selectors
import struct
import sys
import time
from dataclasses import dataclass

TUN = "/dev/net/tun"
READY = "ready\n"

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MOST_BYTES = 1 << 16
_AT_ONCE = 64  # packets, before those of the other way have their turn
# Of a router before the narrow part: what does not fit is lost, and TCP slows down.
_BUFFER_SECONDS, _BUFFER_BYTES = 0.2, 64_000
_NICENESS = -10  # A line does not become longer because the machine is busy.


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How packets fare, in each of the two ways.

    Attributes:
        delay_seconds: From one end to the other: half of a round trip.
        jitter_seconds: On top of that, at most; packets do not overtake each other.
        bits_per_second: Width.
        loss: Part of the packets that vanish, in [0, 1].
    """

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bits_per_second: float = math.inf
    loss: float = 0.0


class _Way:
    """Packets that are under way to one end."""

    def __init__(self, end: int, seed: int) -> None:
        self._end = end
        self._packets: collections.deque[tuple[float, bytes]] = collections.deque()
        self._free_at = 0.0  # When the last packet so far will have gone in.
        # The same packets of the same traffic vanish each time.
        self._random = random.Random(seed)  # noqa: S311 -- no secret

    def send(self, packet: bytes, line: Line, now: float) -> None:
        if self._random.random() < line.loss:
            return
        waits = max(self._free_at - now, 0.0)
        room = max(_BUFFER_SECONDS, 8 * _BUFFER_BYTES / line.bits_per_second)
        if waits > room:
            return
        self._free_at = now + waits + 8 * len(packet) / line.bits_per_second
        delay = line.delay_seconds + self._random.uniform(0, line.jitter_seconds)
        self._packets.append((self._free_at + delay, packet))

    def deliver(self, now: float) -> float:
        """Hand over what has arrived; seconds until the next packet does."""
        while self._packets and self._packets[0][0] <= now:
            _, packet = self._packets.popleft()
            try:
                os.write(self._end, packet)
            except OSError:
                continue  # That end is down: a cable has been pulled.
        return self._packets[0][0] - now if self._packets else math.inf


def _open_tap(name: str) -> int:
    end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), flags))
    return end


def _carry(near: int, far: int) -> None:
    line = Line()
    ways = {near: _Way(far, 1), far: _Way(near, 2)}
    selector = selectors.DefaultSelector()
    for source in (*ways, sys.stdin.fileno()):
        selector.register(source, selectors.EVENT_READ)
    while True:
        now = time.monotonic()
        waits = min(way.deliver(now) for way in ways.values())
        for key, _ in selector.select(None if waits == math.inf else waits):
            if key.fd in ways:
                _take_in(key.fd, ways[key.fd], line)
                continue
            words = os.read(key.fd, _MOST_BYTES).splitlines()
            if not words:
                return
            line = Line(**json.loads(words[-1]))


def _take_in(source: int, way: _Way, line: Line) -> None:
    for _ in range(_AT_ONCE):
        try:
            packet = os.read(source, _MOST_BYTES)
        except OSError:
            return  # There are no more, or this end is down.
        way.send(packet, line, time.monotonic())


def main(near: str, far: str) -> None:
    """Be a line until standard input ends."""
    ends = _open_tap(near), _open_tap(far)
    os.nice(_NICENESS)
    sys.stdout.write(READY)
    sys.stdout.flush()
    _carry(*ends)


if __name__ == "__main__":
    main(*sys.argv[1:])
