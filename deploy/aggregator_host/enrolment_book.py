"""The aggregator's record of its sites: invited, enrolled and revoked ones.

One file, ``sites.json``, only for its owner, replaced whole under a lock: the service
and the commands of the operator write it. It holds no secret but the hashes of tokens.
The list that the proxy reads, ``ca.crl``, is made from it.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from federation import durable_files
from federation.durable_files import replace_file
from federation.errors import FederationError
from federation.ids import SiteId
from federation.platform_identity import PlatformIdentity
from federation.protocols import Clock
from federation.typed_json import encode
from privacy.membership.certificates import CERTIFICATE_DAYS, Authority, Revocations
from privacy.secagg.agreement.roster import SITE, Roster
from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import replace_private

VERSION = 1
# Of one site, that are valid at the same time.
MAX_CERTIFICATES = 16
_DAY_SECONDS = 86_400.0
_DAMAGED = (
    "restore it from a backup. Until then no site can enrol or be revoked; do not "
    "delete it, or revoked sites would be forgotten"
)


class BookDamaged(FederationError):
    """The record of sites cannot be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A token that was issued.

    Attributes:
        digest: SHA-256 of its secret, hexadecimal.
        site: Who is invited.
        expires: Seconds since 1970.
        keys: Digest of the keys that it was used with; empty before.
        role: In the roster: ``site`` or ``relay``.
    """

    digest: str
    site: str
    expires: float
    keys: str = ""
    role: str = SITE


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundInvitation:
    """An invitation without a secret, for a machine that its cloud vouches for.

    Attributes:
        site: Who is invited.
        machine: Who may enrol as it.
        expires: Seconds since 1970.
        keys: Digest of the keys that it was used with; empty before.
        role: In the roster: ``site`` or ``relay``.
    """

    site: str
    machine: PlatformIdentity
    expires: float
    keys: str = ""
    role: str = SITE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCertificate:
    """A certificate of a site.

    Attributes:
        serial: Its serial number, hexadecimal.
        expires: Seconds since 1970.
    """

    serial: str
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolledSite:
    """A site that is enrolled.

    Attributes:
        site: Its name.
        organisation: Who answers for it, in words.
        release: Release of crossfed that it last came with.
        identity: Public key of its identity, hexadecimal.
        node_key: Public key that Flower knows it by, PEM.
        node_id: Flower's number for it, in decimal digits.
        enrolled_at: Seconds since 1970.
        certificates: Those that may still be valid.
        machine: The machine that its cloud has vouched for; None if a token admitted
            it.
    """

    site: str
    organisation: str
    release: str
    identity: str
    node_key: str
    node_id: str
    enrolled_at: float
    certificates: tuple[NodeCertificate, ...]
    machine: PlatformIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawnSite:
    """A revoked site; its keys are never accepted again.

    Attributes:
        member: What it was.
        at: When, in seconds since 1970.
    """

    member: EnrolledSite
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedKeys:
    """The keys of revoked sites.

    Attributes:
        keys: Each site's name, and its public key in hexadecimal digits.
    """

    keys: tuple[tuple[str, str], ...]

    def sites(self, members: Roster) -> frozenset[SiteId]:
        """Revoked sites, except those that a roster pins with a new key."""
        pinned = {entry.site: entry.public_key.hex() for entry in members.sites}
        found = ((SiteId(site), key) for site, key in self.keys)
        return frozenset(site for site, key in found if pinned.get(site, key) == key)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentBook:
    """The whole record.

    Attributes:
        version: Version of the file.
        invitations: That may still be used.
        bound: The same of machines; one for a site at most.
        members: Enrolled sites.
        withdrawn: Revoked ones.
    """

    version: int = VERSION
    invitations: tuple[Invitation, ...] = ()
    bound: tuple[BoundInvitation, ...] = ()
    members: tuple[EnrolledSite, ...] = ()
    withdrawn: tuple[WithdrawnSite, ...] = ()

    def invitation(self, digest: str) -> Invitation | None:
        """Find an invitation by its token's digest."""
        found = [one for one in self.invitations if one.digest == digest]
        return found[0] if found else None

    def bound_invitation(self, site: str) -> BoundInvitation | None:
        """Find the invitation of a site's machine."""
        found = [one for one in self.bound if one.site == site]
        return found[0] if found else None

    def member(self, site: str) -> EnrolledSite | None:
        """Find an enrolled site."""
        found = [one for one in self.members if one.site == site]
        return found[0] if found else None

    def with_invitation(self, invitation: Invitation) -> "EnrolmentBook":
        """Add an invitation, or replace the one with the same token."""
        rest = [one for one in self.invitations if one.digest != invitation.digest]
        return replace(self, invitations=(*rest, invitation))

    def with_bound(self, invitation: BoundInvitation) -> "EnrolmentBook":
        """Add a machine's invitation, or replace that of the same site."""
        rest = [one for one in self.bound if one.site != invitation.site]
        return replace(self, bound=(*rest, invitation))

    def with_member(self, member: EnrolledSite) -> "EnrolmentBook":
        """Add a site, or replace the one with the same name."""
        rest = [one for one in self.members if one.site != member.site]
        members = sorted((*rest, member), key=lambda one: one.site)
        return replace(self, members=tuple(members))

    def without(self, site: str, *, at: float) -> "EnrolmentBook":
        """Remove a site and all its invitations."""
        gone = tuple(
            WithdrawnSite(member=one, at=at) for one in self.members if one.site == site
        )
        return replace(
            self,
            invitations=tuple(one for one in self.invitations if one.site != site),
            bound=tuple(one for one in self.bound if one.site != site),
            members=tuple(one for one in self.members if one.site != site),
            withdrawn=(*self.withdrawn, *gone),
        )

    @property
    def revoked_names(self) -> frozenset[str]:
        """Names of sites that are revoked, and not enrolled again."""
        members = {one.site for one in self.members}
        return frozenset(one.member.site for one in self.withdrawn) - members

    def shut_out(self, revoked: Mapping[int, float]) -> tuple[str, ...]:
        """Sites that hold a certificate which was revoked.

        There are none, unless this is an older book that was restored from a copy.
        """
        return tuple(
            one.site
            for one in self.members
            if any(int(c.serial, 16) in revoked for c in one.certificates)
        )

    def revoked_sites(self, members: Roster) -> frozenset[SiteId]:
        """Revoked sites, except those that a roster pins with a new key."""
        return self.revoked_keys.sites(members)

    @property
    def revoked_keys(self) -> "RevokedKeys":
        """The keys of revoked sites."""
        gone = (one.member for one in self.withdrawn)
        return RevokedKeys(keys=tuple((one.site, one.identity) for one in gone))

    def at(self, now: float) -> "EnrolmentBook":
        """Drop what has expired: invitations, and certificates of members."""
        return replace(
            self,
            invitations=tuple(one for one in self.invitations if one.expires > now),
            bound=tuple(one for one in self.bound if one.expires > now),
            members=tuple(
                replace(
                    one,
                    certificates=tuple(c for c in one.certificates if c.expires > now),
                )
                for one in self.members
            ),
        )

    def revoked(self, now: float) -> dict[int, float]:
        """When unexpired certificates were revoked, by serial number."""
        return {
            int(certificate.serial, 16): one.at
            for one in self.withdrawn
            for certificate in one.member.certificates
            if certificate.expires > now
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BookFile:
    """The file of the book.

    Attributes:
        folder: The aggregator's folder.
    """

    folder: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "sites.json"

    def read(self) -> EnrolmentBook:
        """Read the book; an empty one if there is none.

        Raises:
            BookDamaged: It cannot be read, or is not as ``write`` leaves it.
        """
        book = durable_files.read_json(
            self.path, EnrolmentBook, advice=_DAMAGED, refusal=BookDamaged
        )
        if book is None:
            return EnrolmentBook()
        try:
            book.revoked(0.0)
            if book.version != VERSION:
                raise ValueError("it has a different version")  # noqa: TRY301
        except ValueError as error:
            raise BookDamaged(f"{self.path} is damaged: {error}; {_DAMAGED}") from error
        return book

    def note_revoked(self, book: EnrolmentBook) -> None:
        """Note who was revoked for coordinators at work.

        They may not read what is new in the aggregator's own folder, as the book is
        whenever it changes; what is new beside the runs they may read.

        Raises:
            StoreUnavailable: It cannot be written.
        """
        if self._noted.parent.is_dir():  # Otherwise there has been no run.
            durable_files.write_json(self._noted, book.revoked_keys)

    def noted_revoked(self, members: Roster) -> frozenset[SiteId]:
        """Sites of a roster whose keys were revoked, as was noted last.

        Raises:
            CorruptObject: The note is damaged.
        """
        noted = durable_files.read_json(
            self._noted, RevokedKeys, advice="crossfed aggregator up writes it again"
        )
        return frozenset() if noted is None else noted.sites(members)

    @property
    def _noted(self) -> Path:
        return self.folder / "runs" / "revoked.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the book against writes of other processes and threads.

        Raises:
            BookDamaged: The file of the lock cannot be opened.
        """
        try:
            lock = os.open(
                self.folder / "sites.lock",
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError as error:
            raise BookDamaged(
                f"cannot open {self.folder / 'sites.lock'}: {error.strerror}; make the "
                "folder writable for this user, or choose another"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def write(self, book: EnrolmentBook) -> None:
        """Replace the book; the caller holds the lock.

        Raises:
            BookDamaged: It cannot be written; the one before is as it was.
        """
        text = json.dumps(encode(book), indent=1, allow_nan=False)
        try:
            replace_private(self.path, text.encode())
        except OSError as error:
            raise BookDamaged(f"cannot write {self.path}: {error.strerror}") from error

    def read_revocations(self, authority: Authority) -> Revocations:
        """Read the revoked, unexpired certificates from the proxy's list.

        A list that is missing or torn says nothing: it is made again from the book.
        """
        try:
            listed = authority.read_revocations((self.folder / "ca.crl").read_bytes())
        except (OSError, KeyFileRefused):
            return Revocations(number=0, revoked={})
        now = authority.clock.now()
        return Revocations(
            number=listed.number,
            revoked={
                serial: at
                for serial, at in listed.revoked.items()
                if at + CERTIFICATE_DAYS * _DAY_SECONDS > now
            },
        )

    def write_revocations(self, book: EnrolmentBook, authority: Authority) -> None:
        """Write the proxy's list, whose certificates are never accepted again.

        Raises:
            StoreUnavailable: It cannot be written.
        """
        before = self.read_revocations(authority)
        now = authority.clock.now()
        listed = authority.revocation_list(
            {**before.revoked, **book.revoked(now)}, number=before.number + 1
        )
        replace_file(self.folder / "ca.crl", [listed])


def open_authority(folder: Path, *, clock: Clock) -> Authority:
    """Read the authority of an aggregator's folder.

    Raises:
        KeyFileRefused: The folder is not an aggregator's, or a file is damaged.
    """
    if not (folder / "ca.key").exists():
        raise KeyFileRefused(
            f"{folder} is not an aggregator's folder, because it has no ca.key; create "
            "one with crossfed aggregator init, or give its configuration with --config"
        )
    return Authority.load(folder, clock=clock)
