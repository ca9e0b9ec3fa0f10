"""Tasks and answers that are lost between a node and a ServerApp, over a SuperLink."""

import importlib.util
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cloud_adapters.flower import simulation as flower_simulation

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from support import superlink  # noqa: E402
from support.running_node import Running  # noqa: E402
from support.superlink import SuperLink  # noqa: E402

from cloud_adapters.flower.connection import Connection, Envelope  # type: ignore[attr-defined]  # noqa: E402

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.xdist_group("superlink"),
]

MB = 1 << 20
# It is asked after when 5 and 15 s have passed, or immediately if Flower knows of it.
# A busy machine needs time as well, and nothing like the ten minutes of a deadline.
SECONDS = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with superlink.serve(tmp_path_factory.mktemp("superlink"), forked=True) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def running(server: SuperLink) -> Iterator[Running]:
    key = ec.generate_private_key(ec.SECP384R1())
    server.register(key)
    found = Running(server, key)
    try:
        found.connected()
        yield found
    finally:
        found.stop()


def lose_tasks(monkeypatch: pytest.MonkeyPatch, num: int) -> list[Envelope]:
    """Have the answers that bring a task die on their way to the node."""
    lost: list[Envelope] = []
    take = Connection.next

    def next_or_none(self: Connection) -> Envelope | None:
        envelope = take(self)
        is_task = envelope and envelope.about.metadata.message_type == "train"
        if envelope is None or not is_task or len(lost) == num:
            return envelope
        lost.append(envelope)
        return None

    monkeypatch.setattr(Connection, "next", next_or_none)
    return lost


@pytest.mark.parametrize(
    ("num_tasks", "num_answers", "size"),
    [
        # Asked after like the last one, which takes as long.
        pytest.param(1, 0, 4, marks=pytest.mark.long, id="a small task"),
        pytest.param(0, 1, 4, id="a small answer"),
        pytest.param(1, 1, 2 * MB, id="both in pieces"),
    ],
)
def test_lost_message_costs_seconds_and_no_work(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    num_tasks: int,
    num_answers: int,
    size: int,
):
    """The site works once, and its first answer is the one that counts."""
    lost = lose_tasks(monkeypatch, num_tasks)
    found = running.server.ask(
        "call",
        function="support.lossy_app:exchange",
        num_lost=num_answers,
        num_floats=size // 4,
    )
    assert found["right"], found["said"]
    assert len(lost) == num_tasks
    assert running.agent.num_answers == 1
    assert found["seconds"] < SECONDS
