"""Key services over the servers on loopback."""

import functools
from typing import Any

from google.auth.credentials import AnonymousCredentials
from support.buckets import quick_retry

from cloud_adapters.keys.aws_kms import AwsKms
from cloud_adapters.keys.gcp_kms import GcpKms


@functools.cache
def kms_client(url: str) -> Any:
    """The one that all tests use: making one takes long."""
    from support.s3_server import client  # noqa: PLC0415 (a second to import)

    return client(url, service="kms")


def aws_kms_service(server: Any, arn: str = "") -> AwsKms:
    """A service with a new key of moto's, unless one is named."""
    kms = kms_client(server.url)
    arn = arn or kms.create_key()["KeyMetadata"]["Arn"]
    return AwsKms(arn, client=kms, retry=quick_retry())


def gcp_kms_service(server: Any, key: str = "") -> GcpKms:
    """A service with a new key of the fake's, unless one is named."""
    return GcpKms(
        key or server.add_key(),
        endpoint=server.url,
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        retry=quick_retry(),
    )
