"""Minimal permissions of a site in Cloud Storage: roles and conditions.

``python -m cloud_adapters.identity.gcp_policies --help`` prints them for ``gcloud`` or
Terraform: two roles of a project, per prefix a condition that binds a role to it, and
the binding of a key that encrypts. Not here: who may act as the site's service account.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.storage.object_keys import check_key

_FOLDER = Path(__file__).parent / "iam"
_ROLES = ("read", "write")
_GS_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(.*[^/])/?")
_KMS_KEY = re.compile(
    r"projects/[a-z0-9.:-]{1,100}/locations/[a-z0-9-]{1,63}/keyRings/[\w-]{1,63}"
    r"/cryptoKeys/[\w-]{1,63}"
)
_SERVICE_ACCOUNT = re.compile(r"[a-z0-9-]+@[a-z0-9.:-]+\.gserviceaccount\.com")
_KEY_ROLE = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
_MAX_TITLE = 100  # of IAM


@dataclass(frozen=True, slots=True)
class GcsPrefix:
    """A prefix in a bucket.

    Attributes:
        bucket: Its name.
        prefix: Without a slash at its end.
    """

    bucket: str
    prefix: str


def parse_place(url: str) -> GcsPrefix:
    """Read ``gs://BUCKET/PREFIX``.

    Raises:
        ValueError: It is another URL, or a whole bucket.
    """
    found = _GS_URL.fullmatch(url)
    if found is None:
        raise ValueError(
            f"{url!r} is not gs://BUCKET/PREFIX: a site gets a prefix, not a bucket"
        )
    return GcsPrefix(found[1], check_key(found[2]))


def role(kind: str) -> str:
    """Return the definition of a role, ``read`` or ``write``, as JSON."""
    return (_FOLDER / f"gcp-{kind}.json").read_text()


def condition(place: GcsPrefix) -> str:
    """Write the condition that binds a role to one prefix of a bucket, as JSON.

    Objects are identified by name; a listing is a request to the bucket, identified by
    the prefix that it asks for. Source: IAM's documentation on conditions, "Resource
    attributes" and "API attributes".
    """
    # CEL has JSON's escapes for the two signs that need one.
    below = f"{place.prefix}/"
    name = json.dumps(
        f"projects/_/buckets/{place.bucket}/objects/{below}", ensure_ascii=False
    )
    listed = json.dumps(below, ensure_ascii=False)
    binding = {
        "title": f"below {below}"[:_MAX_TITLE],
        "description": "The objects of one prefix, and listings of it.",
        "expression": (
            f"resource.name.startsWith({name}) || "
            'api.getAttribute("storage.googleapis.com/objectListPrefix", "")'
            f".startsWith({listed})"
        ),
    }
    return json.dumps(binding, indent=2, ensure_ascii=False) + "\n"


def key_binding(key: str, service_account: str) -> str:
    """Write the policy of a key for ``gcloud kms keys set-iam-policy``, as JSON.

    For the key of ``storage.encryption`` the account is the site's own; for a bucket's
    key (``storage.kms_key``) it is the service agent of Cloud Storage, and the site
    needs no right on the key.

    Args:
        key: Its whole name.
        service_account: Who may encrypt and decrypt with it.

    Raises:
        ValueError: One of them is malformed.
    """
    if _KMS_KEY.fullmatch(key) is None:
        raise ValueError(
            f"{key!r} is not projects/P/locations/L/keyRings/R/cryptoKeys/K: a site "
            "gets one key, not a ring"
        )
    if _SERVICE_ACCOUNT.fullmatch(service_account) is None:
        raise ValueError(f"{service_account!r} is not the e-mail of a service account")
    member = f"serviceAccount:{service_account}"
    policy = {"bindings": [{"role": _KEY_ROLE, "members": [member]}]}
    return json.dumps(policy, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a role, a condition or the policy of a key."""
    parser = argparse.ArgumentParser(
        prog="python -m cloud_adapters.identity.gcp_policies",
        description=__doc__.splitlines()[0],
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("role", help="definition of a role")
    one.add_argument("name", choices=_ROLES)
    one = kinds.add_parser("condition", help="what binds a role to a prefix")
    one.add_argument("url", metavar="GS_URL")
    one = kinds.add_parser("key", help="policy of a key that encrypts")
    one.add_argument("name", metavar="KEY")
    one.add_argument("service_account", metavar="EMAIL")
    options = parser.parse_args(arguments)
    try:
        if options.kind == "role":
            text = role(options.name)
        elif options.kind == "key":
            text = key_binding(options.name, options.service_account)
        else:
            text = condition(parse_place(options.url))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
