"""Control variates of SCAFFOLD; see ``clients.methods.control_variates``.

A site's update must be its learning rates times a mean gradient, and the next model
must show the mean of all updates, or sites could not follow it by themselves.
"""

from federation.methods.method import ONE_RANK, Method, Thing

_SAME_STEPS = "all sites must take the same steps: use local_steps and 'fixed'"
_GRADIENTS = (
    "clipping and the proximal term change the gradients that it corrects: remove "
    "clip_grad_norm and proximal_mu"
)
_EVERY_STEP = "every step must count: remove overlap_steps, and use fp32 or bf16"
_SAME_WEIGHTS = (
    "variates cancel only in a mean with the same weights in every round: use combine "
    "= 'mean' with weights 'examples' or 'uniform'"
)
_HIDDEN_MEAN = (
    "a server optimiser hides the mean of all updates from the sites: leave out "
    "aggregation.server_optimizer"
)
_ROUNDED = (
    "what a codec rounds away would add up in the variates: leave out codec, "
    "down_codec and levels"
)
_CUT = (
    "what rounding to 16 bits and clip_elements take from updates would add up in the "
    "variates: use at least 24 ring_bits, and leave out clip_elements"
)

CONTROL_VARIATES = Method(
    name="control variates",
    key=("training", "control_variates"),
    off=False,
    keeps=True,
    follows_counted=True,
    needs_dense=True,
    excludes={
        Thing.EPOCHS: _SAME_STEPS,
        Thing.CHOSEN_STEPS: _SAME_STEPS,
        Thing.NORMALIZED: _SAME_STEPS,
        Thing.OTHER_OPTIMIZERS: (
            "updates show a mean gradient only with plain sgd, without momentum: use it"
        ),
        Thing.CLIPPED_STEPS: _GRADIENTS,
        Thing.PROXIMAL: _GRADIENTS,
        Thing.OVERLAP: _EVERY_STEP,
        Thing.FLOAT16: _EVERY_STEP,
        Thing.PRIVACY: (
            "with differential privacy, updates hold noise and clipped gradients"
        ),
        Thing.RELAYS: (
            "a round must go on without any one relay, and then its sites could not "
            "follow the mean"
        ),
        Thing.PARTIAL_ROUNDS: (
            "a site that is absent from a completed round cannot follow the mean: let "
            "every round need all sites (schedule.minimum_sites, "
            "privacy.secure_aggregation.threshold)"
        ),
        Thing.OTHER_COMBINE: _SAME_WEIGHTS,
        Thing.DYNAMIC_WEIGHTS: _SAME_WEIGHTS,
        Thing.SERVER_STEP: _HIDDEN_MEAN,
        Thing.RUNNING_SUM: _HIDDEN_MEAN,
        Thing.CODECS: _ROUNDED,
        Thing.LEVELS: _ROUNDED,
        Thing.RING_16: _CUT,
        Thing.CLIP_ELEMENTS: _CUT,
        Thing.CLUSTERS: (
            "a site trains one cluster, and the mean is of all: use one model"
        ),
        Thing.FEWER_RANKS: "all sites must train the same values",
        Thing.EXACT_ADAPTERS: "control variates would be of other factors",
        Thing.FLOWER_APPS: "Flower apps do not correct their gradients",
        Thing.TRAINER: "a Trainer's loop does not correct gradients",
        Thing.RANKS: f"ranks keep no control variates: {ONE_RANK}",
    },
)
