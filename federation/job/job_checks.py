"""What a job must not request: values that cannot work, or only with others.

Each is refused with its key and what to write instead; those of the ``[privacy]``
tables are in ``privacy_checks``, those of sites and relays in ``site_checks``. What
cannot be combined is in ``federation.methods``.
"""

import difflib
import re
from collections.abc import Sequence

from federation.compression.choice import FOR_MODELS, unused
from federation.errors import JobError, broken, joined
from federation.job.adapter_ranks import check_ranks, ranks_of
from federation.job.evaluation_job import check_evaluation
from federation.job.method_checks import MEANS, check_methods
from federation.job.metrics import check_objective, is_function
from federation.job.privacy_checks import (
    check_differential_privacy,
    check_ring,
    check_secure_sum,
    check_standardise,
)
from federation.job.selection_checks import check_selection
from federation.job.site_checks import (
    check_data,
    check_flower_apps,
    check_names,
    check_relays,
    check_simulation,
)
from federation.job.spec import JobSpec
from federation.job.statistics_checks import check_statistics
from federation.methods.capacity import CAPACITY
from federation.methods.combining import FAIR, ROBUST, UTILITY
from federation.methods.local_work import CHOSEN_STEPS

RULES = (*MEANS, *map(str, ROBUST.on))
SAMPLING = ("uniform", *map(str, (*FAIR.on, *UTILITY.on)))
SCHEDULES = ("constant", "linear", "cosine")
# The first four have keys of their own. Not here: LBFGS, which calls the model several
# times a step, and SparseAdam, whose gradients cannot be clipped.
OPTIMIZERS = (
    *("sgd", "adam", "adamw", "muon"),
    *("adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam"),
    *("rmsprop", "rprop"),
)

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FACTOR = 2  # Between the fewest and the most local steps of a round.
_PAIR = 2
_PATTERN = re.compile(r"[a-z0-9._*?-]+", re.ASCII)


def check(job: JobSpec) -> JobSpec:
    """Refuse what cannot work or is unsafe.

    Raises:
        JobError: All such things, each with its key and what to write instead.
    """
    check_names(job)
    faults: list[JobError] = []
    for rule in (
        check_flower_apps,
        check_data,
        check_methods,
        check_statistics,
        check_objective,
        _check_training,
        _check_local_work,
        _check_larger_steps,
        _check_optimizer,
        _check_codecs,
        check_secure_sum,  # First: it sets the quorum.
        check_ring,
        check_differential_privacy,
        check_standardise,
        _check_combining,
        _check_model,
        check_ranks,
        check_simulation,
        check_relays,
        check_selection,
        check_evaluation,
    ):
        try:
            faults += rule(job) or ()
        except JobError as error:
            faults.append(error)
    if faults:
        raise joined(faults)
    return job


def _check_training(job: JobSpec) -> list[JobError]:
    training, rate = job.training, job.training.learning_rate
    steps, epochs, device = training.local_steps, training.local_epochs, training.device
    name, is_own, key = rate.name, is_function(rate.name), "training.learning_rate"
    rules = {
        "training.local_steps: set exactly one of local_steps and local_epochs": (
            steps is None
        )
        == (epochs is None),
        f"{key}.name: {name!r} needs to know how many steps the run takes: use "
        "local_steps instead of local_epochs": name != "constant" and steps is None,
        f"{key}.name: {_unknown(name, SCHEDULES)}": not (is_own or name in SCHEDULES),
        f"{key}.name: your own schedule returns the whole factor of the rate: remove "
        "warmup_steps and "
        "final_fraction": is_own and (rate.warmup_steps or rate.final_fraction),
        f"{key}.options: has no effect with {name!r}: remove this key": rate.options
        and not is_own,
        f"training.device: {device!r} is not a device: use auto, cpu, cuda or "
        "cuda:N": not _DEVICE.fullmatch(device),
    }
    return broken(rules)


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(known)}"
    return (
        f"{name!r:.80} is not a choice and not of the form module:function or "
        f"./file.py:function: {hint}"
    )


def _check_local_work(job: JobSpec) -> list[JobError]:
    """Refuse ranges that leave no choice of a number of steps.

    With twice the fewest steps allowed, the steps of a run always divide into rounds
    that are neither too short nor too long, and rounds can differ enough to measure.
    """
    most, each = job.schedule.max_local_steps, job.training.local_steps or 0
    rules = {
        "schedule.max_local_steps: 'auto' needs room to choose: set at least "
        f"{_FACTOR * each}, twice training.local_steps": (
            CHOSEN_STEPS.is_on(job) and _FACTOR * each > (most or 0)
        ),
        f"schedule.max_local_steps: sites take {each} steps on average "
        "(training.local_steps): set at least as many": (
            CAPACITY.is_on(job) and most is not None and most < each
        ),
    }
    return broken(rules)


def _check_larger_steps(job: JobSpec) -> None:
    before = 1
    for index, pair in enumerate(job.training.accumulate_from):
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


