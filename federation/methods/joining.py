"""Sites that join a run while it trains; see ``deploy.aggregator_host.newcomers``."""

from federation.methods.control_variates import CONTROL_VARIATES
from federation.methods.feddyn import FEDDYN
from federation.methods.method import Method, Thing

JOINING = Method(
    name="sites that join",
    key="schedule.open_to",
    excludes={
        "two sums that differ by one site reveal its update": Thing.SECURE,
        "noise and promises are planned for the sites that it began "
        "with": Thing.PRIVACY,
        "what sites keep adds up over all that it began with": (
            CONTROL_VARIATES.name,
            FEDDYN.name,
        ),
    },
)
