"""Who did what at an aggregator or a site: ``audit.jsonl``, only ever appended to.

Each line is one entry, and holds the digest of the one before, so that a line cannot be
changed, removed or moved without a trace. An entry is on the disk before what it
records takes effect: with a full disk the action is refused, and after a kill an entry
may stand for an action that had not begun. A torn last line is of neither; the next
entry takes its place and says so.

The chain alone cannot show that its end was cut, or that all of it was written anew.
For that the newest digest must be known elsewhere: a coordinator signs it into each
proposal, and every site notes it in its own log. What was cut since the last run, and
the end of a site's log, are found only with a copy.
"""

import errno
import fcntl
import hashlib
import json
import os
import pwd
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from federation.durable_files import flush, unavailable
from federation.errors import CorruptObject, StoreUnavailable
from federation.typed_json import refuse_constant

FILE = "audit.jsonl"
SERVICE, AGENT = "the aggregator's service", "the site's agent"
RELAY = "the relay"
HEAD = "aggregator_head"  # In a site's entry: the newest digest at the aggregator.
_DOMAIN = b"crossfed audit log v1\n"
_MAX_CHARS, _MAX_LINE = 300, 1 << 20
_NONE = "0" * 64
_TEXTS = ("who", "action", "subject", "salt", "previous")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "number": (int,),
    "at": (float, int),
    **dict.fromkeys(_TEXTS, (str,)),
    "details": (dict,),
    "digest": (str,),
}
_NO_LOGIN = "4294967295"  # The kernel's word for a process without a login.


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the log.

    Attributes:
        number: 1 for the first.
        at: Seconds since 1970.
        who: A user of this host, an owner, a site or a process.
        action: What: ``site.revoke``.
        subject: On what: the name of a site, of an owner, or a run's ID.
        salt: Random, so that a digest reveals nothing of the entry.
        previous: Digest of the entry before; zeros for the first.
        details: What else is known, as text.
        digest: SHA-256 of all of the above; hexadecimal.
    """

    number: int
    at: float
    who: str
    action: str
    subject: str
    salt: str
    previous: str
    details: Mapping[str, str]
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLog:
    """A log as it was read.

    Attributes:
        entries: Those that can be read, in the order of the file.
        faults: What shows that the file is not as it was written.
    """

    entries: tuple[Entry, ...]
    faults: tuple[str, ...]

    @property
    def head(self) -> str:
        """Digest of the last entry; zeros if there is none."""
        return self.entries[-1].digest if self.entries else _NONE


def operator() -> str:
    """The user of this host whose process this is; and who logged in, before sudo."""
    uid = os.getuid()
    try:
        login = Path("/proc/self/loginuid").read_text("ascii").strip()
    except OSError:
        login = _NO_LOGIN
    is_other = login not in {_NO_LOGIN, str(uid)} and login.isdecimal()
    before = f", logged in as {_name(int(login))}" if is_other else ""
    return f"user {_name(uid)}{before}"


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def note(
    folder: Path,
    action: str,
    subject: str = "",
    /,
    *,
    at: float,
    who: str | None = None,
    **details: object,
) -> str:
    """Add an entry durably; return its digest.

    Args:
        folder: The aggregator's or the site's.
        action: What is about to happen.
        subject: On what.
        at: Seconds since 1970.
        who: Who does it; by default ``operator``.
        details: What else to keep.

    Raises:
        StoreUnavailable: It cannot be written: what it is about must not happen.
        CorruptObject: The last entry was changed.
    """
    path = folder / FILE
    texts = {key: str(value)[:_MAX_CHARS] for key, value in details.items()}
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            last, end, torn = _last(handle, path)
            if torn:
                texts["torn"] = f"{torn} bytes of an entry before were cut"
            made = Entry(
                number=last.number + 1 if last else 1,
                at=at,
                who=(operator() if who is None else who)[:_MAX_CHARS],
                action=action,
                subject=subject[:_MAX_CHARS],
                salt=secrets.token_hex(16),
                previous=last.digest if last else _NONE,
                details=texts,
            )
            digest = _digest(made)
            _write(handle, _line(made, digest), end)
        finally:
            os.close(handle)
        if last is None:
            flush(folder)
    except OSError as error:
        raise unavailable(path, error) from error
    return digest


def head(folder: Path) -> str:
    """Digest of the newest entry; zeros if there is none.

    Raises:
        StoreUnavailable: The log cannot be read.
        CorruptObject: See ``note``.
    """
    path = folder / FILE
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            last, _, _ = _last(handle, path)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return _NONE
    except OSError as error:
        raise unavailable(path, error) from error
    return last.digest if last else _NONE


def note_settings(
    folder: Path, settings: Mapping[str, Any], *, at: float, who: str
) -> None:
    """Add an entry if the settings are not those of the newest such entry.

    Args:
        folder: The aggregator's or the site's.
        settings: A configuration; of those below ``policy`` and ``queue`` the values
            are kept, of others, which may hold secrets, digests.
        at: Seconds since 1970.
        who: The process that reads them: who wrote the file is not known.

    Raises:
        StoreUnavailable, CorruptObject: See ``note``.
    """
    shown = dict(_flat(settings))
    path = folder / FILE
    known = read(path).entries if path.exists() else ()
    before = next((e for e in reversed(known) if e.action == "settings"), None)
    kept = {} if before is None else {**before.details}
    kept.pop("torn", None)
    if before is not None and kept == shown:
        return
    keys = sorted(key for key in kept.keys() | shown if kept.get(key) != shown.get(key))
    changed = "first seen" if before is None else f"changed: {', '.join(keys)}"
    note(folder, "settings", changed, at=at, who=who, **shown)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
        return
    text = json.dumps(value, default=str)
    is_open = name.partition(".")[0] in {"policy", "queue"}
    digest = hashlib.sha256(_DOMAIN + text.encode()).hexdigest()
    is_short = len(text) <= _MAX_CHARS
    yield name, text if is_open and is_short else f"sha256 {digest[:32]}"


def read(path: Path, known: Collection[str] = ()) -> AuditLog:
    """Read a log, and name everything that is not as it was written.

    Args:
        path: ``audit.jsonl``, or a copy of it.
        known: Digests that entries of it had, as others have noted them.

    Raises:
        StoreUnavailable: It cannot be read.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreUnavailable(f"cannot read {path}: {error.strerror}") from error
    entries, faults = list[Entry](), list[str]()
    for index, line in enumerate(lines, start=1):
        try:
            entry = _parse(line)
        except ValueError as error:
            faults.append(f"line {index} is no entry: {error}")
            continue
        if entry.digest != _digest(entry):
            faults.append(f"line {index}: entry {entry.number} was changed")
        newest = max((each.number for each in entries), default=0)
        if entry.number <= newest:
            faults.append(f"line {index}: entry {entry.number} comes after {newest}")
        entries.append(entry)
    if torn:
        faults.append(
            f"line {len(lines) + 1} is torn: its writer was killed, or it was cut"
        )
    faults += _breaks(entries)
    digests = {_NONE, *(entry.digest for entry in entries)}
    faults += [
        f"the entry with digest {each} is missing: the log was cut or written anew"
        for each in dict.fromkeys(known)
        if each not in digests
    ]
    return AuditLog(entries=tuple(entries), faults=tuple(faults))


