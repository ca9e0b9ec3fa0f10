"""Optimiser state that a site keeps; see ``clients.training.local_steps``."""

from federation.methods.method import ONE_RANK, Method, Thing

KEPT_OPTIMIZER = Method(
    name=Thing.KEPT_OPTIMIZER,
    key="training.optimizer.state",
    on=("keep",),
    keeps=True,
    excludes={
        "plain sgd has no state to keep: set a momentum": Thing.PLAIN_SGD,
        "kept optimiser state would be of other factors": Thing.EXACT_ADAPTERS,
        ONE_RANK: Thing.RANKS,
    },
    private_because="it follows from gradients that have noise",
)
