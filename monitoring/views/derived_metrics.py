"""Metrics that are not means but follow from sums over all predictions of all sites.

Found by the names of the sums, so that a user's objective that returns ``tp``, ``fp``
and ``fn`` has an F1 score too. Each is the exact value over the pooled data, but the
area under the curve and the calibration error, whose scores are in bins.

With noise, cells of histograms may be negative. They are used as they are, since noise
of both signs cancels out in a sum over cells; only the result is brought to [0, 1].
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from federation.job.metrics import (
    AUC_BINS,
    CALIBRATION_BINS,
    CONFUSION,
    SUBGROUP,
)
from federation.messages import MetricSums

_FOUND = ("tp", "fp", "fn")
# Cells, which are not shown. An own metric may be called auc_of_men.
_HIDDEN = re.compile(
    rf"({CONFUSION}_\d+|auc_(pos|neg)|calibration|bin_(count|hits))_\d+|"
    rf"{SUBGROUP}_\d+_(count|loss|correct)"
)


def means(sums: MetricSums) -> Mapping[str, float]:
    """Means of the metrics that are shown as they are."""
    counted = _FOUND if _has(sums, _FOUND) else ()
    return {
        name: sums.mean(name)
        for name in sums.metrics
        if name not in {"correct", *counted} and not _HIDDEN.fullmatch(name)
    }


def derived(sums: MetricSums) -> Mapping[str, float]:
    """Metrics that follow from sums, where the sums are there."""
    found = sums.metrics
    result: dict[str, float] = {}
    if "squared_error" in found and found["squared_error"] >= 0:
        result["rmse"] = math.sqrt(sums.mean("squared_error"))
    if _has(sums, _FOUND):
        # Noise on held-out sums can make them negative.
        tp, fp, fn = (max(0.0, found[name]) for name in _FOUND)
        result |= {
            "precision": _share(tp, tp + fp),
            "recall": _share(tp, tp + fn),
            "f1": _share(2 * tp, 2 * tp + fp + fn),
        }
    sides = [[f"auc_{side}_{b}" for b in range(AUC_BINS)] for side in ("pos", "neg")]
    if _has(sums, (*sides[0], *sides[1])):
        area = _auc(*([found[name] for name in names] for names in sides))
        if area is not None:
            result["auc"] = area
    gaps = [f"calibration_{b}" for b in range(CALIBRATION_BINS)]
    if _has(sums, gaps):
        total = math.fsum(abs(found[name]) for name in gaps)
        result["calibration_error"] = min(1.0, total / sums.count)
    return {**result, **_of_confusion(sums)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgroupResult:
    """Results of a subgroup.

    Attributes:
        name: As the job names it.
        count: Predictions; with noise it may be negative.
        loss: Mean loss in nats; None if the subgroup was left out or is empty.
        accuracy: The same of accuracy, or None if the task has none.
    """

    name: str
    count: float
    loss: float | None
    accuracy: float | None


def subgroups(sums: MetricSums, names: Sequence[str]) -> Sequence[SubgroupResult]:
    """Results of the job's subgroups, in their order."""
    found = []
    for number, name in enumerate(names):
        count, loss, correct = (
            sums.metrics.get(f"{SUBGROUP}_{number}_{what}")
            for what in ("count", "loss", "correct")
        )
        found.append(
            SubgroupResult(
                name=name,
                count=count or 0,
                loss=_mean(loss, count),
                accuracy=_mean(correct, count),
            )
        )
    return found


def _mean(total: float | None, count: float | None) -> float | None:
    """A mean; None without predictions, as noise may leave them."""
    if total is None or count is None or count <= 0:
        return None
    return total / count


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Records whose confidence is in one of equal bins from 0 to 1.

    Attributes:
        count: How many there are.
        confidence: Their mean confidence; None for an empty bin.
        accuracy: Their hits over their number; None likewise.
    """

    count: float
    confidence: float | None
    accuracy: float | None


def reliability(sums: MetricSums) -> Sequence[ReliabilityBin]:
    """The bins of a reliability diagram; empty if the job does not measure them."""
    kinds = ("bin_count", "bin_hits", "calibration")
    if not _has(sums, [f"{k}_{b}" for k in kinds for b in range(CALIBRATION_BINS)]):
        return ()
    found = []
    for number in range(CALIBRATION_BINS):
        count, hits, gap = (sums.metrics[f"{kind}_{number}"] for kind in kinds)
        found.append(
            ReliabilityBin(
                count=count,
                confidence=(hits + gap) / count if count > 0 else None,
                accuracy=hits / count if count > 0 else None,
            )
        )
    return found


def _has(sums: MetricSums, names: Sequence[str]) -> bool:
    return all(name in sums.metrics for name in names)


def _share(part: float, whole: float) -> float:
    """As scikit-learn: 0 where there is nothing to find and nothing was found."""
    return part / whole if whole else 0.0


def _auc(pos: Sequence[float], neg: Sequence[float]) -> float | None:
    """Share of the pairs of a positive and a negative record in the right order.

    Pairs in one bin count half. None if there is no pair, or if noise leaves nothing of
    one side. The noise on both sides is independent, so neither the number of pairs nor
    that of those in the right order is biased by it.
    """
    if sum(pos) <= 0 or sum(neg) <= 0:
        return None
    below, right = 0.0, 0.0
    for p, n in zip(pos, neg, strict=True):
        right += p * (below + n / 2)
        below += n
    return min(max(right / (sum(pos) * below), 0.0), 1.0)


def _of_confusion(sums: MetricSums) -> Mapping[str, float]:
    """Macro F1 and mean intersection over union, over the classes that occur."""
    cells = [name for name in sums.metrics if name.startswith(f"{CONFUSION}_")]
    size = math.isqrt(len(cells))
    if not cells:
        return {}
    found = [
        [sums.metrics[f"{CONFUSION}_{label}_{other}"] for other in range(size)]
        for label in range(size)
    ]
    # With noise, a class that hardly occurs may have less than nothing.
    scores = [
        min(max(2 * hit / (2 * hit + miss), 0.0), 1.0)
        for hit, miss in _hits_and_misses(found)
        if 2 * hit + miss > 0
    ]
    if not scores:
        return {}
    return {
        "macro_f1": sum(scores) / len(scores),
        # hit / (hit + miss), which is in [0, 1] where F1 is.
        "mean_iou": sum(f1 / (2 - f1) for f1 in scores) / len(scores),
    }


def _hits_and_misses(
    found: Sequence[Sequence[float]],
) -> Iterator[tuple[float, float]]:
    """For each class its hits, and what has its label or its prediction only."""
    for label, row in enumerate(found):
        hit = row[label]
        yield hit, sum(row) + sum(other[label] for other in found) - 2 * hit
