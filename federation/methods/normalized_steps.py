"""Updates scaled to a number of steps: see ``clients.methods.normalized_steps``."""

from federation.methods.method import Method, Thing

_PLAIN = (
    "a step counts 1 in the update only with plain sgd, without momentum and weight "
    "decay: use it"
)

NORMALIZED_STEPS = Method(
    name=Thing.NORMALIZED,
    key=("training", "normalized_steps"),
    excludes={
        Thing.STEPS: "every site takes local_steps steps: use local_epochs",
        Thing.OTHER_OPTIMIZERS: _PLAIN,
        Thing.WEIGHT_DECAY: _PLAIN,
        Thing.PROXIMAL: "the proximal term shrinks earlier steps",
        Thing.WARM_UP: "steps of a warm-up count less than others",
    },
    private_because="it scales what noised steps have led to",
)
