"""Secure sums of updates in few levels; see ``privacy.secagg.arithmetic.levels``."""

from federation.methods.method import Method, Thing

LEVELS = Method(
    name=Thing.LEVELS,
    key=("privacy", "secure_aggregation", "levels"),
    keeps=True,
    only_with_it=(Thing.SUMS_DOWN, Thing.FRAGMENTS),
    excludes={
        Thing.OPEN_UPDATES: (
            "levels are of masked sums: set privacy.secure_aggregation.enabled, or use "
            "communication.codec"
        ),
        Thing.OTHER_RINGS: "values in few levels are no words of the ring",
        Thing.SUMS_OF_ROUNDED: (
            "sites that compute the model from sums need it whole at first: set "
            "communication.down_codec to identity"
        ),
        Thing.JOINT: (
            "joint noise is calibrated for one plain step a round, and what earlier "
            "rounds left out would change its sensitivity: protect records alone "
            '(unit = "record")'
        ),
        Thing.WHOLE_SITES: (
            "what earlier rounds left out is added to an update after clipping, and "
            'few levels have no room for noise: use unit = "record"'
        ),
        Thing.ELEMENT_BOUND: (
            "levels have a bound of their own, and what lies beyond it is sent later"
        ),
        Thing.GROUPS: "groups have sums of their own, with no common steps",
    },
    private_because="noise for records is added before updates are rounded",
)
