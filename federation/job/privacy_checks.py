"""Combinations with secure aggregation and differential privacy that a job refuses.

Each refusal names the key and says why: most of these would train happily and protect
nothing.
"""

from collections.abc import Iterator

from federation.errors import JobError
from federation.job.metrics import LANGUAGE
from federation.job.privacy_job import (
    LEVELS,
    DifferentialPrivacySpec,
)
from federation.job.spec import JobSpec

Faults = Iterator[JobError]


def check_secure_aggregation(job: JobSpec) -> Faults:
    """Yield what secure aggregation cannot do or would not protect."""
    secure, table = job.privacy.secure_aggregation, "privacy.secure_aggregation"
    if not secure.enabled:
        return
    rule, num_sites = job.aggregation.combine, len(job.sites)
    yield from _refuse(
        rule != "mean" and secure.groups is None,
        "aggregation.combine",
        f"{rule} compares updates, but the server sees only their sum: set "
        f"{table}.groups, so that it compares sums of groups; or use mean, where only "
        "the clip norm limits a bad site",
    )
    yield from _refuse(
        job.communication.codec.name != "identity",
        "communication.codec.name",
        f"updates are sent as masked ring elements of {table}.ring_bits bits: choose "
        f"identity here, and fewer bits there, or {table}.levels",
    )
    yield from _refuse(
        job.communication.links.changes,
        "communication.down_content",
        "sites sign the digest of the whole model that they receive: use model, or sum "
        f"with {table}.levels",
    )
    yield from _refuse(
        job.aggregation.weights == "dynamic",
        "aggregation.weights",
        "dynamic weights need each site's loss, which is hidden: use examples",
    )
    yield from _refuse(
        job.schedule.sites_per_round is not None,
        "schedule.sites_per_round",
        "with secure aggregation every site takes part in every round: remove this key",
    )
    yield from _refuse(
        job.schedule.minimum_sites not in {None, job.minimum_sites},
        "schedule.minimum_sites",
        "with secure aggregation the threshold is the quorum: remove this key",
    )
    yield from _refuse(
        secure.ring_bits not in {16, 24, 32},
        f"{table}.ring_bits",
        f"{secure.ring_bits} bits are not supported: choose 16, 24 or 32",
    )
    yield from _refuse(
        secure.ring_bits == 16 and num_sites > 16,  # noqa: PLR2004
        f"{table}.ring_bits",
        f"16 bits are too coarse for {num_sites} sites, beyond 16: use 24 or 32",
    )
    yield from _refuse(
        secure.levels not in {None, *LEVELS},
        f"{table}.levels",
        f"{secure.levels} levels are not supported: choose one of "
        f"{', '.join(map(str, LEVELS))}",
    )
    yield from _refuse(
        secure.element_bound is not None
        and secure.element_bound > job.update_clip_norm,
        f"{table}.element_bound",
        f"no element exceeds clip_norm = {job.update_clip_norm}: choose a smaller "
        "value, or remove this key",
    )
    yield from _refuse(
        secure.clip_elements and secure.element_bound is None,
        f"{table}.clip_elements",
        "there is nothing to clip to: set element_bound",
    )
    yield from _refuse(
        num_sites < 2,  # noqa: PLR2004
        "sites",
        "a sum over one site hides nothing: name at least two",
    )
    yield from _refuse(
        num_sites > 64,  # noqa: PLR2004  # The protocol's limit, where we measured.
        "sites",
        f"secure aggregation is for at most 64 sites, not {num_sites}",
    )
    yield from _refuse(
        num_sites == 2  # noqa: PLR2004
        and not secure.two_sites_waiver
        and not job.privacy.differential_privacy.by_itself,
        f"{table}.two_sites_waiver",
        "each of two sites can compute the other's update; true accepts that, "
        "or protect records with privacy.differential_privacy",
    )
    yield from _check_threshold(job)
    yield from _check_groups(job)


def _check_groups(job: JobSpec) -> Faults:
    """Refuse groups that would hide too little, or that nothing compares."""
    groups, table = job.privacy.secure_aggregation.groups, "privacy.secure_aggregation"
    private, rule = job.privacy.differential_privacy, job.aggregation.combine
    if groups is None:
        return
    fewest = 2 if private.by_itself else 3
    yield from _refuse(
        rule == "mean",
        f"{table}.groups",
        "a mean does not compare groups, and smaller sums hide less: remove this key, "
        "or choose a robust aggregation.combine",
    )
    yield from _refuse(
        job.sites_in_sum < fewest,
        f"{table}.groups",
        f"{len(job.sites)} sites make {groups} groups of {job.sites_in_sum}, and a sum "
        f"must hold at least {fewest} updates: use fewer groups or more sites",
    )
    yield from _refuse(
        job.privacy.secure_aggregation.threshold is not None,
        f"{table}.threshold",
        "all sites of a group must answer, and the rule continues without an "
        "incomplete group: remove this key",
    )
    yield from _refuse(
        private.in_sum,
        f"{table}.groups",
        f'the noise of unit = "{private.unit}" is planned for the sum of all sites, '
        'and a group\'s share is too small: use unit = "record", or remove groups',
    )


