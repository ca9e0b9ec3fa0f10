"""Users' mistakes that raise nothing, as a site's first evaluation shows them.

Its weights are those that the run begins with, which are finite. What is found goes to
the log alone: in a deployed run, to that of the site.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

import torch

from clients.data.datasets import (
    Batch,
    Dataset,
    Indices,
    first_not_finite,
    not_finite_records,
)
from clients.models.applying import logits_of
from federation.ids import SiteId
from federation.job.metrics import Metric
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.tree import Tree

_LOG = logging.getLogger(__name__)

PROBABILITIES = (
    "returns probabilities, but classification needs logits: remove the softmax at its "
    "end"
)
_FEW = 16  # Records that show it.

SIGMOID = (
    "returns probabilities, but the task needs logits: remove the sigmoid at its end"
)
_VIEWS = (
    "View",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Select",
    "Slice",
    "ToCopy",
    "Alias",
)


def ends_in_sigmoid(logits: torch.Tensor) -> bool:
    """Whether what a model returned, with its graph, comes from a sigmoid."""
    node = logits.grad_fn
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("SigmoidBackward")


def are_probabilities(logits_bk: torch.Tensor) -> bool:
    """Whether each row of a model's output, shape ``(B, K)``, adds up to 1."""
    sums = logits_bk.sum(1)
    is_positive = bool(logits_bk.min() >= 0)
    return is_positive and torch.allclose(sums, torch.ones_like(sums))


def beyond_bounds(
    values: Mapping[str, torch.Tensor], bounds: Mapping[str, Metric]
) -> Iterator[str]:
    """Say of which metrics some values count as a bound, and not as what they are.

    Args:
        values: Of each record, shape ``(B,)``, by name.
        bounds: Those of the job.
    """
    for name, metric in bounds.items():
        values_b = values[name]
        num_beyond = int(((values_b < metric.low) | (values_b > metric.high)).sum())
        if num_beyond:
            yield (
                f"training.metrics.{name}: {num_beyond} of {len(values_b)} held-out "
                f"records have values beyond [{metric.low:g}, {metric.high:g}], which "
                "count as the nearest bound in all results: widen the bounds"
            )


@dataclass(slots=True, eq=False)
class EvaluationNotes:
    """Looks at one evaluation of a site.

    Attributes:
        held_out: What it evaluates on.
        noted: What was logged about the model, which all sites of a simulation share.
        is_over: Whether there is nothing more to look at.
    """

    job: JobSpec
    site: SiteId
    held_out: Dataset
    _: KW_ONLY
    noted: set[str]
    is_over: bool = False

    def on_batch(self, model: torch.nn.Module, inputs: Tree) -> None:
        """Look at what a model in evaluation mode makes of a batch."""
        if self.is_over or self.job.training.task != "classification":
            return
        if PROBABILITIES in self.noted:
            return
        few = inputs[:_FEW] if isinstance(inputs, torch.Tensor) else inputs
        if are_probabilities(logits_of(model, few)):
            self.noted.add(PROBABILITIES)
            _LOG.warning("model.factory: %s", PROBABILITIES)

    def on_result(
        self,
        sums: MetricSums,
        batches: Iterable[Indices],
        is_handled: Callable[[Batch], bool],
    ) -> None:
        """Find the record that made the loss infinite or NaN, if one did."""
        if not self.is_over and not math.isfinite(sums.loss_sum):
            bad = first_not_finite(self.held_out, batches, is_handled)
            if bad is not None:
                text = not_finite_records("held-out", bad)
                _LOG.warning("site %s: the loss is not finite: %s", self.site, text)
        self.is_over = True
