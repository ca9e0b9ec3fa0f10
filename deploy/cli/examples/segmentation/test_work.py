"""Run with pytest: the federation in its smallest form, in this process."""

from pathlib import Path

import work

import crossfed

JOB = Path(__file__).with_name("job.toml")
TINY = {
    "model.options.width": 4,
    "training.local_steps": 8,
    **{f"sites.{site}.data.options.images": 40 for site in range(3)},
}


def test_pixels_are_learned() -> None:
    result = crossfed.simulate(JOB, TINY, rounds=1)
    assert result.status == "completed"
    assert result.loss is not None
    assert result.loss < 1.39  # All classes alike: log(4).
    assert "mean_iou" in result.metrics


def test_later_shapes_hide_earlier_ones() -> None:
    (images, classes), _ = work.scenes(camera=1, images=8, shapes=2)
    assert images.shape == (8, 1, work.SIDE, work.SIDE)
    assert set(classes.flatten()) <= set(range(len(work.CLASSES)))
    assert images[:, 0][classes > 0].mean() > images[:, 0][classes == 0].mean()
