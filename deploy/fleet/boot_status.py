"""Which machines of clouds and pods have started their sites, as they say themselves.

A machine whose site cannot start ends itself, and the next one would fail like it: for
hours, unseen, and paid for. So the console of each is read until it says that the site
is ready, and what a failed one said last is reported. A pod has its log for a console,
and its cluster says whether its program failed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cloud_adapters.compute.pool import Node
from deploy.fleet import bootstrap
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.reconcile import ROLE
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from federation.errors import ComputeError
from federation.protocols import Clock

_LOG_SECONDS = 15.0
# Installing takes minutes: a machine that has lasted so long has started.
_LONGEST_SECONDS = 1800.0
# After a start that has failed: so long, then twice as long, up to the last.
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5.0, 300.0
_MOST_FAILED = 3

ReadLog = Callable[[Node], str | None]


class Starts:
    """The machines of one deployment that have yet to start."""

    def __init__(
        self, read_log: ReadLog, *, role: str, clock: Clock, tell: Tell
    ) -> None:
        """Begin.

        Args:
            read_log: Returns what a machine has written to its console, or a pod to its
                log; None for one that does not write there whether its site is ready.
            role: Name of the label that says what a machine does.
            clock: Tells time.
            tell: Called with a word about every start that has failed.
        """
        self._read_log, self._label = read_log, role
        self._clock, self._tell = clock, tell
        self._awaited: dict[str, Node] = {}
        self._logs: dict[str, str] = {}
        self._settled: set[str] = set()
        self._refused: set[str] = set()
        self._next_log = -_LOG_SECONDS
        self._has_looked = False
        # Of those that were ready: by id, with their roles.
        self._worked: dict[str, str] = {}
        self._crashed: set[str] = set()
        self._in_a_row: Counter[str] = Counter()
        self._said_so: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}

    @property
    def failed(self) -> Mapping[str, int]:
        """How many starts in a row have failed, by role."""
        return {role: number for role, number in self._in_a_row.items() if number}

    @property
    def not_started(self) -> Sequence[str]:
        """Roles whose last machine has failed before its site was ready."""
        return [role for role in self.failed if role not in self._crashed]

    def look(self, nodes: Sequence[Node]) -> None:
        """Take note of all nodes of the deployment."""
        listed = {node.id: node for node in nodes}
        for each in nodes:
            if each.id in self._settled:
                self._note_crash(each)
                continue
            # One that fails within seconds is seen only when it is gone.
            is_new = (each.failed or each.finished) and self._has_looked
            if is_new or each.state.works:
                self._awaited[each.id] = each
            else:  # An earlier command has seen it end.
                self._settled.add(each.id)
        self._has_looked = True
        is_due = self._clock.monotonic() - self._next_log >= _LOG_SECONDS
        if is_due:
            self._next_log = self._clock.monotonic()
        for known in list(self._awaited.values()):
            node = listed.get(known.id)
            # Some services do not list what is gone.
            is_over = node is None or not node.state.works
            if is_due or is_over:
                self._look(node or known, is_over=is_over)

    def may_replace(self, role: str) -> bool:
        """Whether another machine may be started for a role now."""
        if role not in self._failed_at:
            return True
        pause = _RETRY_SECONDS * 2 ** (self._in_a_row[role] - 1)
        waited = self._clock.monotonic() - self._failed_at[role]
        return not self.is_given_up(role) and waited >= min(pause, _MOST_RETRY_SECONDS)

    def is_given_up(self, role: str) -> bool:
        """Whether so many of its machines have said that they failed, one by one."""
        return self._said_so[role] >= _MOST_FAILED

    def _note_crash(self, node: Node) -> None:
        """Count a program that failed soon after its site was ready.

        It counts until one of its role lasts: the next would be ready, too, and fail.
        """
        role = self._worked.get(node.id)
        if role is None:
            return
        if node.seconds(self._clock.now()) >= _LONGEST_SECONDS:
            del self._worked[node.id]
            self._crashed.discard(role)
            self._said_so[role] = 0
        elif node.failed or node.finished:
            del self._worked[node.id]
            self._crashed.add(role)
            what = "failed" if node.failed else "ended by itself"
            self._fail(role, node, self._log(node) or "", what)

    def _look(self, node: Node, *, is_over: bool) -> None:
        log = self._log(node)
        if log is None:
            self._settle(node)
            return
        role = node.labels.get(self._label, node.name)
        is_long = node.seconds(self._clock.now()) >= _LONGEST_SECONDS
        if bootstrap.is_ready(log) or (is_long and not bootstrap.has_failed(log)):
            self._settle(node)
            self._worked[node.id] = role
            self._in_a_row[role] = 0
            if role not in self._crashed:
                self._said_so[role] = 0
            self._failed_at.pop(role, None)
        elif bootstrap.has_failed(log) or node.failed or is_over:
            self._settle(node)
            is_known = bootstrap.has_failed(log) or node.failed or node.finished
            what = "could not start the site"
            if not is_known:
                what = "has ended before its site was ready"
            self._fail(role, node, log, what, is_known=is_known)

    def _log(self, node: Node) -> str | None:
        """What a machine has said; the last that was heard if nothing can be read."""
        try:
            found = self._read_log(node)
        except ComputeError as error:
            if node.id not in self._refused:
                self._tell(f"{node.name}: {error}")
            self._refused.add(node.id)
            found = ""
        if found is None:
            return None
        if found:
            self._logs[node.id] = found
        return self._logs.get(node.id, "")

    def _settle(self, node: Node) -> None:
        self._settled.add(node.id)
        del self._awaited[node.id]

    def _fail(
        self, role: str, node: Node, log: str, what: str, *, is_known: bool = True
    ) -> None:
        """Count a failure, and report it.

        Args:
            role: Role of the machine.
            node: The machine.
            log: Its console.
            what: What it did, for the message.
            is_known: Whether it failed by itself, and was not preempted.
        """
        self._in_a_row[role] += 1
        self._said_so[role] += is_known
        self._failed_at[role] = self._clock.monotonic()
        why = f" ({node.trouble})" if node.trouble else ""
        self._tell(
            f"{role}: its machine {node.id} {what}{why}. Its console ends:\n"
            f"{bootstrap.end_of(log)}"
        )
        if self._said_so[role] == _MOST_FAILED:
            self._tell(
                f"{role}: {_MOST_FAILED} machines in a row could not start it or "
                "failed soon, and no more are launched: fix what the console says, and "
                "run crossfed up again"
            )


def starts_of(deployment: Deployment, tell: Callable[[str], None]) -> Starts:
    """Follow the starts of a deployment's machines of clouds and of its pods.

    Nodes of this host say by themselves whether they are ready.
    """
    pools = {
        site.role: site.pool
        for site in deployment.plan.file.sites
        if site.provider != LOCAL
    }

    def read_log(node: Node) -> str | None:
        name = pools.get(node.labels.get(ROLE, ""))
        return None if name is None else deployment.pools[name].log(node.id)

    return Starts(read_log, role=ROLE, clock=deployment.clock, tell=tell)
