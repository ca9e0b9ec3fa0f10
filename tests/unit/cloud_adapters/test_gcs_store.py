"""What is particular to Cloud Storage; the rest is in the contract suite."""

import logging
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import google.auth.exceptions
import google.oauth2.credentials
import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from hypothesis import given, strategies as st
from support import gcs_stores
from support.buckets import quick_retry
from support.fake_gcs import KIB_256, FakeGcs
from support.google_server import GoogleServer, json_answer

from cloud_adapters.storage.gcs.store import GcsStore
from cloud_adapters.storage.gcs.transport import Transport
from cloud_adapters.storage.gcs.write import ChunkReader
from federation.errors import (
    BucketNotFound,
    CorruptObject,
    NotAuthenticated,
    ObjectChanged,
    ObjectNotFound,
    StoreForbidden,
    StoreUnavailable,
)

KMS_KEY = "projects/p/locations/eu/keyRings/r/cryptoKeys/k"
BIG = bytes(range(251)) * 2500  # Three chunks.


@pytest.fixture
def gcs_store(gcs_server: FakeGcs) -> GcsStore:
    """In the fake, whatever bucket the suite is pointed at."""
    return gcs_stores.store(gcs_server)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_chunks_are_the_content(pieces: list[bytes], size: int):
    """Whatever the pieces are, all chunks but the last are full."""
    reader = ChunkReader(iter(pieces), size)
    content, found, begins = b"".join(pieces), [], []
    assert reader.whole() == (content if len(content) <= size else None)
    while not reader.is_done:
        begins.append(reader.tell())
        found.append(reader.read(size).tobytes())
    assert b"".join(found) == content
    assert begins == [n * size for n in range(len(found))]
    assert all(len(chunk) == size for chunk in found[:-1])
    assert reader.read(size).tobytes() == b""


