"""The aggregator's side of rounds whose answers are lost, in a ServerApp's process."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from support.superlink_app import SITE

from cloud_adapters.flower import runtime as flower_runtime
from cloud_adapters.flower.grid import SUPERLINK_POLL_SECONDS, Delivery, FlowerGrid
from cloud_adapters.flower.handshake import Attendance
from federation.clock import SystemClock
from federation.ids import RunId, SiteId
from federation.messages import RoundTask, SiteUpdate, TaskKind
from federation.rounds.gather import exchange as exchange_over

DEADLINE_SECONDS = 600.0


class OneSite:
    """Takes every node for the one that there is."""

    question = b"who is there?"
    absent: Mapping[SiteId, str] = MappingProxyType({})

    def site_of(self, answer: bytes) -> SiteId:
        """Whatever it says."""
        assert answer == self.question[::-1]
        return SITE

    def move_on(self) -> bool:
        """There is one question."""
        return False


@dataclass
class LosingGrid:
    """Flower's grid, with a connection that dies while answers are on it.

    Attributes:
        api: Flower's.
        num_left: Answers that are still to be lost.
    """

    api: Grid
    num_left: int

    def __getattr__(self, name: str) -> Any:
        """Everything else is Flower's."""
        return getattr(self.api, name)

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        """Pull what Flower then takes for delivered."""
        found = []
        for reply in self.api.pull_messages(ids):
            is_answer = reply.has_content() and reply.metadata.message_type == "train"
            if self.num_left and is_answer:
                self.num_left -= 1
            else:
                found.append(reply)
        return found


def exchange(api: Grid, *, num_lost: int, num_floats: int) -> dict[str, Any]:
    """Do a round; how long it took, and whether its answer was right."""
    grid = FlowerGrid(
        LosingGrid(flower_runtime.over(api), num_lost),
        [SITE],
        clock=SystemClock(),
        attendance=Attendance(handshake=OneSite()),
        delivery=Delivery(poll_seconds=SUPERLINK_POLL_SECONDS),
    )
    weights_d = np.arange(num_floats, dtype=np.float32)
    task = RoundTask(
        run_id=RunId("run-1"),
        round_index=1,
        site=SITE,
        kind=TaskKind.TRAIN,
        layout_digest="ab" * 32,
        weights_d=weights_d,
        integers_m=np.zeros(0, dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
    )
    begin = time.monotonic()
    replies = list(exchange_over(grid, [task], deadline_seconds=DEADLINE_SECONDS))
    messages = [reply.message for reply in replies]
    return {
        "seconds": time.monotonic() - begin,
        "right": len(messages) == 1
        and isinstance(messages[0], SiteUpdate)
        and np.array_equal(messages[0].delta_d, weights_d[::-1]),
        "said": str(messages)[:500],
    }


def look(api: Grid, *, message: str) -> int:
    """Look once for an answer, of which the parts may be missing; 1 if it is whole."""
    return len(flower_runtime.over(api).pull_messages([message]))
