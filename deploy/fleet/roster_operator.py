"""The operator of a deployment's sites: a key, and what was checked before it signs.

``operator.pem``: the key, made once; machines are given its public half and trust the
rosters that it has signed. ``operator.json``: the federation that it signs for, the
last roster that it has signed, and the machines whose proofs it has checked.

The aggregator's service is not believed: it could name any keys. What a machine has
sent is checked here once more, signatures, binding and cloud, and keys of sites of this
host are read where they were made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives import hashes

from cloud_adapters.identity.platforms import PlatformVerifier
from deploy.aggregator_host import enrolment_machines, host_secrets
from deploy.site_host.enrolment_roster import MIN_DIGEST_DIGITS
from federation import durable_files
from federation.errors import CorruptObject
from federation.platform_identity import PlatformIdentity
from privacy.keystream import RandomBytes
from privacy.membership import messages, roster_signature
from privacy.membership.certificates import read_certificate
from privacy.membership.messages import Enrolment
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement import identity, roster
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import RosterRefused, StaleRoster

_KEY, _RECORD = host_secrets.OPERATOR, "operator.json"
_DAMAGED = "restore it; without it, what was signed last is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMachine:
    """A site whose machine has proved who it is.

    Attributes:
        site: Name of the site.
        identity: Public key of its identity, hexadecimal.
        machine: Which machine it was.
    """

    site: str
    identity: str
    machine: PlatformIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class _SigningRecord:
    authority: str
    serial: int = 0
    digest: str = ""
    machines: tuple[CheckedMachine, ...] = ()


@dataclass(kw_only=True)
class Operator:
    """Who signs rosters; see ``open_operator``.

    Attributes:
        folder: The deployment's.
        aggregator: The aggregator's.
        key: Signs.
        verifier: Asks clouds.
    """

    folder: Path
    aggregator: Path
    key: Identity
    verifier: PlatformVerifier
    _record: _SigningRecord

    @property
    def authority(self) -> str:
        """Fingerprint of the aggregator's authority, hexadecimal."""
        return self._record.authority

    def checked(self, site: str, expected: PlatformIdentity) -> bytes | None:
        """Find the key of a site whose machine has proved who it is.

        Args:
            site: Name of the site.
            expected: Which machine must have.

        Returns:
            Public key of its identity, 32 bytes; None if it has not enrolled yet.

        Raises:
            EnrolmentRefused: What it sent is not by it, or not whole.
            ProofRefused: Its cloud does not confirm that it is this machine.
            PlatformUnavailable: The cloud cannot be asked.
        """
        body = enrolment_machines.kept(self.aggregator, site)
        if body is None:
            return None
        asked = messages.read_request(body)
        if (
            not isinstance(asked, Enrolment)
            or asked.site != site
            or asked.platform != expected.platform
        ):
            raise EnrolmentRefused(
                f"what the aggregator has kept of site {site!r} is not from its machine"
            )
        messages.check_enrolment(asked, self.authority)
        found = CheckedMachine(site=site, identity=asked.identity, machine=expected)
        if found not in self._record.machines:
            binding = messages.binding(asked, self.authority)
            self.verifier.verify(asked.proof, binding, expected)
            others = [each for each in self._record.machines if each.site != site]
            self._write(replace(self._record, machines=(*others, found)))
        return bytes.fromhex(asked.identity)

    def machine(self, site: str) -> PlatformIdentity | None:
        """Which machine of a site was checked last; None if none was."""
        found = [each for each in self._record.machines if each.site == site]
        return found[0].machine if found else None

    def remembered(self, site: str) -> bytes | None:
        """The key of a site whose machine was checked at some time; None if none was.

        For a site with a home: its next machine has the same keys.
        """
        found = [each for each in self._record.machines if each.site == site]
        return bytes.fromhex(found[0].identity) if found else None

    def sign(self, keys: Mapping[str, bytes], *, accept: str = "") -> Roster:
        """Sign the aggregator's roster, if it names exactly these sites and keys.

        Args:
            keys: Public keys of identities by the names of their sites.
            accept: At least 32 digits of the digest of a roster that may name other
                sites, too: a person has compared it with their operators.

        Raises:
            RosterRefused: It names others, or other keys.
            StaleRoster: One with a higher serial, or another with the same, was signed.
        """
        found = roster.load(self.aggregator / "roster.toml")
        named = {str(entry.site): entry.public_key for entry in found.sites}
        given = "".join(accept.split()).lower()
        # What was signed once is; its digest covers every key.
        is_accepted = found.digest.hex() == self._record.digest or (
            len(given) >= MIN_DIGEST_DIGITS and found.digest.hex().startswith(given)
        )
        checked = keys.keys() if is_accepted else named.keys() | keys.keys()
        for site in sorted(checked):
            self._check_entry(found, named.get(site), keys.get(site), site)
        own = identity.load(self.aggregator / "aggregator.pem").public.key
        if found.aggregator_key != own:
            raise RosterRefused(
                f"roster {found.serial} was not signed: it names another key of the "
                f"aggregator than {self.aggregator / 'aggregator.pem'}"
            )
        record, digest = self._record, found.digest.hex()
        if found.serial < record.serial or (
            found.serial == record.serial and digest != record.digest
        ):
            raise StaleRoster(
                f"roster {found.serial} was not signed: another one with the serial "
                f"{record.serial} was signed before. Someone has restored an older "
                f"roster.toml in {self.aggregator}"
            )
        # First: whatever happens next, no other roster of this serial is signed.
        self._write(replace(record, serial=found.serial, digest=digest))
        signature = roster_signature.sign(
            found, authority=self.authority, signer=self.key
        )
        enrolment_machines.keep_signature(self.aggregator, found, signature)
        return found

    def _check_entry(
        self, found: Roster, named: bytes | None, own: bytes | None, site: str
    ) -> None:
        if named is None:
            raise RosterRefused(
                f"the roster was not signed: it does not name site {site!r}, which has "
                "enrolled"
            )
        if own is None:
            raise RosterRefused(
                f"the roster was not signed: it names site {site!r}, which this "
                "deployment does not start. Compare the fingerprint that crossfed "
                "aggregator sites shows with its operator, then run crossfed up with "
                f"--accept {found.digest.hex()}; if nobody knows it, revoke it with "
                f"crossfed aggregator revoke {site}"
            )
        if named != own:
            raise RosterRefused(
                f"the roster was not signed: for site {site!r} it names another key "
                "than the one that the site's machine has shown. Someone has changed "
                f"{self.aggregator / 'roster.toml'}: find out who, before anything is "
                "trained"
            )

    def _write(self, record: _SigningRecord) -> None:
        durable_files.write_json(self.folder / _RECORD, record)
        self._record = record


