"""The last lines of a run say what it is worth and what it has spent."""

import math
from dataclasses import replace

import pytest
from support import event_samples
from support.stored_runs import stored

from federation.events import ModelEvaluated
from monitoring.terminal.outcome import lines
from monitoring.views.run_fold import fold


def test_plain_outcome():
    """Numbers of a quiet run, as they were measured."""
    assert list(lines(fold(event_samples.two_sites(1)))) == [
        "status      completed",
        "rounds      1",
        "loss        1.6815 nats, after round 1, on held-out data of all sites",
        "accuracy    35.00%",
        "bytes       602,400 down, 301,600 up",
    ]


def test_private_outcome():
    """What carries noise is marked, and epsilon has its terms."""
    found = list(lines(fold(event_samples.private(1))))
    assert found[2].startswith("loss        ~1.6815 +-0.088 nats, after")
    assert found[3:-1] == [
        "accuracy    ~35.00% +-1.5 (standard deviation of the noise)",
        (
            "epsilon     7.92 of 8 at delta 1e-04 (one record added or removed; PLD; "
            "Poisson sampling), held-out 6.54"
        ),
    ]


def _with_loss(loss: float) -> list[str]:
    events = [
        replace(event, pooled=replace(event.pooled, loss_sum=loss * event.pooled.count))
        if isinstance(event, ModelEvaluated)
        else event
        for event in event_samples.two_sites(1)
    ]
    return list(lines(fold(events)))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported(loss: float):
    """The run completes, so nothing else would say that its model is of no use."""
    found = _with_loss(loss)
    assert found[2].startswith(f"loss        {loss} nats")
    assert found[-2].startswith("diverged    the loss is not finite")


def test_clouds_are_told_of_in_one_line():
    """Without what happened on this machine, which costs nothing."""
    assert list(lines(fold(stored())))[-1] == (
        "storage     12 requests, 2.0 MB written, 5.0 MB read, 5.0 MB of that over the "
        "internet, the cache saved 4 reads of 12.5 MB"
    )
