"""Secure sums of updates in few levels; see ``privacy.secagg.arithmetic.levels``."""

from federation.methods.method import Method, Thing

LEVELS = Method(
    name=Thing.LEVELS,
    key="privacy.secure_aggregation.levels",
    keeps=True,
    parts=("communication.fragments",),
    only_with_it=(Thing.SUMS_DOWN,),
    excludes={
        "levels are of masked sums: set privacy.secure_aggregation.enabled, or use "
        "communication.codec": Thing.OPEN_UPDATES,
        "values in few levels are no words of the ring": Thing.OTHER_RINGS,
        "sites that compute the model from sums need it whole at first: set "
        "communication.down_codec to identity": Thing.SUMS_OF_ROUNDED,
        "what earlier rounds left out would change the sensitivity: use unit = "
        '"record"': Thing.JOINT,
        "what earlier rounds left out is added after clipping, and few levels have "
        'no room for noise: use unit = "record"': Thing.WHOLE_SITES,
        "levels have a bound of their own, and what lies beyond it is sent "
        "later": Thing.ELEMENT_BOUND,
        "groups have sums of their own, with no common steps": (
            *(Thing.GROUPS, Thing.FREE_SUMS),
        ),
    },
    private_because="noise for records is added before updates are rounded",
)
