"""What a job must not request whose local steps differ from the usual ones."""

from collections.abc import Iterator

from federation.errors import JobError
from federation.job.metrics import TRAINER
from federation.job.personal_checks import CLUSTERS
from federation.job.spec import JobSpec, ScheduleSpec

_FACTOR = 2
_PAIR = 2
_COARSE_BITS = 16


def check_local_work(job: JobSpec) -> None:
    """Refuse ranges that leave no choice, and work that must be planned.

    With twice the fewest steps allowed, the steps of a run always divide into rounds
    that are neither too short nor too long, and rounds can differ enough to measure.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    schedule, low = job.schedule, job.training.local_steps
    if schedule.local_work == "fixed":
        _check_unused(schedule)
        return
    if low is None:
        raise JobError(
            "'auto' chooses a number of steps: use training.local_steps, the fewest, "
            "instead of local_epochs",
            key="schedule.local_work",
        )
    if job.privacy.differential_privacy.enabled:
        raise JobError(
            "with differential privacy the steps of every round are planned and "
            "charged before the run, so they cannot follow the lines: use 'fixed'",
            key="schedule.local_work",
        )
    if any(site.flower_app is not None for site in job.sites):
        raise JobError(
            "an app of Flower does its own number of steps: use 'fixed'",
            key="schedule.local_work",
        )
    if schedule.max_local_steps is None or schedule.max_local_steps < _FACTOR * low:
        raise JobError(
            f"'auto' needs room to choose: set at least {_FACTOR * low}, twice "
            "training.local_steps",
            key="schedule.max_local_steps",
        )


def _check_unused(schedule: ScheduleSpec) -> None:
    default = ScheduleSpec()
    for name in ("max_local_steps", "training_share"):
        if getattr(schedule, name) != getattr(default, name):
            raise JobError(
                "has no effect with local_work = 'fixed': use 'auto', or remove this "
                "key",
                key=f"schedule.{name}",
            )


def check_larger_steps(job: JobSpec) -> None:
    """Refuse steps of more batches where every step must be like the others.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    training = job.training
    if not training.accumulate_from:
        return
    for reason in _reasons_for_equal_steps(job):
        raise JobError(reason, key="training.accumulate_from")
    before = 1
    for index, pair in enumerate(training.accumulate_from):
        key = f"training.accumulate_from[{index}]"
        if len(pair) != _PAIR or pair[1] < 1:
            raise JobError(
                "must be [first round, batches of a step], with at least 1 batch",
                key=key,
            )
        if not before < pair[0] <= job.rounds:
            raise JobError(
                f"round {pair[0]} must be after round {before} and at most the last "
                f"one, {job.rounds}",
                key=key,
            )
        before = pair[0]


def _reasons_for_equal_steps(job: JobSpec) -> Iterator[str]:
    training, private = job.training, job.privacy.differential_privacy
    if training.local_steps is None:
        yield "counts batches of steps: use training.local_steps, not local_epochs"
    if private.clips_gradients and private.in_sum:
        yield (
            f'with unit = "{private.unit}" all sites plan the noise of their sum for '
            "one sampling rate each, which a larger step would raise: remove this key, "
            "and lower the learning rate instead (training.learning_rate)"
        )
    if job.schedule.local_work != "fixed":
        yield (
            'the number of steps of a round is chosen with local_work = "auto", so '
            "that the batches before it are not known: use 'fixed'"
        )
    if training.overlap_steps:
        yield (
            "steps that are taken ahead have the size of their round, and sites would "
            "wait for them: remove training.overlap_steps, or this key"
        )
    if training.task == TRAINER:
        yield (
            "the Trainer of model.factory has one gradient_accumulation_steps: remove "
            "this key, or name another task"
        )
    if any(site.flower_app is not None for site in job.sites):
        yield "an app of Flower takes its own steps: remove this key"


def check_control_variates(job: JobSpec) -> None:
    """Refuse control variates where a site could not follow their mean by itself.

    Raises:
        JobError: The first reason.
    """
    if not job.training.control_variates:
        return
    for is_refused, reason in (
        *_other_gradients(job),
        *_other_means(job),
    ):
        if is_refused:
            raise JobError(
                f"{reason}, or remove this key", key="training.control_variates"
            )


def _other_gradients(job: JobSpec) -> Iterator[tuple[bool, str]]:
    """Where a site's update is not its learning rates times a mean gradient."""
    training = job.training
    optimizer, private = training.optimizer, job.privacy.differential_privacy
    yield (
        training.local_steps is None or job.schedule.local_work != "fixed",
        "all sites must take the same steps: use local_steps and 'fixed'",
    )
    yield (
        optimizer.name != "sgd" or bool(optimizer.momentum),
        "updates show a mean gradient only with plain sgd, without momentum: use it",
    )
    yield (
        training.clip_grad_norm is not None or training.proximal_mu > 0,
        (
            "clipping and the proximal term change the gradients that it corrects: "
            "remove clip_grad_norm and proximal_mu"
        ),
    )
    yield (
        training.overlap_steps > 0 or training.precision == "fp16",
        "every step must count: remove overlap_steps, and use fp32 or bf16",
    )
    yield (
        private.enabled,
        (
            "with differential privacy, updates hold noise and clipped gradients: "
            "train without"
        ),
    )


def _other_means(job: JobSpec) -> Iterator[tuple[bool, str]]:
    """Where the next model does not show the mean of all updates."""
    aggregation, links = job.aggregation, job.communication
    secure = job.privacy.secure_aggregation
    step = aggregation.server_optimizer
    yield (
        bool(job.relays),
        (
            "a round must go on without any one relay, and then its sites could not "
            "follow the mean: leave out [[relays]]"
        ),
    )
    yield (
        job.minimum_sites < len(job.sites),
        (
            "a site that is absent from a completed round cannot follow the mean: let "
            "every round need all sites (schedule.minimum_sites, "
            "privacy.secure_aggregation.threshold)"
        ),
    )
    yield (
        aggregation.combine != "mean" or aggregation.weights == "dynamic",
        (
            "variates cancel only in a mean with the same weights in every round: use "
            "combine = 'mean' with weights 'examples' or 'uniform'"
        ),
    )
    yield (
        (step.name, step.lr) != ("average", 1.0),
        (
            "a server optimiser hides the mean of all updates from the sites: leave "
            "out aggregation.server_optimizer"
        ),
    )
    yield (
        {links.codec.name, links.down_codec.name} != {"identity"}
        or secure.levels is not None,
        (
            "what a codec rounds away would add up in the variates: leave out codec, "
            "down_codec and levels"
        ),
    )
    yield (
        secure.ring_bits == _COARSE_BITS or secure.clip_elements,
        (
            "what rounding to 16 bits and clip_elements take from updates would add "
            "up in the variates: use at least 24 ring_bits, and leave out "
            "clip_elements"
        ),
    )
    yield (
        job.training.task == CLUSTERS,
        "a site trains one cluster, and the mean is of all: use one model",
    )
    yield (
        any(site.lora_rank is not None for site in job.sites),
        "all sites must train the same values: leave out lora_rank",
    )
