"""Updates scaled to a number of steps: see ``clients.methods.normalized_steps``."""

from federation.methods.method import Method, Thing

NORMALIZED_STEPS = Method(
    name=Thing.NORMALIZED,
    key="training.normalized_steps",
    excludes={
        "every site takes local_steps steps: use local_epochs": Thing.STEPS,
        "steps count 1 only with plain sgd, without momentum and weight decay: use "
        "it": (
            Thing.OTHER_OPTIMIZERS,
            Thing.WEIGHT_DECAY,
        ),
        "the proximal term shrinks earlier steps": Thing.PROXIMAL,
        "steps of a warm-up count less than others": Thing.WARM_UP,
    },
    private_because="it scales what noised steps have led to",
)