def check_differential_privacy(job: JobSpec) -> Faults:
    """Refuse what differential privacy cannot be combined with.

    What depends on the data, such as a delta too large for it, a site finds out.
    """
    private, table = job.privacy.differential_privacy, "privacy.differential_privacy"
    yield from _check_standardise(job, f"{table}.standardise")
    if not private.enabled:
        given = [
            name
            for name in ("target_epsilon", "delta", "noise_multiplier")
            if getattr(private, name) is not None
        ]
        if given:
            yield JobError(
                f'{given[0]} has no effect with unit = "none": set unit = "record", or '
                "remove this key",
                key=f"{table}.{given[0]}",
            )
        return
    yield from _check_unused(private, table)
    if private.in_sum:
        yield from _check_noise_in_sum(job)
    if private.unit == "joint":
        yield from _check_joint(job)
    if private.of_persons:
        yield from _check_persons(job)
    if private.unit == "site":
        yield from _check_site(job)
    yield from _refuse(
        private.target_epsilon is None,
        f"{table}.target_epsilon",
        "set a limit: differential privacy without a bound on epsilon guarantees "
        "nothing",
    )
    yield from _refuse(
        job.aggregation.weights != "uniform",
        "aggregation.weights",
        f"{job.aggregation.weights} weights reveal how many records a site holds, "
        'which differential privacy hides: set weights = "uniform"',
    )
    yield from _refuse(
        job.training.clip_grad_norm is not None and private.unit != "site",
        "training.clip_grad_norm",
        "clipping a batch's gradient does not bound one record's part; "
        f"{table}.clip_norm clips each record's gradient: remove this key",
    )


def _check_standardise(job: JobSpec, table: str) -> Faults:
    """Refuse noised statistics that protect no one, and invalid bounds."""
    private = job.privacy.differential_privacy
    wanted = private.standardise
    if wanted is None:
        return
    num_low, num_high = len(wanted.low), len(wanted.high)
    num_features = max(num_low, num_high)
    pairs = zip(
        wanted.low * (num_features if num_low == 1 else 1),
        wanted.high * (num_features if num_high == 1 else 1),
        strict=False,
    )
    unit = private.unit
    yield from _refuse(
        unit not in {"record", "joint", "person"},
        table,
        f'unit = "{unit}" does not charge for single records or persons, and permits '
        "exact statistics of a site's own data: standardise in the source, and remove "
        "this table",
    )
    yield from _refuse(
        job.training.task in LANGUAGE,
        table,
        "tokens have no mean: remove this table",
    )
    yield from _refuse(
        not num_low or not num_high or len({1, num_low, num_high}) > 2,  # noqa: PLR2004
        f"{table}.high",
        f"there are {num_low} lower and {num_high} upper bounds: give one for "
        "each feature, or one for all",
    )
    yield from _refuse(
        not all(low < high for low, high in pairs),
        f"{table}.high",
        "each upper bound must exceed the lower one",
    )


def _check_unused(private: DifferentialPrivacySpec, table: str) -> Faults:
    """Refuse keys without effect, so that no one relies on them."""
    default, unit = DifferentialPrivacySpec(), private.unit
    used = {
        "colluding_sites": private.in_sum,
        "records_per_person": private.of_persons,
        "max_noise_multiplier": unit == "joint" and private.noise_multiplier is None,
        "adaptive_clip": unit == "site",
        "accept_low_signal": unit == "site",
        "clip_quantile": private.adaptive_clip,
        "clip_rate": private.adaptive_clip,
    }
    for name, is_used in used.items():
        if not is_used and getattr(private, name) != getattr(default, name):
            where = "adaptive_clip" if name.startswith("clip_") else 'unit = "site"'
            where = 'unit = "joint" or "site"' if name == "colluding_sites" else where
            where = 'unit = "person"' if name == "records_per_person" else where
            if name == "max_noise_multiplier":
                where = 'unit = "joint" without noise_multiplier'
            yield JobError(
                f"it is for {where} only: remove this key", key=f"{table}.{name}"
            )


