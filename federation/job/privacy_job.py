"""The ``[privacy]`` tables of a job: secure aggregation and differential privacy.

What they must not be combined with is in ``privacy_checks``.
"""

from dataclasses import dataclass

from federation.job.job_keys import key

LEVELS = (3, 4, 8, 16, 256)  # Of updates in secure sums.
MAX_FRAGMENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregationSpec:
    """Hide individual updates from the aggregator.

    Attributes:
        enabled: Whether the aggregator learns only the sum of the updates.
        threshold: Number of sites that must answer before a sum can be unmasked: all
            (the default; one exchange per round), or more than two thirds (three
            exchanges), so that the others may drop out. With `schedule.groups`, of
            each group.
        groups: Number of groups into which the sites are divided at random. Each has
            its own sum, and `aggregation.combine` compares the groups' means.
            Default: a single sum, and `mean`.
        ring_bits: Bits of an encoded value: 32 (4 bytes up), 24 or 16 (2 bytes up,
            coarser; for at most 16 sites).
        levels: Number of levels, 3, 4, 8, 16 or 256, to which each value of an update
            is rounded, instead of `ring_bits`: 3.8 bits a value at 4 levels and 4
            sites, but 16 in the first round. A site adds its rounding errors to its
            next update.
        clip_norm: Largest Euclidean norm of an update; larger ones are scaled down. A
            smaller bound makes sums more precise. Default: 10; with `unit = "joint"`
            twice the largest change of one step; with `unit = "site"`
            `privacy.differential_privacy.clip_norm`.
        element_bound: Largest absolute value of a single element of an update, times
            the site's weight. A smaller bound makes sums more precise. A site with a
            larger element declines the round, unless `clip_elements` is set.
            Everybody sees this number.
        clip_elements: Whether elements larger than `element_bound` are reduced to it,
            and the round is not declined.
        max_examples: Largest number of examples at any site, rounded up to three
            significant bits (8, 10, 12, 14, 16, 20, ...); every site sees this number.
            Default in a simulation: the largest site's.
        hybrid: Whether keys also depend on ML-KEM-768, so that a future quantum
            computer cannot read traffic recorded today.
        two_sites_waiver: Accept that each of two sites can compute the other's update.
            Required for two sites without record-level differential privacy.
    """

    enabled: bool = False
    threshold: int | None = key(default=None, low=2)
    groups: int | None = key(default=None, low=3)
    ring_bits: int = key(default=32, low=16, high=32)
    levels: int | None = key(default=None, low=3, high=256)
    clip_norm: float | None = key(default=None, above=0.0)
    element_bound: float | None = key(default=None, above=0.0)
    clip_elements: bool = False
    max_examples: int | None = key(default=None, low=1)
    hybrid: bool = True
    two_sites_waiver: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardiseSpec:
    """Standardise records with the noised mean and deviation of their site.

    Attributes:
        low: Smallest value of each feature (column of a record, or channel of an
            image), or one for all; smaller values are clipped to it. This is a public
            constant: never derive it from private data.
        high: Largest value of each feature, or one for all.
        noise_multiplier: Standard deviation of the noise divided by the most that one
            record, or one person with `unit = "person"`, can change the sums. A value
            of 10 alone costs an epsilon of 0.34 at delta 1e-5.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    noise_multiplier: float = key(default=10.0, low=0.05, high=100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacySpec:
    """Limit what the trained model reveals about a record, a person or a site.

    Attributes:
        unit: Unit of privacy: `none`; `record`, one training record, protected by each
            site's own noise; `person`, all training records of one person, likewise;
            `joint`, one record, in rounds of one step whose noise adds up in the secure
            sum; `site`, all the data of one site, with noise in the secure sum.
        target_epsilon: Largest epsilon of any site over the run. The noise is
            calibrated to it; if `noise_multiplier` is set, it is only a limit.
        delta: The delta that goes with epsilon: at most 1 / (10 n) for the n records,
            persons (`unit = "person"`) or sites (`unit = "site"`). Default: that bound,
            rounded down to one digit, or less if a site's `policy.max_delta` demands
            it.
        clip_norm: Largest Euclidean norm of one record's gradient, of the mean gradient
            of a person's records (`unit = "person"`), or of a site's update (`unit =
            "site"`); larger ones are scaled down.
        records_per_person: With `unit = "person"`: most records of one person that a
            step uses, drawn at random. `training.batch_size` then counts persons.
        noise_multiplier: Standard deviation of the noise of a step, or of a sum,
            divided by `clip_norm`. Default: calibrated to `target_epsilon`.
        max_noise_multiplier: With `unit = "joint"`: largest noise multiplier that a
            site may need; more is refused. Default: what one expected batch needs.
        reserve_rounds: Extra rounds that the privacy budget covers, since lost and
            interrupted rounds are charged too.
        colluding_sites: With `unit = "joint"` or `"site"`: number of sites whose noise
            an adversary may know; the noise of the others suffices for epsilon.
        adaptive_clip: With `unit = "site"`: let the clip norm follow the updates,
            starting from `clip_norm`. A tenth of the privacy cost pays for counting the
            updates below it.
        clip_quantile: Fraction of updates that an adaptive clip norm leaves unclipped.
        clip_rate: Learning rate of an adaptive clip norm: it changes by a factor of at
            most `exp(clip_rate)` per round.
        accept_low_signal: With `unit = "site"`: run even if noise dominates the mean
            update (signal-to-noise ratio below 0.5).
        clipping: How per-record gradients are computed: `hooks` (all in memory),
            `ghost` (only their norms, with a second pass) or `auto`.
        held_out: Which held-out results leave a site: `noise`, noised sums, charged
            to a separate budget of the same size for the held-out records; or
            `public`, exact sums.
        standardise: `record`, `joint` and `person`: standardise the records of each
            site by noised statistics of its own.
    """

    unit: str = key(
        default="none", choices=("none", "record", "person", "joint", "site")
    )
    target_epsilon: float | None = key(default=None, above=0.0)
    delta: float | None = key(default=None, above=0.0, below=1.0)
    clip_norm: float = key(default=1.0, above=0.0)
    records_per_person: int = key(default=8, low=1, high=1024)
    noise_multiplier: float | None = key(default=None, above=0.0)
    max_noise_multiplier: float | None = key(default=None, above=0.0)
    reserve_rounds: int = key(default=1, low=0)
    colluding_sites: int = key(default=1, low=1)
    adaptive_clip: bool = False
    clip_quantile: float = key(default=0.5, above=0.0, below=1.0)
    clip_rate: float = key(default=0.2, above=0.0)
    accept_low_signal: bool = False
    clipping: str = key(default="auto", choices=("auto", "hooks", "ghost"))
    held_out: str = key(default="noise", choices=("noise", "public"))
    standardise: StandardiseSpec | None = None

    @property
    def enabled(self) -> bool:
        """Whether the job has a unit of privacy."""
        return self.unit != "none"

    @property
    def of_persons(self) -> bool:
        """Whether all records of one person are protected together."""
        return self.unit == "person"

    @property
    def by_itself(self) -> bool:
        """Whether each site's own noise is enough, whatever the others do."""
        return self.unit in {"record", "person"}

    @property
    def clips_gradients(self) -> bool:
        """Whether steps clip the gradient of each record or person."""
        return self.unit in {"record", "person", "joint"}

    @property
    def in_sum(self) -> bool:
        """Whether the noise of all sites adds up inside the secure sum.

        A site must then know what all others need before it can promise anything.
        """
        return self.unit in {"joint", "site"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySpec:
    """Protection beyond keeping data at its site.

    Attributes:
        secure_aggregation: Hides single updates from the aggregator.
        differential_privacy: Bounds what the model reveals about a record, person or
            site.
    """

    secure_aggregation: SecureAggregationSpec = SecureAggregationSpec()
    differential_privacy: DifferentialPrivacySpec = DifferentialPrivacySpec()
