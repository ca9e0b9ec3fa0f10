"""Values of the ``[privacy]`` tables that would protect nothing or cannot work.

What secure aggregation and each unit of privacy cannot be combined with is in
``federation.methods``.
"""

from federation.errors import JobError, broken
from federation.job.privacy_job import LEVELS
from federation.job.spec import JobSpec

_MOST_SITES = 64  # The protocol's limit, where we measured.
_RINGS = (16, 24, 32)
_MOST_COARSE_SITES = 16  # In a ring of 16 bits.
_TWO = 2


def check_secure_sum(job: JobSpec) -> list[JobError]:
    """Refuse sums that would hide too little."""
    secure, table = job.privacy.secure_aggregation, "privacy.secure_aggregation"
    if not secure.enabled:
        return []
    private, groups = job.privacy.differential_privacy, secure.groups
    num_sites, threshold, in_sum = len(job.sites), job.minimum_sites, job.sites_in_sum
    smallest, fewest = 2 * num_sites // 3 + 1, 2 if private.by_itself else 3
    hides_two = secure.two_sites_waiver or private.by_itself
    rules = {
        "schedule.minimum_sites: with secure aggregation the threshold is the quorum: "
        "remove this key": job.schedule.minimum_sites not in {None, threshold},
        "sites: a sum over one site hides nothing: name at least two": num_sites < _TWO,
        f"sites: secure aggregation is for at most {_MOST_SITES} sites, not "
        f"{num_sites}": num_sites > _MOST_SITES,
        f"{table}.two_sites_waiver: each of two sites can compute the other's update; "
        "true accepts that, or protect records with "
        "privacy.differential_privacy": num_sites == _TWO and not hides_two,
        f"{table}.threshold: {threshold} of {num_sites} sites is not from {smallest} "
        f"to {num_sites}: with fewer, a dishonest aggregator could unmask two sums of "
        "one round": not smallest <= threshold <= num_sites,
        f"{table}.threshold: no sum has {secure.threshold} updates: the largest of "
        "schedule.groups is smaller, and may miss nobody": (
            bool(job.schedule.groups)
            and (secure.threshold or 0) > max(map(len, job.schedule.groups))
        ),
        f"{table}.groups: {num_sites} sites make {groups} groups of {in_sum}, and a "
        f"sum must hold at least {fewest} updates: use fewer groups or more "
        "sites": groups is not None and in_sum < fewest,
        f"schedule.groups: a sum may have {in_sum} updates, and must hold at least "
        f"{fewest}": bool(job.schedule.groups) and in_sum < fewest,
        f"schedule.buffer_size: a sum has {in_sum} updates, and must hold at least "
        f"{fewest}": job.has_free_cohorts and in_sum < fewest,
        f"{table}.threshold: all {in_sum} sites of a sum must answer "
        "(schedule.buffer_size): remove this key, or name groups of sites "
        "(schedule.groups)": job.has_free_cohorts and secure.threshold is not None,
    }
    return broken(rules)


def check_ring(job: JobSpec) -> list[JobError]:
    """Refuse encodings of a secure sum that do not exist, or would be too coarse."""
    secure, table = job.privacy.secure_aggregation, "privacy.secure_aggregation"
    if not secure.enabled:
        return []
    bits, levels, bound = secure.ring_bits, secure.levels, secure.element_bound
    num_sites, norm = len(job.sites), job.update_clip_norm
    is_coarse = bits == _RINGS[0] and num_sites > _MOST_COARSE_SITES
    rules = {
        f"{table}.ring_bits: {bits} bits are not supported: choose 16, 24 or 32": bits
        not in _RINGS,
        f"{table}.ring_bits: 16 bits are too coarse for {num_sites} sites, beyond "
        f"{_MOST_COARSE_SITES}: use 24 or 32": is_coarse,
        f"{table}.levels: {levels} levels are not supported: choose one of "
        f"{', '.join(map(str, LEVELS))}": levels not in {None, *LEVELS},
        f"{table}.element_bound: no element exceeds clip_norm = {norm}: choose a "
        "smaller value, or remove this key": bound is not None and bound > norm,
    }
    return broken(rules)


def check_differential_privacy(job: JobSpec) -> list[JobError]:
    """Refuse values with which a unit of privacy would promise nothing.

    What depends on the data, such as a delta too large for it, a site finds out.
    """
    private, table = job.privacy.differential_privacy, "privacy.differential_privacy"
    num_sites, fewest = len(job.sites), job.minimum_sites
    noise, colluding = private.noise_multiplier, private.colluding_sites
    # Of all sites there is but one sum. Else 2 t > N + n_C, as in
    # privacy.secagg.agreement.contract.
    is_opened_twice = 2 * fewest <= num_sites + colluding and fewest < num_sites
    rules = {
        f"{table}.target_epsilon: set a limit: differential privacy without a bound on "
        "epsilon guarantees nothing": private.enabled and not private.target_epsilon,
        f"{table}.max_noise_multiplier: has no effect with noise_multiplier: remove "
        "one of them": None not in {noise, private.max_noise_multiplier},
        f"{table}.colluding_sites: a sum may hold {fewest} updates: if {colluding} "
        "collude, no other noise is left": private.in_sum and colluding >= fewest,
        f"{table}.colluding_sites: with {colluding} of them, a dishonest aggregator "
        f"could unmask two sums of {fewest} of {num_sites} sites, and their difference "
        "would have too little noise: raise "
        "privacy.secure_aggregation.threshold": private.in_sum and is_opened_twice,
    }
    return broken(rules)


def check_standardise(job: JobSpec) -> list[JobError]:
    """Refuse bounds of features that contradict each other."""
    wanted, key = job.privacy.differential_privacy.standardise, "standardise.high"
    if wanted is None:
        return []
    num_low, num_high = len(wanted.low), len(wanted.high)
    num_features = max(num_low, num_high)
    lows = wanted.low * (num_features if num_low == 1 else 1)
    highs = wanted.high * (num_features if num_high == 1 else 1)
    fits = 0 < len(lows) == len(highs)
    rules = {
        f"privacy.differential_privacy.{key}: there are {num_low} lower and {num_high} "
        "upper bounds: give one for each feature, or one for all": not fits,
        f"privacy.differential_privacy.{key}: each upper bound must exceed the lower "
        "one": not all(low < high for low, high in zip(lows, highs, strict=False)),
    }
    return broken(rules)
