"""Local steps whose number or size changes; see ``federation.rounds.local_work``."""

from federation.methods.method import Method, Thing

CHOSEN_STEPS = Method(
    name=Thing.CHOSEN_STEPS,
    key=("schedule", "local_work"),
    off="fixed",
    on="auto",
    parts={
        ("schedule", "max_local_steps"): None,
        ("schedule", "training_share"): 0.97,
    },
    instead="use 'fixed'",
    excludes={
        Thing.EPOCHS: (
            "'auto' chooses a number of steps: use training.local_steps, the fewest, "
            "instead of local_epochs"
        ),
        Thing.PRIVACY: (
            "with differential privacy the steps of every round are planned and "
            "charged before the run, so they cannot follow the lines"
        ),
    },
)
LARGER_STEPS = Method(
    name=Thing.LARGER_STEPS,
    key=("training", "accumulate_from"),
    off=(),
    excludes={
        Thing.EPOCHS: (
            "counts batches of steps: use training.local_steps, not local_epochs"
        ),
        Thing.JOINT: (
            "all sites plan the noise of their sum for one sampling rate each, which a "
            "larger step would raise: lower the learning rate instead "
            "(training.learning_rate)"
        ),
        Thing.CHOSEN_STEPS: (
            'the number of steps of a round is chosen with local_work = "auto", so '
            "that the batches before it are not known"
        ),
        Thing.OVERLAP: (
            "steps that are taken ahead have the size of their round, and sites would "
            "wait for them"
        ),
    },
    private_because="each round is charged for the sampling rate of its steps",
)
