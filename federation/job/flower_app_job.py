"""The keys of ``flower_app`` of a site in a job file: a site that runs somebody's app.

Names are those that Flower's own examples use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerAppSpec:
    """How an existing Flower `ClientApp` takes part, and what it calls things."""

    arrays: str = key(
        "Record of the model's tensors, in messages and answers.", default="arrays"
    )
    config: str = key("Record of settings in messages.", default="config")
    metrics: str = key("Record of numbers in answers.", default="metrics")
    num_examples: str = key(
        "Metric: examples that the numbers are of, and that a site counts with.",
        default="num-examples",
    )
    train_loss: str = key(
        "Metric of training: mean loss of an example. Empty if the app tells none.",
        default="train_loss",
    )
    evaluate: bool = key(
        "Whether the app is asked to evaluate; false for one without "
        "`@app.evaluate()`.",
        default=True,
    )
    eval_loss: str = key(
        "Metric of evaluation: mean loss of an example.", default="eval_loss"
    )
    eval_accuracy: str = key(
        "Metric of evaluation: fraction of examples that were right.",
        default="eval_acc",
    )
    settings: Mapping[str, Any] = key(
        "Numbers, texts and flags for the record of settings. Without them it has "
        "`server-round`, and of `[training]` `lr`, `batch-size`, and `local-steps` or "
        "`local-epochs`; what the app makes of them is its own affair.",
        default={},
    )