def _breaks(entries: Collection[Entry]) -> Iterator[str]:
    by_number = {entry.number: entry for entry in entries}
    missing = sorted({*range(1, max(by_number, default=0))} - by_number.keys())
    yield from (f"entry {number} is missing" for number in missing)
    for number, entry in sorted(by_number.items()):
        before = by_number.get(number - 1)
        known = _NONE if number == 1 else before.digest if before else entry.previous
        if entry.previous != known:
            yield f"entry {number} does not follow entry {number - 1}: one was replaced"


def heads(entries: Collection[Entry]) -> Collection[str]:
    """Digests of the aggregator's log that a site's log notes."""
    return [entry.details[HEAD] for entry in entries if HEAD in entry.details]


def _digest(entry: Entry) -> str:
    return hashlib.sha256(_DOMAIN + _line(entry, "")).hexdigest()


def _line(entry: Entry, digest: str) -> bytes:
    record = {name: getattr(entry, name) for name in _KINDS} | {"digest": digest}
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _parse(line: bytes) -> Entry:
    """Read a line.

    Raises:
        ValueError: It is no entry, or not written as ``note`` does.
    """
    found = json.loads(line, parse_constant=refuse_constant)
    if not isinstance(found, dict) or found.keys() != _KINDS.keys():
        raise ValueError(f"it must have the fields {', '.join(_KINDS)}")
    odd = [name for name, kind in _KINDS.items() if type(found[name]) not in kind]
    if odd or any(type(text) is not str for text in found["details"].values()):
        raise ValueError(f"a field is of the wrong type: {', '.join(odd) or 'details'}")
    made = Entry(**found)
    # Two texts of one entry would let a line change under its digest.
    if _line(made, made.digest) != line + b"\n":
        raise ValueError("it is written in another way")
    return made


def _last(handle: int, path: Path) -> tuple[Entry | None, int, int]:
    """The last entry, where the next one goes, and how many torn bytes it replaces."""
    size = os.fstat(handle).st_size
    tail = os.pread(handle, 2 * _MAX_LINE, max(0, size - 2 * _MAX_LINE))
    whole, _, torn = tail.rpartition(b"\n")
    if not whole:
        if size > len(torn):
            raise CorruptObject(f"{path} is damaged: {_ADVICE}")
        return None, 0, len(torn)
    try:
        entry = _parse(whole.rpartition(b"\n")[2])
    except ValueError as error:
        raise CorruptObject(f"the end of {path} is damaged: {error}; {_ADVICE}") from (
            error
        )
    if entry.digest != _digest(entry):
        raise CorruptObject(f"the last entry of {path} was changed: {_ADVICE}")
    return entry, size - len(torn), len(torn)


_ADVICE = (
    "move the file elsewhere and keep it as evidence; the next action begins a new one"
)


def _write(handle: int, line: bytes, end: int) -> None:
    """Write a line at an offset, all of it or nothing."""
    if len(line) > _MAX_LINE:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    try:
        os.ftruncate(handle, end)
        os.lseek(handle, end, os.SEEK_SET)
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, end)
        raise
