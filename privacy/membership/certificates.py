"""The aggregator's certificate authority: one root, that every site pins.

Certificates are on the curve P-256 and signed by a root that signs nothing but the
certificates of this federation: servers that sites connect to, and the sites
themselves, whose requests (PKCS #10) the root answers. No private key is made here but
those of the machine that this runs on.
"""

import datetime as dt
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from federation.protocols import Clock
from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private, write_new

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 90
# Clocks of machines that have just met may differ by this much.
EARLY_SECONDS = 300
# A certificate is renewed when less than a third of its time is left.
RENEW_BEFORE_SECONDS = CERTIFICATE_DAYS * 86_400.0 / 3
MAX_REQUEST_BYTES = 1 << 14

# What the library raises for what others may send.
MALFORMED = (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm)

PrivateKey = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """The contents of a revocation list.

    Attributes:
        number: Number of the list.
        revoked: When each certificate was revoked, in seconds since 1970, by serial
            number.
    """

    number: int
    revoked: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A root certificate and the key behind it.

    Attributes:
        certificate: What sites pin.
        key: Signs; it stays in its file on the aggregator's host.
        clock: Tells from when certificates hold.
    """

    certificate: x509.Certificate
    key: PrivateKey = field(repr=False)
    clock: Clock

    @classmethod
    def create(cls, name: str, *, clock: Clock) -> "Authority":
        """Make a new root."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, subject, key.public_key(), clock, AUTHORITY_DAYS)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        ).add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        return cls(certificate=builder.sign(key, hashes.SHA256()), key=key, clock=clock)

    @classmethod
    def load(cls, folder: Path, *, clock: Clock) -> "Authority":
        """Read what ``save`` wrote.

        Raises:
            KeyFileRefused: A file is missing, open to others or damaged.
        """
        certificate = read_certificate(folder / "ca.crt")
        key = load_key(folder / "ca.key")
        if _public_bytes(certificate.public_key()) != _public_bytes(key.public_key()):
            raise KeyFileRefused(
                f"{folder / 'ca.key'} does not belong to {folder / 'ca.crt'}: restore "
                "both from the same backup"
            )
        return cls(certificate=certificate, key=key, clock=clock)

    def save(self, folder: Path) -> None:
        """Write certificate, key and an empty revocation list; none may exist.

        Raises:
            KeyFileRefused: A file is there, or cannot be written.
        """
        try:
            write_new(folder / "ca.key", key_pem(self.key))
            write_new(folder / "ca.crt", self.pem, mode=0o644)
            write_new(folder / "ca.crl", self.revocation_list({}), mode=0o644)
        except OSError as error:
            raise KeyFileRefused(
                f"cannot write {error.filename}: {error.strerror}; an existing "
                "authority is never overwritten"
            ) from error

    @property
    def pem(self) -> bytes:
        """The root certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the root certificate, 64 hexadecimal digits: compare it."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def issue_server(self, hosts: tuple[str, ...], key: PrivateKey) -> bytes:
        """Certify a server under names and addresses; PEM."""
        names: list[x509.GeneralName] = [_general_name(host) for host in hosts]
        return self._issue(
            hosts[0], key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, names
        )

    def issue_site(self, name: str, request: bytes) -> bytes:
        """Certify a site by its signing request; PEM.

        Args:
            name: Name of the site; the name in the request is ignored.
            request: PKCS #10, PEM.

        Raises:
            KeyFileRefused: It is none, is not signed by its own key or uses another
                curve.
        """
        if len(request) > MAX_REQUEST_BYTES:
            raise KeyFileRefused("a signing request must have at most 16 KiB")
        try:
            asked = x509.load_pem_x509_csr(request)
            public = asked.public_key()
            valid = asked.is_signature_valid
        except MALFORMED as error:
            raise KeyFileRefused(f"this is not a signing request: {error}") from None
        if not isinstance(public, ec.EllipticCurvePublicKey) or not valid:
            raise KeyFileRefused(
                "a signing request must be signed by an elliptic-curve key"
            )
        if not isinstance(public.curve, ec.SECP256R1):
            raise KeyFileRefused(
                "a site's certificate must use the curve P-256, not "
                f"{public.curve.name}"
            )
        return self._issue(name, public, ExtendedKeyUsageOID.CLIENT_AUTH, [])

    def revocation_list(
        self, revoked: Mapping[int, float], *, number: int = 1
    ) -> bytes:
        """Sign the list of revoked certificates; PEM, RFC 5280 section 5.

        It is valid as long as the root: it is beside the proxy that reads it, and a
        list that is out of date, or not valid yet after a clock was set back, would
        lock out everybody.

        Args:
            revoked: When each was revoked, in seconds since 1970, by serial number.
            number: Number of the list, above that of the one before.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(self.certificate.not_valid_before_utc)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    self.key.public_key()
                ),
                critical=False,
            )
            .add_extension(x509.CRLNumber(number), critical=False)
        )
        for serial, at in sorted(revoked.items()):
            entry = x509.RevokedCertificateBuilder().serial_number(serial)
            when = dt.datetime.fromtimestamp(at, dt.UTC)
            builder = builder.add_revoked_certificate(
                entry.revocation_date(when).build()
            )
        signed = builder.sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def read_revocations(self, pem: bytes) -> "Revocations":
        """Read a list that ``revocation_list`` has signed.

        Raises:
            KeyFileRefused: It is none, or is not signed by this authority.
        """
        try:
            found = x509.load_pem_x509_crl(pem)
            if not found.is_signature_valid(self.key.public_key()):
                raise KeyFileRefused("the list belongs to another authority")
            number = found.extensions.get_extension_for_class(x509.CRLNumber)
            revoked = {
                row.serial_number: row.revocation_date_utc.timestamp() for row in found
            }
        except (*MALFORMED, x509.ExtensionNotFound) as error:
            raise KeyFileRefused(f"this is not a revocation list: {error}") from None
        return Revocations(number=number.value.crl_number, revoked=revoked)

    def check_issued(self, certificate: x509.Certificate) -> None:
        """Check that a certificate is ours and valid now; revocation is not checked.

        Raises:
            KeyFileRefused: It is not, or does not.
        """
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (*MALFORMED, InvalidSignature):
            raise KeyFileRefused(
                "the certificate belongs to another authority"
            ) from None
        now = dt.datetime.fromtimestamp(self.clock.now(), dt.UTC)
        if (
            not certificate.not_valid_before_utc
            <= now
            < certificate.not_valid_after_utc
        ):
            raise KeyFileRefused(
                f"the certificate is valid from {certificate.not_valid_before_utc:%F} "
                f"to {certificate.not_valid_after_utc:%F}, but today is {now:%F}"
            )

    def _issue(
        self,
        name: str,
        public: ec.EllipticCurvePublicKey,
        purpose: x509.ObjectIdentifier,
        names: list[x509.GeneralName],
    ) -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(
            subject, self.certificate.subject, public, self.clock, CERTIFICATE_DAYS
        )
        builder = (
            builder.add_extension(
                x509.BasicConstraints(ca=False, path_length=None), critical=True
            )
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    self.key.public_key()
                ),
                critical=False,
            )
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(names), critical=False
            )
        signed = builder.sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


