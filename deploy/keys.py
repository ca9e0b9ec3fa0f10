"""Key files and rosters as a person works with them: ``crossfed keys``.

What a key file and a roster are is in ``privacy.secagg``. Here they are made, shown
and changed, and errors say what to do. A roster grows one party at a time: until it
has its aggregator and a site it is a draft, which nothing but ``trust`` reads.
"""

import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from federation.ids import check_name
from privacy.secagg import identity, roster
from privacy.secagg.errors import KeyFileRefused, RosterRefused
from privacy.secagg.identity import (
    KEY_BYTES,
    Identity,
    PublicIdentity,
    RandomBytes,
)
from privacy.secagg.roster import Roster

# The most that the library encrypts a key with.
MAX_PASSPHRASE_BYTES = 1023

_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"

_CORRECT = "correct it, or name another roster"

# What a draft lacks, so that the rest of it can be checked like a roster.
_NO_AGGREGATOR = {"organisation": "none yet", "public_key": bytes(KEY_BYTES).hex()}
_NO_SITE = {"name": "none-yet", **_NO_AGGREGATOR}


def new(
    name: str,
    *,
    random_bytes: RandomBytes,
    out: Path | None = None,
    passphrase_file: Path | None = None,
) -> dict[str, Any]:
    """Make an identity and its file.

    Args:
        name: Of the site, or of the aggregator.
        random_bytes: ``os.urandom``.
        out: The file, which must not exist; ``NAME.pem`` by default.
        passphrase_file: Its first line encrypts the file.

    Returns:
        Name, file and public half of the key.

    Raises:
        KeyFileRefused: The name or the passphrase is none, or the file exists or
            cannot be written.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise KeyFileRefused(str(error)) from None
    path = out or Path(f"{name}.pem")
    passphrase = _passphrase(passphrase_file)
    made = identity.generate(random_bytes)
    with _advice_on_keys(path):
        made.save(path, passphrase=passphrase)
    return {"name": name, **_facts(path, made, encrypted=passphrase is not None)}


def show(path: Path, *, passphrase_file: Path | None = None) -> dict[str, Any]:
    """The public half of a key file.

    Raises:
        KeyFileRefused: The file is missing, open to others, damaged or encrypted
            with another passphrase.
    """
    passphrase = _passphrase(passphrase_file)
    with _advice_on_keys(path):
        found = identity.load(path, passphrase=passphrase)
    return _facts(path, found, encrypted=passphrase is not None)


def trust(
    path: Path,
    *,
    site: str | None,
    organisation: str,
    key: str,
    replace: bool = False,
) -> dict[str, Any]:
    """Pin a key in a roster file, which is made if it does not exist.

    The file is written anew, whole or not at all; comments in it are lost.

    Args:
        path: The roster file.
        site: Whose key it is; None for the aggregator.
        organisation: Who answers for it, in words.
        key: The public key, 64 hexadecimal digits.
        replace: Whether another pinned key may be replaced.

    Returns:
        File, serial, digest (None for a draft), fingerprint and what changed.

    Raises:
        RosterRefused: The roster is malformed or cannot be read or written, the
            key or a name is none, or the party is pinned otherwise and ``replace``
            is not set.
    """
    document = _read_document(path)
    party = {"organisation": organisation, "public_key": _public_key(key)}
    before = _pinned(document, site)
    if before is not None and before != party and not replace:
        raise RosterRefused(_would_replace(path, site, before, party))
    changed = before != party
    if changed:
        _pin(document, site, party)
        document["serial"] = document.get("serial", 0) + 1
        advice = "nothing was written: every party has a name and a key of its own"
        _write(path, _checked(path, document, advice=advice), document)
    missing = _missing(document)
    digest = None if missing else _checked(path, document).digest.hex()
    return {
        "roster": str(path),
        "serial": document["serial"],
        "digest": digest,
        "sites": len(document.get("sites", ())),
        "party": "the aggregator" if site is None else site,
        "fingerprint": PublicIdentity(bytes.fromhex(party["public_key"])).fingerprint,
        "changed": changed,
        "missing": missing,
    }


def withdraw(path: Path, *, site: str) -> bool:
    """Pin a site's key no longer; the serial rises.

    Args:
        path: The roster file.
        site: Whose key it was.

    Returns:
        Whether it was pinned.

    Raises:
        RosterRefused: The roster is malformed or cannot be read or written.
    """
    document = _read_document(path)
    if _pinned(document, site) is None:
        return False
    rest = [row for row in document["sites"] if row["name"] != site]
    document["sites"] = rest
    if not rest:
        del document["sites"]  # It is a draft again.
    document["serial"] += 1
    _write(path, _checked(path, document), document)
    return True


def pinned(path: Path, *, site: str | None) -> dict[str, str] | None:
    """What a roster or a draft pins: ``organisation`` and ``public_key``.

    Args:
        path: The roster file; one that is missing pins nothing.
        site: Name of the site; None for the aggregator.

    Raises:
        RosterRefused: The roster is malformed or cannot be read.
    """
    return _pinned(_read_document(path), site)


def describe(path: Path) -> tuple[int, str]:
    """Serial and digest of a roster; a draft has none of the latter, and is empty.

    Raises:
        RosterRefused: The roster is malformed or cannot be read.
    """
    document = _read_document(path)
    if _missing(document):
        return int(document.get("serial", 0)), ""
    found = _checked(path, document)
    return found.serial, found.digest.hex()


def is_encrypted(pem: bytes) -> bool:
    """Whether the content of a key file is encrypted with a passphrase."""
    return _ENCRYPTED in pem


def _facts(path: Path, key: Identity, *, encrypted: bool) -> dict[str, Any]:
    return {
        "file": str(path),
        "public_key": key.public.key.hex(),
        "fingerprint": key.public.fingerprint,
        "encrypted": encrypted,
    }


def _passphrase(path: Path | None) -> bytes | None:
    """The first line of a file."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_PASSPHRASE_BYTES + 2).rstrip(b"\r\n")
    except OSError as error:
        raise KeyFileRefused(
            f"cannot read the passphrase file {path}: {error.strerror}; write the "
            "passphrase into its first line"
        ) from error
    if not 1 <= len(line) <= MAX_PASSPHRASE_BYTES:
        raise KeyFileRefused(
            f"the first line of {path} is no passphrase: write 1 to "
            f"{MAX_PASSPHRASE_BYTES} bytes into it"
        )
    return line


