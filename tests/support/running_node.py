"""A Flower node in a thread of the test's process."""

import threading
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from support import flower_node_process
from support.superlink import SuperLink, wait_for


class Running:
    """A node at work in a thread of this process; Flower allows one in each."""

    def __init__(self, server: SuperLink, key: ec.EllipticCurvePrivateKey) -> None:
        self.server = server
        self.agent = flower_node_process.EchoAgent()
        self.words: list[str] = []
        self.node = flower_node_process.echo_node(
            key,
            server.address,
            server.authority,
            app=flower_node_process.echo_app(self.agent),
            listener=self.words.append,
        )
        self._thread = threading.Thread(target=self.node.run)
        self._thread.start()

    def said(self, part: str) -> int:
        """How often the node has told something of its connection."""
        return sum(part in word for word in self.words)

    def connected(self, times: int = 1) -> int:
        """Wait until it has connected so often; its number."""
        wait_for(lambda: self.said("connected to") >= times, "the node connects")
        assert self.node.node_id is not None
        return self.node.node_id

    def ask(self, what: str, size: int, **more: Any) -> dict[str, Any]:
        """Send a message and wait for the answer."""
        push = {"node": self.node.node_id, "size": size, **more}
        message = self.server.ask(f"push_{what}", **push)
        return self.server.ask("pull", message=message, size=size)

    def stop(self) -> None:
        """Stop in peace."""
        self.agent.free.set()
        self.node.stopped.set()
        self._thread.join()
