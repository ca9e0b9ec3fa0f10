"""Plans the noise inside the secure sum, for the units ``joint`` and ``site``.

Noise that adds up is the same at every site, and the least of what any of them needs
is not enough: sites are planned together here, and each one's promise follows. All
that a plan takes from a site is one number, the noise multiplier that its records
need; where sites are on several machines, they state it (``introduction``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from clients.data.datasets import Dataset
from clients.data.privacy_units import (
    held_out_units,
    num_units,
    plural_of_units,
)
from clients.privacy import standardise
from clients.privacy.masking import SumNoise
from clients.training.local_federation import Federation
from clients.training.private_steps import (
    largest_batch,
    sampling_rate,
    sensitivity_of_sum,
)
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from privacy.counts import coarse
from privacy.dp import adaptive_clip
from privacy.dp.budget import (
    MIN_SIGNAL_TO_NOISE,
    check_delta,
    check_records,
    default_delta,
)
from privacy.dp.calibration import noise_multiplier
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import SLACK
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.arithmetic.ring import RingSpec

_TABLE = "privacy.differential_privacy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPrivacy:
    """Noise of all sites together, and the promise of each.

    Attributes:
        share: What each site adds.
        ring: The ring that has room for it.
        noise: Where it goes.
        deltas: By site, of those whose data are here.
        events: What a round costs such a site, for its accountant.
        signal_to_noise: Of the mean update: its largest norm over the norm of the
            noise on it, ``N / (z sqrt(d))`` but for shares beyond those counted on;
            None where records are the unit.
    """

    share: NoiseShare
    ring: RingSpec
    noise: SumNoise
    deltas: Mapping[SiteId, float]
    events: Mapping[SiteId, PrivacyEvent]
    signal_to_noise: float | None


def needs(federation: Federation) -> Mapping[SiteId, float]:
    """Noise multiplier that each site needs whose data are here, to keep its promise.

    Raises:
        JobError: Its promise cannot be kept with these data, rounds and batches.
    """
    if federation.job.privacy.differential_privacy.unit == "site":
        delta = delta_of_sites(federation.job)
        need = _multiplier(federation, delta, 1.0)
        return dict.fromkeys(federation.site_data, need)
    found = {
        name: _multiplier(federation, records.delta, records.rate, records.beside)
        for name, records in _records(federation).items()
    }
    most = federation.job.privacy.differential_privacy.max_noise_multiplier or math.inf
    for name, need in found.items():
        if need > most:
            raise JobError(
                f"site {name!r} needs a noise multiplier of {need:.4g} for its "
                f"records, and the job allows {most:g}: raise it, choose smaller "
                "batches or fewer rounds, or leave the site out",
                key=f"{_TABLE}.max_noise_multiplier",
            )
    return found


def plan(
    federation: Federation, stated: Mapping[SiteId, float] | None = None
) -> SumPrivacy:
    """Plan the noise of a job whose unit is ``joint`` or ``site``.

    From the same job and numbers follows the same plan, bit for bit, wherever it is
    made; ``needs`` of the same records may differ in its last digits elsewhere.

    Args:
        federation: Model, and data of the sites that are here.
        stated: What each site of the job needs; where all data are here, that
            follows from them.

    Raises:
        JobError: The promise cannot be kept with these sites, data, rounds and
            batches, or would leave nothing of the updates; the message says what
            would do.
    """
    if stated is None:
        stated = needs(federation)
    wanted = max(stated.values())
    if federation.job.privacy.differential_privacy.unit == "joint":
        return _plan_joint(federation, wanted)
    return _plan_sites(federation, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Records:
    """What follows from a site's number of records."""

    delta: float
    rate: float
    beside: tuple[PrivacyEvent, ...]


def _records(federation: Federation) -> Mapping[SiteId, _Records]:
    job = federation.job
    found = {}
    for name, (train, held_out) in federation.site_data.items():
        try:
            delta = delta_of_records(job, train, held_out)
            beside = standardise.events(job, train)
        except JobError as error:
            raise JobError(f"site {name!r}: {error.reason}", key=error.key) from error
        rate = sampling_rate(job, num_units(job, train))
        found[name] = _Records(delta=delta, rate=rate, beside=beside)
    return found


def _plan_joint(federation: Federation, wanted: float) -> SumPrivacy:
    share, ring = _share(federation, wanted, sensitivity_of_sum(federation.job))
    records = _records(federation)
    return SumPrivacy(
        share=share,
        ring=ring,
        noise=SumNoise(spans=federation.pool.trained_spans),
        deltas={name: each.delta for name, each in records.items()},
        events={
            name: PrivacyEvent(
                noise_multiplier=share.multiplier,
                sampling_rate=each.rate,
                steps=1,
                slack=SLACK,
            )
            for name, each in records.items()
        },
        signal_to_noise=None,
    )


