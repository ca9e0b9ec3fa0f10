"""Who a machine is on AWS: a signed question to STS, which only STS can check.

The machine signs ``GetCallerIdentity`` with the credentials of its role and does not
send it. Among the signed headers is the binding of what it asks for. A party that
has to know who it is rebuilds the request, asks STS itself, and reads the name in the
answer. Of the request only date, session token and signature come from the machine;
host, path, body and headers are fixed here, the region is the operator's, and the
binding is computed by the party that asks: nothing that a machine sends decides where
a request goes or what it does.

Source: AWS, "Signing AWS API requests" (Signature Version 4) and "GetCallerIdentity";
HashiCorp, "AWS auth method" of Vault, which proves identities so, and CVE-2020-16250.
"""

import json
import re
from calendar import timegm
from collections.abc import Mapping
from dataclasses import dataclass
from time import strptime
from typing import Any

from cloud_adapters.net import short_requests
from cloud_adapters.net.short_requests import ShortAnswer
from federation.errors import NotAuthenticated, PlatformUnavailable, ProofRefused
from federation.platform_identity import AWS, PlatformIdentity
from federation.protocols import Clock

BINDING_HEADER = "X-Crossfed-Binding"
FRESH_SECONDS = 600.0
_BODY = b"Action=GetCallerIdentity&Version=2011-06-15"
_CONTENT = "application/x-www-form-urlencoded; charset=utf-8"
_SIGNED = "content-type;host;x-amz-date;x-amz-security-token;x-crossfed-binding"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=ASIA[A-Z0-9]{4,124}/(?P<day>\d{8})"
    r"/(?P<region>[a-z0-9-]{1,40})/sts/aws4_request, "
    r"SignedHeaders=(?P<signed>[a-z0-9;-]{1,200}), Signature=[0-9a-f]{64}",
    re.ASCII,
)
_DATE = re.compile(r"\d{8}T\d{6}Z", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]{1,7000}", re.ASCII)
_ARN = re.compile(
    r"arn:aws(-us-gov)?:sts::(?P<account>\d{12}):assumed-role/"
    r"(?P<role>[\w+=,.@-]{1,64})/(?P<session>i-[0-9a-f]{8,17})",
    re.ASCII,
)
_MAX_BYTES = 1 << 16
_OK, _LEAST_SERVER_ERROR, _THROTTLED = 200, 500, 429


