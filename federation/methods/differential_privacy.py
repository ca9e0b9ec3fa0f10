"""Units of privacy, and what belongs to one of them; see ``privacy.dp``.

``record`` and ``person`` add noise to the steps of each site. In ``joint`` and ``site``
the noise of all sites adds up inside the secure sum, so that nobody may see a single
update, and the sum must have room for it.
"""

from collections.abc import Mapping
from functools import partial

from federation.methods.method import ONE_RANK, Method, Thing

_TABLE = "privacy.differential_privacy"
_unit = partial(
    Method, key=f"{_TABLE}.unit", always_decides=True, instead="use another unit"
)

_OF_RECORDS: Mapping[str, str] = {
    "contrastive compares each record with others, so what it adds cannot be clipped: "
    "set unit to site, use another "
    "training.task": Thing.CONTRASTIVE,
    f"clipping a batch's gradient does not bound one record's part; {_TABLE}.clip_norm "
    "clips each record's gradient: remove training.clip_grad_norm": Thing.CLIPPED_STEPS,
}
_IN_SUM: Mapping[str, str] = {
    "one site's noise alone does not protect it, so nobody may see its update: set "
    "privacy.secure_aggregation.enabled = true": Thing.OPEN_UPDATES,
    "the noise is planned for the sum of all sites, and a group's share is too small: "
    "remove privacy.secure_aggregation.groups": Thing.GROUPS,
    "16 bits have no room for noise: set privacy.secure_aggregation.ring_bits to 24 "
    "or 32": Thing.RING_16,
    "the noise is made for the grid that clip_norm sets: remove "
    "privacy.secure_aggregation.element_bound": Thing.ELEMENT_BOUND,
}

PRIVACY = Method(
    name=Thing.PRIVACY,
    key=f"{_TABLE}.unit",
    parts=(
        f"{_TABLE}.target_epsilon",
        f"{_TABLE}.delta",
        f"{_TABLE}.noise_multiplier",
    ),
    always_decides=True,
    instead='use "none"',
    excludes={
        "it is promised for the rules that we know: name one of them in "
        "aggregation.combine": Thing.OWN_RULE,
        "other weights reveal how many records a site holds: set aggregation.weights = "
        '"uniform"': Thing.OTHER_WEIGHTS,
        "one record changes how many predictions are made, or those of other records: "
        "set evaluation.every = "
        f'0, or {_TABLE}.held_out = "public" if the held-out data is '
        "public": Thing.MIXED_RESULTS,
        "products of noised factors have more noise than was "
        "planned": Thing.EXACT_ADAPTERS,
    },
    private_because="a site that reaches target_epsilon releases no more",
)
RECORD = _unit(
    name="noise for records",
    on=("record",),
    excludes=_OF_RECORDS,
    private_because="each site adds noise to the clipped gradients of its records",
)
PERSON = _unit(
    name="noise for persons",
    on=("person",),
    parts=(f"{_TABLE}.records_per_person",),
    excludes={
        "each site would promise its epsilon for its part of a person alone: set "
        "data.partition.kind = "
        '"by_person"': Thing.DEALT_PERSONS,
        **_OF_RECORDS,
    },
    private_because="each site adds noise to the clipped gradients of its persons",
)
JOINT = _unit(
    name=Thing.JOINT,
    on=("joint",),
    parts=(f"{_TABLE}.colluding_sites", f"{_TABLE}.max_noise_multiplier"),
    instead='use unit = "record"',
    excludes={
        **_IN_SUM,
        "shared noise protects only one step per round: set training.local_steps = "
        "1": Thing.SEVERAL_STEPS,
        "joint noise is calibrated to one plain step: use sgd without momentum in "
        "training.optimizer, and aggregation.server_optimizer for the "
        "rest": Thing.OTHER_OPTIMIZERS,
        "the sum may hold only clipped gradients: set training.optimizer.weight_decay "
        "= 0": Thing.WEIGHT_DECAY,
        "the noise is calibrated to one learning rate: use constant in "
        "training.learning_rate, without warm-up": (Thing.RATE_SCHEDULE, Thing.WARM_UP),
        **_OF_RECORDS,
        ONE_RANK: Thing.RANKS,
    },
    private_because="the noise of all sites adds up in the secure sum",
)
WHOLE_SITES = _unit(
    name=Thing.WHOLE_SITES,
    on=("site",),
    parts=(
        f"{_TABLE}.colluding_sites",
        f"{_TABLE}.adaptive_clip",
        f"{_TABLE}.accept_low_signal",
    ),
    excludes={
        **_IN_SUM,
        "this noise hides one held-out record, but the unit is a whole site: declare "
        f'the held-out data public ({_TABLE}.held_out = "public"), or '
        "set evaluation.every = 0": Thing.RECORD_RESULTS,
    },
    ignores={
        "privacy.secure_aggregation.clip_norm": (
            f"updates are clipped once, to {_TABLE}.clip_norm"
        ),
    },
    private_because="the noise of all sites adds up in the secure sum",
)
ADAPTIVE_CLIP = Method(
    name="an adaptive clip norm",
    key=f"{_TABLE}.adaptive_clip",
    parts=(f"{_TABLE}.clip_quantile", f"{_TABLE}.clip_rate"),
    always_decides=True,
    private_because="counts of the updates below it have noise, and are charged",
)
STANDARDISE = Method(
    name="noised statistics",
    key=f"{_TABLE}.standardise",
    always_decides=True,
    excludes={
        "exact statistics of a site's own data are permitted here: standardise in the "
        "source": (Thing.NO_PRIVACY, Thing.WHOLE_SITES),
        "tokens have no mean: remove this table": Thing.TOKENS,
    },
    private_because="the statistics have noise of their own, and are charged",
)
