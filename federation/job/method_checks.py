"""What a job must not combine with an optional method, which says so as data."""

from collections.abc import Callable, Mapping

from federation.errors import JobError
from federation.job.metrics import TRAINER
from federation.job.personal_checks import CLUSTERS
from federation.job.spec import JobSpec
from federation.methods.method import Method, Thing
from federation.methods.registry import METHODS

_COARSE_BITS = 16


def _has_other_optimizer(job: JobSpec) -> bool:
    optimizer = job.training.optimizer
    return optimizer.name != "sgd" or bool(optimizer.momentum)


def _server_step(job: JobSpec) -> Thing:
    step = job.aggregation.server_optimizer
    if (step.name, step.lr) == ("average", 1.0):
        return Thing.PLAIN_MEAN
    return Thing.RUNNING_SUM if step.name == "running_sum" else Thing.SERVER_STEP


def _has_codec(job: JobSpec) -> bool:
    links = job.communication
    return {links.codec.name, links.down_codec.name} != {"identity"}


# Things that are missing here do not follow from the job alone: where they are known,
# ``federation.methods.registry.excluding`` finds who excludes them.
IN_A_JOB: Mapping[str, Callable[[JobSpec], bool]] = {
    Thing.EPOCHS: lambda job: job.training.local_steps is None,
    Thing.CHOSEN_STEPS: lambda job: job.schedule.local_work != "fixed",
    Thing.OTHER_OPTIMIZERS: _has_other_optimizer,
    Thing.CLIPPED_STEPS: lambda job: job.training.clip_grad_norm is not None,
    Thing.PROXIMAL: lambda job: job.training.proximal_mu > 0,
    Thing.NORMALIZED: lambda job: job.training.normalized_steps is not None,
    Thing.OVERLAP: lambda job: job.training.overlap_steps > 0,
    Thing.FLOAT16: lambda job: job.training.precision == "fp16",
    Thing.TRAINER: lambda job: job.training.task == TRAINER,
    Thing.FLOWER_APPS: lambda job: any(site.flower_app for site in job.sites),
    Thing.CLUSTERS: lambda job: job.training.task == CLUSTERS,
    Thing.FEWER_RANKS: lambda job: any(s.lora_rank is not None for s in job.sites),
    Thing.RELAYS: lambda job: bool(job.relays),
    Thing.PARTIAL_ROUNDS: lambda job: job.minimum_sites < len(job.sites),
    Thing.OTHER_COMBINE: lambda job: job.aggregation.combine != "mean",
    Thing.DYNAMIC_WEIGHTS: lambda job: job.aggregation.weights == "dynamic",
    Thing.PLAIN_MEAN: lambda job: _server_step(job) is Thing.PLAIN_MEAN,
    Thing.SERVER_STEP: lambda job: _server_step(job) is Thing.SERVER_STEP,
    Thing.RUNNING_SUM: lambda job: _server_step(job) is Thing.RUNNING_SUM,
    Thing.CODECS: _has_codec,
    Thing.LEVELS: lambda job: job.privacy.secure_aggregation.levels is not None,
    Thing.RING_16: (
        lambda job: job.privacy.secure_aggregation.ring_bits == _COARSE_BITS
    ),
    Thing.CLIP_ELEMENTS: lambda job: job.privacy.secure_aggregation.clip_elements,
    Thing.PRIVACY: lambda job: job.privacy.differential_privacy.enabled,
    **{method.name: method.is_on for method in METHODS},
}


def check_methods(job: JobSpec) -> list[JobError]:
    """Find what methods of the job exclude, and parts of methods that it does not use.

    Returns:
        At most one error for each method, with its key and what to write instead.
    """
    return [fault for method in METHODS if (fault := _fault(method, job)) is not None]


def _fault(method: Method, job: JobSpec) -> JobError | None:
    if method.is_on(job):
        for thing, reason in method.excludes.items():
            if thing in IN_A_JOB and IN_A_JOB[thing](job):
                return JobError(f"{reason}, or remove this key", key=method.dotted_key)
        return None
    for thing in method.only_with_it:
        if IN_A_JOB[thing](job):
            return JobError(
                f"{thing} is a part of {method.name}: set this key, or leave it out",
                key=method.dotted_key,
            )
    return None
