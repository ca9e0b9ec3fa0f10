"""Which sites a round asks, and how their updates become one."""

from federation.methods.method import Method, Thing

SAMPLES = Method(
    name=Thing.SAMPLES,
    key="schedule.sites_per_round",
    always_decides=True,
    private_because="a site that is asked has noise of its own, and is charged",
)
CODECS_UP = Method(
    name=Thing.CODECS_UP,
    key="communication.codec.name",
    always_decides=True,
    instead='use "identity"',
    excludes={
        "rules other than means compare the values of sites, and each site sends other "
        "places and 0 for the rest: set aggregation.combine to mean or "
        "contributor_mean": Thing.COMPARED_PLACES,
    },
    private_because="an update has the noise of its steps before it is rounded",
)
DYNAMIC_WEIGHTS = Method(
    name=Thing.DYNAMIC_WEIGHTS,
    key="aggregation.weights",
    on=("dynamic",),
    always_decides=True,
    instead='use "examples"',
    excludes={
        "they compare the loss before and after each round: set evaluation.every = "
        "1": Thing.RARE_RESULTS,
    },
)
ROBUST = Method(
    name=Thing.ROBUST,
    key="aggregation.combine",
    on=("trimmed_mean", "median", "krum", "multi_krum"),
    parts=("aggregation.byzantine_sites",),
    always_decides=True,
    instead='use "mean"',
    excludes={
        "they count every site once, or a site could buy influence with a large "
        'weight: set aggregation.weights = "uniform"': Thing.OTHER_WEIGHTS,
    },
    private_because="they see only updates that have noise",
)