def prove(binding: str, region: str) -> str:
    """Sign the question who this machine is, for a binding; nothing is sent.

    Args:
        binding: 64 hexadecimal digits.
        region: Whose STS will be asked.

    Returns:
        The proof: date, session token and signature, as JSON.

    Raises:
        NotAuthenticated: This machine has no role.
    """
    import botocore.session  # noqa: PLC0415 -- the extra aws; checking needs none
    from botocore.auth import SigV4Auth  # noqa: PLC0415
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    try:
        found = botocore.session.Session().get_credentials()
        keys = None if found is None else found.get_frozen_credentials()
    except BotoCoreError as error:
        raise NotAuthenticated(
            f"AWS gives this machine no credentials ({type(error).__name__}): give it "
            "an instance profile"
        ) from error
    if keys is None or not keys.token:
        raise NotAuthenticated(
            "this machine has no role of AWS: give it an instance profile; long-lived "
            "keys say nothing about a machine"
        )
    request = AWSRequest(
        method="POST",
        url=f"https://{_host(region)}/",
        data=_BODY,
        headers={"Content-Type": _CONTENT, BINDING_HEADER: binding},
    )
    SigV4Auth(keys, "sts", region).add_auth(request)
    return json.dumps(
        {
            "date": request.headers["X-Amz-Date"],
            "token": request.headers["X-Amz-Security-Token"],
            "authorization": request.headers["Authorization"],
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StsVerifier:
    """Asks STS who has signed; threads may share it.

    Attributes:
        clock: Tells time.
        endpoint: URL of STS, if it is not the cloud's own; an operator's setting.
    """

    clock: Clock
    endpoint: str = ""

    def verify(self, proof: str, binding: str, region: str) -> PlatformIdentity:
        """Say which machine has signed a question.

        Args:
            proof: Returned by ``prove``.
            binding: What it must have been made for.
            region: Whose STS to ask, as the operator says.

        Raises:
            ProofRefused: STS does not accept it, it is too old or not a role's.
            PlatformUnavailable: STS cannot be asked.
        """
        date, token, authorization = _parts(proof)
        found = _AUTHORIZATION.fullmatch(authorization)
        if found is None:
            raise ProofRefused("the proof of AWS is not signed by a role's credentials")
        if found["signed"] != _SIGNED:
            raise ProofRefused(
                f"the proof of AWS signs {found['signed']!r}, and not the binding "
                "with the other headers"
            )
        if found["region"] != region or found["day"] != date[:8]:
            raise ProofRefused(f"the proof of AWS is not for region {region} and today")
        age = self.clock.now() - timegm(strptime(date, "%Y%m%dT%H%M%SZ"))
        if not abs(age) <= FRESH_SECONDS:
            raise ProofRefused(
                f"the proof of AWS is {age:.0f} s old by this clock: set the clocks of "
                "both machines (NTP) and try again"
            )
        answer = short_requests.ask(
            self.endpoint or f"https://{_host(region)}/",
            method="POST",
            body=_BODY,
            headers={
                "Host": _host(region),
                "Content-Type": _CONTENT,
                "X-Amz-Date": date,
                "X-Amz-Security-Token": token,
                BINDING_HEADER: binding,
                "Authorization": authorization,
                "Accept": "application/json",
            },
            max_bytes=_MAX_BYTES,
        )
        return _caller(answer, region)


def _host(region: str) -> str:
    return f"sts.{region}.amazonaws.com"


def _parts(proof: str) -> tuple[str, str, str]:
    """Date, session token and signature; nothing in them can end a header."""
    found = _json(proof.encode())
    date, token = found.get("date"), found.get("token")
    authorization = found.get("authorization")
    is_whole = (
        isinstance(date, str)
        and isinstance(token, str)
        and isinstance(authorization, str)
        and _DATE.fullmatch(date)
        and _TOKEN.fullmatch(token)
    )
    try:
        if not is_whole or len(found) != 3:  # noqa: PLR2004 -- the three above
            raise ValueError  # noqa: TRY301
        strptime(str(date), "%Y%m%dT%H%M%SZ")
    except ValueError:
        raise ProofRefused("this is not a proof of AWS") from None
    return str(date), str(token), str(authorization)


def _caller(answer: ShortAnswer, region: str) -> PlatformIdentity:
    """Read who has signed, from what STS says."""
    if answer.status >= _LEAST_SERVER_ERROR or answer.status == _THROTTLED:
        raise PlatformUnavailable(f"{_host(region)} answers HTTP {answer.status}")
    if answer.status != _OK:
        raise ProofRefused(
            "AWS does not accept the proof: it was made for other keys, another site "
            f"or another aggregator, or has expired (HTTP {answer.status})"
        )
    found: Any = _json(answer.body)
    for name in ("GetCallerIdentityResponse", "GetCallerIdentityResult"):
        found = found.get(name) if isinstance(found, dict) else None
    arn = found.get("Arn") if isinstance(found, dict) else None
    named = _ARN.fullmatch(arn) if isinstance(arn, str) else None
    if named is None or found.get("Account") != named["account"]:
        raise ProofRefused(f"AWS says that this is no role of a machine: {arn!r:.200}")
    return PlatformIdentity(
        platform=AWS,
        account=named["account"],
        principal=named["role"],
        region=region,
        # EC2 names the session of an instance by its id.
        instance=named["session"],
    )


def _json(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProofRefused("this is not a proof of AWS")
    return found
