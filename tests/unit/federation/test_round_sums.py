"""What a round adds up: sums without verdicts and without events."""

from dataclasses import replace

import numpy as np
from support import toy
from support.scripted_grid import reply_to

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


def test_bytes_of_every_reply_count():
    """Whatever it says."""
    sums = opened()
    for message in (toy.update(), toy.failure(OTHER)):
        sums.add_bytes(reply_to(message, bytes_down=3, bytes_up=5))
    assert (sums.bytes_down, sums.bytes_up) == (6, 10)


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


def test_opened_sum_is_pooled_evaluation():
    """Under secure aggregation it is all that is known."""
    sums = opened()
    assert sums.pooled_evaluation() is None
    sums.secret_evaluation = RESULT
    assert sums.pooled_evaluation() == RESULT


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


def test_update_is_not_written_to():
    """The largest integers are kept in memory of their own."""
    sums, first = opened(), toy.update()
    sums.add_update(first, is_fresh=True)
    sums.add_update(replace(first, integers_m=first.integers_m + 1), is_fresh=False)
    assert not first.integers_m.any()


def test_phases_follow_each_other():
    """Each begins where the one before it has ended."""
    clock = VirtualClock()
    sums = RoundSums(clock=clock, start=clock.monotonic())
    for name, seconds in (("exchange", 2.0), ("combine", 3.0)):
        clock.sleep(seconds)
        sums.end_phase(name)
    found = [(one.name, one.start_seconds, one.seconds) for one in sums.phases]
    assert found == [("exchange", 0.0, 2.0), ("combine", 2.0, 3.0)]
