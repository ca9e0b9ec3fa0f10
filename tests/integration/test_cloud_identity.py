"""One cloud's machines in the other cloud's storage, without a key of that cloud."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from google.auth import aws
from support import fake_metadata, gcs_stores
from support.buckets import quick_retry
from support.google_server import Answer, GoogleServer
from support.s3_server import REGION

from cloud_adapters.identity import aws_from_google
from cloud_adapters.storage.gcs.store import GcsStore
from cloud_adapters.storage.s3.store import S3Store

pytestmark = pytest.mark.slow

ROLE = "arn:aws:iam::123456789012:role/site"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_metadata.metadata() as server:
        host = server.url.removeprefix("http://")
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
            monkeypatch.setenv(name, host)
        # Read from the environment once, when another test has imported the module.
        seen = "google.auth.compute_engine._metadata._GCE_METADATA_HOST"
        monkeypatch.setattr(seen, host)
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        yield server


def use_profile(monkeypatch: pytest.MonkeyPatch, folder: Path, sts: str) -> None:
    """Have a profile of AWS whose credentials come from the process, and no other."""
    command = f"{sys.executable} -m cloud_adapters.identity.aws_from_google {ROLE}"
    (folder / "config").write_text(
        f"[profile google]\nregion = {REGION}\ncredential_process = {command}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_PROFILE", "google")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)


def test_google_machine_writes_to_s3(
    metadata: Any, s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a profile that names the credential process; nothing else is configured."""
    use_profile(monkeypatch, tmp_path, s3_server.url)
    found = boto3.session.Session().get_credentials().get_frozen_credentials()
    assert found.access_key.startswith("ASIA")
    store = S3Store(s3_server.bucket(), endpoint_url=s3_server.url, retry=quick_retry())
    store.put("key", [b"x"])
    assert store.read("key") == b"x"
    store.close()
    asked = [r for r in metadata.requests if r.path.endswith("/identity")]
    assert {r.query["audience"] for r in asked} == {"sts.amazonaws.com"}


def sts_answer(seconds: int) -> bytes:
    """Credentials as AWS STS gives them, for so many seconds."""
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    return (
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult>"
        "<Credentials><AccessKeyId>ASIASHORT</AccessKeyId>"
        "<SecretAccessKey>secret-of-the-test</SecretAccessKey>"
        "<SessionToken>session-of-the-test</SessionToken>"
        f"<Expiration>{when:%Y-%m-%dT%H:%M:%SZ}</Expiration></Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    ).encode()


@pytest.mark.long
def test_short_credentials_are_renewed(
    metadata: Any, s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the middle of a store's life, each time that they are about to expire."""
    answer = Answer(200, {"Content-Type": "text/xml"}, sts_answer(60))
    with GoogleServer(lambda _: answer) as sts:
        use_profile(monkeypatch, tmp_path, sts.url)
        store = S3Store(
            s3_server.bucket(), endpoint_url=s3_server.url, retry=quick_retry()
        )
        store.put("key", [b"x"])
        before = len(sts.requests)
        assert store.read("key") == b"x"
        store.close()
        assert len(sts.requests) > before >= 1
        # The token is the whole proof: no key of AWS signs the request.
        assert all("authorization" not in request.headers for request in sts.requests)


def test_role_that_does_not_trust(
    metadata: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The message says what to allow, and does not repeat the token."""
    words = f"<Message>no {fake_metadata.jwt()}</Message>"
    error = f"<Code>InvalidIdentityToken</Code>{words}"
    body = f"<ErrorResponse><Error>{error}</Error></ErrorResponse>".encode()
    with GoogleServer(lambda _: Answer(400, {"Content-Type": "text/xml"}, body)) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        monkeypatch.setenv("AWS_REGION", REGION)
        assert aws_from_google.main([ROLE]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "sts:AssumeRoleWithWebIdentity" in printed.err
    assert "eyJ" not in printed.err


def test_elsewhere_there_is_no_token(monkeypatch: pytest.MonkeyPatch):
    """One line that says where to run it, and no traceback."""
    environment = dict(os.environ)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
        environment[name] = "127.0.0.1:9"
    environment |= {"GCE_METADATA_TIMEOUT": "1", "NO_GCE_CHECK": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "cloud_adapters.identity.aws_from_google", ROLE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "no identity token here" in done.stderr
    assert "Traceback" not in done.stderr


def test_aws_machine_writes_to_google(
    gcs_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And gets a new token when the old one has run out in the middle."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-of-the-test")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    # Tokens that are as good as expired: each request needs a new one.
    with fake_metadata.TokenServices(seconds=5) as services:
        path = tmp_path / "google.json"
        path.write_text(json.dumps(fake_metadata.external_account(services)))
        scope = "https://www.googleapis.com/auth/devstorage.read_write"
        # Not default(): that would ask a third service for the project.
        credentials: Any = aws.Credentials.from_file(str(path), scopes=[scope])
        store = GcsStore(
            gcs_stores.new_bucket(gcs_server),
            endpoint=gcs_server.url,
            credentials=credentials,
            retry=quick_retry(),
        )
        store.put("key", [b"x"])
        assert store.read("key") == b"x"
        store.close()
        assert len(services.given) >= 2
        headers = {h["key"]: h["value"] for h in services.proofs[0]["headers"]}
        assert "GetCallerIdentity" in services.proofs[0]["url"]
        assert "Credential=ASIATEST/" in headers["Authorization"]
        said = json.dumps(services.proofs) + repr(credentials)
        assert "secret-of-the-test" not in said
        used = {
            request.headers.get("authorization", "").removeprefix("Bearer ")
            for request in gcs_server.requests
        }
        assert set(services.given) & used
