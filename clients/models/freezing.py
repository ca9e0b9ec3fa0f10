"""Parameters that do not train, by name pattern, and a pretrained start without a head.

``model.frozen`` of a job freezes by pattern. ``with_weights`` is for factories of
users: it reads weights of another run, and leaves new heads as the factory drew them.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from clients.models import weight_files
from clients.models.weights import parameters_by_name
from federation.errors import JobError

_KEY = "model.frozen"
_FILE_KEY = "model.options"


def freeze(module: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names fit a pattern of ``model.frozen``.

    Buffers, such as running averages, are no parameters and change as before.

    Args:
        module: Any module.
        patterns: As in a shell; tied weights are frozen under any of their names.

    Raises:
        JobError: A pattern fits no parameter, or all of them are frozen now.
    """
    named = parameters_by_name(module)
    for index, pattern in enumerate(patterns):
        fitting = [p for name, p in named.items() if fnmatchcase(name, pattern)]
        if not fitting:
            raise JobError(
                f"no parameter of the model is called {pattern!r}; it has "
                f"{_some(named)}",
                key=f"{_KEY}[{index}]",
            )
        for parameter in fitting:
            parameter.requires_grad = False
    if patterns and not any(p.requires_grad for p in named.values()):
        raise JobError(
            "all parameters of the model are frozen, so there is nothing to train: "
            "name fewer",
            key=_KEY,
        )


def with_weights(
    model: torch.nn.Module, file: str, *, new: Sequence[str] = ()
) -> torch.nn.Module:
    """Read a model's first weights from a file at each site.

    Each site needs the file. Frozen values never travel: a site whose file has other
    ones is refused, by their digest. All others come from the aggregator.

    Args:
        model: New; it is changed in place.
        file: A safetensors file, or the folder of a run or an export, relative to the
            job file or to the working folder.
        new: Patterns of names, such as those of another head: these tensors stay as
            they are, whatever the file has under their names.

    Returns:
        The model.

    Raises:
        JobError: The file is not here, or does not fit; the first tensor that differs
            is named.
    """
    tensors = weight_files.read(file, key=_FILE_KEY)
    state = model.state_dict()
    taken = {name: t for name, t in state.items() if not _fits(name, new)}
    for name, tensor in taken.items():
        there = tensors.get(name)
        if there is None or there.shape != tensor.shape:
            found = "nothing" if there is None else str(list(there.shape))
            hint = weight_files.renamed(name, tensors) if there is None else ""
            raise JobError(
                f"{file} does not fit the model: {name!r} is {list(tensor.shape)} in "
                f"the model and {found} in the file"
                f"{hint or '; name it in `new` if it is to stay as it is'}",
                key=_FILE_KEY,
            )
    _refuse_unknown(tensors, state, file, new)
    model.load_state_dict({name: tensors[name] for name in taken}, strict=False)
    return model


def _refuse_unknown(
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    file: str,
    new: Sequence[str],
) -> None:
    for name in tensors:
        if name not in state and not _fits(name, new):
            raise JobError(
                f"{file} does not fit the model: {name!r} is not in the model; name it "
                "in `new` if it is to be left out",
                key=_FILE_KEY,
            )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(named: Mapping[str, object], most: int = 8) -> str:
    shown = ", ".join(list(named)[:most])
    return shown + (f" and {len(named) - most} more" if len(named) > most else "")
