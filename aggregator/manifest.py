"""A checkpoint's manifest, and its bytes: one canonical JSON document.

Not here: reading and writing of objects (``aggregator.checkpoint``).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from federation.errors import CheckpointMismatch, CorruptObject, LayoutMismatch
from federation.ids import SiteId
from federation.mapped import give_back
from federation.members import Members, RunMember, Standing
from federation.messages import LedgerAnchor, StateName
from federation.protocols import (
    NO_SELECTION,
    Buffer,
    RoundTime,
    RunProgress,
    SelectionProgress,
    SiteHistory,
    Suspicions,
)
from federation.vectors import Layout, Role

FORMAT = 6
MAX_MANIFEST_BYTES = 64 << 20

_DIGEST = re.compile(r"[0-9a-f]{64}")
# What decoding raises on bytes that are not a manifest of ours.
_MALFORMED = (ValueError, KeyError, TypeError, RecursionError, LayoutMismatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """An object that is named after its content.

    Attributes:
        key: Below the prefix of the checkpoints.
        sha256: SHA-256 of its content, as 64 hexadecimal digits.
        start: Where it begins in its blob.
        size: Bytes.
    """

    key: str
    sha256: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A safetensors file: one object, or chunks of it one after another.

    Attributes:
        sha256: SHA-256 of the whole file, as 64 hexadecimal digits.
        size: Bytes.
        chunk_bytes: Size of each chunk but the last; 0 if it is one object.
        chunks: Digests of the chunks; empty if it is one object.
    """

    sha256: str
    size: int
    chunk_bytes: int = 0
    chunks: tuple[str, ...] = ()

    @property
    def objects(self) -> tuple[Chunk, ...]:
        """The objects that store it."""
        if not self.chunks:
            key = f"blobs/sha256-{self.sha256}.safetensors"
            return (Chunk(key=key, sha256=self.sha256, start=0, size=self.size),)
        starts = range(0, self.size, self.chunk_bytes)
        return tuple(
            Chunk(
                key=f"chunks/sha256-{digest}",
                sha256=digest,
                start=start,
                size=min(self.chunk_bytes, self.size - start),
            )
            for start, digest in zip(starts, self.chunks, strict=True)
        )

    @staticmethod
    def of(pieces: Sequence[Buffer], chunk_bytes: int) -> "Blob":
        """Name a content given in pieces.

        Args:
            pieces: The content.
            chunk_bytes: A larger content is cut into chunks of this size.
        """
        size = sum(len(piece) for piece in pieces)
        whole = hashlib.sha256()
        chunks = []
        for start in range(0, size, chunk_bytes):
            part = hashlib.sha256()
            for view in cut(pieces, start, chunk_bytes):
                whole.update(view)
                if size > chunk_bytes:
                    part.update(view)
                give_back(np.frombuffer(view, np.uint8))
            chunks.append(part.hexdigest())
        if size <= chunk_bytes:
            return Blob(sha256=whole.hexdigest(), size=size)
        return Blob(
            sha256=whole.hexdigest(),
            size=size,
            chunk_bytes=chunk_bytes,
            chunks=tuple(chunks),
        )


