"""Numbers that a site would say in every round alike are on a coarse public grid."""

import pytest
from hypothesis import given, strategies as st
from support.secagg_parties import RECORD, Parties

from federation.messages import MetricSums
from privacy.counts import coarse
from privacy.secagg.protocol import train

PARTIES = Parties(5)


def test_grid_has_three_significant_bits():
    """Four numbers for each doubling, and those up to eight."""
    found = sorted({coarse(count) for count in range(33)})
    assert found == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_grid_is_above_and_near_and_in_order(one: int, other: int):
    """It is off by less than a quarter, and tells not even which side by order."""
    found = coarse(one)
    assert one <= found <= one * 1.25
    assert coarse(found) == found
    assert (one <= other) <= (found <= coarse(other))


@given(st.integers(1, 1 << 40), st.floats(0, 10), st.floats(0, 1))
def test_means_stay(count: int, loss: float, accuracy: float):
    """Mean loss and, to half a prediction, accuracy."""
    sums = MetricSums(
        count=count, loss_sum=loss * count, metrics={"correct": int(accuracy * count)}
    )
    found = train.coarse_sums(sums)
    assert found is not None
    assert found.count == coarse(count)
    assert found.loss_sum / found.count == pytest.approx(loss)
    assert 0 <= found.metrics["correct"] <= found.count
    gap = abs(found.accuracy - sums.metrics["correct"] / count)
    assert gap <= 0.5 / found.count + 1e-12


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threshold": 4}, True),
        ({"threshold": 5}, False),
        ({"threshold": 4, "differential_privacy": RECORD}, False),
    ],
    ids=["dropouts", "all or nothing", "private"],
)
def test_grid_is_used_where_sites_may_be_absent(
    changes: dict[str, object], *, expected: bool
):
    """Under differential privacy numbers are withheld, noised or public anyway."""
    assert train.counts_coarsely(PARTIES.contract(**changes)) is expected


def test_nothing_counted_stays_nothing():
    """No sums, or sums over no prediction."""
    empty = MetricSums(count=0, loss_sum=0.0, metrics={"correct": 0})
    assert train.coarse_sums(None) is None
    assert train.coarse_sums(empty) == empty
