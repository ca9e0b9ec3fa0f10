"""The aggregator operator's commands on sites: invite, list and revoke.

A revoked site is on the proxy's list before anything else is written; an interrupted
call is finished by repeating it, or by the next start of the aggregator. Neither needs
free disk space: some is reserved (``disk_reserve``).
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_adapters.nginx import processes as proxy_processes
from deploy import audit_log
from deploy.aggregator_host import disk_reserve
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import (
    BookFile,
    BoundInvitation,
    EnrolledSite,
    Invitation,
    WithdrawnSite,
    open_authority,
)
from federation.addresses import parse_address
from federation.durable_files import replace_file
from federation.errors import FederationError, JobError
from federation.ids import check_name
from federation.platform_identity import PlatformIdentity
from federation.protocols import Clock
from privacy.keystream import RandomBytes
from privacy.membership import roster_file
from privacy.membership.certificates import (
    RENEW_BEFORE_SECONDS,
    load_key,
    names_in,
    read_certificate,
    server_names,
)
from privacy.membership.token import (
    SECRET_BYTES,
    TOKEN_SECONDS,
    EnrolmentRefused,
    Token,
)
from privacy.secagg.agreement.identity import PublicIdentity
from privacy.secagg.agreement.roster import SITE
from privacy.secagg.errors import RosterRefused

if TYPE_CHECKING:
    from monitoring.runs.run_numbers import RunNumbers

# Refuses a node from now on; an unknown number is no error.
Unregister = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One line of the list of sites.

    Attributes:
        site: Its name.
        state: ``invited``, ``enrolled`` or ``revoked``.
        at: Until when the token or the newest certificate holds, or when it was
            revoked; seconds since 1970.
        role: ``site`` or ``relay``; of a revoked one, ``site``.
        organisation: Who answers for it; empty where that is not known.
        release: Release of crossfed that it last came with; likewise.
        fingerprint: Fingerprint of its identity; likewise.
        connected: Whether it is connected; None where that is not known.
        last_answer: When it answered a task last, in any of the newest runs, seconds
            since 1970; None if in none.
        steps_per_second: How fast it trained in the newest run that it answered; None
            where that run hides it.
    """

    site: str
    state: str
    at: float
    role: str = SITE
    organisation: str = ""
    release: str = ""
    fingerprint: str = ""
    connected: bool | None = None
    last_answer: float | None = None
    steps_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All parties that the aggregator knows.

    Attributes:
        sites: Invited, then enrolled, then revoked.
        serial: Serial of the roster; 0 if there is none.
        digest: Digest of the roster, hexadecimal; empty while it has no sites.
    """

    sites: tuple[SiteRow, ...]
    serial: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RevocationResult:
    """The result of a revocation.

    Attributes:
        site: Who was shut out.
        certificates: How many that still held are on the proxy's list.
        proxy: Whether a proxy runs, which refuses them now.
        still_registered: Why the node is still registered; None if it is not.
    """

    site: str
    certificates: int
    proxy: bool
    still_registered: str | None


def overview(
    config: AggregatorConfig,
    *,
    clock: Clock,
    nodes: Collection[int] | None = None,
    runs: Iterable["RunNumbers"] = (),
) -> Overview:
    """List the sites.

    Args:
        config: The operator's ``aggregator.toml``.
        clock: Tells time.
        nodes: Numbers of the nodes that are connected; None if that is not known.
        runs: The newest runs, the oldest first.

    Raises:
        FederationError: A file is damaged or cannot be read.
    """
    book = BookFile(folder=config.folder).read().at(clock.now())
    path = config.folder / "roster.toml"
    open_ones: list[Invitation | BoundInvitation] = [*book.invitations, *book.bound]
    invited = [
        SiteRow(site=one.site, state="invited", at=one.expires, role=one.role)
        for one in open_ones
        if book.member(one.site) is None
    ]
    enrolled, roles = [], roster_file.roles(path)
    known = {n: site for run in runs for n, site in run.sites.items() if site.answers}
    for one in book.members:
        at = max((c.expires for c in one.certificates), default=0.0)
        site = known.get(one.site)
        row = replace(
            _row(one, "enrolled", at),
            role=roles.get(one.site, SITE),
            connected=None if nodes is None else int(one.node_id) in nodes,
        )
        if site is not None:
            speed = site.steps_per_second
            row = replace(row, last_answer=site.last_answer, steps_per_second=speed)
        enrolled.append(row)
    revoked = [_row(one.member, "revoked", one.at) for one in book.withdrawn]
    serial, digest = roster_file.describe(path)
    return Overview(sites=(*invited, *enrolled, *revoked), serial=serial, digest=digest)


def _row(member: EnrolledSite, state: str, at: float) -> SiteRow:
    key = PublicIdentity(bytes.fromhex(member.identity))
    return SiteRow(
        site=member.site,
        state=state,
        at=at,
        organisation=member.organisation,
        release=member.release,
        fingerprint=key.fingerprint,
    )


def invite(
    config: AggregatorConfig,
    site: str,
    *,
    random_bytes: RandomBytes,
    clock: Clock,
    address: str | None = None,
    seconds: float = TOKEN_SECONDS,
    role: str = SITE,
) -> Token:
    """Make a token for a site or relay; only its hash is stored.

    Args:
        config: The operator's ``aggregator.toml``.
        site: Name of the site.
        random_bytes: ``os.urandom``.
        clock: Tells time.
        address: ``HOST:PORT`` where the site finds the aggregator; by default the
            first of ``hosts``, and the port of ``listen``.
        seconds: How long it holds.
        role: In the roster: ``site`` or ``relay``.

    Raises:
        EnrolmentRefused: The site is enrolled.
        KeyFileRefused: The folder is not an aggregator's.
        JobError: The site's name is none, or the address.
        RosterRefused: The aggregator's own key is not pinned yet.
    """
    token = _token(config, site, address, random_bytes(SECRET_BYTES), clock=clock)
    book_file = BookFile(folder=config.folder)
    with book_file.locked():
        book = book_file.read().at(clock.now())
        member = book.member(site)
        # One that let its certificates expire may come back with its own keys.
        if member is not None and member.certificates:
            raise EnrolmentRefused(
                f"site {site!r} is enrolled: it renews its certificate itself with "
                "crossfed enroll --renew; if its keys are lost, revoke it first with "
                f"crossfed aggregator revoke {site}"
            )
        expires = clock.now() + seconds
        found = Invitation(digest=token.digest, site=site, expires=expires, role=role)
        _note(config, "site.invite", site, clock, role=role, until=_date(expires))
        book_file.write(book.with_invitation(found))
    return token


def invite_machine(
    config: AggregatorConfig,
    site: str,
    machine: PlatformIdentity,
    *,
    clock: Clock,
    address: str | None = None,
    seconds: float = TOKEN_SECONDS,
    role: str = SITE,
) -> Token:
    """Let a machine enrol as a site if its cloud vouches for it.

    An earlier invitation of the same site is replaced. A site that is enrolled keeps
    its keys: another machine may enrol as it with these keys alone.

    Args:
        config: The operator's ``aggregator.toml``.
        site: Name of the site.
        machine: Who may enrol as it.
        clock: Tells time.
        address: See ``invite``.
        seconds: How long it holds.
        role: See ``invite``.

    Returns:
        A token without a secret: it says where to enrol, and admits no one by itself.

    Raises:
        KeyFileRefused: The folder is not an aggregator's.
        JobError: The site's name is none, or the address.
        RosterRefused: The aggregator's own key is not pinned yet.
    """
    token = _token(config, site, address, b"", clock=clock)
    book_file = BookFile(folder=config.folder)
    with book_file.locked():
        book = book_file.read().at(clock.now())
        expires = clock.now() + seconds
        found = BoundInvitation(site=site, machine=machine, expires=expires, role=role)
        before = book.bound_invitation(site)
        if before is not None and before.machine == machine:
            found = replace(before, expires=expires, role=role)
        about = {"role": role, "until": _date(expires), "machine": machine}
        _note(config, "site.invite", site, clock, **about)
        book_file.write(book.with_bound(found))
    return token


def new_token(
    config: AggregatorConfig, name: str, *, random_bytes: RandomBytes, clock: Clock
) -> Token:
    """Make a token with a new secret, of which nothing is stored here.

    Raises:
        JobError: The name is none.
        KeyFileRefused, RosterRefused: See ``invite``.
    """
    return _token(config, name, None, random_bytes(SECRET_BYTES), clock=clock)


def _token(
    config: AggregatorConfig,
    site: str,
    address: str | None,
    secret: bytes,
    *,
    clock: Clock,
) -> Token:
    """Make a token, with a secret or without."""
    try:
        check_name(site)
    except ValueError as error:
        raise JobError(str(error), key="site") from None
    address = config.address if address is None else address
    parse_address(address, key="address")
    authority = open_authority(config.folder, clock=clock)
    _check_pinned(config.folder / "roster.toml")
    made = Token(
        address=address, authority=authority.fingerprint, site=site, secret=secret
    )
    Token.parse(made.text)  # Or the site would be the first to find out.
    return made


def revoke(
    config: AggregatorConfig, site: str, *, unregister: Unregister, clock: Clock
) -> RevocationResult:
    """Revoke a site immediately; a repeated call finishes an interrupted one.

    Args:
        config: The operator's ``aggregator.toml``.
        site: Name of the site.
        unregister: Shuts the node out at the SuperLink.
        clock: Tells time.

    Raises:
        EnrolmentRefused: No such site is enrolled, invited or was revoked.
        FederationError: The files cannot be written, or nginx does not take the list.
    """
    authority = open_authority(config.folder, clock=clock)
    book_file = BookFile(folder=config.folder)
    with book_file.locked():
        before = book_file.read()
        book = before.without(site, at=clock.now())
        gone = [one for one in book.withdrawn if one.member.site == site]
        if book == before and not gone:
            known = ", ".join(one.site for one in book.members) or "none"
            raise EnrolmentRefused(f"site {site!r} is not enrolled; enrolled: {known}")
        with disk_reserve.released(config.folder):
            _note(config, "site.revoke", site, clock)
            book_file.write_revocations(book, authority)
            runs = proxy_processes.reload(config.proxy)
            # From here on it is refused; everything after this only tidies up. If it
            # fails, ``prepare`` reads from the list who was revoked.
            book_file.write(book)
            book_file.note_revoked(book)
            roster_file.withdraw(config.folder / "roster.toml", site=site)
    return RevocationResult(
        site=site,
        certificates=sum(len(one.member.certificates) for one in gone),
        proxy=runs,
        still_registered=_unregister(gone, unregister),
    )


def prepare(config: AggregatorConfig, *, clock: Clock) -> tuple[str, ...]:
    """Rewrite the proxy's list, and renew the server's certificate if it is due.

    Before the proxy and the SuperLink start, whatever happened before. A site whose
    certificate is on the list and that the book still has was revoked after the copy
    of the book was made that someone has restored: it is revoked again.

    Returns:
        The sites that were.

    Raises:
        FederationError: A file is missing, damaged or cannot be written.
    """
    authority = open_authority(config.folder, clock=clock)
    book_file = BookFile(folder=config.folder)
    with book_file.locked():
        book = book_file.read()
        forgotten = book.shut_out(book_file.read_revocations(authority).revoked)
        for site in forgotten:
            _note(config, "site.revoke", site, clock, because="it was revoked before")
            book = book.without(site, at=clock.now())
        if forgotten:
            book_file.write(book)
        book_file.note_revoked(book)
        book_file.write_revocations(book, authority)
        for site in forgotten:
            roster_file.withdraw(config.folder / "roster.toml", site=site)
    renew_server(config, clock=clock)
    return forgotten


def renew_server(config: AggregatorConfig, *, clock: Clock) -> bool:
    """Renew the server's certificate if it is due, or if ``hosts`` has changed.

    A proxy that runs uses it immediately; a SuperLink with its next start.

    Returns:
        Whether there is a new certificate.

    Raises:
        FederationError: A file is missing, damaged or cannot be written.
    """
    authority = open_authority(config.folder, clock=clock)
    path = config.folder / "server.crt"
    present = read_certificate(path)
    names = server_names(config.file.hosts)
    left = present.not_valid_after_utc.timestamp() - clock.now()
    if left > RENEW_BEFORE_SECONDS and names_in(present) == frozenset(names):
        return False
    key = load_key(config.folder / "server.key")
    replace_file(path, [authority.issue_server(names, key)])
    proxy_processes.reload(config.proxy)
    return True


def _unregister(gone: list[WithdrawnSite], unregister: Unregister) -> str | None:
    try:
        for one in gone:
            unregister(int(one.member.node_id))
    except FederationError as error:
        return str(error)
    return None


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _note(
    config: AggregatorConfig, action: str, site: str, clock: Clock, **details: object
) -> None:
    folder, now = config.folder, clock.now()
    audit_log.note(folder, action, site, at=now, who=None, **details)


def _check_pinned(path: Path) -> None:
    """The roster may be a draft that has no site yet, but must have an aggregator."""
    if roster_file.pinned(path, site=None) is None:
        raise RosterRefused(
            f"{path} does not pin the aggregator's own key yet: crossfed keys trust "
            f"{path} --aggregator --organisation ORG --key PUBLICKEY"
        )
