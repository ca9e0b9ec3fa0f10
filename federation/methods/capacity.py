"""More steps or records at faster sites; see ``aggregator.methods.capacity``."""

from federation.methods.method import Method, Thing

CAPACITY = Method(
    name=Thing.CAPACITY,
    key="schedule.allocation",
    on=("capacity",),
    always_decides=True,
    parts=("schedule.max_local_steps",),
    instead='use "static"',
    excludes={
        "it gives sites numbers of steps: use training.local_steps": Thing.EPOCHS,
        "shared noise protects only one step per round: use unit = "
        '"record"': Thing.JOINT,
        "all sites see each site's steps, and its noise hides only its "
        "update": Thing.WHOLE_SITES,
        "all sites of a group take the same steps": (Thing.GROUPS, Thing.FREE_SUMS),
        "both choose the steps of a round": Thing.CHOSEN_STEPS,
        "the batches before a round must be known": Thing.LARGER_STEPS,
        "updates are scaled already": Thing.NORMALIZED,
        "the proximal term shrinks earlier steps": Thing.PROXIMAL,
        "something else decides how many steps a round takes": (
            *(Thing.OVERLAP, Thing.TRAINER, Thing.FLOWER_APPS),
        ),
        "a relay waits for all its sites, and sends one sum": Thing.RELAYS,
        "what sites keep of a round is for as many steps at all of them": (
            *("control variates", "FedDyn", Thing.LEVELS),
        ),
    },
    private_because=(
        "noise is planned for schedule.max_local_steps in every round, and each round "
        "is charged for the steps that it takes"
    ),
)
PLACEMENT = Method(
    name=Thing.PLACEMENT,
    key="data.placement",
    on=("dynamic",),
    instead='use "static"',
    excludes={
        "the work of a site follows the data that it has: use "
        "training.local_epochs": Thing.STEPS,
        "a site's ledger does not count what other sites did with the same "
        "records": Thing.PRIVACY,
        "the weights of sites are their numbers of records, which change": Thing.SECURE,
        "no round begins at which data could move": Thing.BUFFERED,
        "a relay waits for all its sites, and sends one sum": Thing.RELAYS,
        "a Flower app brings data of its own": Thing.FLOWER_APPS,
        "its data is read by the user's loop": Thing.TRAINER,
        "both say which site has which data": Thing.REPLICAS,
        "its ranks have shards of their own": Thing.RANKS,
        "sites would hold fewer parts than the others agreed on": "sites that join",
        "what sites keep between rounds is about their own data": (
            *("control variates", "FedDyn", Thing.PERSONAL, Thing.CLUSTERS),
        ),
    },
)