@contextmanager
def _advice_on_keys(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyFileRefused as error:
        advice = _advice(path, error)
        raise KeyFileRefused(f"{error}{advice}") from error


def _advice(path: Path, error: KeyFileRefused) -> str:
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        if path.parent.is_dir():
            return "; make a key with `crossfed keys new`, or name another file"
        return "; make its folder first, or name another file"
    if isinstance(cause, OSError):
        return "; make it accessible to this user, or name another file"
    text = str(error)
    if "passphrase" in text:
        return (
            "; name a file with the right passphrase with --passphrase-file, or the "
            "right key file"
        )
    if "belongs to user" in text or "regular file" in text or "another kind" in text:
        return "; name the key file of this user that `crossfed keys new` made"
    return ""


def _public_key(digits: str) -> str:
    """Check a public key as a person gives it."""
    text = "".join(digits.split()).lower()
    try:
        return PublicIdentity(bytes.fromhex(text)).key.hex()
    except ValueError:
        raise RosterRefused(
            f"{digits[:80]!r} is not a public key: give the {2 * KEY_BYTES} "
            "hexadecimal digits that `crossfed keys show` prints as public key"
        ) from None


def _read_document(path: Path) -> dict[str, Any]:
    """Read a roster or a draft; empty if there is no such file."""
    limit = roster.MAX_ROSTER_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RosterRefused(
            f"cannot read {path}: {error.strerror}; name a roster file of this user"
        ) from error
    if len(data) > limit:
        raise RosterRefused(f"{path} is larger than {limit} bytes: it is no roster")
    try:
        document = tomllib.loads(data.decode())
    except ValueError as error:
        raise RosterRefused(f"{path} is not TOML: {error}; {_CORRECT}") from None
    _checked(path, document)
    return document


def _checked(path: Path, document: dict[str, Any], *, advice: str = _CORRECT) -> Roster:
    """The roster, with stand-ins for what a draft lacks."""
    whole = {"aggregator": _NO_AGGREGATOR, "sites": [_NO_SITE], **document}
    try:
        return roster.parse(tomli_w.dumps(whole))
    except RosterRefused as error:
        raise RosterRefused(f"{path}: {error}; {advice}") from error


def _missing(document: dict[str, Any]) -> list[str]:
    return [part for part in ("aggregator", "sites") if part not in document]


def _pinned(document: dict[str, Any], site: str | None) -> dict[str, str] | None:
    """What a roster says of a party; None if it is not in it."""
    if site is None:
        return document.get("aggregator")
    for row in document.get("sites", ()):
        if row["name"] == site:
            return {name: row[name] for name in ("organisation", "public_key")}
    return None


def _pin(document: dict[str, Any], site: str | None, party: dict[str, str]) -> None:
    if site is None:
        document["aggregator"] = party
        return
    others = [row for row in document.get("sites", ()) if row["name"] != site]
    document["sites"] = [*others, {"name": site, **party}]


def _would_replace(
    path: Path, site: str | None, before: dict[str, str], party: dict[str, str]
) -> str:
    whose = "the aggregator" if site is None else f"site {site!r}"
    if before["public_key"] == party["public_key"]:
        what = f"for the organisation {before['organisation']!r}"
    else:
        pinned = PublicIdentity(bytes.fromhex(before["public_key"])).fingerprint
        what = f"with the key {pinned[:19]}..."
    return (
        f"{path} already pins {whose} {what}: ask its organisation whether that has "
        "changed, and add --replace if it has"
    )


def _write(path: Path, found: Roster, document: dict[str, Any]) -> None:
    """Write a file whole or not at all: nobody reads half a roster."""
    text = tomli_w.dumps(document) if _missing(document) else roster.dumps(found)
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    mode = 0o644
    try:
        if path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
        try:
            with draft.open("x", encoding="utf-8") as file:
                os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise RosterRefused(
            f"cannot write {path}: {error.strerror}; make its folder writable for "
            "this user, or name another roster"
        ) from error
