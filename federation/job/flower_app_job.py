"""The keys of a site's ``flower_app`` in a job file: a site with an existing app.

Names are those that Flower's own examples use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from federation.job.job_keys import key

ROUND = "server-round"  # What the record of settings says by itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerAppSpec:
    """How an existing Flower `ClientApp` takes part, and the names that it uses.

    Attributes:
        arrays: Record of the model's tensors, in messages and answers.
        config: Record of settings in messages.
        metrics: Record of numbers in answers.
        num_examples: Metric: number of examples behind the other metrics, which is also
            the site's weight.
        train_loss: Training metric: mean loss per example. Empty if the app reports
            none.
        evaluate: Whether the app evaluates; false for an app without `@app.evaluate()`.
        eval_loss: Evaluation metric: mean loss per example.
        eval_accuracy: Evaluation metric: fraction of correct examples. For `regression`
            and your own objective, whose metrics the app reports as means under their
            own names, it is not used and may be empty.
        settings: Numbers, strings and flags for the settings record. If empty, the
            record holds `server-round`, and from `[training]` `lr`, `batch-size`, and
            `local-steps` or `local-epochs`; the app decides what to do with them.
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
