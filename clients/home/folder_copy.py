"""A site's folder as files of its home: which, in what pieces, and back again.

Copied are the files at the top that the caller names (keys, certificates, roster), the
site's memory and what it keeps of runs. Not copied are locks, drafts, scratch files and
``site.toml``, which says where the home is.

A file is cut into pieces of 64 KiB, and all pieces that have changed since the last
time become one new object, a *pack*: a ledger that grows costs its last piece. A large
file, such as an optimiser's state, is one piece and a pack of its own. Names of packs
are random, since digests of contents would tell them apart for whom can list the store.

A file that is gone from the folder stays in the home, so that losing a ledger here does
not lose it there; only states of rounds go, which a site removes itself.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from clients.home.lease import StoredFile, StoredPiece
from federation.durable_files import replace_file
from federation.errors import CorruptObject, ObjectNotFound, StoreUnavailable, os_errors
from federation.protocols import ObjectStore
from privacy import own_folder
from privacy.secret_files import replace_private

PACKS = "packs/"
PIECE_BYTES = 1 << 16
# Files above it are not cut: only new ones change.
LARGE_BYTES = 4 << 20
_COPY_BYTES = 8 << 20
# The steps of a round that was interrupted: ``clients.training.kept_steps``.
STEPS = "steps"
_FOLDERS = ("memory", "runs")
_TOPS = tuple((name,) for name in _FOLDERS)
_PACK = re.compile(PACKS + "[0-9]{10,20}-[0-9a-f]{32}")
_LEFT_OUT = frozenset({"storage.jsonl"})
_LEFT_OUT_SUFFIXES = (".lock", ".new", ".tmp")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ADVICE = "free some space, or make it writable for this user"

_Signature = tuple[int, int, int]


def is_state(path: str) -> bool:
    """Whether a file is the state of a round, which the site itself removes."""
    name = PurePosixPath(path).name
    return name.startswith("state-") or name == STEPS


@dataclass
class _Pack:
    """Pieces that are about to be stored together."""

    key: str
    size: int = 0
    content: list[bytes] = field(default_factory=list)

    def add(self, piece: bytes, digest: str) -> StoredPiece:
        found = StoredPiece(
            pack=self.key, offset=self.size, length=len(piece), sha256=digest
        )
        self.content.append(piece)
        self.size += len(piece)
        return found


@dataclass(eq=False)
class FolderCopy:
    """The files of one folder, and their copies in a store.

    Attributes:
        folder: The site's.
        store: The home's.
        names: Files at the top of the folder that are copied.
    """

    folder: Path
    store: ObjectStore
    names: Sequence[str]

    def __post_init__(self) -> None:
        """Know nothing of the files yet."""
        self._seen: dict[str, tuple[_Signature, StoredFile]] = {}
        self._packs: set[str] = set()
        self._is_new = False

    def gather(
        self, known: Iterable[StoredFile], *, fence: int
    ) -> tuple[StoredFile, ...]:
        """Store what has changed, and return the files as they are now.

        Nothing refers to the new objects until a head with these files is written.

        Args:
            known: The files before.
            fence: Number of the holder, which the names of new packs begin with.

        Raises:
            StoreError: A file cannot be read, or the store not be written.
        """
        files = self._stored(known, self._paths(), fence)
        for path in [p for p in files if is_state(p)]:
            if not (self.folder / path).exists():
                del files[path]
        return tuple(files[path] for path in sorted(files))

    def forget(self) -> None:
        """Store every file of the folder again: the store may have lost some."""
        self._seen.clear()
        self._is_new = True

    def gather_names(
        self, known: Iterable[StoredFile], *, fence: int
    ) -> tuple[StoredFile, ...]:
        """Do the same with the files at the top only, which are small."""
        files = self._stored(known, self._names(), fence)
        return tuple(files[path] for path in sorted(files))

    def _stored(
        self, known: Iterable[StoredFile], paths: Iterable[str], fence: int
    ) -> dict[str, StoredFile]:
        files = {file.path: file for file in known}
        pack = _Pack(self._new_pack(fence))
        fresh: dict[str, tuple[_Signature, StoredFile]] = {}
        for path in paths:
            before = None if self._is_new else files.get(path)
            found = self._file(path, before, pack, fence)
            if found is not None:
                fresh[path] = found
                files[path] = found[1]
        if pack.content:
            self._put(pack.key, pack.content)
        self._seen |= fresh  # Not before their pieces are stored.
        if self._is_new:  # What neither has is lost, and must not stop a new machine.
            there = {info.key for info in self.store.list(PACKS)}
            files = {path: f for path, f in files.items() if _packs([f]) <= there}
            self._is_new = False
        return files

    def sweep(self, files: Iterable[StoredFile]) -> None:
        """Remove packs of this process that no file has a piece in.

        Raises:
            StoreError: The store refuses; they are removed another time.
        """
        used = _packs(files)
        for key in sorted(self._packs - used):
            self.store.delete(key)
            self._packs.discard(key)

    def adopt(self, files: Iterable[StoredFile], *, fence: int) -> None:
        """Remove what former holders have left behind, after the home was taken.

        Packs of later holders stay: their heads are not known here.

        Raises:
            StoreError: The store refuses.
        """
        used = _packs(files)
        found = {info.key for info in self.store.list(PACKS)}
        self._packs |= {key for key in found if key < f"{PACKS}{fence + 1:010d}-"}
        self.sweep(files)
        self._packs |= used

    def restore(self, files: Iterable[StoredFile], *, missing: bool = False) -> None:
        """Write files of the home to the folder.

        Args:
            files: Which.
            missing: Only those that are not there.

        Raises:
            CorruptObject: A copy is not what was stored.
            StoreError: It cannot be read, or the folder not be written.
        """
        packs: dict[str, bytes] = {}
        for file in files:
            path = self._path_of(file)
            with os_errors(StoreUnavailable, f"write {path}", _ADVICE):
                if path.exists() if missing else self._is_same(file):
                    continue
                for parent in reversed(path.relative_to(self.folder).parents):
                    own_folder.make(self.folder / parent)
                if any(piece.length > PIECE_BYTES for piece in file.pieces):
                    replace_file(path, self._pieces(file))
                    path.chmod(0o600)
                else:
                    replace_private(path, self._content(file, packs))

    def content(self, file: StoredFile) -> bytes:
        """Read a small file of the home. Raises like ``restore``."""
        return self._content(file, {})

    def holds(self, file: StoredFile, *, or_more: bool = False) -> bool | None:
        """Whether the folder has the same file; None if it has none of that name.

        Args:
            file: File of the home.
            or_more: Whether the folder's may have grown.
        """
        if not self._path_of(file).exists():
            return None
        return self._is_same(file, or_more=or_more)

    def _paths(self) -> Iterator[str]:
        """The files to copy; a ledger's head before its ledger, which may grow."""
        yield from self._names()
        for top in _FOLDERS:
            for folder, inner, names in os.walk(self.folder / top):
                inner[:] = sorted(name for name in inner if not name.startswith("."))
                below = Path(folder).relative_to(self.folder).as_posix()
                yield from (
                    f"{below}/{name}" for name in sorted(names) if _counts(name)
                )

    def _names(self) -> Iterator[str]:
        yield from (name for name in self.names if (self.folder / name).exists())

    def _path_of(self, file: StoredFile) -> Path:
        pure = PurePosixPath(file.path)
        is_inside = file.path == pure.as_posix() and ".." not in pure.parts
        is_ours = file.path in self.names or pure.parent.parts[:1] in _TOPS
        is_name = is_inside and is_ours and _counts(pure.name) and _is_name(file.path)
        if not (is_name and all(_PACK.fullmatch(p.pack) for p in file.pieces)):
            raise CorruptObject(
                f"{self.store.url} has a file {file.path[:80]!r} that no home has"
            )
        return self.folder / file.path

    def _file(
        self, path: str, known: StoredFile | None, pack: _Pack, fence: int
    ) -> tuple[_Signature, StoredFile] | None:
        """Look at a file; its new pieces go into a pack."""
        try:
            handle = os.open(self.folder / path, _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(
                f"cannot read {self.folder / path}: {error.strerror}"
            ) from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                return None
            signature = (found.st_mtime_ns, found.st_size, found.st_ino)
            seen = self._seen.get(path)
            if seen is not None and seen[0] == signature:
                return seen
            if found.st_size > LARGE_BYTES:
                pieces = self._large(handle, found.st_size, known, fence)
            else:
                pieces = _small(handle, found.st_size, known, pack)
        finally:
            os.close(handle)
        return signature, StoredFile(path=path, pieces=pieces)

    def _large(
        self, handle: int, size: int, known: StoredFile | None, fence: int
    ) -> tuple[StoredPiece, ...]:
        digest = hashlib.sha256()
        for content in _ranges(handle, size):
            digest.update(content)
        before = () if known is None else known.pieces
        if [p.sha256 for p in before] == [digest.hexdigest()]:
            return before
        key = self._new_pack(fence)
        self._put(key, _ranges(handle, size))
        return (
            StoredPiece(pack=key, offset=0, length=size, sha256=digest.hexdigest()),
        )

    def _put(self, key: str, content: Iterable[bytes]) -> None:
        self._packs.add(key)  # Also if the reply is lost.
        self.store.put(key, content)

    def _is_same(self, file: StoredFile, *, or_more: bool = False) -> bool:
        try:
            with self._path_of(file).open("rb") as local:
                for piece in file.pieces:
                    left, digest = piece.length, hashlib.sha256()
                    while left and (content := local.read(min(left, _COPY_BYTES))):
                        digest.update(content)
                        left -= len(content)
                    if digest.hexdigest() != piece.sha256:
                        return False
                return or_more or not local.read(1)
        except FileNotFoundError:
            return False

    def _content(self, file: StoredFile, packs: dict[str, bytes]) -> bytes:
        found = []
        for piece in file.pieces:
            if piece.pack not in packs:
                packs[piece.pack] = self._read(piece, file)
            content = packs[piece.pack][piece.offset : piece.offset + piece.length]
            self._verify(piece, hashlib.sha256(content).hexdigest(), file)
            found.append(content)
        return b"".join(found)

    def _pieces(self, file: StoredFile) -> Iterator[bytes]:
        for piece in file.pieces:
            digest, done = hashlib.sha256(), 0
            while done < piece.length:
                length = min(_COPY_BYTES, piece.length - done)
                start = piece.offset + done
                content = self._read(piece, file, start=start, length=length)
                if not content:
                    break
                digest.update(content)
                done += len(content)
                yield content
            self._verify(piece, digest.hexdigest(), file)

    def _read(
        self,
        piece: StoredPiece,
        file: StoredFile,
        *,
        start: int = 0,
        length: int | None = None,
    ) -> bytes:
        try:
            return self.store.read(piece.pack, start=start, length=length)
        except ObjectNotFound as error:
            raise self._damaged(piece, file) from error

    def _verify(self, piece: StoredPiece, digest: str, file: StoredFile) -> None:
        if digest != piece.sha256:
            raise self._damaged(piece, file)

    def _damaged(self, piece: StoredPiece, file: StoredFile) -> CorruptObject:
        return CorruptObject(
            f"{self.store.url}/{piece.pack} does not hold what was stored of "
            f"{file.path}: restore the newest version of the object"
        )

    def _new_pack(self, fence: int) -> str:
        return f"{PACKS}{fence:010d}-{secrets.token_hex(16)}"


def _packs(files: Iterable[StoredFile]) -> set[str]:
    return {piece.pack for file in files for piece in file.pieces}


def _is_name(path: str) -> bool:
    """Whether it can be a file's."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _counts(name: str) -> bool:
    is_draft = name.startswith(".") or name.endswith(_LEFT_OUT_SUFFIXES)
    return not is_draft and name not in _LEFT_OUT


def _ranges(handle: int, size: int, step: int = _COPY_BYTES) -> Iterator[bytes]:
    """Bytes of an open file up to a size, by ranges."""
    for start in range(0, size, step):
        yield os.pread(handle, min(step, size - start), start)


def _small(
    handle: int, size: int, known: StoredFile | None, pack: _Pack
) -> tuple[StoredPiece, ...]:
    before: Mapping[int, StoredPiece] = dict(
        enumerate(() if known is None else known.pieces)
    )
    pieces = []
    for index, content in enumerate(_ranges(handle, size, PIECE_BYTES)):
        digest = hashlib.sha256(content).hexdigest()
        piece = before.get(index)
        is_same = piece is not None and piece.sha256 == digest
        pieces.append(piece if piece and is_same else pack.add(content, digest))
    return tuple(pieces)
