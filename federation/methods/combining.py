"""Which sites a round asks, and how their updates become one."""

from federation.methods.method import Method, Thing

SAMPLES = Method(
    name=Thing.SAMPLES,
    key="schedule.sites_per_round",
    always_decides=True,
    private_because="a site that is asked has noise of its own, and is charged",
)
_NO_CHOICE = (
    "there is nothing to choose where a round asks all sites: set "
    "schedule.sites_per_round"
)
REMEMBERING = Method(
    name=Thing.REMEMBERING,
    key="schedule.sampling",
    instead='use "uniform"',
    excludes={_NO_CHOICE: Thing.ALL_ASKED},
    private_because=(
        "every site that is asked is charged, and no round is claimed to hide who was"
    ),
)
FAIR = Method(
    name=Thing.FAIR,
    key="schedule.sampling",
    on=("fair",),
    instead='use "uniform"',
    private_because="as all samples that follow what sites did",
)
UTILITY = Method(
    name=Thing.UTILITY,
    key="schedule.sampling",
    on=("utility",),
    instead='use "uniform" or "fair"',
    excludes={
        "its cohorts reveal something about losses and times of sites": Thing.PRIVACY,
    },
)
OVER_SELECTION = Method(
    name=Thing.OVER_SELECTION,
    key="schedule.over_selection",
    excludes={
        _NO_CHOICE: Thing.ALL_ASKED,
        "it leaves out slow sites, and this is to count them as often as others: use "
        "schedule.grace": Thing.FAIR,
    },
    private_because=(
        "a site is charged before its work, whether or not its update is used"
    ),
)
REPLICAS = Method(
    name=Thing.REPLICAS,
    key="schedule.replicas",
    excludes={
        "data of two sites of a secure sum would count twice": Thing.SECURE,
        "the same records would leave two sites, and each site's ledger counts one of "
        "them": Thing.PRIVACY,
        "no round ends, in which the second answer could be withdrawn": Thing.BUFFERED,
        "a relay adds up the answers of both": Thing.RELAYS,
        "a round asks all replicas: set minimum_sites": (
            *(Thing.SAMPLES, Thing.REMEMBERING, Thing.OVER_SELECTION),
        ),
        "the steps of a round are shared out among sites of different data": (
            Thing.CAPACITY
        ),
        "a Flower app brings data of its own": Thing.FLOWER_APPS,
        "parts of the model that stay at a site follow its own answers": (
            *(Thing.PERSONAL, Thing.CLUSTERS),
        ),
    },
)
CODECS_UP = Method(
    name=Thing.CODECS_UP,
    key="communication.codec.name",
    always_decides=True,
    instead='use "identity"',
    excludes={
        "rules other than means compare values, and each site sends other places: set "
        "aggregation.combine to mean or "
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
