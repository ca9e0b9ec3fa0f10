"""Run with pytest: the federation in its smallest form, in this process."""

from pathlib import Path

import work

import crossfed

JOB = Path(__file__).with_name("job.toml")


def test_sites_with_different_views_train_one_model() -> None:
    result = crossfed.simulate(JOB, rounds=1)
    assert result.status == "completed"
    assert result.accuracy is not None
    assert result.accuracy > 0.2


def test_a_view_that_is_missing_changes_nothing_of_the_other() -> None:
    (both, _), (image, _) = work.views(), work.views(has=["image"])
    assert (both.inputs["image"] == image.inputs["image"]).all()
    assert not image.inputs["words"].any()
