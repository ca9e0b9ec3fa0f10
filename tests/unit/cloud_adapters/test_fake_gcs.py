"""The fake of Cloud Storage against Google's own client: what tests rest upon."""

import io
from collections.abc import Iterator

import pytest
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import InvalidOperation
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from support.fake_gcs import KIB_256, FakeGcs
from support.google_discovery import Api, NotOfTheApi


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs("b") as server:
        yield server


@pytest.fixture
def bucket(
    server: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[storage.Bucket]:
    # A thread that asks for the bucket's place would outlive the server, and draws from
    # `random`, which Hypothesis notices in another test.
    monkeypatch.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    client = storage.Client(
        project="project",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": server.url},
    )
    yield client.bucket("b")
    client.close()


def test_small_object(bucket: storage.Bucket):
    """What Google's client writes, it reads, whole and in ranges, with checksums."""
    blob = bucket.blob("a/b c\N{SNOWMAN}")
    blob.metadata = {"who": "me"}
    blob.upload_from_string(b"0123456789", if_generation_match=0, retry=None)
    assert (blob.crc32c, blob.md5_hash) == ("KAwGng==", "eB5eJF1ptWaXm4bijSPyxw==")
    assert blob.download_as_bytes(retry=None) == b"0123456789"
    assert blob.download_as_bytes(start=2, end=4, retry=None) == b"234"
    assert bucket.get_blob(blob.name).metadata == {"who": "me"}


def test_resumable_upload(bucket: storage.Bucket, server: FakeGcs):
    """Google's client uploads in chunks, and its checksum is compared."""
    content = bytes(range(256)) * 3000
    blob = bucket.blob("big")
    blob.chunk_size = KIB_256
    blob.upload_from_file(io.BytesIO(content), checksum="crc32c", retry=None)
    assert server.content("b", "big") == content
    assert server.methods()["PUT"] == 3


def test_generations(bucket: storage.Bucket):
    """Every write has a new generation; conditions hold or the request fails."""
    blob = bucket.blob("key")
    blob.upload_from_string(b"1", retry=None)
    first = blob.generation
    blob.upload_from_string(b"2", if_generation_match=first, retry=None)
    assert blob.generation > first
    for wrong in (0, first):
        with pytest.raises(exceptions.PreconditionFailed):
            blob.upload_from_string(b"3", if_generation_match=wrong, retry=None)
        with pytest.raises(exceptions.PreconditionFailed):
            blob.delete(if_generation_match=wrong, retry=None)
    blob.patch(if_metageneration_match=1, retry=None)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.patch(if_metageneration_match=1, retry=None)
    assert blob.download_as_bytes(retry=None) == b"2"


def test_listing_in_pages(bucket: storage.Bucket, server: FakeGcs):
    """Names come in order, from an offset, a page at a time."""
    server.max_page = 2
    for name in ("p/c", "p/a", "q", "p/b", "p/d"):
        bucket.blob(name).upload_from_string(b"", retry=None)
    found = bucket.list_blobs(prefix="p/", start_offset="p/b")
    assert [blob.name for blob in found] == ["p/b", "p/c", "p/d"]


def test_what_is_not_there(bucket: storage.Bucket):
    """Missing objects and buckets are told apart by the words alone."""
    blob = bucket.blob("missing")
    with pytest.raises(exceptions.NotFound, match="No such object"):
        blob.reload(retry=None)
    with pytest.raises(exceptions.NotFound, match="No such object"):
        blob.delete(retry=None)
    with pytest.raises(exceptions.NotFound, match="bucket does not exist"):
        list(bucket.client.list_blobs("no-bucket", retry=None))


def test_range_behind_the_end(bucket: storage.Bucket):
    """416, as RFC 9110 has it."""
    bucket.blob("key").upload_from_string(b"123", retry=None)
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        bucket.blob("key").download_as_bytes(start=3, retry=None)


def test_spoilt_object_is_noticed(bucket: storage.Bucket, server: FakeGcs):
    """Checksums are those of the writing, so that a client can tell."""
    bucket.blob("key").upload_from_string(b"123", retry=None)
    server.spoil("b", "key", b"124")
    with pytest.raises(DataCorruption):
        bucket.blob("key").download_as_bytes(checksum="crc32c", retry=None)


def test_wrong_checksum_is_refused(server: FakeGcs):
    """The checksum that a writer gives is compared."""
    body = (
        b'--x\r\ncontent-type: application/json\r\n\r\n{"name": "k", "crc32c": '
        b'"AAAAAA=="}\r\n--x\r\n\r\n123\r\n--x--'
    )
    answer = requests.post(
        f"{server.url}/upload/storage/v1/b/b/o?uploadType=multipart",
        data=body,
        headers={"content-type": "multipart/related; boundary=x"},
        timeout=5,
    )
    assert (answer.status_code, server.content("b", "k")) == (400, None)


@pytest.mark.parametrize(
    "url",
    [
        "/storage/v1/b/b/o?no=parameter",
        "/storage/v1/b/b/o?maxResults=many",
        "/storage/v1/b/b/o/key?projection=all",
        "/storage/v2/b/b/o",
    ],
)
def test_what_the_document_has_not_is_refused(server: FakeGcs, url: str):
    """Parameters, their values and paths are the discovery document's."""
    answer = requests.get(server.url + url, timeout=5)
    assert answer.status_code == 400
    assert answer.json()["error"]["errors"][0]["reason"] == "invalid"


@pytest.mark.parametrize(
    "resource", [{"name": 5}, {"name": "k", "nmae": "k"}, {"name": "k", "size": "x"}]
)
def test_resources_are_checked(server: FakeGcs, resource: dict[str, object]):
    """Unknown fields and wrong types are found."""
    url = f"{server.url}/upload/storage/v1/b/b/o?uploadType=resumable"
    assert requests.post(url, json=resource, timeout=5).status_code == 400


def test_chunks_are_multiples_of_256_kib(server: FakeGcs):
    """But for the last."""
    url = f"{server.url}/upload/storage/v1/b/b/o?uploadType=resumable&name=k"
    session = requests.post(url, timeout=5).headers["Location"]
    headers = {"content-range": "bytes 0-999/*"}
    answer = requests.put(session, data=bytes(1000), headers=headers, timeout=5)
    assert answer.status_code == 400
    headers = {"content-range": "bytes 0-999/1000"}
    answer = requests.put(session, data=bytes(1000), headers=headers, timeout=5)
    assert (answer.status_code, answer.json()["size"]) == (200, "1000")


def test_tokens_run_out(bucket: storage.Bucket, server: FakeGcs):
    """A token is good for as many requests as the test says."""
    server.tokens = {"good": 1}
    url, headers = f"{server.url}/storage/v1/b/b/o", {"authorization": "Bearer good"}
    answers = [requests.get(url, headers=headers, timeout=5) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 401]
    with pytest.raises(InvalidOperation, match="cannot be refreshed"):
        bucket.blob("key").reload(retry=None)


def test_permissions(bucket: storage.Bucket, server: FakeGcs):
    """To overwrite is to delete: the service wants that permission too."""
    server.allows = lambda permission, _, __: permission == "storage.objects.create"
    bucket.blob("key").upload_from_string(b"123", retry=None)
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.delete"):
        bucket.blob("key").upload_from_string(b"123", retry=None)
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.get"):
        bucket.blob("key").download_as_bytes(retry=None)


def test_other_services_have_documents_too():
    """Paths that span segments, as those of Cloud KMS."""
    key = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    api = Api("cloudkms.v1")
    call = api.call("POST", f"/v1/{key}:encrypt", {})
    method = "cloudkms.projects.locations.keyRings.cryptoKeys.encrypt"
    assert (call.method_id, call.params) == (method, {"name": key})
    api.check_request(method, {"plaintext": "aGVsbG8="})
    with pytest.raises(NotOfTheApi, match="plaintext"):
        api.check_request(method, {"plaintext": "not base64!"})
