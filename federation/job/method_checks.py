"""What a job must not combine with an optional method, which says so as data."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from federation.errors import JobError
from federation.job.metrics import (
    BUILT_IN,
    CORRECT,
    LABELLED,
    LANGUAGE,
    WEIGHTING,
    has_noised_results,
    is_function,
)
from federation.job.spec import JobSpec
from federation.methods.method import Method, Thing, places_of
from federation.methods.registry import METHODS

MEANS = ("mean", "contributor_mean")
_COARSE_BITS, _RING = 16, 32


def things(job: JobSpec) -> Mapping[str, bool]:
    """Whether a job asks for each thing that methods exclude, and for each method.

    Things that are missing here do not follow from the job alone: where they are known,
    ``federation.methods.registry.excluding`` finds who excludes them.
    """
    return {
        **_things_of_sites(job),
        **_things_of_rounds(job),
        **_things_of_privacy(job),
        **{method.name: method.is_on(job) for method in METHODS},
    }


def _things_of_sites(job: JobSpec) -> Mapping[str, bool]:
    model, training = job.model, job.training
    optimizer, rate, task = training.optimizer, training.learning_rate, training.task
    is_plain = optimizer.name == "sgd" and not optimizer.momentum
    choice = "choice.losses"
    kind = "by_person" if job.data is None else job.data.partition.kind
    dealt = [site for site in job.sites if site.data is None]
    return {
        Thing.STEPS: training.local_epochs is None,
        Thing.EPOCHS: training.local_steps is None,
        Thing.SEVERAL_STEPS: training.local_steps != 1,
        Thing.ALL_AHEAD: 0 < (training.local_steps or 0) <= training.overlap_steps,
        Thing.OTHER_OPTIMIZERS: not is_plain,
        Thing.PLAIN_SGD: is_plain,
        Thing.MUON: optimizer.name == "muon",
        Thing.WEIGHT_DECAY: optimizer.weight_decay > 0,
        Thing.WARM_UP: rate.warmup_steps > 0,
        Thing.RATE_SCHEDULE: rate.name != "constant",
        Thing.CLIPPED_STEPS: training.clip_grad_norm is not None,
        Thing.NO_WEIGHTS: model.weights is None,
        Thing.ADAPTERS: any(map(model.options.get, ("lora", "prompt"))),
        Thing.MAX_BUFFERS: "max" in model.integer_buffers.values(),
        Thing.FROZEN: bool(model.frozen),
        Thing.TOKENIZERS: bool(model.tokenizers),
        Thing.SHARED_CHOICE: not any(fnmatchcase(choice, p) for p in model.personal),
        Thing.OTHER_COUNTS: (
            not is_function(task) and BUILT_IN.get(task) not in (CORRECT, {})
        ),
        Thing.TOKENS: task in LANGUAGE,
        Thing.CONTRASTIVE: task == "contrastive",
        Thing.WEIGHTED_LOSS: bool(training.options.keys() & WEIGHTING),
        Thing.MEASURES: bool(training.measures or training.subgroups),
        Thing.CLASSES: bool(training.classes),
        Thing.DEALT_PERSONS: len(dealt) > 1 and kind != "by_person",
    }


def _things_of_rounds(job: JobSpec) -> Mapping[str, bool]:
    combine, step = job.aggregation.combine, job.aggregation.server_optimizer
    down, links = job.communication.down_codec.name, job.communication.links
    is_mean = (step.name, step.lr) == ("average", 1.0)
    return {
        Thing.PARTIAL_ROUNDS: job.fewest_updates < len(job.sites),
        Thing.ALL_ASKED: job.schedule.sites_per_round is None,
        Thing.MEAN: combine == "mean",
        Thing.OTHER_COMBINE: combine != "mean",
        Thing.UNGROUPED: (
            combine != "mean" and job.privacy.secure_aggregation.groups is None
        ),
        Thing.OWN_RULE: is_function(combine),
        Thing.OTHER_WEIGHTS: job.aggregation.weights != "uniform",
        Thing.PLAIN_MEAN: is_mean,
        Thing.RUNNING_SUM: step.name == "running_sum",
        Thing.SERVER_STEP: not is_mean and step.name != "running_sum",
        Thing.RARE_RESULTS: job.evaluation.every != 1,
        Thing.NO_RESULTS: job.evaluation.every == 0,
        Thing.OTHER_MODEL: job.selection is not None and job.selection.model != "last",
        Thing.CODECS: {job.communication.codec.name, down} != {"identity"},
        Thing.COMPARED_PLACES: combine not in MEANS and not links.up.shares_support,
        Thing.CHANGES: links.changes,
        Thing.SUMS_DOWN: links.sums,
        Thing.SUMS_OF_ROUNDED: links.sums and down != "identity",
    }


def _things_of_privacy(job: JobSpec) -> Mapping[str, bool]:
    secure, private = job.privacy.secure_aggregation, job.privacy.differential_privacy
    has_results = private.unit == "site" and job.evaluation.every > 0
    return {
        Thing.OPEN_UPDATES: not secure.enabled,
        Thing.SUMS_OF_ALL: (
            secure.enabled and not (job.schedule.groups or job.has_free_cohorts)
        ),
        Thing.FREE_SUMS: job.has_free_cohorts,
        Thing.OPEN_SUMS: secure.enabled and private.unit != "site",
        Thing.RING_16: secure.ring_bits == _COARSE_BITS,
        Thing.OTHER_RINGS: secure.ring_bits != _RING,
        Thing.CLIP_ELEMENTS: secure.clip_elements,
        Thing.NO_PRIVACY: not private.enabled,
        Thing.RECORDS: private.clips_gradients,
        Thing.SITE_RESULTS: has_results,
        Thing.MIXED_RESULTS: (
            has_noised_results(job) and job.training.task in {"contrastive", *LABELLED}
        ),
        Thing.RECORD_RESULTS: has_results and private.held_out == "noise",
    }


def check_methods(job: JobSpec) -> Iterator[JobError]:
    """Find what methods of the job exclude, and keys that have no effect.

    Yields:
        An error for each key of methods that exclude something, with all their reasons
        and what to write instead; and one for each key without effect.
    """
    asked = things(job)
    reasons, wholes = dict[str, list[str]](), dict[str, list[Method]]()
    for method in METHODS:
        for part in method.parts:
            wholes.setdefault(part, []).append(method)
        if not asked[method.name]:
            yield from _misplaced(method, asked)
            continue
        yield from _ignored(method, job)
        if found := list(_reasons(method, asked)):
            said = f"{'; '.join(found)}, or {method.instead}"
            reasons.setdefault(method.places(job)[0], []).append(said)
    for place, texts in reasons.items():
        yield JobError("; ".join(texts), key=place)
    for key, methods in wholes.items():
        if places_of(job, key) and not any(asked[method.name] for method in methods):
            needed = " or ".join(method.setting for method in methods)
            yield JobError(
                f"works only with {needed}: set that, or remove this key", key=key
            )


def _reasons(method: Method, asked: Mapping[str, bool]) -> Iterator[str]:
    found = dict[str, list[str]]()
    for thing, reason in method.excluded.items():
        if asked.get(thing):
            found.setdefault(reason, []).append(thing)
    for reason, names in found.items():
        without = f": do without {' and '.join(names)}"
        yield reason if ": " in reason else reason + without
    if not (found or method.private_because or asked[Thing.NO_PRIVACY]):
        yield (
            f"{method.name}: nobody has shown that differential privacy keeps its "
            "promises with this: train without"
        )


def _misplaced(method: Method, asked: Mapping[str, bool]) -> Iterator[JobError]:
    for thing in method.only_with_it:
        if asked[thing]:
            yield JobError(
                f"{thing} works only with {method.name}: set this key, or do without",
                key=method.key,
            )


def _ignored(method: Method, job: JobSpec) -> Iterator[JobError]:
    for key, reason in method.ignores.items():
        if places_of(job, key):
            yield JobError(
                f"has no effect with {method.setting}: {reason}; remove this key, or "
                f"{method.instead}",
                key=key,
            )
