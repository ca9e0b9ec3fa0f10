"""Files of weights on this machine that a model's factory reads.

For frozen parts of a model: their values are in the layout's digest, so a site whose
file differs is refused, and nothing else has to name the file's digest.
"""

import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cloud_adapters.storage import sealed_tensors
from federation.errors import CorruptObject, JobError
from federation.job import code_files

_MODEL = "model.safetensors"


def find(name: str, *, key: str) -> Path:
    """Find a file of weights, or the one in the folder of a run or an export.

    Args:
        name: Path relative to the job file or to the working folder.
        key: Key of the job, for errors.

    Raises:
        JobError: It is not here.
    """
    places = [place / name for place in (*code_files.places(), Path())]
    paths = [path / _MODEL if path.is_dir() else path for path in places]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        tried = " or ".join(dict.fromkeys(str(each.resolve()) for each in paths))
        raise JobError(f"there is no file {tried} at this site", key=key)
    return path


def read(name: str, *, key: str) -> dict[str, torch.Tensor]:
    """Read what ``find`` finds.

    Raises:
        JobError: It is not here, or see ``tensors``.
    """
    path = find(name, key=key)
    return tensors(str(path), path, key=key)


def tensors(name: str, path: Path, *, key: str) -> dict[str, torch.Tensor]:
    """Read a file of weights.

    Args:
        name: The file as the job names it.
        path: Where it is.
        key: Key of the job, for errors.

    Raises:
        JobError: It is no safetensors file, or is damaged.
    """
    try:
        found = load_file(path)
        sealed_tensors.check(path, name)
    except (OSError, SafetensorError) as error:
        raise _unreadable(name, path, error, key=key) from error
    except CorruptObject as error:
        raise JobError(
            f"{error}: restore it, or resume its run, which writes it again", key=key
        ) from error
    return found


def renamed(name: str, names: Iterable[str]) -> str:
    """Hint at the tensor of a file that lacks one only by another prefix.

    Wrappers such as ``DataParallel`` and ``torch.compile`` add one.

    Args:
        name: A tensor of the model that the file lacks.
        names: Those of the file.
    """
    for other in names:
        if other.endswith(f".{name}") or name.endswith(f".{other}"):
            return f"; the file has {other!r}: rename its tensors to those of the model"
    return ""


def load(module: torch.nn.Module, name: str, *, key: str) -> torch.nn.Module:
    """Load a file into a module that has all of its tensors, and freeze the module.

    Raises:
        JobError: It does not fit, or see ``read``.
    """
    try:
        module.load_state_dict(read(name, key=key))
    except RuntimeError as error:
        raise JobError(f"{name} does not fit the model: {error}", key=key) from error
    return module.requires_grad_(requires_grad=False)


def _unreadable(name: str, path: Path, error: Exception, *, key: str) -> JobError:
    """Say why a file is no safetensors file, and what to do.

    Args:
        name: The file as the job names it.
        path: Where it is.
        error: What its reader raised.
        key: Key of the job, for errors.
    """
    if zipfile.is_zipfile(path):
        return JobError(
            f"{name} is not a safetensors file but one of torch.save or an archive, "
            "which may contain code and is never read: write the weights with "
            "safetensors.torch.save_file(model.state_dict(), FILE)",
            key=key,
        )
    return JobError(
        f"{name} is not a safetensors file: {error}; copy it again", key=key
    )
