"""Run with pytest: two days of the federation, in this process."""

from pathlib import Path

import daily
import numpy as np
import work


def test_a_day_goes_on_from_the_last(tmp_path: Path) -> None:
    daily.train(0, tmp_path, rounds=1)
    result = daily.train(1, tmp_path, rounds=1)
    assert result.status == "completed"
    assert daily.of_model(result, 1) > daily.of_best_sellers(1)


def test_new_items_are_sold_from_their_day_on() -> None:
    before, after = work.probabilities(0), work.probabilities(1)
    new = slice(work.FIRST_DAY, work.FIRST_DAY + work.NEW_PER_DAY)
    assert not before[:, new].any()
    assert np.all(after[:, new] > 0)
