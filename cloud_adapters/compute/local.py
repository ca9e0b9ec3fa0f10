"""Nodes that are processes of this host, for a federation on one machine.

They outlive the command that launched them, as machines of a cloud do, and are found
again by their labels in one folder. A node that was killed, or whose host was
restarted, is gone and never starts again: launch another one with another token.
"""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_adapters.compute.local_files import (
    LOCK,
    LOG,
    NODE,
    STOP,
    LocalNode,
    NodeEnded,
    NodeReady,
    NodeStarted,
    NodeTrouble,
    check_own,
    read,
    tail,
    write,
)
from cloud_adapters.compute.pool import Market, Node, NodeSpec, NodeState
from federation import folder_lock
from federation.errors import ComputeError, StoreUnavailable, os_errors

if TYPE_CHECKING:
    from federation.protocols import Clock

_SHOWN_LOG = 2000
_LOOK_SECONDS = 0.1
_TOKEN_DIGITS = 12
# Of a node that has not written down why it ended.
_NO_REASON = "it was killed, this host was restarted, or its disk was full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPool:
    """Nodes below one folder; see ``ComputePool``.

    Attributes:
        folder: Holds a folder for each node. Only its owner may write there: who can,
            runs programs as the owner.
        working_folder: Where the programs of nodes run.
        clock: Tells time.
    """

    folder: Path
    working_folder: Path
    clock: "Clock"

    def launch(self, spec: NodeSpec, token: str) -> Node:
        """See ``ComputePool``."""
        digest = hashlib.sha256(token.encode()).hexdigest()[:_TOKEN_DIGITS]
        place = self.folder / f"{spec.name}-{digest}"
        advice = "name a folder that this user can write to"
        with os_errors(StoreUnavailable, f"make {place}", advice):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(self.folder)
            if not place.exists():
                self._make(place, spec)
        if _is_new(place):
            self._start(place)
        return _node(place)

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """See ``ComputePool``."""
        looked = (_node_or_none(place, labels) for place in self._places())
        found = [n for n in looked if n and labels.items() <= n.labels.items()]
        return sorted(found, key=lambda node: (node.launched, node.id))

    def terminate(self, ids: Collection[str]) -> None:
        """See ``ComputePool``."""
        for place in self._places():
            if place.name in ids:
                with os_errors(StoreUnavailable, f"write {place / STOP}"):
                    (place / STOP).touch()

    def log(self, node_id: str) -> str:
        """See ``ComputePool``."""
        for place in self._places():
            if place.name == node_id:
                return tail(place / LOG)
        return ""

    def clean_up(self) -> None:
        """See ``ComputePool``: a process leaves nothing."""

    def _places(self) -> Iterator[Path]:
        with os_errors(StoreUnavailable, f"read {self.folder}"):
            if self.folder.is_dir():
                check_own(self.folder)
                # A folder without the file is one that a killed launch was preparing.
                yield from (path.parent for path in self.folder.glob(f"*/{NODE}"))

    def _make(self, place: Path, spec: NodeSpec) -> None:
        """Make a node's folder; if two try, one succeeds."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as name:
            made = Path(name) / "node"
            made.mkdir(mode=0o700)
            node = LocalNode(
                name=spec.name,
                command=tuple(spec.command),
                environment=tuple(spec.environment.items()),
                labels=tuple(spec.labels.items()),
                max_seconds=spec.max_seconds,
                market=spec.market.value,
                launched=self.clock.now(),
            )
            write(made, node)
            # A folder that is there and not empty is not replaced.
            with contextlib.suppress(OSError):
                made.rename(place)
        if not (place / NODE).exists():
            raise ComputeError(f"cannot make {place}: something else has this name")

    def _start(self, place: Path) -> None:
        """Start a node's process, and wait until it is one.

        Raises:
            ComputeError: It did not become one.
        """
        module = "cloud_adapters.compute.local_node"
        with (place / LOG).open("ab") as log:
            code = subprocess.run(  # noqa: S603 -- the command is ours
                [sys.executable, "-I", "-m", module, place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.working_folder,
                start_new_session=True,
                check=False,
            ).returncode
        # Another launch with this token may be starting it.
        while code and _is_new(place) and folder_lock.is_held(place / LOCK):
            self.clock.sleep(_LOOK_SECONDS)
        if code and _is_new(place):
            raise ComputeError(
                f"node {place.name} did not start; its log ends:\n"
                f"{tail(place / LOG)[-_SHOWN_LOG:]}"
            )


def _is_new(place: Path) -> bool:
    """Whether a node was made, but neither started nor was asked to stop."""
    return not (place / STOP).exists() and read(place, NodeStarted) is None


def _node_or_none(place: Path, labels: Mapping[str, str]) -> Node | None:
    """Look at a node; None for one whose files are damaged, and that is not at work.

    One that is at work has the labels that are asked for: it may carry any.
    """
    try:
        return _node(place)
    except ComputeError as error:
        if not folder_lock.is_held(place / LOCK):
            return None
        is_asked = (place / STOP).exists()
        return Node(
            id=place.name,
            name=place.name,
            state=NodeState.STOPPING if is_asked else NodeState.RUNNING,
            labels=labels,
            launched=(place / NODE).stat().st_mtime,
            trouble=str(error),
        )


def _node(place: Path) -> Node:
    """Look at a node.

    Raises:
        ComputeError: One of its files is damaged.
    """
    node = read(place, LocalNode)
    if node is None:
        raise ComputeError(f"{place} went while it was looked at")
    # In this order: one that ends meanwhile has left the later file.
    works = folder_lock.is_held(place / LOCK)
    started, ended = read(place, NodeStarted), read(place, NodeEnded)
    is_asked = (place / STOP).exists()
    ready = works and read(place, NodeReady) is not None
    trouble = read(place, NodeTrouble)
    text = "" if trouble is None else trouble.text
    if works and ended is None:
        state = NodeState.STOPPING if is_asked else NodeState.RUNNING
    elif ended is not None:
        state, text = NodeState.GONE, ended.why
    elif started is not None:
        state, text = NodeState.GONE, _NO_REASON
    else:
        state = NodeState.GONE if is_asked else NodeState.STARTING
    return Node(
        id=place.name,
        name=node.name,
        state=state,
        labels=dict(node.labels),
        market=Market(node.market),
        launched=node.launched,
        ended=None if ended is None else ended.at,
        trouble=text,
        ready=ready,
    )
