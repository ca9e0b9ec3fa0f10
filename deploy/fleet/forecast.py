"""The prediction of a deployment's run: its own sites' data, machines and prices.

``crossfed plan`` shows it, and ``crossfed up`` keeps it beside the run, so that the
report compares it with what happened. Its speeds are stated, or those of a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import tomli_w

from clients.training.local_federation import Federation
from clients.user_code import unable_to_exit
from deploy.fleet import prices as price_table
from deploy.fleet.plan import SizesOf
from deploy.fleet.plan_prices import NO_TERMS, PriceTerms, with_prices
from deploy.fleet.prices import Prices
from deploy.fleet.spec import DeploymentPlan
from deploy.wiring import parts as wiring
from federation import durable_files
from federation.errors import JobError
from federation.events import SiteAnswered
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec, SiteDataSpec
from federation.protocols import Clock
from federation.rounds import cost
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.local_work import in_round, is_by_capacity, moves_data
from federation.rounds.traffic import SiteFacts, Traffic, examples_trained
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_plan import LinkBytes, RunPlan
from monitoring.views.run_view import RunView
from privacy import own_folder

SPEEDS = "speeds.toml"
"""File in a deployment's folder that ``crossfed plan --like`` writes."""

# Of a line, whose time is part of the rest of a run.
_NO_LIMIT = 1e15

