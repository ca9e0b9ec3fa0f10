"""Notices of a cloud that it is about to take a machine back.

Asked from the machine itself, at the metadata service of its cloud. Sources: EC2 user
guide, "Spot Instance interruption notices"; Compute Engine, "Spot VMs", "Preemption
notice".
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from federation.protocols import Clock

# What the clouds promise between notice and end.
EC2_SECONDS, GCE_SECONDS = 120.0, 30.0
_CALL_SECONDS = 2.0
_TOKEN_SECONDS = 21_600
_MOST_BYTES = 1 << 16
_EC2 = "http://169.254.169.254"
_GCE = "http://metadata.google.internal"
_NOT_FOUND, _UNAUTHORIZED = 404, 401

# The metadata service is on the machine's own link: no proxy may see it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The machine will be preempted.

    Attributes:
        seconds: How long it stays, as far as the cloud says.
        text: What the cloud said.
    """

    seconds: float
    text: str


Look = Callable[[], Notice | None]
"""Asks once; None if there is no notice, or no answer."""


class Ec2Notices:
    """Asks EC2, by version 2 of its metadata service; see ``Look``.

    A rebalance recommendation, which announces nothing yet, is only logged.
    """

    def __init__(self, clock: Clock, listener: Callable[[str], None]) -> None:
        """Ask nothing yet.

        Args:
            clock: Tells time; a wrong one never makes a notice longer than EC2's.
            listener: Called with a word about a recommendation, once.
        """
        base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _EC2).rstrip("/")
        self._base, self._clock, self._listener = base, clock, listener
        self._token = ""
        self._is_told = False

    def __call__(self) -> Notice | None:
        """Ask once."""
        action = _object(self._get("spot/instance-action"))
        if action is not None:
            text = f"EC2 will {action.get('action', 'take back')} this machine"
            return Notice(seconds=self._seconds_to(action.get("time")), text=text)
        rebalance = "events/recommendations/rebalance"
        if not self._is_told and self._get(rebalance) is not None:
            self._is_told = True
            self._listener("EC2 recommends to replace this machine; it stays for now")
        return None

    def _get(self, path: str) -> bytes | None:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            found = _call(f"{self._base}/latest/api/token", ttl, method="PUT")
            self._token = (found or b"").decode("latin-1")
        if not self._token:
            return None
        headers = {"X-aws-ec2-metadata-token": self._token}
        url = f"{self._base}/latest/meta-data/{path}"
        return _call(url, headers, on_unauthorized=self._forget)

    def _forget(self) -> None:
        self._token = ""

    def _seconds_to(self, text: object) -> float:
        try:
            end = datetime.fromisoformat(str(text)).timestamp()
        except ValueError:
            return EC2_SECONDS
        return min(EC2_SECONDS, max(0.0, end - self._clock.now()))


def gce() -> Look:
    """Ask Compute Engine."""
    host = os.environ.get("GCE_METADATA_HOST")
    base = _GCE if host is None else f"http://{host}"
    url = f"{base}/computeMetadata/v1/instance/preempted"

    def look() -> Notice | None:
        found = _call(url, {"Metadata-Flavor": "Google"})
        if found is None or found.strip().upper() != b"TRUE":
            return None
        text = "Compute Engine preempts this machine"
        return Notice(seconds=GCE_SECONDS, text=text)

    return look


def _call(
    url: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    on_unauthorized: Callable[[], None] = lambda: None,
) -> bytes | None:
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 -- of this module
    try:
        with _OPENER.open(request, timeout=_CALL_SECONDS) as answer:
            found: bytes = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        if error.code == _UNAUTHORIZED:
            on_unauthorized()
        return None
    except (OSError, http.client.HTTPException):
        return None
    return found


def _object(raw: bytes | None) -> Mapping[str, Any] | None:
    """What a body of JSON holds; an empty object if it is none."""
    if raw is None:
        return None
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
