"""Trainers of transformers that a user's function returns: what is taken from them.

A job whose ``model.factory`` or ``data.source`` returns a ``transformers.Trainer`` uses
its model, or its datasets and collator; with the task ``trainer`` also its loop, see
``clients.training.users_loop``. transformers is not imported here: code that returns
a Trainer has imported it.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from federation.errors import JobError, SiteError

_KEY = "model.factory"
_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # They follow the loss, not the step.
_SAMPLERS = ("random", "sequential")
_SHOWN = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")


def _has(trainer: Any, callback: str) -> bool:
    found = trainer.callback_handler.callbacks
    return any(kind.__name__ == callback for c in found for kind in type(c).__mro__)


def _faults(trainer: Any) -> Iterator[tuple[bool, str]]:
    """What a Trainer may not have in a round of a federation, and what to do."""
    yield (
        trainer.optimizer is not None or trainer.lr_scheduler is not None,
        (
            "optimizers: they start in each round, and these objects cannot start "
            "again; use optim and lr_scheduler_type of TrainingArguments, or "
            "override create_optimizer"
        ),
    )
    for name in ("get_train_dataloader", "_get_train_sampler"):
        yield (
            not getattr(trainer, name).__module__.startswith("transformers."),
            (
                f"{name} of its own, but the job decides which records make a batch: "
                "remove it, and do what it does in the dataset or the collator"
            ),
        )
    yield (
        _has(trainer, "EarlyStoppingCallback"),
        "EarlyStoppingCallback, which would end each round and not the run: remove it",
    )
    yield from _faults_of_settings(trainer.args)


def _faults_of_settings(args: Any) -> Iterator[tuple[bool, str]]:
    """The same for its ``TrainingArguments``."""
    yield (
        str(args.lr_scheduler_type.value) in _SCHEDULES,
        (
            f"lr_scheduler_type = {args.lr_scheduler_type.value}, which follows an "
            "evaluation inside the loop: choose another one"
        ),
    )
    yield (
        str(args.train_sampling_strategy) not in _SAMPLERS,
        (
            f"train_sampling_strategy = {args.train_sampling_strategy}, but the job "
            "decides which records make a batch: use random, and pad in the collator"
        ),
    )
    yield (
        bool(args.auto_find_batch_size),
        (
            "auto_find_batch_size, with which sites would take batches of different "
            "sizes: set per_device_train_batch_size"
        ),
    )
    yield (
        bool(args.fp16_full_eval or args.bf16_full_eval),
        (
            "fp16_full_eval or bf16_full_eval, which round the weights for good: "
            "use fp16 or bf16"
        ),
    )
    yield (
        bool(args.torch_compile),
        "torch_compile, but a compiled model cannot be reset between rounds: remove it",
    )
    yield (
        bool(args.push_to_hub),
        (
            "push_to_hub, but a site's model stays at the site: remove it, and upload "
            "the model of the run"
        ),
    )
    yield (
        args.n_gpu > 1 or args.world_size > 1 or bool(args.fsdp or args.deepspeed),
        (
            "several devices, fsdp or deepspeed, but it works in one process on one "
            "device: remove them, and show it one GPU (CUDA_VISIBLE_DEVICES)"
        ),
    )


def is_trainer(value: object) -> bool:
    """Whether a value is a ``transformers.Trainer``."""
    library = sys.modules.get("transformers.trainer")
    return library is not None and isinstance(value, library.Trainer)


def check_loop(trainer: Any) -> None:
    """Refuse a Trainer whose loop does not work as a part of a round.

    Args:
        trainer: A ``transformers.Trainer``, as its user has made it.

    Raises:
        JobError: The first setting that does not; the message says what to do.
    """
    for is_refused, fault in _faults(trainer):
        if is_refused:
            raise JobError(f"its Trainer has {fault}", key=_KEY)


def adopt(trainer: Any, module: torch.nn.Module) -> None:
    """Make a Trainer train this module, and neither print nor build another one.

    Args:
        trainer: A ``transformers.Trainer``.
        module: Its own model, in which layers may have been replaced.
    """
    trainer.model = trainer.model_wrapped = module
    trainer.model_init = None  # Its loop would begin with a model of its own.
    for callback in [*trainer.callback_handler.callbacks]:
        if type(callback).__name__ in _SHOWN:  # Standard output is data.
            trainer.remove_callback(callback)


def loaders_of(trainer: Any, *, name: str) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and held-out records of a Trainer, each with its collator.

    Raises:
        SiteError: It has none.
    """
    for part in ("train_dataset", "eval_dataset"):
        found = getattr(trainer, part)
        if found is None or isinstance(found, Mapping):
            said = "none" if found is None else "several"
            raise SiteError(
                f"the Trainer that {name} returned has {said} as {part}: give it one "
                "dataset to train on and one to evaluate on"
            )
    return trainer.get_train_dataloader(), trainer.get_eval_dataloader()
