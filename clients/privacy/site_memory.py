"""What a site remembers beyond a restart and beyond a run: named, versioned documents.

One file per document, ``NAME.json``, in the site's own folder, readable by its owner
alone. It is replaced whole and flushed before an update returns, so a crash leaves the
document before the update or the one after it. A file that is damaged, of another
name or of another version is refused: what a site has promised must not be forgotten
because a file was lost in a way that can be seen.

What cannot be seen is that a file is missing or was restored from a backup. Keep the
folder where that does not happen.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from federation import folder_lock
from federation.durable_files import flush
from federation.errors import CorruptObject, StoreUnavailable, os_errors
from federation.ids import check_name
from privacy.secret_files import replace_private

VERSION = 1
MAX_BYTES = 1 << 26

Document = dict[str, Any]
Change = Callable[[Document], Document]


class SiteMemory(Protocol):
    """Named documents of JSON. Implementations: in memory, in files."""

    def read(self, name: str) -> Document:
        """Return a document; empty if it was never written.

        Raises:
            StoreError: It cannot be read, or is damaged.
        """
        ...

    def update(self, name: str, change: Change) -> Document:
        """Replace a document by what ``change`` makes of it; durable on return.

        No other update of the same document comes in between. If ``change`` raises,
        the document stays as it was.

        Raises:
            StoreError: It cannot be read or made durable, or is damaged.
        """
        ...


class InMemory:
    """For tests, and simulations that store nothing: lost when the process ends."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def read(self, name: str) -> Document:
        """See ``SiteMemory.read``."""
        found: Document = json.loads(self._texts.get(check_name(name), "{}"))
        return found

    def update(self, name: str, change: Change) -> Document:
        """See ``SiteMemory.update``."""
        with self._lock:
            after = change(self.read(name))
            self._texts[name] = json.dumps(after, allow_nan=False)
        return after


@dataclass(frozen=True, slots=True)
class ConfirmedMemory:
    """Another memory, whose updates are also durable elsewhere when they return.

    Attributes:
        memory: Memory of this machine.
        confirm: Makes durable elsewhere what it holds now.
    """

    memory: SiteMemory
    confirm: Callable[[], None]

    def read(self, name: str) -> Document:
        """See ``SiteMemory.read``."""
        return self.memory.read(name)

    def update(self, name: str, change: Change) -> Document:
        """See ``SiteMemory.update``; after an error the document may have changed."""
        after = self.memory.update(name, change)
        self.confirm()
        return after


class FileMemory:
    """Documents in a folder; several processes may use it.

    Args:
        folder: Where; made when something is written first.
    """

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is read yet."""
        self._folder = folder

    def read(self, name: str) -> Document:
        """See ``SiteMemory.read``."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnavailable(f"cannot read {path}: {error.strerror}") from error
        return _parse(data, name, path)

    def update(self, name: str, change: Change) -> Document:
        """See ``SiteMemory.update``."""
        path = self._path(name)
        advice = "free some space, or make it writable for this user"
        with os_errors(StoreUnavailable, f"write {path}", advice):
            self._make_folder()
            with folder_lock.waited_for(path.with_suffix(".lock")):
                after = change(self.read(name))
                replace_private(path, _sealed(after, name))
        return after

    def _make_folder(self) -> None:
        if self._folder.is_dir():
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flush(self._folder.parent)  # Its name must outlive a power cut, too.

    def _path(self, name: str) -> Path:
        return self._folder / f"{check_name(name)}.json"


def _canonical(body: Document) -> bytes:
    return json.dumps(
        body, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def _sealed(body: Document, name: str) -> bytes:
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    outer = {"version": VERSION, "name": name, "sha256": digest, "body": body}
    data = _canonical(outer) + b"\n"
    if len(data) > MAX_BYTES:
        raise StoreUnavailable(
            f"{name} would have {len(data)} bytes, but a document in a site's memory "
            f"holds at most {MAX_BYTES}"
        )
    return data


def _parse(data: bytes, name: str, path: Path) -> Document:
    try:
        outer = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        outer = None
    if not isinstance(outer, dict):
        raise _damaged(path, "it is not a document of a site's memory")
    if outer.get("version") != VERSION:
        raise _damaged(
            path,
            f"it has version {outer.get('version')!r:.20} but this release reads "
            f"{VERSION}: use the release that wrote it",
        )
    body = outer.get("body")
    if outer.get("name") != name or not isinstance(body, dict):
        raise _damaged(path, f"it is not the document {name!r}")
    if outer.get("sha256") != hashlib.sha256(_canonical(body)).hexdigest():
        raise _damaged(path, "its content does not match its digest")
    return body


def _damaged(path: Path, fault: str) -> CorruptObject:
    return CorruptObject(
        f"{path}: {fault}; this site takes no further part until the original file is "
        "restored"
    )


def fresh_secret(memory: SiteMemory, name: str, key: str, *, size: int = 32) -> bytes:
    """Return the secret of a key, drawn from the system at the first request.

    Durable before it is returned, so a process that is killed and started again gets
    the same bytes.

    Raises:
        StoreError: See ``SiteMemory.update``.
    """

    def draw(document: Document) -> Document:
        return (
            document if key in document else {**document, key: os.urandom(size).hex()}
        )

    known = memory.read(name)
    return bytes.fromhex((known if key in known else memory.update(name, draw))[key])
