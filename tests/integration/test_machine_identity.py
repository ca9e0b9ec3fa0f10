"""Identities without long-lived keys, end to end, and what ``doctor`` says of them."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from support import fake_metadata
from support.fake_imds import FakeImds
from support.google_server import Answer, GoogleServer, Request
from support.programs import needs
from support.s3_server import REGION, quick_retry
from support.small_jobs import small_job

from cloud_adapters.storage.s3.store import S3Store
from deploy.cli import commands as cli
from deploy.doctor import identities
from deploy.doctor.checks import Check
from deploy.doctor.identities import Need

pytestmark = pytest.mark.slow

ROLE = "arn:aws:iam::123456789012:role/site"
SECRETS = ("secret-of", "session-of", "token-of", "access-")
PATIENT_DOCTOR = """
from deploy.doctor import identities
from deploy.cli import commands as cli
identities.QUESTION_SECONDS = identities.LIMIT_SECONDS = 60.0
cli.main(["doctor", "--store", "gs://bucket/x", "--identity-only", "--json"])
"""
METADATA = ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT")
NOWHERE = "http://127.0.0.1:9"


class FakeSts(GoogleServer):
    """AWS STS: roles for whoever signs, and the names of those who ask.

    Attributes:
        seconds: How long the credentials of a role live.
        forms: What was asked.
        signers: Ids of the keys that signed.
    """

    def __init__(self, seconds: int = 3600) -> None:
        self.seconds = seconds
        self.forms: list[dict[str, str]] = []
        self.signers: list[str] = []
        super().__init__(self._serve)

    def _serve(self, request: Request) -> Answer:
        form = {name: v[0] for name, v in parse_qs(request.body.decode()).items()}
        self.forms.append(form)
        _, _, scope = request.headers["authorization"].partition("Credential=")
        self.signers.append(scope.partition("/")[0])
        action = form["Action"]
        inner = {"GetCallerIdentity": self._name, "AssumeRole": self._role}[action]()
        result = f"<{action}Result>{inner}</{action}Result>"
        body = f"<{action}Response>{result}</{action}Response>"
        return Answer(200, {"Content-Type": "text/xml"}, body.encode())

    def _name(self) -> str:
        who = "assumed-role/site/hospital-a" if "ASIA" in self.signers[-1] else "user/u"
        return f"<Arn>arn:aws:sts::123456789012:{who}</Arn>"

    def _role(self) -> str:
        when = datetime.now(UTC) + timedelta(seconds=self.seconds)
        return (
            "<Credentials><AccessKeyId>ASIAROLE</AccessKeyId>"
            "<SecretAccessKey>secret-of-the-role</SecretAccessKey>"
            "<SessionToken>session-of-the-role</SessionToken>"
            f"<Expiration>{when:%Y-%m-%dT%H:%M:%SZ}</Expiration></Credentials>"
        )


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing is configured, and no metadata service is there.

    A question to a server on loopback may take long while others use the machine.
    """
    monkeypatch.setattr(identities, "QUESTION_SECONDS", 60.0)
    monkeypatch.setattr(identities, "LIMIT_SECONDS", 120.0)
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "GCE_", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", NOWHERE)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", NOWHERE)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeImds]:
    with FakeImds() as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        yield server


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSts]:
    with FakeSts() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        yield server


