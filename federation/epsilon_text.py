"""Epsilons for people: a spent one is rounded up, and what is left is rounded down.

Sites, the aggregator and every tool print them with these functions, so that their
figures agree and none claims more privacy than there is.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_FEWEST, _MOST = -12, 6  # powers of ten of an epsilon that is written out
_CENT = Decimal("0.01")


def format_epsilon(epsilon: float | None, *, places: int = 2) -> str:
    """An upper bound, rounded up: ``3.21``, ``0.0042``; a dash for None.

    Args:
        epsilon: What was spent.
        places: Decimals; a small epsilon gets as many as its first two digits need.
    """
    if epsilon is None:
        return "-"
    if not math.isfinite(epsilon):
        return str(epsilon)
    # The decimal that a person would write, not the binary one just above it.
    exact = Decimal(repr(float(epsilon)))
    if epsilon and not _FEWEST <= exact.adjusted() <= _MOST:  # A site may claim it.
        place = Decimal(1).scaleb(exact.adjusted() - 1)
        return f"{exact.quantize(place, ROUND_CEILING):.1e}"
    digit = min(-places, exact.adjusted() - 1) if exact else -places
    return f"{exact.quantize(Decimal(1).scaleb(digit), ROUND_CEILING):f}"


def format_left(total: float, epsilon: float) -> str:
    """What is left of a total, so that it and ``format_epsilon`` never exceed it.

    Args:
        total: What may be spent.
        epsilon: What has been spent.
    """
    spent = Decimal(format_epsilon(epsilon))
    left = max(Decimal(0), Decimal(repr(total)) - spent)
    return f"{left.quantize(_CENT, ROUND_FLOOR):f}"


def format_cap(epsilon: float) -> str:
    """A bound that a person has set, as it was set: ``8``, ``0.5``."""
    return f"{epsilon:g}"
