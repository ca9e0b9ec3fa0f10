"""Google Cloud KMS: what its refusals mean, and that answers are checked."""

import base64
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from google.oauth2.credentials import Credentials
from support.buckets import quick_retry
from support.fake_kms import FakeKms, Refusal
from support.google_server import Answer, GoogleServer
from support.key_services import gcp_kms_service

from cloud_adapters.keys.context import context_bytes
from cloud_adapters.keys.gcp_kms import GcpKms, _encoded
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import (
    CorruptObject,
    KeyRefused,
    NotAuthenticated,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
)

KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
CONTEXT = {"key": "a"}


@pytest.fixture
def server() -> Iterator[FakeKms]:
    with FakeKms() as server:
        yield server


@pytest.fixture
def keys(server: FakeKms) -> GcpKms:
    return gcp_kms_service(server)


def test_rotation(server: FakeKms, keys: GcpKms):
    """The primary version encrypts, older ones continue decrypting until disabled."""
    made = keys.generate(CONTEXT)
    (key,) = server.keys.values()
    key.versions.append(secrets.token_bytes(32))
    assert keys.unwrap(made.wrapped, CONTEXT) == made.plaintext
    newer = keys.generate(CONTEXT)
    key.disabled.add(0)
    with pytest.raises(KeyRefused, match="cryptoKeyVersions/1 is not enabled"):
        keys.unwrap(made.wrapped, CONTEXT)
    assert keys.unwrap(newer.wrapped, CONTEXT) == newer.plaintext


def test_disabled_key_writes_nothing(server: FakeKms, keys: GcpKms):
    """The store below is not asked."""
    (key,) = server.keys.values()
    key.disabled.add(0)
    inner = MemoryStore()
    with pytest.raises(KeyRefused, match="keys versions enable"):
        EncryptedStore(inner, keys).put("key", [b"x"])
    assert list(inner.list()) == []
    assert len(server.requests) == 1


def test_forbidden_and_unknown_keys(server: FakeKms, keys: GcpKms):
    """Neither is mistaken for an object that is not there."""
    with pytest.raises(KeyRefused, match="no such key"):
        gcp_kms_service(server, KEY).generate(CONTEXT)
    server.allowed = False
    with pytest.raises(StoreForbidden, match="cryptoKeyEncrypterDecrypter"):
        keys.generate(CONTEXT)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("RESOURCE_EXHAUSTED", 429, StoreThrottled),
        ("UNAVAILABLE", 503, StoreUnavailable),
        ("INTERNAL", 500, StoreUnavailable),
    ],
)
def test_temporary_refusals_are_tried_again(
    server: FakeKms, keys: GcpKms, status: str, code: int, expected: type[Exception]
):
    """Until the deadline."""
    server.faults = [Refusal(code, status, "busy")] * 3
    assert len(keys.generate(CONTEXT).plaintext) == 32
    server.faults = [Refusal(code, status, "busy")] * 100
    with pytest.raises(expected, match=r"tried \d+ times in 120 s"):
        keys.generate(CONTEXT)


def test_lasting_refusals_are_not(server: FakeKms, keys: GcpKms):
    """Of credentials, and of requests."""
    server.faults = [Refusal(401, "UNAUTHENTICATED", "no")]
    with pytest.raises(NotAuthenticated, match="sign in"):
        keys.generate(CONTEXT)
    server.faults = [Refusal(400, "INVALID_ARGUMENT", "wrong purpose")]
    with pytest.raises(KeyRefused, match="ENCRYPT_DECRYPT"):
        keys.generate(CONTEXT)
    assert len(server.requests) == 2


@pytest.mark.parametrize("field", ["ciphertextCrc32c", "ciphertext"])
def test_damage_on_the_way_is_found(server: FakeKms, keys: GcpKms, field: str):
    """Of what is wrapped, before it is stored."""
    server.spoil = field
    with pytest.raises(StoreUnavailable, match="ciphertext"):
        keys.generate(CONTEXT)
    server.spoil = "verifiedPlaintextCrc32c"
    with pytest.raises(StoreUnavailable, match="not verified"):
        keys.generate(CONTEXT)


def test_damage_on_the_way_back_is_found(server: FakeKms, keys: GcpKms):
    """Of what is unwrapped."""
    wrapped = keys.generate(CONTEXT).wrapped
    server.spoil = "plaintextCrc32c"
    with pytest.raises(StoreUnavailable, match="checksum of the plaintext"):
        keys.unwrap(wrapped, CONTEXT)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": 3}', b"{}"])
def test_other_servers_are_named(body: bytes):
    """What does not speak like Cloud KMS is not believed."""
    with GoogleServer(lambda _: Answer(200, {}, body)) as server:
        keys = GcpKms(KEY, endpoint=server.url, retry=quick_retry())
        with pytest.raises(StoreUnavailable, match="not answer like Cloud KMS"):
            keys.generate(CONTEXT)
        keys.close()


def test_token_goes_along_and_into_no_message(server: FakeKms):
    """One that is given; without TLS none is looked for."""
    secret = "ya29." + "of-the-test"
    credentials: Any = Credentials(token=secret)  # type: ignore[no-untyped-call]
    keys = GcpKms(
        KEY, endpoint=server.url, credentials=credentials, retry=quick_retry()
    )
    with pytest.raises(KeyRefused) as caught:
        keys.generate(CONTEXT)
    assert server.requests[0].headers["authorization"] == f"Bearer {secret}"
    assert secret not in str(caught.value) + repr(keys)
    other = GcpKms(KEY, endpoint=server.url, retry=quick_retry())
    with pytest.raises(KeyRefused):
        other.generate(CONTEXT)
    assert "authorization" not in server.requests[1].headers
    keys.close()
    other.close()


def test_data_key_of_another_length(server: FakeKms, keys: GcpKms):
    """What unwraps to something else is no data key."""
    wrapped = keys.wrap(bytes(32), CONTEXT)
    (key,) = server.keys.values()
    made = server._encrypt(key, "x", _fields(b"short"))
    head = wrapped[: wrapped.index(b"\0") + 1]
    with pytest.raises(CorruptObject, match="32 bytes"):
        keys.unwrap(head + base64.b64decode(made["ciphertext"]), CONTEXT)


def _fields(plaintext: bytes) -> dict[str, str]:
    about = _encoded("additionalAuthenticatedData", context_bytes(CONTEXT))
    return {**_encoded("plaintext", plaintext), **about}


@pytest.mark.parametrize(
    "key", ["", "k", KEY + "/cryptoKeyVersions/1", "/" + KEY, KEY + "\n", KEY + "?a=b"]
)
def test_key_has_a_form(key: str):
    """A version is none: it could not be rotated."""
    with pytest.raises(ValueError, match="Cloud KMS key"):
        GcpKms(key)
