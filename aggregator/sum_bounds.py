"""Bounds on the sums of a round if every site is honest.

A header is input from sites that cannot be checked one by one: modulo 2^64 one site
can make of each sum what it wants. So each sum is held against what honest sites
guarantee, and against the others, before anything is made of it. The norm of the
update's sum is checked where it is decoded (``privacy.secagg.arithmetic.ring``).

What passes may still be a lie, of a size that an honest site could report.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aggregator.weighting import ROUNDING, most_trained_on
from federation.compression.rotation import padded
from federation.job.metrics import (
    MAX_PREDICTIONS,
    has_noised_results,
    loss_of,
    metrics_of,
    reported_loss_of,
    reported_of,
)
from federation.job.spec import JobSpec
from privacy.counts import coarse
from privacy.dp import adaptive_clip
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.levels import most_energy
from privacy.secagg.arithmetic.noise_shares import honest_shares
from privacy.secagg.arithmetic.ring import (
    A_LIE,
    NOISE_TAIL,
    WEIGHT_ERROR,
    SumOutOfRange,
)
from privacy.secagg.protocol import train

_MICRO = 1e-6
_BIT_GRID = 2.0**-10  # of a bit with its noise

_Totals = Mapping[str, float]
_Faults = Iterator[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTerms:
    """The task of the sites in a sum, and the rules of their answers.

    Attributes:
        contract: What they agreed to.
        num_updates: n, the sites in the sum.
        round_index: The round, from 1.
        steps: The local steps that were chosen for it; None for the job's number.
        training: Whether they trained.
        evaluation: Whether they evaluated the model that they were sent.
    """

    job: JobSpec
    contract: Contract
    num_updates: int
    round_index: int
    training: bool
    evaluation: bool
    steps: range | None = None


def check_totals(totals: _Totals, asked: SumTerms) -> None:
    """Check a header's sums against honest bounds, and against each other.

    Args:
        totals: The sums, by slot.
        asked: What was asked.

    Raises:
        SumOutOfRange: No honest sites make them. Of honest sites it is raised with a
            probability below 2^-102 where the clip norm adapts, by the tail of the
            noise on their bits, and never otherwise.
    """
    for rule in (
        _weight_faults,
        _training_faults,
        _evaluation_faults,
        _clip_faults,
        _level_faults,
    ):
        for fault in rule(totals, asked):
            raise SumOutOfRange(f"{fault}: {A_LIE}")


def _weight_faults(totals: _Totals, asked: SumTerms) -> _Faults:
    """The weights, each in (0, 1]: examples over the contract's most examples."""
    weight, n = totals[train.WEIGHT], asked.num_updates
    if not asked.training:
        if weight:
            yield f"no site trained, but the weights sum to {weight:.9g}"
    elif asked.contract.weight_rule == "uniform":
        if weight != n:
            yield f"the weights of {n} sites sum to {weight:.9g}, each of them being 1"
    else:
        most, error = asked.contract.max_examples, n * WEIGHT_ERROR
        if not n / most - error <= weight <= n + error or weight <= 0:
            yield (
                f"the weights of {n} sites sum to {weight:.9g}, each of them being "
                f"from 1/{most} to 1"
            )


def _training_faults(totals: _Totals, asked: SumTerms) -> _Faults:
    """Sums over the training examples; with differential privacy there are none."""
    private = asked.job.privacy.differential_privacy.enabled
    is_asked = asked.training and not private
    yield from _sum_faults(train.TRAINING, totals, asked, is_asked=is_asked)
    uniform = asked.contract.weight_rule == "uniform"
    largest = None if uniform else asked.contract.max_examples
    most = most_trained_on(
        asked.job, largest, round_index=asked.round_index, steps=asked.steps
    )
    most = MAX_PREDICTIONS if most is None else most
    if train.counts_coarsely(asked.contract):
        most = coarse(most)
    count = totals[f"{train.TRAINING}_count"]
    if count > asked.num_updates * most:
        yield (
            f"{asked.num_updates} sites report {count:g} predictions in training, "
            f"{most} at most each"
        )


