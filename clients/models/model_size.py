"""A limit on the size of a model, which holds before its memory is allocated."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from federation.errors import JobError


class LimitedSize(TorchDispatchMode):
    """While it is entered, tensors are made of at most so many values in all.

    A job's options may ask for a layer of any size. Operations that are given a size
    are counted before they run; others make tensors about as large as their inputs.

    Args:
        max_values: The limit.
    """

    def __init__(self, max_values: int) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._max, self._made = max_values, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch not wrap the method below, which imports its compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count what an operation is about to make."""
        if not func.is_view:
            self._made += _values(args, is_repeat=func.name() == "aten::repeat")
        if self._made > self._max:
            raise JobError(
                f"the model is made of more than {self._max} values, which is the most "
                "that this site accepts (policy.max_values)",
                key="model.options",
            )
        return func(*args, **(kwargs or {}))


def _values(args: tuple[Any, ...], *, is_repeat: bool) -> int:
    """How many values the sizes among an operation's arguments ask for."""
    sizes = (each for each in args if isinstance(each, list | tuple))
    size = next((s for s in sizes if s and all(type(n) is int for n in s)), ())
    if not size:
        return 0
    return math.prod(size) * (args[0].numel() if is_repeat else 1)
