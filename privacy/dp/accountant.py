"""Compute (epsilon, delta) from events: the ledger's accountant, and a looser bound.

``pld`` adds up privacy loss distributions (arXiv:1607.00133 made tight: see
``composition``) and is within 0.1 % of the truth. ``rdp`` adds up Renyi divergences
(arXiv:1908.10530); it is an independent and looser bound. A third library, for the
cross-check, is in ``cross_check``. Opacus's ``gdp`` is used nowhere: it is an
approximation by the central limit theorem that under-reports by up to a third.

Every epsilon holds for Poisson sampling, for one record that is added or removed; where
steps sample persons, for one person with all records.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from privacy.dp import composition
from privacy.dp.events import PrivacyEvent, total_slack
from privacy.dp.trade_off import EPSILONS, TradeOff

NEIGHBOURING_RELATION = "add or remove one record"
PERSON_RELATION = "add or remove all records of one person"
SITE_RELATION = "one site's data present or absent"
NO_SAMPLING = "no sampling: every site is in every round"
ALL_RECORDS = "no sampling: every record is in every sum"
PERSON_SAMPLING = "Poisson sampling: each person is in each step independently"
SAMPLING_ASSUMPTION = "Poisson sampling: each record is in each step independently"

# Numerical error of the transforms, as a probability; see MIN_DELTA.
_ROUNDING = 1e-12

# Below this the rounding of the transforms would be a part of delta that counts.
MIN_DELTA = 1e-10

# Whole orders have a closed form (arXiv:1908.10530, equation 30). The series of
# fractional ones, which give a bound that is up to 1 % tighter, takes seconds or does
# not converge when batches are large.
_WHOLE_ORDERS = (*range(2, 65), *(1 << power for power in range(7, 13)))
_ALL_ORDERS = (*(1 + tenths / 10 for tenths in range(1, 100)), *_WHOLE_ORDERS[9:])
_LARGE_BATCH = 0.06

Accountant = Literal["pld", "rdp"]


class EpsilonCurve:
    """Epsilon of a growing list of events, at a fixed delta; an upper bound.

    It depends on the events, not on their order. The first look at a kind of
    event takes about a tenth of a second, a further one milliseconds.

    Args:
        delta: Probability that is left to chance, from ``MIN_DELTA``, below 1.
    """

    def __init__(self, delta: float) -> None:
        """Start without events, at epsilon 0."""
        if not MIN_DELTA <= delta < 1:
            raise ValueError(f"delta is {delta}, not from {MIN_DELTA} up to 1")
        self._delta = delta
        self._events: tuple[PrivacyEvent, ...] = ()
        # What was asked for last: a charge is looked at, counted and reported.
        self._known: tuple[tuple[PrivacyEvent, ...], float] = ((), 0.0)

    def add(self, event: PrivacyEvent) -> None:
        """Count an event."""
        self._events = _merge((*self._events, event))

    def epsilon(self, *more: PrivacyEvent) -> float:
        """Epsilon of what was counted, and of ``more``, which is not counted.

        Returns:
            An upper bound, at least 0; infinity if there is none below 500, or if the
            slack of the events is not below delta.
        """
        events = _merge((*self._events, *more))
        if events != self._known[0]:
            self._known = events, self._compose(events)
        return self._known[1]

    def _compose(self, events: tuple[PrivacyEvent, ...]) -> float:
        left = self._delta - total_slack(events) - _ROUNDING
        if left <= 0:
            return float("inf")
        return composition.epsilon(_steps(events), left)


def epsilon(
    events: Iterable[PrivacyEvent], delta: float, accountant: Accountant = "pld"
) -> float:
    """Smallest epsilon for which all events together are (epsilon, delta)-private.

    Args:
        events: What was released, or will be; every event is about the same records.
        delta: From ``MIN_DELTA``, below 1.
        accountant: ``pld``, or ``rdp`` for the bound that is never below it.

    Returns:
        An upper bound; 0 without events, infinity if none can be given.

    Raises:
        ValueError: ``delta`` or ``accountant`` is out of range.
    """
    curve = EpsilonCurve(delta)
    if accountant == "pld":
        return curve.epsilon(*events)
    if accountant != "rdp":
        raise ValueError(f"accountant is {accountant!r}, not pld or rdp")
    return _renyi(_merge(tuple(events)), delta)


def trade_off(events: Iterable[PrivacyEvent]) -> TradeOff:
    """Bound every attack on all events together: epsilon and delta at once.

    Args:
        events: What was released; every event is about the same records.

    Returns:
        The curve of ``pld``; nothing that these events release lies above it.
    """
    return TradeOff(deltas(events, EPSILONS))


def deltas(
    events: Iterable[PrivacyEvent], epsilons: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Smallest delta of all events together for each epsilon, by ``pld``.

    Args:
        events: What was released; every event is about the same records.
        epsilons: From 0 on, shape ``(e,)``.

    Returns:
        Upper bounds, at most 1, shape ``(e,)``.
    """
    merged = _merge(tuple(events))
    slack = total_slack(merged) + _ROUNDING
    found = composition.deltas(_steps(merged), epsilons)
    return np.minimum(found + slack, 1.0)


def _merge(events: tuple[PrivacyEvent, ...]) -> tuple[PrivacyEvent, ...]:
    """Events of one kind as one event."""
    steps = Counter[tuple[float, float, float]]()
    for event in events:
        steps[(event.noise_multiplier, event.sampling_rate, event.slack)] += event.steps
    return tuple(
        PrivacyEvent(
            noise_multiplier=noise, sampling_rate=rate, slack=slack, steps=count
        )
        for (noise, rate, slack), count in sorted(steps.items())
        if count
    )


def _steps(events: tuple[PrivacyEvent, ...]) -> Mapping[composition.Mechanism, int]:
    steps = Counter[composition.Mechanism]()
    for event in events:
        mechanism = composition.Mechanism(event.noise_multiplier, event.sampling_rate)
        steps[mechanism] += event.steps
    return steps


def _renyi(events: tuple[PrivacyEvent, ...], delta: float) -> float:
    if not events:
        return 0.0
    left = delta - total_slack(events)
    if left <= 0:
        return float("inf")
    return float(_renyi_accountant(events).get_epsilon(left))


def renyi(
    events: Iterable[PrivacyEvent],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Renyi divergences of all events together, but for their slack.

    Args:
        events: What was released, or will be; at least one.

    Returns:
        Orders above 1, and an upper bound of the divergence at each, which may be
        infinite: shape ``(a,)`` both.
    """
    found = _renyi_accountant(_merge(tuple(events)))
    return np.asarray(found.orders, np.float64), np.asarray(found.rdp, np.float64)


def _renyi_accountant(events: tuple[PrivacyEvent, ...]) -> Any:
    # Slow to import, and only a site that accounts needs it.
    import dp_accounting  # noqa: PLC0415
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    large = any(_LARGE_BATCH < event.sampling_rate < 1 for event in events)
    accountant = RdpAccountant(orders=_WHOLE_ORDERS if large else _ALL_ORDERS)
    with _silent_about_orders():
        for event in events:
            step = dp_accounting.PoissonSampledDpEvent(
                event.sampling_rate,
                dp_accounting.GaussianDpEvent(event.noise_multiplier),
            )
            accountant.compose(step, event.steps)
    return accountant


@contextmanager
def _silent_about_orders() -> Iterator[None]:
    """Drop the library's warning for every order that it leaves out.

    The bound is the least over the orders that are left, so it stays a bound.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    log = logging.getLogger("absl")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)
