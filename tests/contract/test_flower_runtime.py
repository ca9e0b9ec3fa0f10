"""The coordinator's grid against a real SuperLink, and a node of ours behind it."""

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_adapters.flower import simulation as flower_simulation
from federation.messages import RoundTask, SiteMessage, Task

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from support import flower_node_process, superlink, toy_sites  # noqa: E402
from support.superlink import SuperLink  # noqa: E402

from privacy.membership.certificates import new_key  # noqa: E402

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.xdist_group("superlink"),
]


class Mirror(flower_node_process.EchoAgent):
    """A site that says its name, and answers with the model that it got."""

    def introduce(self, sealed: bytes) -> bytes:
        """Say the name."""
        return b"one" if sealed else b""

    def answer(self, task: Task) -> SiteMessage:
        """Answer without any work."""
        assert isinstance(task, RoundTask)
        return toy_sites.mirrored(task)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SuperLink]:
    """A SuperLink and a node."""
    with superlink.serve(tmp_path, forked=True) as running:
        key = new_key()
        running.register(key)
        app = flower_node_process.echo_app(Mirror())
        node = flower_node_process.echo_node(
            key, running.address, running.authority, app=app
        )
        thread = threading.Thread(target=node.run)
        thread.start()
        try:
            yield running
        finally:
            node.stopped.set()
            thread.join()
        assert "Traceback" not in running.log
        assert "Failed to store" not in running.log


def test_models_of_any_size_come_back(server: SuperLink):
    """In the envelope, in a config record and in an array, there and back."""
    for num_floats in (10, 1 << 15, 1 << 18):
        found = server.ask(
            "call",
            function="support.exchange_app:rounds",
            sites=["one"],
            num_floats=num_floats,
            num_rounds=2,
            folder="",
        )
        assert found["wrong"] == []
        assert len(found["seconds"]) == 2
