"""What a job is: frozen values, one class per table of the job file.

A row is a key: its type, its default and its range; what it does is in the class's
docstring, with its unit. ``job_file`` reads files against the rows, and the reference
page is generated from both. Values are checked one by one there; what cannot be seen
in one value is refused by ``job_checks``. The ``[privacy]`` tables are in
``privacy_job``, ``[storage]`` in ``storage_job``, ``[selection]`` in
``selection_job``, ``[statistics]`` in ``statistics_job``, a site's ``flower_app`` in
``flower_app_job``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from federation.compression import choice, codec as codecs
from federation.job.flower_app_job import FlowerAppSpec
from federation.job.job_keys import key
from federation.job.privacy_job import MAX_FRAGMENTS, PrivacySpec
from federation.job.selection_job import SelectionSpec
from federation.job.statistics_job import StatisticsSpec
from federation.job.storage_job import StorageSpec

MAX_ROUNDS = 10**9
LEARNT = "learnt"  # Of ``schedule.grace``.
GOOD_SHARE = 0.97  # Of its time that a site trains, where machines are dear.
_ROUNDING = 1e-9  # 1.1 times 10 is 11, and a little more in float64.
DEFAULT_CLIP_NORM = 10.0  # of an update under secure aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The model that is trained.

    Attributes:
        factory: `module:function`, or `./file.py:function` relative to the job file,
            that returns a `torch.nn.Module`; called with `options`.
        options: Keyword arguments of the factory.
        integer_buffers: Role of integer and boolean buffers, which are never averaged,
            by name pattern: `keep` (each site keeps its own), `max` (largest of any
            site) or `from_server`. Default: `max` for `*num_batches_tracked`, else
            `from_server`.
        frozen: Name patterns of parameters that are neither trained nor sent. Each site
            takes them from the factory, and is refused if they differ.
        personal: Name patterns of tensors that each site trains for itself, from the
            factory's values, and never sends. Evaluation uses each site's own. Integer
            and boolean buffers among them get the role `keep`.
        weights: Weights to start from: a safetensors file or the folder of a completed
            run, relative to the job file or the working folder, or `s3://BUCKET/KEY`,
            `gs://BUCKET/KEY` of a file or an export. Loading the job adds a digest,
            with which sites compare the first model.
        keep_zeros: Whether values that are 0 in `weights` stay 0, so that a model from
            `crossfed prune` stays as sparse.
        tokenizers: SHA-256 digests of the tokenisers that data sources load with
            `clients.models.tokenizer`. A site whose source loads others refuses the
            job; shards are not checked.
    """

    factory: str
    options: Mapping[str, Any] = key(default={})
    integer_buffers: Mapping[str, str] = key(default={})
    frozen: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    weights: str | None = None
    keep_zeros: bool = False
    tokenizers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """How one dataset is split among the sites of a simulation.

    Attributes:
        kind: `iid` (at random), `stratified` (the same class shares everywhere),
            `dirichlet` (class shares drawn at random), `by_group` (whole groups, for
            example sub-packages of a text), `by_person` (all records of a person),
            `proportional` (at random, in proportion to `speeds`).
        speeds: With `proportional`: speed of each site that gets a part, in the order
            of the sites and in any one unit. `crossfed data balance RUN` prints those
            that a run measured.
        alpha: Concentration of the Dirichlet distribution: near 0, each class is at one
            site; large values approach `stratified`.
        min_examples: Minimum number of training examples per site; a draw that gives a
            site fewer is repeated.
    """

    kind: str = key(
        default="iid",
        choices=(
            "iid",
            "stratified",
            "dirichlet",
            "by_group",
            "by_person",
            "proportional",
        ),
    )
    speeds: tuple[float, ...] = ()
    alpha: float = key(default=1.0, above=0.0)
    min_examples: int = key(default=1, low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The data, as one dataset that the simulation splits among the sites.

    Attributes:
        source: `module:function` or `./file.py:function` that returns
            `(train, held_out)`, called with `options`; or the URL that
            `crossfed data shard` wrote to.
        options: Keyword arguments of the function; for a URL `version`, `order`,
            `window`, `warm_up`, `endpoint`, `region`.
        partition: How the data is split among the sites (simulation only).
        placement: `static`: each site keeps its part. `dynamic`: every site can
            read all of the data, and each round moves parts from slow sites to fast
            ones, so that all end together. In virtual time, or deployed where each
            `site.toml` names this dataset.
    """

    source: str
    options: Mapping[str, Any] = key(default={})
    partition: PartitionSpec = PartitionSpec()
    placement: str = key(default="static", choices=("static", "dynamic"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimiser of local training.

    Attributes:
        name: Algorithm: `sgd`, `adam`, `adamw`, `muon` (hidden weight matrices
            with Muon, all other parameters with AdamW), any other of `torch.optim` in
            lower case, such as `rmsprop`; or `module:function` or
            `./file.py:function`, called with the trained parameters, `lr` and
            `options`.
        options: Further keyword arguments of an algorithm other than the first four,
            such as `{ alpha = 0.9 }` of `rmsprop`.
        lr: Learning rate. `muon` scales its steps to the size of AdamW's, so one rate
            serves both.
        momentum: Momentum of `sgd` and `muon`; `muon` needs one (0.95 is usual).
        nesterov: Nesterov momentum of `sgd` (`muon` always has it).
        betas: Decay rates of `adam` and `adamw`, also for the parameters that `muon`
            leaves to AdamW.
        adamw_parameters: With `muon`: name patterns of further weight matrices for
            AdamW, such as an output head that the model registers before other layers.
        weight_decay: Factor of the optimiser's weight decay, as in `torch.optim`.
        state: `fresh`: momentum, moments and step count start at 0 in every round.
            `keep`: each site continues from the last round in which it trained.
    """

    name: str = "sgd"
    options: Mapping[str, Any] = key(default={})
    lr: float = key(default=0.01, above=0.0)
    momentum: float = key(default=0.0, low=0.0, below=1.0)
    nesterov: bool = False
    betas: tuple[float, ...] = (0.9, 0.999)
    adamw_parameters: tuple[str, ...] = ()
    weight_decay: float = key(default=0.0, low=0.0)
    state: str = key(default="fresh", choices=("fresh", "keep"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSpec:
    """How the learning rate changes over all local steps of the run.

    The schedule continues from round to round, also where a site has missed some. Every
    local step reads the same number of examples, so it also follows the number of
    tokens.

    Attributes:
        name: Shape of the decay from the optimiser's `lr` to `final_fraction` of it:
            `constant`, `linear`, `cosine`; or `module:function` or
            `./file.py:function`, called with the step from 0, the number of steps of
            the run and `options`, which returns the factor of `lr`.
        options: Keyword arguments of your own schedule.
        warmup_steps: Number of local steps at the beginning of the run in which the
            rate rises linearly from 0.
        final_fraction: Fraction of `lr` at the end of the run; not for `constant`.
    """

    name: str = "constant"
    options: Mapping[str, Any] = key(default={})
    warmup_steps: int = key(default=0, low=0)
    final_fraction: float = key(default=0.0, low=0.0, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Local training, the same at every site.

    Attributes:
        task: What is minimised: `classification` (cross-entropy of one label per
            example), `binary`, `multi_label`, `regression`, `segmentation`,
            `causal_lm` (cross-entropy of each next token), `masked_lm`, `seq2seq_lm`,
            `sft`, `contrastive`, `ranking`; `trainer` (the loop of the transformers
            `Trainer` that `model.factory` returns); or `module:function` or
            `./file.py:function`, your own objective; called with model, inputs and
            targets.
        options: Options of the task, such as `class_weights` and `label_smoothing`
            (`classification`, `segmentation`) or `positive_weight` (`binary`); or
            keyword arguments of your own objective.
        metrics: Bounds `[low, high]` of one record for each metric that your own
            objective returns; reported values are clipped to them. `regression` has
            `loss`, `absolute_error` and `squared_error`; `trainer` has the results of
            `compute_metrics` that you name here. `[]` means no bounds; differential
            privacy and secure aggregation require bounds.
        classes: Names of at most 32 classes, from label 0 on, for a confusion matrix on
            held-out data: with `classification`, `segmentation`, and your own
            objective if it returns `logits`. They increase noise on held-out results.
            If the target of a table is text, they are its words.
        measures: Further measures on held-out data: `auc` (`binary`),
            `calibration` (`classification`, `binary`), `reliability` (the same,
            and the bins of the diagram), `recall_at_K` (`classification`,
            `contrastive`); all of them with your own objective, if it returns
            `logits`. Each increases noise on held-out results.
        subgroups: Public names of at most 16 subgroups, whose number of predictions,
            loss and accuracy are reported on held-out data: values of
            `subgroup_column`, or names of the data's groups. They increase noise on
            held-out results.
        subgroup_column: Input, of a dict of columns, whose value says which subgroup a
            record is in. Default: the groups of `clients.data.Examples`.
        min_subgroup: A site leaves smaller subgroups out of its sums, and further ones
            until those left out have as many records together. Without effect on noised
            results.
        max_tokens: Most predictions in one record: its tokens (`causal_lm`: one
            fewer) or, for `segmentation`, its pixels. A site refuses longer records,
            since secure aggregation and differential privacy bound a record's part of
            the results by it.
        local_steps: Optimiser steps per site and round; set either this or
            `local_epochs`. 1 is FedSGD.
        local_epochs: Passes of each site over its own data per round.
        batch_size: Examples of one forward and backward pass.
        accumulate: Batches whose gradients are averaged into one optimiser step.
        accumulate_from: Changes of `accumulate` during the run: pairs of a first
            round and a value. `[[51, 4], [81, 8]]` takes 4 batches a step from round
            51 on, and 8 from round 81 on. Needs `local_steps`.
        optimizer: Local optimiser.
        learning_rate: Learning-rate schedule.
        overlap_steps: How many of a round's local steps a site takes from its own
            weights while it waits for the next model. Needs memory for one more model
            at each site.
        overlap_mix: With `overlap_steps`: when the model arrives, a site continues from
            `overlap_mix` times its own weights plus (1 - `overlap_mix`) times the
            model.
        clip_grad_norm: Largest Euclidean norm of a step's gradient; larger ones are
            scaled down.
        proximal_mu: FedProx: strength mu of the pull `mu/2 |x - theta|^2` towards the
            global weights.
        normalized_steps: FedNova: a site that takes n steps in its epochs has its
            update multiplied by `normalized_steps` / n. Choose about the mean n.
            Needs `local_epochs` and plain `sgd`.
        control_variates: SCAFFOLD: each site corrects its gradients for the drift
            towards its own records, without further bytes. Needs `local_steps`, plain
            `sgd`, and all sites in every round.
        dynamic_alpha: FedDyn: strength alpha of the pull `alpha/2 |x - theta|^2`
            towards the global weights, next to a linear term that a site learns from
            its own updates. Needs the server optimiser `running_sum` and all sites in
            every round.
        precision: `fp32`; or `bf16` or `fp16`, which compute the forward pass with
            autocast and keep float32 weights. With `fp16`, each site scales its loss,
            and skips steps whose gradients overflow; not with per-record clipping.
        inputs: Columns of a table that the model takes, in this order. Every table
            needs it, unless `standardise` names the columns.
        standardise: `stats:RUN`: subtract from each column of numbers its mean in a run
            of statistics, and divide by its deviation; a missing value becomes 0. Of a
            table, the model takes `inputs`, or all these columns in the order of their
            names.
        moments: Mean and deviation of each column, which loading the job reads from
            that run.
        moments_privacy: Epsilon and delta of that run, likewise; empty if its sums are
            exact, which jobs with a unit of privacy refuse.
        device: `auto` (the first CUDA device if there is one), `cpu`, `cuda` or
            `cuda:N`.
        threads: CPU threads of one site. The last bits of the results depend on it.
    """

    task: str = "classification"
    options: Mapping[str, Any] = key(default={})
    metrics: Mapping[str, tuple[float, ...]] = key(default={})
    classes: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    subgroups: tuple[str, ...] = ()
    subgroup_column: str = ""
    min_subgroup: int = key(default=10, low=1)
    max_tokens: int = key(default=1 << 16, low=1)
    local_steps: int | None = key(default=None, low=1)
    local_epochs: int | None = key(default=None, low=1)
    batch_size: int = key(default=32, low=1)
    accumulate: int = key(default=1, low=1)
    accumulate_from: tuple[tuple[int, ...], ...] = ()
    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: LearningRateSpec = LearningRateSpec()
    overlap_steps: int = key(default=0, low=0)
    overlap_mix: float = key(default=0.5, low=0.0, high=1.0)
    clip_grad_norm: float | None = key(default=None, above=0.0)
    proximal_mu: float = key(default=0.0, low=0.0)
    normalized_steps: int | None = key(default=None, low=1)
    control_variates: bool = False
    dynamic_alpha: float = key(default=0.0, low=0.0)
    precision: str = key(default="fp32", choices=("fp32", "bf16", "fp16"))
    inputs: tuple[str, ...] = ()
    standardise: str = ""
    moments: Mapping[str, tuple[float, ...]] = key(default={})
    moments_privacy: tuple[float, ...] = ()
    device: str = "auto"
    threads: int = key(default=1, low=1)

    @property
    def num_epochs(self) -> int:
        """``local_epochs``, in a job that has no ``local_steps``."""
        if self.local_epochs is None:
            raise ValueError("a checked job has steps or epochs")
        return self.local_epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Evaluation of the global model on the sites' held-out data.

    Attributes:
        every: Evaluate the model every this many rounds, and after the last one; 0 for
            never.
        batch_size: Examples of one forward pass.
    """

    every: int = key(default=1, low=0)
    batch_size: int = key(default=256, low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizerSpec:
    """What the aggregator does with the combined update.

    Attributes:
        name: Algorithm; `average` with `lr = 1` is FedAvg, and `running_sum` the
            server step of FedDyn.
        lr: Server learning rate.
        momentum: Momentum of `momentum` and `nesterov`. Of buffers, `nesterov` is
            delayed: its velocity changes once as many updates came as there are sites.
        beta1: Decay of the first moment: `adagrad`, `adam`, `yogi`.
        beta2: Decay of the second moment: `adam`, `yogi`.
        tau: Adaptivity: added to the root of the second moment.
    """

    name: str = key(
        default="average",
        choices=(
            *("average", "momentum", "nesterov", "adagrad", "adam", "yogi"),
            "running_sum",
        ),
    )
    lr: float = key(default=1.0, above=0.0)
    momentum: float = key(default=0.9, low=0.0, below=1.0)
    beta1: float = key(default=0.9, low=0.0, below=1.0)
    beta2: float = key(default=0.99, low=0.0, below=1.0)
    tau: float = key(default=1e-3, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationSpec:
    """How updates become one step of the global model.

    Attributes:
        combine: `mean`; `contributor_mean`, the mean of each value over the sites that
            sent it, for the codec `top_k` and sites with a `lora_rank`; a rule that
            tolerates `byzantine_sites` bad sites: `trimmed_mean`, `median`, `krum`,
            `multi_krum`; or `module:function` or `./file.py:function`, your own rule,
            called with the list of all updates and an array of weights, which returns
            their combination.
        weights: A site's weight: its number of `examples`, `uniform`, or `dynamic`
            (examples times the relative improvement of the loss on its held-out data).
        byzantine_sites: Number of bad sites that `trimmed_mean`, `krum` and
            `multi_krum` must tolerate.
        server_optimizer: Server optimiser.
    """

    combine: str = "mean"
    weights: str = key(default="examples", choices=("examples", "uniform", "dynamic"))
    byzantine_sites: int = key(default=0, low=0)
    server_optimizer: ServerOptimizerSpec = ServerOptimizerSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """How float values are encoded for transfer.

    Attributes:
        name: `identity` (float32), `bf16` (16 bits, with the range of float32), `fp16`
            (16 bits, more precise; refuses values of 65520 or more); and, for updates
            and changes but not for whole models, `int8` and `int4` (equal steps, with a
            scale for each block), `fp4` (powers of two, likewise), `top_k` (the largest
            values of each block, in 2 bits and an index each), `subset` (float32 values
            of some blocks, the same at all sites).
        block: Values of a block: 128 by default for `int8`, `int4` and `fp4`, 4096 for
            `top_k`, 256 for `subset`.
        fraction: Share of the values that is sent: 1/64 by default for `top_k`, 1/16
            for `subset`.
        order: Which blocks `subset` sends: random ones in each round (`random`, the
            default), or all in turn (`cyclic`).
        feedback: Error feedback: the share of what the codec discards that a site adds
            to its next update. Default: 1 for `int8`, `int4` and `fp4`, 0.95 for
            `top_k` and `subset`, 0 for `bf16` and `fp16`.
    """

    name: str = key(
        default="identity",
        choices=choice.NAMES,
    )
    block: int | None = key(default=None, low=2, high=choice.MAX_BLOCK)
    fraction: float | None = key(default=None, above=0.0, high=1.0)
    order: str | None = key(default=None, choices=choice.ORDERS)
    feedback: float | None = key(default=None, low=0.0, high=1.0)

    @property
    def options(self) -> choice.CodecOptions:
        """What the job says of the codec."""
        return choice.CodecOptions(
            block=self.block,
            fraction=self.fraction,
            order=self.order,
            feedback=self.feedback,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSpec:
    """What is sent between sites and aggregator.

    Attributes:
        codec: Encoding of updates on their way up; `identity` with secure aggregation,
            which masks its own words.
        down_codec: Encoding of the model on its way down. The aggregator keeps the
            model in float32; sites train from, and evaluate, what they receive.
        fragments: Number of parts of the model; each round exchanges one of them, in
            turn. In between, a site keeps its own values of a part. Needs
            `privacy.secure_aggregation.levels`.
        down_content: What sites receive. `model`: the whole model. `change`: its
            difference from the previous one, encoded by `down_codec`, or the whole
            one in float32 where a site lacks that; needs memory for one more model at
            each site. `sum`: the sum of the updates, from which the site computes the
            new model, in as few bits; needs `privacy.secure_aggregation.levels`.
    """

    codec: CodecSpec = CodecSpec()
    down_codec: CodecSpec = CodecSpec()
    fragments: int = key(default=1, low=1, high=MAX_FRAGMENTS)
    down_content: str = key(default="model", choices=("model", "change", "sum"))

    @property
    def links(self) -> codecs.Links:
        """The codecs of both directions."""
        up, down, content = self.codec, self.down_codec, self.down_content
        return codecs.Links(
            up=choice.codec_of(up.name, up.options),
            down=choice.codec_of(down.name, down.options),
            changes=content == "change",
            sums=content == "sum",
            feedback=choice.feedback_of(up.name, up.options),
            down_feedback=choice.feedback_of(down.name, down.options),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Which sites take part in a round, and how long it waits for them.

    Attributes:
        mode: `synchronous`: a round ends before the next begins. `buffered`: sites
            train all the time, and every `buffer_size` updates make a new model, also
            those that began with an older one. A round is then the time between two
            models.
        buffer_size: Updates that make a model in a buffered run. Default: half as many
            as there are sites, or the fewest of a sum of one of `groups`. With secure
            aggregation without `groups`, which needs differential privacy for records
            or persons, the updates of each sum.
        max_staleness: Most models that may be newer than the one that an update began
            with; older updates are discarded. Others count divided by the square root
            of 1 plus their staleness.
        groups: The sites of each group of a buffered run with secure aggregation, all
            sites once. Each group has sums of its own, at its own pace.
        round_deadline_seconds: A site that has not answered its task by this deadline
            is left out of the round.
        minimum_sites: Quorum: with fewer answers the round is lost and the weights do
            not change. All sites by default.
        grace: Once the quorum has answered, a round waits for the others only this part
            of the time that it has taken so far, and at least a second. `learnt`: it
            waits until each of them has had half as long again as it usually takes, in
            virtual time or deployed. Default: until the deadline.
        max_lost_rounds: The run stops after this many lost rounds in a row.
        sites_per_round: Number of sites that a round needs, of those that `sampling`
            draws for it; all by default.
        sampling: How they are drawn. `uniform`: each set is equally likely. `fair`:
            those first whose updates counted least often. `utility`: mostly those
            with a high training loss that are fast enough, and in a part of the places
            those that were not asked for longest. Or a function of yours, as
            `module:function`.
        over_selection: Ask this many times `sites_per_round` sites, such as 1.3, and
            end the round with the first `sites_per_round` answers.
        replicas: Groups of sites that train on the same data. The first answer of each
            group counts in a round, and the tasks of the others are withdrawn. In a
            simulation all sites of a group get the data of the first; sites with `data`
            of their own must name the same.
        allocation: `static`: every site does the same local work. `capacity`: sites
            that were measured to be faster take more local steps, so that all end a
            round together: `training.local_steps` on average, at least a quarter of it,
            and at most `max_local_steps`. Each site scales its update to the mean of
            the round's steps. In virtual time or deployed.
        local_work: `fixed`: every round takes `training.local_steps`. `auto`: the
            aggregator chooses from measured times the fewest local steps, from
            `training.local_steps` to `max_local_steps`, for which sites train
            `training_share` of the time. The run takes `rounds` times
            `training.local_steps` steps in all. In virtual time or deployed.
        max_local_steps: Most local steps of a round with `auto`, at least twice
            `training.local_steps`; and of a site with `capacity`, by default four times
            `training.local_steps`.
        training_share: Share of a round that `auto` aims at, for the site that the
            round waits for.
        memory_mib: Memory in MiB that the run takes at each site. A site that limits it
            (`memory_mib` in `site.toml`) has no more runs at once than fit.
            Default: what the site has reported in an earlier run of the job.
        gpu_memory_mib: The same of its GPUs' memory, which no site reports.
        open_to: Names of sites, with `*` and `?`, that may join a deployed run
            between two rounds if they enrol while it trains. With the job, all other
            sites accept this.
    """

    mode: str = key(default="synchronous", choices=("synchronous", "buffered"))
    buffer_size: int | None = key(default=None, low=1)
    max_staleness: int = key(default=10, low=0)
    groups: tuple[tuple[str, ...], ...] = ()
    round_deadline_seconds: float = key(default=600.0, above=0.0)
    minimum_sites: int | None = key(default=None, low=1)
    grace: float | str | None = key(default=None, low=0.0, choices=(LEARNT,))
    max_lost_rounds: int = key(default=3, low=1)
    sites_per_round: int | None = key(default=None, low=1)
    sampling: str = key(default="uniform")
    over_selection: float | None = key(default=None, above=1.0, high=10.0)
    replicas: tuple[tuple[str, ...], ...] = ()
    allocation: str = key(default="static", choices=("static", "capacity"))
    local_work: str = key(default="fixed", choices=("fixed", "auto"))
    max_local_steps: int | None = key(default=None, low=2)
    training_share: float = key(default=GOOD_SHARE, above=0.0, below=1.0)
    memory_mib: int | None = key(default=None, low=1)
    gpu_memory_mib: int | None = key(default=None, low=1)
    open_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDataSpec:
    """A site's own data in a simulation, instead of a share of the job's dataset.

    A deployed site ignores this table: it uses only what `[data]` of its own
    `site.toml` names.

    Attributes:
        source: `module:function` or `./file.py:function` that returns
            `(train, held_out)`, or a URL as in `[data]`.
        options: Options of the source, as in `[data]`.
    """

    source: str
    options: Mapping[str, Any] = key(default={})


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpec:
    """One site.

    Attributes:
        name: Its name: lower-case letters, digits, `.`, `_`, `-`.
        cloud: Where it runs.
        region: Region, as the cloud names it.
        data: Data only of this site in a simulation. A deployed site ignores it.
        lora_rank: Train and send only this many ranks of each LoRA adapter at this
            site, the first ones. The others still take part in its forward pass.
            Default: all.
        flower_app: Set, `{}` for all defaults, where an existing Flower `ClientApp`
            takes part through a stock SuperNode; deployed and without privacy only.
    """

    name: str
    cloud: str = key(default="local", choices=("aws", "gcp", "local"))
    region: str = ""
    data: SiteDataSpec | None = None
    lora_rank: int | None = key(default=None, low=1)
    flower_app: FlowerAppSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySpec:
    """A relay: it adds up the updates of sites in one cloud, so that one leaves it.

    Attributes:
        name: Its name, which no site has.
        sites: Names of its sites. A lost relay counts as all of them absent.
    """

    name: str
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLineSpec:
    """The line between a relay and the aggregator (`--engine virtual` only).

    `simulation.machines` are then the lines between sites and their relay.

    Attributes:
        relay: Name of the relay.
        down_mbit: Megabits per second from the aggregator to the relay.
        up_mbit: Megabits per second from the relay to the aggregator.
        latency_seconds: Delay of each message, in addition to its transfer time.
        lost_rounds: Rounds in which the relay gives no answer, with any engine.
    """

    relay: str
    down_mbit: float = key(default=100.0, above=0.0)
    up_mbit: float = key(default=100.0, above=0.0)
    latency_seconds: float = key(default=0.0, low=0.0)
    lost_rounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A fault to rehearse at one site (simulation only).

    Attributes:
        site: Name of the site.
        kind: `crash` (raises), `silent` (never answers), `lost` (works, but the answer
            is lost), `hang` (answers after `seconds`), `duplicate` (answers twice),
            `nan`, `inf`, `garbage` (random values of norm `scale`, or random bytes in a
            codec of few bits), `wrong_length`, `wrong_round`, `restart` (loses its
            memory just before the task arrives), `leave` (announces that it leaves, and
            returns after `rounds` with an empty memory).
        rounds: Rounds in which it happens; all if empty.
        every: With 2, only in every second round of these, and so on.
        probability: Probability of the fault in each of these rounds, drawn with the
            job's seed for each site and round separately.
        seconds: How long `hang` takes.
        scale: Euclidean norm of `garbage`, in weight units.
    """

    site: str
    kind: str = key(
        choices=(
            "crash",
            "silent",
            "lost",
            "hang",
            "duplicate",
            "nan",
            "inf",
            "garbage",
            "wrong_length",
            "wrong_round",
            "restart",
            "leave",
        )
    )
    rounds: tuple[int, ...] = ()
    every: int = key(default=1, low=1)
    probability: float = key(default=1.0, above=0.0, high=1.0)
    seconds: float = key(default=1.0, above=0.0)
    scale: float = key(default=100.0, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """How fast a site and its connection are (`simulate --engine virtual` only).

    Attributes:
        site: Name of the site.
        examples_per_second: Examples that it trains on, or evaluates, per second.
        down_mbit: Megabits per second from the aggregator to the site.
        up_mbit: Megabits per second from the site to the aggregator.
        latency_seconds: Delay of each message, in addition to its transfer time.
        away_share: Part of the time that the site is away, like a spot machine between
            two interruptions. Work that it has begun is lost then.
        away_seconds: How long an absence lasts on average; absences and the times
            between them are exponentially distributed.
        away: Absences that are known, in place of `away_share`: `[begin, end]` in
            seconds from the start of the run, one after another.
        away_every: Seconds after which they repeat. Default: never.
        dollars_per_hour: Price of the machine while it is not away.
        dollars_per_gigabyte: Price of traffic that leaves the site.
    """

    site: str
    examples_per_second: float = key(above=0.0)
    down_mbit: float = key(default=100.0, above=0.0)
    up_mbit: float = key(default=100.0, above=0.0)
    latency_seconds: float = key(default=0.0, low=0.0)
    away_share: float = key(default=0.0, low=0.0, below=1.0)
    away_seconds: float = key(default=600.0, above=0.0)
    away: tuple[tuple[float, ...], ...] = ()
    away_every: float | None = key(default=None, above=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Sites to simulate whose machines are drawn at random with the job's seed.

    In place of `[[sites]]` and `[[simulation.machines]]`. The keys may also be in a
    file of their own: `simulation.fleet = "FILE.toml"`, relative to the job file.

    Attributes:
        sites: How many there are.
        examples_per_second: Median speed of training and evaluation.
        down_mbit: Median megabits per second from the aggregator to a site.
        up_mbit: Median megabits per second from a site to the aggregator.
        latency_seconds: Median delay of a message.
        spread: 19 of 20 sites are within this factor of each median.
        away_share: Part of the time that each site is away.
        away_seconds: How long an absence lasts on average.
        trace: A file, beside the one that names it, that says when machines were away,
            in place of `away_share`: `event_trace.tab` of the Failure Trace Archive.
            Each site is one of its nodes, in their order, and the trace repeats when it
            ends.
        dollars_per_hour: Price of each machine while it is not away.
        dollars_per_gigabyte: Price of traffic that leaves a site.
    """

    sites: int = key(low=1, high=100_000)
    examples_per_second: float = key(above=0.0)
    down_mbit: float = key(default=100.0, above=0.0)
    up_mbit: float = key(default=100.0, above=0.0)
    latency_seconds: float = key(default=0.0, low=0.0)
    spread: float = key(default=1.0, low=1.0)
    away_share: float = key(default=0.0, low=0.0, below=1.0)
    away_seconds: float = key(default=600.0, above=0.0)
    trace: str = ""
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)


SURROGATE = "surrogate"  # Of ``simulation.training``.


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSpec:
    """Settings for simulations only.

    Attributes:
        workers: Number of sites that train at the same time; 0 for as many as the CPU
            cores allow. Results do not depend on it.
        faults: Misfortunes to rehearse.
        machines: Speed of each site, for `simulate --engine virtual`.
        combine_seconds: What the aggregator takes in each round of `--engine virtual`
            beside work and messages: looking for answers, combining, saving.
        fleet: Many sites with machines of random speed, in place of `[[sites]]`.
        training: `real`, or `surrogate` for `simulate --engine virtual` if you only
            study scheduling: sites take no steps, and losses follow those of a noisy
            quadratic model whose rate is `training.optimizer.lr`.
        relays: Lines and faults of the relays.
        vouch_for_sources: With differential privacy, accept sources that do not declare
            their preprocessing. Deployed sites use `data.preprocessing` of their own
            `site.toml` instead.
        total_epsilon: Limit of the total epsilon of all private runs in the same parent
            folder (`runs/NAME`) whose sites have the same names and `data.source`; a
            job with another `name` begins from zero. Default: the total is counted but
            not limited.
        live_metrics: Where the run writes its metrics after each round: `tensorboard`,
            `mlflow` or both, as `crossfed export-metrics` does.
    """

    workers: int = key(default=0, low=0)
    faults: tuple[FaultSpec, ...] = ()
    machines: tuple[MachineSpec, ...] = ()
    combine_seconds: float = key(default=0.0, low=0.0)
    fleet: FleetSpec | None = None
    training: str = key(default="real", choices=("real", SURROGATE))
    relays: tuple[RelayLineSpec, ...] = ()
    vouch_for_sources: bool = False
    total_epsilon: float | None = key(default=None, above=0.0)
    live_metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One federated training job.

    Attributes:
        name: Name of the job: lower-case letters, digits, `.`, `_`, `-`.
        rounds: Rounds to run; 0 only evaluates `model.weights`, as `crossfed evaluate`
            does.
        seed: Seed of all randomness in a simulation: initial weights, partition,
            example order, cohorts.
        model: What is trained: a function that builds it, and its starting weights.
        data: The data that is split among the sites without data of their own. A
            simulation needs it if there are such sites; deployed sites need it only to
            rehearse.
        training: How each site trains between two exchanges.
        evaluation: How often, and how, sites measure the model on held-out data.
        selection: Which model the run leaves; that of the last round without it.
        aggregation: How the aggregator combines updates and steps the global model.
        communication: What is sent between sites and aggregator, and in which codec.
        schedule: Which sites a round asks, how many must answer, and by when.
        privacy: Secure aggregation and differential privacy; neither by default.
        statistics: Statistics of the sites' records. A job with this table trains
            nothing, and needs neither `rounds` nor `[model]` and `[training]`.
        simulation: Faults, machines and other settings for simulations only.
        storage: Where runs are kept.
        sites: The sites, one `[[sites]]` table each.
        relays: Relays between sites and the aggregator, one `[[relays]]` table each.
    """

    name: str
    rounds: int = key(low=0, high=MAX_ROUNDS)
    seed: int = key(default=0, low=0)
    model: ModelSpec
    data: DataSpec | None = None
    training: TrainingSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    selection: SelectionSpec | None = None
    aggregation: AggregationSpec = AggregationSpec()
    communication: CommunicationSpec = CommunicationSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    privacy: PrivacySpec = PrivacySpec()
    statistics: StatisticsSpec | None = None
    simulation: SimulationSpec = SimulationSpec()
    storage: StorageSpec = StorageSpec()
    sites: tuple[SiteSpec, ...]
    relays: tuple[RelaySpec, ...] = ()

    @property
    def minimum_sites(self) -> int:
        """The quorum of a round."""
        secure = self.privacy.secure_aggregation
        if secure.enabled and (self.schedule.groups or self.has_free_cohorts):
            return len(self.sites)  # Of a sum over all; other sums have their own.
        if secure.enabled:
            return secure.threshold or len(self.sites)
        return self.buffer_size or self.schedule.minimum_sites or self.sites_per_round

    @property
    def buffer_size(self) -> int | None:
        """Updates that make a model of a buffered run; None for other runs."""
        schedule = self.schedule
        if schedule.mode != "buffered":
            return None
        fewest = map(self.group_threshold, schedule.groups)
        return schedule.buffer_size or min(fewest, default=(len(self.sites) + 1) // 2)

    @property
    def fewest_updates(self) -> int:
        """Updates without which no model is made."""
        return self.buffer_size or self.minimum_sites

    def group_threshold(self, group: Sequence[str]) -> int:
        """Fewest updates that a sum of one of `schedule.groups` holds.

        Those that the job asks for, and more than two thirds of the group, or a
        dishonest aggregator could open two sums of one round.
        """
        least = self.privacy.secure_aggregation.threshold or len(group)
        return min(len(group), max(least, 2 * len(group) // 3 + 1))

    @property
    def has_groups(self) -> bool:
        """Whether groups of sites have secure sums of their own."""
        secure, groups = self.privacy.secure_aggregation, self.schedule.groups
        return secure.groups is not None or bool(groups) or self.has_free_cohorts

    @property
    def has_free_cohorts(self) -> bool:
        """Whether the secure sums of a buffered run are of whichever sites are ready.

        Each has ``buffer_size`` updates, with the full noise of each site.
        """
        secure = self.privacy.secure_aggregation
        return (
            self.schedule.mode == "buffered"
            and secure.enabled
            and secure.groups is None
            and not self.schedule.groups
            and self.privacy.differential_privacy.by_itself
        )

    def summed_with(self, site: str) -> Sequence[str]:
        """The sites whose updates are in one sum with a site's, unless they draw it."""
        for group in self.schedule.groups:
            if site in group:
                return group
        return [each.name for each in self.sites]

    def fewest_with(self, site: str) -> int:
        """Fewest updates of a sum that a site's update is in, as `summed_with`."""
        groups = self.schedule.groups
        return (
            self.group_threshold(self.summed_with(site))
            if groups
            else self.minimum_sites
        )

    @property
    def models_per_round(self) -> int:
        """Models that a buffered run makes of as many updates as it has sites; or 1."""
        return (
            1 if self.buffer_size is None else -(-len(self.sites) // self.buffer_size)
        )

    @property
    def continues_rounds(self) -> bool:
        """Whether a site may go on with steps that it took before it was interrupted.

        With secure aggregation a site answers a round once, and the steps of the next
        one are others, except private ones, which draw their records afresh. With noise
        in the sum a round is a release, and not its steps. Steps that were taken ahead
        of a round begin with what only one process has. A loop of the user's cannot
        begin in the middle.
        """
        secure, private = (
            self.privacy.secure_aggregation,
            self.privacy.differential_privacy,
        )
        return not (
            (secure.enabled and not private.clips_gradients)
            or private.in_sum
            or self.training.overlap_steps
            or self.training.task == "trainer"
        )

    @property
    def repeats_tasks(self) -> bool:
        """Whether a site that is back while its round goes on is asked again."""
        return self.continues_rounds and not self.privacy.secure_aggregation.enabled

    @property
    def leaves_average(self) -> bool:
        """Whether its last round leaves an average of models."""
        spec = self.selection
        return spec is not None and spec.averages and spec.average_from <= self.rounds

    @property
    def sites_in_sum(self) -> int:
        """Fewest updates that a secure sum of this job holds."""
        groups = self.privacy.secure_aggregation.groups
        fewest = self.minimum_sites if groups is None else len(self.sites) // groups
        if self.has_free_cohorts:
            fewest = self.buffer_size or 0
        return min(map(self.group_threshold, self.schedule.groups), default=fewest)

    @property
    def smallest_cohort(self) -> int:
        """Sites that agree to a secure sum: all, or those of the smallest group."""
        fewest = self.sites_in_sum if self.has_groups else len(self.sites)
        return min(map(len, self.schedule.groups), default=fewest)

    @property
    def most_absent(self) -> int:
        """Most sites that may be missing from a secure sum of this job."""
        absent = (len(g) - self.group_threshold(g) for g in self.schedule.groups)
        return max(absent, default=len(self.sites) - self.minimum_sites)

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
        return min(len(self.sites), self.wanted_sites + len(self.replica_of))

    @property
    def wanted_sites(self) -> int:
        """How many sites a round would ask if the job had as many."""
        asked = self.sites_per_round * (self.schedule.over_selection or 1.0)
        return math.ceil(asked - _ROUNDING)

    @property
    def enough_answers(self) -> int | None:
        """Answers that end a round which asks more sites; None if none does."""
        return None if self.schedule.over_selection is None else self.sites_per_round

    @property
    def sites_per_round(self) -> int:
        """How many answers a round has if nobody fails."""
        return self.schedule.sites_per_round or len(self.sites) - len(self.replica_of)

    @property
    def replica_of(self) -> Mapping[str, str]:
        """Of each site that holds a copy of another site's data, that site."""
        groups = self.schedule.replicas
        return {site: first for first, *copies in groups for site in copies}
