"""A script of a user's that trains with transformers' Trainer, as a function.

Prompts and completions as trl has them: the loss counts only the completions.
"""

from tempfile import gettempdir
from typing import Any

import torch
from support.hugging_face import GPT2, VOCABULARY
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


class Counting(torch.utils.data.Dataset[dict[str, Any]]):
    """Prompts of numbers that count upwards, and completions that go on."""

    def __init__(self, first: int, size: int) -> None:
        """Hold some of them."""
        self.first, self.size = first, size

    def __len__(self) -> int:
        """Number of records."""
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A prompt and a completion."""
        start, length = self.first + index, 3 + index % 3
        numbers = [(start + i) % VOCABULARY for i in range(length + 3)]
        return {"prompt": numbers[:3], "completion": numbers[3:], "text": str(index)}


def collate(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad records, and mask prompts and padding in the labels."""
    most = max(len(r["prompt"]) + len(r["completion"]) for r in records)
    rows: dict[str, list[list[int]]] = {
        "input_ids": [],
        "labels": [],
        "attention_mask": [],
    }
    for record in records:
        ids = record["prompt"] + record["completion"]
        rest = most - len(ids)
        masked = [-100] * len(record["prompt"]) + record["completion"]
        rows["input_ids"].append(ids + [0] * rest)
        rows["labels"].append(masked + [-100] * rest)
        rows["attention_mask"].append([1] * len(ids) + [0] * rest)
    return {name: torch.tensor(values) for name, values in rows.items()}


class Broken(Trainer):
    """A Trainer with a mistake."""

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        """Fail."""
        raise RuntimeError("no such layer")


class Smoothed(Trainer):
    """A Trainer with a loss of its own, as many scripts have one."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 -- transformers'
        num_items_in_batch: Any = None,  # noqa: ARG002 -- as well
    ) -> Any:
        """Add a small penalty to the model's loss."""
        outputs = model(**inputs)
        loss = outputs["loss"] + 1e-3 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


class Chosen(Smoothed):
    """A Trainer that chooses records by itself."""

    def get_train_dataloader(self) -> Any:
        """All of its records, whatever a site has."""
        return torch.utils.data.DataLoader(Counting(0, 24), collate_fn=collate)


def make_trainer(
    *,
    broken: bool = False,
    chosen: bool = False,
    early: bool = False,
    no_data: bool = False,
    own_optimizer: bool = False,
    **changes: Any,
) -> Trainer:
    """Build model, data and Trainer; ``changes`` are of the TrainingArguments."""
    config = {k: v for k, v in GPT2.items() if k != "model_type"}
    settings = {
        "output_dir": gettempdir(),  # It makes the folder, and writes nothing there.
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 32,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "use_cpu": True,
        "label_names": ["labels"],
        "remove_unused_columns": False,
        **changes,
    }
    model = GPT2LMHeadModel(GPT2Config(**config))
    optimizer = torch.optim.SGD(model.parameters()) if own_optimizer else None
    kind = Broken if broken else Chosen if chosen else Smoothed
    return kind(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=None if no_data else Counting(0, 24),
        eval_dataset=None if no_data else Counting(100, 10),
        data_collator=collate,
        compute_metrics=_shares,
        callbacks=[EarlyStoppingCallback()] if early else None,
        optimizers=(optimizer, None),
    )


def _shares(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    known = labels != -100
    return {"hits": float((logits.argmax(-1) == labels)[known].mean())}


make_trainer.preprocessing = "none"  # type: ignore[attr-defined]
