"""Membership inference by loss: was this record trained on?

A model that has learned single records by heart has a smaller loss on them (Yeom et
al. 2018, arXiv:1709.01604, section 3). Held-out records of the same site stand for
those that were not trained on; and where persons are protected, held-out persons for
persons who were not trained on.

Shape suffixes: B records, T tokens, V vocabulary, n records of one kind, p persons.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from clients.data.datasets import Dataset, Indices
from clients.models.model_pool import ModelPool
from federation.errors import SiteError
from federation.vectors import IntegerVector, Vector


def membership_scores(
    pool: ModelPool,
    weights_d: Vector,
    integers_m: IntegerVector,
    data: Dataset,
    *,
    chosen: Indices,
    task: str,
    batch_size: int,
) -> NDArray[np.float64]:
    """Score records by minus the model's loss on them.

    Args:
        pool: Where models come from.
        weights_d: The model's weights, shape ``(d,)``.
        integers_m: Its integer values, shape ``(m,)``.
        data: The records.
        chosen: Which of them, shape ``(n,)``.
        task: ``classification`` or ``causal_lm``.
        batch_size: Records of one forward pass.

    Returns:
        Shape ``(n,)``, in nats, of a window of tokens the mean; a loss that is not
        finite counts as the largest there is.

    Raises:
        SiteError: A classifier's records have no targets.
    """
    with pool.borrow() as model, torch.no_grad():
        model.load(weights_d, integers_m)
        module = model.module.eval()
        parts = []
        for start in range(0, len(chosen), batch_size):
            inputs, targets = data.batch(chosen[start : start + batch_size])
            if task == "causal_lm":
                inputs, targets = inputs[:, :-1], inputs[:, 1:]
            if targets is None:
                raise SiteError("classification needs targets, and the data has none")
            logits = module(inputs.to(pool.device)).float()
            parts.append(_losses(logits, targets))
    losses_n = torch.cat(parts).double().cpu().numpy()
    largest = float(np.finfo(np.float32).max)
    scores_n: NDArray[np.float64] = -np.nan_to_num(
        losses_n, nan=largest, posinf=largest
    )
    return scores_n


def scores_of_persons(
    scores_n: NDArray[np.float64], persons_n: NDArray[Any]
) -> NDArray[np.float64]:
    """Score persons by the mean score of their records.

    As attacks on all texts of one user do: Kandpal et al. 2023, arXiv:2310.09266,
    section 3.

    Args:
        scores_n: Scores of records, shape ``(n,)``.
        persons_n: Person of each record, shape ``(n,)``; integers or texts.

    Returns:
        Shape ``(p,)``, in the order of the persons' names.
    """
    _, numbers = np.unique(persons_n, return_inverse=True)
    sums_p = np.bincount(numbers, weights=scores_n)
    return sums_p / np.bincount(numbers)


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of each record, shape ``(B,)``: logits ``(B, K)`` or ``(B, T, V)``."""
    losses = functional.cross_entropy(
        logits.movedim(-1, 1), targets.to(logits.device), reduction="none"
    )
    return losses.reshape(len(logits), -1).mean(1)
