"""What a job must not combine with an optional method, which says so as data."""

from collections.abc import Callable, Mapping

from federation.errors import JobError
from federation.job.metrics import TRAINER
from federation.job.personal_checks import CLUSTERS
from federation.job.spec import JobSpec
from federation.methods.method import Thing
from federation.methods.registry import METHODS, excluding

_COARSE_BITS = 16


def _has_other_optimizer(job: JobSpec) -> bool:
    optimizer = job.training.optimizer
    return optimizer.name != "sgd" or bool(optimizer.momentum)


def _has_server_step(job: JobSpec) -> bool:
    step = job.aggregation.server_optimizer
    return (step.name, step.lr) != ("average", 1.0)


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
    Thing.SERVER_STEP: _has_server_step,
    Thing.CODECS: _has_codec,
    Thing.LEVELS: lambda job: job.privacy.secure_aggregation.levels is not None,
    Thing.RING_16: (
        lambda job: job.privacy.secure_aggregation.ring_bits == _COARSE_BITS
    ),
    Thing.CLIP_ELEMENTS: lambda job: job.privacy.secure_aggregation.clip_elements,
    Thing.PRIVACY: lambda job: job.privacy.differential_privacy.enabled,
    **{method.name: method.is_on for method in METHODS},
}


def check_methods(job: JobSpec) -> None:
    """Refuse what an optional method of the job excludes.

    Raises:
        JobError: The first such thing, with the method's key and what to write instead.
    """
    for thing, is_in in IN_A_JOB.items():
        for method, reason in excluding(job, thing):
            if is_in(job):
                raise JobError(f"{reason}, or remove this key", key=method.dotted_key)
