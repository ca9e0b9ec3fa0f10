"""The keys of ``[policy]`` in ``site.toml``: what a site demands of a job."""

from dataclasses import dataclass

from federation.job.job_keys import key
from privacy.secagg.agreement.contract import WEIGHT_RULES
from privacy.secagg.arithmetic.ring import RING_BITS

_PAIR, _USUAL = 2, 3  # updates in a sum

UNITS = ("none", "site", "joint", "record")  # from the weakest promise on


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What the site demands of every job; it refuses a job that promises less.

    A table with the old name `[floor]` is read as well, with a warning.

    Attributes:
        privacy: Weakest unit of differential privacy that is accepted.
        max_epsilon: Largest epsilon of a run. If `privacy` is `none`, a run beyond it
            counts as one without differential privacy.
        max_delta: Largest delta of a run; likewise.
        public_held_out: Whether a job may declare the held-out data public, so that
            results on them leave without noise; likewise.
        total_epsilon: Largest epsilon of all runs on these records together, from
            everything that they have released of training and held-out records. Jobs
            with differential privacy are refused without it.
        total_delta: Delta that goes with it; by default the smallest of all the runs.
        secure_aggregation: Whether updates must be summed with secure aggregation.
        min_sites: Fewest updates in a secure sum: at most `threshold` of the job, which
            is the number of its sites where all must answer. By default 3; or 2 where
            `privacy` is `record`, or where `accept_two_sites` is set and the run is one
            of two.
        min_group: Fewest sites of a secure sum without differential privacy that all
            secure sums on this data may single out together, over all runs; `min_sites`
            or 3 by default, or `colluding_sites` and two if that is more. 1 lets a run
            be repeated without a site, which gives that site's update away.
        accept_dropouts: Whether a round without differential privacy may go on without
            fewer sites than that (a job's `threshold` below the number of its sites).
            The sums before and after then tell of what the absent sites add.
        colluding_sites: Other sites that may collude with the aggregator without
            learning this site's update.
        max_clip_norm: Largest clip norm of an update under secure aggregation.
        max_element_bound: Largest `element_bound` of a job, which is its `clip_norm`
            where it names none; no limit beside `max_clip_norm` by default. A tighter
            bound makes sums more precise, and says more of a site that declines because
            of it.
        ring_bits: Widths of the ring that are accepted for secure sums, of 16, 24 and
            32. Fewer bits are less precise, and no less secret.
        weight_rules: Weights that are accepted in secure sums: `examples` tell the
            aggregator how many examples all sites have together, `uniform` tell
            nothing.
        require_hybrid: Whether the keys of secure sums must rest on ML-KEM-768 as well
            as on X25519. Without it traffic that is recorded today can be read by a
            quantum computer.
        accept_two_sites: Whether a run of two sites without record-level differential
            privacy is accepted: the other site can tell this one's update.
        max_rounds: Most rounds of a run.
        functions: What a job may name as model or objective, `module:function`, or
            `module:*` for every function that the module itself defines; or
            `./file.py:function`, a file beside this one, which must be the same as that
            of whoever wrote the job. Models are
            called with the job's options, so name nothing that can call something else.
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
    weight_rules: tuple[str, ...] = WEIGHT_RULES
    require_hybrid: bool = True
    accept_two_sites: bool = False
    max_rounds: int = key(default=10_000, low=1)
    functions: tuple[str, ...] = (
        "clients.models:*",
        "clients.frozen_features:oriented_gradients",
        "clients.data:digits",
        "clients.data:breast_cancer",
    )

    def smallest_group(self, num_sites: int) -> int:
        """Fewest sites that sums together may single out, in a run of so many."""
        if self.min_group is not None:
            return self.min_group
        return max(self._fewest_open(num_sites), self.colluding_sites + 2)

    @property
    def demands_privacy(self) -> bool:
        """Whether jobs without differential privacy are refused."""
        return self.privacy != "none"

    def fewest_in_sum(self, num_sites: int) -> int:
        """Fewest updates that a secure sum of a run of so many sites must hold."""
        if self.min_sites is None and self.privacy == "record":
            return _PAIR
        return self._fewest_open(num_sites)

    def _fewest_open(self, num_sites: int) -> int:
        """The same where no differential privacy is demanded."""
        if self.min_sites is not None:
            return self.min_sites
        return _PAIR if self.accept_two_sites and num_sites == _PAIR else _USUAL