def _evaluation_faults(totals: _Totals, asked: SumTerms) -> _Faults:
    """Sums over the held-out examples."""
    yield from _sum_faults(train.EVALUATION, totals, asked, is_asked=asked.evaluation)
    most, count = train.most_evaluated(asked.job), totals[f"{train.EVALUATION}_count"]
    if count > asked.num_updates * most:
        yield (
            f"{asked.num_updates} sites report {count:g} predictions in evaluation, "
            f"{most} at most each"
        )


def _sum_faults(
    kind: str, totals: _Totals, asked: SumTerms, *, is_asked: bool
) -> _Faults:
    job, training = asked.job, asked.job.training
    is_held_out = kind == train.EVALUATION
    metrics = reported_of(job) if is_held_out else metrics_of(training)
    count, loss, *values = (
        totals[f"{kind}_{name}"] for name in ("count", "loss", *metrics)
    )
    if not is_asked and (count or loss or any(values)):
        yield f"no site was asked for the sums of {kind}, but they are not 0"
    # Each site rounds a metric to the grid of the header.
    error = asked.num_updates * WEIGHT_ERROR
    for (name, metric), value in zip(metrics.items(), values, strict=True):
        slack = 0.0 if metric.is_whole else error + metric.reach * count * ROUNDING
        if not metric.low * count - slack <= value <= metric.high * count + slack:
            yield f"{count:g} predictions in {kind} have {name} of {value:g}"
    if count == 0 and loss:
        yield f"no prediction in {kind} has a loss"
    is_noised = is_held_out and has_noised_results(job)
    metric = loss_of(training) if is_noised else reported_loss_of(training)
    # Each site rounds its loss to a micronat.
    slack = asked.num_updates * _MICRO + metric.reach * count * ROUNDING
    if not metric.low * count - slack <= loss * _MICRO <= metric.high * count + slack:
        yield (
            f"{count:g} predictions in {kind} have a loss that is not from "
            f"{metric.low} to {metric.high} each"
        )


def _clip_faults(totals: _Totals, asked: SumTerms) -> _Faults:
    """The bits that the clip norm follows: +-1/2 each, with noise."""
    if train.WITHIN_CLIP not in totals:
        return
    bits, n = totals[train.WITHIN_CLIP], asked.num_updates
    most = _most_bits(asked) if asked.training else 0.0
    if abs(bits) > most:
        yield f"the clipping bits of {n} sites come to {bits:.4g}, at most {most:.4g}"


def _level_faults(totals: _Totals, asked: SumTerms) -> _Faults:
    """Of few levels: values that were clipped, and the squares of what was rounded."""
    if train.CLIPPED not in totals:
        return
    clipped, energy = totals[train.CLIPPED], totals[train.ENERGY]
    most = asked.num_updates * padded(asked.contract.num_values)
    if clipped > (most if asked.training else 0):
        yield f"{clipped:g} values were clipped, of {most if asked.training else 0:g}"
    largest = most_energy(asked.num_updates) if asked.training else 0.0
    if not 0 <= energy <= largest:
        yield (
            f"squares of {asked.num_updates} updates sum to {energy:.4g} of the "
            f"clip norm's, at most {largest:.4g}"
        )


def _most_bits(asked: SumTerms) -> float:
    """Largest sum of the bits, but for a noise tail of e^-72 to either side."""
    private, contract = asked.job.privacy.differential_privacy, asked.contract
    multiplier = contract.differential_privacy.noise_multiplier
    _, together = adaptive_clip.split(multiplier)
    shares = honest_shares(contract.threshold, private.colluding_sites)
    # A share of the noise, and the rounding of a Gaussian to the grid.
    deviation = math.hypot(together / math.sqrt(shares), _BIT_GRID)
    n = asked.num_updates
    return n / 2 + NOISE_TAIL * math.sqrt(n) * deviation * (1 + _BIT_GRID)