def _check_optimizer(job: JobSpec) -> list[JobError]:
    optimizer, table = job.training.optimizer, "training.optimizer"
    name, is_own = optimizer.name, is_function(optimizer.name)
    momentum, nesterov, betas = optimizer.momentum, optimizer.nesterov, optimizer.betas
    is_sgd, is_muon, has_keys = name == "sgd", name == "muon", name in OPTIMIZERS[:4]
    is_other = not (is_sgd or is_muon)
    rules = {
        f"{table}.name: {_unknown(name, OPTIMIZERS)}": not (
            is_own or name in OPTIMIZERS
        ),
        f"{table}.options: {name!r} has keys of its own: use them, or remove this "
        "one": optimizer.options and has_keys,
        f"{table}.weight_decay: is not passed to your own optimiser: give it in "
        "options": optimizer.weight_decay and is_own,
        f"{table}.nesterov: Nesterov needs a momentum above 0": is_sgd
        and nesterov
        and not momentum,
        f"{table}.momentum: 'muon' orthogonalises a momentum: set one above 0; 0.95 is "
        "usual": is_muon and not momentum,
        f"{table}.nesterov: 'muon' always takes Nesterov's form: remove this "
        "key": is_muon and nesterov,
        f"{table}.momentum: {name!r} has no momentum: use betas": is_other and momentum,
        f"{table}.nesterov: {name!r} has no Nesterov form": is_other and nesterov,
        f"{table}.adamw_parameters: has no effect with {name!r}, which steps all "
        "parameters: remove this key": optimizer.adamw_parameters and not is_muon,
        f"{table}.betas: give two numbers, each at least 0 and below 1": len(betas)
        != _PAIR
        or not all(0 <= beta < 1 for beta in betas),
    }
    return broken(rules)


def _check_codecs(job: JobSpec) -> list[JobError]:
    """Refuse codecs that cannot do what they are named for, and keys without effect."""
    communication, down = job.communication, job.communication.down_codec.name
    is_whole = communication.down_content == "model"
    sends_all = communication.links.up.shares_support and not ranks_of(job)
    ways = {"codec": communication.codec, "down_codec": communication.down_codec}
    rules: dict[str, object] = {
        f"communication.{way}.{wrong}: it has no effect with {spec.name}: remove this "
        "key": True
        for way, spec in ways.items()
        if (wrong := unused(spec.name, spec.options))
    }
    rules |= {
        f"communication.down_codec.name: {down} loses most of a whole model: set "
        'communication.down_content = "change", or choose '
        f"{' or '.join(sorted(FOR_MODELS))}": is_whole and down not in FOR_MODELS,
        "aggregation.combine: every site sends all values, or the same ones: use mean, "
        "or top_k as "
        "communication.codec.name": (
            sends_all and job.aggregation.combine == "contributor_mean"
        ),
    }
    return broken(rules)


def _check_combining(job: JobSpec) -> list[JobError]:
    rule, bad = job.aggregation.combine, job.aggregation.byzantine_sites
    buffer, secure = job.buffer_size or 0, job.privacy.secure_aggregation.enabled
    quorum = "privacy.secure_aggregation.threshold" if secure else "minimum_sites"
    fewest, groups = job.minimum_sites, job.privacy.secure_aggregation.groups
    is_robust, cohort = rule in ROBUST.on, job.sites_per_round
    sampling = job.schedule.sampling
    asked = job.wanted_sites
    grouped = sorted(site for group in job.schedule.groups for site in group)
    needed = 2 * bad + (3 if rule in {"krum", "multi_krum"} else 1) if is_robust else 0
    rules = {
        f"schedule.sites_per_round: cannot draw {cohort} of {len(job.sites)} "
        "sites": cohort > len(job.sites),
        f"schedule.over_selection: asks for {asked} sites, and the job has "
        f"{len(job.sites)}: set it to {len(job.sites) / (cohort or 1):.4g} or "
        "less": asked > len(job.sites) >= cohort,
        f"schedule.minimum_sites: {fewest} sites can never answer: a round has "
        f"{cohort}": fewest > cohort and not buffer,
        f"schedule.buffer_size: {buffer} updates never come together: a site is in a "
        f"buffer once, and the job's sites are {len(job.sites)}": (
            buffer > len(job.sites)
        ),
        f"schedule.groups: must name each site of the job once, not "
        f"{', '.join(grouped)}": (
            bool(grouped) and grouped != sorted(site.name for site in job.sites)
        ),
        "schedule.open_to: gives names of sites, in which * stands for any part: "
        f"{', '.join(map(repr, job.schedule.open_to))}": not all(
            map(_PATTERN.fullmatch, job.schedule.open_to)
        ),
        "schedule.grace: has no effect, since a round needs all its sites: set "
        f"{quorum}, or remove this key": (
            job.schedule.grace is not None and not buffer and fewest == cohort
        ),
        f"schedule.sampling: {_unknown(sampling, SAMPLING)}": not (
            sampling in SAMPLING or is_function(sampling)
        ),
        f"aggregation.combine: {_unknown(rule, RULES)}": not (
            rule in RULES or is_function(rule)
        ),
        f"aggregation.byzantine_sites: {rule} tolerates the number of bad sites given "
        "here, and with 0 it is no safer than the mean: set it to 1 or "
        "more": is_robust and bad == 0 and rule != "median",
        f"privacy.secure_aggregation.groups: {rule} withstands {bad} bad sites only "
        f"with at least {needed} groups, since each may spoil the sum of its group; "
        f"there are {groups}": groups is not None and groups < needed,
        f"schedule.minimum_sites: {rule} withstands {bad} bad sites only with at least "
        f"{needed} answers, and the quorum is {fewest}": fewest < needed,
    }
    return broken(rules)


def _check_model(job: JobSpec) -> list[JobError]:
    rules = {
        f"model.integer_buffers.{pattern}: {role!r} is not a role: use keep, max or "
        "from_server": role not in {"keep", "max", "from_server"}
        for pattern, role in job.model.integer_buffers.items()
    } | {
        f"model.tokenizers[{index}]: is {digest!r:.80}, not a digest of 64 hexadecimal "
        "digits in lower case: clients.models.tokenizer shows it if none is "
        "given": not _DIGEST.fullmatch(digest)
        for index, digest in enumerate(job.model.tokenizers)
    }
    return broken(rules)
