"""A site's HTTPS requests to the aggregator before it is a member."""

import http.client
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives import hashes, serialization

from cloud_adapters.net.outbound import https_line, proxy_note
from cloud_adapters.net.tls import client_context, clock_doubt
from federation.addresses import parse_address
from privacy.membership.certificates import parse_certificate
from privacy.membership.messages import MAX_ANSWER_BYTES, read_refusal
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.errors import KeyFileRefused

CALL_SECONDS = 60.0
# Instead of a status, if there is no answer.
NO_ANSWER = 0
# An aggregator answers so that starts, or has had too many requests from an address.
PASSING = frozenset({429, 502, 503, 504})
_PATH = "/enroll"
_DONE = 200


class Way(Protocol):
    """A connection to an aggregator: ``Aggregator``, or one inside a process."""

    def authority(self, fingerprint: str) -> bytes:
        """See ``Aggregator``."""
        ...

    def post(self, body: bytes) -> bytes:
        """See ``Aggregator``."""
        ...


@dataclass(frozen=True, slots=True)
class Aggregator:
    """The aggregator's proxy, as seen from a site.

    Attributes:
        address: ``HOST:PORT``.
        root: The only authority that may speak for it, PEM; empty before it is known.
        certificate: File with the site's certificate and its key; None for none.
        path: Where messages are posted.
    """

    address: str
    root: bytes = field(repr=False)
    certificate: Path | None = None
    path: str = _PATH

    def authority(self, fingerprint: str) -> bytes:
        """Ask for the root certificate, and take it if its fingerprint is right.

        The server is not known yet: nothing is sent, and nothing is trusted but
        what SHA-256 ties to the token.

        Args:
            fingerprint: SHA-256 of the root, 64 hexadecimal digits.

        Returns:
            The root certificate, PEM.

        Raises:
            EnrolmentRefused: There is no answer, or it is someone else's.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        status, body = self._call(context, "GET", _PATH)
        if status in PASSING:
            raise EnrolmentRefused(
                f"{self.address} does not answer: {_reason(status, body)}",
                status=status,
            )
        try:
            root = parse_certificate(body)
        except KeyFileRefused:
            raise EnrolmentRefused(
                f"the server on {self.address} (HTTP {status}) is not a crossfed "
                "aggregator: check the address with its operator"
            ) from None
        found = root.fingerprint(hashes.SHA256()).hex()
        if found != fingerprint:
            raise EnrolmentRefused(
                f"the server on {self.address} is not the aggregator that created this "
                f"token: its authority has the fingerprint {found}, but the token's "
                f"has {fingerprint}. This may be a man-in-the-middle, or a token of "
                "another aggregator; nothing was sent"
            )
        return root.public_bytes(serialization.Encoding.PEM)

    def post(self, body: bytes) -> bytes:
        """Send a message, and return the answer.

        Raises:
            EnrolmentRefused: The aggregator refuses or cannot be reached, or what
                answers does not prove that it is the aggregator.
            JobError: A file holds no certificate.
        """
        context = client_context(self.root, self.certificate)
        status, answer = self._call(context, "POST", self.path, body)
        if status == _DONE:
            return answer
        raise EnrolmentRefused(
            f"{self.address} refuses: {_reason(status, answer)}", status=status
        )

    def _call(
        self, context: ssl.SSLContext, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        host, port = parse_address(self.address, key="aggregator.address")
        connection = https_line(host, port, context=context, seconds=CALL_SECONDS)
        try:
            connection.request(method, path, body or None)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        except ssl.SSLCertVerificationError as error:
            doubt = clock_doubt(error) or (
                f"{error.verify_message}. If you reach it under another name, its "
                "operator must add that name to hosts in aggregator.toml and restart it"
            )
            raise EnrolmentRefused(
                f"{self.address} does not prove that it is the aggregator: {doubt}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise EnrolmentRefused(
                f"{self.address} cannot be reached: {error}{proxy_note(host)}; check "
                "the address, and ask whether crossfed aggregator up is running and "
                "its port is open",
                status=NO_ANSWER,
            ) from error
        finally:
            connection.close()
        if len(answer) > MAX_ANSWER_BYTES:
            raise EnrolmentRefused(
                f"the answer of {self.address} is larger than any roster"
            )
        return response.status, answer


def _reason(status: int, answer: bytes) -> str:
    if status == http.HTTPStatus.FORBIDDEN and not answer.startswith(b"{"):
        return (
            "the site's certificate is expired or revoked; ask the aggregator's "
            "operator for an invitation"
        )
    if status in PASSING and not answer.startswith(b"{"):
        return (
            f"HTTP {status}; it may be starting, or this address has asked too often: "
            "try again in a minute"
        )
    if not answer.startswith(b"{"):
        return f"HTTP {status}; this may not be a crossfed aggregator"
    return read_refusal(answer)
