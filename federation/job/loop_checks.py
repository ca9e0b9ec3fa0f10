"""What a job cannot set or ask for where the loop is the user's own Trainer."""

from collections.abc import Mapping

from federation.errors import JobError
from federation.job.metrics import TRAINER
from federation.job.spec import EvaluationSpec, JobSpec, TrainingSpec

# Keys without effect, each with the argument of TrainingArguments that is read instead.
_OF_THE_TRAINER: Mapping[str, str] = {
    "optimizer": "optim, learning_rate and weight_decay",
    "learning_rate": "lr_scheduler_type and warmup_steps",
    "clip_grad_norm": "max_grad_norm",
    "precision": "bf16 or fp16",
    "options": "label_smoothing_factor, or compute_loss_func of the Trainer",
}
# Keys that change steps in ways which such a loop does not know.
_OF_OUR_LOOP = (
    "proximal_mu",
    "normalized_steps",
    "overlap_steps",
    "max_tokens",
)


def check_loop(job: JobSpec) -> None:
    """Refuse what the loop of a ``transformers.Trainer`` does not do.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    training = job.training
    if training.task != TRAINER:
        return
    unit = job.privacy.differential_privacy.unit
    if job.privacy.differential_privacy.clips_gradients:
        raise JobError(
            "a Trainer's loop computes the gradient of a whole batch, so that what one "
            f'record adds cannot be clipped, as unit = "{unit}" must: use '
            'unit = "site", or another training.task, which trains the model and data '
            "of the same Trainer in the loop of the job",
            key="training.task",
        )
    default = TrainingSpec()
    for name, argument in _OF_THE_TRAINER.items():
        if getattr(training, name) != getattr(default, name):
            raise JobError(
                f'has no effect with task = "{TRAINER}": set {argument} in the '
                "TrainingArguments, and remove this key",
                key=f"training.{name}",
            )
    for name in _OF_OUR_LOOP:
        if getattr(training, name) != getattr(default, name):
            raise JobError(
                f'has no effect with task = "{TRAINER}": remove this key, or name '
                "another task",
                key=f"training.{name}",
            )
    _check_rounds(job)
    if job.evaluation.batch_size != EvaluationSpec().batch_size:
        raise JobError(
            f'has no effect with task = "{TRAINER}": set per_device_eval_batch_size in '
            "the TrainingArguments, and remove this key",
            key="evaluation.batch_size",
        )


def _check_rounds(job: JobSpec) -> None:
    if job.schedule.local_work != "fixed":
        raise JobError(
            "the schedule of a Trainer is made for rounds of equal length: use "
            "'fixed', or name another task",
            key="schedule.local_work",
        )
    if job.model.keep_zeros:
        raise JobError(
            "a Trainer's loop changes zeros like all other values: remove this key, or "
            "name another task",
            key="model.keep_zeros",
        )
    if job.model.personal:
        raise JobError(
            "a Trainer's loop keeps nothing at a site from round to round: remove "
            "this key, or name another task",
            key="model.personal",
        )
