"""Roster files for ``crossfed keys trust``.

What a roster is is in ``privacy.secagg.agreement.roster``. Here it is changed, and
errors say what to do. A roster grows one party at a time: until it has its aggregator
and a site it is a draft, which nothing but this module reads.
"""

import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from federation.durable_files import private_draft
from federation.job import job_file
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.identity import KEY_BYTES, PublicIdentity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import RosterRefused

_CORRECT = "correct it, or use another roster"

# What a draft lacks, so that the rest of it can be checked like a roster.
_NO_AGGREGATOR = {"organisation": "none yet", "public_key": bytes(KEY_BYTES).hex()}
_NO_SITE = {"name": "none-yet", **_NO_AGGREGATOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A roster's entry for a site or the aggregator.

    Attributes:
        organisation: Who answers for it, in words.
        public_key: In hexadecimal digits.
        role: Of the aggregator it says nothing.
    """

    organisation: str
    public_key: str
    role: str = roster.SITE

    @property
    def fingerprint(self) -> str:
        """Of the key, for people to compare."""
        return PublicIdentity(bytes.fromhex(self.public_key)).fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class PinResult:
    """A roster after a key was pinned in it.

    Attributes:
        roster: The file.
        digest: Digest of the roster, in hexadecimal digits; None for a draft.
        sites: How many it pins.
        party: Whose key was pinned.
        fingerprint: Fingerprint of that key.
        changed: Whether the roster did not pin it before.
        missing: What the draft lacks; empty for a roster.
    """

    roster: str
    serial: int
    digest: str | None
    sites: int
    party: str
    fingerprint: str
    changed: bool
    missing: tuple[str, ...]


def trust(
    path: Path,
    *,
    site: str | None,
    organisation: str,
    key: str,
    replace: bool = False,
    role: str = roster.SITE,
) -> PinResult:
    """Pin a key in a roster file, which is made if it does not exist.

    The file is replaced atomically; comments in it are lost.

    Args:
        path: The roster file.
        site: Whose key it is; None for the aggregator.
        organisation: Who answers for it, in words.
        key: The public key, 64 hexadecimal digits.
        replace: Whether another pinned key may be replaced.
        role: ``site`` or ``relay``.

    Raises:
        RosterRefused: The roster is malformed or cannot be read or written, the
            key or a name is none, or the party is pinned otherwise and ``replace``
            is not set.
    """
    document = _read_document(path)
    party = Party(organisation=organisation, public_key=_public_key(key), role=role)
    before = _pinned(document, site)
    if before is not None and before != party and not replace:
        raise RosterRefused(_would_replace(path, site, before, party))
    changed = before != party
    if changed:
        _pin(document, site, party)
        document["serial"] = document.get("serial", 0) + 1
        advice = "nothing was written: every party needs its own name and key"
        _write(path, _checked(path, document, advice=advice), document)
    missing = _missing(document)
    return PinResult(
        roster=str(path),
        serial=document["serial"],
        digest=None if missing else _checked(path, document).digest.hex(),
        sites=len(document.get("sites", ())),
        party="the aggregator" if site is None else site,
        fingerprint=party.fingerprint,
        changed=changed,
        missing=missing,
    )


def withdraw(path: Path, *, site: str) -> bool:
    """Remove a site's key; the serial rises.

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


def pinned(path: Path, *, site: str | None) -> Party | None:
    """A party's entry in a roster or a draft; None if there is none.

    Args:
        path: The roster file; one that is missing pins nothing.
        site: Name of the site; None for the aggregator.

    Raises:
        RosterRefused: The roster is malformed or cannot be read.
    """
    return _pinned(_read_document(path), site)


def roles(path: Path) -> dict[str, str]:
    """The role of each site of a roster or a draft. Raises like ``pinned``."""
    rows = _read_document(path).get("sites", ())
    return {row["name"]: row.get("role", roster.SITE) for row in rows}


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


def _public_key(digits: str) -> str:
    """Check a public key from the command line."""
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
            f"cannot read {path}: {error.strerror}; use a roster file that this user "
            "can read"
        ) from error
    if len(data) > limit:
        raise RosterRefused(
            f"{path} is larger than {limit} bytes, so it is not a roster"
        )
    try:
        document = job_file.loads_toml(data.decode())
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


def _missing(document: dict[str, Any]) -> tuple[str, ...]:
    return tuple(part for part in ("aggregator", "sites") if part not in document)


def _pinned(document: dict[str, Any], site: str | None) -> Party | None:
    row = document.get("aggregator")
    if site is not None:
        rows = (row for row in document.get("sites", ()) if row["name"] == site)
        row = next(rows, None)
    if row is None:
        return None
    return Party(**{k: v for k, v in row.items() if k != "name"})


def _pin(document: dict[str, Any], site: str | None, party: Party) -> None:
    if site is None:
        words = asdict(party)
        document["aggregator"] = {k: v for k, v in words.items() if k != "role"}
        return
    others = [row for row in document.get("sites", ()) if row["name"] != site]
    document["sites"] = [*others, {"name": site, **asdict(party)}]


def _would_replace(path: Path, site: str | None, before: Party, party: Party) -> str:
    whose = "the aggregator" if site is None else f"site {site!r}"
    if before.public_key == party.public_key:
        what = f"as a {before.role} of the organisation {before.organisation!r}"
    else:
        what = f"with the key {before.fingerprint[:19]}..."
    return (
        f"{path} already pins {whose} {what}: ask its organisation whether that has "
        "changed, and add --replace if it has"
    )


def _write(path: Path, found: Roster, document: dict[str, Any]) -> None:
    """Write a file atomically: no reader sees half a roster."""
    text = tomli_w.dumps(document) if _missing(document) else roster.dumps(found)
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        with private_draft(path, text.encode()) as draft:
            draft.chmod(mode)
            draft.replace(path)
    except OSError as error:
        raise RosterRefused(
            f"cannot write {path}: {error.strerror}; make its folder writable for this "
            "user, or use another roster"
        ) from error
