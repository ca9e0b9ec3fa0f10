"""Opacus's per-record gradients and replacements of layers.

Opacus's grad samplers are used as functions, without its ``GradSampleModule``: that
one lets autograd compute every weight's gradient a second time, keeps state on the
parameters, and takes any first axis for that of the records.

Shape suffixes: B records.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from privacy.dp_sgd import convolution
from privacy.dp_sgd.attention import RecordAttention
from privacy.dp_sgd.lazy_package import defer

Gradients = dict[nn.Parameter, torch.Tensor]
"""Gradient of each parameter for each record: shape ``(B, *parameter)``, float32."""


@dataclass(frozen=True, slots=True)
class Opacus:
    """The parts of Opacus that are used.

    Attributes:
        samplers: By layer type: ``(layer, [inputs], gradients of outputs)`` to the
            gradient of each parameter for each record.
        fixers: By layer type: a layer to the one that takes its place.
        prepare: Makes a layer ready for ``fallback``.
        fallback: Like a sampler, for any layer: by ``torch.func.vmap``.
        shells: Layers that only show their parts' parameters under other names.
    """

    samplers: dict[type[nn.Module], Callable[..., Gradients]]
    fixers: dict[type[nn.Module], Callable[[Any], nn.Module]]
    prepare: Callable[[nn.Module], None]
    fallback: Callable[..., Gradients]
    shells: tuple[type[nn.Module], ...]


@functools.cache
def opacus() -> Opacus:
    """Import these parts of Opacus, and not what the others import.

    Those, with SymPy and ``scipy.stats``, take as long as torch.
    """
    root = logging.getLogger()
    before = list(root.handlers)
    defer("opacus")
    from opacus.grad_sample import GradSampleModule, functorch  # noqa: PLC0415
    from opacus.layers import DPGRU, DPLSTM, DPRNN  # noqa: PLC0415
    from opacus.validators import ModuleValidator  # noqa: PLC0415

    # On import Opacus gives the whole process a log that prints to the terminal.
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)
    return Opacus(
        samplers=GradSampleModule.GRAD_SAMPLERS,
        fixers=ModuleValidator.FIXERS,
        prepare=functorch.prepare_layer,
        fallback=functorch.ft_compute_per_sample_gradient,
        shells=(DPRNN, DPLSTM, DPGRU, RecordAttention),
    )


def known_type(layer: nn.Module) -> type[nn.Module] | None:
    """Type whose sampler computes a layer's per-record gradients, or None.

    A subclass that computes what its base does counts as its base. Layers with
    options that the sampler does not look at are not known.
    """
    if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros":
        return None
    if isinstance(layer, nn.LayerNorm) and not _has_bias(layer):
        return None
    for kind in type(layer).__mro__:
        if kind in opacus().samplers:
            same = type(layer).forward is kind.forward
            return kind if same else None
    return None


def _has_bias(layer: nn.LayerNorm) -> bool:
    return "bias" in dict(layer.named_parameters(recurse=False))


def trainable(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a layer's own that require a gradient, by name."""
    return {
        name: parameter
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def trained_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers with trained parameters, by name; a step watches them.

    A module of a user's own with parameters of its own is one layer, together with
    all that it holds.
    """
    found = {}
    inside: tuple[str, ...] = ()
    for name, layer in module.named_modules():
        if name.startswith(inside) if inside else False:
            continue
        if trainable(layer) and not isinstance(layer, opacus().shells):
            found[name] = layer
            if known_type(layer) is None:
                inside = (*inside, f"{name}." if name else "")
    return found


def record_gradients(
    layer: nn.Module,
    inputs: torch.Tensor,
    backprops: torch.Tensor,
    workspace: convolution.Workspace,
) -> Gradients:
    """Gradients of a layer's parameters, for each record.

    Args:
        layer: A layer of ``trained_layers``.
        inputs: What it was called with, shape ``(B, ...)``.
        backprops: Gradient of the loss by its outputs, shape ``(B, ...)``.
        workspace: Memory that holds some of the gradients.

    Returns:
        By parameter; float32, also where the layer computes with fewer digits.
    """
    kind = known_type(layer)
    if kind is None:
        return _fallback(layer, inputs, backprops)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    backprops = backprops.float()
    if convolution.is_covered(layer):
        return convolution.gradients(layer, inputs, backprops, workspace)
    if isinstance(layer, _ConvNd):
        # Its sampler asks this package for a class, and relies on an import elsewhere.
        importlib.import_module("torch.distributed.fsdp")
    found = opacus().samplers[kind](layer, [inputs], backprops)
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        for gradient in found.values():
            gradient[:, layer.padding_idx] = 0.0
    return {
        parameter: gradient
        for parameter, gradient in found.items()
        if parameter.requires_grad
    }


def _fallback(
    layer: nn.Module, inputs: torch.Tensor, backprops: torch.Tensor
) -> Gradients:
    if isinstance(layer, nn.LayerNorm):
        normal = nn.functional.layer_norm(
            inputs.float(), layer.normalized_shape, eps=layer.eps
        )
        products = normal * backprops.float()
        axes = range(1, products.ndim - len(layer.normalized_shape))
        gradient = products.sum(list(axes)) if axes else products
        return dict.fromkeys(trainable(layer).values(), gradient)
    dtype = next(layer.parameters()).dtype
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    found = opacus().fallback(layer, [inputs], backprops.to(dtype))
    return {p: g.float() for p, g in found.items() if p.requires_grad}
