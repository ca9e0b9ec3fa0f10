"""A site of ``benchmarks/deployed.py``: ``python -m support.mirror_site``.

Its arguments are its name, the number of floats in the model, the SuperLink's address,
the folder with its key, and the folder of the store, or an empty one for no store.
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from support import toy_sites

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.node import FlowerNode
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.transport.frames import INLINE, Frames
from federation.clock import SystemClock
from federation.ids import RunId
from federation.messages import RoundTask, SiteMessage, Task
from federation.vectors import Layout, Role
from privacy.membership.certificates import load_key

DEAF = "deaf"


class Mirror:
    """A site that answers with the model that it got, uncopied, or never."""

    def __init__(self, name: str, num_floats: int, place: Path) -> None:
        self._name = name
        self._place = place
        model = [("w", (num_floats,), "float32", Role.PARAMETER)]
        self._layout = Layout.build(model)

    def introduce(self, sealed: bytes) -> bytes:
        """Tell the site's name."""
        return self._name.encode() if sealed else b""

    def layout(self, run_id: RunId) -> Layout:  # noqa: ARG002 -- as of Agent
        """The same for all runs."""
        return self._layout

    def answer(self, task: Task) -> SiteMessage:
        """Answer without any work."""
        assert isinstance(task, RoundTask)
        if self._name == DEAF:
            (self._place / DEAF).touch()
            threading.Event().wait()
        return toy_sites.mirrored(task)


def serve(arguments: Sequence[str]) -> None:
    """Be a site until standard input ends."""
    name, num_floats, address, folder, store = arguments
    place, frames = Path(folder), INLINE
    if store:
        frames = Frames(store=LocalStore(Path(store)), scratch=place / name)
    node = FlowerNode(
        app=flower_site.agent_app(Mirror(name, int(num_floats), place), frames),
        address=address,
        root_certificates=(place / "ca.crt").read_bytes(),
        key=load_key(place / f"{name}.pem"),
        clock=SystemClock(),
    )

    def wait() -> None:
        sys.stdin.read()
        node.stopped.set()

    threading.Thread(target=wait, daemon=True).start()
    node.run()


if __name__ == "__main__":
    serve(sys.argv[1:])
