"""A Flower node in a process of its own: ``KEY AUTHORITY ADDRESS``.

It echoes what it is asked, tells on standard output how its connection fares, and
ends when its standard input does.
"""

import sys
import threading
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.clientapp import ClientApp
from support import toy_sites
from support.superlink_app import SITE

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.node import FlowerNode
from federation.clock import SystemClock
from federation.messages import SiteMessage, Task
from privacy.membership.certificates import load_key


class EchoAgent:
    """A site that says back what it hears.

    Attributes:
        broken: Raise in place of any answer.
        num_answers: Tasks that it was given.
        asked: Set when it is asked.
        free: Answers wait for this.
    """

    def __init__(self) -> None:
        """Make it whole and free."""
        self.broken, self.num_answers = False, 0
        self.asked, self.free = threading.Event(), threading.Event()
        self.free.set()
        self._site = toy_sites.echo_site(SITE, "")

    def introduce(self, sealed: bytes) -> bytes:
        """Say the bytes in reverse."""
        self.asked.set()
        self.free.wait()
        if self.broken:
            raise KeyError("record 17")
        return sealed[::-1]

    def answer(self, task: Task) -> SiteMessage:
        """Say the weights in reverse."""
        self.num_answers += 1
        if self.broken:
            raise KeyError("record 17")
        return self._site.handle(task)


def echo_app(agent: EchoAgent | None = None) -> ClientApp:
    """The app of such a site."""
    return flower_site.agent_app(agent or EchoAgent())


def echo_node(
    key: ec.EllipticCurvePrivateKey, address: str, authority: bytes, **changes: object
) -> FlowerNode:
    """A node that echoes."""
    settings = {
        "app": echo_app(),
        "address": address,
        "root_certificates": authority,
        "key": key,
        "clock": SystemClock(),
    }
    return FlowerNode(**settings | changes)


def _main(key: str, authority: str, address: str) -> None:
    node = echo_node(
        load_key(Path(key)),
        address,
        Path(authority).read_bytes(),
        listener=lambda word: print(word, flush=True),  # noqa: T201
    )

    def wait() -> None:
        sys.stdin.read()
        node.stopped.set()

    threading.Thread(target=wait, daemon=True).start()
    node.run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