def use_role(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Have a profile that assumes a role, with the credentials of another source."""
    (folder / "config").write_text(
        f"[profile federation]\nregion = {REGION}\nrole_arn = {ROLE}\n{source}\n"
        "role_session_name = hospital-a\nexternal_id = agreed\nduration_seconds = 900\n"
    )
    (folder / "credentials").write_text(
        "[base]\naws_access_key_id = AKIABASE\n"
        "aws_secret_access_key = secret-of-the-base\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "federation")


def use_store(s3_server: Any, times: int = 1) -> None:
    """Write and read with whatever credentials the environment gives."""
    store = S3Store(
        s3_server.bucket(),
        endpoint_url=s3_server.url,
        region=REGION,
        retry=quick_retry(),
    )
    for _ in range(times):
        store.put("key", [b"x"])
        assert store.read("key") == b"x"
    store.close()


def test_role_of_an_instance(imds: FakeImds, s3_server: Any):
    """By IMDSv2 alone: a token first, and every question with it."""
    use_store(s3_server)
    first, *others = imds.requests
    assert (first.method, first.path) == ("PUT", "/latest/api/token")
    assert len(others) >= 2
    assert all("x-aws-ec2-metadata-token" in request.headers for request in others)


@pytest.mark.parametrize(
    ("source", "signer"),
    [
        ("source_profile = base", "AKIABASE"),
        ("credential_source = Ec2InstanceMetadata", "ASIAINSTANCE"),
    ],
)
def test_role_that_a_profile_assumes(
    *,
    source: str,
    signer: str,
    imds: FakeImds,
    sts: FakeSts,
    s3_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With what the other account asked for, and again before it expires."""
    use_role(monkeypatch, tmp_path, source)
    sts.seconds = 60
    use_store(s3_server, times=2)
    assert len(sts.forms) >= 2
    assert set(sts.signers) == {signer}
    for form in sts.forms:
        assert (form["Action"], form["RoleArn"]) == ("AssumeRole", ROLE)
        assert form["RoleSessionName"] == "hospital-a"
        assert (form["ExternalId"], form["DurationSeconds"]) == ("agreed", "900")
    assert bool(imds.requests) == (signer == "ASIAINSTANCE")


def check(cloud: Any, *, is_own: bool = True) -> Check:
    """What doctor says, without a secret."""
    need = Need(cloud=cloud, why="s3://bucket/x", is_own=is_own)
    (found,) = identities.checks([need])
    assert not any(secret in repr(found) for secret in SECRETS)
    return found


def test_doctor_finds_the_role_of_an_instance(imds: FakeImds, sts: FakeSts):
    found = check("aws")
    assert found.status == "ok"
    assert found.found == (
        "the role of the instance: "
        "arn:aws:sts::123456789012:assumed-role/site/hospital-a"
    )


def test_doctor_finds_a_role(
    sts: FakeSts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """That of the profile and not that of its source."""
    use_role(monkeypatch, tmp_path, "source_profile = base")
    found = check("aws")
    assert found.found.startswith("a role that the profile assumes: arn:aws:sts::")
    assert sts.signers[-1] == "ASIAROLE"


def test_doctor_warns_of_keys(sts: FakeSts, monkeypatch: pytest.MonkeyPatch):
    """They work, and are what should not be there; a session's end by themselves."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUSER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-user")
    found = check("aws")
    assert found.status == "warning"
    assert "keys in the environment: arn:aws:sts::123456789012:user/u" in found.found
    assert "does not expire" in found.found
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-of-the-user")
    assert "does not expire" not in check("aws").found


def test_doctor_without_sts(imds: FakeImds):
    """The kind is known, and the name is not; nobody is asked for other services."""
    found = check("aws")
    assert found.status == "warning"
    assert "unreachable" in found.found
    assert check("aws", is_own=False).status == "ok"


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_doctor_finds_none(cloud: str, monkeypatch: pytest.MonkeyPatch):
    """And says where it has looked."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    found = check(cloud)
    assert found.status == "problem"
    assert found.found.startswith("none: ")
    assert "docs/howto/cloud-identity.md" in found.advice


def test_doctor_and_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    """The library's words are not repeated."""
    monkeypatch.setenv("AWS_PROFILE", "missing")
    found = check("aws")
    assert (found.status, "ProfileNotFound" in found.found) == ("problem", True)


def test_doctor_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that a profile names may hang."""
    monkeypatch.setattr(identities, "LIMIT_SECONDS", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {pipe}\n")
    found = check("aws")
    assert found.status == "problem"
    assert "took longer" in found.found
    pipe.write_text("")  # Lets the process go.
    for thread in threading.enumerate():
        if thread.name == identities._THREAD:
            thread.join()


def test_doctor_finds_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a machine of AWS in Google Cloud, and whom it acts as."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "ASIATEST"),
        ("AWS_SECRET_ACCESS_KEY", "secret-of-the-test"),
        ("AWS_SESSION_TOKEN", "session-of-the-test"),
        ("AWS_REGION", "eu-west-3"),
        ("GOOGLE_CLOUD_PROJECT", "p-1"),
    ):
        monkeypatch.setenv(name, value)
    with fake_metadata.TokenServices() as services:
        path = tmp_path / "google.json"
        path.write_text(json.dumps(fake_metadata.external_account(services)))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        found = check("gcp")
        assert len(services.given) == 1
    assert found.status == "ok"
    assert found.found == (
        "workload identity federation of a machine in AWS: "
        "site@p-1.iam.gserviceaccount.com"
    )


def doctor_alone(host: str) -> tuple[dict[str, str], str]:
    """A process of its own: Google's library reads some variables when it is imported.

    Args:
        host: Of the metadata server.

    Returns:
        The last line of what doctor says, and its log.
    """
    done = subprocess.run(
        [sys.executable, "-c", PATIENT_DOCTOR],
        env={**os.environ, **dict.fromkeys(METADATA, host)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return json.loads(done.stdout)["checks"][-1], done.stderr


def test_doctor_finds_a_machine_of_google():
    """By its metadata server."""
    with fake_metadata.metadata() as server:
        host = server.url.removeprefix("http://")
        found, _ = doctor_alone(host)
    assert found["status"] == "ok"
    assert found["found"] == (
        "the machine's service account: site@p-1.iam.gserviceaccount.com"
    )


def test_doctor_is_quiet_where_nothing_is():
    """The library's own warnings of each attempt say nothing more."""
    found, log = doctor_alone("127.0.0.1:9")
    assert (found["status"], log) == ("problem", "")


def test_doctor_and_a_file_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is named, and is no credentials."""
    (tmp_path / "google.json").write_text("{}")
    path = str(tmp_path / "google.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
    assert check("gcp").status == "problem"


@needs("root", "ip")
def test_machines_ask_the_service_at_its_real_address(tmp_path: Path):
    """Who they are, and whether they are taken back; no setting names the address."""
    hosts = tmp_path / "hosts"
    hosts.write_text("169.254.169.254 metadata.google.internal\n")
    inside = (
        "ip link set lo up && ip addr add 169.254.169.254/32 dev lo && "
        f"mount --bind {hosts} /etc/hosts && exec {sys.executable} -m "
        "support.real_metadata"
    )
    # Both end with the process.
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", inside],  # noqa: S607
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    aws, aws_notice, gcp, gcp_notice = done.stdout.splitlines()
    assert aws == "aws 123456789012 crossfed-site i-0123456789abcdef0"
    assert gcp == "gcp p-1 site@p-1.iam.gserviceaccount.com europe-west4-a/site-b"
    assert re.fullmatch(
        r"spot EC2 will terminate this machine in 1[12]\d s: this site leaves after "
        r"its task, within (9\d|100) s",
        aws_notice,
    )
    assert gcp_notice == (
        "spot Compute Engine preempts this machine in 30 s: this site leaves after its "
        "task, within 10 s"
    )


def test_what_a_job_needs():
    """Its run, its data and its keys; a service of one's own is no cloud's."""
    options = {
        "encryption_key": "gcp-kms:projects/p/locations/l/keyRings/r/cryptoKeys/k"
    }
    job = small_job(
        storage={
            "url": "s3://runs/x",
            "endpoint": "http://127.0.0.1:9",
            "encryption": {"key": "aws-kms:arn:aws:kms:eu-west-1:123456789012:key/1"},
        },
        sites=[
            {"name": "a", "data": {"source": "file://x", "options": options}},
            {"name": "b", "data": {"source": "support.small_jobs:blobs"}},
        ],
    )
    needs = identities.merged(identities.needs_of_job(job))
    assert [(need.cloud, need.is_own) for need in needs] == [
        ("aws", True),
        ("gcp", True),
    ]
    assert list(identities.needs_of_job(small_job())) == []


def test_command(
    imds: FakeImds, sts: FakeSts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where a store or a job is named."""
    cli.main(["doctor"])
    assert "identity" not in capsys.readouterr().out
    assert not imds.requests
    cli.main(["doctor", "--store", "s3://bucket/x", "--identity-only", "--json"])
    found = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (found["name"], found["status"]) == ("identity for AWS", "ok")
