"""The ``[privacy]`` tables of a job: secure aggregation and differential privacy.

What they must not be combined with is in ``privacy_checks``.
"""

from dataclasses import dataclass

from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregationSpec:
    """Whether the aggregator sees single updates.

    Attributes:
        enabled: Hide single updates from the aggregator: it learns their sum alone.
        threshold: Sites that must answer for a sum to be opened. All of them by
            default, in one exchange a round; or at least two thirds of them and one
            more, in three exchanges, so that the others may drop out.
        groups: Divide the sites by lot into so many groups, at least 3, and let
            `aggregation.combine` compare the means of the groups: each group has a sum
            of its own. Without it there is one sum, and a mean.
        ring_bits: Bits of an encoded value: 32 (4 bytes up), 24 or 16 (2 bytes up,
            coarser; for at most 16 sites).
        clip_norm: Largest Euclidean norm of an update, in weight units; larger ones are
            scaled down. It sets the grid of the encoding: a tight bound is a fine grid.
            10 by default; under joint differential privacy twice what a step can
            change, and under that of sites it is
            `privacy.differential_privacy.clip_norm`.
        element_bound: Largest value of an element of an update times its site's weight,
            in weight units, at most `clip_norm`. Far below it, it makes the grid that
            much finer; a site with a larger element declines the round. A public
            constant: never take it from private data.
        clip_elements: Clip elements beyond `element_bound` instead of declining the
            round.
        max_examples: Examples that no site exceeds, rounded up to three significant
            bits (8, 10, 12, 14, 16, 20, ...); every site sees this number. A simulation
            takes its largest site by default.
        hybrid: Rest the keys on ML-KEM-768 as well as on X25519, so that traffic
            recorded today stays closed to a quantum computer.
        two_sites_waiver: Accept that with two sites each can compute the other's update
            from the sum. Needed for two sites without record-level differential
            privacy.
    """

    enabled: bool = False
    threshold: int | None = key(default=None, low=2)
    groups: int | None = key(default=None, low=3)
    ring_bits: int = key(default=32, low=16, high=32)
    clip_norm: float | None = key(default=None, above=0.0)
    element_bound: float | None = key(default=None, above=0.0)
    clip_elements: bool = False
    max_examples: int | None = key(default=None, low=1)
    hybrid: bool = True
    two_sites_waiver: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardiseSpec:
    """Standardise records by noised mean and deviation of their own site.

    Attributes:
        low: Smallest value of each feature, or one for all; smaller ones count as it.
            Features are the columns of a record, or the channels of an image. A public
            constant: never take it from private data.
        high: Largest value of each feature, or one for all.
        noise_multiplier: Standard deviation of the noise over what one record changes
            of the sums. 10 costs an epsilon of 0.34 at delta 1e-5 by itself.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    noise_multiplier: float = key(default=10.0, low=0.05, high=100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacySpec:
    """What the trained model may reveal of a single record.

    Attributes:
        unit: Unit of privacy: `none`; `record`, one training record, where each site
            makes its own training private with noise of its own; `joint`, one record
            too, where every round is one step and the noise of all sites adds up inside
            the secure sum; `site`, all that a site holds, with noise inside the secure
            sum.
        target_epsilon: What no site's epsilon may exceed over the run. Without
            `noise_multiplier` the noise is calibrated to it; with one it is the cap
            alone.
        delta: The delta that goes with epsilon; at most 1 / (10 n) for the n records of
            a site, or for n sites where these are the unit. By default it is that
            bound, rounded down to one digit.
        clip_norm: Largest Euclidean norm of one record's gradient, or of a site's
            update where sites are the unit; larger ones are scaled down.
        noise_multiplier: Standard deviation of the noise of a step, or of a sum, over
            `clip_norm`; calibrated to `target_epsilon` by default.
        reserve_rounds: Rounds beyond `rounds` that the noise is calibrated for. A round
            that was lost, or cut short by a crash, is charged too; without a reserve
            the run then ends as many rounds early.
        colluding_sites: `joint` and `site`: how many of the sites whose noise is in a
            sum may be the adversary's. The others bring enough by themselves; at least
            1, since each site knows its own.
        adaptive_clip: `site`: let the clip norm follow the updates, beginning at
            `clip_norm`. A tenth of the noise's worth goes into telling how many were
            within it.
        clip_quantile: Share of the updates that an adaptive clip norm leaves as they
            are.
        clip_rate: Learning rate of an adaptive clip norm: per round it moves by a
            factor of at most `exp(clip_rate)`.
        accept_low_signal: `site`: run although the mean of the updates drowns in the
            noise, with a ratio below 0.5.
        clipping: How gradients of single records are found: `hooks` (each in memory),
            `ghost` (their norms alone, in a second pass) or `auto`.
        held_out: What leaves a site of its held-out results: sums with `noise`, charged
            to a budget of the same size, which the held-out records have to themselves;
            or the sums as they are, for held-out data that is `public`. For nothing at
            all set `evaluation.every = 0`.
        standardise: `record` and `joint`: standardise the records of each site by
            noised statistics of its own.
    """

    unit: str = key(default="none", choices=("none", "record", "joint", "site"))
    target_epsilon: float | None = key(default=None, above=0.0)
    delta: float | None = key(default=None, above=0.0, below=1.0)
    clip_norm: float = key(default=1.0, above=0.0)
    noise_multiplier: float | None = key(default=None, above=0.0)
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
    def in_sum(self) -> bool:
        """Whether the noise of all sites adds up inside the secure sum.

        A site must then know what all others need before it can promise anything.
        """
        return self.unit in {"joint", "site"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySpec:
    """Protection beyond keeping data where it is.

    Attributes:
        secure_aggregation: Secure aggregation.
        differential_privacy: Differential privacy.
    """

    secure_aggregation: SecureAggregationSpec = SecureAggregationSpec()
    differential_privacy: DifferentialPrivacySpec = DifferentialPrivacySpec()
