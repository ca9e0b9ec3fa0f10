"""Bounds on the numbers that a site states before a run, from the job alone.

They enter everybody's noise, contract and report: one site that states too large a
need would turn the model into noise. So a number that no honest site can state is
refused in the name of the site that states it: by the aggregator before others see it,
and by the other sites, in case the aggregator colludes.
"""

import math
from collections.abc import Mapping

from clients.privacy.sum_plan import delta_of_sites
from clients.training.private_steps import expected_batch, largest_batch
from federation.events import SitePrivacy
from federation.ids import SiteId
from federation.job.metrics import MAX_PREDICTIONS
from federation.job.spec import JobSpec
from federation.rounds.local_work import bounds
from privacy.dp.accountant import MIN_DELTA
from privacy.dp.budget import default_delta
from privacy.dp.calibration import (
    MAX_NOISE_MULTIPLIER,
    MIN_NOISE_MULTIPLIER,
    noise_multiplier,
)
from privacy.dp.errors import PrivacyUnreachable
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import SLACK
from privacy.membership.introduction import Introduction

# A calibration stops within 0.1 % of its target, and grids round noise up.
_TOLERANCE = 1.01
# A need so many times the next largest is worth a warning.
_DOMINANT = 1.5
_LEAST_RATE = 1 / MAX_PREDICTIONS

Bounds = tuple[float, float]


def largest_need(job: JobSpec) -> float:
    """Largest noise multiplier that a site of a job may need, with noise in the sum.

    That of a site with one expected batch of records, the fewest that a site may have;
    at most the job's ``max_noise_multiplier``.
    """
    private = job.privacy.differential_privacy
    if private.noise_multiplier is not None:
        return private.noise_multiplier
    if private.target_epsilon is None:
        raise ValueError("a checked job with differential privacy has a target")
    _, delta = _deltas(job)
    spec = private.standardise
    beside = (
        PrivacyEvent(noise_multiplier=each, sampling_rate=1.0, steps=1, slack=SLACK)
        for each in (() if spec is None else (spec.noise_multiplier,))
    )
    rounds = max(job.rounds, 1) + private.reserve_rounds
    try:
        most = noise_multiplier(
            private.target_epsilon, delta, 1.0, rounds, slack=SLACK, beside=[*beside]
        )
    except PrivacyUnreachable:  # With so few records.
        most = MAX_NOISE_MULTIPLIER
    return min(most * _TOLERANCE, private.max_noise_multiplier or math.inf)


def need_fault(job: JobSpec, need: float) -> str:
    """Say why a site's stated need of noise is refused; empty if it is not."""
    given = job.privacy.differential_privacy.noise_multiplier
    states = f"states that it needs a noise multiplier of {need:g}"
    if given is not None:
        # Such a job need not reach its target with all rounds. A site that states
        # another number whenever the run resumes could choose by results how the cap
        # is filled.
        return "" if need == given else f"{states}, but the job sets {given:g} for all"
    most = largest_need(job)
    if 0 < need <= most:
        return ""
    return (
        f"{states}, which all sites would have to add, and this job allows at most "
        f"{most:.4g} (one batch of records, or "
        "privacy.differential_privacy.max_noise_multiplier)"
    )


def dominance_notice(needs: Mapping[SiteId, float]) -> str:
    """Say which site's need alone decides everybody's noise; empty if none does."""
    ordered = sorted((need, site) for site, need in needs.items())
    (second, _), (most, site) = ordered[-2:]
    if most <= second * _DOMINANT:
        return ""
    return (
        f"site {site!r} needs a noise multiplier of {most:.4g} and no other site more "
        f"than {second:.4g}: all sites add noise for the few records that it states. "
        "Leave it out, or bound needs "
        "(privacy.differential_privacy.max_noise_multiplier)"
    )


def introduction_fault(job: JobSpec, found: Introduction, *, is_last: bool) -> str:
    """Say which number of an introduction no honest site of the job states.

    Args:
        job: As proposed.
        found: The site's answer.
        is_last: Whether it follows the last question: with noise in the sum, sites
            answer the first with their need and the second with their promise.

    Returns:
        What the site states, to be put after its name; empty if nothing is wrong.
    """
    private = job.privacy.differential_privacy
    hides = private.enabled or job.privacy.secure_aggregation.enabled
    if hides and (found.num_examples or found.num_held_out):
        return "states numbers of examples, which this job keeps private"
    if not is_last:
        return "" if found.needs is None else need_fault(job, found.needs)
    if (found.privacy is not None) != private.enabled:
        kind = "no promise" if private.enabled else "a promise"
        return f"makes {kind} of privacy, and the job has unit {private.unit!r}"
    return "" if found.privacy is None else _promise_fault(job, found.privacy)


def _promise_fault(job: JobSpec, promise: SitePrivacy) -> str:
    for name, ends in promise_bounds(job, promise).items():
        value = getattr(promise, name)
        if value is None or ends is None:
            if value is not ends:
                return f"promises {name} = {value}, which this job does not ask for"
        elif not ends[0] <= value <= ends[1]:
            return f"promises {name} = {value:g}, not from {ends[0]:g} to {ends[1]:g}"
    return ""


def promise_bounds(job: JobSpec, promise: SitePrivacy) -> Mapping[str, Bounds | None]:
    """Smallest and largest value of each number of a promise; None for no number.

    Args:
        job: As proposed.
        promise: Epochs take as many steps as follow from its own sampling rate.
    """
    private, training = job.privacy.differential_privacy, job.training
    cap, given = private.target_epsilon or 0.0, private.noise_multiplier
    most_delta, least_delta = _deltas(job)
    is_site = private.unit == "site"
    steps = bounds(job)[1]
    if private.in_sum:
        steps = 1
    elif not steps:
        rate = max(promise.sampling_rate, _LEAST_RATE)
        per_epoch = largest_batch(job) / expected_batch(job) / rate
        steps = math.ceil(training.num_epochs * (per_epoch + 1))
    has_noise = job.evaluation.every > 0 and private.held_out == "noise"
    most = MAX_NOISE_MULTIPLIER * _TOLERANCE
    return {
        "epsilon_cap": (cap, cap),
        "delta": (least_delta, most_delta),
        "noise_multiplier": (
            (given or MIN_NOISE_MULTIPLIER) / _TOLERANCE,
            given * _TOLERANCE if given else most,
        ),
        "sampling_rate": (1.0 if is_site else _LEAST_RATE, 1.0),
        "steps_per_round": (1, steps),
        "held_out_noise": (
            (math.ulp(0.0), most * MAX_PREDICTIONS) if has_noise else None
        ),
    }


def _deltas(job: JobSpec) -> Bounds:
    """Largest and smallest delta that a site of the job may promise."""
    private = job.privacy.differential_privacy
    if private.unit == "site":
        return (delta_of_sites(job),) * 2
    if private.delta is not None:
        return private.delta, private.delta
    return default_delta(largest_batch(job)), MIN_DELTA
