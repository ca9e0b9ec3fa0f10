"""``crossfed up --keep``: replace nodes that have gone, until the run has ended.

The same reconciliation as ``crossfed up``, repeated. It never works against another
command: it does nothing while one holds the deployment's folder, and ends when
``crossfed down`` was given. What bills is ended when the budget is spent or the hours
are over, and when the run has ended.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain

from cloud_adapters.compute.pool import Node, NodeState, all_gone, log_of
from cloud_adapters.compute.refusals import PASSING
from deploy.aggregator_host.alert_delivery import AlertDelivery
from deploy.fleet import down, spending, state
from deploy.fleet.boot_status import Starts, starts_of
from deploy.fleet.loop import Pauses
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.placement import Placement
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE
from deploy.fleet.sizes import Sizer
from deploy.fleet.spec import DeploymentPlan, Tell
from deploy.fleet.state import Deployment
from federation import folder_lock
from federation.errors import ComputeError, FederationError, JobError
from monitoring.web.alerts import of_caps

_HOUR = 3600.0
_WRITE_SECONDS = 60.0
# Between two looks at the limits while a service refuses.
_LIMITS_SECONDS = 10.0

# Starts what a deployment lacks, as ``bring_up`` does.
Restore = Callable[[Deployment], object]

LOOK_SECONDS = 2.0
"""Between two looks at the nodes."""


class Keeper:
    """Keeps the nodes of one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        restore: Restore,
        *,
        hourly: Mapping[str, float],
        tell: Tell,
        placement: Placement | None = None,
        sizer: Sizer | None = None,
        pause: Callable[[], None] = lambda: None,
        starts: Starts | None = None,
        alerts: AlertDelivery | None = None,
    ) -> None:
        """Begin with a deployment that has just been brought up.

        Args:
            deployment: What is wanted.
            restore: Brings it up again.
            hourly: Dollars of an hour of each role's machine; empty without a budget.
            tell: Called with a word about every step.
            placement: Chooses between spot and on demand, if there is a deadline.
            sizer: Decides on sizes of machines, if any site states several.
            pause: Asks the run to pause after its round, so that machines can change.
            starts: What is known of starts of machines; None for nothing yet.
            alerts: Tells people what is used of the caps; None for nobody.
        """
        self._alerts = alerts
        self._starts = starts or starts_of(deployment, tell)
        self._placement = placement
        self._sizer, self._ask_to_pause = sizer, pause
        # Machines that are wanted when the run has paused.
        self._resized: DeploymentPlan | None = None
        self._plan, self._clock = deployment.plan, deployment.clock
        self._pools = deployment.pools
        self._seen: Sequence[Node] = ()
        self._restore, self._hourly = restore, hourly
        # A table that becomes too old in the middle of a run must not end it.
        self._priced_at = deployment.clock.now()
        self._random_bytes, self._tell = deployment.random_bytes, tell
        self._spending = spending.read(self._plan.folder)
        self._since: float | None = None
        self._written = -_WRITE_SECONDS
        self._is_moving = False
        # Names of roles whose loss was reported, until they are filled again.
        self._gone = ""
        self._next_try, self._pauses = 0.0, Pauses(tell)

    def look(self, nodes: Sequence[Node]) -> None:
        """Do what has to be done about the nodes that there are.

        Raises:
            ComputeError: The budget is spent, or the hours are over.
            TakenDown: Another command has ended the deployment.
        """
        self._starts.look(nodes)
        if self._is_within_limits(nodes):
            self._replace(nodes)
            self._decide_sizes(self._clock.now())

    def _is_within_limits(self, nodes: Sequence[Node]) -> bool:
        """Count what machines cost; end them if a limit is reached.

        Returns:
            False if they are to be ended, but another command works on them.
        """
        now, self._seen = self._clock.now(), nodes
        alive = [node for node in nodes if node.state is not NodeState.GONE]
        if self._since is None and alive:
            self._since = min(node.launched for node in alive)
        self._count(nodes, now)
        limit, spent = self._plan.file.max_dollars, self._spending.dollars
        self._tell_caps(now)
        if limit is not None and (spent >= limit or self._is_used_up(limit, alive)):
            self._tell_caps(now, is_spent=True)
            self._end(
                f"the budget is spent: ${spent:,.2f} of max_dollars = {limit:g}. Raise "
                "it and run crossfed up again, which resumes the run"
            )
        elif self._is_over(now):
            self._end(
                f"max_hours = {self._plan.file.max_hours:g} are over: run crossfed up "
                "again, which resumes the run"
            )
        else:
            return True
        return False

    def _tell_caps(self, now: float, *, is_spent: bool = False) -> None:
        """Tell people who want to know; a place that is down holds this up shortly."""
        if self._alerts is None:
            return
        file, hours = self._plan.file, (now - (self._since or now)) / _HOUR
        dollars = max(self._spending.dollars, (file.max_dollars or 0.0) * is_spent)
        used = {
            "max_dollars": (dollars, file.max_dollars),
            "max_hours": (hours, file.max_hours),
        }
        self._alerts.deliver([*of_caps(file.name, used)])

    def _is_used_up(self, limit: float, alive: Sequence[Node]) -> bool:
        """Whether nothing works, and the rest of the budget launches nothing.

        Machines end by themselves when it is spent, which may be a little before: then
        it is never reached.
        """
        if alive:
            return False
        left = spending.rest_seconds(limit, self._spending, alive, self._hourly)
        return left is not None and left < spending.LEAST_SECONDS

    def resume(self) -> None:
        """Change machines as decided, while no round runs; resume the run.

        A machine that cannot be had is not asked for again: the old one stays, which
        ends only when the new one is launched. If a service fails then, too, the run
        waits for it, within the budget and the hours.

        Raises:
            ComputeError: A limit is reached, and all machines were ended.
            TakenDown: Another command has ended the deployment.
        """
        old, new = self._plan, self._resized
        self._resized = None
        # Without a new plan, a command that is gone asked for the pause.
        if new is None or not self._is_changed(old, new):
            while not self._is_up(f"{self._plan.file.name}: not resumed"):
                self._await_next_try()
                # A spot machine that is not available may no longer come in time.
                self._place(self._listed())
        if new is not None and self._sizer is not None:
            self._sizer.changed()

    def _is_changed(self, old: DeploymentPlan, new: DeploymentPlan) -> bool:
        """Try to have other machines; False if the old ones stay for now."""
        pairs = zip(old.file.sites, new.file.sites, strict=True)
        self._take(new)
        try:
            self._bring_up(first={b.role for a, b in pairs if a != b})
        except (ComputeError, JobError) as error:
            self._take(old)
            if self._sizer is not None:
                self._sizer.refused(old, new, str(error))
            self._tell(f"{old.file.name}: the machines stay for now: {error}")
            return False
        return True

    def _take(self, plan: DeploymentPlan) -> None:
        """Want the machines of a plan; what comes may cost something else."""
        self._plan = plan
        self._hourly = spending.budget_prices(plan, now=self._priced_at)

    def _place(self, nodes: Sequence[Node]) -> None:
        """Take over what the deadline calls for; a change from before is void then."""
        if self._placement is None:
            return
        plan = self._placement.placed(self._plan, nodes, self._clock.now())
        if plan != self._plan:
            self._resized = None
            self._take(plan)

    def _await_next_try(self) -> None:
        """Wait, but not beyond a limit: the machines cost meanwhile."""
        while (left := self._next_try - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, _LIMITS_SECONDS))
            self._is_within_limits(self._listed())

    def _listed(self) -> Sequence[Node]:
        """All nodes; those last seen, which may still cost, if a service fails."""
        labels = {DEPLOYMENT: self._plan.file.name}
        try:
            return [n for pool in self._pools.values() for n in pool.nodes(labels)]
        except ComputeError:
            # The next try reports it, if it lasts.
            return self._seen

    def _is_up(self, fault: str, missing: Collection[str] = ()) -> bool:
        """Bring up what is wanted; False if that is refused, to be tried later.

        Args:
            fault: Reported then, with the reason.
            missing: Roles whose machines are gone.
        """
        try:
            self._bring_up(missing=missing)
        except (ComputeError, JobError) as error:
            pause = self._pauses.after(f"{fault}: {error}")
            self._next_try = self._clock.monotonic() + pause
            return False
        self._pauses.clear()
        self._next_try = 0.0
        return True

    def _bring_up(
        self, *, first: Collection[str] = (), missing: Collection[str] = ()
    ) -> None:
        with self._opened() as deployment:
            if deployment.is_ended:
                raise TakenDown(
                    f"crossfed down has ended {deployment.name}: it is no longer kept"
                )
            names = ", ".join(sorted(missing))
            if missing and names != self._gone:
                self._tell(f"{names}: gone; to be replaced")
            self._gone = names
            deployment.launch_first = frozenset(first)
            deployment.held_back = frozenset(self._starts.failed) - {*missing}
            self._restore(deployment)

    def _decide_sizes(self, now: float) -> None:
        if self._sizer is None or self._resized is not None:
            return
        plan = self._sizer.wanted(self._plan, now)
        if plan != self._plan:
            self._resized = plan
            self._ask_to_pause()

    def end(self) -> None:
        """End every machine, because the run has ended.

        Raises:
            ComputeError: A service failed.
        """
        with self._opened() as deployment:
            deployment.note_ended()
            down.take_down(deployment, any_owner=False, tell=self._tell)

    def _opened(self) -> AbstractContextManager[Deployment]:
        return state.opened(
            self._plan, random_bytes=self._random_bytes, clock=self._clock
        )

    def _count(self, nodes: Sequence[Node], now: float) -> None:
        before = len(self._spending.machines)
        self._spending = spending.observed(self._spending, nodes, self._hourly, now)
        is_due = self._clock.monotonic() - self._written >= _WRITE_SECONDS
        if is_due or len(self._spending.machines) != before:
            spending.write(self._plan.folder, self._spending)
            self._written = self._clock.monotonic()

    def _is_over(self, now: float) -> bool:
        hours = self._plan.file.max_hours
        return self._since is not None and now - self._since >= hours * _HOUR

    def _end(self, why: str) -> None:
        if folder_lock.is_held(self._plan.folder / "lock"):
            return
        spending.write(self._plan.folder, self._spending)
        self.end()
        raise ComputeError(f"all machines of {self._plan.file.name} were ended: {why}")

    def _replace(self, nodes: Sequence[Node]) -> None:
        """Bring the deployment up again if a node of it is gone."""
        if self._placement is not None:
            self._move(self._placement, nodes)
        missing = self._missing(nodes)
        is_early = self._clock.monotonic() < self._next_try
        if (
            not (missing or self._is_moving)
            or is_early
            or folder_lock.is_held(self._plan.folder / "lock")
        ):
            return
        names = ", ".join(sorted(missing)) or self._plan.file.name
        if self._is_up(f"{names}: not replaced", missing):
            self._gone, self._is_moving = "", False
            if self._resized is not None:  # It may have resumed a run that had paused.
                self._ask_to_pause()

    def _move(self, placement: Placement, nodes: Sequence[Node]) -> None:
        """Take over what the deadline calls for, after the round if it may wait."""
        now = self._clock.now()
        plan = placement.placed(self._plan, nodes, now)
        if plan == self._plan:
            return
        if placement.may_wait(self._plan, plan, nodes, now):
            if self._resized != plan:
                self._resized = plan
                self._tell("the run pauses after its round, and machines move then")
                self._ask_to_pause()
            return
        self._resized, self._is_moving = None, True
        self._take(plan)

    def _missing(self, nodes: Sequence[Node]) -> set[str]:
        """Roles that a machine may be started for now."""
        sites = {site.role for site in self._plan.file.sites}
        missing = {AGGREGATOR, *sites} - {
            n.labels.get(ROLE, "") for n in nodes if n.state.works
        }
        if missing >= sites and all(map(self._starts.is_given_up, sites)):
            self._end("none of its sites could be started; see above")
        return {role for role in missing if self._starts.may_replace(role)}


