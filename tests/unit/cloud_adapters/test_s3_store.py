"""S3's own part: parts, conditions, checksums, encryption, secrets."""

import io
import logging
import os
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from support import s3_server as servers
from support.buckets import quick_retry

from cloud_adapters.storage.retry import Retry
from cloud_adapters.storage.s3 import upload as s3_upload
from cloud_adapters.storage.s3.calls import Clients, ServerSideEncryption
from cloud_adapters.storage.s3.store import S3Store
from federation.clock import VirtualClock
from federation.errors import (
    BucketNotFound,
    NotAuthenticated,
    ObjectChanged,
    ObjectExists,
    StoreUnavailable,
)

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
BIG = os.urandom(9 * MIB)  # Two parts.


def head(store: S3Store, key: str) -> dict[str, Any]:
    calls = store._calls
    answer: dict[str, Any] = calls.client.head_object(
        Bucket=calls.bucket, Key=calls.prefix + key, ChecksumMode="ENABLED"
    )
    return answer


@pytest.fixture
def store(s3_server: servers.S3Server) -> S3Store:
    return s3_server.store("runs/1")


def test_prefixes_keep_stores_apart(s3_server: servers.S3Server):
    """Stores of one bucket with like-named prefixes do not see each other."""
    one, ten, all_of_it = (
        s3_server.store(prefix, bucket=bucket)
        for bucket in [s3_server.bucket()]
        for prefix in ("run/1", "run/10", "")
    )
    one.put("key", [b"1"])
    ten.put("key", [b"10"])
    assert [info.key for info in one.list()] == ["key"]
    assert [info.key for info in all_of_it.list()] == ["run/1/key", "run/10/key"]
    assert one.read("key") == b"1"
    assert one.url.endswith("/run/1")


def test_limit_of_keys_includes_the_prefix(store: S3Store):
    """S3 counts all 1,024 bytes."""
    store.put("x" * 1017, [b""])
    with pytest.raises(ValueError, match="1025 bytes"):
        store.put("x" * 1018, [b""])


@pytest.mark.parametrize(
    ("bucket", "prefix"),
    [("B", ""), ("a", ""), ("a/b", ""), ("bucket", "/a"), ("bucket", "a/../b")],
)
def test_refused_buckets_and_prefixes(bucket: str, prefix: str):
    """A name that S3 does not have is a caller's mistake."""
    with pytest.raises(ValueError, match="cannot be"):
        S3Store(bucket, prefix, client=object())


def test_source_that_fails_late_leaves_no_parts(store: S3Store):
    """Also an interrupt removes what was sent."""

    def broken() -> Iterator[bytes]:
        yield BIG
        yield BIG
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("key", broken())
    calls = store._calls
    assert "Uploads" not in calls.client.list_multipart_uploads(Bucket=calls.bucket)
    assert list(store.list()) == []


def test_conditional_upload_in_parts(store: S3Store):
    """Conditions are checked where the upload completes."""
    first = store.put("key", iter([BIG]), if_absent=True)
    with pytest.raises(ObjectExists):
        store.put("key", iter([BIG]), if_absent=True)
    second = store.put("key", iter([BIG[1:]]), if_version=first.version)
    for key, version in [("key", first.version), ("other", second.version)]:
        with pytest.raises(ObjectChanged):
            store.put(key, iter([BIG]), if_version=version)
    assert store.stat("key").version == second.version
    calls = store._calls
    assert "Uploads" not in calls.client.list_multipart_uploads(Bucket=calls.bucket)


def test_parts_grow_so_that_the_largest_object_fits():
    """10,000 parts hold more than 5 TiB, of which 60 GiB need no large buffers."""
    sizes = [s3_upload.part_bytes(n) for n in range(1, s3_upload.MAX_PARTS + 1)]
    assert sum(sizes) > 5 * 2**40
    assert max(sizes) <= 5 * 2**30
    assert sum(size for size in sizes if size <= 64 * MIB) > 14 * 2**30
    assert sizes == sorted(sizes)


def test_cut_follows_the_sizes_of_parts(monkeypatch: pytest.MonkeyPatch):
    """Whatever the pieces are, parts are of the sizes that their numbers have."""
    monkeypatch.setattr(s3_upload, "PART_BYTES", 4)
    monkeypatch.setattr(s3_upload, "PARTS_OF_ONE_SIZE", 2)
    content = bytes(range(50))
    pieces = [content[:1], content[1:1], content[1:30], content[30:]]
    buffers = s3_upload.Buffers()
    parts = [bytes(part) for part in s3_upload.cut(pieces, buffers)]
    assert [len(part) for part in parts] == [4, 4, 8, 8, 16, 10]
    assert b"".join(parts) == content


