"""Local steps while models are on their way; see ``clients.methods.overlap``."""

from federation.methods.method import ONE_RANK, Method, Thing

_FOLLOW = (
    "some steps of a round must follow the model: set local_steps, and use fewer here"
)

OVERLAP = Method(
    name=Thing.OVERLAP,
    key=("training", "overlap_steps"),
    off=0,
    parts={("training", "overlap_mix"): 0.5},
    keeps=True,
    excludes={
        Thing.EPOCHS: _FOLLOW,
        Thing.ALL_AHEAD: _FOLLOW,
        Thing.PROXIMAL: (
            "the proximal term pulls towards a model that has not arrived yet"
        ),
        Thing.PRIVACY: (
            "private steps are charged with their round, and these would be taken "
            "before it"
        ),
        Thing.EXACT_ADAPTERS: (
            "overlap_steps mixes an older weight with the residual of the round"
        ),
        Thing.RANKS: f"ranks do not work ahead: {ONE_RANK}",
    },
)
