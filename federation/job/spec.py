"""What a job is: frozen values, one class per table of the job file.

Every key carries its documentation, unit and range in its field; ``job_file``
reads files against them and the reference page is generated from them. Values
are checked one by one there; what cannot be seen in one value is refused by
``job_checks``. The ``[privacy]`` tables are in ``privacy_job``,
``[storage]`` in ``storage_job``, a site's ``flower_app`` in ``flower_app_job``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from federation.job.flower_app_job import FlowerAppSpec
from federation.job.job_keys import key
from federation.job.privacy_job import PrivacySpec
from federation.job.storage_job import StorageSpec

# Keys that other parts of the product will bring. Naming one is refused with this
# word instead of "unknown key", so that nobody believes it was in force.
PLANNED_KEYS: Mapping[str, str] = {
    "communication.overlap": "overlapped communication",
}

MAX_ROUNDS = 10**9
DEFAULT_CLIP_NORM = 10.0  # of an update under secure aggregation


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
        "example sub-packages of a text), `proportional` (at random, as many as "
        "`speeds` says).",
        default="iid",
        choices=("iid", "stratified", "dirichlet", "by_group", "proportional"),
    )
    speeds: tuple[float, ...] = key(
        "Speed of each site that is dealt to, in the order of the sites and in one "
        "unit, for example examples a second; `proportional` only. "
        "`crossfed data balance RUN` tells those that a run measured.",
        default=(),
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
        "`module:function` that returns `(train, held_out)`, called with `options`; "
        "or the URL that `crossfed data shard` wrote to."
    )
    options: Mapping[str, Any] = key(
        "Keyword arguments of the function; for a URL `version`, `order`, `window`, "
        "`warm_up`, `endpoint`, `region`.",
        default={},
    )
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

    @property
    def num_epochs(self) -> int:
        """``local_epochs``, in a job that has no ``local_steps``."""
        if self.local_epochs is None:
            raise ValueError("a checked job has steps or epochs")
        return self.local_epochs


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
class SiteDataSpec:
    """Data of one site alone, instead of a share of the job's dataset."""

    source: str = key(
        "`module:function` that returns `(train, held_out)`, or a URL as in `[data]`."
    )
    options: Mapping[str, Any] = key("Of the source, as in `[data]`.", default={})


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpec:
    """One site."""

    name: str = key("Its name: lower-case letters, digits, `.`, `_`, `-`.")
    cloud: str = key("Where it runs.", default="local", choices=("aws", "gcp", "local"))
    region: str = key("The cloud's name of the region.", default="")
    data: SiteDataSpec | None = key("Data of this site alone.", default=None)
    flower_app: FlowerAppSpec | None = key(
        "Set, `{}` for all defaults, where an existing Flower `ClientApp` takes part "
        "through a stock SuperNode; deployed and without privacy only.",
        default=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A misfortune to rehearse at one site (simulation only)."""

    site: str = key("Name of the site.")
    kind: str = key(
        "`crash` (raises), `silent` (never answers), `hang` (answers after "
        "`seconds`), `duplicate` (answers twice), `nan`, `inf`, `garbage` (random "
        "values of norm `scale`), `wrong_length`, `wrong_round`, `restart` (loses what "
        "it has in memory just before it is asked).",
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
            "restart",
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
class MachineSpec:
    """How fast a site and its line are (`simulate --engine virtual` only)."""

    site: str = key("Name of the site.")
    examples_per_second: float = key(
        "Examples that it trains on, or evaluates, in a second.", above=0.0
    )
    down_mbit: float = key(
        "Megabits a second from the aggregator to it.", default=100.0, above=0.0
    )
    up_mbit: float = key(
        "Megabits a second from it to the aggregator.", default=100.0, above=0.0
    )
    latency_seconds: float = key(
        "Time that a message takes beside its bytes.", default=0.0, low=0.0
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
    machines: tuple[MachineSpec, ...] = key(
        "Speed of each site, for `simulate --engine virtual`.", default=()
    )
    vouch_for_sources: bool = key(
        "Accept, under a unit of privacy, sources that do not declare their "
        "preprocessing. Deployed sites look at `data.preprocessing` of their own "
        "`site.toml` instead.",
        default=False,
    )
    total_epsilon: float | None = key(
        "Largest epsilon of all private runs beside this one on the same data, as a "
        "deployed site demands it with `policy.total_epsilon`; by default it is "
        "counted, and not limited.",
        default=None,
        above=0.0,
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
    def sites_in_sum(self) -> int:
        """Fewest updates that a secure sum of this job holds."""
        groups = self.privacy.secure_aggregation.groups
        return self.minimum_sites if groups is None else len(self.sites) // groups

    @property
    def update_clip_norm(self) -> float:
        """Largest norm of an update under secure aggregation, in weight units."""
        given = self.privacy.secure_aggregation.clip_norm
        private, training = self.privacy.differential_privacy, self.training
        if private.unit == "site":
            return private.clip_norm
        if given is None and private.unit == "joint":
            # A sample is rarely twice as large as expected, nor are all its
            # gradients parallel; a larger sum is scaled down, which costs no privacy.
            return 2 * training.optimizer.lr * private.clip_norm
        return DEFAULT_CLIP_NORM if given is None else given

    @property
    def cohort_size(self) -> int:
        """How many sites a round asks."""
        return self.schedule.sites_per_round or len(self.sites)
