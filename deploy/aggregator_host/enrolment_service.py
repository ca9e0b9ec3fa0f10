"""The aggregator's side of enrolment: it answers sites that enrol or renew.

A crash between two steps does no harm: an invitation is bound to the keys that it was
used with before anything is done for them, so that the same site may ask again and
nobody else can. What the operator does is in ``enrolment_operator``.

A machine that its cloud vouches for is asked for its proof before anything is locked:
that may take seconds. What it sent is kept in ``machines/SITE.json``, so that its
operator can check the proof again and need not believe this service.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cloud_adapters.identity.platforms import PlatformVerifier
from deploy import audit_log
from deploy.aggregator_host import enrolment_machines as machines
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import (
    MAX_CERTIFICATES,
    BookFile,
    EnrolledSite,
    EnrolmentBook,
    Invitation,
    NodeCertificate,
    open_authority,
)
from federation.errors import CorruptObject, FederationError, ProofRefused
from federation.platform_identity import KUBERNETES, PlatformIdentity
from federation.protocols import Clock
from privacy.membership import (
    messages as enrolment,
    roster_file,
    token as enrolment_token,
)
from privacy.membership.certificates import Authority, parse_certificate
from privacy.membership.messages import Enrolment, Renewal
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement import roster
from privacy.secagg.errors import KeyFileRefused, RosterRefused

_LOG = logging.getLogger(__name__)

# Lets a node in by its public key (PEM) and returns Flower's number for it; for a key
# that it knows already, the number that the key has.
Register = Callable[[bytes], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentService:
    """Answers sites that enrol or renew; threads may share it.

    Attributes:
        config: The operator's ``aggregator.toml``.
        register: Lets the node in at the SuperLink.
        verifier: Asks clouds who a machine is.
        clock: Tells time.
        listener: Called with a word about everybody who is let in or not.
    """

    config: AggregatorConfig
    register: Register
    verifier: PlatformVerifier
    clock: Clock
    listener: Callable[[str], None] = _LOG.info

    @property
    def _roster(self) -> Path:
        return self.config.folder / "roster.toml"

    def authority(self, body: bytes = b"") -> tuple[int, bytes]:
        """Answer with the root certificate, which a site compares with its token."""
        del body
        return 200, (self.config.folder / "ca.crt").read_bytes()

    def handle(self, body: bytes) -> tuple[int, bytes]:
        """Answer one request.

        Args:
            body: What a site has sent.

        Returns:
            HTTP status and body of the answer.
        """
        try:
            asked = enrolment.read_request(body)
            if isinstance(asked, Renewal):
                answer = self._renew(asked)
            else:
                answer = self._enrol(asked, body)
        except EnrolmentRefused as error:
            self.listener(f"an enrolment was refused: {error}")
            return error.status, enrolment.refusal(str(error))
        except (KeyFileRefused, RosterRefused) as error:
            self.listener(f"an enrolment was refused: {error}")
            return 400, enrolment.refusal(str(error))
        except FederationError as error:
            # What is wrong here is not the site's business.
            self.listener(f"an enrolment failed: {error}")
            return 503, enrolment.refusal(
                "the aggregator cannot enrol sites now, and its log says why; try "
                "again with the same token"
            )
        return 200, answer

    def _enrol(self, asked: Enrolment, body: bytes) -> bytes:
        book_file = BookFile(folder=self.config.folder)
        authority = open_authority(self.config.folder, clock=self.clock)
        enrolment.check_enrolment(asked, authority.fingerprint)
        machine = None
        if asked.platform:
            binding = enrolment.binding(asked, authority.fingerprint)
            machine = self._vouched(book_file.read(), asked, binding)
        with book_file.locked():
            book = book_file.read()
            bound, role = self._bind(book, asked, machine)
            # It may be refused only before that is written.
            _check_new(book, asked)
            self._check_roster(asked, role)
            issued = authority.issue_site(asked.site, asked.request.encode())
            self._note("site.enrol", asked, key=asked.identity)
            book = bound.at(self.clock.now())
            book_file.write(book)
            if machine is not None:
                machines.keep(self.config.folder, asked.site, body)
            node_id = self.register(asked.node_key.encode())
            roster_file.trust(
                self._roster,
                site=asked.site,
                organisation=asked.organisation,
                key=asked.identity,
                role=role,
            )
            member = replace(self._member(book, asked, node_id), machine=machine)
            book_file.write(book.with_member(_with_certificate(member, issued)))
        self.listener(
            f"{role} {asked.site!r} of {asked.organisation!r} is enrolled as node "
            f"{node_id}"
        )
        return self._answer(issued)

    def _vouched(
        self, book: EnrolmentBook, asked: Enrolment, binding: str
    ) -> PlatformIdentity:
        """Ask a cloud who a machine is, if someone expects one of it."""
        found = book.bound_invitation(asked.site)
        if (
            found is None
            or found.expires <= self.clock.now()
            or found.machine.platform != asked.platform
        ):
            raise EnrolmentRefused(
                f"no machine of {asked.platform!r} is invited as site {asked.site!r} "
                "yet: the aggregator's operator must run crossfed up or crossfed "
                "aggregator invite",
                status=enrolment.TOO_EARLY,
            )
        try:
            return self.verifier.verify(asked.proof, binding, found.machine)
        except ProofRefused as error:
            # A pod may ask before its operator has read which keys it has shown, while
            # those of a pod before it are invited.
            is_early = asked.platform == KUBERNETES
            raise EnrolmentRefused(
                f"site {asked.site!r} is not enrolled: {error}",
                status=enrolment.TOO_EARLY if is_early else 403,
            ) from None

    def _bind(
        self, book: EnrolmentBook, asked: Enrolment, machine: PlatformIdentity | None
    ) -> tuple[EnrolmentBook, str]:
        """Bind the invitation to the keys that it is first used with; its role too."""
        keys = enrolment.keys_digest(asked)
        if machine is None:
            invitation = self._invitation(book, asked)
            book = book.with_invitation(replace(invitation, keys=keys))
            return book, invitation.role
        found = book.bound_invitation(asked.site)
        if found is None or found.machine.difference(machine):
            raise EnrolmentRefused(
                f"another machine has been invited as site {asked.site!r} since"
            )
        if found.keys not in {"", keys}:
            raise EnrolmentRefused(
                f"the machine of site {asked.site!r} has enrolled already, with other "
                "keys. If it has lost them, the aggregator's operator revokes the site "
                "and invites it again"
            )
        return book.with_bound(replace(found, keys=keys)), found.role

    def _invitation(self, book: EnrolmentBook, asked: Enrolment) -> Invitation:
        secret = enrolment.unhex(asked.secret, "secret")
        found = book.invitation(enrolment_token.digest_of(secret))
        again = "ask the aggregator's operator for a new one"
        if found is None:
            raise EnrolmentRefused(f"this token is unknown or withdrawn: {again}")
        if found.expires <= self.clock.now():
            raise EnrolmentRefused(f"this token has expired: {again}")
        if found.site != asked.site:
            raise EnrolmentRefused(
                f"this token is for another site, not {asked.site!r}: use the one "
                "created for it"
            )
        if found.keys not in {"", enrolment.keys_digest(asked)}:
            raise EnrolmentRefused(
                "this token was used already, with other keys. If that was not you, "
                "ask the aggregator's operator now to revoke "
                f"{asked.site!r}; otherwise {again}"
            )
        return found

    def _check_roster(self, asked: Enrolment, role: str) -> None:
        before = roster_file.pinned(self._roster, site=asked.site)
        if before is not None and before.public_key != asked.identity:
            raise EnrolmentRefused(
                f"the roster pins another key for site {asked.site!r}: the "
                "aggregator's operator must revoke it first"
            )
        if before is not None and before.role != role:
            raise EnrolmentRefused(
                f"{asked.site!r} is invited as a {role}, and the roster lists a "
                f"{before.role} of this name: the aggregator's operator must revoke it "
                "first"
            )
        if before is not None and before.organisation != asked.organisation:
            raise EnrolmentRefused(
                f"the roster lists site {asked.site!r} with the organisation "
                f"{before.organisation!r}: use that one"
            )
        size = len(asked.organisation.encode())
        if not 1 <= size <= roster.MAX_ORGANISATION_BYTES:
            raise EnrolmentRefused(
                f"the organisation must have 1 to {roster.MAX_ORGANISATION_BYTES} "
                "bytes",
                status=400,
            )

    def _member(
        self, book: EnrolmentBook, asked: Enrolment, node_id: int
    ) -> EnrolledSite:
        before = book.member(asked.site)
        if before is not None:
            return before
        return EnrolledSite(
            site=asked.site,
            organisation=asked.organisation,
            release=asked.release,
            identity=asked.identity,
            node_key=asked.node_key,
            node_id=str(node_id),
            enrolled_at=self.clock.now(),
            certificates=(),
        )

    def _renew(self, asked: Renewal) -> bytes:
        book_file = BookFile(folder=self.config.folder)
        authority = open_authority(self.config.folder, clock=self.clock)
        with book_file.locked():
            book = book_file.read().at(self.clock.now())
            member = self._shown(book, asked, authority)
            issued = b""
            if asked.request:
                issued = authority.issue_site(asked.site, asked.request.encode())
                member = replace(
                    _with_certificate(member, issued), release=asked.release
                )
                self._note("site.renew", asked)
                book_file.write(book.with_member(member))
                self.listener(f"site {asked.site!r} has a new certificate")
        return self._answer(issued)

    def _note(self, action: str, asked: Enrolment | Renewal, **details: str) -> None:
        site, who, now = asked.site, f"site {asked.site}", self.clock.now()
        audit_log.note(self.config.folder, action, site, at=now, who=who, **details)

    def _shown(
        self, book: EnrolmentBook, asked: Renewal, authority: Authority
    ) -> EnrolledSite:
        """The site that shows its certificate.

        Raises:
            EnrolmentRefused: The certificate is not one that it holds now.
        """
        member = book.member(asked.site)
        try:
            certificate = parse_certificate(asked.certificate.encode())
            authority.check_issued(certificate)
        except KeyFileRefused as error:
            raise EnrolmentRefused(
                f"{error}; ask the aggregator's operator for an invitation"
            ) from None
        serial = f"{certificate.serial_number:x}"
        if member is None or serial not in {c.serial for c in member.certificates}:
            raise EnrolmentRefused(
                f"this is not a valid certificate of site {asked.site!r}: it was "
                "revoked, or belongs to another site"
            )
        enrolment.check_renewal(
            asked, certificate, identity=member.identity, now=self.clock.now()
        )
        return member

    def _answer(self, issued: bytes) -> bytes:
        found = roster.load(self._roster)
        return enrolment.answer(
            certificate=issued,
            roster=roster.dumps(found),
            signature=self._signature(found),
        )

    def _signature(self, found: roster.Roster) -> str:
        try:
            return machines.signature_of(self.config.folder, found)
        except CorruptObject as error:  # Who needs none gets an answer.
            self.listener(str(error))
            return ""


def _with_certificate(member: EnrolledSite, issued: bytes) -> EnrolledSite:
    """Record a certificate of a site.

    Raises:
        EnrolmentRefused: It has too many already.
    """
    if len(member.certificates) >= MAX_CERTIFICATES:
        raise EnrolmentRefused(
            f"site {member.site!r} has {MAX_CERTIFICATES} valid certificates: use the "
            "newest, and renew it when it is about to expire",
            status=429,
        )
    certificate = parse_certificate(issued)
    noted = NodeCertificate(
        serial=f"{certificate.serial_number:x}",
        expires=certificate.not_valid_after_utc.timestamp(),
    )
    return replace(member, certificates=(*member.certificates, noted))


def _check_new(book: EnrolmentBook, asked: Enrolment) -> None:
    """Check that keys belong to one site, and never to a revoked one."""
    for one in book.withdrawn:
        if asked.identity == one.member.identity or asked.node_key == (
            one.member.node_key
        ):
            raise EnrolmentRefused(
                "a key of this site was revoked: enrol with new keys, in an empty "
                "folder"
            )
    for member in book.members:
        same = (asked.identity, asked.node_key) == (member.identity, member.node_key)
        if member.site == asked.site and not same:
            raise EnrolmentRefused(
                f"site {asked.site!r} is enrolled with different keys"
            )
        if member.site != asked.site and (
            asked.identity == member.identity or asked.node_key == member.node_key
        ):
            raise EnrolmentRefused("another site already uses a key of this site")
