"""The roster: the public keys of the sites and of the aggregator.

Every site keeps its own copy of this TOML file and trusts no other. Its serial
rises with every change (a site joins, leaves or changes its key); its digest goes
into the contract of every run, so that two sites with different rosters cannot
take part in one run::

    serial = 3

    [aggregator]
    organisation = "Consortium office"
    public_key = "9d61...f3"            # 64 hexadecimal digits

    [[sites]]
    name = "aws-us-east-1"
    organisation = "Hospital A"
    public_key = "d75a...1a"

    [[sites]]
    name = "aws-relay"
    organisation = "Hospital A"
    public_key = "3d40...0c"
    role = "relay"                      # it adds up updates and has none

Rosters are exchanged and compared by people, by their digest or by the
fingerprints of the keys: that is where trust enters, and not in this file.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from federation.errors import os_errors
from federation.ids import SiteId, check_name
from federation.job import job_file
from privacy.secagg.agreement.canonical import MAX_U64, fields, u64
from privacy.secagg.agreement.identity import KEY_BYTES, PublicIdentity
from privacy.secagg.errors import RosterRefused, StaleRoster, UnknownSite

MAX_SITES = 1024
MAX_ORGANISATION_BYTES = 200
MAX_ROSTER_BYTES = 1 << 20
SITE, RELAY = ROLES = "site", "relay"
_CORRECT = "correct the file, or restore it from a backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEntry:
    """One site or relay and its public key.

    Attributes:
        site: Its name.
        organisation: Who answers for it, in words.
        public_key: Raw Ed25519 key, 32 bytes.
        role: ``site``, or ``relay`` of one that is no site: no sum counts it.
    """

    site: SiteId
    organisation: str
    public_key: bytes
    role: str = SITE


@dataclass(frozen=True, kw_only=True)
class Roster:
    """A validated roster.

    Attributes:
        serial: Rises with every change; at least 1.
        aggregator_organisation: Who runs the aggregator, in words.
        aggregator_key: Raw Ed25519 key of the aggregator, 32 bytes.
        sites: Entries in the order of their names.

    Raises:
        RosterRefused: A site, a key or the order is wrong.
    """

    serial: int
    aggregator_organisation: str
    aggregator_key: bytes
    sites: tuple[RosterEntry, ...]

    def __post_init__(self) -> None:
        """Refuse rosters that contradict themselves."""
        if not 1 <= self.serial <= MAX_U64:
            raise RosterRefused(f"serial is {self.serial}, it starts at 1")
        if not 1 <= len(self.sites) <= MAX_SITES:
            raise RosterRefused(f"a roster has 1 to {MAX_SITES} sites")
        names = [entry.site for entry in self.sites]
        if names != sorted(set(names)):
            raise RosterRefused("sites must be distinct and in the order of names")
        keys = [self.aggregator_key, *(entry.public_key for entry in self.sites)]
        if len(set(keys)) != len(keys):
            raise RosterRefused("two parties have the same public key")
        _check_party("aggregator", self.aggregator_organisation, self.aggregator_key)
        for entry in self.sites:
            _check_site_name(entry.site)
            if entry.role not in ROLES:
                raise RosterRefused(f"the role of {entry.site!r} is not in {ROLES}")
            _check_party(entry.site, entry.organisation, entry.public_key)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical encoding.

        LP(LP("xsa-v1/roster") || LP(u64 serial)), then LP of the aggregator's
        organisation and key, then for each site LP of its name, organisation and
        key, and of a relay "relay" too; text as UTF-8, and LP of each part within.
        """
        head = fields(b"xsa-v1/roster", u64(self.serial))
        aggregator = fields(self.aggregator_organisation.encode(), self.aggregator_key)
        rows = [
            fields(
                entry.site.encode(),
                entry.organisation.encode(),
                entry.public_key,
                *([RELAY.encode()] if entry.role == RELAY else []),
            )
            for entry in self.sites
        ]
        return hashlib.sha256(fields(head, aggregator, *rows)).digest()

    def entry(self, site: SiteId) -> RosterEntry:
        """Find a site.

        Raises:
            UnknownSite: The roster does not have it.
        """
        for entry in self.sites:
            if entry.site == site:
                return entry
        raise UnknownSite(f"site {site!r} is not in roster {self.serial}")

    def check_roles(self, sites: Collection[str], relays: Collection[str]) -> None:
        """Check that a job's sites are no relays, and that its relays are no sites.

        Raises:
            RosterRefused: A relay would count as a site, or a site as a relay.
        """
        for entry in self.sites:
            if entry.role == RELAY and entry.site in sites:
                raise RosterRefused(
                    f"{entry.site!r} is a relay in roster {self.serial}, and the job "
                    "names it as a site, though it has no update to hide the others': "
                    "leave it out of [[sites]]"
                )
            if entry.role == SITE and entry.site in relays:
                raise RosterRefused(
                    f"{entry.site!r} is a site in roster {self.serial}, and the job "
                    "names it as a relay: revoke it, and invite it with --relay"
                )

    def check_current(self, serial: int) -> None:
        """Check that a roster offered by its serial is not older than this one.

        Raises:
            StaleRoster: It is.
        """
        if serial < self.serial:
            raise StaleRoster(
                f"roster {serial} was offered, but this site already has roster "
                f"{self.serial}: a key may have been withdrawn since; make the "
                "contract from the newest roster"
            )

    def check_successor(self, newer: "Roster") -> None:
        """Check that another roster may take this one's place at a site.

        Raises:
            StaleRoster: Its serial is lower, or the same with other content.
        """
        self.check_current(newer.serial)
        if newer.serial == self.serial and newer.digest != self.digest:
            raise StaleRoster(
                f"there are two rosters with serial {self.serial}: raise the serial "
                "with every change"
            )


