"""Speeds for the model of ``federation.rounds.cost``: measured in a run, or here.

``crossfed plan --probe`` rehearses the job in this process, for a few rounds and a few
steps, which shows how fast sites train and evaluate, and how long encoding, masking and
combining take. The newest run of the deployment shows what a rehearsal cannot: how long
its programs take to start, and its messages to travel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from deploy.aggregator_host import run_queue
from deploy.fleet.forecast import SPEEDS, federation_of
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.plan import SizesOf, changed
from deploy.fleet.spec import DeploymentPlan
from deploy.wiring.simulation import simulate
from federation import durable_files
from federation.errors import FederationError, JobError
from federation.events import Event, SiteAnswered
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import SecureStep
from federation.rounds import cost
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.local_work import in_round, is_auto
from federation.rounds.traffic import Traffic, examples_trained
from monitoring.runs.find import find_runs
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_fold import fold
from monitoring.views.run_plan import round_length
from monitoring.views.run_view import RunView
from privacy import own_folder

# Of a line, whose time is part of the rest of a run.
_NO_LIMIT = 1e15

# Of a rehearsal. Rates follow from the later rounds.
ROUNDS, STEPS = 4, 20
_HEAD = (
    "# Written by crossfed plan --probe: a rehearsal in one process of one machine{}.\n"
    "# Add the prices of sites and lines, or leave them to the price table.\n"
)


def measured_speeds(
    view: RunView,
    traffic: Traffic,
    *,
    submitted: float | None = None,
    sites: Sequence[SiteSpeed] | None = None,
) -> Speeds:
    """Take the speeds of sites from a run.

    A site's rates are those of the rounds after the first. All else that these took,
    lines included, becomes ``combine_seconds``; what the first took longer becomes
    ``first_round_seconds``. With secure aggregation or differential privacy sites
    report no phases: then a site's whole answer counts as training.

    Args:
        view: The run.
        traffic: What the run's own job sends.
        submitted: When it was submitted, in seconds since 1970; None if nobody knows,
            and then nothing is known of its set-up.
        sites: Their rates, if another run has shown them better.

    Raises:
        JobError: The run has no round after the first, or has other sites.
    """
    rounds = [each for each in view.rounds if each.finished is not None]
    steps = {each.index: each.work.num_steps for each in rounds if each.work}
    later = [each for each in rounds if each.index > 1]
    answers: dict[str, list[tuple[int, SiteAnswered]]] = {}
    for each in later:
        for found in each.reports:
            if isinstance(found, SiteAnswered):
                answers.setdefault(found.site, []).append((each.index, found))
    names = [site.name for site in traffic.job.sites]
    if not set(names) <= answers.keys():
        raise JobError(
            "tells no speeds: it needs two rounds or more, with an answer of every "
            "site of the job",
            key="--like",
        )
    if sites is None:
        sites = [_speed_of(name, answers[name], traffic, steps) for name in names]
    speeds = Speeds(sites=tuple(sites))
    explained = [
        cost.round_seconds(
            _of_steps(traffic, steps.get(each.index)), each.index, speeds
        )
        for each in later
    ]
    more = fmean(map(round_length, later)) - fmean(explained)
    speeds = replace(speeds, combine_seconds=max(0.0, more))
    if rounds[0].index == 1:
        more = round_length(rounds[0]) - cost.round_seconds(traffic, 1, speeds)
        speeds = replace(speeds, first_round_seconds=max(0.0, more))
    if submitted is not None:
        setup = max(0.0, view.first_started_at - submitted)
        speeds = replace(speeds, setup_seconds=setup)
    return speeds


def message_seconds(view: RunView) -> float:
    """Mean seconds that an exchange took beside its work; 0 if not known.

    With secure aggregation, those of the exchanges that set it up, which do no work.
    """
    found = [
        answer.answered_seconds
        - answer.asked_seconds
        - sum(phase.seconds for phase in answer.phases)
        for row in view.rounds
        if row.index > 1
        for answer in row.reports
        if isinstance(answer, SiteAnswered) and answer.phases
    ]
    steps = {step.value for step in SecureStep}
    found += [
        phase.seconds
        for row in view.rounds
        if row.finished is not None
        for phase in row.finished.phases
        if phase.name in steps
    ]
    return max(0.0, fmean(found)) if found else 0.0


def _of_steps(traffic: Traffic, steps: int | None) -> Traffic:
    """The traffic of a run whose rounds take so many steps; None for the job's."""
    if steps is None:
        return traffic
    training = replace(traffic.job.training, local_steps=steps)
    return replace(traffic, job=replace(traffic.job, training=training))


def _speed_of(
    name: str,
    answers: Sequence[tuple[int, SiteAnswered]],
    traffic: Traffic,
    steps: Mapping[int, int],
) -> SiteSpeed:
    facts = traffic.facts[SiteId(name)]
    bare = SiteSpeed(
        name=name,
        train_examples_per_second=_NO_LIMIT,
        evaluate_examples_per_second=_NO_LIMIT,
        down_bytes_per_second=_NO_LIMIT,
        up_bytes_per_second=_NO_LIMIT,
    )
    works = [(index, _work(answer)) for index, answer in answers]
    train = fmean(work["train"] for _, work in works)
    evaluations = [
        work["evaluate"] / times
        for index, work in works
        if (times := traffic.evaluations(index))
    ]
    evaluate = fmean(evaluations) if evaluations else 0.0
    examples = fmean(
        examples_trained(
            in_round(_of_steps(traffic, steps.get(index)).job, index).training, facts
        )
        for index, _ in answers
    )
    return replace(
        bare,
        train_examples_per_second=max(examples, 1) / max(train, 1e-9),
        evaluate_examples_per_second=max(facts.held_out, 1) / max(evaluate, 1e-9),
    )


def _work(answer: SiteAnswered) -> Mapping[str, float]:
    """Seconds of training and of evaluation."""
    found = {"train": 0.0, "evaluate": 0.0}
    for phase in answer.phases:
        if phase.name in found:
            found[phase.name] += phase.seconds
    if not answer.phases:
        found["train"] = answer.answered_seconds - answer.asked_seconds
    return found


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


def write_speeds(found: MeasuredSpeeds, plan: DeploymentPlan) -> Path:
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
