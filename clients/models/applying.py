"""Apply a model to a batch for an objective, and explain where they do not fit."""

from collections.abc import Mapping
from typing import Any

import torch

from clients.data.datasets import describe as describe_value
from federation.errors import SiteError
from federation.tree import Tree, leaves, named_leaves, num_records

_IMAGE_AXES = 4  # As in ``clients.data.datasets``.
_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
# What torch says of a lookup in an embedding; a user's own IndexError says other words.
_NO_ROW = "index out of range in self"
_CHANNELS = {1, 3, 4}  # Grey, colours, and colours with their opacity.


def misfit(fault: str, found: str) -> SiteError:
    """What was found may count or quote records, and stays at the site."""
    return SiteError(f"{fault}; {found}", outside=fault)


def one_tensor(values: Tree, what: str) -> torch.Tensor:
    """Refuse a nested batch where a task needs one tensor.

    Raises:
        SiteError: It is something else; ``what`` names it.
    """
    if not isinstance(values, torch.Tensor):
        raise SiteError(f"{what} are {describe(values)}, but must be one tensor")
    return values


def apply_model(model: torch.nn.Module, inputs: Tree) -> Any:
    """Call the model: a dict gives its arguments by name, a tuple by place."""
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    except Exception as error:
        is_lookup = isinstance(error, IndexError) and _NO_ROW in str(error)
        missing = _missing_rows(model, inputs) if is_lookup else ""
        # Notes stay where the error is.
        error.add_note(missing or _advice(model, inputs))
        raise


def logits_of(model: torch.nn.Module, inputs: Tree) -> torch.Tensor:
    """Apply the model; losses are taken with float32 at least.

    A result with ``logits``, as models of transformers return it, stands for these.
    """
    logits = apply_model(model, inputs)
    if isinstance(logits, Mapping) and "logits" in logits:
        logits = logits["logits"]
    if not isinstance(logits, torch.Tensor):
        raise SiteError(
            f"the model returned a {type(logits).__name__} and not a tensor of logits: "
            "make its factory return a module that returns only the logits"
        )
    return logits if logits.dtype is torch.float64 else logits.float()


def _advice(model: torch.nn.Module, inputs: Tree) -> str:
    parts = list(leaves(inputs))
    shapes = ", ".join(
        f"{place} {part.dtype} {tuple(part.shape)}"
        for place, part in named_leaves("inputs", inputs)
    )
    said = f"the model (model.factory) received {shapes}"
    if not isinstance(inputs, torch.Tensor):
        said += (
            f" as a {type(inputs).__name__}: a dict gives the model's arguments by "
            "name, a tuple by place, and a list is one argument; make it an array to "
            "get a single tensor"
        )
    if any(part.is_floating_point() and part.ndim >= _IMAGE_AXES for part in parts):
        said += (
            "; arrays of uint8 with so many axes are read as images, from 0 to 1: give "
            "tokens another integer type in the data function"
        )
    if _has(model, torch.nn.Conv2d) and any(map(_has_channels_last, parts)):
        said += (
            "; convolutions of torch take the channels of an image first: transpose "
            "arrays in the data function, for example x.transpose(0, 3, 1, 2)"
        )
    if not all(part.is_floating_point() for part in parts):
        said += (
            "; integer inputs are tokens and stay integers: scale images to floating "
            "point in the data function, for example x / 255"
        )
    if num_records(inputs) == 1 and model.training and _has(model, *_NORMS):
        said += (
            "; batch normalisation needs two records or more: change "
            "training.batch_size, so that no batch has a single record, or use "
            "torch.nn.GroupNorm"
        )
    return said


def _missing_rows(model: torch.nn.Module, inputs: Tree) -> str:
    """Name the embeddings that may have no row for a token, category or position."""
    whole = [p for p in leaves(inputs) if not p.is_floating_point() and p.numel()]
    if not whole:
        return ""
    low = min(int(part.min()) for part in whole)
    high = max(int(part.max()) for part in whole)
    length = max(part.shape[1] if part.ndim > 1 else 0 for part in whole)
    small = {
        name: part.num_embeddings
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Embedding)
        and (low < 0 or part.num_embeddings <= max(high, length - 1))
    }
    if not small:
        return ""
    return (
        f"an embedding of the model (model.factory) has no row for an input: integer "
        f"inputs are from {low} to {high}, with up to {length} in a record, and "
        + ", ".join(f"{name!r} has {rows} rows" for name, rows in small.items())
        + ": use the tokeniser that belongs to the model, a larger vocabulary, or "
        "shorter records"
    )


def _has_channels_last(part: torch.Tensor) -> bool:
    """Whether a batch has the shape of images as they are read from files."""
    if part.ndim != _IMAGE_AXES:
        return False
    return part.shape[3] in _CHANNELS and part.shape[1] not in _CHANNELS


def _has(model: torch.nn.Module, *kinds: type[torch.nn.Module]) -> bool:
    return any(isinstance(part, kinds) for part in model.modules())


def describe(values: Any) -> str:
    """Describe a value without its content, which may be private."""
    if isinstance(values, torch.Tensor):
        return f"a tensor of shape {tuple(values.shape)}"
    return describe_value(values)
