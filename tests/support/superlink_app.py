"""The ServerApp of ``support.superlink``: it does what a test asks over a socket."""

import importlib
import json
import random
import socket
import time
import traceback
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from cloud_adapters.flower import site as flower_site
from federation.ids import RunId, SiteId
from federation.messages import RoundTask, SiteUpdate, TaskKind
from federation.wire import frame as wire

SITE = SiteId("one")


def serve(grid: Grid, path: str) -> None:
    """Answer requests, a JSON line each, until the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(path)
        with test.makefile("rwb") as lines:
            for line in lines:
                request = json.loads(line)
                try:
                    answer = _DO[request.pop("op")](grid, **request)
                except Exception:  # noqa: BLE001 -- the test sees it, and continues
                    answer = {"raised": traceback.format_exc()}
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()


def random_bytes(size: int) -> bytes:
    """The same in every process."""
    return random.Random(size).randbytes(size)  # noqa: S311 -- content, not keys


def nodes(grid: Grid) -> dict[int, float]:
    """Who is there, and until when Flower believes so."""
    return {node.node_id: node.online_until for node in grid.get_nodes()}


def push_query(grid: Grid, *, node: int, size: int) -> str:
    """Send so many bytes that the site is to send back in reverse."""
    return _push(grid, flower_site.pack_bytes(random_bytes(size)), node, "query")


def push_train(
    grid: Grid, *, node: int, size: int, site: str = SITE, round_index: int = 1
) -> str:
    """Send a task with a model of so many bytes."""
    task = RoundTask(
        run_id=RunId("run-1"),
        round_index=round_index,
        site=SiteId(site),
        kind=TaskKind.TRAIN,
        layout_digest="ab" * 32,
        weights_d=np.arange(size // 4, dtype=np.float32),
        integers_m=np.zeros(0, dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
    )
    frame = wire.encode_bytes(task)
    content = flower_site.pack(
        frame, site=task.site, job_text="", deadline_seconds=60.0
    )
    return _push(grid, content, node, "train")


def push_nothing(grid: Grid, *, node: int) -> str:
    """Send a task that is none."""
    return _push(grid, RecordDict(), node, "train")


def pull(
    grid: Grid, *, message: str, size: int, seconds: float = 100.0
) -> dict[str, Any]:
    """Wait for the answer to a message; say what is wrong with it, if anything is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for reply in grid.pull_messages([message]):
            if reply.has_error():
                return {"error": reply.error.reason, "code": reply.error.code}
            return {"error": None, "right": _is_right(reply, size)}
        time.sleep(0.1)  # The SuperLink works for 5 ms on every look.
    return {"error": "no answer", "code": None}


def call(grid: Grid, *, function: str, **arguments: Any) -> Any:
    """Call ``module:function`` with the grid."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(grid, **arguments)


def _push(grid: Grid, content: RecordDict, node: int, kind: str) -> str:
    # A ServerApp that outlives its SuperLink may be told that it is away.
    (message,) = grid.push_messages([Message(content, node, kind, ttl=300.0)])
    return str(message)


def _is_right(reply: Message, size: int) -> bool:
    if reply.metadata.message_type == "query":
        return flower_site.unpack_bytes(reply.content) == random_bytes(size)[::-1]
    answer = wire.decode(flower_site.unpack(reply.content))
    weights_d = np.arange(size // 4, dtype=np.float32)
    return isinstance(answer, SiteUpdate) and np.array_equal(
        answer.delta_d, weights_d[::-1]
    )


_DO = {
    "call": call,
    "nodes": nodes,
    "push_query": push_query,
    "push_train": push_train,
    "push_nothing": push_nothing,
    "pull": pull,
}
