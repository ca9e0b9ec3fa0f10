"""Local steps that a site keeps when it must leave in the middle of a round.

A machine that is about to go often has no time to finish its round, and its answer
would come too late. What its steps have led to is then stored in the site's own store,
which a replacement of the machine has too. If the same round is asked again, with the
same model, the replacement continues after the last step, and its result is the same to
the last bit. The state of any other round is removed.

Private steps continue in any round that begins with the same model and is charged for
as many of the same kind: their samples and noise are fresh. What they cost is in
``clients.privacy.spending``.

Only where a round may be continued: see ``JobSpec.continues_rounds``. The state never
leaves the site.

An object: one line of JSON (version, what it is of, facts, and names, types and shapes
of arrays), the arrays' bytes one after the other, and 32 bytes of SHA-256 of all that.
It is written in pieces, without a second copy in memory, and appears whole or not at
all. One that is damaged is ignored: the round begins with its first step.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.training.site_state import Fact, KeptState
from federation.errors import ObjectNotFound, SiteError, StoreError, StoreUnavailable
from federation.ids import RunId, SiteId
from federation.job.job_digest import digest as digest_of
from federation.job.spec import JobSpec
from federation.protocols import Clock, ObjectStore
from federation.vectors import Arrays, IntegerVector, Vector

VERSION = 1
# The machine goes after 30 s on Compute Engine, and after as long in Kubernetes.
WRITE_SECONDS = 20.0
# Of the time between two periodic copies, at most this share is spent on writing.
_MOST_SHARE = 0.1
_PIECE_BYTES = 8 << 20
_DIGEST_BYTES = 32
# Beside the model: of optimisers with a long memory, of buffers and names.
_SLACK_BYTES = 1 << 30
_HEAD_BYTES = 16 << 20
# Bytes kept for each byte of the model: itself, two moments, and twice that to spare.
_MOST_TIMES = 9
_TYPES = frozenset(
    {
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "bool"),
    }
)

_LOG = logging.getLogger(__name__)

Snapshot = Callable[[], KeptState | None]


class LeftAtStep(SiteError):
    """The site leaves before its round is done."""


def most_bytes(model_bytes: int) -> int:
    """The largest state that is kept or read, for a model of so many bytes.

    Nothing else bounds what a store claims to hold, and reading takes as much memory.
    """
    return _SLACK_BYTES + _MOST_TIMES * model_bytes


def stays() -> bool:
    """Never leave."""
    return False


def nothing() -> None:
    """Do nothing more when a state is stored."""


def start_digest(
    weights_d: Vector,
    integers_m: IntegerVector,
    kept: Arrays,
    steps: range | None = None,
) -> str:
    """SHA-256 of all that a round's training begins with, and of steps it was given."""
    found = hashlib.sha256(b"" if steps is None else repr(steps).encode())
    every: dict[str, NDArray[Any]] = {"d": weights_d, "m": integers_m, **kept}
    for name, array in sorted(every.items()):
        found.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        found.update(_bytes_of(array))
    return found.hexdigest()


