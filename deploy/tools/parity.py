"""Whether an exported model computes what the run's model computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.models.applying import apply_model
from federation.errors import ParityFailed, SiteError
from federation.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How far the outputs of an exported model are from those of the run's model.

    Attributes:
        records: Number of records that were compared.
        error: Euclidean norm of the difference over that of the outputs.
        tolerance: Largest error that is permitted.
        agreement: Share of places with the same largest output.
    """

    records: int
    error: float
    tolerance: float
    agreement: float

    def __str__(self) -> str:
        """For a person."""
        return (
            f"relative error {self.error:.1e} on {self.records} records (at most "
            f"{self.tolerance:g}), same largest output in {self.agreement:.1%}"
        )


def outputs_of(model: torch.nn.Module, inputs: Tree) -> list[torch.Tensor]:
    """Tensors that a model returns; only the logits, if it names them.

    Raises:
        SiteError: There is none.
    """
    with torch.no_grad():
        found = apply_model(model, inputs)
    if isinstance(found, Mapping) and "logits" in found:
        found = found["logits"]
    parts = found.values() if isinstance(found, Mapping) else found
    several = [parts] if isinstance(parts, torch.Tensor) else list(parts)
    tensors = [part for part in several if isinstance(part, torch.Tensor)]
    if not tensors:
        raise SiteError("the model returned no tensor, so nothing can be compared")
    return tensors


def check_parity(
    reference: Sequence[torch.Tensor], found: Sequence[Any], *, tolerance: float
) -> Parity:
    """Compare the outputs of two models for the same records.

    Args:
        reference: Results of the run's model, records first.
        found: Results of the exported model, in the same order: arrays or tensors.
        tolerance: Largest relative error.

    Raises:
        ParityFailed: The outputs differ in shape or by more than that.
    """
    pairs = [
        (_float64(one), _float64(other))
        for one, other in zip(reference, found, strict=True)
    ]
    for one, other in pairs:
        if one.shape != other.shape:
            raise ParityFailed(
                f"the exported model returns {other.shape} where the run's model "
                f"returns {one.shape}: nothing was written"
            )
    size = sum(float(np.square(one).sum()) for one, _ in pairs) ** 0.5
    apart = sum(float(np.square(one - other).sum()) for one, other in pairs) ** 0.5
    same = [
        one.argmax(-1) == other.argmax(-1)
        for one, other in pairs
        if one.ndim > 1 and one.shape[-1] > 1
    ]
    parity = Parity(
        records=len(pairs[0][0]),
        error=apart / size if size else apart,
        tolerance=tolerance,
        agreement=float(np.mean(np.concatenate([s.ravel() for s in same])))
        if same
        else 1.0,
    )
    # NaN is not within a tolerance either.
    if not parity.error <= tolerance:
        raise ParityFailed(
            f"the exported model differs from the run's model: {parity}. Nothing was "
            "written: choose a format that keeps more bits"
        )
    return parity


def _float64(values: Any) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    return np.asarray(values, dtype=np.float64)
