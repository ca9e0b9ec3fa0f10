"""The verb ``up``: start what a deployment lacks, and follow its run."""

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING

from deploy.cli import plan_verb
from deploy.cli.arguments import load_plan
from deploy.cli.run_verbs import follow, is_over
from deploy.cli.terminal import say, say_json, tell
from deploy.exit_codes import DONE, STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deploy.fleet.placement import Placement
    from deploy.fleet.sizes import Sizer
    from deploy.fleet.spec import DeploymentPlan
    from deploy.fleet.state import Deployment
    from deploy.fleet.supervisor import Keeper, RunWatch
    from federation.job.spec import JobSpec
    from monitoring.runs.run_folder import RunFolder


def _up(options: argparse.Namespace) -> int:
    return _up_here(options, *_checked(options))


def _up_here(
    options: argparse.Namespace, plan: "DeploymentPlan", job: "JobSpec"
) -> int:
    """Bring a deployment up from this process, and follow its run."""
    from deploy.fleet import spending  # noqa: PLC0415 -- --help
    from deploy.fleet.provision import bring_up  # noqa: PLC0415 -- --help

    hourly = spending.budget_prices(plan, now=options.clock.now())
    restore = partial(
        bring_up,
        job=job,
        tell=tell,
        accept=options.accept,
        older=options.older,
    )
    deployment, watch, run = _started(options, plan, job, restore)
    if run is None:
        return DONE
    options.aggregator = plan.aggregator / "aggregator.toml"
    plan_verb.keep_plan(options, plan, job, run)
    if options.detach:
        return _say_started(options, run)
    if options.keep:
        watch.keeper = _keeper(
            deployment, watch, run, job.rounds, restore=restore, hourly=hourly
        )
    code = _watched(options, run, watch)
    if watch.keeper is not None:
        if is_over(run):
            watch.keeper.end()
        else:
            tell("its machines are no longer kept: run the command again to keep them")
    return code


def _started(
    options: argparse.Namespace,
    plan: "DeploymentPlan",
    job: "JobSpec",
    restore: "Callable[[Deployment], RunFolder | None]",
) -> "tuple[Deployment, RunWatch, RunFolder | None]":
    """Start what a deployment lacks as soon as it may; who watches it, and its run."""
    from deploy.fleet import down, start_wait, state  # noqa: PLC0415 -- --help
    from deploy.fleet.loop import Patience  # noqa: PLC0415 -- --help
    from deploy.fleet.preflight import check_budget, check_start_budget  # noqa: PLC0415 -- --help
    from deploy.fleet.provision import check_older  # noqa: PLC0415 -- --help
    from deploy.fleet.supervisor import RunWatch  # noqa: PLC0415 -- --help

    patience = Patience(plan, options.clock, tell)
    if not plan.folder.exists():  # What is refused makes none.
        check_start_budget(plan, now=options.clock.now())
    start_allowed = partial(
        start_wait.allowed_start,
        plan,
        partial(state.pools_of, plan, options.clock),
        clock=options.clock,
        tell=tell,
    )
    opened = partial(state.opened, plan, random_bytes=os.urandom, clock=options.clock)
    with (
        patience.entered(start_allowed),
        patience.entered(opened) as deployment,
        down.naming_what_runs(deployment, tell),
    ):
        watch = RunWatch(deployment, tell)
        patience.repeated(partial(check_budget, deployment))
        check_older(deployment, job, options.older)
        deployment.note_wanted()
        return deployment, watch, patience.repeated(partial(restore, deployment))


def _keeper(
    deployment: "Deployment",
    watch: "RunWatch",
    run: "RunFolder",
    rounds: int,
    *,
    restore: "Callable[[Deployment], object]",
    hourly: "Mapping[str, float]",
) -> "Keeper":
    """Who keeps the machines of a deployment until its run has ended."""
    from deploy.aggregator_host import alert_delivery, run_queue  # noqa: PLC0415 -- --help
    from deploy.fleet.supervisor import Keeper  # noqa: PLC0415 -- --help

    plan = deployment.plan
    alerts = alert_delivery.AlertDelivery(
        places=alert_delivery.places(plan.file.alerts),
        path=plan.folder / "alerts.json",
        clock=deployment.clock,
        listener=tell,
    )
    return Keeper(
        deployment,
        restore,
        hourly=hourly,
        tell=tell,
        placement=_placement(deployment, run, rounds),
        sizer=_sizer(deployment, run, rounds),
        pause=partial(run_queue.ask_to_pause, run),
        starts=watch.starts,
        alerts=alerts,
    )


def _say_started(options: argparse.Namespace, run: "RunFolder") -> int:
    """Name the run that continues without this command."""
    if options.json:
        say_json({"run_id": run.path.name, "folder": str(run.path)})
    else:
        say(run.path.name)
    return DONE


def _watched(options: argparse.Namespace, run: "RunFolder", watch: "RunWatch") -> int:
    """Follow a run to its end, also through changes of its machines.

    A pause that a command asked for that was killed is ended by the next one.
    """
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    keeper = watch.keeper

    def is_pause() -> bool:
        return keeper is not None and run_queue.is_pause(run)

    try:
        code = follow(options, run, watch.look, is_pause)
        while keeper is not None and code == STOPPED and is_pause():
            keeper.resume()
            code = follow(options, run, watch.look, is_pause)
    finally:
        watch.read_logs()
    return code


def _checked(options: argparse.Namespace) -> "tuple[DeploymentPlan, JobSpec]":
    """Deployment and job, if nothing is wrong that can be known before the start."""
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        placement,
        spec,
    )
    from deploy.fleet.loop import Patience  # noqa: PLC0415 -- --help
    from deploy.fleet.placement import check_deadline  # noqa: PLC0415 -- --help
    from deploy.fleet.preflight import check_before  # noqa: PLC0415 -- --help
    from deploy.fleet.sizes import check_sizes  # noqa: PLC0415 -- --help
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    if options.keep and options.detach:
        raise JobError("keeps nothing without watching: remove one", key="--keep")
    plan = load_plan(options)
    job = spec.load_job(plan)
    check_before(plan, job)
    if options.keep:
        check_sizes(plan, options.clock)
    patience = Patience(plan, options.clock, tell)
    plan = patience.repeated(
        partial(placement.with_types, plan, clock=options.clock, tell=tell)
    )
    if options.keep:
        check_deadline(plan, now=options.clock.now(), tell=tell)
    return plan, job


def _placement(
    deployment: "Deployment", run: "RunFolder", rounds: int
) -> "Placement | None":
    """Who chooses between spot and on demand; None without a deadline."""
    from deploy.fleet import placement  # noqa: PLC0415 -- --help

    if deployment.plan.file.deadline_hours is None:
        return None
    progress = partial(placement.work_left, placement.SeenRun(run), rounds)
    return placement.Placement(deployment.plan, progress, tell)


def _sizer(deployment: "Deployment", run: "RunFolder", rounds: int) -> "Sizer | None":
    """Who changes sizes of machines; None if no site states any."""
    from deploy.fleet import prices, sizes  # noqa: PLC0415 -- --help
    from deploy.fleet.placement import SeenRun  # noqa: PLC0415 -- --help

    plan = deployment.plan
    if not sizes.is_elastic(plan):
        return None
    today = prices.day_of(deployment.clock.now())
    table = prices.load(plan.prices, today=today, warn=lambda _: None)
    return sizes.Sizer(plan, table, SeenRun(run), rounds, tell)


VERBS = {"up": _up}
