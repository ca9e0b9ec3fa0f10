"""Jobs that evaluate a model and train none: ``rounds = 0``.

Such a run is the last exchange of any run, alone: the sites evaluate ``model.weights``.
Seals, ledgers, quorum and restart are those of training.
"""

from collections.abc import Iterable, MutableMapping
from typing import Any

from federation.errors import JobError, broken
from federation.job.spec import JobSpec

# Tables and keys about rounds of training, or about what they send. An evaluation has
# none of it; the model arrives as it is in its file.
_OF_TRAINING = (
    "selection",
    "communication",
    "aggregation.server_optimizer",
    "model.keep_zeros",
    "training.accumulate_from",
    "training.overlap_steps",
    "training.overlap_mix",
    "training.control_variates",
    "training.dynamic_alpha",
    "schedule.allocation",
    "schedule.grace",
    "schedule.local_work",
    "schedule.max_local_steps",
    "schedule.training_share",
    "simulation.faults",
    "privacy.secure_aggregation.levels",
)


def evaluates_only(job: JobSpec) -> bool:
    """Whether a job has no round of training."""
    return job.rounds == 0


def make_evaluation(document: MutableMapping[str, Any], model: str) -> None:
    """Change a job's document, in place, into one that evaluates ``model``."""
    drop_keys(document, _OF_TRAINING)
    document["rounds"] = 0
    if isinstance(document.get("name"), str):  # Its runs are not those that train.
        document["name"] += "-evaluation"
    for name, key, value in (("model", "weights", model), ("evaluation", "every", 1)):
        inner = document.setdefault(name, {})
        if isinstance(inner, MutableMapping):  # Anything else is refused as it is read.
            inner[key] = value


def drop_keys(document: MutableMapping[str, Any], keys: Iterable[str]) -> None:
    """Take keys out of a job's document, in place, by their dotted names."""
    for key in keys:
        *tables, last = key.split(".")
        table: Any = document
        for name in tables:
            table = table.get(name) if isinstance(table, MutableMapping) else None
        if isinstance(table, MutableMapping):
            table.pop(last, None)


def check_evaluation(job: JobSpec) -> list[JobError]:
    """Refuse a job without rounds that could not evaluate its model."""
    if not evaluates_only(job):
        return []
    rules = {
        "model.weights: is missing: with rounds = 0 a run evaluates this model, and "
        "trains none. Name one, or use crossfed evaluate MODEL JOB": (
            job.model.weights is None
        ),
        "evaluation.every: is 0: with rounds = 0 a run only evaluates. Set it to 1": (
            job.evaluation.every == 0
        ),
        "model.personal: no file holds the parts that each site keeps for itself. The "
        "run that trained them has evaluated each site's own model after its last "
        "round. With model.personal=[] a run evaluates one whole model at all sites: "
        "one of `crossfed site model`": bool(job.model.personal),
    }
    return broken(rules)
