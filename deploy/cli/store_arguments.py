"""Arguments of the command line that several verbs take to reach a store."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloud_adapters.urls import StoreOptions
    from deploy.wiring.encryption import KeyName


def service(options: argparse.Namespace) -> "StoreOptions":
    """What the arguments ``service`` and ``cloud_key`` of ``verbs.toml`` say."""
    from cloud_adapters.urls import StoreOptions  # noqa: PLC0415 -- keeps `--help` fast

    return StoreOptions(
        endpoint=options.endpoint,
        region=options.region,
        bucket_owner=options.bucket_owner,
        kms_key=getattr(options, "kms_key", ""),
    )


def key(options: argparse.Namespace) -> "KeyName":
    """What ``--encryption-key`` and ``--encryption-endpoint`` say."""
    from deploy.wiring.encryption import KeyName  # noqa: PLC0415 -- keeps `--help` fast

    return KeyName(name=options.encryption_key, endpoint=options.encryption_endpoint)