def cut(pieces: Sequence[Buffer], start: int, length: int) -> Iterator[memoryview]:
    """Views of the bytes ``[start, start + length)`` of pieces that follow another.

    Less comes back where the pieces end before. Views of writable pieces are writable.
    """
    end = start + length
    offset = 0
    for piece in pieces:
        first, last = max(start, offset), min(end, offset + len(piece))
        if first < last:
            yield memoryview(piece)[first - offset : last - offset]
        offset += len(piece)
        if offset >= end:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(RunProgress):
    """A ``federation.protocols.RunState`` with digests in the place of vectors.

    Attributes:
        key: Where it is.
        job: The resolved job as nested plain values.
        layout: Layout of the model.
        weights: Integer and float values of the model.
        optimizer: State of the server optimiser; None if it has none.
        optimizer_names: Names of its vectors, in the order of the blob.
        kept: The model that is kept besides the newest; None if there is none.
    """

    key: str
    run_id: str
    job: Mapping[str, Any]
    layout: Layout
    weights: Blob
    optimizer: Blob | None
    optimizer_names: tuple[str, ...]
    kept: Blob | None = None

    @property
    def objects(self) -> tuple[Chunk, ...]:
        """The objects of its blobs; one object may occur several times."""
        blobs = (self.weights, self.optimizer, self.kept)
        return tuple(found for blob in blobs if blob for found in blob.objects)


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest, with a digest of its own content."""
    layout, found = manifest.layout, manifest.selection
    blobs: dict[str, Any] = {"weights": _encode_blob(manifest.weights)}
    if manifest.optimizer is not None:
        blobs["optimizer"] = _encode_blob(manifest.optimizer)
    if manifest.kept is not None:
        blobs["kept"] = _encode_blob(manifest.kept)
    document: dict[str, Any] = {
        "format": FORMAT,
        "run_id": manifest.run_id,
        "round_index": manifest.round_index,
        "rounds_completed": manifest.rounds_completed,
        "lost_in_a_row": manifest.lost_in_a_row,
        "update_clip": manifest.update_clip,
        "anchors": {
            site: [anchor.train, anchor.evaluate]
            for site, anchor in manifest.anchors.items()
        },
        "suspicions": {
            "faults": dict(manifest.suspicions.faults),
            "disputes": manifest.suspicions.disputes,
            "silences": dict(manifest.suspicions.silences),
        },
        "members": {
            site: [member.standing, member.reason, member.replaced]
            for site, member in manifest.members.noted.items()
        },
        # Of runs whose sites need it, so that the others' bytes stay.
        **({"counted": dict(manifest.counted)} if manifest.counted else {}),
        **({"states": _encode_states(manifest)} if manifest.states else {}),
        **({"selection": asdict(found)} if found != NO_SELECTION else {}),
        **({"local_work": _encode_work(manifest)} if manifest.steps_taken else {}),
        **({"site_times": _encode_sites(manifest)} if manifest.site_times else {}),
        **({"history": _encode_history(manifest)} if manifest.history else {}),
        "job": manifest.job,
        "layout": {
            "digest": layout.digest,
            "frozen": layout.frozen,
            "tensors": [[t.name, t.shape, t.dtype, t.role] for t in layout.tensors],
        },
        "blobs": blobs,
        "optimizer_vectors": manifest.optimizer_names,
    }
    # Each member is spelled once, and both texts are made of them: jobs are long.
    members = {name: _canonical(value) for name, value in document.items()}
    digest = hashlib.sha256(_joined(members)).hexdigest()
    return _joined({**members, "sha256": _canonical(digest)})


# A resumed run reads those of earlier saves, whose bytes are mostly the same ones.
@lru_cache(maxsize=16)
def decode(key: str, content: bytes) -> Manifest:
    """Read a manifest: digest before version, version before meaning.

    Args:
        key: Where it is.
        content: All its bytes.

    Raises:
        CorruptObject: It is torn or altered, be it by one bit.
        CheckpointMismatch: It was written by another version of crossfed.
    """
    try:
        document = _verified(content)
        if document["format"] == FORMAT:
            return _parse(key, document)
    except _MALFORMED as error:
        raise CorruptObject(f"{key} is not a whole manifest: {error}") from error
    raise CheckpointMismatch(
        f"{key} has format {document['format']} and this crossfed reads format "
        f"{FORMAT}; resume the run with the version that wrote it"
    )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _joined(members: Mapping[str, str]) -> bytes:
    """Encode a document from encoded members."""
    pairs = [f'"{name}":{members[name]}' for name in sorted(members)]
    return f"{{{','.join(pairs)}}}\n".encode()


def _verified(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
    document = json.loads(content)
    if not isinstance(document, dict) or "sha256" not in document:
        raise ValueError("it has no digest")
    # Compared as bytes, so that not even a blank may have changed.
    members = {name: _canonical(value) for name, value in document.items()}
    if _joined(members) != content:
        raise ValueError("it is not in canonical form")
    stated = document.pop("sha256")
    del members["sha256"]
    if hashlib.sha256(_joined(members)).hexdigest() != stated:
        raise ValueError("its digest does not match its content")
    return document


def _parse(key: str, document: Mapping[str, Any]) -> Manifest:
    blobs, table = document["blobs"], document["layout"]
    layout = Layout.build(
        [
            (name, tuple(shape), dtype, Role(role))
            for name, shape, dtype, role in table["tensors"]
        ]
    )
    layout = replace(layout, frozen=table["frozen"])
    manifest = Manifest(
        key=key,
        run_id=document["run_id"],
        round_index=document["round_index"],
        rounds_completed=document["rounds_completed"],
        lost_in_a_row=document["lost_in_a_row"],
        update_clip=document["update_clip"],
        anchors=_parse_anchors(document["anchors"]),
        suspicions=_parse_suspicions(document["suspicions"]),
        members=_parse_members(document["members"]),
        counted=_parse_counted(document.get("counted", {})),
        selection=_parse_selection(document.get("selection", {})),
        states=_parse_states(document.get("states", {})),
        **_parse_work(document.get("local_work", {})),
        site_times={
            SiteId(site): _parse_times(entry)
            for site, entry in document.get("site_times", {}).items()
        },
        history=_parse_history(document.get("history", {})),
        job=document["job"],
        layout=layout,
        weights=_parse_blob(blobs["weights"]),
        optimizer=_parse_blob(blobs["optimizer"]) if "optimizer" in blobs else None,
        optimizer_names=tuple(document["optimizer_vectors"]),
        kept=_parse_blob(blobs["kept"]) if "kept" in blobs else None,
    )
    if layout.digest != table["digest"]:
        raise ValueError("its layout does not have the stated digest")
    if not key.endswith(f"round-{manifest.round_index:06d}.json"):
        raise ValueError(f"it is of round {manifest.round_index}")
    return manifest


def _parse_members(entry: Mapping[str, Any]) -> Members:
    for site, (_, reason, replaced) in entry.items():
        if type(reason) is not str or type(replaced) is not int or replaced < 0:
            raise ValueError(f"its entry for site {site!r} is damaged")
    return Members(
        {
            SiteId(site): RunMember(Standing(standing), reason, replaced)
            for site, (standing, reason, replaced) in entry.items()
        }
    )


def _parse_counted(entry: Mapping[str, Any]) -> dict[SiteId, int]:
    for site, index in entry.items():
        if type(index) is not int or index < 1:
            raise ValueError(f"the counted round of site {site!r} is not a round")
    return {SiteId(site): index for site, index in entry.items()}


def _encode_states(manifest: Manifest) -> Mapping[str, Sequence[Sequence[Any]]]:
    return {
        site: [[name.round_index, name.context] for name in names]
        for site, names in manifest.states.items()
    }


def _parse_states(entry: Mapping[str, Any]) -> dict[SiteId, tuple[StateName, ...]]:
    states = {
        SiteId(site): tuple(StateName(index, context) for index, context in names)
        for site, names in entry.items()
    }
    for site, names in states.items():
        for name in names:
            if type(name.round_index) is not int or type(name.context) is not str:
                raise ValueError(f"a state of site {site!r} has no name")
    return states


def _parse_selection(entry: Mapping[str, Any]) -> SelectionProgress:
    found = SelectionProgress(**entry)
    score = found.best_score
    counts = (found.stale, found.averaged, found.best_round or 0)
    if not all(type(n) is int and n >= 0 for n in counts):
        raise ValueError("its entry of the selected model is damaged")
    if (score is None) != (found.best_round is None) or type(score or 0.0) is not float:
        raise ValueError("its entry of the best model is damaged")
    return found


def _encode_work(progress: RunProgress) -> dict[str, Any]:
    """Local steps so far, and the times from which the next round's follow."""
    times = _encode_times(progress.times)
    return {"steps_taken": progress.steps_taken, "times": times}


