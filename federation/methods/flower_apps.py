"""Sites that run an existing Flower app; see ``cloud_adapters.flower``.

Such an app was not written for this product: it gets the model and gives one back.
Anything else that a site must do does not happen there.
"""

from federation.methods.method import Method, Thing

FLOWER_APPS = Method(
    name=Thing.FLOWER_APPS,
    key="sites.flower_app",
    excludes={
        "it cannot mask its update, and the sum of the others would exclude "
        "it": Thing.SECURE,
        "nothing there clips its gradients, adds noise or keeps a "
        "ledger": Thing.PRIVACY,
        "it does not keep a model between rounds": Thing.CHANGES,
        "it sends and receives whole arrays of float32": Thing.CODECS,
        "it does not evaluate its trained model": Thing.DYNAMIC_WEIGHTS,
        "it reports loss and accuracy, not the counts of this task": Thing.OTHER_COUNTS,
        "it computes its own loss": Thing.WEIGHTED_LOSS,
        "it reports loss and accuracy, and no further measures": Thing.MEASURES,
        "it reports loss and accuracy, and no confusion matrix": Thing.CLASSES,
        "nothing there keeps it near the global weights": Thing.PROXIMAL,
        "it sends its whole model, and nothing there keeps a part": Thing.PERSONAL,
        "it may train whatever it is given": Thing.FROZEN,
        "nothing there says which tokeniser its data have": Thing.TOKENIZERS,
        "nothing there works ahead": Thing.OVERLAP,
        "it does not report its steps, and nothing scales its update": Thing.NORMALIZED,
        "nothing there keeps its optimiser state": Thing.KEPT_OPTIMIZER,
        "it does its own number of steps": Thing.CHOSEN_STEPS,
        "it takes its own steps": Thing.LARGER_STEPS,
        "it answers the aggregator alone": Thing.RELAYS,
        "it sends no factors of adapters": Thing.EXACT_ADAPTERS,
    },
)
