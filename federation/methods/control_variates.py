"""Control variates of SCAFFOLD; see ``clients.methods.control_variates``.

A site's update must be its learning rates times a mean gradient, and the next model
must show the mean of all updates, or sites could not follow it by themselves.
"""

from federation.methods.method import ONE_RANK, Method, Thing

CONTROL_VARIATES = Method(
    name="control variates",
    key="training.control_variates",
    keeps=True,
    follows_counted=True,
    needs_dense=True,
    excludes={
        "all sites must take the same steps: use local_steps and 'fixed'": (
            Thing.EPOCHS,
            Thing.CHOSEN_STEPS,
            Thing.NORMALIZED,
        ),
        "updates show a mean gradient only with plain sgd, without momentum: use "
        "it": Thing.OTHER_OPTIMIZERS,
        "clipping and the proximal term change the gradients that it corrects: remove "
        "clip_grad_norm and proximal_mu": (Thing.CLIPPED_STEPS, Thing.PROXIMAL),
        "every step must count: remove overlap_steps, and use fp32 or bf16": (
            Thing.OVERLAP,
            Thing.FLOAT16,
        ),
        "with differential privacy, updates hold noise and clipped "
        "gradients": Thing.PRIVACY,
        "a round may complete without the sites of a relay": Thing.RELAYS,
        "a site that misses a completed round cannot follow the mean: let every round "
        "need all sites (schedule.minimum_sites, "
        "privacy.secure_aggregation.threshold)": Thing.PARTIAL_ROUNDS,
        "variates cancel only in a mean with the same weights in every round: use "
        "combine = 'mean' with weights 'examples' or "
        "'uniform'": (Thing.OTHER_COMBINE, Thing.DYNAMIC_WEIGHTS),
        "a server optimiser hides the mean of all updates from the sites: leave out "
        "aggregation.server_optimizer": (Thing.SERVER_STEP, Thing.RUNNING_SUM),
        "what a codec rounds away would add up in the variates: leave out codec, "
        "down_codec and levels": (Thing.CODECS, Thing.LEVELS),
        "16-bit rounding and clip_elements would add up in the variates: use at least "
        "24 ring_bits, and leave out "
        "clip_elements": (Thing.RING_16, Thing.CLIP_ELEMENTS),
        "a site trains one cluster, and the mean is of all: use one "
        "model": Thing.CLUSTERS,
        "all sites must train the same values": Thing.FEWER_RANKS,
        "control variates would be of other factors": Thing.EXACT_ADAPTERS,
        "Flower apps do not correct their gradients": Thing.FLOWER_APPS,
        "a Trainer's loop does not correct gradients": Thing.TRAINER,
        ONE_RANK: Thing.RANKS,
    },
)