@dataclass(eq=False)
class KeptSteps:
    """The local steps of one run at one site, if it was interrupted.

    Attributes:
        store: Its own.
        clock: Tells time.
        leaves: Whether the site leaves without finishing its round.
        confirm: Called when a state is stored: it reaches the site's home, if any.
        steps: Entered while steps are taken that can be kept.
        writing: Entered while a state is written, for which the process may wait.
        every_seconds: Time between two copies that are made without a notice; 0 makes
            none.
        charge: Names the round's entry in the site's privacy ledger; empty where steps
            are not private.
        event: The kind and number of its private steps.
    """

    site: SiteId
    store: ObjectStore
    _: KW_ONLY
    run_id: RunId
    job: JobSpec
    clock: Clock
    leaves: Callable[[], bool] = stays
    confirm: Callable[[], None] = nothing
    steps: Callable[[], AbstractContextManager[object]] = nullcontext
    writing: Callable[[], AbstractContextManager[object]] = nullcontext
    every_seconds: float = 0.0
    charge: str = field(default="", init=False)
    event: str = field(default="", init=False)
    _most_bytes: int = field(default=_SLACK_BYTES, init=False)
    _due: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        """Read nothing yet."""
        self._key = f"sites/{self.site}/steps"
        self._of: Mapping[str, Fact] = {
            "version": VERSION,
            "site": self.site,
            "run": self.run_id,
            "job": digest_of(self.job).hex(),
        }

    def begin(
        self, round_index: int, start: Callable[[], str], *, model_bytes: int = 0
    ) -> KeptState | None:
        """Begin a round, and return what is kept of it; None for a new beginning.

        Args:
            round_index: Number of the round, from 1.
            start: Computes ``start_digest``, which is needed if there is a state.
            model_bytes: Of the values of the model; see ``most_bytes``.
        """
        self._most_bytes = most_bytes(model_bytes)
        if self.every_seconds:
            self._due = self.clock.monotonic() + self.every_seconds
        try:
            content = self._read()
        except ObjectNotFound:
            return None
        except StoreError as error:
            _LOG.warning("site %s cannot read %s: %s", self.site, self._key, error)
            return None
        try:
            head, arrays = _parsed(content)
            of = {**self._of_round(round_index), "start": start()}
            odd = [name for name, its in of.items() if head["of"].get(name) != its]
            facts = dict(head["facts"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            odd, fault = [], f"is damaged ({error})"
        else:
            fault = f"belongs to another {' and '.join(odd)}" if odd else ""
        if fault:
            _LOG.warning(
                "site %s: %s %s and is removed; round %d begins with its first step",
                self.site,
                self._key,
                fault,
                round_index,
            )
            self.forget()
            return None
        _LOG.warning(
            "site %s continues round %d after step %s, which was kept when it left",
            self.site,
            round_index,
            facts.get("position"),
        )
        return KeptState(arrays=arrays, facts=facts)

    def left_under(self) -> str:
        """Under which charge the site left in order, with its steps; empty for none.

        Damage that only ``begin`` finds costs the steps, and no other answer.
        """
        try:
            content = self.store.read(self._key, length=_HEAD_BYTES)
            head = json.loads(content[: content.index(b"\n")])
            is_ours = self._of.items() <= head["of"].items()
            return str(head["left"]) if is_ours else ""
        except (StoreError, ValueError, KeyError, TypeError, AttributeError):
            return ""

    def _read(self) -> memoryview:
        """Read an object; nothing of one that is larger than any of the model."""
        size = self.store.stat(self._key).size
        if size <= self._most_bytes:
            return memoryview(self.store.read(self._key))
        _LOG.warning(
            "site %s does not read %s: it has %s bytes, and at most %s are kept",
            self.site,
            self._key,
            f"{size:,}",
            f"{self._most_bytes:,}",
        )
        return memoryview(b"")

    def after_step(
        self, round_index: int, start: Callable[[], str], snapshot: Snapshot
    ) -> None:
        """Keep a step's state if the site leaves now, or if a copy is due.

        Args:
            round_index: Number of the round, from 1.
            start: Computes ``start_digest``.
            snapshot: Copies the state; returns None if this one cannot be kept.

        Raises:
            LeftAtStep: The site leaves: no more steps are taken.
        """
        is_last = self.leaves()
        if not is_last and self.clock.monotonic() < self._due:
            return
        with self.writing():
            text = self._keep(round_index, start, snapshot, is_last=is_last)
        if is_last:
            raise LeftAtStep(
                f"site {self.site!r} leaves during round {round_index}: {text}. The "
                "round waits for it only if its quorum needs this site; steps that are "
                "kept continue when it is asked to train from the same model"
            )

    def forget(self) -> None:
        """Remove what is kept: its round is over, or another one began."""
        try:
            self.store.delete(self._key)
        except StoreError as error:
            _LOG.warning("site %s cannot remove %s: %s", self.site, self._key, error)

    def _of_round(self, round_index: int) -> Mapping[str, Fact]:
        if self.charge:
            return {**self._of, "event": self.event}
        return {**self._of, "round": round_index}

    def _keep(
        self,
        round_index: int,
        start: Callable[[], str],
        snapshot: Snapshot,
        *,
        is_last: bool,
    ) -> str:
        """Store a state; an error costs these steps and nothing else."""
        begin = self.clock.monotonic()
        found = snapshot()
        if found is None or _size_of(found) > self._most_bytes:
            self._due = math.inf
            return "its steps are lost: not all of their state can be kept"
        of: Mapping[str, Fact] = {**self._of_round(round_index), "start": start()}
        head = {"of": of, "left": self.charge if is_last else ""}
        try:
            self.store.put(self._key, self._pieces(head, found, begin + WRITE_SECONDS))
            self.confirm()
        except StoreError as error:
            text = f"its steps are lost: {error}"
            _LOG.warning("site %s: %s", self.site, text)
        else:
            text = f"its {found.facts.get('position')} steps are kept"
        now = self.clock.monotonic()
        if self.every_seconds:
            pause = (now - begin) / _MOST_SHARE
            self._due = now + max(self.every_seconds, pause)
        return text

    def _pieces(
        self, head: Mapping[str, Any], state: KeptState, end: float
    ) -> Iterator[bytes | memoryview]:
        """Yield an object, piece by piece.

        Raises:
            StoreUnavailable: It takes longer than the machine may stay.
        """
        rows = [[name, str(a.dtype), a.shape] for name, a in state.arrays.items()]
        head = {**head, "facts": dict(state.facts), "arrays": rows}
        line = json.dumps(head, sort_keys=True).encode() + b"\n"
        found = hashlib.sha256(line)
        yield line
        for array in state.arrays.values():
            content = _bytes_of(array)
            for begin in range(0, len(content), _PIECE_BYTES):
                if self.clock.monotonic() > end:
                    raise StoreUnavailable(
                        f"writing {self._key} takes more than {WRITE_SECONDS:g} s"
                    )
                piece = content[begin : begin + _PIECE_BYTES]
                found.update(piece)
                yield piece
        yield found.digest()


def _size_of(state: KeptState) -> int:
    """Bytes of a state's arrays, with room for the line before them."""
    return sum(array.nbytes for array in state.arrays.values()) + _HEAD_BYTES


def _bytes_of(array: NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def _parsed(content: memoryview) -> tuple[Mapping[str, Any], Arrays]:
    """Read an object.

    Raises:
        ValueError: It is not what was stored; or a ``KeyError`` or ``TypeError``.
    """
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("its content does not match its digest")
    end = bytes(body[: 1 << 24]).index(b"\n") + 1
    head = json.loads(bytes(body[:end]))
    arrays: dict[str, NDArray[Any]] = {}
    for name, type_name, shape in head["arrays"]:
        if type_name not in _TYPES:
            raise ValueError(f"it has an array of {type_name}")
        dtype, count = np.dtype(type_name), math.prod(shape)
        size = dtype.itemsize * count
        arrays[name] = np.frombuffer(body[end : end + size], dtype).reshape(shape)
        end += size
    if end != len(body):
        raise ValueError("its arrays do not fill it")
    return head, arrays
