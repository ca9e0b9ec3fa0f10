"""Buffered runs of secure sums in virtual time, and what happened in them."""

from collections.abc import Sequence
from typing import Any

from support import toy
from support.small_jobs import small_job
from support.without_report import simulate

from federation.events import Event, SiteFailed

SITES = [f"site-{i}" for i in range(6)]
FAST, SLOW = SITES[:3], SITES[3:]
RECORD: dict[str, Any] = {
    "privacy": {
        "differential_privacy": {
            "unit": "record",
            "target_epsilon": 8.0,
            "clip_norm": 1.0,
        }
    }
}
STEP_SECONDS = 24 / 100.0  # Of a task of the fast sites: 24 examples.


def tables(*more: dict[str, Any]) -> dict[str, Any]:
    """A job of two groups with speeds 4:1."""
    found: dict[str, Any] = {
        "rounds": 10,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4, "classes": 3},
        },
        "training": {"local_steps": 3, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "evaluation": {"every": 0},
        "privacy": {"secure_aggregation": {"enabled": True}},
        "aggregation": {"weights": "uniform"},
        "simulation": {
            "machines": [
                {"site": site, "examples_per_second": 100.0 if site in FAST else 25.0}
                for site in SITES
            ]
        },
    }
    for each in more:
        found = toy.merged(found, each)
    return {"num_sites": len(SITES), **pruned(found)}


def pruned(table: dict[str, Any]) -> dict[str, Any]:
    """A table without the keys that a change has taken out."""
    return {
        key: pruned(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def told(*more: dict[str, Any], **how: Any) -> list[Event]:
    events: list[Event] = []
    how = {"engine": "virtual", **how}
    simulate(small_job(**tables(*more)), listeners=[events.append], **how)
    return events


def of(kind: type[Any], events: Sequence[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def failures(events: Sequence[Event]) -> list[SiteFailed]:
    """Without the tasks that are open when the last model is made."""
    return [event for event in of(SiteFailed, events) if event.kind != "surplus"]


def fault(site: str, kind: str, *rounds: int, **keys: Any) -> dict[str, Any]:
    one = {"site": site, "kind": kind, "rounds": rounds, **keys}
    return {"simulation": {"faults": [one]}}