def open_operator(
    folder: Path,
    aggregator: Path,
    *,
    random_bytes: RandomBytes,
    verifier: PlatformVerifier,
) -> Operator:
    """Read the operator of a deployment's sites, who is made if there is none.

    Args:
        folder: The deployment's.
        aggregator: The aggregator's.
        random_bytes: ``os.urandom``.
        verifier: Asks clouds.

    Raises:
        CorruptObject: The record is damaged, or the aggregator has another authority
            than before.
        KeyFileRefused: The key is damaged, open to others or cannot be written.
    """
    path = folder / _KEY
    if not path.exists():
        identity.generate(random_bytes).save(path)
    key = identity.load(path)
    certificate = read_certificate(aggregator / "ca.crt")
    authority = certificate.fingerprint(hashes.SHA256()).hex()
    record = durable_files.read_json(folder / _RECORD, _SigningRecord, advice=_DAMAGED)
    if record is None:
        record = _SigningRecord(authority=authority)
        durable_files.write_json(folder / _RECORD, record)
    if record.authority != authority:
        raise CorruptObject(
            f"{aggregator / 'ca.crt'} is not the certificate that machines were given: "
            "restore it. If you have made a new aggregator, crossfed down, then "
            f"remove {folder / _RECORD}"
        )
    return Operator(
        folder=folder,
        aggregator=aggregator,
        key=key,
        verifier=verifier,
        _record=record,
    )