def _parse_work(entry: Mapping[str, Any]) -> dict[str, Any]:
    taken = entry.get("steps_taken", 0)
    if type(taken) is not int or taken < 0:
        raise ValueError("its local work is damaged")
    return {"steps_taken": taken, "times": _parse_times(entry.get("times", ()))}


def _encode_sites(progress: RunProgress) -> dict[str, Any]:
    """The times from which steps and deadlines of each site follow."""
    return {site: _encode_times(times) for site, times in progress.site_times.items()}


def _encode_times(times: Iterable[RoundTime]) -> list[Any]:
    return [
        [
            *(time.round_index, time.num_steps),
            *(time.seconds, time.train_seconds, time.evaluate_seconds),
            *[True] * time.missed,
        ]
        for time in times
    ]


def _parse_times(entries: Iterable[Any]) -> tuple[RoundTime, ...]:
    times = tuple(
        RoundTime(
            round_index=index,
            num_steps=steps,
            seconds=seconds,
            train_seconds=trained,
            evaluate_seconds=evaluated,
            missed=missed,
        )
        for index, steps, seconds, trained, evaluated, missed in (
            (*entry, *(0.0, False)[len(entry) - 4 :]) for entry in entries
        )
    )
    counts = (n for time in times for n in (time.round_index, time.num_steps))
    if not all(type(n) is int and n >= 0 for n in counts) or not all(
        type(t.seconds) is type(t.evaluate_seconds) is float
        and type(t.train_seconds) in {float, type(None)}
        and type(t.missed) is bool
        for t in times
    ):
        raise ValueError("its local work is damaged")
    return times


