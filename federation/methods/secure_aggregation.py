"""Sums that hide single updates from the aggregator; see ``privacy.secagg``."""

from federation.methods.method import Method, Thing

_GROUPS = "privacy.secure_aggregation.groups"

SECURE = Method(
    name=Thing.SECURE,
    key="privacy.secure_aggregation.enabled",
    parts=(_GROUPS,),
    always_decides=True,
    instead="set this to false",
    excludes={
        "your own rule is given each site's update, and only sums are opened: set "
        'aggregation.combine = "mean"': Thing.OWN_RULE,
        "rules other than the mean compare updates, but the server sees only their "
        f"sum: set {_GROUPS} to compare sums of groups; use mean, where only the clip "
        "norm limits a bad site": Thing.UNGROUPED,
        "updates are sent as masked ring elements: set communication.codec to "
        "identity, and fewer bits in privacy.secure_aggregation.ring_bits, or "
        "privacy.secure_aggregation.levels": Thing.CODECS_UP,
        "sites sign the digest of the whole model that they receive: set "
        "communication.down_content to model, or to sum with "
        "privacy.secure_aggregation.levels": Thing.CHANGES,
        "dynamic weights need each site's loss, which is hidden: set "
        'aggregation.weights = "examples"': Thing.DYNAMIC_WEIGHTS,
        "every site takes part in every round: remove "
        "schedule.sites_per_round": Thing.SAMPLES,
        "such cohorts differ by few sites, so two sums reveal their "
        "updates": Thing.REMEMBERING,
        "sums of whoever answers first differ by few sites: use "
        "privacy.secure_aggregation.threshold and schedule.grace, to which sites "
        "agree": Thing.OVER_SELECTION,
        "a maximum cannot be computed without seeing each site's value: use keep or "
        "from_server in model.integer_buffers": Thing.MAX_BUFFERS,
        "the aggregator needs each site's factors, which secure aggregation "
        "hides": Thing.EXACT_ADAPTERS,
    },
    private_because="a sum shows less than the updates, which keep their noise",
)
GROUPS = Method(
    name=Thing.GROUPS,
    key=_GROUPS,
    always_decides=True,
    excludes={
        "a mean does not compare groups, and smaller sums hide less: choose a robust "
        "aggregation.combine": Thing.MEAN,
    },
    ignores={
        "privacy.secure_aggregation.threshold": (
            "all sites of a group must answer, and the rule continues without an "
            "incomplete group"
        ),
    },
    private_because="each site's own noise is in the sum of its group",
)
ELEMENT_BOUND = Method(
    name=Thing.ELEMENT_BOUND,
    key="privacy.secure_aggregation.element_bound",
    parts=("privacy.secure_aggregation.clip_elements",),
    always_decides=True,
    private_because="updates have the noise of their steps before they are bounded",
)
