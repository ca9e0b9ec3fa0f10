"""A large model over a real SuperLink: its vectors go through a store."""

import importlib.util
import threading
from pathlib import Path

import pytest
from support import toy_sites

from cloud_adapters.flower import simulation as flower_simulation
from federation.clock import SystemClock
from federation.ids import RunId
from federation.messages import RoundTask, SiteMessage, Task
from federation.vectors import Layout, Role

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from support import superlink  # noqa: E402
from support.superlink_app import SITE  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.node import FlowerNode  # noqa: E402
from cloud_adapters.storage.disk.store import LocalStore  # noqa: E402
from cloud_adapters.transport.frames import Frames  # noqa: E402
from privacy.membership.certificates import new_key  # noqa: E402

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.xdist_group("superlink"),
]

THRESHOLD_BYTES = 4 << 20
NUM_FLOATS = 2 << 20  # 8 MiB: above the threshold, and several pieces in the store.


class Mirror:
    """A site that answers with the model that it got."""

    layouts = (Layout.build([("w", (NUM_FLOATS,), "float32", Role.PARAMETER)]),)

    def introduce(self, sealed: bytes) -> bytes:
        """Tell the site's name."""
        assert sealed
        return SITE.encode()

    def layout(self, run_id: RunId) -> Layout:
        """Of the only run."""
        assert run_id == "run-1"
        return self.layouts[0]

    def answer(self, task: Task) -> SiteMessage:
        """Answer without any work."""
        assert isinstance(task, RoundTask)
        return toy_sites.mirrored(task)


def test_large_model_goes_through_the_store(tmp_path: Path):
    """There and back in each of two rounds; nothing is left of it."""
    with superlink.serve(tmp_path, forked=True) as server:
        key = new_key()
        server.register(key)
        frames = Frames(
            store=LocalStore(tmp_path / "store"),
            scratch=tmp_path / "scratch-site",
            threshold_bytes=THRESHOLD_BYTES,
        )
        node = FlowerNode(
            app=flower_site.agent_app(Mirror(), frames),
            address=server.address,
            root_certificates=server.authority,
            key=key,
            clock=SystemClock(),
        )
        thread = threading.Thread(target=node.run)
        thread.start()
        try:
            found = server.ask(
                "call",
                function="support.exchange_app:rounds",
                sites=[SITE],
                num_floats=NUM_FLOATS,
                num_rounds=2,
                folder=str(tmp_path),
                threshold_bytes=THRESHOLD_BYTES,
            )
        finally:
            node.stopped.set()
            thread.join()
        assert found["wrong"] == []
        assert len(found["seconds"]) == 2
        # The database has seen frames, and not the model.
        assert (tmp_path / "state.db").stat().st_size < 4 * NUM_FLOATS
        assert "Traceback" not in server.log
    assert list(LocalStore(tmp_path / "store").list()) == []
    for scratch in ("scratch", "scratch-site"):
        assert list((tmp_path / scratch).iterdir()) == []
