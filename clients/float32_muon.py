"""Muon in float32, for processors that do not multiply in bfloat16.

``torch.optim.Muon`` orthogonalises in bfloat16. Where such products are slow, a step of
it takes several times as long as the gradients of the step.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Those of Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
# networks", and of torch's own.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
# Columns for each row, above which products of square matrices alone are less work: 34
# rows^3 and 4 rows^2 columns, against 10 rows^3 and 20 rows^2 columns.
_GRAM_PAYS = 1.5
# The root mean square of AdamW's steps, arXiv:2502.16982, equation 4.
_RMS = 0.2


class Float32Muon(torch.optim.Optimizer):
    """As ``torch.optim.Muon`` with Nesterov's form and ``match_rms_adamw``.

    Its state is that of torch's, so that a site may continue with the other.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        """Begin without state.

        Args:
            matrices: Stepped in place, each with two axes.
            lr: Learning rate, for steps as large as those of AdamW.
            momentum: Share of the momentum that is kept in a step.
            weight_decay: Decoupled: in every step, weights lose ``lr`` times this
                share.
        """
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step along the gradients that are there.

        Returns:
            What the closure returns, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._step(matrix, matrix.grad, group)
        return loss

    def _step(
        self, matrix: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state, kept, lr = self.state[matrix], group["momentum"], float(group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - kept)
        update = orthogonalised(gradient.lerp(momentum, kept))
        matrix.mul_(1 - lr * group["weight_decay"])
        matrix.add_(update, alpha=-lr * _RMS * math.sqrt(max(matrix.shape)))


def orthogonalised(update: torch.Tensor) -> torch.Tensor:
    """Return roughly the nearest matrix with orthonormal rows or columns.

    Five iterations of Newton and Schulz, whose polynomial brings singular values near
    1, most of them between 0.7 and 1.2 (Jordan et al. 2024).

    Args:
        update: Two axes; it is not changed.
    """
    is_tall = update.shape[0] > update.shape[1]
    wide = update.float().T if is_tall else update.float()
    wide = wide / wide.norm().clamp(min=_EPS)
    rows, columns = wide.shape
    wide = _by_gram(wide) if columns > _GRAM_PAYS * rows else _directly(wide)
    return (wide.T if is_tall else wide).to(update.dtype)


def _directly(wide: torch.Tensor) -> torch.Tensor:
    first, third, fifth = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        change = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        wide = torch.addmm(wide, change, wide, beta=first)
    return wide


def _by_gram(wide: torch.Tensor) -> torch.Tensor:
    """Iterate on the square matrix of inner products of rows, and apply the result.

    An iteration multiplies by ``P = first * I + change``, a polynomial of the inner
    products: so they become ``P @ gram @ P``, and all factors commute. The product of
    all ``P`` is kept as ``scale * I + mixing``.
    """
    first, third, fifth = _COEFFICIENTS
    gram = wide @ wide.T
    mixing = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
    scale, change = first, mixing
    for _ in range(_ITERATIONS - 1):
        for _ in range(2):
            gram = torch.addmm(gram, change, gram, beta=first)
        change = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        sums = mixing * first + change * scale
        mixing = torch.addmm(sums, change, mixing)
        scale *= first
    return torch.addmm(wide, mixing, wide, beta=scale)
