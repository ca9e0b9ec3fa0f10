"""The verb ``plan``: what a deployment's run will send, take and cost."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.exit_codes import DONE
from federation.errors import FederationError, JobError

if TYPE_CHECKING:
    from deploy.fleet.forecast import RunForecast
    from deploy.fleet.plan import Alternative, SizesOf
    from deploy.fleet.plan_prices import PriceTerms
    from deploy.fleet.spec import DeploymentFile, DeploymentPlan
    from federation.job.spec import JobSpec
    from federation.rounds.cost import Speeds
    from monitoring.runs.run_folder import RunFolder


class _Notices:
    """Tells a person each notice once, and keeps them for ``--json``."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        if text not in self.texts:
            tell(text)
            self.texts.append(text)


def _plan(options: argparse.Namespace) -> int:
    from deploy.cli import job_check  # noqa: PLC0415 -- imports torch
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        forecast,
        placement,
        plan as planning,
        plan_prices,
        preflight,
        spec,
    )

    wanted = spec.load(options.deployment)
    job = spec.load_job(wanted)
    preflight.check_sites(wanted, job)  # Or their prices would be ignored.
    notices = _Notices()
    wanted = placement.with_types(
        wanted, clock=options.clock, tell=notices, prices=options.prices
    )
    sizes_of = partial(job_check.sizes_of, clock=options.clock)
    known = _speeds(options, wanted, sizes_of)
    terms = plan_prices.PriceTerms(gigabytes_before=options.month_gb)
    found = forecast.forecast(
        wanted,
        job,
        sizes_of=sizes_of,
        speeds=known,
        clock=options.clock,
        warn=notices,
        prices=options.prices,
        terms=terms,
    )
    ways = _ways(wanted.file, found, known, sizes_of, terms)
    if options.plot:
        from monitoring.pages import plots  # noqa: PLC0415 -- imports matplotlib

        plots.write_plan(_points(ways), options.plot)
    _tell_notices(options, wanted, job, notices)
    for notice in planning.beyond_budget(wanted.file.max_dollars, ways[0]):
        notices(notice)
    for price in found.missing:
        notices(f"dollars are unknown: {price}")
    if options.json:
        say_json(_document(wanted, ways, found, notices))
    else:
        _show(wanted, ways, found)
    return DONE


def _ways(
    file: "DeploymentFile",
    found: "RunForecast",
    known: "Speeds | None",
    sizes_of: "SizesOf",
    terms: "PriceTerms",
) -> "Sequence[Alternative]":
    """The job as it is, and all that is compared with it."""
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        plan as planning,
        plan_prices,
    )

    ways = [*planning.alternatives(found.federation, found.speeds, sizes_of)]
    if found.prices is None:
        return ways
    if known is not None:
        ways += plan_prices.ways_to_rent(ways[0], known, file, found.prices, terms)
    return [plan_prices.with_bucket(way, found.prices) for way in ways]


def _tell_notices(
    options: argparse.Namespace,
    wanted: "DeploymentPlan",
    job: "JobSpec",
    notices: _Notices,
) -> None:
    """Report what a person should know before the deployment is brought up."""
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        preflight,
        sizes,
    )

    for notice in preflight.notices(job):
        notices(notice)
    try:
        preflight.check_work_allowed(wanted, job)
    except JobError as error:
        notices(f"crossfed up would be refused: {error}")
    try:
        sizes.check_sizes(wanted, options.clock)
    except JobError as error:
        notices(f"crossfed up --keep would be refused: {error}")


def _document(
    wanted: "DeploymentPlan",
    ways: "Sequence[Alternative]",
    found: "RunForecast",
    notices: _Notices,
) -> dict[str, Any]:
    """All that a plan tells a person, as data."""
    from deploy.fleet import plan as planning  # noqa: PLC0415

    return {
        "alternatives": [planning.document(way) for way in ways],
        "prices_of": _day_of_prices(wanted, found),
        "notices": notices.texts,
    }


def _day_of_prices(wanted: "DeploymentPlan", found: "RunForecast") -> str | None:
    """Day of the price table; None if no price of it counts."""
    if found.prices is None or not wanted.file.has_clouds:
        return None
    return found.prices.as_of


