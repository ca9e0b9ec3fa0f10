"""Sites that run an existing Flower app; see ``cloud_adapters.flower``.

Such an app was not written for this product: it gets the model and gives one back.
Anything else that a site must do does not happen there.
"""

from federation.methods.method import Method, Thing

FLOWER_APPS = Method(
    name=Thing.FLOWER_APPS,
    key=("sites", "flower_app"),
    excludes={
        Thing.SECURE: (
            "it cannot mask its update, and the sum of the others would exclude it"
        ),
        Thing.PRIVACY: (
            "nothing there clips its gradients, adds noise or keeps a ledger"
        ),
        Thing.NOT_WHOLE: "it does not keep a model between rounds",
        Thing.CODECS: "it sends and receives whole arrays of float32",
        Thing.DYNAMIC_WEIGHTS: "it does not evaluate its trained model",
        Thing.OTHER_COUNTS: "it reports loss and accuracy, not the counts of this task",
        Thing.WEIGHTED_LOSS: "it computes its own loss",
        Thing.MEASURES: "it reports loss and accuracy, and no further measures",
        Thing.CLASSES: "it reports loss and accuracy, and no confusion matrix",
        Thing.PROXIMAL: "nothing there keeps it near the global weights",
        Thing.PERSONAL: "it sends its whole model, and nothing there keeps a part",
        Thing.FROZEN: "it may train whatever it is given",
        Thing.TOKENIZERS: "nothing there says which tokeniser its data have",
        Thing.OVERLAP: "nothing there works ahead",
        Thing.NORMALIZED: "it does not report its steps, and nothing scales its update",
        Thing.KEPT_OPTIMIZER: "nothing there keeps its optimiser state",
        Thing.CHOSEN_STEPS: "it does its own number of steps",
        Thing.LARGER_STEPS: "it takes its own steps",
        Thing.RELAYS: "it answers the aggregator alone",
        Thing.EXACT_ADAPTERS: "it sends no factors of adapters",
    },
)
