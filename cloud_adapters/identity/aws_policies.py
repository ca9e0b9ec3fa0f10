"""Minimal permissions of a site in S3: policies from the URLs that it uses.

``python -m cloud_adapters.identity.aws_policies --help`` prints them for the AWS
console, its CLI or Terraform. Not here: who may assume the site's role.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

_FOLDER = Path(__file__).parent / "iam"
# The signs that a policy would read as patterns or variables are left out.
_S3_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([^*?$]*[^*?$/])/?")
_KMS_KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[\w-]+")


@dataclass(frozen=True, slots=True)
class S3Prefix:
    """A prefix in a bucket.

    Attributes:
        bucket: Its name.
        prefix: Without a slash at its end.
        partition: ``aws``, ``aws-cn`` or ``aws-us-gov``.
    """

    bucket: str
    prefix: str
    partition: str = "aws"

    @property
    def bucket_arn(self) -> str:
        """The name of the bucket in policies."""
        return f"arn:{self.partition}:s3:::{self.bucket}"

    @property
    def names(self) -> str:
        """Pattern of all keys under the prefix: ``a/*`` and not ``a*``."""
        return f"{self.prefix}/*"

    @property
    def objects(self) -> str:
        """The objects under the prefix in policies."""
        return f"{self.bucket_arn}/{self.names}"


def parse_place(url: str, *, partition: str = "aws") -> S3Prefix:
    """Read ``s3://BUCKET/PREFIX``.

    Raises:
        ValueError: It is another URL, or a whole bucket.
    """
    found = _S3_URL.fullmatch(url)
    if found is None:
        raise ValueError(
            f"{url!r} is not s3://BUCKET/PREFIX: a site gets a prefix, not a bucket, "
            "and no pattern"
        )
    return S3Prefix(found[1], found[2], partition)


def site_policy(
    *,
    reads: Sequence[S3Prefix],
    writes: S3Prefix,
    kms_key: str | None = None,
    encryption_key: str | None = None,
    may_rewrap: bool = False,
) -> str:
    """Write the policy of a site's role, as JSON.

    Args:
        reads: Where its data are.
        writes: The one place that it writes to, and may read and clear.
        kms_key: ARN of the key with which S3 encrypts these places; None for keys of
            S3. It is used only through S3.
        encryption_key: ARN of the key of ``storage.encryption``, with which the site
            itself encrypts; None for none. It is used only for data keys of objects.
        may_rewrap: Whether it may also wrap data keys again with that key.

    Raises:
        ValueError: A key is not the ARN of one.
    """
    for key in (kms_key, encryption_key):
        if key is not None and _KMS_KEY.fullmatch(key) is None:
            raise ValueError(f"{key!r} is not the ARN of a KMS key")
    actions = ["kms:Decrypt", "kms:GenerateDataKey"]
    return _render(
        "aws-site.json.j2",
        reads=reads,
        writes=writes,
        kms_key=kms_key,
        encryption_key=encryption_key,
        encryption_actions=[*actions, "kms:Encrypt"] if may_rewrap else actions,
    )


def bucket_policy(place: S3Prefix) -> str:
    """Write the policy of a bucket: nothing without TLS, for anyone."""
    return _render(
        "aws-bucket.json.j2",
        bucket_arn=place.bucket_arn,
        objects=f"{place.bucket_arn}/*",
    )


def bucket_lifecycle() -> str:
    """Write a bucket's lifecycle: parts of killed uploads go after two days."""
    return _render("aws-lifecycle.json.j2")


def _render(name: str, **values: Any) -> str:
    environment = jinja2.Environment(  # noqa: S701 (JSON: every value is escaped by tojson)
        loader=jinja2.FileSystemLoader(_FOLDER), undefined=jinja2.StrictUndefined
    )
    # jinja's tojson is for HTML; JSON that is read and written again has no such signs.
    rendered = json.loads(environment.get_template(name).render(values))
    return json.dumps(rendered, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a policy."""
    parser = argparse.ArgumentParser(
        prog="python -m cloud_adapters.identity.aws_policies",
        description=__doc__.splitlines()[0],
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    site = kinds.add_parser("site", help="policy of a site's role")
    site.add_argument("--reads", action="append", default=[], metavar="S3_URL")
    site.add_argument("--writes", required=True, metavar="S3_URL")
    site.add_argument("--kms-key", metavar="ARN", help="the bucket's own")
    site.add_argument(
        "--encryption-key", metavar="ARN", help="of storage.encryption in the job"
    )
    site.add_argument(
        "--rewraps", action="store_true", help="allow crossfed storage rewrap as well"
    )
    bucket = kinds.add_parser("bucket", help="policy of a bucket")
    bucket.add_argument("url", metavar="S3_URL")
    kinds.add_parser("lifecycle", help="lifecycle of a bucket")
    parser.add_argument("--partition", default="aws", help="aws, aws-cn, aws-us-gov")
    options = parser.parse_args(arguments)
    try:
        text = _policy(options)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def _policy(options: argparse.Namespace) -> str:
    partition = options.partition
    if options.kind == "site":
        return site_policy(
            reads=[parse_place(url, partition=partition) for url in options.reads],
            writes=parse_place(options.writes, partition=partition),
            kms_key=options.kms_key,
            encryption_key=options.encryption_key,
            may_rewrap=options.rewraps,
        )
    if options.kind == "bucket":
        return bucket_policy(parse_place(options.url, partition=partition))
    return bucket_lifecycle()


if __name__ == "__main__":
    sys.exit(main())