def _show(
    wanted: "DeploymentPlan", ways: "Sequence[Alternative]", found: "RunForecast"
) -> None:
    """Print the job's own prediction, and all ways side by side."""
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        plan as planning,
        plan_prices,
    )

    for line in planning.lines(wanted.file.name, ways, found.speeds):
        say(line)
    day = _day_of_prices(wanted, found)
    if found.prices is not None and day is not None:
        hours = plan_prices.gpu_hours(ways[0], wanted.file, found.prices)
        say(f"GPU-hours: {hours:,.2f}; prices of {day}")
    for line in _kept(ways[0], found):
        say(line)
    names, rows = planning.table(ways)
    say_table(names, rows)


def _kept(own: "Alternative", found: "RunForecast") -> "Iterator[str]":
    """Say what the run leaves in a bucket."""
    from deploy.fleet import plan_prices  # noqa: PLC0415 -- imports torch
    from monitoring.units import format_bytes  # noqa: PLC0415

    prices = found.prices
    kept = None if prices is None else plan_prices.storage(own, prices, found.speeds)
    if kept is not None:
        month = kept.get("dollars_per_month")
        price = "an unknown price" if month is None else f"{month:,.4f} dollars"
        size = format_bytes(kept["bytes"])
        yield f"in the bucket afterwards: at least {size}, {price} a month"
        if "access_seconds" in kept:
            yield (
                f"read in {kept['access_seconds']:,.2f} s over the fastest line: "
                f"S = D x C / T = {kept['dollars_per_month_and_second']:,.4f} dollars "
                "a month for each second"
            )


def _points(ways: "Sequence[Alternative]") -> "Mapping[str, tuple[float, float]]":
    """Seconds and dollars of each way whose dollars are known.

    Raises:
        JobError: Nothing is known of them.
    """
    timed = [way.cost for way in ways if way.cost is not None]
    if not timed:
        raise JobError("time and cost need speeds: see --like", key="--plot")
    found = {
        way.name: (way.cost.seconds, way.cost.total)
        for way in ways
        if way.cost is not None and way.cost.is_known
    }
    if not found:
        raise JobError("has no dollars to draw: a price is missing", key="--plot")
    return found


def _speeds(
    options: argparse.Namespace,
    wanted: "DeploymentPlan",
    sizes_of: "SizesOf",
) -> "Speeds | None":
    """Speeds that are stated, or that an earlier run has shown; None if none are."""
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- --help
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        forecast,
    )
    from monitoring.runs.find import find_run  # noqa: PLC0415

    if options.speeds and options.like:
        raise JobError("give one of --speeds and --like", key="--speeds")
    if options.speeds:
        return forecast.load_speeds(options.speeds)
    if options.like is None:
        kept = wanted.folder / forecast.SPEEDS
        return forecast.load_speeds(kept) if kept.exists() else None
    run = find_run(options.like, wanted.folder / "aggregator" / "runs")
    own = run.read_spec()  # It may have had other steps.
    traffic = sizes_of(forecast.federation_of(wanted, own))
    if traffic is None:
        return None
    handed = run_queue.read(run)
    submitted = None if handed is None else handed.request.at
    speeds = forecast.measured_speeds(run.view(), traffic, submitted=submitted)
    path = forecast.write_speeds(speeds, run, wanted.folder)
    tell(f"speeds are in {path}: crossfed plan and crossfed up use them")
    return speeds


def keep_plan(
    options: argparse.Namespace,
    wanted: "DeploymentPlan",
    job: "JobSpec",
    run: "RunFolder",
) -> None:
    """Keep the prediction of a run beside it, for its report."""
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- --help
    from deploy.cli import job_check  # noqa: PLC0415 -- imports torch
    from deploy.fleet import forecast  # noqa: PLC0415 -- imports torch
    from monitoring.views import run_plan  # noqa: PLC0415

    handed = run_queue.read(run)
    if handed is None or handed.outcome or (run.path / run_plan.NAME).exists():
        return
    path = options.speeds or wanted.folder / forecast.SPEEDS
    try:
        speeds = None
        if options.speeds or path.exists():
            speeds = forecast.load_speeds(path)
        found = forecast.forecast(
            wanted,
            job,
            sizes_of=partial(job_check.sizes_of, clock=options.clock),
            speeds=speeds,
            clock=options.clock,
            warn=tell,
        )
        if found.missing:
            tell(f"the report will show no dollars: {'; '.join(found.missing)}")
        plan = forecast.run_plan(found, submitted=handed.request.at)
        if plan is not None:
            run_plan.write(plan, run.path)
    except FederationError as error:
        tell(f"the report will show no prediction: {error}")


VERBS = {"plan": _plan}
