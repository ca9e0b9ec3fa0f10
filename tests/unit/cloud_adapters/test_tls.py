"""What a connection to an aggregator believes, and files that hold nothing."""

import ssl
from pathlib import Path

import pytest

from cloud_adapters.net.tls import client_context
from federation.clock import SystemClock
from federation.errors import JobError
from privacy.membership.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("authority")
    Authority.create("test", clock=SystemClock()).save(folder)
    return (folder / "ca.crt").read_bytes()


def test_nothing_but_the_newest_tls_and_one_authority(authority: bytes):
    """None of those that the machine knows counts."""
    context = client_context(authority, None)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff"])
def test_authority_that_is_none(content: bytes):
    """The key of site.toml is named."""
    with pytest.raises(JobError, match="holds no certificate") as caught:
        client_context(content, None)
    assert caught.value.key == "aggregator.authority"


@pytest.mark.parametrize("content", [None, "", "nothing"])
def test_certificate_that_is_none(
    authority: bytes, tmp_path: Path, content: str | None
):
    """So is the file."""
    path = tmp_path / "site.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JobError, match=r"site\.pem holds no certificate") as caught:
        client_context(authority, path)
    assert caught.value.key == "certificate"
