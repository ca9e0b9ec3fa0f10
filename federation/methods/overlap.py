"""Local steps while models are on their way; see ``clients.methods.overlap``."""

from federation.methods.method import ONE_RANK, Method, Thing

OVERLAP = Method(
    name=Thing.OVERLAP,
    key="training.overlap_steps",
    parts=("training.overlap_mix",),
    keeps=True,
    excludes={
        "some steps of a round must follow the model: set local_steps, and use fewer "
        "here": (Thing.EPOCHS, Thing.ALL_AHEAD),
        "the proximal term pulls towards a model that has not arrived "
        "yet": Thing.PROXIMAL,
        "overlap_steps mixes an older weight with the residual of the "
        "round": Thing.EXACT_ADAPTERS,
        ONE_RANK: Thing.RANKS,
    },
    private_because=(
        "what steps ahead led to is used only after their round was charged"
    ),
)
