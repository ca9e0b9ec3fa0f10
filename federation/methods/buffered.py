"""Rounds that wait for some updates only; see ``federation.rounds.schedule``."""

from federation.methods.method import Method, Thing

BUFFERED = Method(
    name=Thing.BUFFERED,
    key="schedule.mode",
    on=("buffered",),
    always_decides=True,
    parts=("schedule.buffer_size", "schedule.max_staleness"),
    ignores={
        "schedule.minimum_sites": (
            "a model is made of schedule.buffer_size updates: set that"
        ),
        "schedule.grace": "no round waits for late sites",
    },
    instead='use "synchronous"',
    excludes={
        "a secure sum opens once for one group of sites, and a buffer holds whoever "
        "comes first": Thing.SECURE,
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
