"""The metadata service of an AWS instance, on loopback: IMDSv2, and version 1 if asked.

Source: EC2 user guide, "Use the Instance Metadata Service to access instance metadata".
"""

import json
import time
from collections.abc import Mapping

from support.google_server import Answer, GoogleServer, Request

TOKEN = "token-of-the-test"  # noqa: S105
ROLE = "site-role"

_CREDENTIALS = "/latest/meta-data/iam/security-credentials/"


class FakeImds(GoogleServer):
    """The service.

    Attributes:
        seconds: How long its credentials live.
        has_version_2: Whether it gives tokens.
        needs_token: Whether it refuses requests without one.
        access_key: What it gives as the id of the key.
    """

    def __init__(self, access_key: str = "ASIAINSTANCE", seconds: int = 3600) -> None:
        self.seconds = seconds
        self.has_version_2 = True
        self.needs_token = True
        self.access_key = access_key
        super().__init__(self._serve)

    def _serve(self, request: Request) -> Answer:
        if request.path == "/latest/api/token":
            seconds = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds")
            is_good = self.has_version_2 and request.method == "PUT" and seconds
            return _text(TOKEN) if is_good else Answer(404)
        token = request.headers.get("x-aws-ec2-metadata-token")
        if self.needs_token and token != TOKEN:
            return Answer(401)
        if request.path == _CREDENTIALS:
            return _text(ROLE)
        if request.path == _CREDENTIALS + ROLE:
            return _text(json.dumps(self._credentials()))
        return Answer(404)

    def _credentials(self) -> Mapping[str, str]:
        end = time.gmtime(time.time() + self.seconds)
        return {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": self.access_key,
            "SecretAccessKey": "secret-of-the-instance",
            "Token": "session-of-the-instance",
            "LastUpdated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "Expiration": time.strftime("%Y-%m-%dT%H:%M:%SZ", end),
        }


def _text(body: str) -> Answer:
    return Answer(200, {"Content-Type": "text/plain"}, body.encode())
