"""A machine of Google's and Google's token services, on loopback.

``metadata`` is the metadata server with identity tokens; ``token_services`` are STS and
IAM Credentials, which exchange another cloud's proof for an access token.
"""

import base64
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

from support.google_server import Answer, GoogleServer, Request, json_answer


def jwt(**claims: Any) -> str:
    """A token in the form of Google's, which nobody has signed."""
    now = int(time.time())
    body = {"iss": "https://accounts.google.com", "iat": now, "exp": now + 3600}
    parts = ({"alg": "RS256"}, body | claims, {})
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
        for part in parts
    )


def metadata(preempted: Callable[[], bool] = lambda: False) -> GoogleServer:
    """A metadata server that says who the machine is, and whether it is taken back."""

    def serve(request: Request) -> Answer:
        headers = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(403, headers)
        if request.path.endswith("/identity"):
            token = jwt(aud=request.query["audience"], sub="1234567890")
            return Answer(200, headers, token.encode())
        if request.path.endswith("/token"):
            token = {"access_token": "access-0", "expires_in": 3600}
            return json_answer(token | {"token_type": "Bearer"})
        if request.path == "/computeMetadata/v1/instance/preempted":
            return Answer(200, headers, b"TRUE" if preempted() else b"FALSE")
        account = {"email": "site@p-1.iam.gserviceaccount.com", "aliases": ["default"]}
        headers["Content-Type"] = "application/json"
        return Answer(200, headers, json.dumps(account).encode())

    return GoogleServer(serve)


class TokenServices(GoogleServer):
    """STS and IAM Credentials of Google.

    Attributes:
        proofs: What the other cloud's clients brought, decoded.
        seconds: How long the access tokens live that are given.
    """

    def __init__(self, seconds: int = 3600) -> None:
        self.proofs: list[Mapping[str, Any]] = []
        self.seconds = seconds
        self.given: list[str] = []
        self._numbers = itertools.count(1)
        super().__init__(self._serve)

    def _serve(self, request: Request) -> Answer:
        if request.path == "/v1/token":
            form = parse_qs(request.body.decode())
            proof = unquote(form["subject_token"][0])
            self.proofs.append(json.loads(proof))
            return json_answer(
                {
                    "access_token": "federated",
                    "expires_in": 3600,
                    "token_type": "Bearer",
                    "issued_token_type": form["requested_token_type"][0],
                }
            )
        if request.headers.get("authorization") != "Bearer federated":
            return json_answer({"error": {"message": "no"}}, 403)
        token = f"access-{next(self._numbers)}"
        self.given.append(token)
        expires = time.gmtime(time.time() + self.seconds)
        return json_answer(
            {
                "accessToken": token,
                "expireTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", expires),
            }
        )


def external_account(services: TokenServices) -> dict[str, Any]:
    """What ``gcloud iam workload-identity-pools create-cred-config`` writes."""
    account = "site@p-1.iam.gserviceaccount.com"
    verb = f"v1/projects/-/serviceAccounts/{account}:generateAccessToken"
    pool = "projects/1/locations/global/workloadIdentityPools/aws/providers/aws"
    return {
        "type": "external_account",
        "audience": f"//iam.googleapis.com/{pool}",
        "subject_token_type": "urn:ietf:params:aws:token-type:aws4_request",
        "token_url": f"{services.url}/v1/token",
        "service_account_impersonation_url": f"{services.url}/{verb}",
        "credential_source": {
            "environment_id": "aws1",
            "regional_cred_verification_url": (
                "https://sts.{region}.amazonaws.com"
                "?Action=GetCallerIdentity&Version=2011-06-15"
            ),
        },
    }
