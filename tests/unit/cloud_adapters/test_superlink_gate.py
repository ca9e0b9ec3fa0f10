"""Which answers of a node the gate forgets when the node announces the next one."""

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cloud_adapters.flower import simulation as flower_simulation

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.supercore.date import now  # noqa: E402
from sqlalchemy import create_engine, text  # noqa: E402
from sqlalchemy.orm import Session  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.private.messages import (  # noqa: E402
    KEEPS_CONTENT,
    Message,
    Node,
)
from cloud_adapters.flower.private.superlink import PushMessagesRequest  # noqa: E402
from cloud_adapters.superlink import gate as flower_gate  # noqa: E402

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(not KEEPS_CONTENT, reason="Flower 1.43 keeps questions"),
]
NODE, RUN, OTHER_RUN = 7, 3, 5
TRAIN = "train"


@pytest.fixture
def session() -> Iterator[Session]:
    """The columns of Flower's that the gate reads, with one answer of a node."""
    engine = create_engine("sqlite://")
    with Session(engine) as made:
        for statement in (
            flower_gate._TABLE,
            "CREATE TABLE objects (object_id TEXT)",
            "CREATE TABLE message_ins (message_id, created_at, ttl, content)",
            "CREATE TABLE message_res (message_id, content)",
            "INSERT INTO crossfed_answers VALUES ('s', 'answer', 'question', 3, 7, 9)",
            "INSERT INTO objects VALUES ('answer')",
        ):
            made.execute(text(statement))
        yield made
    engine.dispose()


def is_kept(session: Session, *, run: int = RUN, kind: str = TRAIN) -> bool:
    """Whether the answer stays when the node announces another one."""
    deleted: list[str] = []
    state: Any = SimpleNamespace(object_store=SimpleNamespace(delete=deleted.append))
    message = Message()
    message.metadata.run_id, message.metadata.message_type = run, kind
    request = PushMessagesRequest(node=Node(node_id=NODE), messages_list=[message])
    flower_gate._tidy(session, state, request)
    num_rows = session.scalar(text("SELECT count(*) FROM crossfed_answers"))
    assert num_rows == (not deleted)
    return not deleted


def asked(session: Session, seconds_ago: float) -> None:
    """Have the question there, which is answered in time for a minute."""
    at = now().timestamp() - seconds_ago
    row = {"at": at}
    session.execute(
        text("INSERT INTO message_ins VALUES ('question', :at, 60, x'')"), row
    )


def test_answer_that_waits_is_kept_while_it_is_in_time(session: Session):
    asked(session, 30.0)
    assert is_kept(session)


def test_answer_that_nobody_took_in_time_is_deleted(session: Session):
    asked(session, 90.0)
    assert not is_kept(session, kind=flower_site.PROBE)


@pytest.mark.parametrize(
    ("run", "kind", "kept"),
    [
        (RUN, flower_site.PROBE, True),
        (OTHER_RUN, TRAIN, True),
        (RUN, TRAIN, False),
        (RUN, flower_site.AGAIN, False),
    ],
    ids=["a word", "of another run", "the next task", "the same again"],
)
def test_parts_of_a_taken_answer_stay_until_its_run_gets_another(
    session: Session, run: int, kind: str, *, kept: bool
):
    """Flower deletes the question as soon as the run has the envelope."""
    assert is_kept(session, run=run, kind=kind) is kept