_HEAD = (
    "# Written by crossfed plan --like: the speeds of run {}.\n"
    "# Add the prices of sites and lines, or leave them to the price table.\n"
)


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What is known of a deployment's run before it begins.

    Attributes:
        federation: The job, its model and its data.
        traffic: What it sends; None if that cannot be predicted.
        speeds: With prices; None if none were stated or measured.
        prices: The price table, if it was needed.
        missing: A word about each price that nobody has stated, and the table lacks.
    """

    federation: Federation
    traffic: Traffic | None
    speeds: Speeds | None
    prices: Prices | None
    missing: tuple[str, ...] = ()


def federation_of(plan: DeploymentPlan, job: JobSpec) -> Federation:
    """Build a job with the data that the deployment file names for its sites.

    Raises:
        FederationError: Model or data cannot be loaded here.
    """
    own = {site.name: site.data for site in plan.file.sites if site.data.source}
    sites = tuple(
        replace(
            site,
            data=SiteDataSpec(
                source=own[site.name].source, options=own[site.name].options
            ),
        )
        if site.name in own
        else site
        for site in job.sites
    )
    with unable_to_exit():
        return wiring.build_federation(replace(job, sites=sites))


def load_speeds(path: Path) -> Speeds:
    """Read a speeds file.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or out of bounds.
    """
    return job_file.load_table(path, Speeds, lambda _: None)


def forecast(
    plan: DeploymentPlan,
    job: JobSpec,
    *,
    sizes_of: SizesOf,
    speeds: Speeds | None,
    clock: Clock,
    warn: Callable[[str], None],
    prices: Path | None = None,
    terms: PriceTerms = NO_TERMS,
) -> RunForecast:
    """Predict a deployment's run.

    Args:
        plan: The deployment.
        job: Its messages and steps are predicted.
        sizes_of: Sizes the messages of a job.
        speeds: Stated or measured; None for bytes only.
        clock: To tell how old prices are.
        warn: Called with a word about prices that are old.
        prices: The price table; None for that of the deployment.
        terms: What prices depend on.

    Raises:
        FederationError: Model or data cannot be loaded here.
    """
    federation, missing = federation_of(plan, job), list[str]()
    with wiring.torch_threads(job):
        traffic = sizes_of(federation)
    table = None
    if speeds is not None and traffic is not None:
        today = price_table.day_of(clock.now())
        table = price_table.load(
            prices or plan.prices,
            today=today,
            warn=warn if plan.file.has_clouds else lambda _: None,
            clouds={site.provider for site in plan.file.sites},
        )
        speeds = with_prices(
            speeds,
            plan.file,
            table,
            traffic=traffic,
            terms=terms,
            missing=missing,
        )
    return RunForecast(
        federation=federation,
        traffic=traffic,
        speeds=speeds,
        prices=table,
        missing=tuple(missing),
    )


def run_plan(found: RunForecast, *, submitted: float) -> RunPlan | None:
    """The prediction as it is kept beside a run; None if there is none.

    Args:
        found: The prediction.
        submitted: When the job was submitted, in seconds since 1970.
    """
    if found.traffic is None:
        return None
    traffic, speeds = found.traffic, found.speeds
    most = cost.bytes_of_sites(traffic, high=True)
    fewest = cost.bytes_of_sites(traffic, high=False)
    links = tuple(
        LinkBytes(site=name, down=(low[0], high[0]), up=(low[1], high[1]))
        for name, high in most.items()
        for low in (fewest[name],)
    )
    plan = RunPlan(submitted_at=submitted, links=links, speeds=None)
    if speeds is None:
        return plan
    known = cost.of_run(traffic, speeds)
    return replace(
        plan,
        speeds=None if found.missing else speeds,
        seconds=tuple(known.phases.items()),
        dollars=() if found.missing else tuple(known.dollars.items()),
        prices_of="" if found.prices is None else found.prices.as_of,
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
    given = {
        (each.index, site): num_steps
        for each in rounds
        if each.finished
        for site, num_steps in zip(
            each.finished.asked, each.finished.steps, strict=False
        )
    }
    answers: dict[str, list[tuple[int, SiteAnswered]]] = {}
    for each in later:
        for found in each.reports:
            if isinstance(found, SiteAnswered):
                # With secure aggregation sites do not say how many they took.
                num_steps = given.get((each.index - found.staleness, found.site))
                told = replace(found, num_steps=found.num_steps or num_steps)
                answers.setdefault(found.site, []).append((each.index, told))
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
    more = fmean(row.length for row in later) - fmean(explained)
    speeds = replace(speeds, combine_seconds=max(0.0, more))
    if rounds[0].index == 1:
        more = rounds[0].length - cost.round_seconds(traffic, 1, speeds)
        speeds = replace(speeds, first_round_seconds=max(0.0, more))
    if submitted is not None:
        setup = max(0.0, view.first_started_at - submitted)
        speeds = replace(speeds, setup_seconds=setup)
    return speeds


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
        _examples(
            in_round(_of_steps(traffic, steps.get(index)).job, index), facts, answer
        )
        for index, answer in answers
    )
    return replace(
        bare,
        train_examples_per_second=max(examples, 1) / max(train, 1e-9),
        evaluate_examples_per_second=max(facts.held_out, 1) / max(evaluate, 1e-9),
    )


def _examples(job: JobSpec, facts: SiteFacts, answer: SiteAnswered) -> int:
    """Examples that an answer's training has gone through."""
    training, steps = job.training, answer.num_steps
    if steps and (is_by_capacity(job) or moves_data(job)):
        return steps * training.batch_size * training.accumulate
    return examples_trained(training, facts)


def _work(answer: SiteAnswered) -> Mapping[str, float]:
    """Seconds of training and of evaluation."""
    found = {"train": 0.0, "evaluate": 0.0}
    for phase in answer.phases:
        if phase.name in found:
            found[phase.name] += phase.seconds
    if not answer.phases:
        found["train"] = answer.answered_seconds - answer.asked_seconds
    return found


def write_speeds(speeds: Speeds, run: RunFolder, folder: Path) -> Path:
    """Write the speeds of a run into a deployment's folder, which is made if need be.

    Returns:
        Path of the file.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    own_folder.make(folder)
    path = folder / SPEEDS
    table = asdict(speeds)
    table["sites"] = list(table["sites"])
    text = _HEAD.format(run.path.name) + tomli_w.dumps(table)
    durable_files.replace_file(path, [text.encode()])
    return path
