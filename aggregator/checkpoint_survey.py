"""Lists the checkpoints in a store, checks them, and removes old ones.

Of any run: neither its job nor its model is needed. Not here: a run's own retention,
which happens at every save (``aggregator.checkpoint``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aggregator.checkpoint_objects import BadCheckpoint, CheckpointObjects
from aggregator.manifest import Chunk, Manifest
from federation.errors import CheckpointMismatch, ObjectNotFound
from federation.protocols import ObjectInfo, ObjectStore

GRACE_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyEntry:
    """One checkpoint.

    Attributes:
        key: Key of its manifest.
        round_index: Its round; None if the manifest cannot be read.
        written: When, in seconds since 1970; None if the store does not know.
        size: Bytes of all that it needs, each object once.
        shared: Bytes of that which an earlier checkpoint needs too.
        damage: What is wrong with it; empty if nothing is known to be.
    """

    key: str
    round_index: int | None
    written: float | None
    size: int
    shared: int
    damage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All checkpoints under a prefix.

    Attributes:
        checkpoints: Oldest round first.
        num_unnamed: Objects that no readable manifest names.
        unnamed_bytes: Bytes of those.
        verified: Whether every byte was read, and not only every size compared.
    """

    checkpoints: tuple[SurveyEntry, ...]
    num_unnamed: int
    unnamed_bytes: int
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """The result of ``prune``.

    Attributes:
        checkpoints: Keys of manifests.
        freed_bytes: Bytes of the objects that went with them or were left over.
    """

    checkpoints: tuple[str, ...]
    freed_bytes: int


@dataclass(slots=True)
class _Store:
    """The contents of a store."""

    objects: CheckpointObjects
    infos: Mapping[str, ObjectInfo]
    prefix: str
    manifests: dict[str, Manifest | str] = field(default_factory=dict)

    def named(self, keys: Iterable[str]) -> dict[str, Chunk]:
        """Objects by whole key that readable manifests among the given ones name."""
        found: dict[str, Chunk] = {}
        for key in keys:
            manifest = self.manifests[key]
            if isinstance(manifest, Manifest):
                found |= {self.prefix + chunk.key: chunk for chunk in manifest.objects}
        return found

    def damage(self, key: str) -> str:
        """What is wrong with a checkpoint, judged by sizes; empty if nothing."""
        manifest = self.manifests[key]
        if isinstance(manifest, str):
            return manifest
        for name, chunk in self.named([key]).items():
            info = self.infos.get(name)
            # A run that continues may have written it since the listing.
            size = self.objects.size(name) if info is None else info.size
            if size is None:
                return f"{name} is missing"
            if size != chunk.size:
                return f"{name} has {size} bytes instead of {chunk.size}"
        return ""


def survey(store: ObjectStore, prefix: str, *, verify: bool = False) -> Survey:
    """List all checkpoints under a prefix; nothing is changed.

    Args:
        store: Where they are.
        prefix: Prefix of all keys: empty, or ending in a slash.
        verify: Read every byte and compare digests, and not only sizes.

    Raises:
        StoreUnavailable: The store is unreachable.
    """
    seen = _look(store, prefix)
    found = []
    before: set[str] = set()
    harmed: dict[str, str] = {}
    for key in seen.manifests:
        chunks = seen.named([key])
        damage = seen.damage(key)
        if verify and not damage:
            damage = _verify(seen.objects, chunks, harmed)
        try:
            info = store.stat(key)
        except ObjectNotFound:  # A run that continues has retired it meanwhile.
            continue
        manifest = seen.manifests[key]
        found.append(
            SurveyEntry(
                key=key,
                round_index=None if isinstance(manifest, str) else manifest.round_index,
                written=info.updated,
                size=info.size + sum(chunk.size for chunk in chunks.values()),
                shared=sum(chunks[name].size for name in chunks.keys() & before),
                damage=damage,
            )
        )
        before |= chunks.keys()
    unnamed = [info for key, info in seen.infos.items() if key not in before]
    return Survey(
        checkpoints=tuple(found),
        num_unnamed=len(unnamed),
        unnamed_bytes=sum(info.size for info in unnamed),
        verified=verify,
    )


def prune(store: ObjectStore, prefix: str, *, keep: int, now: float) -> PruneResult:
    """Remove all checkpoints but the newest ones, and what no other needs.

    Only checkpoints whose objects are all there count as kept; damaged ones that are
    newer than the oldest of these stay for a person to look at.

    1. Remove the manifests of older rounds.
    2. Remove what only those named, and what nothing has named for a day: a younger
       object may be one that a coordinator is about to name. If a manifest that stays
       cannot be read, no object is removed.

    Cut short in between it leaves objects that no manifest names, never the reverse.

    Args:
        store: Where they are.
        prefix: Prefix of all keys: empty, or ending in a slash.
        keep: How many to keep, at least 1.
        now: Seconds since 1970.

    Raises:
        ValueError: ``keep`` is out of range.
        StoreUnavailable: The store is unreachable.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints: keep at least 1")
    seen = _look(store, prefix)
    keys = list(seen.manifests)
    whole = [index for index, key in enumerate(keys) if not seen.damage(key)]
    if len(whole) < keep:
        return PruneResult(checkpoints=(), freed_bytes=0)
    old, kept = keys[: whole[-keep]], keys[whole[-keep] :]
    for key in old:  # 1.
        store.delete(key)
    if any(isinstance(seen.manifests[key], str) for key in kept):
        return PruneResult(checkpoints=tuple(old), freed_bytes=0)
    needed, retired = seen.named(kept), seen.named(old)  # 2.
    doomed = [
        info
        for key, info in seen.infos.items()
        if key not in needed and (key in retired or _is_stale(store, info, now))
    ]
    return PruneResult(checkpoints=tuple(old), freed_bytes=seen.objects.remove(doomed))


def _look(store: ObjectStore, prefix: str) -> _Store:
    objects = CheckpointObjects(store, prefix)
    # Objects first: one that is written after this is not seen, and not removed.
    infos = {info.key: info for info in objects.stored()}
    seen = _Store(objects, infos, prefix)
    for key in objects.manifest_keys():
        try:
            seen.manifests[key] = objects.read_manifest(key)
        except (BadCheckpoint, CheckpointMismatch) as error:
            seen.manifests[key] = str(error)
    return seen


def _verify(
    objects: CheckpointObjects, chunks: Mapping[str, Chunk], known: dict[str, str]
) -> str:
    """Say what is wrong with objects; each is read once, even if named often."""
    new = {key: chunk for key, chunk in chunks.items() if key not in known}
    damages = objects.damages(list(new.values()))
    known |= dict(zip(new, damages, strict=True))
    return next((known[key] for key in chunks if known[key]), "")


def _is_stale(store: ObjectStore, info: ObjectInfo, now: float) -> bool:
    """Whether an object is so old that no running write will refer to it."""
    written = info.updated if info.updated is not None else store.stat(info.key).updated
    return written is not None and now - written > GRACE_SECONDS
