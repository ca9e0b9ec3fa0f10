"""What an enrolled site may leave at the SuperLink, and in whose name.

Flower stores whatever a node pushes: as much as it likes, in another node's name, and a
task for another node too. ``install`` puts a gate before the two calls of its Fleet API
that store something. The gate runs in the SuperLink's own process and keeps its
accounts in the SuperLink's database, in the same transaction as what they count, so
that neither a restart nor a crash loses one of the two.

A site may push one thing: the answer to a task that it was sent, in its own name. An
answer, all answers of a site that have not been collected, and those of a run are
bounded, and none may take the last of the disk: what is left there is for the
operator, who must be able to revoke a site.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.private.messages import KEEPS_CONTENT
from cloud_adapters.flower.private.superlink import (
    SUPERLINK_NODE_ID,
    LinkState,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    SqlLinkState,
    fleet_handlers,
    flower_superlink,
    iterate_object_tree,
    now,
    uint64_to_int64,
)
from cloud_adapters.superlink.answer_limits import Limits, free_bytes

# Rows about one announced object take about so much.
OBJECT_BYTES = 512
# Times that a site may begin to push one answer: each leaves a row.
MAX_SESSIONS = 64
# A log of SQLite that has once grown is cut back to this.
WAL_BYTES = 32 << 20

# Not 403, by which a site knows that the proxy does not let it in.
_CONFLICT, _TOO_LARGE, _UNAVAILABLE, _NO_ROOM = 409, 413, 503, 507

_TURN = threading.Lock()

_TABLE = """
CREATE TABLE IF NOT EXISTS crossfed_answers (
    session_id TEXT PRIMARY KEY,
    message_id TEXT NOT NULL,
    question_id TEXT NOT NULL,
    run_id INTEGER NOT NULL,
    node_id INTEGER NOT NULL,
    bytes INTEGER NOT NULL
)
"""

_WAITING = (
    "SELECT DISTINCT a.message_id, a.question_id, a.run_id, o.object_id IS NULL, "
    "i.created_at + i.ttl FROM crossfed_answers a "
    "LEFT JOIN objects o ON o.object_id = a.message_id "
    "LEFT JOIN message_ins i ON i.message_id = a.question_id "
    "WHERE a.node_id = :node"
)
_ASKED = "SELECT dst_node_id FROM message_ins WHERE message_id = :question"
_EMPTIED: tuple[str, ...] = (
    "UPDATE message_res SET content = x'' WHERE message_id = :message",
    "UPDATE message_ins SET content = x'' WHERE message_id = :question",
)
if not KEEPS_CONTENT:  # And a question stays when its answer has been collected.
    _WAITING = _WAITING.replace("message_ins", "message")
    _ASKED = (
        "SELECT dst_node_id FROM message q WHERE message_id = :question AND NOT EXISTS "
        "(SELECT 1 FROM message WHERE reply_to_message_id = q.message_id AND cleared)"
    )
    _EMPTIED = ()


def run_superlink(arguments: Sequence[str]) -> None:
    """Become Flower's SuperLink, with what was installed in this process.

    Args:
        arguments: Those of ``flower-superlink``.
    """
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def install(limits: Limits, database: Path) -> None:
    """Put the gate before the SuperLink's handlers, in this process.

    Args:
        limits: What may be stored.
        database: The SuperLink's; its disk is the one that is watched.
    """
    event.listen(Engine, "connect", _bound_wal)
    gate = Gate(limits=limits, folder=database.parent)
    # The routes look their handlers up in this module with every request.
    for name, guard in (
        ("push_messages", gate.messages(fleet_handlers.push_messages)),
        ("push_object", gate.object(fleet_handlers.push_object)),
        ("pull_messages", fleet_handlers.pull_messages),
        ("send_node_heartbeat", fleet_handlers.send_node_heartbeat),
    ):
        setattr(fleet_handlers, name, _in_turn(guard))


def _in_turn(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Let sites write one after the other, and each in one transaction.

    SQLite has those that it keeps waiting sleep, for up to 0.1 s at a time.
    """

    def run(request: Any, state: Any, **more: Any) -> Any:
        with _TURN, state.session():
            return handler(request, state, **more)

    return run