@pytest.mark.parametrize("chunk_bytes", [0, -KIB_256, 1000, KIB_256 + 1])
def test_chunk_must_be_of_whole_blocks(chunk_bytes: int):
    """The service takes no other."""
    with pytest.raises(ValueError, match="multiple of 256 KiB"):
        GcsStore("b", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("prefix", ["a/", "/a", "a//b", ".."])
def test_prefix_must_be_a_key(prefix: str):
    """Or keys below it were none."""
    with pytest.raises(ValueError, match="key"):
        GcsStore("b", prefix)


def test_prefix_is_a_store_of_its_own(gcs_server: FakeGcs):
    """Names under other prefixes are not seen, not even of the same beginning."""
    bucket = gcs_stores.new_bucket(gcs_server)
    one, other, all_of_it = (
        gcs_stores.store(gcs_server, prefix, bucket=bucket)
        for prefix in ("runs/1", "runs/10", "")
    )
    one.put("a", [b"one"])
    other.put("a", [b"other"])
    other.delete("b")
    assert [info.key for info in one.list()] == ["a"]
    assert one.read("a") == b"one"
    assert [info.key for info in all_of_it.list()] == ["runs/1/a", "runs/10/a"]


def test_key_and_prefix_share_the_limit(gcs_server: FakeGcs):
    """1024 bytes are of the whole name."""
    store = gcs_stores.store(gcs_server, "p")
    store.put("x" * 1022, [b""])
    with pytest.raises(ValueError, match="1025 bytes"):
        store.put("x" * 1023, [b""])


@pytest.mark.parametrize(
    "version", ["", "0", "-1", "abc", "1.0", "\N{SUPERSCRIPT TWO}"]
)
def test_foreign_versions_fit_no_object(gcs_store: GcsStore, version: str):
    """To the service 0 means that there is no object: that is not what was asked."""
    with pytest.raises(ObjectChanged, match="version"):
        gcs_store.put("key", [b"x"], if_version=version)
    assert list(gcs_store.list()) == []
    gcs_store.put("key", [b"x"])
    with pytest.raises(ObjectChanged, match="version"):
        gcs_store.read("key", if_version=version)


def test_listing_goes_over_pages(
    gcs_server: FakeGcs, gcs_store: GcsStore, monkeypatch: pytest.MonkeyPatch
):
    """Callers see one listing."""
    monkeypatch.setattr(gcs_server, "max_page", 3)
    names = [f"n{number}" for number in range(8)]
    for name in names:
        gcs_store.put(name, [b""])
    assert [info.key for info in gcs_store.list("n")] == names
    assert [info.key for info in gcs_store.list(start_after="n4")] == names[5:]


def test_listing_passes_over_what_is_no_key(gcs_server: FakeGcs):
    """Google's console makes "folders" that end in a slash."""
    bucket = gcs_stores.new_bucket(gcs_server)
    store = gcs_stores.store(gcs_server, "run", bucket=bucket)
    store.put("key", [b"x"])
    url = f"{gcs_server.url}/upload/storage/v1/b/{bucket}/o?uploadType=media"
    for name in ("run/", "run/a/"):
        requests.post(url, params={"name": name}, timeout=5).raise_for_status()
    assert [info.key for info in store.list()] == ["key"]


def test_customer_managed_key(gcs_server: FakeGcs):
    """It is named to the service at every way of writing."""
    store = gcs_stores.store(gcs_server, kms_key=KMS_KEY)
    store.put("small", [b"x"])
    store.put("large", iter([BIG]))
    objects = gcs_server._objects[store._calls.bucket_name]
    keys = {name: stored.resource["kmsKeyName"] for name, stored in objects.items()}
    used = f"{KMS_KEY}/cryptoKeyVersions/1"
    assert keys == {"small": used, "large": used}


def test_spoilt_object(gcs_server: FakeGcs, gcs_store: GcsStore):
    """Bytes that changed in the store are not handed out."""
    gcs_store.put("key", [b"12345"])
    gcs_server.spoil(gcs_store._calls.bucket_name, "key", b"12346")
    with pytest.raises(CorruptObject, match=r"read 'key'.*CRC32C.*tried 6 times"):
        gcs_store.read("key")
    with pytest.raises(CorruptObject):
        gcs_store.read("key", length=100)
    assert gcs_store.read("key", length=4) == b"1234"


VERBS: dict[str, Callable[[GcsStore], object]] = {
    "put": lambda store: store.put("key", [b"x"]),
    "upload": lambda store: store.put("key", iter([BIG])),
    "read": lambda store: store.read("key"),
    "stat": lambda store: store.stat("key"),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("key"),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_missing_bucket(gcs_server: FakeGcs, verb: Callable[[GcsStore], object]):
    """It is not taken for a missing object, and not asked for again."""
    store = gcs_stores.store(gcs_server, "run", bucket="no-such-bucket")
    gcs_server.requests.clear()
    with pytest.raises(BucketNotFound, match=r"gs://no-such-bucket/run.*correct"):
        verb(store)
    assert len(gcs_server.requests) == 1


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_no_permission(verb: Callable[[GcsStore], object]):
    """The message names the permission that the service names."""
    with FakeGcs("b") as server:
        server.allows = lambda *_: False
        store = gcs_stores.store(server, bucket="b")
        with pytest.raises(StoreForbidden, match=r"gs://b.*storage\.objects\."):
            verb(store)
        # One more where a missing object would be refused alike.
        assert len(server.requests) <= 2


def test_who_may_only_create():
    """Creating needs no other permission; losing the race is still told."""
    with FakeGcs("b") as server:
        server.allows = lambda permission, *_: permission == "storage.objects.create"
        store = gcs_stores.store(server, bucket="b")
        store.put("small", [b"x"], if_absent=True)
        store.put("large", iter([BIG]), if_absent=True)
        with pytest.raises(StoreForbidden, match=r"storage\.objects\.delete"):
            store.put("small", [b"y"], if_absent=True)
        assert server.content("b", "small") == b"x"


class Tokens:
    """Gives out access tokens that the fake knows."""

    def __init__(self, server: FakeGcs, *, good_for: int, limit: int = 99) -> None:
        self.server = server
        self.good_for = good_for
        self.left = limit
        self.given: list[str] = []
        server.tokens = {}

    def renew(self, _: object, **__: object) -> tuple[str, datetime]:
        if not self.left:
            raise google.auth.exceptions.RefreshError("invalid_grant secret-answer")
        self.left -= 1
        self.given.append(f"ya29.secret-{len(self.given)}")
        self.server.tokens = {self.given[-1]: self.good_for}
        return self.given[-1], google.auth._helpers.utcnow() + timedelta(hours=1)

    def credentials(self) -> google.oauth2.credentials.Credentials:
        return google.oauth2.credentials.Credentials(
            token=None, refresh_handler=self.renew, scopes=["any"]
        )


def test_token_that_runs_out_is_renewed():
    """In the middle of anything: the caller does not notice."""
    with FakeGcs("b") as server:
        tokens = Tokens(server, good_for=2)
        store = gcs_stores.store(server, bucket="b", credentials=tokens.credentials())
        for number in range(4):
            store.put(f"key-{number}", [b"x"], if_absent=True)
        store.put("large", iter([BIG]), if_absent=True)
        assert store.read("large") == BIG
        assert len(list(store.list())) == 5
        assert len(tokens.given) == 4


def test_upload_outlives_its_token():
    """The session was permitted when it began; chunks carry no token."""
    with FakeGcs("b") as server:
        tokens = Tokens(server, good_for=1, limit=1)
        store = gcs_stores.store(server, bucket="b", credentials=tokens.credentials())
        store.put("large", iter([BIG]), if_absent=True)
        sent = [r.headers for r in server.requests if r.method == "PUT"]
        assert len(sent) == 3
        assert not any("authorization" in headers for headers in sent)


CONTENTS = pytest.mark.parametrize("content", [b"small", BIG], ids=["whole", "chunks"])


def with_expired_token(server: FakeGcs, *, limit: int) -> GcsStore:
    """A store whose first token is used up; there are ``limit`` in all."""
    tokens = Tokens(server, good_for=1, limit=limit)
    store = gcs_stores.store(server, bucket="b", credentials=tokens.credentials())
    list(store.list())
    return store


@CONTENTS
def test_upload_begins_with_an_expired_token(content: bytes):
    """The first request gets 401, and goes out again with a new token."""
    with FakeGcs("b") as server:
        store = with_expired_token(server, limit=2)
        store.put("key", iter([content]), if_absent=True)
        assert server.content("b", "key") == content


@CONTENTS
def test_upload_without_a_new_token_leaves_nothing(content: bytes):
    """The message says what to renew."""
    with FakeGcs("b") as server:
        store = with_expired_token(server, limit=1)
        with pytest.raises(NotAuthenticated, match=r"write 'key'.*sign in again"):
            store.put("key", iter([content]), if_absent=True)
        assert (server.content("b", "key"), server.uploads) == (None, {})


def test_no_secret_is_told(caplog: pytest.LogCaptureFixture):
    """Neither tokens nor sessions are in messages, causes, representations or logs."""
    caplog.set_level(logging.DEBUG)
    with FakeGcs("b") as server:
        tokens = Tokens(server, good_for=3, limit=1)
        store = gcs_stores.store(server, bucket="b", credentials=tokens.credentials())
        store.put("large", iter([BIG]))
        store.stat("large")
        store.stat("large")
        with pytest.raises(NotAuthenticated, match="renewed") as raised:
            store.stat("large")
        session = next(iter(server.uploads))
        told = [repr(store), repr(vars(store)), repr(vars(store._calls))]
        told += traceback.format_exception(raised.value)
    told.append(caplog.text)
    for secret in (*tokens.given, session):
        assert not any(secret in text for text in told)
    assert "upload_id=..." in caplog.text


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Said at the first request, with what to do."""
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    store = GcsStore("b", endpoint="https://127.0.0.1:9")
    with pytest.raises(NotAuthenticated, match=r"read 'key' of gs://b.*gcloud auth"):
        store.read("key")


def test_no_token_goes_to_an_endpoint_without_tls(
    gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The environment's credentials are not looked for."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing"))
    bucket = gcs_stores.new_bucket(gcs_server)
    store = GcsStore(bucket, endpoint=gcs_server.url)
    store.put("key", [b"x"])
    assert store.read("key") == b"x"
    assert "authorization" not in gcs_server.requests[-1].headers
    store.close()


def test_environment_names_proxy_and_authority(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Both count, although they are looked up once."""
    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with GoogleServer(lambda _: json_answer({}, 404)) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        store = GcsStore("b", endpoint="http://storage.invalid", retry=quick_retry())
        with pytest.raises(ObjectNotFound):
            store.stat("key")
        assert server.requests[0].headers["host"] == "storage.invalid"
        store.close()
    authority = tmp_path / "missing.pem"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority))
    anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call]
    transport = Transport("https://storage.invalid", anonymous, quick_retry())
    with pytest.raises(StoreUnavailable) as caught:
        transport.request("GET", "https://storage.invalid/b")
    assert str(authority) in str(caught.value.__cause__)
    transport.close()
