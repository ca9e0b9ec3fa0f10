"""A Trainer's own loop, in place of the job's; see ``clients.training.users_loop``."""

from federation.methods.method import ONE_RANK, Method, Thing

USERS_LOOP = Method(
    name=Thing.TRAINER,
    key="training.task",
    on=("trainer",),
    always_decides=True,
    instead="name another task",
    excludes={
        "a Trainer's loop computes the gradient of a whole batch, so that what one "
        "record adds cannot be clipped, as differential privacy of records must: use "
        'unit = "site", or another task, which trains the model and data of the same '
        "Trainer in the loop of the job": Thing.RECORDS,
        "a Trainer's loop does not add it": Thing.PROXIMAL,
        "a Trainer's loop counts no steps": Thing.NORMALIZED,
        "a Trainer's loop does not work ahead": Thing.OVERLAP,
        "the schedule of a Trainer is made for rounds of equal "
        "length": Thing.CHOSEN_STEPS,
        "the Trainer of model.factory has one "
        "gradient_accumulation_steps": Thing.LARGER_STEPS,
        "a Trainer's loop changes zeros like all other values": Thing.KEPT_ZEROS,
        "a Trainer's loop keeps nothing at a site from round to round": Thing.PERSONAL,
        f"a Trainer's loop runs in one process: {ONE_RANK}": Thing.RANKS,
    },
    ignores={
        "training.optimizer": "set optim, learning_rate and weight_decay",
        "training.learning_rate": "set lr_scheduler_type and warmup_steps",
        "training.clip_grad_norm": "set max_grad_norm",
        "training.precision": "set bf16 or fp16",
        "training.options": (
            "set label_smoothing_factor, or compute_loss_func of the Trainer"
        ),
        "training.max_tokens": "limit the length of records in the Trainer's data",
        "evaluation.batch_size": "set per_device_eval_batch_size",
    },
    private_because="noise for whole sites covers whatever a site's loop does",
)
