"""Nodes that take their time, behind a Flower that loses messages; in virtual time."""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.private.messages import NodeInfo
from cloud_adapters.transport.redelivery import Inbox
from federation.clock import VirtualClock
from federation.messages import RoundTask, SecureTask
from federation.wire import frame as wire

# Longer than any task in a test; "the whole deadline" is what nobody should wait for.
DEADLINE_SECONDS = 600.0


def is_task(message: Message) -> bool:
    """Whether a message brings work."""
    about = message.metadata
    return not about.reply_to_message_id and about.message_type in {"train", "evaluate"}


def is_answer(message: Message) -> bool:
    """Whether a message is what came of work, or says it again."""
    return bool(message.metadata.reply_to_message_id) and (
        message.has_content() and flower_site.read_word(message.content) is None
    )


@dataclass(kw_only=True)
class LossyFlower:
    """A Flower run of nodes, each with an app.

    Attributes:
        apps: What answers, by the node's number.
        clock: Passes when the grid waits.
        loses: Whether a message does not arrive; asked once for each.
        delay: Seconds that one takes on its way to a node.
        work: Seconds that a node works on a message.
        sent: All that was sent to nodes.
        replied: What nodes replied immediately, beside their work.
        worked: How often an app was given each task, by site, round and step.
        introduced: How often a node was asked to introduce itself.
    """

    apps: Mapping[int, ClientApp]
    clock: VirtualClock
    loses: Callable[[Message], bool] = lambda _: False
    delay: Callable[[Message], float] = lambda _: 0.01
    work: float = 1.0
    sent: list[Message] = field(default_factory=list)
    replied: list[Message] = field(default_factory=list)
    worked: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    introduced: Counter[int] = field(default_factory=Counter)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _replies: dict[str, Message] = field(default_factory=dict)
    _inboxes: dict[int, Inbox[RecordDict]] = field(
        default_factory=lambda: defaultdict(Inbox)
    )
    _free_at: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def get_node_ids(self) -> list[int]:
        """Everybody is there."""
        return list(self.apps)

    def get_nodes(self) -> list[NodeInfo]:
        """And everybody's heart beats."""
        until = self.clock.now() + 20.0
        return [
            NodeInfo(node_id=n, heartbeat_interval=10.0, online_until=until)
            for n in self.apps
        ]

    def push_messages(self, messages: list[Message]) -> Iterator[str]:
        """Take messages for nodes."""
        for message in messages:
            name = f"m{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            if not self.loses(message):
                self._at(self.delay(message), lambda m=message: self._arrive(m))
            yield name

    def pull_messages(self, ids: list[str]) -> list[Message]:
        """Hand out replies, each once, whether or not they arrive."""
        while self._events and self._events[0][0] <= self.clock.monotonic():
            heapq.heappop(self._events)[2]()
        found = [self._replies.pop(name) for name in ids if name in self._replies]
        return [reply for reply in found if not self.loses(reply)]

    def restart(self, node: int, app: ClientApp) -> None:
        """Have a node begin anew, with nothing in its memory."""
        self.apps = {**self.apps, node: app}
        self._inboxes.pop(node, None)
        self._free_at.pop(node, None)

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        when = self.clock.monotonic() + seconds
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _arrive(self, message: Message) -> None:
        """As ``flower_node``: known questions are replied to beside the work."""
        node = message.metadata.dst_node_id
        reply = flower_site.reply_at_once(message, self._inboxes[node])
        if reply is not None:
            self.replied.append(reply)
            self._replies[message.metadata.message_id] = reply
            return
        now = self.clock.monotonic()
        begin = max(self._free_at[node], now)
        self._free_at[node] = begin + self.work
        self._at(begin - now, lambda: self._work(message, self._inboxes[node]))

    def _work(self, message: Message, inbox: Inbox[RecordDict]) -> None:
        self._note(message)
        reply = self.apps[message.metadata.dst_node_id](message, None)
        self._at(self.work, lambda: self._finish(message, reply, inbox))

    def _finish(
        self, message: Message, reply: Message, inbox: Inbox[RecordDict]
    ) -> None:
        if message.metadata.group_id and reply.has_content():
            inbox.keep(message.metadata.group_id, reply.content)
        self._replies[message.metadata.message_id] = reply

    def _note(self, message: Message) -> None:
        if not is_task(message):
            self.introduced[message.metadata.dst_node_id] += 1
            return
        task = wire.decode(flower_site.unpack(message.content))
        assert isinstance(task, RoundTask | SecureTask)
        step = task.step if isinstance(task, SecureTask) else task.kind
        self.worked[task.site, task.round_index, step] += 1
