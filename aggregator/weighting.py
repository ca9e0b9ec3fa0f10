"""How much a site's update counts, with bounds on what a site claims.

Counts and losses are a site's own word: bounds keep nonsense out, not lies, and what
a site has introduced itself with keeps it to one word. Where a site may lie, use
``uniform`` weights and a robust rule of ``aggregator.combine``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from federation.errors import InvalidUpdate
from federation.ids import SiteId
from federation.job.metrics import (
    MAX_PREDICTIONS,
    Metric,
    metrics_of,
    most_of_a_record,
    reported_of,
)
from federation.job.spec import JobSpec
from federation.messages import MetricSums, SiteEvaluation, SiteUpdate
from federation.rounds.local_work import accumulate_in, bounds

# Training examples that one site may claim to hold.
MAX_EXAMPLES = 10**9

# What float64 may take a site's sum of bounded values beyond their bounds, of the sum.
ROUNDING = 2.0**-20

# Relative improvement of the loss that counts at least and at most.
MIN_IMPROVEMENT = 0.01
MAX_IMPROVEMENT = 1.0

Weighting = Callable[[SiteUpdate], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedCounts:
    """The numbers that a site signed about its data; 0 where they stay private.

    Attributes:
        examples: To train on.
        held_out: To evaluate on.
    """

    examples: int
    held_out: int


_UNKNOWN: Mapping[SiteId, SignedCounts] = MappingProxyType({})


def weight_of(
    rule: str, *, introduced: Mapping[SiteId, SignedCounts] = _UNKNOWN
) -> Weighting:
    """Return the weighting that a job names.

    Args:
        rule: ``examples``, ``uniform`` or ``dynamic``.
        introduced: What sites have signed of their data. Updates of these sites that
            claim more training examples are refused, whatever the rule; those of other
            sites are bounded only by ``MAX_EXAMPLES``.
    """
    rules: dict[str, Weighting] = {
        "examples": by_examples,
        "uniform": uniformly,
        "dynamic": by_improvement,
    }
    weigh = rules[rule]

    def weigh_held(update: SiteUpdate) -> float:
        said = introduced.get(update.site)
        if said is not None and update.num_examples > said.examples:
            raise InvalidUpdate(
                f"site {update.site!r} claims {update.num_examples} training examples, "
                f"but introduced itself with {said.examples}: if its data has grown, "
                "stop the run and resume it"
            )
        return weigh(update)

    return weigh_held


def most_trained_on(
    job: JobSpec,
    examples: int | None,
    *,
    round_index: int,
    steps: range | None = None,
) -> int | None:
    """Most predictions that one site makes in a round's training; None if unknown.

    Args:
        job: Sets the batch size, and the steps or epochs of a round.
        examples: That the site holds at most; None if that is unknown.
        round_index: The round, from 1: steps of later rounds may be larger.
        steps: Those that were chosen for the round; None for the most that the job
            allows.
    """
    training, each = job.training, most_of_a_record(job.training)
    if training.local_steps is not None:
        most = bounds(job)[1] if steps is None else len(steps)
        batches = most * accumulate_in(training, round_index)
        return batches * training.batch_size * each
    return None if examples is None else training.num_epochs * examples * each


def sums_fault(
    job: JobSpec, introduced: Mapping[SiteId, SignedCounts] = _UNKNOWN
) -> Callable[[SiteUpdate | SiteEvaluation, range | None], str]:
    """Return a check for counts in an answer that its site cannot have reached.

    It takes the answer, and the local steps that were chosen for its round, if any.

    Args:
        job: Sets the metrics, and the steps or epochs of a round.
        introduced: What sites have signed before the first round.
    """
    training, each = metrics_of(job.training), most_of_a_record(job.training)
    held_out = reported_of(job)

    def fault(answer: SiteUpdate | SiteEvaluation, steps: range | None) -> str:
        said = introduced.get(answer.site)
        examples = said.held_out if said else 0
        evaluated = examples * each if examples else MAX_PREDICTIONS
        most = None
        if said:
            most = most_trained_on(
                job, said.examples or None, round_index=answer.round_index, steps=steps
            )
        trained = MAX_PREDICTIONS if most is None else most
        bounds = {"evaluation": evaluated, "evaluation_after": evaluated}
        for name, bound in {**bounds, "training": trained}.items():
            sums: MetricSums | None = getattr(answer, name, None)
            if sums is None:
                continue
            if sums.count > bound:
                return (
                    f"counts {sums.count} predictions in {name.partition('_')[0]}, but "
                    f"its data allows at most {bound}"
                )
            metrics = training if name == "training" else held_out
            if not _are_possible(sums, metrics):
                return "reported an impossible number of predictions"
        return ""

    return fault


def _are_possible(sums: MetricSums, metrics: Mapping[str, Metric]) -> bool:
    """Whether so many predictions can have such metrics.

    Its loss may be anything: a model that diverged is honest about NaN.
    """
    if sums.count < 0 or sums.metrics.keys() != metrics.keys():
        return False
    return all(_is_possible(sums.metrics[n], m, sums.count) for n, m in metrics.items())


def _is_possible(value: float, metric: Metric, count: int) -> bool:
    if math.isinf(metric.reach):  # Without bounds it may be anything too.
        return True
    if metric.is_whole and not isinstance(value, int):
        return False
    # Each site sums in float64.
    slack = 0.0 if metric.is_whole else ROUNDING * metric.reach * count
    return metric.low * count - slack <= value <= metric.high * count + slack


def by_examples(update: SiteUpdate) -> float:
    """Weigh a site by the training examples that it holds, as FedAvg does.

    Raises:
        InvalidUpdate: The site claims none, or more than ``MAX_EXAMPLES``.
    """
    if not 1 <= update.num_examples <= MAX_EXAMPLES:
        raise InvalidUpdate(
            f"site {update.site!r} claims {update.num_examples} training examples; 1 "
            f"to {MAX_EXAMPLES} are accepted"
        )
    return float(update.num_examples)


def uniformly(_update: SiteUpdate) -> float:
    """Weigh every site the same."""
    return 1.0


def by_improvement(update: SiteUpdate) -> float:
    """Weigh a site by its examples times its relative improvement of the loss.

    ``num_examples * clip((L_before - L_after) / L_before, 0.01, 1)``, where
    ``L_before`` is the mean loss of the global weights and ``L_after`` that of the
    site's trained weights, both on the site's own held-out data. A site whose loss
    was 0 or got worse still counts, with the factor 0.01.

    After the idea of dynamic weighting in Yang et al., arXiv:2410.19130. Only its
    abstract was at hand: the formula is ours and does not reproduce theirs.

    Raises:
        InvalidUpdate: The count is unbelievable, as in ``by_examples``; an
            evaluation is missing, empty or not of finite loss at least 0; or the
            two are of different data.
    """
    before = _evaluation(update, update.evaluation, "before")
    after = _evaluation(update, update.evaluation_after, "after")
    if before.count != after.count:
        raise InvalidUpdate(
            f"site {update.site!r} evaluated {before.count} predictions before "
            f"training and {after.count} after; they must be the same"
        )
    improvement = 1 - after.loss / before.loss if before.loss > 0 else 0.0
    bounded = min(max(improvement, MIN_IMPROVEMENT), MAX_IMPROVEMENT)
    return by_examples(update) * bounded


def _evaluation(update: SiteUpdate, sums: MetricSums | None, when: str) -> MetricSums:
    if sums is None:
        raise InvalidUpdate(
            f"site {update.site!r} sent no evaluation of the weights {when} training, "
            "which dynamic weights need"
        )
    if sums.count < 1 or not 0 <= sums.loss_sum < math.inf:
        raise InvalidUpdate(
            f"site {update.site!r} sent a loss of {sums.loss_sum} over {sums.count} "
            f"predictions {when} training"
        )
    return sums
