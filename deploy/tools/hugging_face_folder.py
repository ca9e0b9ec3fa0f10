"""A run's model as a folder of transformers, or its adapters as a folder of peft."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clients.factories import import_factory
from clients.models.adapters import prompted, without_cut
from clients.models.model_pool import build
from clients.randomness import seeded_globally, torch_seed
from federation.errors import JobError
from federation.job.spec import JobSpec

_FACTORY = "clients.models:hugging_face"


def quiet() -> None:
    """Show no progress bars of transformers: the command has its own output."""
    from transformers.utils import logging  # noqa: PLC0415 -- the model needed it

    logging.disable_progress_bar()


def is_hugging_face(model: torch.nn.Module) -> bool:
    """Whether a model is one of transformers, with adapters or without."""
    return hasattr(model, "save_pretrained") and hasattr(model, "config")


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether peft has put adapters into a model."""
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


def merged(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model whose adapters are added to its weights.

    Raises:
        JobError: It is not a model of transformers.
    """
    if without_cut(model) is not None:
        raise JobError(
            "a prompt is no part of a model's weights: export adapters, safetensors or "
            "onnx",
            key="--format",
        )
    if not is_hugging_face(model):
        raise JobError(
            f"a {type(model).__name__} is not a model of transformers: export "
            "safetensors or onnx",
            key="--format",
        )
    if not has_adapters(model):
        return model
    found: torch.nn.Module = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    return found.eval()


def write_folder(model: torch.nn.Module, folder: Path) -> Sequence[Path]:
    """Write a model or its adapters, and return the files.

    Args:
        model: Of transformers: all of its weights are written. With adapters or a
            prompt of peft: only these are.
        folder: An empty folder.
    """
    quiet()
    given: Any = without_cut(model) or model
    given.save_pretrained(str(folder), safe_serialization=True)
    card = folder / "README.md"  # A template, which ours takes the place of.
    card.unlink(missing_ok=True)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_folder(kind: type[Any], folder: Path) -> torch.nn.Module:
    """Read a model of transformers from a folder.

    Args:
        kind: Its class.
        folder: Where ``write_folder`` wrote it.
    """
    quiet()
    model = kind.from_pretrained(
        str(folder),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype="auto",
    )
    return model.eval()  # type: ignore[no-any-return]


def read_adapters(job: JobSpec, folder: Path) -> torch.nn.Module:
    """Build the model that adapters or a prompt were trained on, and read them into it.

    Raises:
        JobError: The job's factory is not that of transformers' models.
    """
    import peft  # noqa: PLC0415 -- the run's model needed this extra

    base = base_model(job)
    model: Any = peft.PeftModel.from_pretrained(base, str(folder))
    if model.active_peft_config.is_prompt_learning:
        model = prompted(model)
    return model.eval()  # type: ignore[no-any-return]


def base_model(job: JobSpec) -> torch.nn.Module:
    """Build a job's model without its adapters, as each site does.

    Raises:
        JobError: The job's own factory makes the adapters.
    """
    if job.model.factory != _FACTORY:
        raise JobError(
            f"only {_FACTORY} says what its model is without adapters: export "
            "huggingface",
            key="--format",
        )
    options = {**job.model.options, "lora": None, "prompt": None}
    factory = import_factory(job.model.factory, key="model.factory")
    cpu = torch.device("cpu")
    with seeded_globally(torch_seed(job.seed, "initial weights"), cpu):
        return build(factory, options)
