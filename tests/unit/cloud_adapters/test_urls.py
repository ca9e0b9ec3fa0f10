"""Which store a URL opens."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloud_adapters.urls import StoreOptions, StoreUrl, open_store, parse_url
from federation.errors import JobError


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://", "cannot be a bucket"),
        ("s3://Bucket", "cannot be a bucket"),
        ("gs:///runs", "cannot be a bucket"),
        ("gs://user@host/x", "cannot be a bucket"),
        ("s3://bucket//runs", "segment"),
        ("gs://bucket/../runs", "segment"),
        ("ftp://host/runs", "'ftp' is unknown"),
        ("runs", "not a URL"),
        ("file:runs", "not a URL"),
        ("file://", "does not name a store"),
        ("file://a\0b", "does not name a store"),
        ("memory://name", "does not name a store"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str):
    """The message names the key and the reason."""
    with pytest.raises(JobError, match=f"storage.url: .*{reason}") as caught:
        open_store(url)
    assert caught.value.key == "storage.url"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://my-bucket", StoreUrl(scheme="s3", place="my-bucket")),
        ("s3://my-bucket/", StoreUrl(scheme="s3", place="my-bucket")),
        ("gs://b.c_d/a/b/", StoreUrl(scheme="gs", place="b.c_d", prefix="a/b")),
    ],
)
def test_buckets(url: str, expected: StoreUrl):
    """A bucket and a prefix, which may end in a slash."""
    assert parse_url(url) == expected
    assert expected.is_remote


def test_unknown_schemes_are_told_what_is_possible():
    """One message lists all that keep something."""
    with pytest.raises(JobError, match=r"file://.*s3://.*gs://") as caught:
        open_store("ftp://host/runs")
    assert "memory" not in caught.value.reason


def test_a_store_below_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run has a part of the store for itself."""
    open_store(f"file://{tmp_path}", below="job/1").put("key", [b"x"])
    assert (tmp_path / "job" / "1" / "key").read_bytes() == b"x"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    options = StoreOptions(endpoint="http://127.0.0.1:9", region="eu-central-1")
    for scheme in ("s3", "gs"):
        for url in (f"{scheme}://bucket/runs", f"{scheme}://bucket/runs/"):
            store = open_store(url, below="job/1", options=options)
            assert store.url == f"{scheme}://bucket/runs/job/1"
            store.close()


IMPORTS = """
import sys
{doing}
loaded = {{name.partition(".")[0] for name in sys.modules}}
print(*(loaded & {{"boto3", "botocore", "torch"}}))
print(*(n for n in sys.modules if n.startswith(("google.auth", "google.cloud"))))
"""


LOCAL = """
from cloud_adapters.urls import open_store, parse_url
open_store("memory://")
parse_url("s3://bucket")
parse_url("gs://bucket")
"""
HELP = """
import contextlib, io
from deploy.cli.commands import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("doing", [LOCAL, HELP])
def test_clients_of_clouds_are_imported_late(doing: str):
    """Neither a local store nor the command line waits for them."""
    command = [sys.executable, "-c", IMPORTS.format(doing=doing)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


ARN = "arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
NAME = "projects/p-1/locations/europe-west4/keyRings/ring/cryptoKeys/key"


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://bucket", {"kms_key": NAME}, "ARN of a key of AWS KMS for s3://"),
        ("gs://bucket", {"kms_key": ARN}, "projects/P/locations"),
        ("s3://bucket", {"bucket_owner": "me"}, "account number of 12 digits"),
        ("gs://bucket", {"bucket_owner": "123456789012"}, "only for s3://"),
        ("file://runs", {"kms_key": ARN}, "not in a cloud"),
        ("memory://", {"bucket_owner": "123456789012"}, "not in a cloud"),
    ],
)
def test_options_of_another_store(url: str, options: dict[str, str], words: str):
    """Refused before anything is asked of it."""
    with pytest.raises(JobError, match=words):
        open_store(url, options=StoreOptions(**options))


@pytest.mark.slow
def test_owner_goes_with_every_request(s3_server: Any, monkeypatch: pytest.MonkeyPatch):
    """The service refuses where the bucket is another's."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    options = StoreOptions(
        endpoint=s3_server.url, region="us-east-1", bucket_owner="123456789012"
    )
    store = open_store(f"s3://{s3_server.bucket()}", options=options)
    sent: list[dict[str, str]] = []
    client = store._calls.client  # type: ignore[attr-defined]
    client.meta.events.register(
        "before-send.s3", lambda request, **_: sent.append(dict(request.headers))
    )
    store.put("key", [b"x"])
    store.read("key")
    store.close()
    owners: list[object] = [headers["x-amz-expected-bucket-owner"] for headers in sent]
    assert owners == [b"123456789012"] * 2