def test_memory_of_an_upload_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """However slow the service is, the source is not read further than allowed."""
    monkeypatch.setattr(s3_upload, "PART_BYTES", 10)
    monkeypatch.setattr(s3_upload, "BYTES_IN_FLIGHT", 40)
    taken = sent = most = 0
    lock = threading.Lock()

    def source() -> Iterator[bytes]:
        nonlocal taken, most
        for _ in range(300):
            with lock:
                taken += 10
                most = max(most, taken - sent)
            yield b"0123456789"

    class Slow:
        def upload_part(self, **parameters: Any) -> Any:
            nonlocal sent
            with lock:
                sent += len(parameters["Body"])
            return {"ETag": "x"}

        def create_multipart_upload(self, **_: Any) -> Any:
            return {"UploadId": "x"}

        def complete_multipart_upload(self, **parameters: Any) -> Any:
            numbers = [p["PartNumber"] for p in parameters["MultipartUpload"]["Parts"]]
            assert numbers == list(range(1, 301))
            return {"ETag": "x"}

    assert S3Store("bucket", client=Slow()).put("key", source()).size == 3000
    # In flight, being sent when counted, and two of lookahead.
    assert most <= 40 + 30


def test_wrong_checksum_in_storage_is_found(store: S3Store):
    """An object whose bytes are not those of its metadata is not returned."""
    calls = store._calls
    calls.client.put_object(
        Bucket=calls.bucket,
        Key=f"{calls.prefix}key",
        Body=b"content",
        Metadata={"crossfed-crc32c": "00000000"},
    )
    with pytest.raises(Exception, match="write the object again"):
        store.read("key")
    assert store.read("key", start=1) == b"ontent"


def test_objects_of_others_are_read(store: S3Store):
    """Without our metadata; keys that are none of ours are not listed."""
    calls = store._calls
    for name in ("runs/1/theirs", "runs/1/folder/", "runs/1//x", "runs/1/"):
        calls.client.put_object(Bucket=calls.bucket, Key=name, Body=b"content")
    assert store.read("theirs") == b"content"
    assert store.stat("theirs").sha256 is None
    assert [info.key for info in store.list()] == ["theirs"]


@pytest.mark.parametrize(
    ("encryption", "algorithm"),
    [
        (ServerSideEncryption(kind="AES256"), "AES256"),
        (ServerSideEncryption(kind="aws:kms", kms_key="alias/runs"), "aws:kms"),
    ],
)
def test_encryption_is_asked_for_wherever_objects_are_made(
    s3_server: servers.S3Server, encryption: ServerSideEncryption, algorithm: str
):
    """In single writes and in uploads of parts."""
    store = s3_server.store(encryption=encryption)
    store.put("whole", [b"x"])
    store.put("parts", iter([BIG]))
    for key in ("whole", "parts"):
        answer = head(store, key)
        assert answer["ServerSideEncryption"] == algorithm
        assert answer.get("SSEKMSKeyId") == encryption.kms_key


def test_a_key_of_kms_needs_its_kind():
    """A key that would not be used is a mistake."""
    with pytest.raises(ValueError, match="aws:kms"):
        ServerSideEncryption(kind="AES256", kms_key="alias/runs")
    assert "SSEKMSKeyId" not in ServerSideEncryption(kind="aws:kms").parameters()


def test_bucket_owner_is_named_in_every_request(s3_server: servers.S3Server):
    """So that another account's bucket of the same name gets nothing."""
    client = servers.client(s3_server.url)
    seen = {}

    def look(model: Any, params: Any, **_: Any) -> None:
        seen[model.name] = params["headers"].get("x-amz-expected-bucket-owner")

    client.meta.events.register("before-call.s3", look)
    store = s3_server.store(client=client, bucket_owner=servers.ACCOUNT)
    store.put("key", [b"x"])
    store.put("parts", iter([BIG]))
    store.read("key")
    list(store.list())
    store.delete("key")
    assert len(seen) == 7
    assert set(seen.values()) == {servers.ACCOUNT}


def test_missing_bucket_is_told_from_a_missing_object(s3_server: servers.S3Server):
    """Every verb, HEAD included, which has no body to say it."""
    store = s3_server.store(bucket="no-such-bucket")
    verbs = [
        lambda: store.stat("key"),
        lambda: store.read("key"),
        lambda: list(store.list()),
        lambda: store.put("key", [b""]),
        lambda: store.put("key", [b""], if_absent=True),
        lambda: store.put("key", iter([BIG])),
        lambda: store.delete("key"),
    ]
    for verb in verbs:
        with pytest.raises(BucketNotFound, match=r"s3://no-such-bucket.*create it"):
            verb()


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, s3_server: servers.S3Server):
    """Without any the message names the ways to get some, and nothing waits."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = S3Store("bucket", endpoint_url=s3_server.url, retry=quick_retry())
    with pytest.raises(NotAuthenticated, match=r"AWS_PROFILE.*NoCredentialsError"):
        store.read("key")
    store.close()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(NotAuthenticated, match="ProfileNotFound"):
        Clients(endpoint_url=None, region=None)


def test_malformed_endpoint():
    """The library's ValueError becomes one of ours."""
    with pytest.raises(StoreUnavailable, match="no-url"):
        Clients(endpoint_url="no-url", region="eu-west-1")


