"""An epsilon that is printed is never below the one that was spent."""

import math
from decimal import Decimal

import pytest

from federation.epsilon_text import format_cap, format_epsilon, format_left


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (3.21, "3.21"),
        (3.2100001, "3.22"),
        (7.999, "8.00"),
        (0.00412, "0.0042"),
        (1e-9, "0.0000000010"),
        (123.4, "123.40"),
        (1.7e308, "1.7e+308"),
        (1.23e28, "1.3e+28"),
        (5e-324, "5.0e-324"),
        (math.inf, "inf"),
    ],
)
def test_epsilons_are_rounded_up(epsilon: float | None, expected: str):
    """A bound stays a bound."""
    assert expected == format_epsilon(epsilon)
    assert epsilon is None or float(expected) >= epsilon


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [(8.112, "8.1120"), (8.11201, "8.1121"), (0.0, "0.0000"), (1e-5, "0.000010")],
)
def test_more_places_are_rounded_up_as_well(epsilon: float, expected: str):
    assert expected == format_epsilon(epsilon, places=4)


@pytest.mark.parametrize(
    ("total", "epsilon", "expected"),
    [
        (20.0, 12.571, "7.42"),
        (20.0, 12.57, "7.43"),
        (20.005, 12.571, "7.42"),
        (20.0, 0.0, "20.00"),
        (20.0, 0.00412, "19.99"),
        (8.0, 7.999, "0.00"),
        (8.0, 8.5, "0.00"),
        (8.0, math.inf, "0.00"),
    ],
)
def test_what_is_left_is_rounded_down(total: float, epsilon: float, expected: str):
    """A person who adds both figures never finds more than the total."""
    left = format_left(total, epsilon)
    assert left == expected
    spent = Decimal(format_epsilon(epsilon))
    assert Decimal(left) + spent <= Decimal(repr(total)) or epsilon > total


def test_caps_are_as_they_were_set():
    """No digits that nobody wrote."""
    assert [format_cap(value) for value in (8.0, 0.5)] == ["8", "0.5"]
