"""Run with pytest: the federation in its smallest form, in this process."""

from pathlib import Path

import torch
import work

import crossfed

JOB = Path(__file__).with_name("job.toml")


def test_a_narrow_network_trains() -> None:
    narrow = {"model.options.width": 8, "training.local_steps": 5}
    result = crossfed.simulate(JOB, narrow, rounds=1)
    assert result.status == "completed"
    assert result.loss is not None


def test_three_blocks_a_stage_are_a_resnet_20() -> None:
    model = work.net(blocks=3)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    shortcuts = 2  # Of the stages that change the size.
    assert len(convolutions) - shortcuts + 1 == 20
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
