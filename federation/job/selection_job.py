"""The keys of ``[selection]`` in a job file: which model a run leaves, and when.

What depends on other tables is refused by ``selection_checks``; the decisions are in
``federation.rounds.selection``.
"""

from dataclasses import dataclass

from federation.job.job_keys import key

AVERAGES = ("ema", "swa")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSpec:
    """Which model a run leaves, and early stopping.

    Without this table, a run leaves the model of its last round.

    Attributes:
        model: `best`: the evaluated model with the best `metric`. `ema`, `swa`: the
            average of the models after each round, with weights that decay (exponential
            moving average), or with equal weights (stochastic weight averaging).
            `last`: the model of the last round.
        metric: Held-out result, pooled over the sites, that `best` and `patience`
            compare: `loss`, `accuracy`, or another metric of the task, such as `f1`.
        goal: `min` or `max`; needed for metrics of your own objective only.
        patience: The run stops early after this many evaluations in a row without a
            better `metric`; by default it never does.
        min_change: How much better a result must be to count as better.
        decay: Weight of the average so far when `ema` adds a model.
        average_from: First round whose model `ema` and `swa` average.
    """

    model: str = key(default="best", choices=("best", *AVERAGES, "last"))
    metric: str = "loss"
    goal: str | None = key(default=None, choices=("min", "max"))
    patience: int | None = key(default=None, low=1)
    min_change: float = key(default=0.0, low=0.0)
    decay: float = key(default=0.9, above=0.0, below=1.0)
    average_from: int = key(default=1, low=1)

    @property
    def averages(self) -> bool:
        """Whether the run leaves an average of models."""
        return self.model in AVERAGES

    @property
    def compares(self) -> bool:
        """Whether anything depends on the metric."""
        return self.model == "best" or self.patience is not None
