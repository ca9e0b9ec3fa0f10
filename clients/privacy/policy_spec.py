"""The keys of ``[policy]`` in ``site.toml``: what a site requires of a job."""

from dataclasses import dataclass

from federation.job.job_keys import key
from federation.job.privacy_job import LEVELS
from federation.job.statistics_table import KINDS
from privacy.secagg.agreement.contract import WEIGHT_RULES
from privacy.secagg.arithmetic.ring import RING_BITS

_PAIR, _USUAL = 2, 3  # updates in a sum

FILL_IN = "FILL IN"
"""Stands for a value of ``site.toml`` that only the site's operator knows."""

# From the weakest promise on.
UNITS = ("none", "site", "joint", "record", "person")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsPolicySpec:
    """What the site answers to jobs of statistics.

    Attributes:
        columns: Columns that may be asked about; `*` stands for any characters.
        kinds: Kinds of sums that it gives: `counts`, `sums`, `squares`, `products` (for
            covariances), `histograms`, `categories` and `quantiles`.
        max_epsilon: Largest epsilon of a run of statistics; `policy.max_epsilon` and
            `policy.total_epsilon` hold, too.
        min_count: Fewest of this site's records in a cell of exact statistics. Smaller
            cells, columns with fewer values and sums that tell of fewer records are
            left out, with others, so that they cannot be computed from the rest. For
            quantiles, so many neighbouring values are counted together. Records without
            a value in a column are counted exactly. 1 leaves out nothing.
        exact_questions: How many different exact questions it answers about its data,
            over all runs, and none about columns that have changed since. With
            differential privacy questions are charged instead.
    """

    columns: tuple[str, ...] = ("*",)
    kinds: tuple[str, ...] = KINDS
    max_epsilon: float | None = key(default=None, above=0.0)
    min_count: int = key(default=10, low=1)
    exact_questions: int = key(default=1, low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What the site requires of every job; it refuses a job that offers less.

    The old table name `[floor]` still works, with a warning.

    Attributes:
        privacy: Weakest unit of differential privacy that the site accepts.
        max_epsilon: Largest epsilon of a run. If `privacy` is `none`, a run that
            exceeds it counts as a run without differential privacy.
        max_delta: Largest delta that this site promises in a run; the same applies. In
            a job without `delta`, a site whose `privacy` is not `none` promises no
            larger one.
        public_held_out: Whether a job may declare the held-out data public, so that
            results on it leave the site without noise; the same applies.
        total_epsilon: Largest total epsilon of all runs on these records, training and
            held-out. Without it, the site refuses jobs with differential privacy.
        total_delta: Delta that goes with `total_epsilon`; by default the smallest
            delta of all runs.
        secure_aggregation: Whether updates must be summed with secure aggregation.
        min_sites: Fewest updates in a secure sum. The job's `threshold` (by default,
            its number of sites) must be at least this. Default: 3, or 2 if `privacy` is
            `record`, or if `accept_two_sites` is set and only two sites agree to a sum:
            those of the run, of a group or of a cohort.
        min_group: Smallest group of sites whose sum can be computed from all secure
            sums without differential privacy on this data, over all runs. Default:
            `min_sites` or 3, or `colluding_sites` + 2 if that is more. With 1,
            repeating a run without one site reveals that site's update.
        accept_dropouts: Whether a round without differential privacy may continue when
            fewer than `min_group` sites are absent (a job's `threshold` below its
            number of sites), or sites may change their numbers of local steps
            (`schedule.allocation = "capacity"`). The difference of two sums then
            reveals something about these sites.
        colluding_sites: How many other sites may collude with the aggregator and still
            not learn this site's update.
        max_clip_norm: Largest clip norm of an update with secure aggregation.
        max_element_bound: Largest `element_bound` of a job (its `clip_norm` if it
            sets none); by default only `max_clip_norm` limits it. A tighter bound
            reveals more about a site that declines because of it.
        ring_bits: Accepted ring widths of secure sums: 16, 24 and 32. Fewer bits are
            less precise, but just as secret.
        levels: Accepted numbers of levels: 3, 4, 8, 16 and 256. `[]` accepts only
            words of `ring_bits`, since a sum of few levels reveals where all sites
            are at an outermost level.
        weight_rules: Accepted weights in secure sums: `examples` reveals the total
            number of examples of all sites, `uniform` nothing.
        require_hybrid: Whether the keys of secure sums must be derived from ML-KEM-768
            as well as X25519.
        accept_two_sites: Whether to accept sums that only two sites agree to (those of
            a run, a group or a cohort) without record-level differential privacy, from
            which the other site can compute this site's update.
        max_rounds: Most rounds of a run.
        max_local_steps: Most local steps of a round: those of a job that fixes them,
            or `schedule.max_local_steps`. No limit by default.
        max_local_epochs: Most passes over the site's records in a round
            (`training.local_epochs`). No limit by default.
        max_accumulate: Most batches of a step in any round: `training.accumulate`, and
            each value in `training.accumulate_from`.
        max_values: Most values of a model, its frozen ones and its buffers included,
            checked before memory is allocated for it. A relay compares what the
            aggregator states.
        report_energy: Whether a round's energy leaves the site, in joules and gCO2e,
            beside its processor time: never with differential privacy or secure
            aggregation. It is that of the whole machine while it works on the round,
            and unknown where `compute.measure` is off or nothing measures the GPUs.
        functions: Functions that a job may name, also inside options:
            `module:function`; `module:*` for every function that the module itself
            defines; or `./file.py:function` for a file beside this one, which must be
            identical to the job author's. Never list a function that does harm with
            some options.
        statistics: What the site answers to jobs of statistics, which add up columns.
    """

    privacy: str = key(default="record", choices=UNITS)
    max_epsilon: float = key(default=8.0, above=0.0)
    max_delta: float = key(default=1e-4, above=0.0, below=1.0)
    public_held_out: bool = False
    total_epsilon: float | None = key(default=None, above=0.0)
    total_delta: float | None = key(default=None, above=0.0, below=1.0)
    secure_aggregation: bool = True
    min_sites: int | None = key(default=None, low=2)
    min_group: int | None = key(default=None, low=1)
    accept_dropouts: bool = False
    colluding_sites: int = key(default=0, low=0)
    max_clip_norm: float = key(default=10.0, above=0.0)
    max_element_bound: float | None = key(default=None, above=0.0)
    ring_bits: tuple[int, ...] = RING_BITS
    levels: tuple[int, ...] = LEVELS
    weight_rules: tuple[str, ...] = WEIGHT_RULES
    require_hybrid: bool = True
    accept_two_sites: bool = False
    max_rounds: int = key(default=10_000, low=1)
    max_local_steps: int | None = key(default=None, low=1)
    max_local_epochs: int | None = key(default=None, low=1)
    max_accumulate: int = key(default=10_000, low=1)
    max_values: int = key(default=1_000_000_000, low=1)
    report_energy: bool = False
    functions: tuple[str, ...] = (
        "clients.models:*",
        "clients.frozen_features:oriented_gradients",
        "clients.data:digits",
        "clients.data:breast_cancer",
    )
    statistics: StatisticsPolicySpec = StatisticsPolicySpec()

    def smallest_group(self, num_sites: int) -> int:
        """Fewest sites that sums together may single out, in a run of this many."""
        if self.min_group is not None:
            return self.min_group
        return max(self._fewest_open(num_sites), self.colluding_sites + 2)

    @property
    def demands_privacy(self) -> bool:
        """Whether jobs without differential privacy are refused."""
        return self.privacy != "none"

    def fewest_in_sum(self, num_sites: int) -> int:
        """Fewest updates that a secure sum must hold, in a run of this many sites."""
        if self.min_sites is None and self.privacy in {"record", "person"}:
            return _PAIR
        return self._fewest_open(num_sites)

    def _fewest_open(self, num_sites: int) -> int:
        """The same without differential privacy."""
        if self.min_sites is not None:
            return self.min_sites
        return _PAIR if self.accept_two_sites and num_sites == _PAIR else _USUAL
