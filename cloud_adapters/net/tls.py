"""TLS from a site to its aggregator: only 1.3, and one trusted authority."""

import ssl
from pathlib import Path

from federation.errors import JobError

# OpenSSL's codes of a certificate that another clock may find valid.
_DATES = {9: "is not valid yet", 10: "has expired"}


def clock_doubt(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate's dates are refused, and what to do; empty for other reasons.

    It passes when a clock is set or the certificate is renewed, without this machine.
    """
    dates = _DATES.get(error.verify_code)
    if dates is None:
        return ""
    return (
        f"its certificate {dates} by this machine's clock: set whichever of the two "
        "clocks is wrong (NTP); if both are right, the other machine needs a new "
        "certificate"
    )


def client_context(
    authority: bytes, certificate: Path | None, *, key: str = "aggregator.authority"
) -> ssl.SSLContext:
    """Make a TLS context; files are read now, so renewed ones are used.

    Args:
        authority: PEM of the only authorities that may speak for the aggregator.
        certificate: File with the certificate that the aggregator's proxy asks for,
            and its key; None for none.
        key: The key of ``site.toml`` that names the authorities.

    Raises:
        JobError: One of them holds no certificate; ``key`` is that of ``site.toml``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise JobError(
            f"the file holds no certificate: {error}; restore it, or enrol the site "
            "again",
            key=key,
        ) from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate)
        except OSError as error:  # An SSLError is one, too.
            raise JobError(
                f"{certificate} holds no certificate with its key: "
                f"{error.strerror or error}; restore it, or enrol the site again",
                key="certificate",
            ) from error
    return context
