"""A Trainer's own loop, in place of the job's; see ``clients.training.users_loop``."""

from federation.methods.method import ONE_RANK, Method, Thing

USERS_LOOP = Method(
    name=Thing.TRAINER,
    key="training.task",
    on=("trainer",),
    always_decides=True,
    instead="name another task",
    excludes={
        "a Trainer's loop computes the gradient of a whole batch, which bounds no "
        'record: use unit = "site", or another task, which trains the '
        "Trainer's model and data in the job's own loop": Thing.RECORDS,
        "a Trainer's loop does not support this": (
            *(Thing.PROXIMAL, Thing.NORMALIZED, Thing.OVERLAP, Thing.KEPT_ZEROS),
            Thing.PERSONAL,
        ),
        "the schedule of a Trainer is made for rounds of equal "
        "length": Thing.CHOSEN_STEPS,
        "the Trainer of model.factory has one "
        "gradient_accumulation_steps": Thing.LARGER_STEPS,
        ONE_RANK: Thing.RANKS,
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
