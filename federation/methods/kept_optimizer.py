"""Optimiser state that a site keeps; see ``clients.training.local_steps``."""

from federation.methods.method import ONE_RANK, Method, Thing

KEPT_OPTIMIZER = Method(
    name=Thing.KEPT_OPTIMIZER,
    key=("training", "optimizer", "state"),
    off="fresh",
    on="keep",
    keeps=True,
    excludes={
        Thing.PLAIN_SGD: "plain sgd has no state to keep: set a momentum",
        Thing.EXACT_ADAPTERS: "kept optimiser state would be of other factors",
        Thing.RANKS: (
            f"ranks cannot keep the optimiser's state between rounds: {ONE_RANK}"
        ),
    },
    private_because="it follows from gradients that have noise",
)
