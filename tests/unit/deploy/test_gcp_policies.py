"""The shipped roles and conditions: a site reads its data, writes its own prefix.

Enforced by the fake of Cloud Storage, with the conditions evaluated as IAM does.
"""

import json
from collections.abc import Iterator
from functools import partial

import pytest
from support import gcs_iam, gcs_stores, key_services
from support.fake_gcs import KIB_256, FakeGcs
from support.fake_kms import FakeKms
from support.gcs_iam import Binding

from cloud_adapters.identity.gcp_policies import (
    condition,
    key_binding,
    main,
    parse_place,
    role,
)
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.gcs.store import GcsStore
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import ObjectNotFound, StoreForbidden

pytestmark = pytest.mark.slow

DATA = "gs://data/site a/shards"
OWN = "gs://runs/sites/a"
LARGE = bytes(3 * KIB_256)


def binding(url: str, kind: str) -> Binding:
    place = parse_place(url)
    return Binding(place.bucket, role(kind), condition(place))


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    """Two buckets with objects, and then nobody but the site."""
    with FakeGcs("data", "runs") as server:
        gcs_stores.store(server, bucket="data").put("site a/shards/1", [b"mine"])
        gcs_stores.store(server, bucket="data").put("site a/shards-b/1", [b"other"])
        gcs_stores.store(server, bucket="runs").put("sites/b/key", [b"other"])
        bindings = [binding(DATA, "read"), binding(OWN, "write")]
        server.allows = partial(gcs_iam.allows, bindings)
        yield server


def test_site_reads_its_data(server: FakeGcs):
    """Its shards, their listing, and nothing beside them."""
    store = gcs_stores.store(server, "site a/shards", bucket="data")
    assert [info.key for info in store.list()] == ["1"]
    assert store.read(store.stat("1").key) == b"mine"


def test_site_works_in_its_prefix(server: FakeGcs):
    """Every verb works there, for small objects and large ones."""
    store = gcs_stores.store(server, "sites/a", bucket="runs")
    version = store.put("small", [b"x"], if_absent=True).version
    store.put("small", [b"y"], if_version=version)
    store.put("large", iter([LARGE]), if_absent=True)
    assert [info.key for info in store.list()] == ["large", "small"]
    assert store.read("large") == LARGE
    store.delete("large")


def test_missing_objects_are_not_forbidden(server: FakeGcs):
    """The service refuses them, as the site may not list the whole bucket."""
    store = gcs_stores.store(server, "sites/a", bucket="runs")
    store.put("key-2", [b"x"])
    for verb in (store.read, store.stat):
        with pytest.raises(ObjectNotFound):
            verb("key")
    store.delete("key")
    assert [info.key for info in store.list()] == ["key-2"]


def refused(store: GcsStore) -> None:
    """Check that no verb works."""
    for verb in (
        lambda: store.put("1", [b"x"]),
        lambda: store.put("new", iter([LARGE]), if_absent=True),
        lambda: store.delete("1"),
        lambda: store.read("1"),
        lambda: store.stat("1"),
        lambda: list(store.list()),
    ):
        with pytest.raises(StoreForbidden):
            verb()


@pytest.mark.parametrize(
    ("bucket", "prefix"),
    [
        ("data", ""),
        ("data", "site a"),
        ("data", "site a/shards-b"),
        ("data", "sites/a"),
        ("runs", ""),
        ("runs", "sites"),
        ("runs", "sites/b"),
        ("runs", "sites/ab"),
        ("runs", "site a/shards"),
    ],
)
def test_everything_else_is_refused(server: FakeGcs, bucket: str, prefix: str):
    """Other prefixes, of the same beginning too, and the other bucket."""
    refused(gcs_stores.store(server, prefix, bucket=bucket))


def test_site_does_not_change_its_data(server: FakeGcs):
    """Reading is not writing."""
    store = gcs_stores.store(server, "site a/shards", bucket="data")
    for verb in (
        lambda: store.put("new", [b"x"], if_absent=True),
        lambda: store.put("1", [b"x"]),
        lambda: store.delete("1"),
    ):
        with pytest.raises(StoreForbidden):
            verb()
    assert server.content("data", "site a/shards/1") == b"mine"


def test_signs_in_a_prefix_are_no_code():
    """A prefix cannot end the string that it stands in."""
    place = parse_place('gs://bucket/a") || true || ("\\/b')
    one = Binding("bucket", role("read"), condition(place))
    assert one.allows("storage.objects.get", "bucket", f"{place.prefix}/key")
    assert not one.allows("storage.objects.get", "bucket", "a")


@pytest.mark.parametrize(
    "url", ["gs://bucket", "gs://bucket/", "s3://bucket/a", "gs://B/a", "gs://buc/a//b"]
)
def test_places_are_prefixes(url: str, capsys: pytest.CaptureFixture[str]):
    """A whole bucket is no least privilege."""
    assert main(["condition", url]) == 2
    assert capsys.readouterr().err


KEY = "projects/p-1/locations/europe-west4/keyRings/ring/cryptoKeys/runs"
SITE = "site@p-1.iam.gserviceaccount.com"


def test_binding_of_a_key(capsys: pytest.CaptureFixture[str]):
    """One role on one key, for one account."""
    assert main(["key", KEY, SITE]) == 0
    (binding,) = json.loads(capsys.readouterr().out)["bindings"]
    assert binding == {
        "role": "roles/cloudkms.cryptoKeyEncrypterDecrypter",
        "members": [f"serviceAccount:{SITE}"],
    }


@pytest.mark.parametrize(
    ("key", "account"),
    [
        (KEY.rpartition("/cryptoKeys")[0], SITE),
        (f"{KEY}/cryptoKeyVersions/1", SITE),
        (KEY, "allUsers"),
        (KEY, "someone@example.com"),
    ],
)
def test_refused_bindings_of_keys(
    key: str, account: str, capsys: pytest.CaptureFixture[str]
):
    """A ring, a version, everybody and a person are not what a site needs."""
    assert main(["key", key, account]) == 2
    assert capsys.readouterr().err


@pytest.fixture
def kms(kms_server: FakeKms) -> Iterator[FakeKms]:
    """Cloud KMS, which gives the site what the printed policies say."""
    yield kms_server
    kms_server.allows = None


def test_policy_of_a_key_is_all_that_encryption_needs(kms: FakeKms):
    """Held against the permissions of Google's predefined role."""
    own, other = kms.add_key(), kms.add_key()
    policies = {own: json.loads(key_binding(own, SITE))}

    def allows(permission: str, key: str) -> bool:
        bindings = policies.get(key, {"bindings": []})["bindings"]
        return any(
            f"serviceAccount:{SITE}" in entry["members"]
            and permission in gcs_iam.PERMISSIONS_OF_ROLES[entry["role"]]
            for entry in bindings
        )

    kms.allows = allows
    service = key_services.gcp_kms_service(kms, own)
    store = EncryptedStore(MemoryStore(), service, prefix="job/run/")
    store.put("blob", [b"weights"])
    assert store.read("blob") == b"weights"
    store.rewrap("blob")
    with pytest.raises(StoreForbidden, match="cryptoKeyEncrypterDecrypter"):
        key_services.gcp_kms_service(kms, other).generate({})
