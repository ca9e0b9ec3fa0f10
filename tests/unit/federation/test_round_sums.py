"""What a round adds up: sums without verdicts and without events."""

import numpy as np
from support import toy

from federation.clock import VirtualClock
from federation.messages import LedgerAnchor, MetricSums, PrivacySpent
from federation.rounds.round_sums import RoundSums
from federation.vectors import Role

SITE, OTHER, _ = toy.SITES
RESULT = MetricSums(count=10, loss_sum=5.0, metrics={"correct": 5})


def opened() -> RoundSums:
    """The sums of a round that begins at second 0."""
    return RoundSums(clock=VirtualClock(), start=VirtualClock().monotonic())


def spent(epsilon: float, *, train: int) -> PrivacySpent:
    """What a ledger with so many charges says."""
    return PrivacySpent(
        epsilon=epsilon,
        delta=1e-5,
        held_out_epsilon=None,
        anchor=LedgerAnchor(train=train),
    )


def test_metrics_are_pooled_over_sites():
    """Training as a sum; evaluations by site, and as a sum when it is asked for."""
    sums = opened()
    for site in (SITE, OTHER):
        sums.add_update(
            toy.update(site, training=RESULT, evaluation=RESULT), is_fresh=True
        )
    assert sums.training == RESULT + RESULT
    assert sums.evaluations == {SITE: RESULT, OTHER: RESULT}
    assert sums.pooled_evaluation() == RESULT + RESULT


def test_epsilon_is_the_largest_and_anchors_only_grow():
    """A ledger that says less than before has said it already."""
    sums = opened()
    assert sums.epsilon is None
    sums.add_spent(SITE, spent(2.0, train=4))
    sums.add_spent(SITE, spent(1.0, train=3))
    sums.add_spent(OTHER, None)
    assert sums.epsilon == 2.0
    assert sums.anchors == {SITE: LedgerAnchor(train=4)}


def test_integers_are_the_largest_where_the_role_says_so():
    """All others stay as the server has them, and so do all without an update."""
    sums, before_m = opened(), np.array([1, 1], dtype=np.int64)
    assert sums.combined_integers(before_m, toy.LAYOUT) is before_m
    for values in ([2, 9], [7, 3]):
        update = toy.update(integers_m=np.array(values, dtype=np.int64))
        sums.add_update(update, is_fresh=True)
    is_max_m = toy.LAYOUT.integer_mask(Role.MAX)
    expected_m = np.where(is_max_m, [7, 9], [1, 1])
    assert is_max_m.any()
    assert not is_max_m.all()
    assert np.array_equal(sums.combined_integers(before_m, toy.LAYOUT), expected_m)
