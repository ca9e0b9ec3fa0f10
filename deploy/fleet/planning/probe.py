"""``crossfed plan --probe``: measure here what the model of costs needs.

A rehearsal of the job in this process, of a few rounds and a few steps, shows how fast
sites train and evaluate, and how long encoding, masking and combining take. The newest
run of the deployment shows what a rehearsal cannot: how long its programs take to
start, and its messages to travel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from deploy.aggregator_host import run_queue
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.planning.forecast import SPEEDS, federation_of
from deploy.fleet.planning.measured import (
    measured_speeds,
    message_seconds,
)
from deploy.fleet.planning.plan import SizesOf, changed
from deploy.fleet.tables.providers import LOCAL
from deploy.wiring.simulation import simulate
from federation import durable_files
from federation.errors import FederationError, JobError
from federation.events import Event
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.local_work import is_auto
from monitoring.runs.find import find_runs
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_fold import fold
from monitoring.views.run_view import RunView
from privacy import own_folder

# Of a rehearsal. Rates follow from the later rounds.
ROUNDS, STEPS = 4, 20
_HEAD = (
    "# Written by crossfed plan --probe: a rehearsal in one process of one machine{}.\n"
    "# Add the prices of sites and lines, or leave them to the price table.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """What was measured.

    Attributes:
        speeds: For the model of costs.
        run: The run that start-up and messages were taken from; None if the deployment
            has had none, and then they are not included.
    """

    speeds: Speeds
    run: RunFolder | None


def probe(plan: DeploymentPlan, job: JobSpec, sizes_of: SizesOf) -> MeasuredSpeeds:
    """Measure the speeds of a deployment's job.

    Raises:
        FederationError: The job cannot be rehearsed here.
    """
    small = changed(job, _few_rounds(plan, job))
    view, traffic = _rehearse(plan, small), sizes_of(federation_of(plan, small))
    if traffic is None:
        raise JobError(
            "measures neither groups nor apps of Flower: state speeds", key="--probe"
        )
    rates = None
    if job.privacy.secure_aggregation.enabled:
        # Sites report no phases then; without it, they do.
        rates = _plain_rates(plan, small, sizes_of)
    speeds = measured_speeds(view, traffic, sites=rates)
    # What a process takes to start is not what those of a deployment take.
    speeds = replace(speeds, first_round_seconds=0.0)
    return _with_run(plan, speeds, sizes_of)


def _few_rounds(plan: DeploymentPlan, job: JobSpec) -> Mapping[str, Any]:
    changes: dict[str, Any] = {"rounds": ROUNDS}
    if is_auto(job):  # A rehearsal has no lines to choose by.
        names = ("local_work", "max_local_steps", "training_share")
        changes |= {f"schedule.{name}": None for name in names}
    # Speeds are of examples, and no later round with larger steps is rehearsed.
    changes["training.accumulate_from"] = None
    changes["simulation.live_metrics"] = None  # The rehearsal keeps no run.
    steps = job.training.local_steps
    if steps is not None and steps > STEPS:
        changes["training.local_steps"] = STEPS
    here = sum(site.provider == LOCAL for site in plan.file.sites)
    if here > 1:  # They share this machine, as they do in the rehearsal.
        changes["simulation.workers"] = here
    return changes


def _rehearse(plan: DeploymentPlan, job: JobSpec) -> RunView:
    seen: list[Event] = []
    simulate(federation_of(plan, job).job, listeners=[seen.append])
    return fold(seen)


def _plain_rates(
    plan: DeploymentPlan, job: JobSpec, sizes_of: SizesOf
) -> Sequence[SiteSpeed] | None:
    document = job_file.document(job)
    document["privacy"].pop("secure_aggregation", None)
    try:
        plain = job_file.parse(document)
        traffic = sizes_of(federation_of(plan, plain))
    except FederationError:
        return None  # This job has no meaning without it.
    if traffic is None:
        return None
    return measured_speeds(_rehearse(plan, plain), traffic).sites


def _with_run(
    plan: DeploymentPlan, speeds: Speeds, sizes_of: SizesOf
) -> MeasuredSpeeds:
    """Add what only a run of the deployment can show."""
    found = [*find_runs(plan.folder / "aggregator" / "runs")]
    found.sort(key=lambda run: run.path.name, reverse=True)
    newest, latency = None, 0.0
    for run in found:
        try:
            view, handed = run.view(), run_queue.read(run)
            traffic = sizes_of(federation_of(plan, run.read_spec()))
            if handed is None or traffic is None:
                continue
            shown = measured_speeds(view, traffic, submitted=handed.request.at)
        except FederationError:
            continue  # It has not got far enough to show anything.
        newest = newest or (run, shown)
        # A private run without secure sums does not show how long messages take.
        latency = message_seconds(view) / 2
        if latency:
            break
    if newest is None:
        return MeasuredSpeeds(speeds=speeds, run=None)
    run, shown = newest
    speeds = replace(
        speeds,
        setup_seconds=shown.setup_seconds,
        first_round_seconds=shown.first_round_seconds,
        sites=tuple(
            replace(s, latency_seconds=s.latency_seconds + latency)
            for s in speeds.sites
        ),
    )
    return MeasuredSpeeds(speeds=speeds, run=run)


def write(found: MeasuredSpeeds, plan: DeploymentPlan) -> Path:
    """Write a speeds file into the deployment's folder, which is made if need be.

    Returns:
        Its path.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    own_folder.make(plan.folder)
    path = plan.folder / SPEEDS
    about = "" if found.run is None else f", and run {found.run.path.name}"
    table = asdict(found.speeds)
    table["sites"] = list(table["sites"])
    durable_files.replace_file(
        path, [(_HEAD.format(about) + tomli_w.dumps(table)).encode()]
    )
    return path
