"""An invitation that one operator sends to another.

It names the aggregator's address, the fingerprint of its authority, the site and a
secret, so that a site needs nothing else to know whom it talks to. A machine that its
cloud vouches for needs no secret: its invitation has none.
"""

import base64
import hashlib
import re
from dataclasses import dataclass, field

from federation.addresses import parse_address
from federation.errors import FederationError, JobError
from federation.ids import check_name

SECRET_BYTES = 32
TOKEN_SECONDS = 3600.0

_TOKEN = re.compile(
    r"crossfed-1\.(?P<address>[A-Za-z0-9.:\[\]-]{1,260})\.(?P<authority>[0-9a-f]{64})"
    r"\.(?P<site>[a-z0-9._-]{1,64})\.(?P<secret>[A-Za-z0-9_-]{43})"
)
_OPEN_TOKEN = re.compile(
    r"crossfed-id-1\.(?P<address>[A-Za-z0-9.:\[\]-]{1,260})\.(?P<authority>[0-9a-f]{64})"
    r"\.(?P<site>[a-z0-9._-]{1,64})(?P<secret>)"
)


class EnrolmentRefused(FederationError):
    """A site is not enrolled, or does not enrol.

    Args:
        message: Why, and what to do.
        status: What the aggregator answers in HTTP's terms.
    """

    def __init__(self, message: str, *, status: int = 403) -> None:
        """Keep message and status."""
        super().__init__(message)
        self.status = status


def digest_of(secret: bytes) -> str:
    """What the aggregator keeps: SHA-256 of a token's secret, which has 256 bits."""
    return hashlib.sha256(secret).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An invitation for a site's operator.

    Attributes:
        address: ``HOST:PORT`` of the aggregator.
        authority: SHA-256 of its root certificate, 64 hexadecimal digits.
        site: Name of the site that is invited.
        secret: 32 random bytes; anyone who has them can enrol as the site, once.
    """

    address: str
    authority: str
    site: str
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Read what ``text`` wrote.

        Raises:
            EnrolmentRefused: It is no token, or not all of one.
        """
        found = _TOKEN.fullmatch(text.strip()) or _OPEN_TOKEN.fullmatch(text.strip())
        if found is None:
            raise EnrolmentRefused(
                "this is no token: copy all of what `crossfed aggregator invite`, or "
                "`owners add`, printed, from crossfed-1 on"
            )
        try:
            parse_address(found["address"], key="token")
            site = check_name(found["site"])
        except (JobError, ValueError) as error:
            raise EnrolmentRefused(f"this is not a token: {error}") from None
        padded = found["secret"] + "=" * bool(found["secret"])
        return cls(
            address=found["address"],
            authority=found["authority"],
            site=site,
            secret=base64.urlsafe_b64decode(padded),
        )

    @property
    def text(self) -> str:
        """The token itself; one with a secret is shown once and not stored."""
        if not self.secret:
            return f"crossfed-id-1.{self.address}.{self.authority}.{self.site}"
        secret = base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        parts = ("crossfed-1", self.address, self.authority, self.site, secret)
        return ".".join(parts)

    @property
    def digest(self) -> str:
        """See ``digest_of``."""
        return digest_of(self.secret)
