"""What a job must not request: rules over several values.

Combinations that are unsafe or cannot work are refused here, each with its key and
what to write instead; those of the ``[privacy]`` tables are in ``privacy_checks``. What
cannot be combined is in ``federation.methods``.
"""

import difflib
import math
import re
from collections.abc import Sequence

from federation.compression.choice import FOR_MODELS, unused
from federation.errors import JobError, joined
from federation.ids import check_name
from federation.job.adapter_ranks import check_ranks, ranks_of
from federation.job.flower_app_checks import check_flower_apps
from federation.job.method_checks import MEANS, check_methods
from federation.job.metrics import check_objective, is_function
from federation.job.privacy_checks import (
    check_differential_privacy,
    check_ring,
    check_secure_sum,
    check_standardise,
)
from federation.job.relay_checks import check_relays
from federation.job.selection_checks import check_selection
from federation.job.spec import (
    JobSpec,
    LearningRateSpec,
    OptimizerSpec,
    PartitionSpec,
)
from federation.methods.combining import ROBUST
from federation.methods.local_work import CHOSEN_STEPS

TRACKERS = ("tensorboard", "mlflow")  # Of ``simulation.live_metrics``.
RULES = (*MEANS, *map(str, ROBUST.on))
SCHEDULES = ("constant", "linear", "cosine")
# The first four have keys of their own. Not here: LBFGS, which calls the model several
# times a step, and SparseAdam, whose gradients cannot be clipped.
OPTIMIZERS = (
    *("sgd", "adam", "adamw", "muon"),
    *("adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam"),
    *("rmsprop", "rprop"),
)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FACTOR = 2  # Between the fewest and the most local steps of a round.
_PAIR = 2


def check(job: JobSpec) -> JobSpec:
    """Refuse what cannot work or is unsafe.

    Raises:
        JobError: All such things, each with its key and what to write instead.
    """
    _check_names(job)
    faults: list[JobError] = []
    for rule in (
        check_flower_apps,
        _check_data,
        check_methods,
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
        _check_quorum,
        _check_robust_rule,
        _check_buffers,
        check_ranks,
        _check_tokenizers,
        _check_simulation,
        check_relays,
        check_selection,
    ):
        try:
            faults += rule(job) or ()
        except JobError as error:
            faults.append(error)
    if faults:
        raise joined(faults)
    return job


def _check_names(job: JobSpec) -> None:
    try:
        check_name(job.name)
    except ValueError as error:
        raise JobError(str(error), key="name") from None
    if not job.sites:
        raise JobError("add at least one [[sites]] table", key="sites")
    seen: set[str] = set()
    for index, site in enumerate(job.sites):
        try:
            check_name(site.name)
        except ValueError as error:
            raise JobError(str(error), key=f"sites[{index}].name") from None
        if site.name in seen:
            raise JobError(
                f"two sites are called {site.name!r}", key=f"sites[{index}].name"
            )
        seen.add(site.name)


def _check_data(job: JobSpec) -> None:
    without = [
        site.name for site in job.sites if site.data is None and site.flower_app is None
    ]
    if job.data is None and without:
        raise JobError(
            f"site {without[0]!r} has no data: add a [data] table for the simulation "
            "to split, or give the site its own `data`",
            key="data",
        )
    if job.data is not None:
        _check_speeds(job.data.partition, len(without))


def _check_speeds(partition: PartitionSpec, num_sites: int) -> None:
    speeds, key = partition.speeds, "data.partition.speeds"
    if partition.kind != "proportional":
        if speeds:
            raise JobError(
                f'has no effect with {partition.kind!r}: use kind = "proportional"',
                key=key,
            )
        return
    if len(speeds) != num_sites:
        raise JobError(
            f"has {len(speeds)} numbers for the {num_sites} sites without data of "
            "their own: give one for each",
            key=key,
        )
    if not all(0 < speed < math.inf for speed in speeds):
        raise JobError(f"is {list(speeds)}: every speed must be above 0", key=key)


def _check_training(job: JobSpec) -> None:
    training = job.training
    if (training.local_steps is None) == (training.local_epochs is None):
        raise JobError(
            "set exactly one of local_steps and local_epochs",
            key="training.local_steps",
        )
    if training.learning_rate.name != "constant" and training.local_steps is None:
        raise JobError(
            f"{training.learning_rate.name!r} needs to know how many steps the run "
            "takes: use local_steps instead of local_epochs",
            key="training.learning_rate.name",
        )
    _check_schedule(training.learning_rate)
    device = training.device
    known = device in {"auto", "cpu", "cuda"} or (
        device.startswith("cuda:") and device[5:].isdecimal()
    )
    if not known:
        raise JobError(
            f"{device!r} is not a device: use auto, cpu, cuda or cuda:N",
            key="training.device",
        )


