"""Calibrate the noise to a target epsilon: the inverse of ``accountant.epsilon``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from privacy.dp import accountant
from privacy.dp.errors import PrivacyUnreachable
from privacy.dp.events import MAX_STEPS, PrivacyEvent

# Noise of a hundred clip norms a step is not training any more.
MAX_NOISE_MULTIPLIER = 100.0
MIN_NOISE_MULTIPLIER = 0.05

# The result's epsilon is in [target * (1 - _WASTE), target * (1 - _HEADROOM)]. The
# headroom is for the accountant's grid, which is refined as steps accumulate: epsilon
# of fewer steps may be overestimated by that much more than epsilon of all of them,
# and a run must not be refused its last round for it.
_WASTE = 8e-4
_HEADROOM = 2e-4
_MAX_TRIES = 60

_KEY = "privacy.differential_privacy.target_epsilon"
_STATISTICS_NOISE = "privacy.differential_privacy.standardise.noise_multiplier"


def noise_multiplier(
    epsilon_cap: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    slack: float = 0.0,
    beside: Sequence[PrivacyEvent] = (),
    more: Sequence[tuple[float, int]] = (),
) -> float:
    """Smallest noise multiplier with which all steps stay within the target.

    Args:
        epsilon_cap: What may be spent, > 0.
        delta: From ``accountant.MIN_DELTA``, below 1.
        sampling_rate: Probability of each record to be in a step, in (0, 1].
        steps: Steps of the whole run, those held in reserve included.
        slack: Slack of each step; see ``events.Event``.
        beside: What else is released of the same records.
        more: Further steps with the same noise: sampling rate and number of each kind.

    Returns:
        Noise standard deviation over L2 sensitivity, from 0.05 to 100.

    Guarantee:
        ``epsilon`` of so many steps with it, and of what is released beside them, is
        at most the target, and at least 0.999 of it unless the result is the smallest
        that is given.

    Raises:
        PrivacyUnreachable: It would be over 100, or slack uses up delta; the message
            says what would reach the target.
        ValueError: An argument is out of range.
    """
    if not (math.isfinite(epsilon_cap) and epsilon_cap > 0):
        raise ValueError(f"epsilon_cap is {epsilon_cap}, not above 0")
    spent = _SpentEpsilon(delta, sampling_rate, steps, slack, beside, more)
    in_all = steps + sum(count for _, count in more)
    if in_all * slack >= delta / 2:
        raise PrivacyUnreachable(
            f"delta {delta:g} is used up by the slack of {in_all} steps, {slack:g} "
            f"each, so no noise is enough; use at most {int(delta / 2 / slack)} steps, "
            f"or a delta of at least {2 * in_all * slack:.2g}",
            key=_KEY,
        )
    goal = epsilon_cap * (1 - _HEADROOM)
    _check_beside(epsilon_cap, goal, delta, beside)
    if spent(MAX_NOISE_MULTIPLIER) > goal:
        raise PrivacyUnreachable(_advice(epsilon_cap, spent), key=_KEY)
    return _search(spent, goal, epsilon_cap * (1 - _WASTE))


def _check_beside(
    target: float, goal: float, delta: float, beside: Sequence[PrivacyEvent]
) -> None:
    taken = accountant.epsilon(beside, delta)
    if taken >= goal:
        raise PrivacyUnreachable(
            f"{target:g} at delta {delta:g} cannot be reached: noised statistics of "
            f"the same records use {taken:.3g} of it; give them more noise "
            f"({_STATISTICS_NOISE})",
            key=_KEY,
        )


@dataclass(frozen=True, slots=True)
class _SpentEpsilon:
    """Epsilon as a function of the noise multiplier."""

    delta: float
    sampling_rate: float
    steps: int
    slack: float
    beside: Sequence[PrivacyEvent]
    more: Sequence[tuple[float, int]] = ()

    def __call__(
        self,
        multiplier: float,
        *,
        sampling_rate: float | None = None,
        steps: int | None = None,
    ) -> float:
        kinds = [(sampling_rate or self.sampling_rate, steps or self.steps), *self.more]
        events = [
            PrivacyEvent(
                noise_multiplier=multiplier,
                sampling_rate=rate,
                steps=count,
                slack=self.slack,
            )
            for rate, count in kinds
        ]
        return accountant.epsilon([*events, *self.beside], self.delta)


def _search(spent: Callable[[float], float], goal: float, least: float) -> float:
    """Bracket by doubling from 1, then Illinois' false position in logarithms.

    Epsilon is close to a power of the multiplier, so a few steps are enough.
    """
    low = high = 1.0
    at_low = at_high = spent(1.0)
    while at_high > goal:
        low, at_low = high, at_high
        high = min(2 * high, MAX_NOISE_MULTIPLIER)
        at_high = spent(high)
    while at_low <= goal:
        if low == MIN_NOISE_MULTIPLIER:
            return low
        high, at_high = low, at_low
        low = max(low / 2, MIN_NOISE_MULTIPLIER)
        at_low = spent(low)
    over, under = _excess(at_low, goal), _excess(at_high, goal)
    moved = ""
    for _ in range(_MAX_TRIES):
        if at_high >= least:
            return high
        # Aim between the two ends of what is accepted, a little below the goal.
        share = (over + _aim(goal, least)) / (over - under)
        if not 0 < share < 1:
            share = 0.5
        middle = low * (high / low) ** share
        found = spent(middle)
        # An end that stays for a second time counts half, or it would stay for long.
        if found <= goal:
            high, at_high, under = middle, found, _excess(found, goal)
            over, moved = over / 2 if moved == "high" else over, "high"
        else:
            low, over = middle, _excess(found, goal)
            under, moved = under / 2 if moved == "low" else under, "low"
    return high


def _excess(value: float, goal: float) -> float:
    """Logarithm of value over goal, kept finite: epsilon may be 0 or infinite."""
    return max(-50.0, min(50.0, math.log(max(value, 1e-300) / goal)))


def _aim(goal: float, least: float) -> float:
    return math.log(goal / least) / 2


def _advice(target: float, spent: _SpentEpsilon) -> str:
    """Say which single change reaches the target with 100 clip norms of noise."""
    top = MAX_NOISE_MULTIPLIER
    goal = target * (1 - _HEADROOM)
    ways = [f"an epsilon of at least {_round_up(spent(top) / (1 - _HEADROOM)):g}"]
    fewer = _largest(lambda n: spent(top, steps=n) <= goal, spent.steps)
    if fewer:
        ways.append(f"at most {fewer} steps in all (fewer rounds or local steps)")
    parts = 1 << 20
    share = _largest(
        lambda n: spent(top, sampling_rate=spent.sampling_rate * n / parts) <= goal,
        parts,
    )
    if share:
        times = _round_up(parts / share)
        ways.append(
            f"{times:g} times as many records, or a batch {times:g} times smaller"
        )
    return (
        f"{target:g} at delta {spent.delta:g} cannot be reached: {spent.steps} steps "
        f"that draw each record with probability {spent.sampling_rate:.3g} need noise "
        f"of more than {top:g} clip norms a step; what would reach it: "
        + "; or ".join(ways)
    )


def _largest(holds: Callable[[int], bool], too_many: int) -> int:
    """Largest number that holds, below one that does not; 0 if none does."""
    low, high = 0, min(too_many, MAX_STEPS)
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _round_up(value: float) -> float:
    """Two digits, upwards, so that the advice can be followed to the letter."""
    if not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
