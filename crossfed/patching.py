"""Make the script of a transformers Trainer train over a federation."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfed.running import Source, load_job, read, simulate
from federation.errors import JobError
from federation.ids import MAX_NAME_CHARS
from federation.job import code_files
from federation.job.metrics import TRAINER

if TYPE_CHECKING:
    from monitoring.runs.run_result import RunResult

# What a job's name has none of.
_NO_NAME = re.compile(r"[^a-z0-9._-]+|\.{2,}")


def patch(
    make_trainer: Callable[[], Any],
    job: Source,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    folder: str | Path | None = None,
    **keys: Any,
) -> Any:
    """Make a Trainer whose ``train`` runs a job, with every site on this machine.

    Each site trains in the loop of a Trainer of its own, which ``make_trainer`` makes.
    Afterwards this one has the model of the federation.

    Args:
        make_trainer: A function of a file, which returns a ``transformers.Trainer``.
            Sites import the file: guard what it runs with
            ``if __name__ == "__main__"``.
        job: What ``load_job`` takes. What it lacks is filled in: ``name``,
            ``model.factory``, ``data.source``, and in ``training`` ``task``,
            ``batch_size`` and ``accumulate``.
        overrides: As in ``load_job``.
        folder: Where ``train`` keeps the run; without it nothing is written.
            ``train(resume_from_checkpoint=True)`` continues it.
        keys: As in ``load_job``.

    Returns:
        A ``transformers.Trainer``; its ``train`` returns a ``RunResult``.

    Raises:
        TypeError: ``make_trainer`` returns something else.
        ValueError: It is not a function at the top of a file.
        JobError: The job asks for something that cannot be done.
    """
    trainer = make_trainer()
    from clients.users_trainer import is_trainer  # noqa: PLC0415 -- imports torch

    if not is_trainer(trainer):
        raise TypeError(
            f"make_trainer returned a {type(trainer).__name__}: let it return a "
            "transformers.Trainer, without calling its train()"
        )
    document, beside = read(job)
    code_files.pin(document, beside)
    spec = load_job(_filled(document, trainer, _named(make_trainer)), overrides, **keys)

    def train(resume_from_checkpoint: bool | None = None) -> "RunResult":  # noqa: FBT001 -- transformers' signature
        result = simulate(spec, folder=folder, resume=bool(resume_from_checkpoint))
        trainer.model.load_state_dict(result.state_dict(), strict=False)
        return result

    trainer.train = train
    return trainer


def _named(function: Callable[[], Any]) -> str:
    """Name a function by its file, pinned to the file's content."""
    name = getattr(function, "__qualname__", type(function).__name__)
    file = None
    if inspect.isfunction(function):
        file = inspect.getsourcefile(inspect.unwrap(function))
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise ValueError(
            f"{name} is not a function at the top of a file: put one there with def, "
            "so that each site can import it by its name"
        )
    names = {"source": f"./{Path(file).name}:{function.__name__}"}
    code_files.pin(names, Path(file).parent)
    return names["source"]


def _filled(document: dict[str, Any], trainer: Any, named: str) -> dict[str, Any]:
    """Fill in what a job lacks from the Trainer."""
    file = code_files.parse(named)
    stem = named if file is None else file.module
    name = _NO_NAME.sub("-", stem.lower())[:MAX_NAME_CHARS].strip("-._")
    document.setdefault("name", name or TRAINER)
    _table(document, "model").setdefault("factory", named)
    sites = document.get("sites")
    rows = sites if isinstance(sites, list | tuple) else ()
    # What is no table is refused with the rest of the job.
    if any("data" not in site for site in rows if isinstance(site, Mapping)):
        _table(document, "data").setdefault("source", named)
    training = _table(document, "training")
    training.setdefault("task", TRAINER)
    training.setdefault("batch_size", trainer.args.per_device_train_batch_size)
    training.setdefault("accumulate", trainer.args.gradient_accumulation_steps)
    return document


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of a job, which is made if it is not there.

    Raises:
        JobError: It is something else.
    """
    found = document.setdefault(name, {})
    if not isinstance(found, dict):
        raise JobError(f"must be a table, not {found!r:.80}", key=name)
    return found
