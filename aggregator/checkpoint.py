"""Durable states of one run: blobs first, then a manifest by create-only put.

    <prefix>round-000042.json           what the state is made of, with digests
    <prefix>blobs/sha256-<hex>.safetensors   weights; state of the server optimiser
    <prefix>quarantine/                 what was found damaged, moved aside

A checkpoint exists once its manifest does, and of several coordinators one writes
it. The weights blob is a safetensors file with the model's own tensor names, so a
checkpoint is also a model; its float tensors lie one after another in the order of
the layout, which lets a load fill the flat vector range by range.

Not here: when to save (``federation.coordinator``), and tensors in the model's own
types (the exported model): a checkpoint keeps the float32 master weights.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator import manifest as manifests
from aggregator import tensor_file
from aggregator.manifest import Blob, Manifest
from federation.errors import (
    CheckpointMismatch,
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    RunConflict,
)
from federation.events import CheckpointSkipped, Emit
from federation.job_file import differences
from federation.protocols import Buffer, Clock, ObjectStore, RunState
from federation.vectors import Layout, Vector

READ_BYTES = 8 << 20  # Of a blob at a time.

_MANIFEST_NAME = re.compile(r"round-(\d{6,12})\.json")
# Readers that know models by framework (Hugging Face's) ask for this entry.
_METADATA = {"format": "pt"}


class RunCheckpoints:
    """The ``federation.protocols.Checkpoints`` of a run in an object store.

    Guarantee:
        A save that is cut short at any moment leaves every earlier checkpoint
        loadable. A load returns bytes whose SHA-256 is that of the saved ones, or
        raises; it never repairs or guesses.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        prefix: str,
        run_id: str,
        job: Mapping[str, Any],
        layout: Layout,
        keep: int,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Describe the run; nothing is read or written yet.

        Args:
            store: Where the checkpoints lie.
            prefix: Of all their keys: empty, or ending in a slash.
            run_id: The run.
            job: The resolved job as nested plain values (``job_file.document``).
            layout: Layout of the run's model.
            keep: How many checkpoints to keep, at least 1.
            emit: Takes a ``CheckpointSkipped`` for each damaged checkpoint.
            clock: Dates the events.

        Raises:
            ValueError: ``keep`` or ``prefix`` is out of range.
        """
        if keep < 1:
            raise ValueError(f"cannot keep {keep} checkpoints: keep at least 1")
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"the prefix {prefix!r} must end in a slash")
        self._store = store
        self._prefix = prefix
        self._run_id = run_id
        # As it will come back: JSON has lists where Python may have tuples.
        self._job: Mapping[str, Any] = json.loads(json.dumps(job, allow_nan=False))
        self._layout = layout
        self._keep = keep
        self._emit = emit
        self._clock = clock
        # Blobs that this object has written or verified, so that one of which
        # nothing is known is written anew instead of trusted for its name.
        self._known_whole: set[str] = set()
        self._unnamed: set[str] = set()

    def save(self, state: RunState) -> int:
        """Make a state durable and return the bytes written.

        1. Write the blobs; one that is there and whole is not written again.
        2. Write the manifest, which makes the checkpoint exist.
        3. Remove what is older than the last ``keep`` checkpoints.

        Raises:
            ValueError: A vector of the state does not fit the layout.
            RunConflict: Another coordinator has saved this round.
            StoreUnavailable: The store is full, read-only or out of reach.
        """
        self._check_shapes(state)
        # 1.
        weights, written = self._write_blob(_weights_pieces(self._layout, state))
        optimizer = None
        if state.optimizer:
            optimizer, more = self._write_blob(
                tensor_file.pieces(state.optimizer, _METADATA)
            )
            written += more
        manifest = Manifest(
            key=f"{self._prefix}round-{state.round_index:06d}.json",
            run_id=self._run_id,
            round_index=state.round_index,
            rounds_completed=state.rounds_completed,
            lost_in_a_row=state.lost_in_a_row,
            update_clip=state.update_clip,
            job=self._job,
            layout=self._layout,
            weights=weights,
            optimizer=optimizer,
            optimizer_names=tuple(state.optimizer),
        )
        content = manifests.encode(manifest)
        try:  # 2.
            self._store.put(manifest.key, [content], if_absent=True)
        except ObjectExists as error:
            raise self._conflict(manifest.key) from error
        self._retire(manifest.key)  # 3.
        return written + len(content)

    def load_latest(self) -> RunState | None:
        """Return the newest state that is whole, or None if the run has none.

        1. From the newest on: verify the manifest, then that it is of this run,
           then each byte of its blobs. Nothing is changed.
        2. Once a whole one is found, move the damaged newer ones aside: their
           rounds will be saved again.

        Raises:
            CheckpointMismatch: The run was started from another job.
            LayoutMismatch: The run's model has another layout.
            CorruptObject: Checkpoints exist and not one of them is whole.
            StoreUnavailable: The store is out of reach.
        """
        damages: list[tuple[str, _Damaged]] = []
        for key in reversed(self._manifest_keys()):
            try:  # 1.
                manifest = self._read_manifest(key)
                self._check_ours(manifest)
                state = self._read_state(manifest)
            except _Damaged as damage:
                damages.append((key, damage))
                continue
            for damaged in damages:  # 2.
                self._skip(*damaged)
            return state
        if damages:
            reasons = "; ".join(str(damage) for _, damage in damages)
            raise CorruptObject(
                f"none of the run's {len(damages)} checkpoints is whole: {reasons}; "
                "restore them from a copy, or start a new run"
            )
        return None

    def _check_shapes(self, state: RunState) -> None:
        sizes = {"weights_d": state.weights_d, **state.optimizer}
        for name, vector_d in sizes.items():
            if vector_d.shape != (self._layout.size,) or vector_d.dtype != np.float32:
                raise ValueError(
                    f"{name} is {vector_d.dtype}{list(vector_d.shape)}, not "
                    f"float32[{self._layout.size}]"
                )
        num_integers = self._layout.num_integers
        found_m = state.integers_m
        if found_m.shape != (num_integers,) or found_m.dtype != np.int64:
            raise ValueError(
                f"integers_m is {found_m.dtype}{list(found_m.shape)}, not "
                f"int64[{num_integers}]"
            )

    def _write_blob(self, pieces: Sequence[Buffer]) -> tuple[Blob, int]:
        """Write a blob unless it is known to be there; also return bytes written."""
        blob = Blob.of(pieces)
        key = self._prefix + blob.key
        if key in self._known_whole and self._size(key) == blob.size:
            return blob, 0
        self._store.put(key, pieces)
        self._known_whole.add(key)
        return blob, blob.size

    def _size(self, key: str) -> int | None:
        try:
            return self._store.stat(key).size
        except ObjectNotFound:
            return None

    def _conflict(self, key: str) -> RunConflict:
        return RunConflict(
            f"{key} was written by another coordinator that works on this run, "
            f"{self._run_id}; leave the run to that one, or stop it and resume"
        )

    def _manifest_keys(self) -> Sequence[str]:
        """Keys of all manifests, oldest round first."""
        rounds = {}
        for info in self._store.list(f"{self._prefix}round-"):
            match = _MANIFEST_NAME.fullmatch(info.key.removeprefix(self._prefix))
            if match:
                rounds[info.key] = int(match[1])
        return sorted(rounds, key=lambda key: rounds[key])

    def _read_manifest(self, key: str) -> Manifest:
        """Read a manifest and verify its digest.

        Raises:
            _Damaged: It is torn, altered or gone.
            CheckpointMismatch: It was written by another version of crossfed.
        """
        try:
            content = self._store.read(key, length=manifests.MAX_MANIFEST_BYTES + 1)
        except ObjectNotFound as error:
            raise _Damaged(f"{key} is gone") from error
        try:
            return manifests.decode(key, content)
        except CorruptObject as error:
            raise _Damaged(str(error), key) from error

    def _check_ours(self, manifest: Manifest) -> None:
        """Check that a whole manifest belongs to this run, job and model."""
        if manifest.run_id != self._run_id:
            raise CheckpointMismatch(
                f"{manifest.key} belongs to the run {manifest.run_id!r}, not to "
                f"{self._run_id!r}; resume that run, or start in an empty folder"
            )
        found = differences(self._job, manifest.job)
        if found:
            raise CheckpointMismatch(
                f"the run was started from another job than this one: "
                f"{'; '.join(found)} (there: {manifest.key}). Set these keys back to "
                "resume, or start a new run"
            )
        self._layout.check_same(manifest.layout, whose=f"the checkpoint {manifest.key}")

    def _read_state(self, manifest: Manifest) -> RunState:
        """Fill new arrays from the blobs of a manifest and verify every byte."""
        weights_d = np.empty(self._layout.size, dtype=np.float32)
        integers_m = np.empty(self._layout.num_integers, dtype=np.int64)
        self._read_blob(manifest.weights, [integers_m, weights_d])
        optimizer: dict[str, Vector] = {
            name: np.empty_like(weights_d) for name in manifest.optimizer_names
        }
        if manifest.optimizer is not None:
            self._read_blob(manifest.optimizer, list(optimizer.values()))
        return RunState(
            round_index=manifest.round_index,
            weights_d=weights_d,
            integers_m=integers_m,
            optimizer=optimizer,
            rounds_completed=manifest.rounds_completed,
            lost_in_a_row=manifest.lost_in_a_row,
            update_clip=manifest.update_clip,
        )

    def _read_blob(self, blob: Blob, arrays: Sequence[NDArray[Any]]) -> None:
        """Fill arrays from the end of a blob, range by range, and verify it.

        Raises:
            _Damaged: The blob is missing, or not the one that was written.
        """
        key = self._prefix + blob.key
        size = self._size(key)
        if size is None:
            raise _Damaged(f"{key} is missing")
        if size != blob.size:
            raise _Damaged(f"{key} has {size} bytes instead of {blob.size}", key)
        header_bytes = blob.size - sum(array.nbytes for array in arrays)
        digest = hashlib.sha256()
        offset = 0
        header = bytearray(max(0, header_bytes))
        views = [array.view(np.uint8).data for array in arrays]
        for target in (memoryview(header), *views):
            for start in range(0, len(target), READ_BYTES):
                length = min(READ_BYTES, len(target) - start)
                part = self._store.read(key, start=offset, length=length)
                if len(part) != length:
                    raise _Damaged(f"{key} ends at byte {offset + len(part)}", key)
                digest.update(part)
                target[start : start + length] = part
                offset += length
        if digest.hexdigest() != blob.sha256:
            raise _Damaged(f"{key} does not have the SHA-256 of its name", key)
        if int.from_bytes(header[:8], "little") != header_bytes - 8:
            raise _Damaged(f"{key} does not hold what its manifest says", key)
        self._known_whole.add(key)

    def _skip(self, manifest_key: str, damage: "_Damaged") -> None:
        self._emit(
            CheckpointSkipped(
                at=self._clock.now(), key=manifest_key, reason=str(damage)
            )
        )
        if damage.key is not None and damage.key != manifest_key:
            self._move_aside(damage.key)
        self._move_aside(manifest_key)

    def _move_aside(self, key: str) -> None:
        size = self._size(key)
        if size is None:  # Gone, or moved for another round that shared it.
            return
        target = f"{self._prefix}quarantine/{key.rpartition('/')[2]}."
        number = 1 + sum(1 for _ in self._store.list(target))
        self._store.put(f"{target}{number}", self._parts(key, size))
        self._store.delete(key)
        self._known_whole.discard(key)

    def _parts(self, key: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, READ_BYTES):
            yield self._store.read(key, start=start, length=READ_BYTES)

    def _retire(self, newest: str) -> None:
        """Remove old manifests, then the blobs that no manifest names any more.

        In this order a crash in between leaves blobs without a manifest, never a
        manifest without its blobs.

        Raises:
            RunConflict: There are later rounds than the one that we have saved.
        """
        keys = self._manifest_keys()
        if not keys or keys[-1] != newest:
            # Their first rounds may be retired, so that ours met no manifest.
            raise self._conflict(keys[-1] if keys else newest)
        old, kept = keys[: -self._keep], keys[-self._keep :]
        try:
            needed = {name for key in kept for name in self._blobs_named_by(key)}
        except (_Damaged, CheckpointMismatch):
            return  # What it needs is unknown: nothing is removed this time.
        retired: set[str] = set()
        for key in old:
            # If it cannot be read, its blobs are found as unnamed ones.
            with contextlib.suppress(_Damaged, CheckpointMismatch):
                retired |= self._blobs_named_by(key)
            self._store.delete(key)
        blobs = {info.key for info in self._store.list(f"{self._prefix}blobs/")}
        unnamed = blobs - needed
        # A blob that was never named may be one that another coordinator is about
        # to name: it goes only when it is still unnamed one save later.
        doomed = unnamed & (retired | self._unnamed)
        for key in sorted(doomed):
            self._store.delete(key)
        self._unnamed = unnamed - doomed
        self._known_whole -= doomed

    def _blobs_named_by(self, manifest_key: str) -> set[str]:
        manifest = self._read_manifest(manifest_key)
        return {
            self._prefix + blob.key
            for blob in (manifest.weights, manifest.optimizer)
            if blob is not None
        }


class _Damaged(CorruptObject):
    """A checkpoint that must not be used, and the object that is to blame."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def _weights_pieces(layout: Layout, state: RunState) -> list[Buffer]:
    # Integers first: 8-byte values at the start leave every tensor aligned.
    views = [*layout.integer_views(state.integers_m)]
    floats = [*layout.float_views(state.weights_d)]
    tensors: dict[str, NDArray[Any]] = {spec.name: view for spec, view in views}
    tensors |= {spec.name: view for spec, view in floats}
    return tensor_file.pieces(tensors, _METADATA)