def _check_schedule(rate: LearningRateSpec) -> None:
    """Refuse unknown schedules, and options that no function takes."""
    key = "training.learning_rate"
    if is_function(rate.name):
        if rate.warmup_steps or rate.final_fraction:
            raise JobError(
                "your own schedule returns the whole factor of the rate: remove "
                "warmup_steps and final_fraction",
                key=f"{key}.name",
            )
        return
    if rate.name not in SCHEDULES:
        raise JobError(_unknown(rate.name, SCHEDULES), key=f"{key}.name")
    if rate.options:
        raise JobError(
            f"has no effect with {rate.name!r}: remove this key", key=f"{key}.options"
        )


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(known)}"
    return (
        f"{name!r:.80} is not a choice and not of the form module:function or "
        f"./file.py:function: {hint}"
    )


def _check_local_work(job: JobSpec) -> None:
    """Refuse ranges that leave no choice of a number of steps.

    With twice the fewest steps allowed, the steps of a run always divide into rounds
    that are neither too short nor too long, and rounds can differ enough to measure.
    """
    most, low = job.schedule.max_local_steps, job.training.local_steps
    if not CHOSEN_STEPS.is_on(job) or low is None:
        return
    if most is None or most < _FACTOR * low:
        raise JobError(
            f"'auto' needs room to choose: set at least {_FACTOR * low}, twice "
            "training.local_steps",
            key="schedule.max_local_steps",
        )


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


def _check_optimizer(job: JobSpec) -> None:
    optimizer = job.training.optimizer
    table = "training.optimizer"
    _check_optimizer_name(optimizer, table)
    if optimizer.name == "sgd":
        _check_sgd(optimizer, table)
    elif optimizer.name == "muon":
        _check_muon(optimizer, table)
    elif optimizer.momentum:
        raise JobError(
            f"{optimizer.name!r} has no momentum: use betas",
            key=f"{table}.momentum",
        )
    elif optimizer.nesterov:
        raise JobError(
            f"{optimizer.name!r} has no Nesterov form", key=f"{table}.nesterov"
        )
    if optimizer.adamw_parameters and optimizer.name != "muon":
        raise JobError(
            f"has no effect with {optimizer.name!r}, which steps all parameters: "
            "remove this key",
            key=f"{table}.adamw_parameters",
        )
    if len(optimizer.betas) != 2 or not all(0 <= b < 1 for b in optimizer.betas):  # noqa: PLR2004
        raise JobError(
            "give two numbers, each at least 0 and below 1", key=f"{table}.betas"
        )


def _check_optimizer_name(optimizer: OptimizerSpec, table: str) -> None:
    if optimizer.name not in OPTIMIZERS and not is_function(optimizer.name):
        raise JobError(_unknown(optimizer.name, OPTIMIZERS), key=f"{table}.name")
    if optimizer.options and optimizer.name in OPTIMIZERS[:4]:
        raise JobError(
            f"{optimizer.name!r} has keys of its own: use them, or remove this one",
            key=f"{table}.options",
        )
    if optimizer.weight_decay and is_function(optimizer.name):
        raise JobError(
            "is not passed to your own optimiser: give it in options",
            key=f"{table}.weight_decay",
        )


def _check_sgd(optimizer: OptimizerSpec, table: str) -> None:
    if optimizer.nesterov and not optimizer.momentum:
        raise JobError("Nesterov needs a momentum above 0", key=f"{table}.nesterov")


def _check_muon(optimizer: OptimizerSpec, table: str) -> None:
    if not optimizer.momentum:
        raise JobError(
            "'muon' orthogonalises a momentum: set one above 0; 0.95 is usual",
            key=f"{table}.momentum",
        )
    if optimizer.nesterov:
        raise JobError(
            "'muon' always takes Nesterov's form: remove this key",
            key=f"{table}.nesterov",
        )


