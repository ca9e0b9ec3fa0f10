"""Have one node fill each role of a deployment, with the settings of now.

Each step of ``up`` and ``down`` can be done again, and a launch that is repeated has
the same token. So ``Patience`` repeats what a passing fault of a cloud has ended,
within a deployment's hours. A budget that is spent meanwhile ends the next attempt;
machines end by themselves then, as when their hours are over.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeVar

from cloud_adapters.compute.pool import (
    ComputePool,
    Node,
    NodeSpec,
    NodeState,
    all_gone,
    wait_for,
)
from cloud_adapters.compute.refusals import PASSING
from deploy.fleet import reconcile, spending
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.reconcile import DEPLOYMENT, OWNER, SETTINGS, Decision, NodeRole
from deploy.fleet.spec import DeploymentPlan, Tell
from deploy.fleet.state import Deployment
from federation.errors import ComputeError
from federation.protocols import Clock
from privacy.membership.certificates import EARLY_SECONDS

# After a fault: so long, then twice as long, up to the last.
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5.0, 300.0

_Result = TypeVar("_Result")

_END_SECONDS = 90.0
# A launch that is repeated within so long is the same one.
_SAME_SECONDS = 300.0
_SETTINGS_DIGITS = 16
NodesByPool = Mapping[str, Sequence[Node]]


class Pauses:
    """Pauses between attempts, which grow; each new fault is reported once."""

    def __init__(self, tell: Tell) -> None:
        """Begin with the first attempt; ``tell`` is called with each new fault."""
        self._tell = tell
        self.clear()

    def clear(self) -> None:
        """Begin again, because an attempt has succeeded."""
        self._seconds, self._told = _RETRY_SECONDS, ""

    def after(self, fault: str) -> float:
        """Report why an attempt failed; the seconds until the next one."""
        if fault != self._told:
            self._tell(f"{fault}; tried again until it succeeds")
        pause, self._told = self._seconds, fault
        self._seconds = min(2 * pause, _MOST_RETRY_SECONDS)
        return pause


class Patience:
    """Waits between the attempts of one command."""

    def __init__(self, plan: DeploymentPlan, clock: Clock, tell: Tell) -> None:
        """Begin with the first attempt; ``tell`` is called with each new fault."""
        self._clock, self._pauses = clock, Pauses(tell)
        self._end = clock.monotonic() + plan.max_seconds

    def is_worn_out(self, error: ComputeError) -> bool:
        """Wait after a fault; True at once if no further attempt is to be made.

        Because it needs a person, or the hours of the deployment are over.
        """
        now = self._clock.monotonic()
        if not isinstance(error, PASSING) or now >= self._end:
            return True
        self._clock.sleep(min(self._pauses.after(str(error)), self._end - now))
        return False

    @contextmanager
    def entered(
        self, make: Callable[[], AbstractContextManager[_Result]]
    ) -> Iterator[_Result]:
        """Enter what ``make`` returns once no passing fault keeps it from that."""
        with ExitStack() as stack:
            yield self.repeated(lambda: stack.enter_context(make()))

    def repeated(self, attempt: Callable[[], _Result]) -> _Result:
        """Make an attempt until no passing fault ends it.

        Raises:
            ComputeError: A fault that needs a person, or the last one.
        """
        while True:
            try:
                return attempt()
            except ComputeError as error:
                if self.is_worn_out(error):
                    raise


class NodeRequest(NamedTuple):
    """A node to have.

    Attributes:
        pool: Name of the compute service, as ``SiteMachine.pool``.
        spec: The node; its name is that of the role. Labels are added to it.
        settings: All that it reads when it starts.
        user_data: Its user data if it is to end after other seconds than those of
            ``spec``; None if that is not in it.
    """

    pool: str
    spec: NodeSpec
    settings: bytes
    user_data: Callable[[float], str] | None = None


def decide(
    deployment: Deployment, request: NodeRequest, listed: NodesByPool | None = None
) -> Decision:
    """What has to happen so that a node fills a role.

    Args:
        deployment: Whose role it is.
        request: The node.
        listed: What services list, if they have just been asked for other roles.

    Raises:
        ComputeError: The service fails.
    """
    spec = request.spec
    settings = request.settings + str(spec.max_seconds).encode()
    digest = hashlib.sha256(settings).hexdigest()[:_SETTINGS_DIGITS]
    # Another folder's node of this role is not ours to end.
    ours = {DEPLOYMENT: deployment.name, OWNER: deployment.owner}
    if listed is None:
        found = deployment.pools[request.pool].nodes(ours)
    else:
        found = [n for n in listed[request.pool] if ours.items() <= n.labels.items()]
    role = NodeRole(name=spec.name, settings=digest)
    launched = deployment.launched(spec.name)
    return reconcile.decide(role, found, launched)


def fill(
    deployment: Deployment,
    request: NodeRequest,
    tell: Tell,
    listed: NodesByPool | None = None,
) -> Node:
    """Have one node fill a role.

    Args:
        deployment: Whose role it is.
        request: The node.
        tell: Called with a word about every step.
        listed: As for ``decide``.

    Raises:
        ComputeError: It could not be launched, or the one that it replaces not ended;
            or this host's clock is wrong.
    """
    role_name, is_here = request.spec.name, request.pool == LOCAL
    decision = decide(deployment, request, listed)
    first, later = _to_end(deployment, decision)
    if decision.end:
        tell(f"{role_name}: its settings have changed; the node that runs is replaced")
    _end(deployment, request, first)
    number, kept = decision.number, decision.node
    if kept is not None and is_here and kept.state is NodeState.STARTING:
        # A launch that was killed may have made it, but not started it.
        return _launch(deployment, request, decision.role, number, request.spec)
    if kept is not None:
        return kept
    spec = _as_written_down(deployment, request, number)
    while True:
        # A launch that is repeated may find a machine that is hours old.
        is_new = number > deployment.launched(role_name)
        deployment.note_launch(role_name, number, spec.max_seconds)
        begin = deployment.clock.now()
        node = _launch(deployment, request, decision.role, number, spec)
        is_gone = node.state is NodeState.GONE
        if not is_gone and (is_new or _fits(node, decision.role)):
            tell(f"{role_name}: launched {node.id}")
            if is_new and not is_here:
                _check_clock(deployment, request.pool, node, begin)
            _end(deployment, request, later)
            return node
        # An earlier command launched it with this number, and it has ended since.
        if not is_gone:  # Or it was listed only now, and has that command's settings.
            tell(f"{role_name}: the settings of {node.id} have changed; it is replaced")
            _end(deployment, request, [node])
        number += 1


def _to_end(
    deployment: Deployment, decision: Decision
) -> tuple[Sequence[Node], Sequence[Node]]:
    """Nodes to end before a launch, and those to end after it."""
    is_later = decision.role.name in deployment.launch_first and decision.node is None
    return ((), decision.end) if is_later else (decision.end, ())


def _fits(node: Node, role: NodeRole) -> bool:
    return node.labels.get(SETTINGS, role.settings) == role.settings


def _launch(
    deployment: Deployment,
    request: NodeRequest,
    role: NodeRole,
    number: int,
    spec: NodeSpec,
) -> Node:
    """Ask for the node of a number, which its service launches once."""
    own = reconcile.labels(deployment.name, deployment.owner, role, number)
    labels = {**spec.labels, **own}
    return deployment.pools[request.pool].launch(
        replace(spec, labels=labels), f"{deployment.owner}/{role.name}/{number}"
    )


def _end(deployment: Deployment, request: NodeRequest, nodes: Sequence[Node]) -> None:
    """End nodes of a role, and wait until they have."""
    end_nodes(
        deployment.pools[request.pool],
        deployment.name,
        nodes,
        what=f"the replaced node of {request.spec.name} ended",
        seconds=_END_SECONDS,
        clock=deployment.clock,
    )


def end_nodes(
    pool: ComputePool,
    deployment: str,
    nodes: Sequence[Node],
    *,
    what: str,
    seconds: float,
    clock: Clock,
) -> None:
    """End nodes of one service, and wait until they have ended.

    Args:
        pool: The service.
        deployment: Name of the deployment that they belong to.
        nodes: Those to end.
        what: Said of them if they do not end in time.
        seconds: How long to wait.
        clock: Tells time.

    Raises:
        ComputeError: The service fails, or they do not end in time.
    """
    ids = {node.id for node in nodes}
    if not ids:
        return
    pool.terminate(ids)
    wait_for(
        pool,
        {reconcile.DEPLOYMENT: deployment},
        lambda found: all_gone([node for node in found if node.id in ids]),
        what=what,
        seconds=seconds,
        clock=clock,
    )


def _as_written_down(
    deployment: Deployment, request: NodeRequest, number: int
) -> NodeSpec:
    """The node as a launch with this number has asked for it before, if one has.

    A service knows a repeated launch by its being the same. Only what is left of a
    budget differs by a few seconds; if it differs by much, it counts.

    Raises:
        ComputeError: The budget is spent, or a service fails.
    """
    spec = _within_budget(deployment, request)
    before = deployment.launched_for(spec.name, number)
    if before is None or abs(before - spec.max_seconds) > _SAME_SECONDS:
        return spec
    return _ending(request, before)


def _ending(request: NodeRequest, seconds: float) -> NodeSpec:
    """The node, but so that it ends after other seconds."""
    if seconds == request.spec.max_seconds:
        return request.spec
    text = request.spec.user_data
    if request.user_data is not None:
        text = request.user_data(seconds)
    return replace(request.spec, max_seconds=seconds, user_data=text)


def _within_budget(deployment: Deployment, request: NodeRequest) -> NodeSpec:
    """The node, which ends by itself when the budget is spent, watched or not.

    Raises:
        ComputeError: It is spent, or a service fails.
    """
    spec, plan = request.spec, deployment.plan
    if plan.file.max_dollars is None:
        return spec
    nodes = [*chain.from_iterable(deployment.listed().values())]
    left = spending.seconds_left(plan, nodes, now=deployment.clock.now())
    if left is None or left >= spec.max_seconds:
        return spec
    if left < spending.LEAST_SECONDS:
        raise ComputeError(
            f"{spec.name}: not launched: of max_dollars = {plan.file.max_dollars:g}, "
            f"all machines together would have spent the rest in {left:.0f} s. Raise it"
        )
    return _ending(request, left)


def _check_clock(deployment: Deployment, pool: str, node: Node, begin: float) -> None:
    """End a machine whose certificate would not be valid yet, or hours be miscounted.

    Its cloud says when it was launched: that was between ``begin`` and now.

    Raises:
        ComputeError: This host's clock says something else.
    """
    ahead = begin - node.launched
    behind = node.launched - deployment.clock.now()
    if max(ahead, behind) <= EARLY_SECONDS:
        return
    deployment.pools[pool].terminate({node.id})
    seconds, way = max((ahead, "ahead of"), (behind, "behind"))
    raise ComputeError(
        f"this host's clock is {seconds / 60:.0f} minutes {way} that of {pool}: "
        "certificates would not be valid on machines, and hours and dollars would be "
        f"wrong. Set it (timedatectl, chrony) and run this command again; {node.id} "
        "is ended"
    )
