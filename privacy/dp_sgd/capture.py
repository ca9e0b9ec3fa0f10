"""The inputs of every layer in a forward pass, and the gradients of its outputs.

Shape suffixes: B records.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from federation.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One call of a layer.

    Attributes:
        name: Name of the layer in the model.
        inputs: What it was called with, shape ``(B, ...)``.
        edge: The place of its outputs in autograd's graph.
        before: The place of its inputs there; None if they need no gradient.
        version: Counts the changes that ``inputs`` had seen by then.
    """

    name: str
    layer: nn.Module
    inputs: torch.Tensor
    edge: GradientEdge
    before: Node | None
    version: int


@contextmanager
def watched(layers: dict[str, nn.Module], num_records: int) -> Iterator[list[Use]]:
    """Record the calls of some layers within a block.

    Args:
        layers: Layers by name.
        num_records: ``B``; every call must have this many on its first axis.

    Raises:
        JobError: A layer is called in a way that per-record gradients cannot follow.
    """
    uses: list[Use] = []

    def hook_of(name: str) -> Callable[..., None]:
        def hook(
            layer: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], out: Any
        ) -> None:
            _check_call(name, args, kwargs, out, num_records)
            inputs = args[0]
            uses.append(
                Use(
                    name=name,
                    layer=layer,
                    inputs=inputs.detach(),
                    edge=get_gradient_edge(out),
                    before=inputs.grad_fn,
                    version=inputs._version,  # noqa: SLF001 - torch has no other name.
                )
            )

        return hook

    handles = [
        layer.register_forward_hook(hook_of(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def _check_call(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    num_records: int,
) -> None:
    if (
        len(args) != 1
        or kwargs
        or not all(isinstance(value, torch.Tensor) for value in (*args, out))
    ):
        raise _unfollowable(name, "takes or returns more than one tensor")
    for value in (args[0], out):
        if value.ndim == 0 or len(value) != num_records:
            raise _unfollowable(
                name,
                f"works on shape {tuple(value.shape)} in a batch of {num_records} "
                "records, but its first axis must be the records",
            )


def _unfollowable(name: str, what: str) -> JobError:
    return JobError(
        f"layer {name or 'of the whole model'!r} {what}: differential privacy needs "
        "the gradient of each record",
        key="model.factory",
    )


def backprops_of(total: torch.Tensor, uses: Sequence[Use]) -> list[torch.Tensor | None]:
    """Gradient of a loss by the outputs of every call.

    Autograd computes no gradient of a weight here.

    Args:
        total: Sum of the records' losses.
        uses: From ``watched``.

    Returns:
        For each call shape ``(B, ...)``, or None if the loss does not depend on it.

    Raises:
        JobError: The model has overwritten what a layer was called with.
    """
    for use in uses:
        if use.inputs._version != use.version:  # noqa: SLF001 - torch has no other name.
            raise _unfollowable(
                use.name, "was called with a tensor that was overwritten afterwards"
            )
    edges = [use.edge for use in uses]
    return list(torch.autograd.grad(total, edges, allow_unused=True))


def check_every_use_seen(
    total: torch.Tensor, uses: Sequence[Use], parameters: dict[str, nn.Parameter]
) -> None:
    """Find parameters that affect a loss outside of their layers' calls.

    Such a part of the gradient would be left out silently. The answer depends
    on the model's code and not on any value, so one look at a model is enough.

    Raises:
        JobError: There is such a parameter.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    ends = {use.edge.node: use.before for use in uses}
    ahead, seen = [total.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise JobError(
                f"{name!r} of the model is used outside of the layer that it belongs "
                "to: differential privacy needs the gradient of each record; call the "
                "layer itself",
                key="model.factory",
            )
        if node in ends:
            ahead.append(ends[node])
        else:
            ahead += [before for before, _ in node.next_functions]
