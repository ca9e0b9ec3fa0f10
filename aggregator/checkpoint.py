"""Durable states of one run: blobs first, then a manifest by create-only put.

    <prefix>round-000042.json           what the state is made of, with digests
    <prefix>blobs/sha256-<hex>.safetensors   weights; state of the server optimiser;
                                             the best model or the average, if kept
    <prefix>chunks/sha256-<hex>              parts of such a blob, where it is large
    <prefix>quarantine/                 what was found damaged, moved aside

A checkpoint exists once its manifest does, and of several coordinators one writes
it. The weights blob is a safetensors file with the model's own tensor names, so a
checkpoint is also a model; its float tensors lie one after another in the order of
the layout, which lets a load fill the flat vector range by range. Chunks of a large
blob, one after another, are that file; of a chunk that has not changed since an
earlier round nothing is sent.

Not here: objects and their digests (``aggregator.checkpoint_objects``), when to save
(``federation.rounds.coordinator``), and tensors in the model's own types (the exported
model): a checkpoint keeps the float32 master weights.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator import manifest as manifests, tensor_file
from aggregator.checkpoint_objects import BadCheckpoint, CheckpointObjects
from aggregator.manifest import Blob, Manifest
from federation.errors import (
    CheckpointMismatch,
    CorruptObject,
    ObjectExists,
    RunConflict,
)
from federation.events import CheckpointSkipped, Emit, RunExtended
from federation.ids import SiteId
from federation.job.job_extension import check_same
from federation.messages import LedgerAnchor, join_anchors
from federation.protocols import (
    Buffer,
    Clock,
    KeptModel,
    ObjectInfo,
    ObjectStore,
    RunState,
)
from federation.vectors import Allocate, Layout, Vector, in_memory

CHUNK_BYTES = 8 << 20

# Readers that know models by framework (Hugging Face's) ask for this entry.
_METADATA = {"format": "pt"}


@dataclass(kw_only=True, eq=False)
class RunCheckpoints:
    """The ``federation.protocols.Checkpoints`` of a run in an object store.

    Guarantee:
        A save that is cut short at any moment leaves every earlier checkpoint
        loadable. A load returns bytes whose SHA-256 is that of the saved ones, or
        raises; it never repairs or guesses.

    Attributes:
        store: Where the checkpoints lie.
        prefix: Prefix of all their keys: empty, or ending in a slash.
        job: The resolved job as nested plain values (``job_file.document``).
        layout: Layout of the run's model.
        keep: How many checkpoints to keep, at least 1.
        emit: Takes a ``CheckpointSkipped`` for each damaged checkpoint.
        clock: Dates the events.
        chunk_bytes: A larger blob is stored in chunks of this size.
        extensions: How the job was extended, in order.
        newest_saved: The newest round that was saved, by the run's record of events;
            None if it names none.
        allocate: Makes the vectors of a state that is loaded.

    Raises:
        ValueError: ``keep``, ``prefix`` or ``chunk_bytes`` is out of range.
    """

    store: ObjectStore
    prefix: str
    run_id: str
    job: Mapping[str, Any]
    layout: Layout
    keep: int
    emit: Emit
    clock: Clock
    chunk_bytes: int = CHUNK_BYTES
    extensions: Sequence[RunExtended] = ()
    newest_saved: int | None = None
    allocate: Allocate = in_memory

    def __post_init__(self) -> None:
        """Check the values; nothing is read or written yet."""
        if self.chunk_bytes < 1:
            raise ValueError(f"a chunk cannot have {self.chunk_bytes} bytes")
        if self.keep < 1:
            raise ValueError(f"cannot keep {self.keep} checkpoints: keep at least 1")
        if self.prefix and not self.prefix.endswith("/"):
            raise ValueError(f"the prefix {self.prefix!r} must end in a slash")
        self._objects = CheckpointObjects(self.store, self.prefix)
        # As it will come back: JSON has lists where Python may have tuples.
        self.job = json.loads(json.dumps(self.job, allow_nan=False))
        self._unnamed: set[str] = set()
        # What manifests that this object has written name, by key and version.
        self._named: dict[tuple[str, str], set[str]] = {}

    def save(self, state: RunState) -> int:
        """Make a state durable and return the bytes written.

        1. Write the blobs; one that is there and whole is not written again.
        2. Write the manifest, which makes the checkpoint exist.
        3. Remove what is older than the last ``keep`` checkpoints.

        Raises:
            ValueError: A vector of the state does not fit the layout.
            RunConflict: Another coordinator has saved this round.
            StoreUnavailable: The store is full, read-only or unreachable.
        """
        self._check_shapes(state)
        # 1.
        weights, written = self._write_blob(_weights_pieces(self.layout, state))
        optimizer = kept = None
        if state.kept is not None:
            kept, more = self._write_blob(_weights_pieces(self.layout, state.kept))
            written += more
        if state.optimizer:
            optimizer, more = self._write_blob(
                tensor_file.pieces(state.optimizer, _METADATA)
            )
            written += more
        manifest = Manifest(
            key=f"{self.prefix}round-{state.round_index:06d}.json",
            run_id=self.run_id,
            **state.progress(),
            job=self.job,
            layout=self.layout,
            weights=weights,
            optimizer=optimizer,
            optimizer_names=tuple(state.optimizer),
            kept=kept,
        )
        content = manifests.encode(manifest)
        try:  # 2.
            info = self.store.put(manifest.key, [content], if_absent=True)
        except ObjectExists as error:
            raise self._conflict(manifest.key) from error
        self._named[info.key, info.version] = self._names(manifest)
        self._retire(manifest.key)  # 3.
        return written + len(content)

    def anchors(self) -> Mapping[SiteId, LedgerAnchor]:
        """Return the largest anchor of each site that any manifest holds.

        No blob is read, so that it is quick, and a checkpoint whose weights are
        damaged counts.

        Raises:
            StoreUnavailable: The store is unreachable.
        """
        found: dict[SiteId, LedgerAnchor] = {}
        for key in self._objects.manifest_keys():
            with contextlib.suppress(BadCheckpoint, CheckpointMismatch):
                manifest = self._objects.read_manifest(key)
                found = join_anchors(found, manifest.anchors)
        return found

    def load_latest(self) -> RunState | None:
        """Return the newest state that is whole, or None if the run has none.

        1. From the newest on: verify the manifest, then that it is of this run,
           then each byte of its blobs. Nothing is changed.
        2. Once a whole one is found, move the damaged newer ones aside: their
           rounds will be saved again.

        Raises:
            CheckpointMismatch: The run was started from another job.
            LayoutMismatch: The run's model has another layout.
            CorruptObject: Checkpoints exist and not one of them is whole, or there is
                none although the run's record names one.
            StoreUnavailable: The store is unreachable.
        """
        damages: list[tuple[str, BadCheckpoint]] = []
        for key in reversed(self._objects.manifest_keys()):
            try:  # 1.
                manifest = self._objects.read_manifest(key)
                self._check_ours(manifest)
                state = self._read_state(manifest)
            except BadCheckpoint as damage:
                damages.append((key, damage))
                continue
            for damaged in damages:  # 2.
                self._skip(*damaged)
            return state
        if damages:
            reasons = "; ".join(str(damage) for _, damage in damages)
            raise CorruptObject(
                f"none of the run's {len(damages)} checkpoints is whole: {reasons}; "
                "restore them from a backup, or start a new run"
            )
        if self.newest_saved is not None:
            raise CorruptObject(
                f"there is no {self.prefix}round-*.json, but the run saved round "
                f"{self.newest_saved}: restore its checkpoints from a backup, or start "
                "a new run"
            )
        return None

    def _check_shapes(self, state: RunState) -> None:
        if state.kept is not None:
            self._check_model("the kept ", state.kept)
        self._check_model("", state)

    def _check_model(self, whose: str, state: RunState | KeptModel) -> None:
        optimizer = state.optimizer if isinstance(state, RunState) else {}
        sizes = {"weights_d": state.weights_d, **optimizer}
        for name, vector_d in sizes.items():
            if vector_d.shape != (self.layout.size,) or vector_d.dtype != np.float32:
                raise ValueError(
                    f"{whose}{name} is {vector_d.dtype}{list(vector_d.shape)}, not "
                    f"float32[{self.layout.size}]"
                )
        num_integers = self.layout.num_integers
        found_m = state.integers_m
        if found_m.shape != (num_integers,) or found_m.dtype != np.int64:
            raise ValueError(
                f"{whose}integers_m is {found_m.dtype}{list(found_m.shape)}, not "
                f"int64[{num_integers}]"
            )

    def _write_blob(self, pieces: Sequence[Buffer]) -> tuple[Blob, int]:
        """Write what may be missing; also return the bytes written."""
        blob = Blob.of(pieces, self.chunk_bytes)
        return blob, self._objects.write(blob, pieces)

    def _conflict(self, key: str) -> RunConflict:
        return RunConflict(
            f"{key} was written by another coordinator of this run, {self.run_id}; "
            "leave the run to it, or stop it and resume"
        )

    def _check_ours(self, manifest: Manifest) -> None:
        """Check that a whole manifest belongs to this run, job and model."""
        if manifest.run_id != self.run_id:
            raise CheckpointMismatch(
                f"{manifest.key} belongs to the run {manifest.run_id!r}, not to "
                f"{self.run_id!r}; resume that run, or start in an empty folder"
            )
        check_same(
            self.job, manifest.job, where=manifest.key, extensions=self.extensions
        )
        self.layout.check_same(manifest.layout, whose=f"the checkpoint {manifest.key}")

    def _read_state(self, manifest: Manifest) -> RunState:
        """Fill new arrays from the blobs of a manifest and verify every byte."""
        model = self._read_model(manifest.weights)
        weights_d = model.weights_d
        optimizer: dict[str, Vector] = {
            name: self.allocate(weights_d.size) for name in manifest.optimizer_names
        }
        if manifest.optimizer is not None:
            self._objects.read(manifest.optimizer, list(optimizer.values()))
        return RunState(
            **manifest.progress(),
            weights_d=weights_d,
            integers_m=model.integers_m,
            optimizer=optimizer,
            kept=None if manifest.kept is None else self._read_model(manifest.kept),
        )

    def _read_model(self, blob: Blob) -> KeptModel:
        weights_d = self.allocate(self.layout.size)
        integers_m = np.empty(self.layout.num_integers, dtype=np.int64)
        self._objects.read(blob, [integers_m, weights_d])
        return KeptModel(weights_d=weights_d, integers_m=integers_m)

    def _skip(self, manifest_key: str, damage: BadCheckpoint) -> None:
        self.emit(
            CheckpointSkipped(at=self.clock.now(), key=manifest_key, reason=str(damage))
        )
        if damage.key is not None and damage.key != manifest_key:
            self._objects.move_aside(damage.key)
        self._objects.move_aside(manifest_key)

    def _retire(self, newest: str) -> None:
        """Remove old manifests, then the blobs that no manifest names any more.

        In this order a crash in between leaves blobs without a manifest, never a
        manifest without its blobs.

        Raises:
            RunConflict: There are later rounds than the one that we have saved.
        """
        found = self._objects.manifests()
        last = found[-1].key if found else newest
        if not found or last != newest:
            # Their first rounds may be retired, so that ours met no manifest.
            raise self._conflict(last)
        old, kept = found[: -self.keep], found[-self.keep :]
        try:
            needed = {name for info in kept for name in self._objects_named_by(info)}
        except (BadCheckpoint, CheckpointMismatch):
            return  # What it needs is unknown: nothing is removed this time.
        retired: set[str] = set()
        for info in old:
            # If it cannot be read, its blobs are found as unnamed ones.
            with contextlib.suppress(BadCheckpoint, CheckpointMismatch):
                retired |= self._objects_named_by(info)
            self.store.delete(info.key)
            self._named.pop((info.key, info.version), None)
        unnamed = {
            info.key: info for info in self._objects.stored() if info.key not in needed
        }
        # One that was never named may be one that another coordinator is about to
        # name: it goes only when it is still unnamed one save later.
        doomed = unnamed.keys() & (retired | self._unnamed)
        self._objects.remove([unnamed[key] for key in sorted(doomed)])
        self._unnamed = unnamed.keys() - doomed

    def _objects_named_by(self, manifest: ObjectInfo) -> set[str]:
        named = self._named.get((manifest.key, manifest.version))
        if named is not None:
            return named
        return self._names(self._objects.read_manifest(manifest.key))

    def _names(self, manifest: Manifest) -> set[str]:
        return {self.prefix + found.key for found in manifest.objects}


def _weights_pieces(layout: Layout, state: RunState | KeptModel) -> list[Buffer]:
    # Integers first: 8-byte values at the start leave every tensor aligned.
    views = [*layout.integer_views(state.integers_m)]
    floats = [*layout.float_views(state.weights_d)]
    tensors: dict[str, NDArray[Any]] = {spec.name: view for spec, view in views}
    tensors |= {spec.name: view for spec, view in floats}
    return tensor_file.pieces(tensors, _METADATA)
