"""The durable state of a site between rounds, restored by round.

Named arrays and small facts, one object for each round that trained, in a store of the
site's own: encrypted if that store is. A round that is repeated begins from what an
earlier round left, whatever came after, so a run that is killed on either side resumes
with the same result.

Nothing is invented. Where there is no state of an earlier round, or one of another run,
model or optimiser, the site logs that it begins afresh; an object that is damaged or of
another version is refused until someone deletes it.

An object: one line of JSON (version, site, round, what it is of, facts), one line with
the SHA-256 of all else, and the arrays as safetensors.

Shape suffixes: m integer values of the model.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.training import state_object
from federation.errors import CorruptObject
from federation.ids import RunId, SiteId
from federation.messages import StateName
from federation.protocols import ObjectStore
from federation.vectors import (
    Allocate,
    Arrays,
    IntegerVector,
    Layout,
    Role,
    Vector,
    in_memory,
)
from privacy.secagg.errors import NoState

VERSION = 2
# Of the lines before the arrays.
MAX_HEAD_BYTES = 1 << 20
RESIDUAL = "residual"  # Name, or its first part, of what updates have left out.
Fact = str | int | float | bool
_CONTEXT = "context"  # A fact: ctx_r of the round, in a secure sum.

_LOG = logging.getLogger(__name__)
_INTEGERS = "integers"  # Values of role ``keep``: each site's own, they never travel.
_NUMBER = re.compile(r"[0-9]{10}")  # Of a round, in the key of its state.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """The state that a round left at a site.

    Attributes:
        arrays: Vectors by name. What follows a slash in a name is its owner's.
        facts: Plain values by name.
    """

    arrays: Arrays = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


NOTHING = KeptState()


@dataclass(eq=False)
class SiteState:
    """The state of one site in one run.

    Attributes:
        layout: Layout of the run's model.
        store: The site's own.
        rounds: States that stay, newest first: one more than the rounds that a
            coordinator may go back.
        carries: The optimiser whose state continues to the next round, by its name
            in the job; empty for none.
        continues: Whether training continues from something else that it keeps; see
            ``federation.job.kept_state``.
        allocate: Makes vectors of what updates have left out, when they are read.
        codec: The codec whose residual does, likewise.
    """

    site: SiteId
    layout: InitVar[Layout]
    store: ObjectStore
    _: KW_ONLY
    rounds: int = 4
    allocate: Allocate = in_memory
    carries: InitVar[str] = ""
    codec: InitVar[str] = ""
    continues: InitVar[bool] = False

    def __post_init__(
        self,
        layout: Layout,
        carries: str,
        codec: str,
        continues: bool,
    ) -> None:
        """Keep state under ``sites/<name>/`` of the store; nothing is read yet."""
        self._of = {"model": layout.digest, "optimizer": carries, "codec": codec}
        self._continues = bool(carries or codec or continues)
        self._prefix = f"sites/{self.site}/state-"
        self._mine: NDArray[np.bool_] = layout.integer_mask(Role.KEEP)
        self._any = bool(self._mine.any())
        self._has_own = self._any or layout.num_personal > 0

    def before(
        self, run_id: RunId, round_index: int, *, trains: bool = True
    ) -> KeptState:
        """Return the state that a round begins with: what the last one before it left.

        Args:
            run_id: The run; what another one left is not used.
            round_index: The round; what later ones left, which a resumed run does
                again, is not used.
            trains: Whether it trains; what training left is not read otherwise.

        Raises:
            CorruptObject: The stored state is not what was stored.
        """
        if not (self._has_own or (trains and self._continues)):
            return NOTHING
        earlier = self._before(round_index)
        if earlier:
            return self._read(earlier[-1], run_id)
        if round_index > 1:
            _LOG.warning(
                "site %s has no state of a round before round %d: it did not take part "
                "before, or lost its state; it starts afresh",
                self.site,
                round_index,
            )
        return NOTHING

    def named(self, run_id: RunId, name: StateName | None) -> KeptState:
        """Return the state of this name, which all sites of a secure sum begin with.

        Raises:
            NoState: The site does not have it.
            CorruptObject: The stored state is not what was stored.
        """
        if name is None:
            return NOTHING
        kept = self.of(run_id, name.round_index)
        if kept.facts.get(_CONTEXT) != name.context:
            raise NoState(
                f"does not have the state of round {name.round_index}, which all sites "
                "begin with: it was not in that round, or its files were lost or "
                "restored from before it"
            )
        return kept

    def newest(self, round_index: int) -> int:
        """The newest round before another one that a state is kept of; 0 for none."""
        keys = self._before(round_index)
        return int(keys[-1].removeprefix(self._prefix)) if keys else 0

    def of(self, run_id: RunId, round_index: int) -> KeptState:
        """Return the state that one round left; nothing if it is no longer stored.

        Raises:
            CorruptObject: The stored state is not what was stored.
        """
        key = self._key(round_index)
        is_stored = any(found.key == key for found in self.store.list(self._prefix))
        return self._read(key, run_id) if is_stored else NOTHING

    def keep(
        self,
        run_id: RunId,
        round_index: int,
        arrays: Arrays,
        facts: Mapping[str, Fact] = MappingProxyType({}),
        *,
        context: str = "",
        before: int = 0,
    ) -> None:
        """Store what a round left, durably; nothing is written if that is nothing.

        Args:
            run_id: No other run begins with it.
            round_index: The round that left it.
            arrays: By name; what follows a slash is their method's.
            facts: Plain values beside them.
            context: The round's ctx_r as hexadecimal digits, in a secure sum.
            before: The round whose state it began with, which stays: if this round is
                lost, the next one begins with it.

        Raises:
            ValueError: These arrays are of no method that the site was made for.
        """
        if not arrays and not facts:
            return
        if arrays and not (self._continues or self._has_own):
            raise ValueError(
                f"{', '.join(arrays)}: list their method in federation.job.kept_state"
            )
        facts = {**facts, _CONTEXT: context} if context else facts
        head = {
            "version": VERSION,
            "site": self.site,
            "round": round_index,
            "of": {"run": run_id, **self._of},
            "facts": dict(facts),
        }
        line = json.dumps(head, sort_keys=True, allow_nan=False).encode() + b"\n"
        digest = hashlib.sha256(line)
        for piece in state_object.pieces(arrays):
            digest.update(piece)
        head_lines = [line, f"{digest.hexdigest()}\n".encode()]
        content = _Content(head_lines, arrays)
        self.store.put(self._key(round_index), content)
        # A site that is seldom asked still needs its last state: what counts is how
        # many there are, not how old they are.
        for key in self._before(round_index + 1)[: -self.rounds]:
            if key != self._key(before):
                self.store.delete(key)

    def restore_integers(
        self, integers_m: IntegerVector, kept: KeptState
    ) -> IntegerVector:
        """Put the site's own integers in place of the server's, which stay as is."""
        own_m = kept.arrays.get(_INTEGERS)
        return integers_m if own_m is None else np.where(self._mine, own_m, integers_m)

    def own_integers(self, integers_m: IntegerVector) -> Arrays:
        """Return what to keep of a round's integers."""
        return {_INTEGERS: np.where(self._mine, integers_m, 0)} if self._any else {}

    def conceal(self, integers_m: IntegerVector) -> IntegerVector:
        """Set what stays at the site to zero."""
        return np.where(self._mine, 0, integers_m) if self._any else integers_m

    def _before(self, round_index: int) -> list[str]:
        """Keys of the states of earlier rounds, in their order."""
        limit, start = self._key(round_index), len(self._prefix)
        stored = [o.key for o in self.store.list(self._prefix) if o.key < limit]
        # Others, such as copies that an operator has made, are not ours.
        return [key for key in stored if _NUMBER.fullmatch(key[start:])]

    def _key(self, round_index: int) -> str:
        return f"{self._prefix}{round_index:010d}"

    def _read(self, key: str, run_id: RunId) -> KeptState:
        cause: Exception | None = None
        try:
            info = self.store.stat(key)
            ranges = _Ranges(self.store, key, info.version)
            begin = self.store.read(key, length=MAX_HEAD_BYTES, if_version=info.version)
            line, digest, _ = begin.split(b"\n", 2)
            ranges.digest.update(line + b"\n")
            head = json.loads(line)
            fault = self._fault(head, key)
            start = len(line) + len(digest) + 2
            arrays = {} if fault else ranges.arrays(start, info.size, self._allocated)
            if not fault and digest.decode("ascii") != ranges.digest.hexdigest():
                fault = "its content does not match its digest"
            if not fault:
                of = {"run": run_id, **self._of}
                others = [
                    name for name, its in of.items() if head["of"].get(name) != its
                ]
                if not others:
                    return KeptState(arrays=arrays, facts=head["facts"])
                _LOG.warning(
                    "site %s does not use %s, which belongs to another %s: it starts "
                    "afresh; restore the state of this run to continue from it",
                    self.site,
                    key,
                    " and ".join(others),
                )
                return NOTHING
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault, cause = "it is damaged or incomplete", error
        raise CorruptObject(
            f"{key} is not a state that this site can use: {fault}. Restore it from a "
            f"backup, or delete every {self._prefix}* to start afresh"
        ) from cause

    def _allocated(self, name: str, size: int) -> Vector:
        is_residual = name.partition("/")[0] == RESIDUAL
        return (self.allocate if is_residual else in_memory)(size)

    def _fault(self, head: Mapping[str, Any], key: str) -> str:
        """Say what is wrong with an object; empty if nothing is."""
        if head["version"] != VERSION:
            version = f"{head['version']!r:.20}"
            return f"it has version {version}, but this release reads {VERSION}"
        if (head["site"], self._key(head["round"])) != (self.site, key):
            return "it belongs to another site or round"
        return ""


@dataclass(frozen=True, slots=True)
class _Content:
    """An object as often as a store asks for it, in pieces."""

    lines: Sequence[bytes]
    arrays: Arrays

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield from self.lines
        yield from state_object.pieces(self.arrays)


class _Ranges:
    """Reads an object's arrays in order, and their digest on the way."""

    def __init__(self, store: ObjectStore, key: str, version: str) -> None:
        self._store, self._key, self._version = store, key, version
        self.digest = hashlib.sha256()

    def arrays(
        self, start: int, size: int, allocate: state_object.AllocateNamed
    ) -> Arrays:
        """Read the safetensors file that begins at a place of the object.

        Raises:
            ValueError: There is none.
        """
        return state_object.read(
            self._range, start=start, size=size - start, allocate=allocate
        )

    def _range(self, start: int, length: int) -> bytes:
        data = self._store.read(
            self._key, start=start, length=length, if_version=self._version
        )
        self.digest.update(data)
        return data