def test_late_attempts_get_little_time():
    """So that one that hangs ends soon after the deadline of its call."""
    clients, clock = Clients(endpoint_url=None, region="eu-west-1"), VirtualClock()
    timeouts = []

    def request(attempt: int) -> None:
        config = clients.client().meta.config
        timeouts.append((config.connect_timeout, config.read_timeout))
        clock.sleep(50)
        if attempt < 3:
            raise StoreUnavailable("away", temporary=True)

    Retry(clock=clock, base_seconds=0).call(request)
    assert timeouts == [(5, 60), (5, 60), (5, 5)]
    assert clients.client() is clients.patient
    clients.close()


def test_client_waits_and_tries_as_we_decide():
    """Timeouts and attempts of the library are the product's own."""
    config = Clients(endpoint_url=None, region="eu-west-1").patient.meta.config
    assert (config.connect_timeout, config.read_timeout) == (5, 60)
    assert config.retries["total_max_attempts"] == 1
    assert config.request_checksum_calculation == "when_required"
    assert config.response_checksum_validation == "when_required"


@pytest.mark.parametrize(
    ("endpoint_url", "signed"), [("http://minio.lan", True), (None, False)]
)
def test_bodies_are_signed_where_nothing_else_guards_them(
    endpoint_url: str | None, *, signed: bool
):
    """Over TLS the signature leaves them out; in the clear it covers them."""
    config = Clients(endpoint_url=endpoint_url, region="eu-west-1").patient.meta.config
    assert config.s3["payload_signing_enabled"] == signed


def test_secrets_are_nowhere(
    s3_server: servers.S3Server, caplog: pytest.LogCaptureFixture
):
    """Neither in messages nor in tracebacks, logs and reprs."""
    secrets = {"key": "AKIAVISIBLE", "secret": "SECRETSECRET", "token": "TOKENTOKEN"}
    caplog.set_level(logging.INFO)
    store = s3_server.store(client=servers.client(s3_server.url, **secrets))
    said = io.StringIO(repr(store) + store.url)
    for client in (
        store._calls.client,
        servers.client("http://127.0.0.1:1", **secrets),
    ):
        broken = s3_server.store(client=client, bucket="no-such-bucket")
        for verb in (broken.read, broken.stat, broken.delete):
            try:
                verb("key")
            except Exception:  # noqa: BLE001 (whatever it is, it must not tell)
                said.write(traceback.format_exc())
    text = said.getvalue() + caplog.text
    assert "no-such-bucket" in text
    for secret in (*secrets.values(), "X-Amz-Signature", "Authorization"):
        assert secret not in text


def begun(store: S3Store, key: str) -> str:
    """Begin an upload as a process does that is killed then."""
    calls = store._calls
    name = calls.prefix + key
    upload = calls.client.create_multipart_upload(Bucket=calls.bucket, Key=name)
    return str(upload["UploadId"])


def unfinished(store: S3Store) -> list[str]:
    answer = store._calls.client.list_multipart_uploads(Bucket=store._calls.bucket)
    return [upload["UploadId"] for upload in answer.get("Uploads", ())]


def test_parts_of_killed_uploads_are_removed(s3_server: servers.S3Server):
    """Those of long ago, below the store's own prefix."""
    bucket = s3_server.bucket()
    store = s3_server.store("runs/1", bucket=bucket)
    other = begun(s3_server.store("runs/10", bucket=bucket), "key")
    mine = {begun(store, "key"), begun(store, "a/b")}
    assert store.remove_unfinished(older_seconds=1e12) == 0
    assert set(unfinished(store)) == {other, *mine}
    assert store.remove_unfinished(older_seconds=3600.0) == 2
    assert unfinished(store) == [other]


def test_parts_are_not_removed_in_a_whole_bucket(s3_server: servers.S3Server):
    """Others may write there."""
    store = s3_server.store("")
    upload = begun(store, "key")
    with pytest.raises(ValueError, match="below a prefix"):
        store.remove_unfinished(older_seconds=0.0)
    assert unfinished(store) == [upload]


def test_service_without_a_list_of_uploads_ends_no_run(s3_server: servers.S3Server):
    """Nothing is removed, and that is all."""
    store = s3_server.store("runs/1", bucket="no-such-bucket")
    assert store.remove_unfinished(older_seconds=0.0) == 0
