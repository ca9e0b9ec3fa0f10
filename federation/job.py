"""What a job is: frozen values, one class per table of the job file.

Every key carries its documentation, unit and range in its field; ``job_file``
reads files against them and the reference page is generated from them. Values
are checked one by one there; what cannot be seen in one value (combinations that
are unsafe, or that are not built yet) is refused here, in ``check``.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from federation.errors import JobError
from federation.ids import check_name

# Keys that other parts of the product will bring. Naming one is refused with this
# word instead of "unknown key", so that nobody believes it was in force.
PLANNED_KEYS: Mapping[str, str] = {
    "privacy.differential_privacy.target_epsilon": "differential privacy",
    "privacy.differential_privacy.delta": "differential privacy",
    "privacy.differential_privacy.clip_norm": "differential privacy",
    "communication.overlap": "overlapped communication",
    "storage.encryption": "encryption at rest",
}

MAX_ROUNDS = 10**9


def key(
    doc: str,
    *,
    default: Any = dataclasses.MISSING,
    choices: tuple[str, ...] = (),
    planned: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a key of the job file.

    Args:
        doc: What it does, with its unit, in one or two sentences.
        default: Its value when it is left out; without one it is required.
        choices: The words that it may be.
        planned: Words that will be choices and are not built yet.
        low: Smallest value that it may have.
        high: Largest value that it may have.
        above: Value that it must exceed.
        below: Value that it must not reach.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "planned": planned,
        "low": low,
        "high": high,
        "above": above,
        "below": below,
    }
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The model that is trained."""

    factory: str = key(
        "`module:function` that returns a `torch.nn.Module`; called with `options`."
    )
    options: Mapping[str, Any] = key("Keyword arguments of the factory.", default={})
    integer_buffers: Mapping[str, str] = key(
        "Role of integer and boolean buffers by name pattern: `keep` (each site "
        "keeps its own), `max` (largest of any site) or `from_server`. They are "
        "never averaged. Others: `max` for `*num_batches_tracked`, else "
        "`from_server`.",
        default={},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """How one dataset is dealt out to the sites of a simulation."""

    kind: str = key(
        "`iid` (at random), `stratified` (the same class shares everywhere), "
        "`dirichlet` (class shares drawn at random), `by_group` (whole groups, for "
        "example sub-packages of a text).",
        default="iid",
        choices=("iid", "stratified", "dirichlet", "by_group"),
    )
    alpha: float = key(
        "Concentration of the Dirichlet distribution: near 0 each class lives at "
        "one site, large values approach `stratified`.",
        default=1.0,
        above=0.0,
    )
    min_examples: int = key(
        "Training examples that every site must get; a draw that gives fewer is "
        "drawn again.",
        default=1,
        low=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The data, as one dataset that the simulation deals out."""

    source: str = key(
        "`module:function` that returns `(train, held_out)`; called with `options`."
    )
    options: Mapping[str, Any] = key("Keyword arguments of the source.", default={})
    partition: PartitionSpec = key(
        "How the data is dealt out to the sites (simulation only).",
        default=PartitionSpec(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimiser of local training; its state starts afresh in every round."""

    name: str = key("Algorithm.", default="sgd", choices=("sgd", "adam", "adamw"))
    lr: float = key("Learning rate.", default=0.01, above=0.0)
    momentum: float = key("Momentum; `sgd` only.", default=0.0, low=0.0, below=1.0)
    nesterov: bool = key("Nesterov momentum; `sgd` only.", default=False)
    betas: tuple[float, ...] = key(
        "The two decay rates of `adam` and `adamw`.", default=(0.9, 0.999)
    )
    weight_decay: float = key("Weight decay.", default=0.0, low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSpec:
    """How the learning rate moves over all local steps of the run."""

    name: str = key(
        "Course from the optimiser's `lr` to `final_fraction` of it.",
        default="constant",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = key(
        "Local steps, counted over the run, in which the rate rises linearly from 0.",
        default=0,
        low=0,
    )
    final_fraction: float = key(
        "Fraction of `lr` that is left at the end; not for `constant`.",
        default=0.0,
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Local training, the same at every site."""

    task: str = key(
        "`classification` (cross-entropy of one label per example) or `causal_lm` "
        "(cross-entropy of each next token).",
        default="classification",
        choices=("classification", "causal_lm"),
    )
    local_steps: int | None = key(
        "Optimiser steps of each site in a round. Either this or `local_epochs`. "
        "1 is FedSGD: the round then combines gradients.",
        default=None,
        low=1,
    )
    local_epochs: int | None = key(
        "Passes of each site over its own data in a round.", default=None, low=1
    )
    batch_size: int = key(
        "Examples of one forward and backward pass.", default=32, low=1
    )
    accumulate: int = key(
        "Batches whose gradients are averaged into one optimiser step.",
        default=1,
        low=1,
    )
    optimizer: OptimizerSpec = key("Local optimiser.", default=OptimizerSpec())
    learning_rate: LearningRateSpec = key(
        "Learning-rate schedule.", default=LearningRateSpec()
    )
    clip_grad_norm: float | None = key(
        "Largest Euclidean norm of a step's gradient; larger ones are scaled down.",
        default=None,
        above=0.0,
    )
    proximal_mu: float = key(
        "FedProx: strength mu of the pull `mu/2 |x - theta|^2` towards the global "
        "weights.",
        default=0.0,
        low=0.0,
    )
    precision: str = key(
        "`fp32`, or `bf16`: autocast of the forward pass with float32 weights.",
        default="fp32",
        choices=("fp32", "bf16"),
        planned=("fp16",),
    )
    device: str = key(
        "`auto` (the first CUDA device if there is one), `cpu`, `cuda` or `cuda:N`.",
        default="auto",
    )
    threads: int = key(
        "CPU threads of one site's arithmetic. Part of the job because results "
        "depend on it in the last bits, and on nothing else of the machine.",
        default=1,
        low=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Evaluation of the global model on the sites' held-out data."""

    every: int = key(
        "Evaluate the model after every so many rounds, and after the last; 0 for "
        "never.",
        default=1,
        low=0,
    )
    batch_size: int = key("Examples of one forward pass.", default=256, low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizerSpec:
    """What the aggregator does with the combined update."""

    name: str = key(
        "Algorithm; `average` with `lr = 1` is FedAvg.",
        default="average",
        choices=("average", "momentum", "nesterov", "adagrad", "adam", "yogi"),
    )
    lr: float = key("Server learning rate.", default=1.0, above=0.0)
    momentum: float = key(
        "Momentum of `momentum` and `nesterov`.", default=0.9, low=0.0, below=1.0
    )
    beta1: float = key(
        "Decay of the first moment: `adagrad`, `adam`, `yogi`.",
        default=0.9,
        low=0.0,
        below=1.0,
    )
    beta2: float = key(
        "Decay of the second moment: `adam`, `yogi`.", default=0.99, low=0.0, below=1.0
    )
    tau: float = key(
        "Adaptivity: added to the root of the second moment.", default=1e-3, above=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationSpec:
    """How updates become one step of the global model."""

    combine: str = key(
        "`mean`, or a rule that withstands `byzantine_sites` bad sites: "
        "`trimmed_mean`, `median`, `krum`, `multi_krum`.",
        default="mean",
        choices=("mean", "trimmed_mean", "median", "krum", "multi_krum"),
    )
    weights: str = key(
        "What a site counts: `examples` it holds, `uniform`, or `dynamic` (examples "
        "times its relative improvement of the loss on its held-out data).",
        default="examples",
        choices=("examples", "uniform", "dynamic"),
    )
    byzantine_sites: int = key(
        "Bad sites that `trimmed_mean`, `krum` and `multi_krum` must withstand.",
        default=0,
        low=0,
    )
    server_optimizer: ServerOptimizerSpec = key(
        "Server optimiser.", default=ServerOptimizerSpec()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """How an update is encoded on its way."""

    name: str = key(
        "`identity`: float32, 4 bytes a value.",
        default="identity",
        choices=("identity",),
        planned=("fp16", "bf16", "quantized", "sparse", "low_rank"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSpec:
    """What travels between the clouds."""

    codec: CodecSpec = key("Encoding of updates.", default=CodecSpec())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Who takes part in a round, and for how long it waits."""

    mode: str = key(
        "`synchronous`: a round ends before the next begins.",
        default="synchronous",
        choices=("synchronous",),
        planned=("buffered",),
    )
    round_deadline_seconds: float = key(
        "A site that has not answered by then is left out of the round.",
        default=600.0,
        above=0.0,
    )
    minimum_sites: int | None = key(
        "Quorum: with fewer answers the round is lost and the weights stay. "
        "All sites by default.",
        default=None,
        low=1,
    )
    max_lost_rounds: int = key(
        "The run stops after so many lost rounds in a row.", default=3, low=1
    )
    sites_per_round: int | None = key(
        "Sites drawn at random for each round; all of them by default.",
        default=None,
        low=1,
    )
    allocation: str = key(
        "`static`: every site does the same local work.",
        default="static",
        choices=("static",),
        planned=("capacity",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregationSpec:
    """Whether the aggregator sees single updates."""

    enabled: bool = key(
        "Hide single updates from the aggregator: it learns their sum alone.",
        default=False,
    )
    threshold: int | None = key(
        "Sites that must answer for a sum to be opened. All of them by default, in one "
        "exchange a round; or at least two thirds of them and one more, in three "
        "exchanges, so that the others may drop out.",
        default=None,
        low=2,
    )
    ring_bits: int = key(
        "Bits of an encoded value: 32 (4 bytes up), 24 or 16 (2 bytes up, coarser; for "
        "at most 16 sites).",
        default=32,
        low=16,
        high=32,
    )
    clip_norm: float = key(
        "Largest Euclidean norm of an update, in weight units; larger ones are scaled "
        "down. It sets the grid of the encoding: a tight bound is a fine grid.",
        default=10.0,
        above=0.0,
    )
    element_bound: float | None = key(
        "Largest value of an element of an update times its site's weight, in weight "
        "units, at most `clip_norm`. Far below it, it makes the grid that much finer; "
        "a site with a larger element declines the round. A public constant: never "
        "take it from private data.",
        default=None,
        above=0.0,
    )
    clip_elements: bool = key(
        "Clip elements beyond `element_bound` instead of declining the round.",
        default=False,
    )
    max_examples: int | None = key(
        "Examples that no site exceeds; every site sees this number. A simulation "
        "takes its largest site by default.",
        default=None,
        low=1,
    )
    hybrid: bool = key(
        "Rest the keys on ML-KEM-768 as well as on X25519, so that traffic recorded "
        "today stays closed to a quantum computer.",
        default=True,
    )
    two_sites_waiver: bool = key(
        "Accept that with two sites each can compute the other's update from the sum. "
        "Needed for two sites without record-level differential privacy.",
        default=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacySpec:
    """What the trained model may reveal of a single record."""

    unit: str = key(
        "Unit of privacy. Not built yet: only `none`.",
        default="none",
        choices=("none",),
        planned=("record", "joint", "site"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySpec:
    """Protection beyond keeping data where it is."""

    secure_aggregation: SecureAggregationSpec = key(
        "Secure aggregation.", default=SecureAggregationSpec()
    )
    differential_privacy: DifferentialPrivacySpec = key(
        "Differential privacy.", default=DifferentialPrivacySpec()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDataSpec:
    """Data of one site alone, instead of a share of the job's dataset."""

    source: str = key("`module:function` that returns `(train, held_out)`.")
    options: Mapping[str, Any] = key("Keyword arguments of the source.", default={})


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpec:
    """One site."""

    name: str = key("Its name: lower-case letters, digits, `.`, `_`, `-`.")
    cloud: str = key("Where it runs.", default="local", choices=("aws", "gcp", "local"))
    region: str = key("The cloud's name of the region.", default="")
    data: SiteDataSpec | None = key("Data of this site alone.", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A misfortune to rehearse at one site (simulation only)."""

    site: str = key("Name of the site.")
    kind: str = key(
        "`crash` (raises), `silent` (never answers), `hang` (answers after "
        "`seconds`), `duplicate` (answers twice), `nan`, `inf`, `garbage` (random "
        "values of norm `scale`), `wrong_length`, `wrong_round`.",
        choices=(
            "crash",
            "silent",
            "hang",
            "duplicate",
            "nan",
            "inf",
            "garbage",
            "wrong_length",
            "wrong_round",
        ),
    )
    rounds: tuple[int, ...] = key(
        "Rounds in which it happens; all of them when empty.", default=()
    )
    every: int = key("Only in every so many rounds.", default=1, low=1)
    seconds: float = key("How long `hang` takes.", default=1.0, above=0.0)
    scale: float = key(
        "Euclidean norm of `garbage`, in weight units.", default=100.0, above=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSpec:
    """What only a simulation has."""

    workers: int = key(
        "Sites that train at the same time; 0 for as many as the processor's cores "
        "allow. Results do not depend on it.",
        default=0,
        low=0,
    )
    faults: tuple[FaultSpec, ...] = key("Misfortunes to rehearse.", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """Where runs are kept."""

    url: str = key(
        "Folder of all runs: `file://` and a path, relative to the working "
        "directory, or `memory://` to keep nothing.",
        default="file://runs",
    )
    keep_checkpoints: int = key(
        "Checkpoints that are kept, newest first.", default=3, low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One federated training job."""

    name: str = key("Name of the job: lower-case letters, digits, `.`, `_`, `-`.")
    rounds: int = key("Rounds to run.", low=1, high=MAX_ROUNDS)
    seed: int = key(
        "Seed of everything random in a simulation: initial weights, partition, "
        "order of examples, cohorts.",
        default=0,
        low=0,
    )
    model: ModelSpec = key("The model.")
    data: DataSpec | None = key(
        "The data that is dealt out to the sites that name none of their own.",
        default=None,
    )
    training: TrainingSpec = key("Local training.")
    evaluation: EvaluationSpec = key("Evaluation.", default=EvaluationSpec())
    aggregation: AggregationSpec = key("Aggregation.", default=AggregationSpec())
    communication: CommunicationSpec = key(
        "Communication.", default=CommunicationSpec()
    )
    schedule: ScheduleSpec = key("Schedule.", default=ScheduleSpec())
    privacy: PrivacySpec = key("Privacy.", default=PrivacySpec())
    simulation: SimulationSpec = key("Simulation.", default=SimulationSpec())
    storage: StorageSpec = key("Storage.", default=StorageSpec())
    sites: tuple[SiteSpec, ...] = key("The sites, one `[[sites]]` table each.")

    @property
    def minimum_sites(self) -> int:
        """The quorum of a round."""
        secure = self.privacy.secure_aggregation
        if secure.enabled:
            return secure.threshold or len(self.sites)
        return self.schedule.minimum_sites or self.cohort_size

    @property
    def cohort_size(self) -> int:
        """How many sites a round asks."""
        return self.schedule.sites_per_round or len(self.sites)


def check(job: JobSpec) -> JobSpec:
    """Refuse what cannot work, is unsafe, or is not built yet.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    for rule in (
        _check_names,
        _check_data,
        _check_training,
        _check_optimizer,
        _check_privacy,  # First: it sets the quorum.
        _check_quorum,
        _check_robust_rule,
        _check_dynamic_weights,
        _check_buffers,
        _check_faults,
    ):
        rule(job)
    return job


def _check_names(job: JobSpec) -> None:
    try:
        check_name(job.name)
    except ValueError as error:
        raise JobError(str(error), key="name") from None
    if not job.sites:
        raise JobError("name at least one site in a [[sites]] table", key="sites")
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
    without = [site.name for site in job.sites if site.data is None]
    if job.data is None and without:
        raise JobError(
            f"site {without[0]!r} has no data: add a [data] table to deal out, or "
            "give the site a `data` of its own",
            key="data",
        )


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
    device = training.device
    known = device in {"auto", "cpu", "cuda"} or (
        device.startswith("cuda:") and device[5:].isdecimal()
    )
    if not known:
        raise JobError(
            f"{device!r} is not a device: use auto, cpu, cuda or cuda:N",
            key="training.device",
        )


def _check_optimizer(job: JobSpec) -> None:
    optimizer = job.training.optimizer
    table = "training.optimizer"
    if optimizer.name != "sgd":
        if optimizer.momentum:
            raise JobError(
                f"{optimizer.name!r} has no momentum: use betas",
                key=f"{table}.momentum",
            )
        if optimizer.nesterov:
            raise JobError(
                f"{optimizer.name!r} has no Nesterov form", key=f"{table}.nesterov"
            )
    elif optimizer.nesterov and not optimizer.momentum:
        raise JobError("Nesterov needs a momentum above 0", key=f"{table}.nesterov")
    if len(optimizer.betas) != 2 or not all(0 <= b < 1 for b in optimizer.betas):  # noqa: PLR2004
        raise JobError("give two numbers from 0 to below 1", key=f"{table}.betas")


def _check_quorum(job: JobSpec) -> None:
    schedule = job.schedule
    if job.cohort_size > len(job.sites):
        raise JobError(
            f"cannot draw {schedule.sites_per_round} of {len(job.sites)} sites",
            key="schedule.sites_per_round",
        )
    if job.minimum_sites > job.cohort_size:
        raise JobError(
            f"{job.minimum_sites} sites can never answer: a round asks "
            f"{job.cohort_size}",
            key="schedule.minimum_sites",
        )


def _check_robust_rule(job: JobSpec) -> None:
    aggregation = job.aggregation
    bad, rule = aggregation.byzantine_sites, aggregation.combine
    if rule == "mean":
        if bad:
            raise JobError(
                "a mean withstands no bad site; use trimmed_mean, median, krum or "
                "multi_krum",
                key="aggregation.byzantine_sites",
            )
        return
    if aggregation.weights != "uniform":
        raise JobError(
            f"{rule} counts every site once, or a site could buy influence with a "
            'large weight: set weights = "uniform"',
            key="aggregation.weights",
        )
    if bad == 0 and rule != "median":
        raise JobError(
            f"{rule} withstands as many bad sites as it is told to, and 0 would make "
            "it no safer than the mean: set it to 1 or more",
            key="aggregation.byzantine_sites",
        )
    needed = 2 * bad + (3 if rule in {"krum", "multi_krum"} else 1)
    if job.minimum_sites < needed:
        raise JobError(
            f"{rule} withstands {bad} bad sites only with at least {needed} answers, "
            f"and the quorum is {job.minimum_sites}",
            key="schedule.minimum_sites",
        )


def _check_dynamic_weights(job: JobSpec) -> None:
    if job.aggregation.weights == "dynamic" and job.evaluation.every != 1:
        raise JobError(
            "dynamic weights compare the loss before and after each round: set "
            "evaluation.every = 1",
            key="aggregation.weights",
        )


def _check_buffers(job: JobSpec) -> None:
    for pattern, role in job.model.integer_buffers.items():
        if role not in {"keep", "max", "from_server"}:
            raise JobError(
                f"{role!r} is not a role: use keep, max or from_server",
                key=f"model.integer_buffers.{pattern}",
            )


def _check_faults(job: JobSpec) -> None:
    names = {site.name for site in job.sites}
    for index, fault in enumerate(job.simulation.faults):
        if fault.site not in names:
            raise JobError(
                f"there is no site {fault.site!r}; the sites are "
                f"{', '.join(sorted(names))}",
                key=f"simulation.faults[{index}].site",
            )
        if any(round_index < 1 for round_index in fault.rounds):
            raise JobError(
                f"rounds count from 1, not {min(fault.rounds)}",
                key=f"simulation.faults[{index}].rounds",
            )


def _check_privacy(job: JobSpec) -> None:
    secure, table = job.privacy.secure_aggregation, "privacy.secure_aggregation"
    if not secure.enabled:
        return
    rule, num_sites = job.aggregation.combine, len(job.sites)
    refused = (
        (
            rule != "mean",
            "aggregation.combine",
            f"{rule} looks at single updates, and the server sees their sum: use mean",
        ),
        (
            job.aggregation.weights == "dynamic",
            "aggregation.weights",
            "dynamic weights need each site's loss, which is hidden: use examples",
        ),
        (
            job.schedule.sites_per_round is not None,
            "schedule.sites_per_round",
            "secure aggregation asks every site in every round: leave it out",
        ),
        (
            job.schedule.minimum_sites not in {None, job.minimum_sites},
            "schedule.minimum_sites",
            "under secure aggregation the quorum is its threshold: leave it out",
        ),
        (
            secure.ring_bits not in {16, 24, 32},
            f"{table}.ring_bits",
            f"{secure.ring_bits} is not a ring: choose 16, 24 or 32",
        ),
        (
            secure.ring_bits == 16 and num_sites > 16,  # noqa: PLR2004
            f"{table}.ring_bits",
            f"16 bits are too coarse for {num_sites} sites, beyond 16: use 24 or 32",
        ),
        (
            secure.element_bound is not None
            and secure.element_bound > secure.clip_norm,
            f"{table}.element_bound",
            f"no element exceeds clip_norm = {secure.clip_norm}: choose less, or none",
        ),
        (
            secure.clip_elements and secure.element_bound is None,
            f"{table}.clip_elements",
            "there is nothing to clip to: set element_bound",
        ),
        (
            num_sites < 2,  # noqa: PLR2004
            "sites",
            "a sum over one site hides nothing: name at least two",
        ),
        (
            num_sites == 2 and not secure.two_sites_waiver,  # noqa: PLR2004
            f"{table}.two_sites_waiver",
            "each of two sites can compute the other's update; true accepts that",
        ),
    )
    for is_refused, name, text in refused:
        if is_refused:
            raise JobError(text, key=name)
    _check_threshold(job)


def _check_threshold(job: JobSpec) -> None:
    num_sites, threshold = len(job.sites), job.minimum_sites
    smallest = 2 * num_sites // 3 + 1
    if not smallest <= threshold <= num_sites:
        raise JobError(
            f"{threshold} of {num_sites} sites is not from {smallest} to {num_sites}: "
            "fewer would let a lying aggregator open two sums of one round",
            key="privacy.secure_aggregation.threshold",
        )