def _check_noise_in_sum(job: JobSpec) -> Faults:
    """Refuse what noise inside a secure sum cannot be combined with."""
    private, table = job.privacy.differential_privacy, "privacy.differential_privacy"
    secure, num_sites = job.privacy.secure_aggregation, len(job.sites)
    opened_once = 2 * job.minimum_sites - num_sites - 1
    yield from _refuse(
        not secure.enabled,
        "privacy.secure_aggregation.enabled",
        f'with unit = "{private.unit}" one site\'s noise alone does not '
        "protect it, so nobody may see its update: set this to true",
    )
    yield from _refuse(
        private.colluding_sites >= job.minimum_sites,
        f"{table}.colluding_sites",
        f"a sum may hold {job.minimum_sites} updates: if {private.colluding_sites} "
        "collude, no other noise is left",
    )
    yield from _refuse(
        # Of all sites there is but one sum. Else 2 t > N + n_C, as in
        # privacy.secagg.agreement.contract.
        opened_once < private.colluding_sites and job.minimum_sites < num_sites,
        f"{table}.colluding_sites",
        f"with {private.colluding_sites} of them, a dishonest aggregator could unmask "
        f"two sums of {job.minimum_sites} of {num_sites} sites, and their difference "
        "would have too little noise: raise privacy.secure_aggregation.threshold",
    )
    yield from _refuse(
        secure.ring_bits == 16,  # noqa: PLR2004
        "privacy.secure_aggregation.ring_bits",
        "16 bits have no room for noise: use 24 or 32",
    )
    yield from _refuse(
        secure.element_bound is not None,
        "privacy.secure_aggregation.element_bound",
        "the noise is made for the grid that clip_norm sets: remove this key",
    )


def _check_joint(job: JobSpec) -> Faults:
    training, optimizer = job.training, job.training.optimizer
    yield from _refuse(
        training.local_steps != 1,
        "training.local_steps",
        "shared noise protects only one step per round, because afterwards a site's "
        'own weights hold only its own share. Set this to 1, or use unit = "record"',
    )
    yield from _refuse(
        optimizer.name != "sgd" or bool(optimizer.momentum),
        "training.optimizer",
        "joint noise is calibrated to one plain step, without adam, muon or momentum: "
        "use sgd here, and aggregation.server_optimizer for the rest",
    )
    yield from _refuse(
        bool(optimizer.weight_decay),
        "training.optimizer.weight_decay",
        "the sum may hold only clipped gradients: set this to 0",
    )
    yield from _refuse(
        training.learning_rate.name != "constant"
        or training.learning_rate.warmup_steps > 0,
        "training.learning_rate",
        "the noise is calibrated to one learning rate: use constant, without warm-up",
    )


def _check_persons(job: JobSpec) -> Faults:
    is_dealt = sum(site.data is None for site in job.sites) > 1
    kind = "by_person" if job.data is None else job.data.partition.kind
    yield from _refuse(
        is_dealt and kind != "by_person",
        "data.partition.kind",
        f"{kind!r} deals the records of one person to several sites, each of which "
        'would promise its epsilon for its part alone: use "by_person"',
    )


def _check_site(job: JobSpec) -> Faults:
    private, table = job.privacy.differential_privacy, "privacy.differential_privacy"
    yield from _refuse(
        job.privacy.secure_aggregation.clip_norm is not None,
        "privacy.secure_aggregation.clip_norm",
        f"updates are clipped once, to {table}.clip_norm: remove this key",
    )
    yield from _refuse(
        private.held_out == "noise" and job.evaluation.every > 0,
        f"{table}.held_out",
        "the noise on results hides one held-out record, but the unit is a whole site: "
        'declare the held-out data "public", or set evaluation.every = 0',
    )


def _refuse(is_broken: bool, key: str, text: str) -> Faults:  # noqa: FBT001 -- a rule's
    """Yield an error if a rule is broken."""
    if is_broken:
        yield JobError(text, key=key)


def _check_threshold(job: JobSpec) -> Faults:
    num_sites, threshold = len(job.sites), job.minimum_sites
    smallest = 2 * num_sites // 3 + 1
    if not smallest <= threshold <= num_sites:
        yield JobError(
            f"{threshold} of {num_sites} sites is not from {smallest} to {num_sites}: "
            "with fewer, a dishonest aggregator could unmask two sums of one round",
            key="privacy.secure_aggregation.threshold",
        )
