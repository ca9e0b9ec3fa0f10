"""Verbs of whole deployments: ``plan``, ``up``, ``nodes`` and ``down``."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cloud_adapters.compute.pool import NodeState, all_gone
from deploy.cli.run_verbs import follow
from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.exit_codes import DONE
from federation.errors import ComputeError

if TYPE_CHECKING:
    from cloud_adapters.compute.pool import Node
    from deploy.fleet.deployment import Deployment
    from deploy.fleet.deployment_file import DeploymentPlan
    from federation.rounds.cost import Speeds
    from federation.rounds.traffic import Traffic

NODES_LOOK_SECONDS = 2.0
_HOUR = 3600.0
_MIB = 1 << 20


@contextmanager
def _opened(options: argparse.Namespace) -> "Iterator[Deployment]":
    from deploy.fleet import deployment, deployment_file  # noqa: PLC0415 -- --help

    plan = deployment_file.load(options.deployment)
    with deployment.opened(
        plan,
        random_bytes=os.urandom,
        clock=options.clock,
        any_owner=getattr(options, "any_owner", False),
    ) as opened:
        yield opened


def _up(options: argparse.Namespace) -> int:
    from deploy.fleet import deployment_file  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.fleet.bring_up import bring_up  # noqa: PLC0415 -- keeps `--help` fast

    with _opened(options) as deployment:
        job = deployment_file.load_job(deployment.plan)
        run = bring_up(deployment, job, random_bytes=os.urandom, tell=tell)
        options.aggregator = deployment.aggregator / "aggregator.toml"
    if run is None:
        return DONE
    if options.detach:
        if options.json:
            say_json({"run_id": run.path.name, "folder": str(run.path)})
        else:
            say(run.path.name)
        return DONE
    return follow(options, run, _Watch(deployment).look)


class _Watch:
    """Reports what keeps nodes from working, each once, while a run is shown."""

    def __init__(self, deployment: "Deployment") -> None:
        self._deployment = deployment
        self._told: set[tuple[str, str]] = set()
        self._next_look = 0.0

    def look(self) -> None:
        """Report what is new, if the last look is some time ago.

        Raises:
            ComputeError: The aggregator's machine has ended: nothing more will happen.
        """
        from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE  # noqa: PLC0415

        deployment = self._deployment
        now = deployment.clock.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + NODES_LOOK_SECONDS
        nodes = [
            node
            for pool in deployment.pools.values()
            for node in pool.nodes({DEPLOYMENT: deployment.name})
        ]
        for node in nodes:
            new = (node.id, node.trouble)
            if node.trouble and node.state is not NodeState.GONE:
                if new not in self._told:
                    tell(f"{node.name}: {node.trouble}")
                self._told.add(new)
        ours = [node for node in nodes if node.labels.get(ROLE) == AGGREGATOR]
        if all_gone(ours):
            why = f" ({ours[-1].trouble})" if ours and ours[-1].trouble else ""
            raise ComputeError(
                f"the aggregator's machine has ended{why}: give crossfed up again, "
                "which resumes the run"
            )


def _down(options: argparse.Namespace) -> int:
    from deploy.fleet import take_down  # noqa: PLC0415 -- keeps `--help` fast

    with _opened(options) as deployment:
        ended = take_down.take_down(deployment, any_owner=options.any_owner, tell=tell)
        left = take_down.remains(deployment)
    if options.json:
        rows = [
            {"what": each.what, "place": each.place, "bytes": each.num_bytes}
            for each in left
        ]
        say_json({"ended": ended, "left": rows})
        return DONE
    say(f"{ended} nodes ended; nothing of deployment {deployment.name} runs")
    if left:
        say("what stays:")
        names = ("what", "MiB", "where")
        say_table(names, ((e.what, f"{e.num_bytes / _MIB:.1f}", e.place) for e in left))
    return DONE


def _found(options: argparse.Namespace) -> "Iterator[tuple[str, Node]]":
    """Nodes of a deployment, with their providers.

    Without the folder's lock: a person may look while another command works.
    """
    from deploy.fleet import deployment as fleet, deployment_file  # noqa: PLC0415
    from deploy.fleet.reconcile import DEPLOYMENT  # noqa: PLC0415

    plan = deployment_file.load(options.deployment)
    for provider, pool in fleet.pools_of(plan, options.clock).items():
        for node in pool.nodes({DEPLOYMENT: plan.file.name}):
            yield provider, node


def _nodes(options: argparse.Namespace) -> int:
    now = options.clock.now()
    rows = [
        {
            "node": node.name,
            "provider": provider,
            "state": node.state.value,
            "hours": node.seconds(now) / _HOUR,
            "trouble": node.trouble,
            "id": node.id,
        }
        for provider, node in _found(options)
    ]
    if options.json:
        say_json(rows)
        return DONE
    names = ("node", "provider", "state", "hours", "trouble", "id")
    say_table(names, ([_cell(row[name]) for name in names] for row in rows))
    return DONE


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _plan(options: argparse.Namespace) -> int:
    from clients.user_code import unable_to_exit  # noqa: PLC0415 -- imports torch
    from deploy.cli import job_check  # noqa: PLC0415 -- imports torch
    from deploy.fleet import deployment_file, plan as planning, prices  # noqa: PLC0415
    from deploy.wiring import parts as wiring  # noqa: PLC0415 -- imports torch

    wanted = deployment_file.load(options.deployment)
    job = deployment_file.load_job(wanted)
    with unable_to_exit(), wiring.torch_threads(job):
        federation = wiring.build_federation(job)
        sizes_of = partial(job_check.sizes_of, clock=options.clock)
        known = _speeds(options, wanted, sizes_of(federation))
        speeds = None
        if known is not None:
            today = prices.day_of(options.clock.now())
            table = prices.load(options.prices, today=today, warn=tell)
            speeds = planning.with_prices(known, wanted.file, table)
        found = [*planning.alternatives(federation, speeds, sizes_of)]
        if known is not None:
            found += planning.markets(found[0], known, wanted.file, table)
    if options.json:
        say_json([planning.document(one) for one in found])
        return DONE
    for line in planning.lines(wanted.file.name, found, speeds):
        say(line)
    names, rows = planning.table(found)
    say_table(names, rows)
    return DONE


def _speeds(
    options: argparse.Namespace, wanted: "DeploymentPlan", traffic: "Traffic | None"
) -> "Speeds | None":
    """Speeds that are stated, or those of an earlier run; None if neither is given."""
    from deploy.fleet import plan as planning  # noqa: PLC0415 -- imports torch
    from federation.errors import JobError  # noqa: PLC0415
    from federation.job import job_file  # noqa: PLC0415 -- keeps `--help` fast
    from federation.rounds.cost import Speeds  # noqa: PLC0415 -- imports numpy
    from monitoring.runs.find import find_run  # noqa: PLC0415

    if options.speeds and options.like:
        raise JobError("speeds come from a file or from a run, not both", key="--like")
    if options.speeds:
        return job_file.load_table(options.speeds, Speeds, lambda _: None)
    if options.like is None or traffic is None:
        return None
    run = find_run(options.like, wanted.folder / "aggregator" / "runs")
    return planning.measured_speeds(run.view(), traffic)


VERBS = {"plan": _plan, "up": _up, "down": _down, "nodes": _nodes}
