"""Personal parts: tensors that a site trains for itself and never sends.

``model.personal`` names them, for example a head (FedPer, Arivazhagan et al. 2019,
arXiv:1912.00818), normalisation layers (FedBN, Li et al. 2021, arXiv:2102.07623), or
the lower layers (LG-FedAvg, Liang et al. 2020, arXiv:2001.01523). Their values are one
vector in the site's state, and are put into the model whenever it is loaded: sites of
one process share its instances.

Shape suffixes: p personal values of the model.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch

from federation.vectors import NO_ARRAYS, Arrays, Layout, Vector

_PERSONAL = "personal"


def match(name: str, patterns: Sequence[str]) -> set[str]:
    """Patterns of ``model.personal`` that a tensor's name fits."""
    return {pattern for pattern in patterns if fnmatchcase(name, pattern)}


def own_part(kept: Arrays) -> Vector | None:
    """Return a site's personal values, shape ``(p,)``; None before it has trained."""
    return kept.get(_PERSONAL)


@torch.no_grad()
def load(module: torch.nn.Module, layout: Layout, values_p: Vector) -> None:
    """Copy personal values into a module's tensors.

    Args:
        module: A module that is not sharded.
        layout: Names the personal tensors, in the order of the values.
        values_p: Shape ``(p,)``.
    """
    if not layout.num_personal:
        return
    state = module.state_dict()
    for spec, view in layout.personal_views(values_p):
        state[spec.name].copy_(torch.from_numpy(view.copy()))


@torch.no_grad()
def read(module: torch.nn.Module, layout: Layout) -> Vector:
    """Copy a module's personal values out, shape ``(p,)``, float32."""
    values_p = np.empty(layout.num_personal, dtype=np.float32)
    if layout.num_personal:
        state = module.state_dict()
        for spec, view in layout.personal_views(values_p):
            torch.from_numpy(view).copy_(state[spec.name])
    return values_p


def unchanged(kept: Arrays) -> Arrays:
    """Return what a site keeps of parts that a round has not changed."""
    own_p = own_part(kept)
    return NO_ARRAYS if own_p is None else {_PERSONAL: own_p}


def to_keep(module: torch.nn.Module, layout: Layout) -> Arrays:
    """Return what a site keeps of a module that it has trained."""
    if not layout.num_personal:
        return NO_ARRAYS
    return {_PERSONAL: read(module, layout)}
