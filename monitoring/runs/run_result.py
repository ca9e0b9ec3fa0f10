"""The result of a run, for callers from Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.terminal import outcome
from monitoring.views.result_json import history, result
from monitoring.views.round_view import loss_of, metrics_of, named_metric
from monitoring.views.run_view import RunView
from monitoring.views.statistics_view import RunStatistics, statistics_of


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the report, which notebooks display.

    Attributes:
        svg: The figure as SVG text.
    """

    svg: str

    def save(self, path: str | Path) -> None:
        """Write it as an SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run.

    Attributes:
        status: ``completed``, ``stopped``, or ``exhausted`` if the sites' privacy
            budgets allowed no further round.
        rounds_completed: Rounds after which the weights changed.
        rounds_now: Rounds that this call ran: 0 if all were done before.
        loss: Pooled held-out loss of the model that the run leaves, in nats; None if it
            was not evaluated.
        accuracy: Its pooled held-out accuracy; None if it was not evaluated, or if the
            task reports none.
        metrics: Means of your own objective's metrics, by name.
        view: Everything else that the run's events tell: rounds, sites, bytes.
        weights: The model that the run leaves, by `[selection]` of its job: arrays by
            tensor name, float32 and int64; frozen ones in the model's own types.
        folder: Where the run is kept; None if it is not.
        statistics: What a job of statistics found; None for any other.
    """

    status: str
    run_id: str
    rounds_completed: int
    rounds_now: int
    loss: float | None
    accuracy: float | None
    metrics: Mapping[str, float]
    view: RunView
    weights: Mapping[str, NDArray[Any]]
    folder: Path | None
    statistics: RunStatistics | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The final model for ``torch.nn.Module.load_state_dict``.

        Tied weights appear under one of their names: load with ``strict=False``.
        """
        return {name: torch.from_numpy(a) for name, a in self.weights.items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each round, ready for ``pandas.DataFrame``.

        Among the columns are ``round``, ``training_loss``, ``loss``, ``accuracy``,
        ``epsilon``, ``bytes_up``, ``bytes_down`` and ``seconds``.
        """
        return history(self.view)

    @property
    def epsilon(self) -> float | None:
        """The guarantee: the largest epsilon that a site has spent.

        The cap if the run's results ended it; None without differential privacy.
        """
        spent = self.view.guaranteed
        return None if spent is None else spent.epsilon

    @property
    def bytes_up(self) -> int:
        """Bytes from all sites."""
        return self.view.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes to all sites."""
        return self.view.bytes_down

    def plot(self, name: str = "loss") -> Chart:
        """Draw a figure of the report.

        Args:
            name: ``loss``, ``accuracy`` or ``perplexity``, ``epsilon``, ``data``,
                ``bytes``, ``timeline``, ``participation`` or ``update-norm``;
                ``loss-log`` and ``accuracy-log`` have a logarithmic axis.

        Raises:
            ValueError: The run has no data for it, or there is no such figure.
        """
        from monitoring.pages.plots import draw_all  # noqa: PLC0415 -- slow to import

        svg = draw_all(self.view, {name}).get(name)
        if svg is None:
            raise ValueError(f"this run has no figure {name!r}")
        return Chart(svg)

    def _lines(self) -> str:
        kept = [] if self.folder is None else [f"run         {self.folder}"]
        return "\n".join([*outcome.lines(self.view), *kept])

    def __repr__(self) -> str:
        """The summary that the command line prints at the end of a run."""
        return f"<RunResult {self.run_id}\n{self._lines()}>"

    def _repr_html_(self) -> str:
        try:
            svg = self.plot().svg
        except ValueError:  # Nothing was evaluated.
            svg = ""
        return f"<pre>{escape(self._lines())}</pre>{svg}"

    def summary(self) -> dict[str, Any]:
        """The content of ``result.json``."""
        return result(self.view)


def result_of(
    view: RunView,
    weights: Mapping[str, NDArray[Any]],
    run: RunFolder | None,
    *,
    job: JobSpec,
    rounds_now: int,
) -> RunResult:
    """Collect the result of a run.

    Args:
        view: The run.
        weights: Its model: arrays by tensor name.
        run: Where it is kept; None if it is not.
        job: Says whether the run is one of statistics.
        rounds_now: Rounds that this call ran.
    """
    last = view.last_evaluated
    sums = None if last is None else last.pooled
    return RunResult(
        status=view.status,
        run_id=view.started.run_id,
        rounds_completed=view.rounds_completed,
        rounds_now=rounds_now,
        loss=loss_of(sums),
        accuracy=None if sums is None else named_metric(sums, "accuracy"),
        metrics=metrics_of(sums),
        view=view,
        weights=weights,
        folder=None if run is None else run.path,
        statistics=found_statistics(job, weights, view),
    )


def found_statistics(
    job: JobSpec, weights: Mapping[str, NDArray[Any]], view: RunView
) -> RunStatistics | None:
    """The statistics that a run has found; None if its job asks for none."""
    if job.statistics is None:
        return None
    (table,) = weights.values()
    return statistics_of(job, table.ravel(), view)