def _plan_sites(federation: Federation, wanted: float) -> SumPrivacy:
    job = federation.job
    private, num_sites = job.privacy.differential_privacy, len(job.sites)
    bit_std = None
    if private.adaptive_clip:
        wanted, bit_std = adaptive_clip.split(wanted)
    share, ring = _share(federation, wanted, private.clip_norm)
    multiplier = share.multiplier
    if bit_std is not None:
        multiplier = adaptive_clip.together(multiplier, bit_std)
        bit_std /= math.sqrt(share.honest)
    event = PrivacyEvent(
        noise_multiplier=multiplier, sampling_rate=1.0, steps=1, slack=SLACK
    )
    names = list(federation.site_data)
    found = SumPrivacy(
        share=share,
        ring=ring,
        noise=SumNoise(spans=federation.pool.trained_spans, bit_std=bit_std),
        deltas=dict.fromkeys(names, delta_of_sites(job)),
        events=dict.fromkeys(names, event),
        signal_to_noise=_signal_to_noise(share, ring, num_sites),
    )
    _check_signal(found, federation)
    return found


def delta_of_records(
    job: JobSpec, train: Dataset, held_out: Dataset, *, most: float = 1.0
) -> float:
    """Delta of what a site promises of its records: the job's, or the default.

    It leaves the site, so it follows from the coarse number of records, which is never
    below the true one; of persons, where these are the unit.

    Args:
        job: With such a unit.
        train: The site's training data.
        held_out: Its held-out data.
        most: What the site's operator allows. The default is no larger: a smaller delta
            is a stronger promise.

    Raises:
        JobError: The site has too few records, or the delta is too large for them.
    """
    what = plural_of_units(job)
    check_records(coarse(num_units(job, train)), largest_batch(job), what=what)
    given = job.privacy.differential_privacy.delta
    count = coarse(num_protected(job, train, held_out))
    given = min(default_delta(count), most) if given is None else given
    return _delta(given, count, f"{what} (a number rounded up)")


def num_protected(job: JobSpec, train: Dataset, held_out: Dataset) -> int:
    """Units that a site's delta is for: of the larger set that noise protects."""
    has_noise = (
        job.evaluation.every > 0
        and job.privacy.differential_privacy.held_out == "noise"
    )
    held_out = held_out_units(job, train, held_out)
    return max(num_units(job, train), len(held_out) if has_noise else 0)


def _delta(given: float | None, count: int, what: str) -> float:
    delta = default_delta(count) if given is None else given
    check_delta(delta, count, what=what)
    return delta


def delta_of_sites(job: JobSpec) -> float:
    """Delta of what whole sites are promised: the job's, or the default."""
    given = job.privacy.differential_privacy.delta
    return _delta(given, len(job.sites), what="sites")


def _multiplier(
    federation: Federation,
    delta: float,
    rate: float,
    beside: tuple[PrivacyEvent, ...] = (),
) -> float:
    """What reaches the target with one release a round."""
    private = federation.job.privacy.differential_privacy
    if private.noise_multiplier is not None:
        return private.noise_multiplier
    if private.target_epsilon is None:
        raise ValueError("a checked job with differential privacy has a target")
    rounds = max(federation.job.rounds, 1) + private.reserve_rounds
    return noise_multiplier(
        private.target_epsilon, delta, rate, rounds, slack=SLACK, beside=beside
    )


def _share(
    federation: Federation, multiplier: float, sensitivity: float
) -> tuple[NoiseShare, RingSpec]:
    job = federation.job
    private = job.privacy.differential_privacy
    share = NoiseShare(
        multiplier=multiplier,
        sensitivity=sensitivity,
        size=federation.pool.num_trained,
        threshold=job.minimum_sites,
        colluding=private.colluding_sites,
    )
    try:
        ring = share.ring_spec(
            bits=job.privacy.secure_aggregation.ring_bits,
            num_sites=len(job.sites),
            clip_norm=job.update_clip_norm,
        )
    except ValueError as error:
        raise JobError(str(error), key="privacy.secure_aggregation") from None
    return share, ring


def _signal_to_noise(share: NoiseShare, ring: RingSpec, num_sites: int) -> float:
    noise = ring.noise_std * math.sqrt(num_sites * share.size)
    return num_sites * share.sensitivity * ring.scale / noise


def _check_signal(found: SumPrivacy, federation: Federation) -> None:
    job, ratio = federation.job, found.signal_to_noise or 0.0
    accepted = job.privacy.differential_privacy.accept_low_signal
    if ratio >= MIN_SIGNAL_TO_NOISE or accepted:
        return
    most = found.share.size * (ratio / MIN_SIGNAL_TO_NOISE) ** 2
    sites = math.ceil(len(job.sites) * MIN_SIGNAL_TO_NOISE / ratio)
    raise JobError(
        f"the mean of {len(job.sites)} updates of {found.share.size} values would have "
        f"a signal-to-noise ratio of {ratio:.3g}, below {MIN_SIGNAL_TO_NOISE}: the "
        f"result would be almost only noise. Use about {sites} sites, or a model that "
        f"trains {most:.0f} values, or fewer rounds, or a larger target_epsilon; or "
        'protect records (unit = "record"); true runs it anyway',
        key=f"{_TABLE}.accept_low_signal",
    )
