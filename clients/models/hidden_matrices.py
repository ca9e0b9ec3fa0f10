"""Choose the parameters that ``muon`` steps: the hidden weight matrices of a model.

Muon replaces the momentum of a matrix by the nearest orthogonal one, which suits the
matrices between layers (Jordan et al. 2024, "Muon: An optimizer for hidden layers in
neural networks"). Embeddings, the output head, biases and gains are stepped by AdamW,
as there and in Liu et al. 2025, arXiv:2502.16982, section 2.2.

A parameter is a hidden matrix if all of this holds:

1. It is trained, real, has two dimensions, and its name ends in ``weight``. So biases,
   gains, and parameters of a module's own such as ``positions`` are none, nor are
   convolutions, which have three dimensions or more.
2. No module that holds it is an ``nn.Embedding`` or ``nn.EmbeddingBag``.
3. It is not the output head: the last weight of two dimensions or more, in the order
   in which the model's modules were registered. Tied weights count under each of their
   names, so a head that shares the matrix of an embedding is found by its own name, and
   the last hidden matrix stays one.
4. None of the patterns ``training.optimizer.adamw_parameters`` fits one of its names.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from federation.errors import JobError
from federation.job.spec import OptimizerSpec

_MATRIX = 2  # Dimensions.
_TABLE = "training.optimizer"


def hidden_matrices(module: nn.Module, spec: OptimizerSpec) -> dict[str, nn.Parameter]:
    """Return the parameters that ``muon`` steps, each under its first name.

    Args:
        module: The model, whole or cut into parts.
        spec: The job's optimiser.

    Raises:
        JobError: There is none, or a pattern fits no matrix.
    """
    patterns, weights = spec.adamw_parameters, list(_weights(module))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _, _ in weights):
            raise JobError(
                f"{pattern!r} fits no weight matrix of the model; AdamW steps all "
                "other parameters anyway: correct it, or remove it",
                key=f"{_TABLE}.adamw_parameters",
            )
    hidden = {id(w) for _, _, w in weights if w.ndim == _MATRIX and not w.is_complex()}
    hidden -= {id(weight) for _, _, weight in weights[-1:]}  # The output head.
    for name, owner, weight in weights:
        is_table = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if is_table or any(fnmatchcase(name, pattern) for pattern in patterns):
            hidden.discard(id(weight))
    found = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) in hidden
    }
    if not found:
        raise JobError(
            "'muon' is for hidden weight matrices, and this model has none: beside "
            "embeddings, convolutions and the output head there is nothing of two "
            'dimensions; use "adamw"',
            key=f"{_TABLE}.name",
        )
    return found


def _weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield each name of a weight of two dimensions or more, its owner, and itself."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False):
            if name.endswith("weight") and parameter.ndim >= _MATRIX:
                yield f"{prefix}.{name}".lstrip("."), owner, parameter