def _encode_history(progress: RunProgress) -> dict[str, Any]:
    return {site: astuple(one) for site, one in progress.history.items()}


def _parse_history(entries: Mapping[str, Any]) -> dict[SiteId, SiteHistory]:
    found = {SiteId(site): SiteHistory(*entry) for site, entry in entries.items()}
    for one in found.values():
        counts = (one.asked, one.counted, one.last_round, one.predictions)
        if not all(type(n) is int and n >= 0 for n in counts) or not {
            *map(type, (one.loss, one.seconds))
        } <= {float, type(None)}:
            raise ValueError("its history of sites is damaged")
    return found


def _parse_suspicions(entry: Mapping[str, Any]) -> Suspicions:
    return Suspicions(
        faults={SiteId(site): fault for site, fault in entry["faults"].items()},
        disputes=tuple(
            (SiteId(accuser), SiteId(dealer)) for accuser, dealer in entry["disputes"]
        ),
        silences={SiteId(s): count for s, count in entry["silences"].items()},
    )


def _parse_anchors(entry: Mapping[str, Any]) -> dict[SiteId, LedgerAnchor]:
    found = {}
    for site, (train, evaluate) in entry.items():
        if not all(type(n) is int and n >= 0 for n in (train, evaluate)):
            raise ValueError(f"the anchor of site {site!r} is not a pair of counts")
        found[SiteId(site)] = LedgerAnchor(train=train, evaluate=evaluate)
    return found


def _encode_blob(blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"sha256": blob.sha256, "size": blob.size}
    if blob.chunks:
        return {**entry, "chunk_bytes": blob.chunk_bytes, "chunks": blob.chunks}
    return {**entry, "key": blob.objects[0].key}


def _parse_blob(entry: Mapping[str, Any]) -> Blob:
    blob = Blob(
        sha256=entry["sha256"],
        size=entry["size"],
        chunk_bytes=entry.get("chunk_bytes", 0),
        chunks=tuple(entry.get("chunks", ())),
    )
    if not all(_DIGEST.fullmatch(digest) for digest in (blob.sha256, *blob.chunks)):
        raise ValueError("a blob is not named after its digest")
    if blob.chunks:
        if blob.chunk_bytes < 1 or len(blob.chunks) != -(
            -blob.size // blob.chunk_bytes
        ):
            raise ValueError("a blob does not have the chunks that its size requires")
    elif entry["key"] != blob.objects[0].key:
        raise ValueError("a blob is not named after its digest")
    return blob
