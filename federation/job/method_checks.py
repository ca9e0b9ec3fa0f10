"""What a job must not combine with an optional method, which says so as data."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from federation.errors import JobError
from federation.job.metrics import BUILT_IN, CORRECT, WEIGHTING, is_function
from federation.job.spec import JobSpec
from federation.methods.method import Method, Path, Thing
from federation.methods.registry import METHODS

MEANS = ("mean", "contributor_mean")
_COARSE_BITS, _RING = 16, 32


def _has_other_optimizer(job: JobSpec) -> bool:
    optimizer = job.training.optimizer
    return optimizer.name != "sgd" or bool(optimizer.momentum)


def _takes_all_ahead(job: JobSpec) -> bool:
    return 0 < (job.training.local_steps or 0) <= job.training.overlap_steps


def _shares_choice(job: JobSpec) -> bool:
    patterns = job.model.personal
    return not any(fnmatchcase("choice.losses", each) for each in patterns)


def _has_other_counts(job: JobSpec) -> bool:
    task = job.training.task
    return not is_function(task) and BUILT_IN.get(task) not in (CORRECT, {})


def _server_step(job: JobSpec) -> Thing:
    step = job.aggregation.server_optimizer
    if (step.name, step.lr) == ("average", 1.0):
        return Thing.PLAIN_MEAN
    return Thing.RUNNING_SUM if step.name == "running_sum" else Thing.SERVER_STEP


def _has_open_sums(job: JobSpec) -> bool:
    privacy = job.privacy
    return privacy.secure_aggregation.enabled and (
        privacy.differential_privacy.unit != "site"
    )


def _shows_results_of_sites(job: JobSpec) -> bool:
    unit = job.privacy.differential_privacy.unit
    return unit == "site" and job.evaluation.every > 0


def _has_codec(job: JobSpec) -> bool:
    links = job.communication
    return {links.codec.name, links.down_codec.name} != {"identity"}


# Things that are missing here do not follow from the job alone: where they are known,
# ``federation.methods.registry.excluding`` finds who excludes them.
IN_A_JOB: Mapping[str, Callable[[JobSpec], bool]] = {
    Thing.STEPS: lambda job: job.training.local_epochs is None,
    Thing.EPOCHS: lambda job: job.training.local_steps is None,
    Thing.OTHER_OPTIMIZERS: _has_other_optimizer,
    Thing.PLAIN_SGD: lambda job: not _has_other_optimizer(job),
    Thing.MUON: lambda job: job.training.optimizer.name == "muon",
    Thing.WEIGHT_DECAY: lambda job: job.training.optimizer.weight_decay > 0,
    Thing.WARM_UP: lambda job: job.training.learning_rate.warmup_steps > 0,
    Thing.CLIPPED_STEPS: lambda job: job.training.clip_grad_norm is not None,
    Thing.ALL_AHEAD: _takes_all_ahead,
    Thing.NO_WEIGHTS: lambda job: job.model.weights is None,
    Thing.ADAPTERS: lambda job: any(map(job.model.options.get, ("lora", "prompt"))),
    Thing.OTHER_COUNTS: _has_other_counts,
    Thing.WEIGHTED_LOSS: lambda job: bool(job.training.options.keys() & WEIGHTING),
    Thing.MEASURES: lambda job: bool(job.training.measures),
    Thing.CLASSES: lambda job: bool(job.training.classes),
    Thing.FROZEN: lambda job: bool(job.model.frozen),
    Thing.TOKENIZERS: lambda job: bool(job.model.tokenizers),
    Thing.SHARED_CHOICE: _shares_choice,
    Thing.PARTIAL_ROUNDS: lambda job: job.minimum_sites < len(job.sites),
    Thing.SAMPLES: lambda job: job.schedule.sites_per_round is not None,
    Thing.OTHER_COMBINE: lambda job: job.aggregation.combine != "mean",
    Thing.ROBUST: lambda job: job.aggregation.combine not in MEANS,
    Thing.DYNAMIC_WEIGHTS: lambda job: job.aggregation.weights == "dynamic",
    Thing.PLAIN_MEAN: lambda job: _server_step(job) is Thing.PLAIN_MEAN,
    Thing.SERVER_STEP: lambda job: _server_step(job) is Thing.SERVER_STEP,
    Thing.RUNNING_SUM: lambda job: _server_step(job) is Thing.RUNNING_SUM,
    Thing.OTHER_MODEL: lambda job: (
        job.selection is not None and job.selection.model != "last"
    ),
    Thing.CODECS: _has_codec,
    Thing.CODECS_UP: lambda job: job.communication.codec.name != "identity",
    Thing.NOT_WHOLE: lambda job: job.communication.down_content != "model",
    Thing.SUMS_DOWN: lambda job: job.communication.links.sums,
    Thing.SUMS_OF_ROUNDED: lambda job: (
        job.communication.links.sums and job.communication.down_codec.name != "identity"
    ),
    Thing.FRAGMENTS: lambda job: job.communication.fragments > 1,
    Thing.OPEN_UPDATES: lambda job: not job.privacy.secure_aggregation.enabled,
    Thing.SECURE: lambda job: job.privacy.secure_aggregation.enabled,
    Thing.OPEN_SUMS: _has_open_sums,
    Thing.GROUPS: lambda job: job.privacy.secure_aggregation.groups is not None,
    Thing.RING_16: (
        lambda job: job.privacy.secure_aggregation.ring_bits == _COARSE_BITS
    ),
    Thing.OTHER_RINGS: lambda job: job.privacy.secure_aggregation.ring_bits != _RING,
    Thing.ELEMENT_BOUND: lambda job: (
        job.privacy.secure_aggregation.element_bound is not None
    ),
    Thing.CLIP_ELEMENTS: lambda job: job.privacy.secure_aggregation.clip_elements,
    Thing.PRIVACY: lambda job: job.privacy.differential_privacy.enabled,
    Thing.RECORDS: lambda job: job.privacy.differential_privacy.clips_gradients,
    Thing.WHOLE_SITES: lambda job: job.privacy.differential_privacy.unit == "site",
    Thing.JOINT: lambda job: job.privacy.differential_privacy.unit == "joint",
    Thing.SITE_RESULTS: _shows_results_of_sites,
    **{method.name: method.is_on for method in METHODS},
}


def check_methods(job: JobSpec) -> Iterator[JobError]:
    """Find what methods of the job exclude, and keys that have no effect.

    Yields:
        At most one error for each method that is on, with its key and what to write
        instead; and one for each key without effect.
    """
    for method in METHODS:
        places = method.places(job)
        if places:
            yield from _excluded(method, job, places[0])
        else:
            yield from _parts(method, job)


def _excluded(method: Method, job: JobSpec, place: str) -> Iterator[JobError]:
    for thing, reason in method.excludes.items():
        if thing in IN_A_JOB and IN_A_JOB[thing](job):
            advice = "" if ": " in reason else f": do without {thing}"
            yield JobError(f"{reason}{advice}, or {method.instead}", key=place)
            break
    else:
        if not method.private_because and IN_A_JOB[Thing.PRIVACY](job):
            yield JobError(
                f"{method.name}: nobody has shown that differential privacy keeps its "
                f"promises with this: train without, or {method.instead}",
                key=place,
            )
    for path, reason in method.ignores.items():
        if _is_set(job, path):
            yield JobError(
                f"has no effect with {method.setting}: {reason}, and remove this key, "
                f"or {method.instead}",
                key=".".join(path),
            )


def _parts(method: Method, job: JobSpec) -> Iterator[JobError]:
    for thing in method.only_with_it:
        if IN_A_JOB[thing](job):
            yield JobError(
                f"{thing} works only with {method.name}: set this key, or do without",
                key=method.dotted_key,
            )
    for path in method.parts:
        if _is_set(job, path):
            yield JobError(
                f"has no effect without {method.setting}: set that, or remove this key",
                key=".".join(path),
            )


def _is_set(job: JobSpec, path: Path) -> bool:
    """Whether a key has another value than its default."""
    table = functools.reduce(getattr, path[:-1], job)
    field = {each.name: each for each in dataclasses.fields(table)}[path[-1]]
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(getattr(table, path[-1]) != default)
