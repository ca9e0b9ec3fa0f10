"""Sites that run an existing Flower app; see ``cloud_adapters.flower``.

Such an app was not written for this product: it gets the model and gives one back.
Anything else that a site must do does not happen there.
"""

from federation.methods.method import Method, Thing

FLOWER_APPS = Method(
    name=Thing.FLOWER_APPS,
    key="sites.flower_app",
    excludes={
        "it cannot mask its update": Thing.SECURE,
        "it clips no gradients, adds no noise and keeps no ledger": Thing.PRIVACY,
        "it does not keep a model between rounds": Thing.CHANGES,
        "it sends and receives whole arrays of float32": Thing.CODECS,
        "it does not evaluate its trained model": Thing.DYNAMIC_WEIGHTS,
        "it reports only loss and accuracy": (
            *(Thing.OTHER_COUNTS, Thing.MEASURES, Thing.CLASSES),
        ),
        "its own code decides how it trains": (
            *(Thing.WEIGHTED_LOSS, Thing.PROXIMAL, Thing.FROZEN, Thing.OVERLAP),
            *(Thing.NORMALIZED, Thing.KEPT_OPTIMIZER, Thing.CHOSEN_STEPS),
            Thing.LARGER_STEPS,
        ),
        "it sends its whole model": Thing.PERSONAL,
        "it does not name its tokeniser": Thing.TOKENIZERS,
        "it answers the aggregator alone": Thing.RELAYS,
        "it sends no factors of adapters": Thing.EXACT_ADAPTERS,
    },
)
