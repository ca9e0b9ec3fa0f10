"""Ways for a process to be killed at a chosen point of a run, or to be refused a disk.

Nothing in the product knows of them: they come in through what the product lets a
caller choose (the store, the listeners), and through a few functions that are
replaced in the doomed process alone.
"""

import errno
import functools
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import deploy.wiring.run_record
import deploy.wiring.run_store
import deploy.wiring.simulation
from cloud_adapters.storage.disk.store import LocalStore
from federation.protocols import Buffer, ObjectInfo

ROUND = 3
MANIFEST = f"round-{ROUND:06d}.json"

LISTENED = {
    "sites train": ("RoundStarted", ROUND),
    "updates are folded": ("SiteAnswered", ROUND),
    "checkpoint event is written": ("CheckpointSaved", ROUND),
    "round has ended": ("RoundFinished", ROUND),
    "run has begun": ("RunStarted", None),
    "run has ended": ("RunFinished", None),
}
STORED = (
    "update is folded, no blob yet",
    "first blob is written",
    "between two blobs",
    "between blobs and manifest",
    "manifest is written, no event yet",
)
REPLACED = ("model is written", "result is written, no report yet")
REFUSALS = {"quota is used up": errno.EDQUOT, "disk turns read-only": errno.EROFS}
KINDS = (*LISTENED, *STORED, *REPLACED)


def die() -> NoReturn:
    """End this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def prepare(kind: str) -> None:
    """Doom this process."""
    if kind == "disk fills up while events are written":
        _listen("RoundStarted", ROUND, _fill_disk)
    elif kind in REFUSALS:
        _listen("RoundStarted", ROUND, functools.partial(_refuse, REFUSALS[kind]))
    elif kind == "bug":
        _listen("SiteAnswered", 1, _fail)
    elif kind in LISTENED:
        _listen(*LISTENED[kind], die)
    elif kind in STORED:
        _KillingStore.kind = kind
        deploy.wiring.run_store.LocalStore = _KillingStore  # type: ignore[attr-defined, misc]
    elif kind == "model is written":
        export = deploy.wiring.run_record.model_export  # type: ignore[attr-defined]
        pieces = export.file_pieces
        export.file_pieces = lambda *a: _first(pieces(*a))  # type: ignore[attr-defined]
    elif kind == "result is written, no report yet":
        deploy.wiring.run_record.leave_report = lambda *_, **__: die()  # type: ignore[attr-defined]
    else:
        raise ValueError(kind)


def _listen(name: str, round_index: int | None, act: Callable[[], None]) -> None:
    simulate = deploy.wiring.simulation.simulate

    def listener(event: object) -> None:
        if type(event).__name__ == name and (
            round_index is None or getattr(event, "round_index", None) == round_index
        ):
            act()

    def simulate_with_listener(*args: Any, **kwargs: Any) -> Any:
        kwargs["listeners"] = [*kwargs.get("listeners", ()), listener]
        return simulate(*args, **kwargs)

    deploy.wiring.simulation.simulate = simulate_with_listener


def _fail() -> None:
    raise ZeroDivisionError("rehearsed")


def _fill_disk() -> None:
    with (Path(os.environ["DISK"]) / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return


def _refuse(number: int) -> None:
    """Let the system refuse, from now on, what a store writes to its folder."""
    open_, refusal = os.open, OSError(number, os.strerror(number))

    def create(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and "dir_fd" in kwargs:
            raise refusal
        return open_(path, flags, *args, **kwargs)

    def write(*_: Any) -> NoReturn:
        raise refusal

    if number == errno.EROFS:
        os.open = create
    else:
        os.write = write


def _first(pieces: Iterable[Buffer]) -> Iterable[Buffer]:
    """Yield one piece and die."""
    for piece in pieces:
        yield piece
        die()


class _KillingStore(LocalStore):
    """A store whose process dies on the way of round 3's checkpoint."""

    kind = ""
    blobs_before = 0
    due = False

    def put(self, key: str, data: Iterable[Buffer], **conditions: Any) -> ObjectInfo:
        if key.endswith(MANIFEST) and self.kind == "between blobs and manifest":
            die()
        if "/blobs/" in key and self.due:
            if self.kind == "update is folded, no blob yet":
                die()
            if self.kind == "first blob is written":
                data = _first(data)
        info = super().put(key, data, **conditions)
        if "/blobs/" in key and self.due and self.kind == "between two blobs":
            die()
        if key.endswith(MANIFEST):
            die()
        if key.endswith(f"round-{ROUND - 1:06d}.json"):
            self.due = True
        return info
