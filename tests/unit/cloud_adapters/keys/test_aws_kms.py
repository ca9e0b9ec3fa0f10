"""AWS KMS: what its refusals mean, and what is not left to it."""

from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.stub import Stubber
from support.buckets import quick_retry
from support.key_services import aws_kms_service, kms_client
from support.s3_server import client

from cloud_adapters.keys.aws_kms import CODES, AwsKms, translate
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

ARN = "arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
CONTEXT = {"key": "a"}


def refusal(code: str, status: int = 400, operation: str = "Decrypt") -> ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": "words"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, operation)


@pytest.fixture(scope="module")
def unconnected() -> Any:
    """One for all: making one takes long."""
    return client("http://127.0.0.1:9", service="kms")


@pytest.fixture
def stubbed(unconnected: Any) -> Any:
    """A service over botocore's own stub of a service."""
    with Stubber(unconnected) as stub:
        yield AwsKms(ARN, client=unconnected, retry=quick_retry()), stub
        stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("DisabledException", KeyRefused),
        ("KMSInvalidStateException", KeyRefused),
        ("NotFoundException", KeyRefused),
        ("IncorrectKeyException", KeyRefused),
        ("InvalidCiphertextException", CorruptObject),
        ("AccessDeniedException", StoreForbidden),
        ("ThrottlingException", StoreThrottled),
        ("KMSInternalException", StoreUnavailable),
        ("ExpiredTokenException", NotAuthenticated),
    ],
)
def test_refusals_are_ours(code: str, expected: type[Exception]):
    """With the key, the code and advice in the message."""
    error = translate(refusal(code), "unwrap a data key with aws-kms:x")
    assert type(error) is expected
    for part in ("data key with aws-kms:x", code, "words"):
        assert part in str(error)


def test_every_declared_refusal_has_a_row(unconnected: Any):
    """Of the operations that are used; a grant token and a dry run are not."""
    declared = {
        shape.name
        for operation in ("GenerateDataKey", "Encrypt", "Decrypt")
        for shape in unconnected.meta.service_model.operation_model(
            operation
        ).error_shapes
    }
    unused = {"DryRunOperationException", "InvalidGrantTokenException"}
    assert declared - set(CODES) == unused


@pytest.mark.parametrize("code", ["404", "NoSuchKey", "412", "Strange"])
def test_no_refusal_is_about_an_object(code: str):
    """A run must not begin anew because a key service says that nothing is there."""
    error = translate(refusal(code, 404), "unwrap")
    assert isinstance(error, StoreUnavailable)


def test_other_failures():
    """No credentials, no network: the latter may pass."""
    assert type(translate(NoCredentialsError(), "unwrap")) is NotAuthenticated
    error = translate(
        EndpointConnectionError(endpoint_url="https://x/?sig=y"), "unwrap"
    )
    assert error.temporary
    assert "sig" not in str(error)


def test_temporary_refusals_are_tried_again(stubbed: Any):
    """And the service's answer counts."""
    keys, stub = stubbed
    answer = {"KeyId": ARN, "Plaintext": bytes(32), "CiphertextBlob": b"blob"}
    stub.add_client_error("generate_data_key", "ThrottlingException")
    stub.add_client_error("generate_data_key", "KMSInternalException")
    stub.add_response("generate_data_key", answer)
    assert keys.generate(CONTEXT).plaintext == bytes(32)


def test_disabled_key_is_asked_once(stubbed: Any):
    """A person has to act."""
    keys, stub = stubbed
    stub.add_client_error("generate_data_key", "DisabledException")
    with pytest.raises(KeyRefused, match="enable-key"):
        keys.generate(CONTEXT)


@pytest.mark.parametrize("length", [0, 16, 33])
def test_data_key_of_another_length(stubbed: Any, length: int):
    """Whoever is at the other end, it does not choose the cipher."""
    keys, stub = stubbed
    answer = {"KeyId": ARN, "Plaintext": bytes(length), "CiphertextBlob": b"blob"}
    stub.add_response("generate_data_key", answer)
    with pytest.raises(CorruptObject, match="32 bytes"):
        keys.generate(CONTEXT)


def test_job_chooses_the_key_that_decrypts(stubbed: Any):
    """Not the object: its writer could name a key of their own."""
    keys, stub = stubbed
    mrk = "arn:aws:kms:us-east-1:999999999999:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    with pytest.raises(KeyRefused, match="999999999999"):
        keys.unwrap(f"aws-kms:{mrk}\0blob".encode(), CONTEXT)
    ours = ARN.replace("eu-west-1", "us-east-1")  # A replica.
    stub.add_response(
        "decrypt",
        {"KeyId": ARN, "Plaintext": bytes(32)},
        {"KeyId": ARN, "CiphertextBlob": b"blob", "EncryptionContext": CONTEXT},
    )
    assert keys.unwrap(f"aws-kms:{ours}\0blob".encode(), CONTEXT) == bytes(32)


def test_alias_names_a_key(s3_server: Any):
    """What one wraps by its alias the other unwraps by its ARN."""
    kms = kms_client(s3_server.url)
    arn = kms.create_key()["KeyMetadata"]["Arn"]
    name = f"alias/runs-{arn[-12:]}"
    kms.create_alias(AliasName=name, TargetKeyId=arn)
    alias = aws_kms_service(s3_server, arn.partition(":key/")[0] + ":" + name)
    wrapped = alias.wrap(bytes(32), CONTEXT)
    assert aws_kms_service(s3_server, arn).unwrap(wrapped, CONTEXT) == bytes(32)
    assert alias.unwrap(wrapped, CONTEXT) == bytes(32)


def test_unknown_key_is_refused(s3_server: Any):
    """And nothing is written with it."""
    inner = MemoryStore()
    arn = ARN.replace("eu-west-1", "us-east-1")
    store = EncryptedStore(inner, aws_kms_service(s3_server, arn))
    with pytest.raises(KeyRefused, match="no such key"):
        store.put("key", [b"x"])
    assert list(inner.list()) == []


@pytest.mark.parametrize(
    "arn",
    [
        "",
        "1234abcd-12ab-34cd-56ef-1234567890ab",
        "alias/runs",
        ARN.replace(":kms:", ":s3:"),
        ARN + "\n",
    ],
)
def test_arn_has_a_form(arn: str):
    """Its region is needed."""
    with pytest.raises(ValueError, match="ARN"):
        AwsKms(arn)
