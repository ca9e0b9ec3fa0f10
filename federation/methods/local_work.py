"""Local steps whose number or size changes; see ``federation.rounds.local_work``."""

from federation.methods.method import Method, Thing

CHOSEN_STEPS = Method(
    name=Thing.CHOSEN_STEPS,
    key="schedule.local_work",
    on=("auto",),
    parts=("schedule.max_local_steps", "schedule.training_share"),
    instead="use 'fixed'",
    excludes={
        "'auto' chooses a number of steps: use training.local_steps, the fewest, "
        "instead of local_epochs": Thing.EPOCHS,
        "shared noise protects only one step per round: use unit = "
        '"record"': Thing.JOINT,
        "one site's pace shows in the steps of all, and its noise hides only its "
        "update": Thing.WHOLE_SITES,
    },
    private_because=(
        "noise is planned for all steps of the run, and each round is charged for its "
        "own before it takes them"
    ),
)
LARGER_STEPS = Method(
    name=Thing.LARGER_STEPS,
    key="training.accumulate_from",
    excludes={
        "it counts batches of steps: use training.local_steps, not "
        "local_epochs": Thing.EPOCHS,
        "larger steps raise the sampling rate for which noise is planned: lower "
        "training.learning_rate instead": Thing.JOINT,
        "the batches before a round must be known": Thing.CHOSEN_STEPS,
        "sites would wait for larger steps that are taken ahead": Thing.OVERLAP,
    },
    private_because="each round is charged for the sampling rate of its steps",
)
