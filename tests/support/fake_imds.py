"""The metadata service of an AWS instance, on loopback: IMDSv2, and version 1 if asked.

Source: EC2 user guide, "Use the Instance Metadata Service to access instance metadata".
"""

import json
import time
from collections.abc import Mapping

from support.google_server import Answer, GoogleServer, Request

TOKEN = "token-of-the-test"  # noqa: S105
ROLE = "site-role"

_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_CREDENTIALS = "/latest/meta-data/iam/security-credentials/"


class FakeImds(GoogleServer):
    """The service.

    Attributes:
        seconds: How long its credentials live.
        access_key: What it gives as the id of the key.
        action: What is to become of a spot instance; None if nothing is.
        rebalance: Whether a rebalance is recommended.
    """

    def __init__(self, access_key: str = "ASIAINSTANCE", seconds: int = 3600) -> None:
        self.seconds = seconds
        self.access_key = access_key
        self.action: Mapping[str, str] | None = None
        self.rebalance = False
        super().__init__(self._serve)

    def _serve(self, request: Request) -> Answer:
        if request.path == "/latest/api/token":
            seconds = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds")
            is_good = request.method == "PUT" and seconds
            return _text(TOKEN) if is_good else Answer(404)
        token = request.headers.get("x-aws-ec2-metadata-token")
        if token != TOKEN:
            return Answer(401)
        found = {
            _CREDENTIALS: ROLE,
            _CREDENTIALS + ROLE: json.dumps(self._credentials()),
            _ACTION: json.dumps(self.action) if self.action else None,
            _REBALANCE: '{"noticeTime": ""}' if self.rebalance else None,
        }.get(request.path)
        return Answer(404) if found is None else _text(found)

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
