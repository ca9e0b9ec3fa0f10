"""Arguments that several verbs of the command line take: of stores and of sources."""

import argparse
import tomllib
from typing import TYPE_CHECKING, Any

from federation.errors import JobError

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


def source_options(texts: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE as in a job; a value that is not TOML is a string."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise JobError(f"{text!r} is not KEY=VALUE", key="--option")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found
