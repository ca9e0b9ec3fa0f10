"""Dynamic regularisation, FedDyn; see ``clients.methods.feddyn``.

What sites keep and the server's sum must hold the same updates, or the sum of all local
gradients would not become 0.
"""

from federation.methods.method import ONE_RANK, Method, Thing

_SAME_SUM = (
    "what is taken from updates would be missing in the server's sum and not at the "
    "sites"
)
_STEP = (
    "the server must add up all updates: set aggregation.server_optimizer = { name = "
    '"running_sum" }'
)
_SAME_WEIGHTS = (
    "corrections cancel only in a mean with the same weights in every round: use "
    "combine = 'mean' with weights 'examples' or 'uniform'"
)
_OWN_PULL = "it has a pull of its own: leave out proximal_mu"
_SCALED = "a scaled update is not where local steps end: leave out normalized_steps"

FEDDYN = Method(
    name="FedDyn",
    key=("training", "dynamic_alpha"),
    off=0.0,
    keeps=True,
    follows_counted=True,
    adds_to_gradients=True,
    only_with_it=(Thing.RUNNING_SUM,),
    excludes={
        Thing.PLAIN_MEAN: _STEP,
        Thing.SERVER_STEP: _STEP,
        "control variates": "both correct for the same drift: leave out the other one",
        Thing.PROXIMAL: _OWN_PULL,
        Thing.NORMALIZED: _SCALED,
        Thing.OVERLAP: (
            "it pulls towards a model that has not arrived yet: leave out overlap_steps"
        ),
        Thing.PRIVACY: (
            "with differential privacy, clipping and noise would add up in the "
            "corrections: train without"
        ),
        Thing.RELAYS: (
            "a round must go on without any one relay, and the server's sum must be of "
            "all sites: leave out [[relays]]"
        ),
        Thing.PARTIAL_ROUNDS: (
            "the server's sum must be of all sites: let every round need them "
            "(schedule.minimum_sites, privacy.secure_aggregation.threshold)"
        ),
        Thing.OTHER_COMBINE: _SAME_WEIGHTS,
        Thing.DYNAMIC_WEIGHTS: _SAME_WEIGHTS,
        Thing.CODECS: f"{_SAME_SUM}: leave out codec and down_codec",
        Thing.LEVELS: f"{_SAME_SUM}: leave out levels",
        Thing.RING_16: f"{_SAME_SUM}: use at least 24 ring_bits",
        Thing.CLIP_ELEMENTS: f"{_SAME_SUM}: leave out clip_elements",
        Thing.CLUSTERS: (
            "a site trains one cluster, and the sum is of all: use one model"
        ),
        Thing.FEWER_RANKS: "all sites must train the same values: leave out lora_rank",
        Thing.EXACT_ADAPTERS: (
            "FedDyn's corrections would be of other factors: leave out "
            "training.dynamic_alpha"
        ),
        Thing.FLOWER_APPS: (
            "Flower apps do not correct their gradients: let sites train the job's "
            "model on data of their own"
        ),
        Thing.TRAINER: "a Trainer's loop does not correct gradients: name another task",
        Thing.RANKS: f"ranks keep no corrections of FedDyn: {ONE_RANK}",
    },
)
