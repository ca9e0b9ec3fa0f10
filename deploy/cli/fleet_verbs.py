"""Verbs of whole deployments: ``up``, ``nodes`` and ``down``."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cloud_adapters.compute.machine_types import SpotMarket
from cloud_adapters.compute.pool import Node, NodeState, all_gone
from deploy.cli import plan_verb
from deploy.cli.run_verbs import follow, is_over
from deploy.cli.terminal import say, say_json, say_table, show, tell
from deploy.exit_codes import DONE, FAILED, STOPPED
from federation.errors import ComputeError

if TYPE_CHECKING:
    from deploy.fleet.deployment import Deployment
    from deploy.fleet.deployment_file import DeploymentPlan
    from deploy.fleet.keeping.keep import Keeper
    from deploy.fleet.keeping.moves import Mover
    from deploy.fleet.keeping.sizes import Sizer
    from deploy.fleet.keeping.spot_record import SpotRecord
    from deploy.fleet.remains import Remains
    from deploy.fleet.starting.starts import Starts
    from federation.job.spec import JobSpec
    from federation.protocols import Clock
    from monitoring.runs.run_folder import RunFolder

NODES_LOOK_SECONDS = 2.0
_HOUR = 3600.0
_MIB = 1 << 20


def _up(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- as above
    from deploy.fleet import (  # noqa: PLC0415 -- keeps `--help` fast
        deployment as fleet,
        spending,
        start_wait,
        take_down,
    )
    from deploy.fleet.bring_up import bring_up  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.fleet.choosing import decision_log  # noqa: PLC0415 -- --help
    from deploy.fleet.keeping import zone_prices  # noqa: PLC0415 -- --help
    from deploy.fleet.keeping.keep import Keeper  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.fleet.start_checks import check_budget  # noqa: PLC0415 -- --help

    plan, job = _checked(options)
    if plan.has_head:
        return _up_in_cluster(options, plan)
    hourly = spending.budget_prices(plan, now=options.clock.now())
    start_allowed = start_wait.allowed_start(
        plan,
        partial(fleet.pools_of, plan, options.clock),
        clock=options.clock,
        tell=tell,
    )
    with (
        start_allowed as decisions,
        fleet.opened(plan, random_bytes=os.urandom, clock=options.clock) as deployment,
        take_down.naming_what_runs(deployment, tell),
    ):
        decision_log.append(plan.folder, *decisions)
        watch = _Watch(deployment)
        check_budget(deployment)
        deployment.note_wanted()
        start = partial(
            bring_up,
            job=job,
            random_bytes=os.urandom,
            tell=tell,
            accept=options.accept,
        )
        run = start(deployment)
        options.aggregator = deployment.aggregator / "aggregator.toml"
    if run is None:
        return DONE
    if deployment.boxed is None:  # Else, its container alone writes there.
        plan_verb.keep_plan(options, plan, job, run)
    if options.detach:
        return _say_started(options, run)
    if options.keep:
        record = _spot_record(deployment)
        watch.keeper = Keeper(
            deployment,
            start,
            hourly=hourly,
            random_bytes=os.urandom,
            tell=tell,
            mover=_mover(deployment, run, job.rounds, record),
            sizer=_sizer(deployment, run, job.rounds),
            pause=partial(run_queue.ask_to_pause, run),
            starts=watch.starts,
            paid=partial(zone_prices.paid_prices, plan, record),
        )
    code = _watched(options, run, watch)
    if watch.keeper is not None:
        if is_over(run):
            watch.keeper.end()
        else:
            tell("its machines are no longer kept: give the command again to keep them")
    return code


def _up_in_cluster(options: argparse.Namespace, plan: "DeploymentPlan") -> int:
    """Have a pod do what this command does on a host, and show what it writes."""
    from deploy.fleet import deployment as fleet, take_down  # noqa: PLC0415 -- --help
    from deploy.fleet.in_cluster import start  # noqa: PLC0415 -- --help

    with (
        fleet.opened(plan, random_bytes=os.urandom, clock=options.clock) as deployment,
        take_down.naming_what_runs(deployment, tell),
    ):
        deployment.note_wanted()
        head = start.up(deployment, accept=options.accept, tell=tell)
    if options.detach:
        if options.json:
            say_json({"node": head.id})
        else:
            say(head.id)
        return DONE
    tell(f"what {head.id} writes follows; it continues if this command ends")
    code = start.follow(deployment, head, tell, show)
    if options.json:
        say_json({"node": head.id, "exit_code": code})
    return code


def _say_started(options: argparse.Namespace, run: "RunFolder") -> int:
    """Name the run that continues without this command."""
    if options.json:
        say_json({"run_id": run.path.name, "folder": str(run.path)})
    else:
        say(run.path.name)
    return DONE


def _watched(options: argparse.Namespace, run: "RunFolder", watch: "_Watch") -> int:
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


def _plan(options: argparse.Namespace) -> "DeploymentPlan":
    """What the deployment file says, or its rehearsal on this host."""
    from deploy.cli import rehearsal  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.fleet import deployment_file  # noqa: PLC0415 -- keeps `--help` fast
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    for key, given, needs, is_there in (
        ("--containers", options.containers, "--provider local", options.provider),
        ("--images", options.images, "--containers", options.containers),
    ):
        if given and not is_there:
            raise JobError(f"needs {needs}", key=key)
    plan = deployment_file.load(options.deployment)
    if not options.provider:
        return plan
    images = options.images or f"localhost/crossfed:{version('crossfed')}-cpu"
    return rehearsal.on_this_host(plan, images=images if options.containers else "")


def _checked(options: argparse.Namespace) -> "tuple[DeploymentPlan, JobSpec]":
    """Deployment and job, if nothing is wrong that can be known before the start."""
    from deploy.fleet import deployment_file, offers  # noqa: PLC0415 -- --help
    from deploy.fleet.keeping.sizes import check_sizes  # noqa: PLC0415 -- --help
    from deploy.fleet.start_checks import check_before  # noqa: PLC0415 -- --help
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    if options.keep and options.detach:
        raise JobError("keeps nothing without watching: remove one", key="--keep")
    plan = _plan(options)
    job = deployment_file.load_job(plan)
    check_before(plan, job)
    if options.keep:
        check_sizes(plan, options.clock)
    plan = offers.with_types(plan, clock=options.clock, tell=tell)
    if options.keep:
        _check_moves(plan, options.clock)
    return plan, job


def _spot_record(deployment: "Deployment") -> "SpotRecord":
    """What the clouds of a deployment publish, and what it has seen of them."""
    from deploy.fleet.keeping import spot_record  # noqa: PLC0415 -- --help

    markets = {
        name: pool
        for name, pool in deployment.pools.items()
        if isinstance(pool, SpotMarket)
    }
    return spot_record.SpotRecord(deployment.plan.folder, markets, tell)


def _mover(
    deployment: "Deployment", run: "RunFolder", rounds: int, record: "SpotRecord"
) -> "Mover | None":
    """Who moves sites of clouds before a deadline; None if there is none."""
    from deploy.fleet import prices  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.fleet.keeping import (  # noqa: PLC0415 -- keeps `--help` fast
        moves,
        run_progress,
    )

    plan = deployment.plan
    if plan.file.deadline_hours is None:
        return None
    today = prices.day_of(deployment.clock.now())
    table = prices.load(plan.prices, today=today, warn=lambda _: None)
    progress = run_progress.ReadProgress(run, rounds)
    return moves.Mover(plan, table, progress, record, tell)


def _sizer(deployment: "Deployment", run: "RunFolder", rounds: int) -> "Sizer | None":
    """Who changes sizes of machines; None if no site states any."""
    from deploy.fleet import prices  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.fleet.keeping import sizes  # noqa: PLC0415 -- keeps `--help` fast

    plan = deployment.plan
    if not sizes.is_elastic(plan):
        return None
    today = prices.day_of(deployment.clock.now())
    table = prices.load(plan.prices, today=today, warn=lambda _: None)
    return sizes.Sizer(plan, table, run, rounds, tell)


def _check_moves(plan: "DeploymentPlan", clock: "Clock") -> None:
    """Refuse what would end the watch of a run: no price, or a damaged record."""
    from deploy.fleet import prices, spending  # noqa: PLC0415 -- --help
    from deploy.fleet.keeping import site_prices, spot_record  # noqa: PLC0415 -- --help
    from deploy.fleet.tables.providers import MARKETS  # noqa: PLC0415 -- --help

    spot_record.SpotRecord(plan.folder, {}, tell)  # A damaged one is refused.
    if plan.file.deadline_hours is None:
        return
    table = prices.load(plan.prices, today=prices.day_of(clock.now()), warn=tell)
    site_prices.check_prices(plan, table)
    for market in MARKETS:  # A budget counts either.
        sites = tuple(
            site.in_market(market) if site.is_movable else site
            for site in plan.file.sites
        )
        moved = replace(plan, file=replace(plan.file, sites=sites))
        spending.budget_prices(moved, now=clock.now())


class _Watch:
    """Reports what keeps nodes from working, each once, while a run is shown."""

    def __init__(self, deployment: "Deployment") -> None:
        from deploy.fleet.keeping.keep import starts_of  # noqa: PLC0415 -- keeps `--help` fast

        self.keeper: Keeper | None = None
        self.starts: Starts = starts_of(deployment, tell)
        self._deployment = deployment
        self._worked: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._awaited: set[str] = set()
        self._next_look = 0.0
        self._lines: Counter[tuple[str, str]] = Counter()
        self.read_logs(is_new=False)

    def look(self) -> None:
        """Report what is new, if the last look is some time ago.

        Raises:
            ComputeError: The machine of the aggregator, or those of all sites, have
                ended, and nothing more will happen; one could not start its site; or
                the keeper ends.
        """
        now = self._deployment.clock.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + NODES_LOOK_SECONDS
        nodes = self._nodes()
        if nodes is None:
            return
        self._report(nodes)
        self.read_logs()
        if self.keeper is None:
            self.starts.look(nodes)
            self._check_ended(nodes)
        else:
            self.keeper.look(nodes)

    def _nodes(self) -> Sequence[Node] | None:
        """All nodes; None if a service fails now and the keeper waits for it."""
        from deploy.fleet.reconcile import DEPLOYMENT  # noqa: PLC0415 -- --help

        try:
            return [
                node
                for pool in self._deployment.pools.values()
                for node in pool.nodes({DEPLOYMENT: self._deployment.name})
            ]
        except ComputeError as error:
            if self.keeper is None:
                raise
            self._tell_once("", f"{error}; looked at again until it succeeds")
            return None

    def _report(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.trouble and node.state is not NodeState.GONE:
                self._tell_once(node.id, f"{node.name}: {node.trouble}")
            if node.ready and node.id in self._awaited:
                self._awaited.remove(node.id)
                tell(f"{node.name}: ready")
            elif node.ready is False:
                self._awaited.add(node.id)

    def _check_ended(self, nodes: Sequence[Node]) -> None:
        """Refuse to watch what has ended, for example because its time was over."""
        from deploy.fleet.reconcile import AGGREGATOR, ROLE  # noqa: PLC0415 -- --help

        if failed := self.starts.not_started:
            raise ComputeError(
                f"{', '.join(failed)}: not started; the console of its machine is "
                "above. Fix what it says, and give crossfed up again, which resumes "
                "the run"
            )
        for who, aggregators in (
            ("the aggregator's machine has", True),
            ("the machines of all sites have", False),
        ):
            ours = [
                n for n in nodes if (n.labels.get(ROLE) == AGGREGATOR) == aggregators
            ]
            if not all_gone(ours):
                self._worked.add(who)
            # Services list a new machine late, and some none that is gone.
            elif aggregators or who in self._worked:
                why = f" ({ours[-1].trouble})" if ours and ours[-1].trouble else ""
                raise ComputeError(
                    f"{who} ended{why}: give crossfed up again, which resumes the run"
                )

    def _tell_once(self, node_id: str, message: str) -> None:
        if (node_id, message) not in self._told:
            tell(message)
        self._told.add((node_id, message))

    def read_logs(self, *, is_new: bool = True) -> None:
        """Report why sites on this host cannot load their data.

        This is for no one else: the operator of these sites gave the command.

        Args:
            is_new: Whether lines that were not there before are reported.
        """
        from deploy.fleet.reconcile import DEPLOYMENT  # noqa: PLC0415 -- --help
        from deploy.fleet.tables.providers import LOCAL  # noqa: PLC0415 -- --help
        from deploy.site_host.data import CANNOT_LOAD  # noqa: PLC0415 -- imports torch

        pool = self._deployment.pools[LOCAL]
        for node in pool.nodes({DEPLOYMENT: self._deployment.name}):
            lines = pool.log(node.id).splitlines()
            found = Counter(line for line in lines if line.startswith(CANNOT_LOAD))
            for line, times in found.items():
                if is_new and times > self._lines[node.id, line]:
                    tell(f"{node.name}: {line}")
                self._lines[node.id, line] = times


def _down(options: argparse.Namespace) -> int:
    from deploy.fleet import (  # noqa: PLC0415 -- keeps `--help` fast
        deployment as fleet,
        prices,
        remains,
        start_record,
        take_down,
    )

    plan = _plan(options)
    is_purged = _confirmed(options, plan)
    job = _job_if_any(plan)
    today = prices.day_of(options.clock.now())
    table = prices.load(plan.prices, today=today, warn=lambda _: None)
    deleted = 0
    start_record.forget(plan)
    with fleet.opened(
        plan,
        random_bytes=os.urandom,
        clock=options.clock,
        any_owner=options.any_owner,
        make=False,
    ) as deployment:
        deployment.note_ended()
        ended = take_down.take_down(deployment, any_owner=options.any_owner, tell=tell)
        if is_purged:
            deleted, kept = remains.purge(deployment, job)
            for place in kept:
                tell(f"{place}: kept, because privacy ledgers need it")
        left = remains.remains(deployment, job, table)
    if options.json:
        found: dict[str, Any] = {"ended": ended, "left": [*map(_left, left)]}
        say_json(found | ({"deleted_bytes": deleted} if is_purged else {}))
        return DONE
    say(f"{ended} nodes ended; nothing of deployment {plan.file.name} runs")
    if is_purged:
        say(f"{deleted / _MIB:.1f} MiB of runs and results deleted")
    if left:
        say(f"what stays, at prices of {table.as_of}:")
        names = ("what", "MiB", "dollars a month", "where")
        say_table(names, ([str(cell) for cell in _left_cells(e)] for e in left))
    return DONE


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
    from deploy.fleet import deployment_file  # noqa: PLC0415 -- keeps `--help` fast
    from federation.errors import JobError  # noqa: PLC0415 -- keeps `--help` fast

    try:
        return deployment_file.load_job(plan)
    except JobError as error:
        tell(f"{error}: buckets and keys that the job names are not looked at")
        return None


def _left(each: "Remains") -> dict[str, Any]:
    return {
        "what": each.what,
        "place": each.place,
        "bytes": each.num_bytes,
        "dollars_per_month": each.dollars,
        "trouble": each.trouble,
    }


def _left_cells(each: "Remains") -> "Iterator[str]":
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
    from deploy.fleet import deployment as fleet  # noqa: PLC0415 -- --help
    from deploy.fleet.reconcile import DEPLOYMENT  # noqa: PLC0415 -- --help

    plan = _plan(options)
    now, code = options.clock.now(), DONE
    rows: list[dict[str, Any]] = []
    for provider, pool in fleet.pools_of(plan, options.clock).items():
        try:
            found = pool.nodes({DEPLOYMENT: plan.file.name})
        except ComputeError as error:
            tell(f"{provider}: {error}")
            code = FAILED
            continue
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


VERBS = {"up": _up, "down": _down, "nodes": _nodes}
