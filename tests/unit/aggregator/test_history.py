"""What a run remembers of its sites, for samples."""

import math
from dataclasses import replace

import pytest
from support import toy

from aggregator.methods.history import begin
from federation.clock import VirtualClock
from federation.messages import MetricSums
from federation.protocols import RoundTime, SiteHistory
from federation.rounds.round_record import RoundRecord

A, B, C = toy.SITES
FAIR = {"schedule": {"sites_per_round": 2, "sampling": "fair"}, "rounds": 3}


def after(loss: float, *, late: float | None = None) -> SiteHistory:
    """The history of A, which was asked once before, after a round."""
    job = toy.job(FAIR)
    guest = begin(job)
    assert guest is not None
    before = SiteHistory(1, 1, 1, loss=0.5, predictions=3, seconds=2.0)
    record = RoundRecord(
        job=job,
        run_id=toy.RUN,
        state=replace(toy.initial_state(job), history={A: before}),
        cohort=(A, B),
        layout=toy.LAYOUT,
        clock=VirtualClock(),
        emit=lambda _: None,
    )
    if late is None:
        record.counted[A] = 1
        record.training[A] = MetricSums(count=2, loss_sum=2 * loss, metrics={})
        record.times[A] = RoundTime(round_index=1, num_steps=1, seconds=4.0)
    else:
        record.late[A] = late
    left = guest.after_round(record.state, record).history
    assert C not in left
    assert (left[B].asked, left[B].counted) == (1, 0)
    return left[A]


def test_late_site_is_as_slow_as_it_was_waited_for():
    assert after(0.25, late=9.0) == SiteHistory(
        2, 1, 1, loss=0.5, predictions=3, seconds=9.0
    )


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_loss_that_is_no_number_leaves_what_was_known(loss: float):
    found = after(loss)
    assert (found.counted, found.loss, found.predictions) == (2, 0.5, 3)


def test_history_is_in_the_checkpoint():
    run = toy.Toy(job=toy.job(FAIR))
    left = run.run()
    assert sum(one.asked for one in left.history.values()) == 6
    assert sum(one.counted for one in left.history.values()) == 6
    saved = run.checkpoints().load_latest()
    assert saved is not None
    assert saved.history == left.history