class TakenDown(FederationError):
    """Another command has ended the deployment."""


class RunWatch:
    """Reports what keeps nodes from working, each once, while a run is shown."""

    def __init__(self, deployment: Deployment, tell: Tell) -> None:
        """Begin with what the logs say now, which is not reported.

        Args:
            deployment: Whose nodes are watched.
            tell: Called with a word about what keeps one from working.
        """
        self.keeper: Keeper | None = None
        self.starts: Starts = starts_of(deployment, tell)
        self._deployment, self._tell = deployment, tell
        self._worked: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
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
        self._next_look = now + LOOK_SECONDS
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
        """All nodes; None if a service fails now, which will pass or is kept."""
        try:
            return [*chain.from_iterable(self._deployment.listed().values())]
        except ComputeError as error:
            if self.keeper is None and not isinstance(error, PASSING):
                raise
            self._tell_once("", f"{error}; looked at again until it succeeds")
            return None

    def _report(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.trouble and node.state is not NodeState.GONE:
                self._tell_once(node.id, f"{node.name}: {node.trouble}")
            if node.ready and node.id in self._awaited:
                self._awaited.remove(node.id)
                self._tell(f"{node.name}: ready")
            elif node.ready is False:
                self._awaited.add(node.id)

    def _check_ended(self, nodes: Sequence[Node]) -> None:
        """Refuse to watch what has ended, for example because its time was over."""
        if failed := self.starts.not_started:
            raise ComputeError(
                f"{', '.join(failed)}: not started; the console of its machine is "
                "above. Fix what it says, and run crossfed up again, which resumes "
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
                    f"{who} ended{why}: run crossfed up again, which resumes the run"
                )

    def _tell_once(self, node_id: str, message: str) -> None:
        if (node_id, message) not in self._reported:
            self._tell(message)
        self._reported.add((node_id, message))

    def read_logs(self, *, is_new: bool = True) -> None:
        """Report why sites on this host cannot load their data.

        This is for no one else: the operator of these sites runs the command.

        Args:
            is_new: Whether lines that were not there before are reported.
        """
        from deploy.site_host.data import CANNOT_LOAD  # noqa: PLC0415 -- imports torch

        pool = self._deployment.pools[LOCAL]
        for node in pool.nodes({DEPLOYMENT: self._deployment.name}):
            lines = log_of(pool, node.id).splitlines()
            # Their times come first: without them, equal lines are one.
            texts = (CANNOT_LOAD + line.partition(CANNOT_LOAD)[2] for line in lines)
            found = Counter(text for text in texts if text != CANNOT_LOAD)
            for line, times in found.items():
                if is_new and times > self._lines[node.id, line]:
                    self._tell(f"{node.name}: {line}")
                self._lines[node.id, line] = times
