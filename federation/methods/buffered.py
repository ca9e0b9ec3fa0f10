"""Rounds that wait for some updates only; see ``federation.rounds.schedule``."""

from federation.methods.method import Method, Thing

_GROUPS = "schedule.groups"

BUFFERED = Method(
    name=Thing.BUFFERED,
    key="schedule.mode",
    on=("buffered",),
    always_decides=True,
    parts=("schedule.buffer_size", "schedule.max_staleness", _GROUPS),
    ignores={
        "schedule.minimum_sites": (
            "a model is made of schedule.buffer_size updates: set that"
        ),
        "schedule.grace": "no round waits for late sites",
    },
    instead='use "synchronous"',
    excludes={
        "a buffer holds whoever comes first, and such sums together reveal single "
        f"updates: name the sites of each sum in {_GROUPS}, or give each site noise of "
        'its own (unit = "record")': Thing.SUMS_OF_ALL,
        "every site that is idle gets the newest model": (
            *(Thing.SAMPLES, Thing.REMEMBERING, Thing.OVER_SELECTION),
        ),
        "a relay waits for all its sites": Thing.RELAYS,
        "rounds have no length of their own to measure": Thing.CHOSEN_STEPS,
        "no site waits, so that there is nothing to overlap": Thing.OVERLAP,
        "each model is evaluated by the sites that were idle alone": Thing.OTHER_MODEL,
        "a late update is of the factors of an older model": Thing.EXACT_ADAPTERS,
    },
    private_because=(
        "each site protects its own updates, and gets at most one task for each model"
    ),
)
BUFFERED_SUMS = Method(
    name="sums of groups at their own pace",
    key=_GROUPS,
    excludes={
        "without secure aggregation each update counts alone: set "
        "privacy.secure_aggregation.enabled": Thing.OPEN_UPDATES,
        "sites of one group may all have a small rank, so few sites fill the "
        "rest": Thing.FEWER_RANKS,
        "groups that are drawn have one round together": Thing.GROUPS,
        "a buffer adds up sums with different steps of the levels": Thing.LEVELS,
        "the sites of a group wait for its slowest, and steps are shared out among all "
        "sites: put sites of one speed into a group": Thing.CAPACITY,
        "a group has only a part of the noise of all sites: "
        'protect records (unit = "record")': (Thing.JOINT, Thing.WHOLE_SITES),
    },
    private_because="each site's own noise is in the sum of its group",
)
