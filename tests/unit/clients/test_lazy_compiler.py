"""Optimisers work alike with and without torch's compiler in the process."""

import copy
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from clients.models import lazy_compiler
from clients.models.model_size import LimitedSize


def unreachable(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it would import the compiler")


def leave_out_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported it."""
    monkeypatch.delitem(sys.modules, lazy_compiler._COMPILER, raising=False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_that_of_torch(kind: Any, monkeypatch: pytest.MonkeyPatch):
    """Under the gradient mode that the optimiser is made for, which then ends."""
    lazy_compiler.defer()
    weights = torch.nn.Parameter(torch.arange(3.0))
    twin = copy.deepcopy(weights)
    ours, theirs = kind([weights], lr=0.1), kind([twin], lr=0.1)
    leave_out_compiler(monkeypatch)
    take = lazy_compiler._without_breaks(unreachable, _inner(kind))
    for _ in range(2):
        weights.grad = twin.grad = torch.ones(3)
        take(ours)
        with torch.no_grad():
            _inner(kind)(theirs)
    assert torch.equal(weights, twin)
    assert not torch.equal(weights, torch.arange(3.0))
    assert torch.is_grad_enabled()


def _inner(kind: type[torch.optim.Optimizer]) -> Any:
    function: Any = kind.step
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def test_a_limit_on_size_imports_no_compiler(monkeypatch: pytest.MonkeyPatch):
    """A site's agent builds every model below one."""
    leave_out_compiler(monkeypatch)
    with LimitedSize(100):
        torch.nn.Linear(2, 2)
    assert lazy_compiler._COMPILER not in sys.modules


def test_gradient_mode_is_that_of_the_optimiser(monkeypatch: pytest.MonkeyPatch):
    leave_out_compiler(monkeypatch)
    for differentiable in (True, False):
        optimizer = SimpleNamespace(defaults={"differentiable": differentiable})
        step = lazy_compiler._without_breaks(
            unreachable, lambda _: torch.is_grad_enabled()
        )
        assert step(optimizer) is differentiable


def test_torch_decides_once_the_compiler_is_there(monkeypatch: pytest.MonkeyPatch):
    """A step breaks the graph, and a method is marked, as without us."""

    def function() -> str:
        return "function"

    def method() -> str:
        return "method"

    lazy_compiler._defer_mark(method, function)
    stand_in = vars(function)[lazy_compiler._MARKED]
    leave_out_compiler(monkeypatch)
    assert stand_in() == "function"
    monkeypatch.setitem(sys.modules, lazy_compiler._COMPILER, torch)
    step = lazy_compiler._without_breaks(lambda _: "method", unreachable)
    assert step(None) == "method"
    assert stand_in() == "method"
    assert not hasattr(function, lazy_compiler._MARKED)


def test_a_mark_that_is_there_stays():
    def function() -> None: ...

    setattr(function, lazy_compiler._MARKED, torch)
    lazy_compiler._defer_mark(unreachable, function)
    assert getattr(function, lazy_compiler._MARKED) is torch
