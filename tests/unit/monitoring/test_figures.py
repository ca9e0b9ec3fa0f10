"""Axes of figures: what they show, and what they must not leave out."""

from collections.abc import Sequence

import pytest
from matplotlib.figure import Figure

from monitoring.pages.figures import zoom_on_last

RISING = [10.0, 80.0, *(90 + 0.5 * i for i in range(18))]  # 98.5 at its end


def shown(*lines: Sequence[float]) -> tuple[float, float]:
    """Ends of the vertical axis of some accuracies by round."""
    axes = Figure().add_subplot()
    for line in lines:
        axes.plot(range(len(line)), line)
    zoom_on_last(axes)
    return axes.get_ylim()


def test_first_rounds_do_not_flatten_the_others():
    low, high = shown(RISING)
    assert 90 < low < 93
    assert 98.5 < high < 100


@pytest.mark.parametrize("rounds", [1, 6])
def test_no_shorter_run_leaves_the_figure(rounds: int):
    """As in a comparison of runs of different lengths."""
    low, high = shown(RISING, [85.0] * rounds)
    assert 80 < low < 85
    assert high < 100


def test_runs_that_differ_throughout_are_shown_whole():
    low, _ = shown(RISING, [10.0] * 6)
    assert low < 10
