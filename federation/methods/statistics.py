"""Statistics in place of training: sums over records, which travel as an update."""

from federation.methods.method import Method, Thing

_EXACT = "sums must arrive as they were sent"
_WHOLE = "a round asks all sites the same, once"

STATISTICS = Method(
    name=Thing.STATISTICS,
    key="statistics",
    excludes={
        "it trains no model": (
            *(Thing.EPOCHS, Thing.SEVERAL_STEPS, Thing.CHOSEN_STEPS),
            *(Thing.LARGER_STEPS, Thing.OTHER_OPTIMIZERS, Thing.WEIGHT_DECAY),
            *(Thing.RATE_SCHEDULE, Thing.WARM_UP, Thing.CLIPPED_STEPS),
            *(Thing.PROXIMAL, Thing.NORMALIZED, Thing.OVERLAP, Thing.FLOAT16),
            *(Thing.KEPT_OPTIMIZER, Thing.FEWER_RANKS, Thing.TRAINER),
            *(Thing.OTHER_MODEL, Thing.FLOWER_APPS, Thing.RANKS, Thing.CAPACITY),
        ),
        _EXACT: (
            *(Thing.CODECS, Thing.LEVELS, Thing.OTHER_RINGS, Thing.CHANGES),
            *(Thing.SUMS_DOWN, Thing.OTHER_COMBINE, Thing.OTHER_WEIGHTS),
            *(Thing.SERVER_STEP, Thing.RUNNING_SUM, Thing.CLIP_ELEMENTS),
        ),
        _WHOLE: (Thing.SAMPLES, Thing.BUFFERED, Thing.GROUPS),
        "each site adds noise for single records to its sums: set "
        'privacy.differential_privacy.unit = "record"': (
            *("noise for persons", Thing.JOINT, Thing.WHOLE_SITES),
        ),
        "records are not standardised before they are counted": "noised statistics",
    },
    private_because="each site adds noise to its sums, in which a record is bounded",
    instead="remove this table",
)
