"""What the shipped policies let a site do, enforced by a service that reads them."""

import fnmatch
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support import s3_server as servers
from support.buckets import quick_retry

from cloud_adapters.identity import aws_policies
from cloud_adapters.storage.encrypted import context_of
from cloud_adapters.storage.s3.store import S3Store
from federation.errors import StoreForbidden

pytestmark = pytest.mark.slow

KEY = "arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
READS = aws_policies.parse_place("s3://data/shards/v1")
WRITES = aws_policies.parse_place("s3://runs/sites/a")


def statements(**options: Any) -> dict[str, Any]:
    policy = aws_policies.site_policy(reads=[READS], writes=WRITES, **options)
    return {entry["Sid"]: entry for entry in json.loads(policy)["Statement"]}


@pytest.fixture(scope="module")
def site_client(s3_server: servers.S3Server) -> Iterator[Any]:
    """A client with the keys of a user who has the shipped policy, and no more."""
    service = s3_server.client()
    for place in (READS, WRITES):
        service.create_bucket(Bucket=place.bucket)
    for key in ("shards/v1/0", "shards/v2/0", "other"):
        service.put_object(Bucket="data", Key=key, Body=b"records")
    for key in ("sites/b/update", "sites/aa/update", "model"):
        service.put_object(Bucket="runs", Key=key, Body=b"others'")
    iam = servers.client(s3_server.url, service="iam")
    iam.create_user(UserName="site")
    iam.put_user_policy(
        UserName="site", PolicyName="site", PolicyDocument=without_conditions()
    )
    keys = iam.create_access_key(UserName="site")["AccessKey"]
    client = servers.client(
        s3_server.url, key=keys["AccessKeyId"], secret=keys["SecretAccessKey"]
    )
    s3_server.enforce_policies()
    yield client
    s3_server.enforce_policies(after=math.inf)
    for place in (READS, WRITES):
        bucket = place.bucket
        for entry in service.list_objects_v2(Bucket=bucket).get("Contents", []):
            service.delete_object(Bucket=bucket, Key=entry["Key"])
        service.delete_bucket(Bucket=bucket)


def without_conditions(**options: Any) -> str:
    """The test server takes a condition that it does not know for one that fails."""
    kept = [
        {name: value for name, value in entry.items() if name != "Condition"}
        for entry in statements(**options).values()
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": kept})


def store(client: Any, place: aws_policies.S3Prefix) -> S3Store:
    return S3Store(place.bucket, place.prefix, client=client, retry=quick_retry())


def test_site_reads_its_data_and_does_not_change_them(site_client: Any):
    """Shards are read and listed; writing or deleting one is forbidden."""
    data = store(site_client, READS)
    assert data.read("0") == b"records"
    assert [info.key for info in data.list()] == ["0"]
    for verb in (
        lambda: data.put("0", [b"other"]),
        lambda: data.delete("0"),
    ):
        with pytest.raises(StoreForbidden, match="grant it"):
            verb()


def test_site_works_in_its_own_prefix(site_client: Any):
    """All verbs, uploads in parts and their removal included."""
    own = store(site_client, WRITES)
    own.put("round-1/update", [b"x" * 9 * 1024 * 1024], if_absent=True)
    assert own.stat("round-1/update").size == 9 * 1024 * 1024
    own.put("round-1/mask", [b"x"], if_absent=True)
    own.delete("round-1/mask")
    assert [info.key for info in own.list()] == ["round-1/update"]

    def broken() -> Iterator[bytes]:
        yield b"x" * 9 * 1024 * 1024
        raise LookupError

    with pytest.raises(LookupError) as caught:
        own.put("broken", broken())
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    "url",
    [
        "s3://data/shards/v2",
        "s3://data/shards",
        "s3://runs/sites/b",
        "s3://runs/sites/aa",
        "s3://runs/sites",
    ],
)
def test_site_gets_nowhere_else(site_client: Any, url: str):
    """Neither beside its data nor to other sites, also not to like-named ones."""
    elsewhere = store(site_client, aws_policies.parse_place(url))
    for key in ("0", "update"):
        # Where nobody listens to s3:prefix a listing says that a key is not there.
        with pytest.raises(Exception, match=r"grant it|there is no"):
            elsewhere.read(key)
        for verb in (elsewhere.delete, lambda key: elsewhere.put(key, [b""])):
            with pytest.raises(StoreForbidden, match="grant it"):
                verb(key)