def _check_quorum(job: JobSpec) -> None:
    schedule = job.schedule
    if job.cohort_size > len(job.sites):
        raise JobError(
            f"cannot draw {schedule.sites_per_round} of {len(job.sites)} sites",
            key="schedule.sites_per_round",
        )
    if job.minimum_sites > job.cohort_size:
        raise JobError(
            f"{job.minimum_sites} sites can never answer: a round has "
            f"{job.cohort_size}",
            key="schedule.minimum_sites",
        )


def _check_robust_rule(job: JobSpec) -> None:
    aggregation = job.aggregation
    bad, rule = aggregation.byzantine_sites, aggregation.combine
    if rule not in RULES and not is_function(rule):
        raise JobError(_unknown(rule, RULES), key="aggregation.combine")
    if rule not in ROBUST.on:
        return
    if bad == 0 and rule != "median":
        raise JobError(
            f"{rule} tolerates the number of bad sites given here, and with 0 it is no "
            "safer than the mean: set it to 1 or more",
            key="aggregation.byzantine_sites",
        )
    needed = 2 * bad + (3 if rule in {"krum", "multi_krum"} else 1)
    groups = job.privacy.secure_aggregation.groups
    if groups is not None and groups < needed:
        raise JobError(
            f"{rule} withstands {bad} bad sites only with at least {needed} groups, "
            f"since each may spoil the sum of its group; there are {groups}",
            key="privacy.secure_aggregation.groups",
        )
    if job.minimum_sites < needed:
        raise JobError(
            f"{rule} withstands {bad} bad sites only with at least {needed} answers, "
            f"and the quorum is {job.minimum_sites}",
            key="schedule.minimum_sites",
        )


def _check_codecs(job: JobSpec) -> None:
    """Refuse codecs that cannot do what they are named for, and keys without effect."""
    communication, rule = job.communication, job.aggregation.combine
    for way in ("codec", "down_codec"):
        spec = getattr(communication, way)
        if wrong := unused(spec.name, spec.options):
            raise JobError(
                f"it has no effect with {spec.name}: remove this key",
                key=f"communication.{way}.{wrong}",
            )
    down = communication.down_codec.name
    if communication.down_content == "model" and down not in FOR_MODELS:
        raise JobError(
            f"{down} loses most of a whole model: set communication.down_content = "
            f'"change", or choose {" or ".join(sorted(FOR_MODELS))}',
            key="communication.down_codec.name",
        )
    shares = communication.links.up.shares_support
    if rule == "contributor_mean" and shares and not ranks_of(job):
        raise JobError(
            "every site sends all values, or the same ones: use mean, or top_k as "
            "communication.codec.name",
            key="aggregation.combine",
        )


def _check_buffers(job: JobSpec) -> None:
    for pattern, role in job.model.integer_buffers.items():
        if role not in {"keep", "max", "from_server"}:
            raise JobError(
                f"{role!r} is not a role: use keep, max or from_server",
                key=f"model.integer_buffers.{pattern}",
            )


def _check_tokenizers(job: JobSpec) -> None:
    for index, digest in enumerate(job.model.tokenizers):
        if not _DIGEST.fullmatch(digest):
            raise JobError(
                f"is {digest!r:.80}, not a digest of 64 hexadecimal digits in lower "
                "case: clients.models.tokenizer shows it if none is given",
                key=f"model.tokenizers[{index}]",
            )


def _check_simulation(job: JobSpec) -> None:
    names = {site.name for site in job.sites}
    simulation = job.simulation
    places = [("faults", i, fault.site) for i, fault in enumerate(simulation.faults)]
    places += [("machines", i, m.site) for i, m in enumerate(simulation.machines)]
    for key, index, name in places:
        if name not in names:
            raise JobError(
                f"there is no site {name!r}; the sites are {', '.join(sorted(names))}",
                key=f"simulation.{key}[{index}].site",
            )
    named = [machine.site for machine in simulation.machines]
    for index, name in enumerate(named):
        if name in named[:index]:
            raise JobError(
                f"site {name!r} has two machines",
                key=f"simulation.machines[{index}].site",
            )
    for index, fault in enumerate(simulation.faults):
        if any(round_index < 1 for round_index in fault.rounds):
            raise JobError(
                f"rounds count from 1, not {min(fault.rounds)}",
                key=f"simulation.faults[{index}].rounds",
            )
    _check_live_metrics(simulation.live_metrics)


def _check_live_metrics(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in TRACKERS or name in names[:index]:
            raise JobError(
                f"must be {' or '.join(TRACKERS)}, each once at most, not {name!r}",
                key=f"simulation.live_metrics[{index}]",
            )
