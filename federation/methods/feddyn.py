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

FEDDYN = Method(
    name="FedDyn",
    key=("training", "dynamic_alpha"),
    off=0.0,
    keeps=True,
    follows_counted=True,
    needs_dense=True,
    only_with_it=(Thing.RUNNING_SUM,),
    excludes={
        Thing.PLAIN_MEAN: _STEP,
        Thing.SERVER_STEP: _STEP,
        "control variates": "both correct for the same drift",
        Thing.PROXIMAL: "it has a pull of its own",
        Thing.NORMALIZED: "a scaled update is not where local steps end",
        Thing.OVERLAP: "it pulls towards a model that has not arrived yet",
        Thing.PRIVACY: (
            "with differential privacy, clipping and noise would add up in the "
            "corrections"
        ),
        Thing.RELAYS: (
            "a round must go on without any one relay, and the server's sum must be "
            "of all sites"
        ),
        Thing.PARTIAL_ROUNDS: (
            "the server's sum must be of all sites: let every round need them "
            "(schedule.minimum_sites, privacy.secure_aggregation.threshold)"
        ),
        Thing.OTHER_COMBINE: _SAME_WEIGHTS,
        Thing.DYNAMIC_WEIGHTS: _SAME_WEIGHTS,
        Thing.CODECS: _SAME_SUM,
        Thing.LEVELS: _SAME_SUM,
        Thing.RING_16: _SAME_SUM,
        Thing.CLIP_ELEMENTS: _SAME_SUM,
        Thing.CLUSTERS: (
            "a site trains one cluster, and the sum is of all: use one model"
        ),
        Thing.FEWER_RANKS: "all sites must train the same values",
        Thing.EXACT_ADAPTERS: "FedDyn's corrections would be of other factors",
        Thing.FLOWER_APPS: "Flower apps do not correct their gradients",
        Thing.TRAINER: "a Trainer's loop does not correct gradients",
        Thing.RANKS: f"ranks keep no corrections of FedDyn: {ONE_RANK}",
    },
)