def server_names(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """What a server is certified for: its hosts and the loopback.

    The proxy and the coordinator reach the SuperLink there.
    """
    return tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1")))


def names_in(certificate: x509.Certificate) -> frozenset[str]:
    """Names and addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except (*MALFORMED, x509.ExtensionNotFound):
        return frozenset()
    addresses = found.get_values_for_type(x509.IPAddress)
    names = found.get_values_for_type(x509.DNSName)
    return frozenset((*names, *map(str, addresses)))


def new_key() -> PrivateKey:
    """Make a key for a server or a site."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    """The key in the form of its private file."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def load_key(path: Path) -> PrivateKey:
    """Read a key.

    Raises:
        KeyFileRefused: The file is missing, open to others or no such key.
    """
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileRefused(
            f"{path} is not an elliptic-curve key: restore it from a backup"
        )
    return key


def signing_request(name: str, key: PrivateKey) -> bytes:
    """Ask for a certificate of a key; PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    clock: Clock,
    days: int,
) -> x509.CertificateBuilder:
    now = dt.datetime.fromtimestamp(clock.now(), dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(seconds=EARLY_SECONDS))
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def parse_certificate(pem: bytes) -> x509.Certificate:
    """Read a certificate that someone sent.

    Raises:
        KeyFileRefused: It is none.
    """
    try:
        return x509.load_pem_x509_certificate(pem)
    except MALFORMED as error:
        raise KeyFileRefused(f"this is not a certificate: {error}") from None


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate.

    Raises:
        KeyFileRefused: The file is missing, or is none.
    """
    try:
        return parse_certificate(path.read_bytes())
    except OSError as error:
        raise KeyFileRefused(f"cannot read {path}: {error.strerror}") from None
    except KeyFileRefused:
        raise KeyFileRefused(
            f"{path} is not a certificate: restore it from a backup"
        ) from None


def _public_bytes(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return b""
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
