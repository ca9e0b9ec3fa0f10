"""How inputs and outputs of an exported model are called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deploy.tools.onnx_file import output_names

X = torch.zeros(2, 3)


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *parts: Any, **named: Any) -> Any:
        return self._function(*parts, **named)


@pytest.mark.parametrize(
    ("task", "function", "expected"),
    [
        ("classification", lambda x: x, ["logits"]),
        ("segmentation", lambda x: x, ["logits"]),
        ("regression", lambda x: x, ["output"]),
        ("ranking", lambda x: x[:, 0], ["output"]),
        ("work:own", lambda x: x, ["output"]),
        ("contrastive", lambda x: (x, x), ["output_0", "output_1"]),
        ("work:own", lambda x: {"mean": x, "none": None, "sd": x}, ["mean", "sd"]),
        ("work:own", lambda x: {"state": x, "logits": x}, ["logits"]),
    ],
)
def test_names_of_outputs(task: str, function: Any, expected: list[str]):
    assert output_names(Model(function), X, task) == expected


def test_no_output_has_the_name_of_an_input():
    model = Model(lambda x: {"x": x, "y": x})
    assert output_names(model, {"x": X}, "work:own") == ["output_x", "y"]
