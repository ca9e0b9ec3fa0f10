"""The authority: what it signs, for whom, and what it refuses."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from federation.clock import VirtualClock
from privacy.membership import certificates
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    signing_request,
)
from privacy.secagg.errors import KeyFileRefused

NOW = 1_800_000_000.0
DAY = 86_400.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW)


@pytest.fixture
def authority(clock: VirtualClock) -> Authority:
    return Authority.create("test", clock=clock)


def _site(authority: Authority, name: str = "site-a") -> x509.Certificate:
    pem = authority.issue_site(name, signing_request(name, new_key()))
    return x509.load_pem_x509_certificate(pem)


def _purpose(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    return list(found.value)


def test_root_signs_nothing_but_leaves(authority: Authority):
    """A path length of zero: what it certifies can certify nobody."""
    found = authority.certificate.extensions.get_extension_for_class(
        x509.BasicConstraints
    )
    assert found.critical
    assert (found.value.ca, found.value.path_length) == (True, 0)
    leaf = _site(authority).extensions.get_extension_for_class(x509.BasicConstraints)
    assert not leaf.value.ca


def test_site_is_a_client_and_no_server(authority: Authority):
    """It cannot speak for the aggregator to other sites."""
    certificate = _site(authority)
    assert _purpose(certificate) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_server_has_its_names(authority: Authority):
    """Names as names, and addresses as addresses."""
    pem = authority.issue_server(("fed.example.org", "::1", "10.0.0.1"), new_key())
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == ["fed.example.org"]
    assert len(names.value.get_values_for_type(x509.IPAddress)) == 2
    assert _purpose(certificate) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_name_is_the_authoritys_choice(authority: Authority):
    """Whatever the request asks for."""
    request = signing_request("site-b", new_key())
    certificate = x509.load_pem_x509_certificate(
        authority.issue_site("site-a", request)
    )
    assert certificate.subject.rfc4514_string() == "CN=site-a"


def test_tampered_request_is_refused(authority: Authority):
    """Every byte of it is signed."""
    whole = x509.load_pem_x509_csr(signing_request("site-a", new_key()))
    body = bytearray(whole.public_bytes(serialization.Encoding.DER))
    for at in range(0, len(body), 7):
        spoiled = bytes([*body[:at], body[at] ^ 1, *body[at + 1 :]])
        with pytest.raises(KeyFileRefused):
            authority.issue_site("site-a", _pem(spoiled))


def _pem(der: bytes) -> bytes:
    import base64  # noqa: PLC0415

    text = base64.encodebytes(der)
    kind = b"CERTIFICATE REQUEST-----\n"
    return b"-----BEGIN " + kind + text + b"-----END " + kind


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1(), ec.SECP256K1()])
def test_other_curves_are_refused(authority: Authority, curve: ec.EllipticCurve):
    """One curve for certificates, so that one is looked after."""
    key = ec.generate_private_key(curve)
    with pytest.raises(KeyFileRefused, match="P-256"):
        authority.issue_site("site-a", signing_request("site-a", key))


@pytest.mark.parametrize("kind", ["rsa", "ed25519"])
def test_other_kinds_of_key_are_refused(authority: Authority, kind: str):
    """Before they are certified."""
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415

    is_rsa = kind == "rsa"
    key = (
        rsa.generate_private_key(65537, 2048)
        if is_rsa
        else ed25519.Ed25519PrivateKey.generate()
    )
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256() if is_rsa else None)
    )
    pem = request.public_bytes(serialization.Encoding.PEM)
    with pytest.raises(KeyFileRefused, match="elliptic-curve"):
        authority.issue_site("site-a", pem)


@pytest.mark.parametrize("request_pem", [b"", b"none", b"x" * 20_000, b"\xff"])
def test_what_is_no_request_is_refused(authority: Authority, request_pem: bytes):
    """Also if it is long."""
    with pytest.raises(KeyFileRefused):
        authority.issue_site("site-a", request_pem)


def test_certificate_of_another_authority_is_not_ours(
    authority: Authority, clock: VirtualClock
):
    """With the same name."""
    other = Authority.create("test", clock=clock)
    authority.check_issued(_site(authority))
    for certificate in (_site(other), other.certificate):
        with pytest.raises(KeyFileRefused, match="another authority"):
            authority.check_issued(certificate)


def test_certificates_hold_for_ninety_days(authority: Authority, clock: VirtualClock):
    """And a little before they were made, for clocks that are slow."""
    certificate = _site(authority)
    assert certificate.not_valid_before_utc.timestamp() == NOW - 300.0
    clock.sleep(90 * DAY - 1)
    authority.check_issued(certificate)
    clock.sleep(1)
    with pytest.raises(KeyFileRefused, match="is valid from"):
        authority.check_issued(certificate)


def test_list_of_revocations_is_signed(authority: Authority, clock: VirtualClock):
    """It names serial numbers and times, and holds as long as the root."""
    revoked = _site(authority).serial_number
    found = x509.load_pem_x509_crl(authority.revocation_list({revoked: NOW, 5: NOW}))
    assert found.is_signature_valid(authority.certificate.public_key())
    assert {row.serial_number for row in found} == {5, revoked}
    assert found.next_update_utc == authority.certificate.not_valid_after_utc
    other = Authority.create("test", clock=clock)
    assert not found.is_signature_valid(other.certificate.public_key())


def test_authority_reads_back(
    authority: Authority, clock: VirtualClock, tmp_path: Path
):
    """Its key is its owner's alone, and it is never overwritten."""
    authority.save(tmp_path)
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    assert Authority.load(tmp_path, clock=clock).fingerprint == authority.fingerprint
    listed = x509.load_pem_x509_crl((tmp_path / "ca.crl").read_bytes())
    assert listed.is_signature_valid(authority.certificate.public_key())
    with pytest.raises(KeyFileRefused, match="never overwritten"):
        authority.save(tmp_path)


def test_key_of_another_root_is_noticed(
    authority: Authority, clock: VirtualClock, tmp_path: Path
):
    """A restore that mixed two backups."""
    authority.save(tmp_path)
    (tmp_path / "ca.key").write_bytes(key_pem(new_key()))
    with pytest.raises(KeyFileRefused, match="same backup"):
        Authority.load(tmp_path, clock=clock)


def test_damaged_files_are_named(tmp_path: Path):
    """A certificate and a key that are none."""
    path = tmp_path / "file"
    path.write_bytes(b"none")
    path.chmod(0o600)
    with pytest.raises(KeyFileRefused, match=str(path)):
        certificates.load_key(path)
    with pytest.raises(KeyFileRefused, match=str(path)):
        certificates.read_certificate(path)
    with pytest.raises(KeyFileRefused, match="cannot read"):
        certificates.read_certificate(tmp_path / "missing")
    path.chmod(0o644)
    with pytest.raises(KeyFileRefused, match="0600"):
        certificates.load_key(path)


def test_key_is_not_printed(authority: Authority):
    """Not even by accident."""
    assert "key=" not in repr(authority)
