"""The keys of ``flower_app`` of a site in a job file: a site that runs somebody's app.

Names are those that Flower's own examples use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerAppSpec:
    """How an existing Flower `ClientApp` takes part, and what it calls things.

    Attributes:
        arrays: Record of the model's tensors, in messages and answers.
        config: Record of settings in messages.
        metrics: Record of numbers in answers.
        num_examples: Metric: examples that the numbers are of, and that a site counts
            with.
        train_loss: Metric of training: mean loss of an example. Empty if the app tells
            none.
        evaluate: Whether the app is asked to evaluate; false for one without
            `@app.evaluate()`.
        eval_loss: Metric of evaluation: mean loss of an example.
        eval_accuracy: Metric of evaluation: fraction of examples that were right.
        settings: Numbers, texts and flags for the record of settings. Without them it
            has `server-round`, and of `[training]` `lr`, `batch-size`, and
            `local-steps` or `local-epochs`; what the app makes of them is its own
            affair.
    """

    arrays: str = "arrays"
    config: str = "config"
    metrics: str = "metrics"
    num_examples: str = "num-examples"
    train_loss: str = "train_loss"
    evaluate: bool = True
    eval_loss: str = "eval_loss"
    eval_accuracy: str = "eval_acc"
    settings: Mapping[str, Any] = key(default={})
