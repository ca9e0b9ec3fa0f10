"""What the shipped policies let a site do with a key of AWS KMS, enforced by moto."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support import s3_server as servers
from support.buckets import quick_retry

from cloud_adapters.identity import aws_policies
from cloud_adapters.keys.aws_kms import AwsKms
from cloud_adapters.storage.encrypted import EncryptedStore, context_of
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import StoreForbidden

WRITES = aws_policies.parse_place("s3://runs/sites/a")


def policy(**options: Any) -> str:
    """The test server takes a condition that it does not know for one that fails."""
    made = json.loads(aws_policies.site_policy(reads=[], writes=WRITES, **options))
    for statement in made["Statement"]:
        statement.pop("Condition", None)
    return json.dumps(made)


@pytest.fixture(params=[False, True])
def keys(
    request: pytest.FixtureRequest,
    s3_server: servers.S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[AwsKms, AwsKms, bool]]:
    """A site's own key and one of others; whether it may rewrap."""
    from moto.kms.responses import KmsResponse  # noqa: PLC0415 (a second to import)

    service = servers.client(s3_server.url, service="kms")
    own, other = (service.create_key()["KeyMetadata"]["Arn"] for _ in range(2))
    # The test server knows keys, and does not hold them against policies by itself.
    monkeypatch.setattr(
        KmsResponse,
        "_determine_resource",
        lambda request: json.loads(request.body)["KeyId"],
        raising=False,
    )
    options = {"encryption_key": own, "may_rewrap": request.param}
    iam = servers.client(s3_server.url, service="iam")
    name = own.rpartition("/")[2]
    iam.create_user(UserName=name)
    iam.put_user_policy(
        UserName=name, PolicyName="site", PolicyDocument=policy(**options)
    )
    made = iam.create_access_key(UserName=name)["AccessKey"]
    client = servers.client(
        s3_server.url,
        service="kms",
        key=made["AccessKeyId"],
        secret=made["SecretAccessKey"],
    )
    s3_server.enforce_policies()
    retry = quick_retry()
    yield (
        AwsKms(own, client=client, retry=retry),
        AwsKms(other, client=client, retry=retry),
        request.param,
    )
    s3_server.enforce_policies(after=math.inf)


def test_site_wraps_and_unwraps_with_its_key(keys: tuple[AwsKms, AwsKms, bool]):
    """With this key alone; anew only where the policy says so."""
    own, other, may_rewrap = keys
    context = context_of("job/run/key")
    made = own.generate(context)
    assert own.unwrap(made.wrapped, context) == made.plaintext
    with pytest.raises(StoreForbidden, match="kms:GenerateDataKey"):
        other.generate(context)
    if may_rewrap:
        anew = own.wrap(made.plaintext, context)
        assert own.unwrap(anew, context) == made.plaintext
    else:
        with pytest.raises(StoreForbidden, match="kms:Encrypt"):
            own.wrap(made.plaintext, context)


def test_encrypted_objects_with_the_policy(
    keys: tuple[AwsKms, AwsKms, bool],
):
    """A checkpoint is written and read; rewrapping needs one right more."""
    own, _, may_rewrap = keys
    store = EncryptedStore(MemoryStore(), own, prefix="job/run/")
    store.put("blob", [b"weights"])
    assert store.read("blob") == b"weights"
    if may_rewrap:
        store.rewrap("blob")
    else:
        with pytest.raises(StoreForbidden, match="kms:Encrypt"):
            store.rewrap("blob")
