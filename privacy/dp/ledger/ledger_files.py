"""The two files of a ledger: lock, append, head, and the check of one by the other.

Why there are two, and why in this order, is in ``ledger``.
"""

import fcntl
import json
import os
import re
from pathlib import Path
from typing import NamedTuple, Protocol

from federation.durable_files import flush
from federation.errors import FederationError, StoreUnavailable, os_errors
from privacy.dp.errors import LedgerBusy, LedgerDamaged, LedgerShortened
from privacy.dp.ledger import ledger_format
from privacy.dp.ledger.ledger_format import Contents

LEDGER_NAME = "ledger.jsonl"
HEAD_NAME = "ledger.head"

# What to do when the charges of a run are lost.
RECOVER = (
    "If it is lost, stop the site and run crossfed ledger recover, which charges every "
    "round that the site is known to have answered; or start a new run with a budget "
    "that counts what this one may have spent"
)

# A line has about 450 bytes: more than a million charges.
MAX_LEDGER_BYTES = 1 << 29
_MAX_HEAD_BYTES = 512
_HEAD = re.compile(
    rb'\{"hash":"([0-9a-f]{64})","seq":(0|[1-9][0-9]{0,15})'
    rb'(?:,"signature":"([0-9a-f]{128})")?\}\n'
)


class HeadKey(Protocol):
    """The key of the site that a ledger belongs to."""

    def sign(self, body: bytes) -> bytes:
        """Return a signature of 64 bytes."""
        ...

    def verify(self, body: bytes, signature: bytes) -> None:
        """Check a signature.

        Raises:
            FederationError: It is not this site's.
        """
        ...


class LedgerHead(NamedTuple):
    """Place and hash of a ledger's last line.

    The hash covers all lines, and so the run and the site.

    Attributes:
        seq: Place of the line.
        digest: Its hash.
        signature: Signature of both, by the site; empty where sites have no keys.
    """

    seq: int
    digest: str
    signature: bytes = b""

    def body(self) -> bytes:
        """The signed bytes."""
        return _canonical({"hash": self.digest, "seq": self.seq})


def open_locked(folder: Path) -> int:
    """Open a ledger for one writer, and make it and its folder if they are missing.

    Raises:
        LedgerBusy: Another process has it open.
        OSError: It cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LEDGER_NAME
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The names must be as durable as what is written under them.
        flush(folder)
        flush(folder.parent)
    except BlockingIOError as error:
        os.close(handle)
        raise LedgerBusy(
            f"another process is writing the ledger {path}: stop the other site agent, "
            "or wait for it"
        ) from error
    except OSError:
        os.close(handle)
        raise
    return handle


def append(handle: int, line: bytes) -> None:
    """Add a line and flush it to the disk."""
    written = 0
    while written < len(line):
        written += os.write(handle, line[written:])
    os.fsync(handle)


def read_all(path: Path) -> bytes:
    """Every byte of a ledger.

    Raises:
        LedgerDamaged: It is longer than any ledger.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_LEDGER_BYTES + 1)
    if len(data) > MAX_LEDGER_BYTES:
        raise LedgerDamaged(f"{path} is larger than {MAX_LEDGER_BYTES} bytes")
    return data


def is_begun(path: Path) -> bool:
    """Whether a ledger's first line was written, without which nothing is charged.

    A process that is killed while it creates a ledger leaves none, and no head. Another
    one that opens the ledger to write begins it again.

    Raises:
        LedgerDamaged: See ``read_all``.
        StoreUnavailable: It cannot be read.
    """
    with os_errors(StoreUnavailable, f"read the ledger {path}"):
        return (path.parent / HEAD_NAME).exists() or b"\n" in read_all(path)


def read_head(folder: Path) -> LedgerHead | None:
    """Read a head without checking its signature; None if there is none.

    Raises:
        LedgerDamaged: It is no head.
        OSError: It cannot be read.
    """
    path = folder / HEAD_NAME
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_HEAD_BYTES)
    except FileNotFoundError:
        return None
    found = _HEAD.fullmatch(data)
    if found is None:
        raise LedgerDamaged(
            f"{path} is not the head of a ledger, so missing lines cannot be detected; "
            "restore the original file"
        )
    signature = bytes.fromhex((found[3] or b"").decode())
    return LedgerHead(int(found[2]), found[1].decode(), signature)


def replace_head(
    folder: Path, seq: int, digest: str, key: HeadKey | None = None
) -> None:
    """Write the head whole or not at all, durably; sign it if there is a key."""
    head: dict[str, str | int] = {"hash": digest, "seq": seq}
    if key is not None:
        head["signature"] = key.sign(LedgerHead(seq, digest).body()).hex()
    path = folder / HEAD_NAME
    draft = path.with_suffix(".new")
    with draft.open("wb") as file:
        file.write(_canonical(head) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    flush(folder)


def _canonical(document: dict[str, str | int]) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode("ascii")


def verify(
    data: bytes, head: LedgerHead | None, name: str, key: HeadKey | None = None
) -> Contents:
    """Check a ledger's bytes against its head, which was read before them.

    Args:
        data: Content of the ledger.
        head: What is beside it.
        name: What errors call the ledger.
        key: The site's, which must have signed the head; None to believe the head.

    Raises:
        LedgerDamaged: See ``ledger_format.read``; or it and its head differ, or the
            site has not signed the head.
        LedgerShortened: It ends before its head.
    """
    if head is not None and key is not None:
        _check_signed(head, name, key)
    if head is not None and b"\n" not in data:
        raise _shortened(name, "has no complete line", head[0])
    contents = ledger_format.read(data, name)
    if head is None:
        if contents.seq > 0:
            raise LedgerDamaged(
                f"{name} has no {HEAD_NAME} beside it, so missing lines cannot be "
                "detected; restore the file"
            )
        return contents
    seq, digest, _ = head
    if contents.seq < seq:
        raise _shortened(name, f"ends at entry {contents.seq}", seq)
    if contents.hashes[seq] != digest:
        raise LedgerDamaged(
            f"{name}: entry {seq} does not match {HEAD_NAME}; one of the two files was "
            "restored from another copy, and nothing is released"
        )
    return contents


def _check_signed(head: LedgerHead, name: str, key: HeadKey) -> None:
    try:
        key.verify(head.body(), head.signature)
    except FederationError as error:
        what = "is not signed by" if head.signature else "has no signature of"
        raise LedgerDamaged(
            f"{name}: its {HEAD_NAME} {what} this site's identity key, so one of the "
            "two was written by someone else; nothing is released. Restore the "
            f"original files. {RECOVER}"
        ) from error


def read_file(path: Path, key: HeadKey | None = None) -> Contents:
    """Read and check a ledger, which another process may be writing.

    Args:
        path: A ``ledger.jsonl``; its head is looked for beside it.
        key: The site's, which must have signed the head; None to believe the head.

    Raises:
        LedgerDamaged: See ``verify``.
        StoreUnavailable: It cannot be read.
    """
    advice = f"name a run, or a {LEDGER_NAME}"
    with os_errors(StoreUnavailable, f"read the ledger {path}", advice):
        # The head first: a writer may continue between the two, and only forwards.
        head = read_head(path.parent)
        return verify(read_all(path), head, str(path), key)


def _shortened(name: str, what: str, seq: int) -> LedgerShortened:
    return LedgerShortened(
        f"{name} {what}, but {HEAD_NAME} records entry {seq}: lines are missing, so "
        "what was spent is not known and nothing is released. Restore the complete "
        f"file. {RECOVER}"
    )
