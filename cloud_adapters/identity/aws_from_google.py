"""AWS credentials for a Google machine, without an AWS key.

``python -m cloud_adapters.identity.aws_from_google ROLE_ARN`` is what
``credential_process`` in a profile of AWS names. It asks the machine's metadata server
who the machine is, gives that token to AWS STS for a role that trusts it, and prints
what it gets. The AWS library calls it again before that expires.

Source: AWS CLI and SDK reference, "Sourcing credentials with an external process";
Google, "Verifying the identity of instances"; AWS STS, AssumeRoleWithWebIdentity.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from botocore import UNSIGNED
from botocore.config import Config

from cloud_adapters.identity.google_token import identity_token
from cloud_adapters.net import aws_session
from cloud_adapters.storage.s3 import errors as s3_errors
from federation.errors import FederationError, NotAuthenticated

AUDIENCE = "sts.amazonaws.com"
DURATION_SECONDS = 3600


def assume_role(
    role_arn: str, token: str, *, session_name: str, duration_seconds: int
) -> dict[str, Any]:
    """Exchange a token for credentials of a role, in the form of a process's output.

    Raises:
        NotAuthenticated: The role does not trust the token.
        StoreUnavailable: STS is unreachable.
    """
    doing = f"assume the role {role_arn} with a Google token"
    try:
        sts = aws_session.new_session().client(
            "sts",
            # Unused, as nothing is signed. Without them the library would look for
            # credentials, and find the profile whose process this is.
            aws_access_key_id="none",
            aws_secret_access_key="none",  # noqa: S106
            config=Config(
                signature_version=UNSIGNED,
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": 4},
            ),
        )
        answer = sts.assume_role_with_web_identity(
            RoleArn=role_arn,
            RoleSessionName=session_name,
            WebIdentityToken=token,
            DurationSeconds=duration_seconds,
        )
    except s3_errors.FAILURES as error:
        if s3_errors.code_of(error) in _NOT_TRUSTED:
            # Without the cause and its words: they may repeat the token.
            raise NotAuthenticated(
                f"cannot {doing}: its trust policy must allow "
                "sts:AssumeRoleWithWebIdentity to accounts.google.com with this "
                f"service account's unique id and audience ({s3_errors.code_of(error)})"
            ) from None
        raise s3_errors.translate(error, doing) from None
    found = answer["Credentials"]
    return {
        "Version": 1,
        "AccessKeyId": found["AccessKeyId"],
        "SecretAccessKey": found["SecretAccessKey"],
        "SessionToken": found["SessionToken"],
        "Expiration": found["Expiration"].isoformat(),
    }


_NOT_TRUSTED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredTokenException",
        "IDPRejectedClaim",
        "InvalidIdentityToken",
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print credentials; the exit code is 1 if there are none."""
    options = _parser().parse_args(arguments)
    try:
        token = identity_token(options.audience)
        made = assume_role(
            options.role,
            token,
            session_name=options.session_name,
            duration_seconds=options.seconds,
        )
    except FederationError as error:
        sys.stderr.write(f"crossfed: {error}\n")
        return 1
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cloud_adapters.identity.aws_from_google",
        description="print AWS credentials for this machine of Google's",
        allow_abbrev=False,
    )
    parser.add_argument("role", metavar="ROLE_ARN", help="the role to assume")
    parser.add_argument(
        "--audience", default=AUDIENCE, help=f"whom the token is for ({AUDIENCE})"
    )
    parser.add_argument(
        "--session-name", default="crossfed", help="name in AWS's logs (crossfed)"
    )
    parser.add_argument(
        "--seconds",
        type=int,
        default=DURATION_SECONDS,
        help=f"how long the credentials live ({DURATION_SECONDS})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
