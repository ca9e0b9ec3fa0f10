"""What the messages compute."""

import pytest

from federation.messages import MetricSums


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


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_metrics_of_nothing_have_no_mean(name: str):
    """A site without held-out data has sums and no mean."""
    with pytest.raises(ZeroDivisionError):
        getattr(MetricSums(count=0, loss_sum=0.0, metrics={"correct": 0}), name)
