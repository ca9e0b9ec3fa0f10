"""A risk model: the probability that a tumour is malignant, from 30 measurements."""

import numpy as np
import torch

from clients.data import Examples, breast_cancer, preprocessing

MALIGNANT = 0  # The label in scikit-learn's data.


def net(hidden: int = 16) -> torch.nn.Module:
    """One logit per tumour: the log-odds that it is malignant."""
    return torch.nn.Sequential(
        torch.nn.Linear(30, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)
    )


# Centred and scaled with published constants, so no record depends on another.
@preprocessing("public")
def tumours() -> tuple[Examples, Examples]:
    """Measurements ``(n, 30)``, and 1 for malignant: (train, held_out)."""
    train, held_out = breast_cancer()
    return _with_risk(train), _with_risk(held_out)


def _with_risk(part: Examples) -> Examples:
    malignant = np.asarray(part.targets) == MALIGNANT
    return Examples(inputs=part.inputs, targets=malignant.astype(np.int64))