def _bound_wal(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    cursor.close()


Messages = Callable[[PushMessagesRequest, LinkState], PushMessagesResponse]
Objects = Callable[[PushObjectRequest, LinkState], PushObjectResponse]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Checks and counts what nodes push.

    Attributes:
        limits: What may be stored.
        folder: Where; the free space of its disk is looked at.
    """

    limits: Limits
    folder: Path

    def messages(self, handler: Messages) -> Messages:
        """Have answers announced only if the gate agrees."""

        def push_messages(
            request: PushMessagesRequest, state: LinkState
        ) -> PushMessagesResponse:
            size = request.ByteSize()
            with _session(state) as session:
                _check_name(session, request)
                _tidy(session, state, request)
                tree = request.message_object_trees[0]
                size += OBJECT_BYTES * sum(1 for _ in iterate_object_tree(tree))
                self._check_sessions(session, request)
                self._check_room(session, request, size)
                answer = handler(request, state)
                _note(session, request, answer.session_id, size)
            return answer

        return push_messages

    def object(self, handler: Objects) -> Objects:
        """Have a part of an answer stored only if the gate agrees."""

        def push_object(
            request: PushObjectRequest, state: LinkState
        ) -> PushObjectResponse:
            with _session(state) as session:
                message = _message_of(session, request)
                size = len(request.object_content)
                self._check_sums(
                    session,
                    message=message,
                    node_id=request.node.node_id,
                    run_id=request.run_id,
                    size=size,
                )
                self.check_disk(size)
                answer = handler(request, state)
                if answer.stored:
                    session.execute(
                        text(
                            "UPDATE crossfed_answers SET bytes = bytes + :size "
                            "WHERE session_id = :session"
                        ),
                        {"size": size, "session": request.session_id},
                    )
            return answer

        return push_object

    def _check_sessions(self, session: Session, request: PushMessagesRequest) -> None:
        begun = session.scalar(
            text("SELECT count(*) FROM crossfed_answers WHERE message_id = :message"),
            {"message": request.messages_list[0].metadata.message_id},
        )
        if begun is not None and begun >= MAX_SESSIONS:
            raise HTTPException(
                _TOO_LARGE, f"this answer was started {begun} times: send it completely"
            )

    def _check_room(
        self, session: Session, request: PushMessagesRequest, size: int
    ) -> None:
        metadata = request.messages_list[0].metadata
        self._check_sums(
            session,
            message=metadata.message_id,
            node_id=request.node.node_id,
            run_id=metadata.run_id,
            size=size,
        )
        self.check_disk(size)

    def _check_sums(
        self, session: Session, *, message: str, node_id: int, run_id: int, size: int
    ) -> None:
        sums = session.execute(
            text(
                "SELECT coalesce(sum(bytes) FILTER (WHERE message_id = :message), 0), "
                "coalesce(sum(bytes) FILTER (WHERE node_id = :node), 0), "
                "coalesce(sum(bytes) FILTER (WHERE run_id = :run), 0) "
                "FROM crossfed_answers"
            ),
            {
                "message": message,
                "node": uint64_to_int64(node_id),
                "run": uint64_to_int64(run_id),
            },
        ).one()
        named = (
            ("answer_mib", "an answer of a site", self.limits.answer),
            ("site_mib", "a site's waiting answers", self.limits.site),
            ("run_mib", "a run's waiting answers", self.limits.run),
        )
        for stored, (key, what, limit) in zip(sums, named, strict=True):
            if stored + size > limit:
                raise HTTPException(
                    _TOO_LARGE,
                    f"{what} may have {limit} bytes (limits.{key} in aggregator.toml), "
                    f"but this would make {stored + size}",
                )

    def check_disk(self, size: int) -> None:
        """See that so many bytes leave the disk its reserve.

        Raises:
            HTTPException: They do not; the site tries again.
        """
        free = free_bytes(self.folder)
        if free - size < self.limits.reserve:
            raise HTTPException(
                _NO_ROOM,
                f"the aggregator's disk has {free} bytes left and reserves "
                f"{self.limits.reserve} of them for its operator (limits.reserve_mib "
                "in aggregator.toml)",
            )


@contextlib.contextmanager
def _session(state: LinkState) -> Iterator[Session]:
    """A transaction that the handler's own statements join.

    It begins with a statement that takes SQLite's lock for writing: nothing that is
    read here can change before it is acted on.
    """
    if not isinstance(state, SqlLinkState):
        raise HTTPException(
            _UNAVAILABLE, "the SuperLink does not keep its state in a database"
        )
    with state.session() as session:
        session.execute(text(_TABLE))
        session.execute(text("DELETE FROM crossfed_answers WHERE session_id = ''"))
        yield session


def _check_name(session: Session, request: PushMessagesRequest) -> None:
    """Refuse all but one answer of this node to a question that it was asked."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise HTTPException(_CONFLICT, "a node must push one answer at a time")
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != request.node.node_id:
        raise HTTPException(_CONFLICT, "a node must answer under its own id")
    if metadata.dst_node_id != SUPERLINK_NODE_ID or not metadata.reply_to_message_id:
        raise HTTPException(
            _CONFLICT, "a node may send only answers, and only to the SuperLink"
        )
    if metadata.message_id != request.message_object_trees[0].object_id:
        raise HTTPException(_CONFLICT, "an answer must be announced under its own id")
    asked = session.scalar(text(_ASKED), {"question": metadata.reply_to_message_id})
    if asked != uint64_to_int64(request.node.node_id):
        raise HTTPException(
            _CONFLICT, "this node was not asked this, or its answer is too late"
        )


def _message_of(session: Session, request: PushObjectRequest) -> str:
    """The answer that an object is a part of, which this node has announced."""
    found = session.scalar(
        text(
            "SELECT message_id FROM crossfed_answers WHERE session_id = :session "
            "AND node_id = :node AND run_id = :run"
        ),
        {
            "session": request.session_id,
            "node": uint64_to_int64(request.node.node_id),
            "run": uint64_to_int64(request.run_id),
        },
    )
    if found is None:
        raise HTTPException(
            _CONFLICT, "this node has not announced an answer with this part"
        )
    return str(found)


def _note(
    session: Session, request: PushMessagesRequest, session_id: str, size: int
) -> None:
    metadata = request.messages_list[0].metadata
    session.execute(
        text(
            "INSERT INTO crossfed_answers "
            "VALUES (:session, :message, :question, :run, :node, :size)"
        ),
        {
            "session": session_id,
            "message": metadata.message_id,
            "question": metadata.reply_to_message_id,
            "run": uint64_to_int64(metadata.run_id),
            "node": uint64_to_int64(request.node.node_id),
            "size": size,
        },
    )


def _tidy(session: Session, state: LinkState, request: PushMessagesRequest) -> None:
    """Forget a node's answers that were collected, and delete those that came too late.

    Flower keeps both until the run ends. It deletes a question as soon as the run has
    the envelope of an answer, whose parts may be on their way until the site answers
    another task of the run. A word about a question is no such answer.
    """
    metadata = request.messages_list[0].metadata
    is_word = metadata.message_type == flower_site.PROBE
    node = uint64_to_int64(request.node.node_id)
    for message, question, run, is_collected, until in session.execute(
        text(_WAITING), {"node": node}
    ).all():
        is_open = until is not None and until > now().timestamp()
        if until is None:
            is_open = is_word or run != uint64_to_int64(metadata.run_id)
        if not is_collected and is_open:
            continue
        if not is_collected and KEEPS_CONTENT:
            state.object_store.delete(message)
        elif not is_collected:
            state.cancel_messages(message_ids=[message])
        else:
            state.object_store.delete(question)  # A whole one is not confirmed.
        for statement in (
            *_EMPTIED,
            "DELETE FROM crossfed_answers WHERE message_id = :message",
        ):
            session.execute(text(statement), {"message": message, "question": question})
