"""What the messages compute."""

import dataclasses

import pytest

from federation.messages import FailureKind, MetricSums, Phase, SiteFailure


def test_metrics_are_means_over_the_count():
    """Sums become means only when a person looks at them."""
    sums = MetricSums(count=8, loss_sum=2.0, metrics={"correct": 6})
    assert (sums.loss, sums.accuracy) == (0.25, 0.75)


def test_pooled_metrics_are_those_of_all_examples():
    """Pooling two sites is not averaging their averages."""
    small = MetricSums(count=1, loss_sum=1.0, metrics={"correct": 0})
    large = MetricSums(count=9, loss_sum=0.0, metrics={"correct": 9})
    assert small + large == MetricSums(count=10, loss_sum=1.0, metrics={"correct": 9})
    assert (small + large).accuracy == 0.9


def test_pooling_forgets_the_order():
    """Sums of representable values commute."""
    one = MetricSums(count=3, loss_sum=0.1, metrics={"correct": 1})
    two = MetricSums(count=4, loss_sum=0.2, metrics={"correct": 2})
    assert one + two == two + one


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_metrics_of_nothing_have_no_mean(name: str):
    """A site without held-out data has sums and no mean."""
    with pytest.raises(ZeroDivisionError):
        getattr(MetricSums(count=0, loss_sum=0.0, metrics={"correct": 0}), name)


def test_messages_are_frozen():
    """What was received cannot be changed on its way through the product."""
    phase = Phase(name="train", start_seconds=0.0, seconds=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        phase.seconds = 2.0


def test_messages_are_built_by_keyword_only():
    """No two fields of one type are mistaken for each other."""
    with pytest.raises(TypeError):
        SiteFailure("run", 1, "site", FailureKind.BUSY, "text")
