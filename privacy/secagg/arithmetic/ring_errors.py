"""Errors of the ring: updates that do not fit and sums that cannot be.

ProtocolError
|-- InvalidUpdate
|   |-- UpdateNotFinite       a site's own update holds NaN or infinity
|   `-- UpdateOutOfRange      a value that does not fit its share of the ring
`-- SumOutOfRange             an unmasked sum that no honest run can produce
"""

from federation.errors import InvalidUpdate, ProtocolError

A_LIE = (
    "a site lied, or an answer was damaged; the sum does not show which, so the round "
    "is lost"
)


class UpdateNotFinite(InvalidUpdate):
    """The update holds NaN or infinity; the site declines the round."""


class UpdateOutOfRange(InvalidUpdate):
    """A value is larger than one site's share of the ring; nothing was encoded."""


class SumOutOfRange(ProtocolError):
    """The unmasked sum, of updates or of a header, is none that honest sites make."""