def load(path: Path) -> Roster:
    """Read a roster file.

    Raises:
        RosterRefused: It is missing, is no TOML, has an unknown or missing key or
            contradicts itself.
    """
    with os_errors(RosterRefused, f"read {path}"), path.open("rb") as file:
        data = file.read(MAX_ROSTER_BYTES + 1)
    if len(data) > MAX_ROSTER_BYTES:
        raise RosterRefused(f"{path} is larger than {MAX_ROSTER_BYTES} bytes")
    try:
        return parse(data.decode())
    except UnicodeDecodeError:
        raise RosterRefused(f"{path} is not UTF-8; {_CORRECT}") from None
    except RosterRefused as error:
        raise RosterRefused(f"{path}: {error}; {_CORRECT}") from error


def parse(text: str) -> Roster:
    """Read a roster from its TOML text; sites may be in any order.

    Raises:
        RosterRefused: See ``load``.
    """
    try:
        document = job_file.loads_toml(text)
    except ValueError as error:
        raise RosterRefused(f"the roster is not TOML: {error}") from None
    top = _members(
        document, "roster", {"serial": int, "aggregator": dict, "sites": list}
    )
    words = {"organisation": str, "public_key": str}
    role = {"role": str}
    aggregator = _members(top["aggregator"], "aggregator", words)
    rows = [
        _members(row, f"sites[{at}]", {"name": str, **words}, role)
        for at, row in enumerate(top["sites"])
    ]
    entries = [
        RosterEntry(
            site=SiteId(row["name"]),
            organisation=row["organisation"],
            public_key=_key(row["public_key"], row["name"]),
            role=row.get("role", SITE),
        )
        for row in rows
    ]
    return Roster(
        serial=top["serial"],
        aggregator_organisation=aggregator["organisation"],
        aggregator_key=_key(aggregator["public_key"], "aggregator"),
        sites=tuple(sorted(entries, key=lambda entry: entry.site)),
    )


def dumps(roster: Roster) -> str:
    """Write a roster as TOML text that ``parse`` reads back."""
    # A JSON string of printable text is a TOML basic string.
    lines = [
        f"serial = {roster.serial}",
        "",
        "[aggregator]",
        f"organisation = {_quote(roster.aggregator_organisation)}",
        f'public_key = "{roster.aggregator_key.hex()}"',
    ]
    for entry in roster.sites:
        lines += [
            "",
            "[[sites]]",
            f"name = {_quote(entry.site)}",
            f"organisation = {_quote(entry.organisation)}",
            f'public_key = "{entry.public_key.hex()}"',
            *(['role = "relay"'] if entry.role == RELAY else []),
        ]
    return "\n".join(lines) + "\n"


def save(roster: Roster, path: Path) -> None:
    """Write a roster file atomically.

    Raises:
        RosterRefused: The file cannot be written.
    """
    draft = path.with_name(path.name + ".new")
    with os_errors(RosterRefused, f"write {path}"):
        draft.write_text(dumps(roster), encoding="utf-8")
        draft.replace(path)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _members(
    table: object,
    where: str,
    kinds: Mapping[str, type[Any]],
    optional: Mapping[str, type[Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise RosterRefused(f"{where} must be a table")
    for name in table:
        if name not in {*kinds, *optional}:
            raise RosterRefused(f"{where} has the unknown key {name!r}")
    given = {name: kind for name, kind in optional.items() if name in table}
    for name, kind in {**kinds, **given}.items():
        value = table.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RosterRefused(f"{where}.{name} must be a {kind.__name__}")
    return table


def _key(digits: str, whose: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or key.hex() != digits:
        raise RosterRefused(
            f"the public key of {whose[:80]!r} is not {2 * KEY_BYTES} lower-case "
            "hexadecimal digits"
        )
    return key


def _check_site_name(site: str) -> None:
    try:
        check_name(site)
    except ValueError as error:
        raise RosterRefused(str(error)) from None


def _check_party(whose: str, organisation: str, key: bytes) -> None:
    size = len(organisation.encode(errors="replace"))
    if not organisation.isprintable() or not 1 <= size <= MAX_ORGANISATION_BYTES:
        raise RosterRefused(
            f"the organisation of {whose!r} must be 1 to {MAX_ORGANISATION_BYTES} "
            "bytes of printable text"
        )
    try:
        PublicIdentity(key)
    except ValueError as error:
        raise RosterRefused(f"the public key of {whose!r}: {error}") from None
