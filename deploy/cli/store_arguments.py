"""Arguments of the command line that several verbs take to reach a store."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloud_adapters.urls import StoreOptions
    from deploy.wiring.encryption import KeyName

KEY_WORDS = "file:PATH, aws-kms:ARN or gcp-kms:NAME"


def add_service(parser: argparse.ArgumentParser) -> None:
    """Let a person say where a store's service is, and whose bucket it must be."""
    parser.add_argument(
        "--endpoint",
        default="",
        metavar="URL",
        help="a service other than the cloud's own",
    )
    parser.add_argument("--region", default="", help="of an S3 bucket")
    parser.add_argument(
        "--bucket-owner", default="", metavar="ACCOUNT", help="of an S3 bucket"
    )


def add_cloud_key(parser: argparse.ArgumentParser) -> None:
    """Let a person name the key with which the cloud encrypts what is written."""
    parser.add_argument(
        "--kms-key",
        default="",
        metavar="KEY",
        help="the cloud's own encryption: key ARN of AWS, or name of Google",
    )


def add_key(parser: argparse.ArgumentParser, words: str) -> None:
    """Let a person name a key; ``words`` say what for."""
    parser.add_argument("--encryption-key", default="", metavar="KEY", help=words)
    parser.add_argument(
        "--encryption-endpoint", default="", metavar="URL", help="of the key's service"
    )


def service(options: argparse.Namespace) -> "StoreOptions":
    """What the arguments of ``add_service`` and ``add_cloud_key`` say."""
    from cloud_adapters.urls import StoreOptions  # noqa: PLC0415 -- keeps `--help` fast

    return StoreOptions(
        endpoint=options.endpoint,
        region=options.region,
        bucket_owner=options.bucket_owner,
        kms_key=getattr(options, "kms_key", ""),
    )


def key(options: argparse.Namespace) -> "KeyName":
    """What the arguments of ``add_key`` say."""
    from deploy.wiring.encryption import KeyName  # noqa: PLC0415 -- keeps `--help` fast

    return KeyName(name=options.encryption_key, endpoint=options.encryption_endpoint)
