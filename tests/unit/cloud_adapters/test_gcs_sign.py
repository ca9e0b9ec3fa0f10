"""Signed URLs of Cloud Storage, against a second implementation of the check."""

from collections.abc import Iterator

import google.auth.crypt
import google.oauth2.service_account
import pytest
import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from support import gcs_stores
from support.fake_gcs import FakeGcs

from cloud_adapters.storage.gcs.store import GcsStore
from federation.errors import NotAuthenticated

EMAIL = "site@project.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture
def store(gcs_server: FakeGcs, key: rsa.RSAPrivateKey) -> Iterator[GcsStore]:
    gcs_server.signers[EMAIL] = key.public_key()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    signer = google.auth.crypt.RSASigner.from_string(pem.decode())
    credentials = google.oauth2.service_account.Credentials(signer, EMAIL, "none")
    store = gcs_stores.store(gcs_server, "run", credentials=credentials)
    yield store
    store.close()


def test_url_lets_others_in(gcs_server: FakeGcs, store: GcsStore):
    """One writes and another reads, without credentials, under any key."""
    key = "a b/\N{SNOWMAN}+%~?.bin"
    url = store.signed_url(key, method="PUT", expires_seconds=60)
    assert requests.put(url, data=b"content", timeout=5).status_code == 200
    assert gcs_server.content(store._bucket, f"run/{key}") == b"content"
    url = store.signed_url(key, method="GET", expires_seconds=60)
    assert requests.get(url, timeout=5).content == b"content"


def test_url_is_for_one_object_method_and_time(store: GcsStore):
    """Whoever changes it has none."""
    url = store.signed_url("key", method="PUT", expires_seconds=60)
    assert requests.put(url, data=b"x", timeout=5).status_code == 200
    assert requests.get(url, timeout=5).status_code == 403
    for old, new in (("/key?", "/kez?"), ("Expires=60", "Expires=61")):
        changed = url.replace(old, new)
        assert changed != url
        assert requests.put(changed, data=b"x", timeout=5).status_code == 403


def test_url_ends(store: GcsStore, monkeypatch: pytest.MonkeyPatch):
    """After its time it is good for nothing."""
    url = store.signed_url("key", method="PUT", expires_seconds=60)
    monkeypatch.setattr("support.gcs_signatures.time.time", lambda: 4e9)
    answer = requests.put(url, data=b"x", timeout=5)
    assert (answer.status_code, "ExpiredToken" in answer.text) == (403, True)


@pytest.mark.parametrize("seconds", [0, -1, 7 * 24 * 3600 + 1, float("nan")])
def test_url_lives_up_to_seven_days(store: GcsStore, seconds: float):
    """The service takes no other."""
    with pytest.raises(ValueError, match="7 days"):
        store.signed_url("key", method="GET", expires_seconds=seconds)


def test_url_is_for_reading_or_writing(store: GcsStore):
    """Not for deleting."""
    with pytest.raises(ValueError, match="DELETE"):
        store.signed_url("key", method="DELETE", expires_seconds=60)


def test_credentials_that_cannot_sign():
    """They are told apart before anything is sent."""
    store = GcsStore("b", endpoint="http://127.0.0.1:9")
    with pytest.raises(NotAuthenticated, match="impersonate a service account"):
        store.signed_url("key", method="GET", expires_seconds=60)
