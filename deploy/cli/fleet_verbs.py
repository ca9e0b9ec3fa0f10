"""Verbs of deployments that are there: ``nodes`` and ``down``."""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloud_adapters.compute.pool import Node, NodeState
from deploy.cli.arguments import load_plan
from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.exit_codes import DONE, FAILED
from federation.errors import ComputeError
from monitoring.units import format_count

if TYPE_CHECKING:
    from deploy.fleet.leftovers import Leftover
    from deploy.fleet.prices import Prices
    from deploy.fleet.spec import DeploymentPlan
    from federation.job.spec import JobSpec
    from federation.protocols import Clock

_HOUR = 3600.0
_MIB = 1 << 20


def _down(options: argparse.Namespace) -> int:
    from deploy.fleet import (  # noqa: PLC0415 -- --help
        down,
        leftovers,
        start_wait,
        state,
    )

    plan = load_plan(options)
    is_purged = _confirmed(options, plan)
    job = _job_if_any(plan)
    table = _prices_to_show(plan, options.clock)
    deleted = 0
    start_wait.forget_wait(plan)
    with state.opened(
        plan,
        random_bytes=os.urandom,
        clock=options.clock,
        any_owner=options.any_owner,
        make=False,
    ) as deployment:
        deployment.note_ended()
        ended = down.take_down(deployment, any_owner=options.any_owner, tell=tell)
        if is_purged:
            deleted, kept = leftovers.purge(deployment, job)
            for place in kept:
                tell(f"{place}: kept, because privacy ledgers need it")
        left = leftovers.leftovers(deployment, job, table)
    if options.json:
        found: dict[str, Any] = {"ended": ended, "left": [*map(_left, left)]}
        say_json(found | ({"deleted_bytes": deleted} if is_purged else {}))
        return DONE
    nodes = format_count(ended, "node")
    say(f"{nodes} ended; deployment {plan.file.name} has no running node")
    if is_purged:
        say(f"{deleted / _MIB:.1f} MiB of runs and results deleted")
    if left:
        say(f"what remains, at prices of {table.as_of}:")
        names = ("what", "MiB", "dollars a month", "where")
        say_table(names, ([str(cell) for cell in _left_cells(e)] for e in left))
    return DONE


def _prices_to_show(plan: "DeploymentPlan", clock: "Clock") -> "Prices":
    """The deployment's price table; that of the release if it has a fault.

    Machines cost money while someone looks for a misspelt price.
    """
    from deploy.fleet import prices  # noqa: PLC0415 -- keeps `--help` fast
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    today = prices.day_of(clock.now())
    try:
        return prices.load(plan.prices, today=today, warn=lambda _: None)
    except JobError as error:
        tell(f"{error}; what remains is shown at the prices of this release")
        return prices.load(None, today=today, warn=lambda _: None)


def _confirmed(options: argparse.Namespace, plan: "DeploymentPlan") -> bool:
    """Whether runs are to be deleted, as a person has confirmed by the name.

    Raises:
        JobError: They have given another name, or there is no one to ask.
    """
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    name, given = plan.file.name, options.yes_purge
    if not (options.purge or given):
        return False
    if not given:
        if not sys.stdin.isatty():
            raise JobError(
                f"asks on a terminal; in a script, give --yes-purge {name}",
                key="--purge",
            )
        tell(f"all runs and results of {name} in {plan.folder} will be deleted")
        tell("type the deployment's name to confirm:")
        given = sys.stdin.readline().strip()
    if given != name:
        raise JobError(
            f"{given!r} is not the name of this deployment, {name!r}: nothing was "
            "ended or deleted",
            key="--yes-purge" if options.yes_purge else "--purge",
        )
    return True


def _job_if_any(plan: "DeploymentPlan") -> "JobSpec | None":
    """The job, which may name buckets; what runs is ended without it, too."""
    from deploy.fleet import spec  # noqa: PLC0415 -- keeps `--help` fast
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    try:
        return spec.load_job(plan)
    except JobError as error:
        tell(f"{error}: buckets and keys that the job names are not looked at")
        return None


def _left(each: "Leftover") -> dict[str, Any]:
    return {
        "what": each.what,
        "place": each.place,
        "bytes": each.num_bytes,
        "dollars_per_month": each.dollars,
        "trouble": each.trouble,
    }


def _left_cells(each: "Leftover") -> "Iterator[str]":
    yield each.what
    if each.trouble:
        yield from ("unknown", "unknown", f"{each.place}: {each.trouble}")
        return
    yield "-" if each.num_bytes is None else f"{each.num_bytes / _MIB:.1f}"
    yield "unknown" if each.dollars is None else f"{each.dollars:,.2f}"
    yield each.place


def _nodes(options: argparse.Namespace) -> int:
    """List nodes, without the folder's lock: a person may look at any time.

    A service that fails is reported, and hides no node of the others.
    """
    from deploy.fleet import state  # noqa: PLC0415 -- --help
    from deploy.fleet.reconcile import DEPLOYMENT  # noqa: PLC0415 -- --help

    plan = load_plan(options)
    now, code = options.clock.now(), DONE
    rows: list[dict[str, Any]] = []
    for provider, pool in state.pools_of(plan, options.clock).items():
        try:
            found = pool.nodes({DEPLOYMENT: plan.file.name})
        except ComputeError as error:
            tell(f"{provider}: {error}")
            code, found = FAILED, ()
        rows += [
            {
                "node": node.name,
                "provider": provider,
                "state": _state(node),
                "hours": node.seconds(now) / _HOUR,
                "trouble": node.trouble,
                "id": node.id,
            }
            for node in found
            if options.all or node.state is not NodeState.GONE
        ]
    if options.json:
        say_json(rows)
        return code
    names = ("node", "provider", "state", "hours", "trouble", "id")
    say_table(names, ([_cell(row[name]) for name in names] for row in rows))
    return code


def _state(node: Node) -> str:
    """What a node does: one that runs is starting until its program is ready."""
    is_starting = node.state is NodeState.RUNNING and node.ready is False
    return NodeState.STARTING if is_starting else node.state.value


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


VERBS = {"down": _down, "nodes": _nodes}
