"""The outcome of a run, in a few lines."""

import math
from collections.abc import Iterator

from federation.events import ModelSelected
from federation.messages import MetricSums
from monitoring import privacy_words
from monitoring.units import format_number, format_span
from monitoring.views import storage_use
from monitoring.views.derived_metrics import SubgroupResult, subgroups
from monitoring.views.round_view import accuracy_of, loss_of, metrics_of, perplexity
from monitoring.views.run_view import RunView

_DIVERGED = (
    "the loss is not finite: lower the learning rate (`crossfed find-rate` suggests "
    "one), or look for NaN in an objective of your own"
)

_WORTH_TELLING = 0.1  # Of the sites' time.


def lines(view: RunView, *, status: str = "") -> Iterator[str]:
    """Return status, rounds, quality of the model, and the resources used.

    Args:
        view: The run.
        status: Status of a run whose last coordinator ended before its first event; by
            default what the events say.
    """
    yield f"status      {status or view.status}"
    by_engine = f" ({view.engine})" if len(view.engines) > 1 else ""
    if view.started.rounds:
        yield f"rounds      {view.rounds_completed}{by_engine}"
    else:  # Nothing was trained.
        yield f"model       {view.started.weights}"
    if view.selected is not None:
        yield f"model       {chosen(view.selected)}"
    yield from (f"{name:<11} {text}" for name, text in quality(view))
    if not math.isfinite(loss_of(_newest_sums(view)) or 0.0):
        yield f"diverged    {_diverged(view)}"
    if view.privacy is not None:
        spent = privacy_words.spent(
            view.privacy, view.total_spent, by_results=view.by_results
        )
        yield f"epsilon     {spent}"
    yield from _participation(view)
    yield from _traffic(view)
    sites = {site.site: site for site in view.sites}
    for relay, behind in zip(view.started.relays, view.started.relayed, strict=True):
        left = sum(sites[name].bytes_up for name in behind)
        entered = sum(sites[name].bytes_down for name in behind)
        yield f"relay       {relay}: {left:,} bytes left its cloud, {entered:,} entered"
    storage = storage_use.line(view)
    if storage is not None:
        yield f"storage     {storage}"


def _diverged(view: RunView) -> str:
    """Say what to do about a loss that is not finite; for a given model, at whom."""
    if view.started.rounds:
        return _DIVERGED
    at = [s.site for s in view.sites if s.loss and not math.isfinite(s.loss[-1][1])]
    return (
        f"the loss is not finite{' at ' if at else ''}{', '.join(at)}: look for NaN in "
        "the held-out records (crossfed check-job), or give another model"
    )


def _traffic(view: RunView) -> Iterator[str]:
    if view.predicted is not None:
        down, up = view.predicted.bytes_down, view.predicted.bytes_up
        yield (
            f"bytes       {view.bytes_down:,} down of {format_span(down)} "
            f"predicted, {view.bytes_up:,} up of {format_span(up)}"
        )
    elif view.bytes_up or view.bytes_down:
        yield f"bytes       {view.bytes_down:,} down, {view.bytes_up:,} up"
    again = view.superseded
    if again.bytes_down or again.bytes_up:
        yield (
            f"            of these {again.bytes_down:,} down, {again.bytes_up:,} up in "
            "rounds that ran again or to evaluate before an extension"
        )


def _participation(view: RunView) -> Iterator[str]:
    if view.left_out is not None and view.left_out.sites:
        yield f"without     {', '.join(view.left_out.sites)}"
    if (view.participation.share or 0.0) > _WORTH_TELLING:
        yield f"waiting     {next(view.participation.words())}"


def chosen(selected: ModelSelected) -> str:
    """Say which model a run has left, and whether the run stopped early."""
    texts = {
        "best": f"best by {selected.metric}: that of round {selected.round_index}",
        "last": f"that of the last round, {selected.round_index}",
    }
    average = f"{selected.model} of {selected.models} rounds"
    early = ""
    if selected.stopped_early:
        since = f"{selected.metric} was best after round {selected.best_round}"
        early = f"; the run stopped early: {since}"
    return texts.get(selected.model, average) + early


def quality(view: RunView) -> Iterator[tuple[str, str]]:
    """The results of the newest evaluation, by name; empty without one."""
    last, sums = view.last_evaluated, _newest_sums(view)
    loss, accuracy = loss_of(sums), accuracy_of(sums)
    if loss is None:
        return
    noisy = privacy_words.NOISY if privacy_words.has_noise(view.privacy) else ""
    noise = privacy_words.plus_minus(privacy_words.loss_noise(view.privacy, last))
    unit = view.loss_unit.removeprefix(" in")
    rounded = format_number(loss)
    shown = rounded if "e" in rounded else f"{loss:.4f}"
    yield "loss", f"{noisy}{shown}{noise}{unit}, {_on_what(view)}"
    for name, mean in metrics_of(sums).items():
        yield name, f"{noisy}{format_number(mean)}"
    for row in subgroups(sums, view.started.subgroups) if sums else ():
        yield "subgroup", f"{row.name}: {_of_subgroup(row, noisy)}"
    if view.is_language:
        yield "perplexity", f"{noisy}{perplexity(loss):.2f}"
    if view.is_language or accuracy is None:
        return
    of_right = privacy_words.accuracy_noise(view.privacy, last)
    legend = ""
    if of_right is not None:
        points = privacy_words.format_points(of_right)
        legend = f" +-{points} (standard deviation of the noise)"
    yield "accuracy", f"{noisy}{accuracy:.2%}{legend}"


def _of_subgroup(row: SubgroupResult, noisy: str) -> str:
    if row.loss is None:
        return "no records, or too few to report (training.min_subgroup)"
    hits = "" if row.accuracy is None else f", accuracy {noisy}{row.accuracy:.2%}"
    return f"loss {noisy}{row.loss:.4f}{hits} of {noisy}{row.count:,.0f} predictions"


def _newest_sums(view: RunView) -> MetricSums | None:
    last = view.last_evaluated
    return None if last is None else last.pooled


def _on_what(view: RunView) -> str:
    """Which model the final loss is of, and on whose data."""
    last = view.last_evaluated
    if last is None:
        return "not evaluated"
    whose = view.started.share(last.sites, view.started.sites) or "all sites"
    when = f"after round {last.round_index}, " if view.started.rounds else ""
    return f"{when}on held-out data of {whose}"
