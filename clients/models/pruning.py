"""Set small weights of a trained model to zero.

``prune_`` makes the weights that a run starts from (``model.weights``); with
``model.keep_zeros`` the run trains the others only (``clients.methods.kept_zeros``).
Zeros are the mask: nothing else is stored or sent.

Shape suffixes: d float values of the model, n outputs of a layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from federation.errors import JobError

KINDS = ("value", "channel")
_LAYERS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)

Layer = torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """How many weights of a layer are zero.

    Attributes:
        layer: Name of the layer.
        zeros: Weights that are zero.
        weights: All of its weights, without the bias.
    """

    layer: str
    zeros: int
    weights: int


@torch.no_grad()
def prune_(
    model: torch.nn.Module, fraction: float, *, kind: str = "value"
) -> tuple[Sparsity, ...]:
    """Set weights of linear and convolutional layers to zero, in place.

    ``value``: the smallest of all layers together, by magnitude (Han et al. 2015,
    arXiv:1506.02626, section 3). ``channel``: in each layer but the last, the outputs
    with the smallest L1 norm, with their biases (Li et al. 2017, arXiv:1608.08710,
    section 3.1); at least one output of a layer stays.

    Args:
        model: Changed in place.
        fraction: Share of the weights, or of each layer's outputs.
        kind: ``value`` or ``channel``.

    Returns:
        The layers, in the model's order.

    Raises:
        JobError: The fraction is not between 0 and 1, or no layer can be pruned.
    """
    if not 0 < fraction < 1:
        raise JobError(f"is {fraction}: use a number between 0 and 1", key="--fraction")
    layers = dict(_prunable(model))
    chosen = layers if kind == "value" else dict([*layers.items()][:-1])
    if not chosen:
        raise JobError(
            "the model has no linear or convolutional layer that is trained and can be "
            f"pruned by {kind}",
            key="--by",
        )
    if kind == "value":
        _prune_values_(chosen, fraction)
    else:
        for layer in chosen.values():
            _prune_channels_(layer, fraction)
    return tuple(
        Sparsity(
            layer=name,
            zeros=int(torch.count_nonzero(layer.weight == 0)),
            weights=layer.weight.numel(),
        )
        for name, layer in layers.items()
    )


def _prunable(model: torch.nn.Module) -> Iterator[tuple[str, Layer]]:
    for name, layer in model.named_modules():
        if not isinstance(layer, _LAYERS):
            continue
        # One that is computed from others, as by weight_norm, would not stay zero.
        if isinstance(layer.weight, torch.nn.Parameter) and layer.weight.requires_grad:
            yield name, layer


def _prune_values_(layers: Mapping[str, Layer], fraction: float) -> None:
    sizes = torch.cat([layer.weight.abs().flatten() for layer in layers.values()])
    number = int(fraction * sizes.numel())
    smallest = torch.zeros_like(sizes, dtype=torch.bool)
    smallest[torch.topk(sizes, number, largest=False).indices] = True
    start = 0
    for layer in layers.values():
        weight = layer.weight
        part = smallest[start : start + weight.numel()]
        weight.masked_fill_(part.view_as(weight), 0)
        start += weight.numel()


def _prune_channels_(layer: Layer, fraction: float) -> None:
    weight, bias = layer.weight, layer.bias
    norm_n = weight.abs().flatten(1).sum(1)
    number = min(int(fraction * len(norm_n)), len(norm_n) - 1)
    out = torch.topk(norm_n, number, largest=False).indices
    weight[out] = 0
    if bias is not None:
        bias[out] = 0
