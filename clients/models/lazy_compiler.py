"""Keep torch's compiler out of processes that compile nothing.

The first optimiser of a process imports ``torch._dynamo``: to mark methods that must
not be compiled, and to break the graph around each step. Neither has any effect in a
process that compiles nothing. With SymPy and all of ``torch.distributed``, that import
takes almost as long as importing torch.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"
# Where ``torch._compile._disable_dynamo`` looks for a function that is already marked.
_MARKED = "__dynamo_disable"
_MARKS, _BREAKS = "torch._compile", "_use_grad"

Method = Callable[..., Any]


@functools.cache
def defer() -> None:
    """Have optimisers work without the compiler until something else imports it.

    From then on, everything is as in plain torch. If a release of torch imports the
    compiler in another way than 2.6 to 2.13 do, it is imported as before.
    """
    for method in vars(torch.optim.Optimizer).values():
        if inspect.isfunction(method) and method.__globals__["__name__"] == _MARKS:
            _defer_mark(method, inspect.unwrap(method))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if inspect.isclass(kind) else None
        if inspect.isfunction(step) and step.__code__.co_name == _BREAKS:
            kind.step = _without_breaks(step, inspect.unwrap(step))


def _defer_mark(method: Method, function: Method) -> None:
    """Put a stand-in for the marked function where torch's wrapper looks for it."""

    @functools.wraps(function)
    def stand_in(*args: Any, **named: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*args, **named)
        vars(function).pop(_MARKED, None)  # Another thread may be here, too.
        return method(*args, **named)

    vars(function).setdefault(_MARKED, stand_in)


def _without_breaks(method: Method, function: Method) -> Method:
    """A step under the same gradient mode that breaks no graph."""

    @functools.wraps(function)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **named: Any) -> Any:
        if _COMPILER in sys.modules:
            return method(optimizer, *args, **named)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return function(optimizer, *args, **named)

    return step
