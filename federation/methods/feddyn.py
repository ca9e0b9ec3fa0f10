"""Dynamic regularisation, FedDyn; see ``clients.methods.feddyn``.

What sites keep and the server's sum must hold the same updates, or the sum of all local
gradients would not become 0.
"""

from federation.methods.method import ONE_RANK, Method, Thing

FEDDYN = Method(
    name="FedDyn",
    key="training.dynamic_alpha",
    keeps=True,
    follows_counted=True,
    needs_dense=True,
    only_with_it=(Thing.RUNNING_SUM,),
    excludes={
        "the server must add up all updates: set aggregation.server_optimizer = { "
        'name = "running_sum" }': (Thing.PLAIN_MEAN, Thing.SERVER_STEP),
        "both correct for the same drift": "control variates",
        "both pull towards the global weights": Thing.PROXIMAL,
        "a scaled update is not where local steps end": Thing.NORMALIZED,
        "it pulls towards a model that has not arrived yet": Thing.OVERLAP,
        "with differential privacy, clipping and noise would add up in the "
        "corrections": Thing.PRIVACY,
        "a round may complete without the sites of a relay": Thing.RELAYS,
        "the server's sum must be of all sites: let every round need them "
        "(schedule.minimum_sites, "
        "privacy.secure_aggregation.threshold)": Thing.PARTIAL_ROUNDS,
        "corrections cancel only in a mean with the same weights in every round: use "
        "combine = 'mean' with weights 'examples' or "
        "'uniform'": (Thing.OTHER_COMBINE, Thing.DYNAMIC_WEIGHTS),
        "what is taken from updates would be missing in the server's sum alone": (
            Thing.CODECS,
            Thing.LEVELS,
            Thing.RING_16,
            Thing.CLIP_ELEMENTS,
        ),
        "a site trains one cluster, and the sum is of all: use one "
        "model": Thing.CLUSTERS,
        "all sites must train the same values": Thing.FEWER_RANKS,
        "FedDyn's corrections would be of other factors": Thing.EXACT_ADAPTERS,
        "Flower apps do not correct their gradients": Thing.FLOWER_APPS,
        "a Trainer's loop does not correct gradients": Thing.TRAINER,
        ONE_RANK: Thing.RANKS,
    },
)