def test_bucket_itself_is_closed_to_a_site(site_client: Any):
    """A site changes nothing of the bucket's settings."""
    for operation in ("delete_bucket", "get_bucket_policy", "delete_bucket_policy"):
        with pytest.raises(Exception, match="AccessDenied"):
            getattr(site_client, operation)(Bucket="runs")


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("ListData1", {"shards/v1/", "shards/v1/part-0"}),
        ("ListOwnPrefix", {"sites/a/", "sites/a/round-1/"}),
    ],
)
def test_listing_is_for_own_prefixes(statement: str, allowed: set[str]):
    """The condition on s3:prefix, which the test server does not know."""
    pattern = statements()[statement]["Condition"]["StringLike"]["s3:prefix"]
    others = {"", "s", "sites/", "sites/a", "sites/aa/", "shards/v1", "shards/v10/"}
    assert set(fnmatch.filter(allowed | others, pattern)) == allowed


def test_policy_has_no_wide_grant():
    """No statement is for all actions or all resources."""
    for entry in statements(kms_key=KEY, encryption_key=KEY).values():
        actions = entry["Action"]
        for action in [actions] if isinstance(actions, str) else actions:
            assert "*" not in action
        assert entry["Resource"].count("*") <= 1
        assert entry["Resource"] != "*"


def test_key_is_named_where_there_is_one():
    """A site may use the one key, through S3 alone."""
    assert "UseTheBucketsKey" not in statements()
    granted = statements(kms_key=KEY)["UseTheBucketsKey"]
    assert granted["Resource"] == KEY
    assert "kms:ViaService" in granted["Condition"]["StringLike"]


@pytest.mark.parametrize(
    "url",
    [
        "s3://data",
        "s3://data/",
        "s3://data/*",
        "s3://da*a/x",
        "gs://data/x",
        "s3://d/x/${y}",
    ],
)
def test_refused_places(url: str, capsys: pytest.CaptureFixture[str]):
    """Whole buckets, patterns and variables are no place for a site."""
    assert aws_policies.main(["site", "--writes", url]) == 2
    assert "PREFIX" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kms_key", "encryption_key"])
def test_refused_key(name: str):
    """An alias or a pattern is not one key."""
    options: dict[str, Any] = {name: "arn:aws:kms:*:key/*"}
    with pytest.raises(ValueError, match="KMS"):
        aws_policies.site_policy(reads=[], writes=WRITES, **options)


def test_encryption_key_is_for_data_keys_of_objects():
    """The condition, which the test server does not know, is on the real context."""
    assert "EncryptBeforeSending" not in statements()
    granted = statements(encryption_key=KEY)["EncryptBeforeSending"]
    assert granted["Resource"] == KEY
    asked = granted["Condition"]["StringEquals"]
    assert asked == {
        f"kms:EncryptionContext:{name}": value
        for name, value in context_of("key").items()
        if name != "key"
    }


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["site", "--reads", "s3://data/x", "--writes", "s3://runs/x"], "Statement"),
        (
            ["site", "--writes", "s3://runs/x", "--encryption-key", KEY, "--rewraps"],
            "Statement",
        ),
        (["--partition", "aws-cn", "bucket", "s3://runs/x"], "Statement"),
        (["lifecycle"], "Rules"),
    ],
)
def test_printed_policies_are_json(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
):
    """As the AWS console and its CLI take them."""
    assert aws_policies.main(arguments) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)[name]
    assert ("arn:aws-cn:s3:::runs" in printed) == ("aws-cn" in arguments)
