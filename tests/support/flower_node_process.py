"""A Flower node that echoes what it is asked, also in a process of its own."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.clientapp import ClientApp
from support import toy_sites
from support.forked import Forked, shared
from support.superlink_app import SITE

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.node import FlowerNode
from federation.clock import SystemClock
from federation.messages import SiteMessage, Task
from privacy.membership.certificates import key_pem, load_key

if TYPE_CHECKING:  # A second to import, which the process need not.
    from support.superlink import SuperLink


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


def start(server: "SuperLink", key: ec.EllipticCurvePrivateKey, name: str) -> Forked:
    """Start a process that is a node with a key, until it is killed.

    It tells in ``NAME.log``, in the SuperLink's folder, how its connection fares.
    """
    path, log = (server.folder / f"{name}.{each}" for each in ("pem", "log"))
    path.touch(mode=0o600)
    path.write_bytes(key_pem(key))
    return shared().start(
        *(str(path), str(server.folder / "ca.crt"), server.address),
        call=f"{__name__}:serve",
        out=log,
        err=log,
        environment=os.environ,
    )


def serve(arguments: Sequence[str]) -> None:
    """Be one: of files with its key and the authority, and the address."""
    key, authority, address = arguments
    echo_node(
        load_key(Path(key)),
        address,
        Path(authority).read_bytes(),
        listener=lambda word: print(word, flush=True),  # noqa: T201
    ).run()
