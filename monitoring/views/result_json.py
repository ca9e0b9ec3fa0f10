"""The content of ``result.json``, from the view of a run."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from federation.events import CostPredicted, ModelSelected
from federation.messages import Resources
from monitoring.views.derived_metrics import reliability, subgroups
from monitoring.views.round_view import (
    accuracy_of,
    loss_of,
    metrics_of,
    perplexity,
)
from monitoring.views.run_totals import RoundRow
from monitoring.views.run_view import RunView
from monitoring.views.site_view import SiteView

_NESTED = {"metrics", "failed", "resources"}


def result(view: RunView) -> dict[str, Any]:
    """The content of ``result.json``; numbers that are not finite become None."""
    up, down = view.evaluation_bytes
    return {
        "status": view.status,
        "run_id": view.started.run_id,
        "job": view.started.job_name,
        "rounds_completed": view.rounds_completed,
        "engines": [
            {"first_round": first, "engine": engine} for first, engine in view.engines
        ],
        "extended": [asdict(event) for event in view.extended],
        "selected": None if view.selected is None else _selected(view.selected),
        "final": _final(view),
        **_privacy_result(view),
        "rounds": _round_results(view),
        "final_evaluation": {"bytes_up": up, "bytes_down": down},
        "superseded": {
            "bytes_up": view.superseded.bytes_up,
            "bytes_down": view.superseded.bytes_down,
        },
        "sites": [_site_result(site, view) for site in view.sites],
        "storage": [
            {
                "url": used.url,
                "who": used.who,
                "way": used.way,
                "uses": [asdict(use) for use in used.uses],
                "spared_calls": used.spared_calls,
                "spared_bytes": used.spared_bytes,
            }
            for used in view.storage
        ],
        "seconds": view.seconds,
        "waiting_share": view.participation.share,
        "fairness": view.participation.fairness,
        "bytes_up": view.bytes_up,
        "bytes_down": view.bytes_down,
        "virtual_dollars": sum(view.virtual_dollars.values()) if view.paid else None,
        "predicted": _predicted(view.predicted),
    }


def history(view: RunView) -> list[dict[str, Any]]:
    """A flat row for each round, for tables.

    Metrics of the user's own objective are columns, after the others.
    """
    rows = []
    for row in _round_results(view):
        metrics = row.get("metrics", {})
        fixed = {name: value for name, value in row.items() if name not in _NESTED}
        if fixed["accuracy"] is None:
            fixed["accuracy"] = metrics.get("accuracy")
        rows.append({**fixed, **metrics, **fixed})
    return rows


def _round_results(view: RunView) -> list[Mapping[str, Any]]:
    is_private = view.privacy is not None
    return [_round_result(row, is_private=is_private) for row in view.totals.rows]


def _predicted(event: CostPredicted | None) -> Mapping[str, Any] | None:
    if event is None:
        return None
    return {
        "bytes_up": list(event.bytes_up),
        "bytes_down": list(event.bytes_down),
        "seconds": event.seconds,
        "virtual_dollars": event.dollars,
    }


def _selected(event: ModelSelected) -> Mapping[str, Any]:
    found = asdict(event)
    del found["at"]
    return {**found, "round": found.pop("round_index")}


def _own_metrics(means: Mapping[str, float]) -> Mapping[str, Any]:
    return {"metrics": {n: finite(v) for n, v in means.items()}} if means else {}


def _final(view: RunView) -> Mapping[str, Any]:
    event = view.last_evaluated
    sums = None if event is None else event.pooled
    loss = loss_of(sums)
    final: dict[str, Any] = {
        "round": None if event is None else event.round_index,
        "sites_evaluated": 0 if event is None else len(event.sites),
        "loss": finite(loss),
        "accuracy": finite(accuracy_of(sums)),
    }
    if view.confusion:
        final["classes"] = list(view.started.classes)
        final["confusion"] = [list(row) for row in view.confusion]
    if sums is not None and view.started.subgroups:
        rows = subgroups(sums, view.started.subgroups)
        final["subgroups"] = [asdict(row) for row in rows]
    if sums is not None and (bins := reliability(sums)):
        final["reliability"] = [asdict(each) for each in bins]
    if view.is_language:
        final["perplexity"] = None if loss is None else finite(perplexity(loss))
    return {**final, **_own_metrics(metrics_of(sums))}


def _privacy_result(view: RunView) -> Mapping[str, Any]:
    """Epsilon and its terms; all None without differential privacy."""
    planned, total, charged = view.privacy, view.guaranteed, view.total_spent
    found: dict[str, Any] = {
        "epsilon": total.epsilon if total else None,
        "delta": total.delta if total else None,
        "epsilon_charged": charged.epsilon if charged else None,
        "privacy": None,
    }
    if planned is not None:
        held_out = None if view.last_evaluated is None else "public"
        if any(site.held_out_noise is not None for site in planned.sites):
            held_out = "noise"
        found["privacy"] = {
            "unit": planned.unit,
            "relation": planned.relation,
            "accountant": planned.accountant,
            "sampling": planned.sampling,
            "holds_against": planned.holds_against or None,
            "signal_to_noise": finite(planned.signal_to_noise),
            "epsilon_cap": max((s.epsilon_cap for s in planned.sites), default=None),
            "held_out": held_out,
            "held_out_epsilon": total.held_out_epsilon if total else None,
            "replaced": list(planned.replaced),
            "withheld": list(planned.withheld),
            "sites": [asdict(site) for site in planned.sites],
        }
    return found


def _round_result(row: RoundRow, *, is_private: bool) -> Mapping[str, Any]:
    return {
        "round": row.index,
        "status": row.status,
        "training_loss": finite(row.training_loss),
        "sites_evaluated": row.sites_evaluated,
        "loss": finite(row.loss),
        "accuracy": finite(row.accuracy),
        **_own_metrics(dict(row.metrics)),
        "asked": row.asked,
        "answered": row.answered,
        "failed": dict(row.failures),
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
        "seconds": row.seconds,
        "update_norm": finite(row.update_norm),
        "update_clip": finite(row.update_clip),
        "epsilon": row.epsilon if is_private else None,
        "resources": _resources(row.resources),
    }


def _site_result(site: SiteView, view: RunView) -> Mapping[str, Any]:
    guaranteed = site.guaranteed(by_results=view.by_results)
    return {
        "site": site.site,
        "cloud": site.share.cloud if site.share else None,
        "region": site.share.region if site.share else None,
        "examples": site.share.train_examples if site.share else site.examples,
        "rounds_answered": site.answered,
        "failures": site.num_failures,
        "bytes_up": site.bytes_up,
        "bytes_down": site.bytes_down,
        "seconds": site.seconds,
        "waited_for": view.participation.waited.get(site.site),
        "virtual_dollars": view.virtual_dollars.get(site.site),
        "resources": _resources(site.used),
        "loss": finite(site.loss[-1][1]) if site.loss else None,
        "accuracy": finite(site.accuracy[-1][1]) if site.accuracy else None,
        "epsilon": guaranteed.epsilon if guaranteed else None,
        "epsilon_charged": site.spent.epsilon if site.spent else None,
        "delta": site.spent.delta if site.spent else None,
        "held_out_epsilon": guaranteed.held_out_epsilon if guaranteed else None,
    }


def _resources(used: Resources | None) -> Mapping[str, Any] | None:
    if used is None:
        return None
    return {
        **asdict(used),
        "busy_seconds": finite(used.busy_seconds),
        "cpu_seconds": finite(used.cpu_seconds),
    }


def finite(value: float | None) -> float | None:
    """Return None for a number that JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
