"""Sites on machines of clouds and in clusters: launched, invited and trusted.

A machine enrols by itself, from what its user data says. It is invited when it is
known which one it is, so no other machine of the same role can come before it. When all
sites of the file have enrolled, and their operator has checked what they sent, the
operator signs the roster: then the machines begin to work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cloud_adapters.compute.pool import Node, NodeState, log_of
from cloud_adapters.compute.refusals import PASSING
from cloud_adapters.identity import platforms
from cloud_adapters.identity.platforms import PlatformVerifier
from deploy.aggregator_host import enrolment_operator
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.fleet import bootstrap, loop
from deploy.fleet.down import give_way
from deploy.fleet.loop import NodeRequest, NodesByPool
from deploy.fleet.machine_spec import KUBERNETES, LOCAL, SiteMachine
from deploy.fleet.roster_operator import Operator, open_operator
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from deploy.fleet.wanted import identity_of
from federation import platform_identity
from federation.errors import ComputeError, PlatformUnavailable, ProofRefused
from federation.platform_identity import PlatformIdentity
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement import identity
from privacy.secagg.agreement.roster import Roster

# Installing takes minutes; the invitation holds a while longer.
ENROL_SECONDS, INVITED_SECONDS = 1800.0, 3600.0
_LOOK_SECONDS, _LOG_SECONDS = 1.0, 15.0
# Between two lists of all nodes: services count requests.
_LIST_SECONDS = 5.0
# A service lists a new machine late, and one does not list those that are gone.
_UNLISTED_SECONDS = 60.0

_KEYS = "identity.pem"

_Found = TypeVar("_Found")


def operator_of(deployment: Deployment, config: AggregatorConfig) -> Operator:
    """Open the operator who signs for a deployment's machines of clouds and pods.

    Args:
        deployment: The operator's key is in its folder.
        config: Its aggregator.
    """
    # The operator's own file, and not what the aggregator's folder says.
    named = deployment.plan.file.platforms
    verifier = PlatformVerifier(
        clock=deployment.clock,
        sts_endpoint=named.sts,
        google_certificates=named.google_certificates,
    )
    return open_operator(
        deployment.plan.folder,
        config.folder,
        random_bytes=deployment.random_bytes,
        verifier=verifier,
    )


def bring_up(
    deployment: Deployment,
    config: AggregatorConfig,
    operator: Operator,
    requests: Mapping[str, NodeRequest],
    *,
    address: str,
    accept: str,
    tell: Tell,
) -> Roster:
    """Have every site of a cloud work, with a roster that its operator has signed.

    Sites of this host have enrolled before.

    Args:
        deployment: Launches are recorded in its folder.
        config: Its aggregator, which serves.
        operator: Checks what machines enrol with, and signs.
        requests: The node that each role needs.
        address: Where sites reach the aggregator.
        accept: Digits of the digest of a roster that names sites of other operators,
            too; empty for none.
        tell: Called with a word about every step.

    Raises:
        ComputeError: A machine could not be launched, has lost its keys, or has not
            enrolled in time; or another folder was first with the name.
        RosterRefused: The aggregator's roster names keys that no site has shown.
    """
    sites = [each for each in deployment.plan.file.sites if each.provider != LOCAL]
    listed = deployment.listed()
    for site in sites:  # Before the first one costs anything.
        _check_kept(deployment, config, site, requests[site.role], listed)
    starts = _SiteStarts(deployment=deployment, operator=operator, tell=tell)
    nodes = starts.launch({each.role: requests[each.role] for each in sites}, listed)
    expected = {}
    for site in sites:
        who = starts.expected(site, nodes.get(site.role))
        if who is None:
            continue
        expected[site.name] = who
        enrolment_operator.invite_machine(
            config,
            site.name,
            who,
            clock=deployment.clock,
            address=address,
            seconds=INVITED_SECONDS,
        )
    keys = {
        each.name: identity.load(deployment.plan.site(each.name) / _KEYS).public.key
        for each in deployment.plan.file.sites
        if each.provider == LOCAL
    }
    for site in sites:
        keys[site.name] = starts.await_key(
            site, nodes.get(site.role), expected.get(site.name)
        )
    give_way(deployment, tell)
    signed = operator.sign(keys, accept=accept)
    tell(f"roster {signed.serial} of {len(keys)} sites is signed")
    return signed


def _check_kept(
    deployment: Deployment,
    config: AggregatorConfig,
    site: SiteMachine,
    request: NodeRequest,
    listed: NodesByPool,
) -> None:
    """Refuse to replace the machine that holds a site's keys and ledgers."""
    if site.home.url or loop.decide(deployment, request, listed).node is not None:
        return
    if BookFile(folder=config.folder).read().member(site.name) is None:
        return
    raise ComputeError(
        f"site {site.name!r} is enrolled, and its keys and privacy ledger were on a "
        "machine that is gone or would be replaced, because its settings have "
        "changed; sites.home would have kept them. To begin again with new keys and "
        "an empty ledger, which forgets what its records have spent: crossfed "
        "aggregator revoke "
        f"{site.name} --config {config.folder / 'aggregator.toml'}, then crossfed up"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SiteStarts:
    """The start of all machines of a deployment, until they have enrolled.

    Attributes:
        operator: Checks what they enrol with.
        tell: Called with a word about every step.
    """

    deployment: Deployment
    operator: Operator
    tell: Tell

    def launch(
        self, requests: Mapping[str, NodeRequest], listed: NodesByPool
    ) -> Mapping[str, Node]:
        """Have a machine for each role that is not held back."""
        nodes = {}
        for role, request in requests.items():
            if role not in self.deployment.held_back:
                nodes[role] = loop.fill(self.deployment, request, self.tell, listed)
                listed = give_way(self.deployment, self.tell)
        return nodes

    def expected(self, site: SiteMachine, node: Node | None) -> PlatformIdentity | None:
        """Who may enrol as a site; None for nobody, if its key is known already.

        A pod has to show its keys first; one whose keys are kept enrols nothing.
        """
        if node is None:
            return None
        if site.provider != KUBERNETES:
            return identity_of(site, node.id)
        if _kept_key(self.operator, site) is not None:
            return None

        def look() -> tuple[PlatformIdentity | None, str]:
            try:
                found = _pod_identity(self.deployment, self.operator, site, node)
            except ComputeError as error:  # Its log cannot be read now.
                return None, str(error)
            return found, ""

        return self._await(site, node, look, "it has not shown its keys yet")

    def await_key(
        self, site: SiteMachine, node: Node | None, expected: PlatformIdentity | None
    ) -> bytes:
        """Wait until a machine has enrolled; the key of its identity.

        Of one that is held back, nobody is expected: its key must be known.
        """
        role = site.role
        kept = _kept_key(self.operator, site)
        if kept is not None:
            self.tell(f"{role}: its keys are in {site.home.url}")
            return kept
        if node is None or expected is None:
            raise ComputeError(f"{role}: its machines could not start; see above")
        book = BookFile(folder=self.operator.aggregator)

        def look() -> tuple[bytes | None, str]:
            # What is kept of a site that has been revoked since is not used any more.
            if book.read().member(site.name) is None:
                return None, ""
            try:
                return self.operator.checked(site.name, expected), ""
            except (EnrolmentRefused, ProofRefused, PlatformUnavailable) as error:
                return None, str(error)

        found = self._await(site, node, look, "it has not enrolled yet")
        self.tell(f"{role}: {expected} is enrolled")
        return found

    def _await(
        self,
        site: SiteMachine,
        launched: Node,
        look: Callable[[], tuple[_Found | None, str]],
        expected: str,
    ) -> _Found:
        """Look for something of a machine until it is there, or the machine is gone.

        Args:
            site: Whose machine it is.
            launched: The machine, which its service may list late.
            look: Finds it, or says why it is not there; empty if nothing is wrong.
            expected: Why it is not there while nothing is wrong.
        """
        wait = _EnrolmentWait(self.deployment, site, launched)
        told, clock = expected, self.deployment.clock
        next_list = clock.monotonic()
        while True:
            found, why = look()
            if found is not None:
                return found
            if clock.monotonic() >= next_list:
                next_list = clock.monotonic() + _LIST_SECONDS
                try:
                    node = wait.look(give_way(self.deployment, self.tell))
                    why = why or (node.trouble if node is not None else "") or expected
                    wait.check(node, why)
                except PASSING as error:
                    if clock.monotonic() >= wait.end:
                        raise
                    why = f"{error}; looked at again until it succeeds"
                if why != told:
                    self.tell(f"{launched.name}: {why}")
                told = why
            clock.sleep(_LOOK_SECONDS)


def _pod_identity(
    deployment: Deployment, operator: Operator, site: SiteMachine, node: Node
) -> PlatformIdentity | None:
    """Whose keys may enrol as a site: those that its pod has shown.

    Args:
        deployment: Whose site it is.
        operator: Remembers what was checked: a log does not last.
        site: Its table.
        node: Its job.

    Returns:
        None if the pod has not shown any yet.

    Raises:
        ComputeError: The cluster fails.
    """
    known = operator.machine(site.name)
    place = site.machine.cluster.place
    if known is not None and (known.account, known.instance) == (place, node.id):
        return known
    keys = platforms.shown_keys(deployment.pools[site.pool].log(node.id))
    if not keys:
        return None
    return platform_identity.of_pod(keys, cluster=place, job=node.id)


def _kept_key(operator: Operator, site: SiteMachine) -> bytes | None:
    """The key of an enrolled site that is in its home; None if there is none."""
    kept = operator.remembered(site.name) if site.home.url else None
    member = BookFile(folder=operator.aggregator).read().member(site.name)
    if kept is None or member is None or member.identity != kept.hex():
        return None
    return kept


class _EnrolmentWait:
    """The start of a site's machine, until it has enrolled."""

    def __init__(
        self, deployment: Deployment, site: SiteMachine, launched: Node
    ) -> None:
        self._name, self._clock = site.pool, deployment.clock
        self._pool = deployment.pools[site.pool]
        self._launched = launched
        now = self._clock.monotonic()
        self._seen, self.end = now, now + ENROL_SECONDS
        self._next_log = now + _LOG_SECONDS

    def look(self, listed: NodesByPool) -> Node | None:
        """What its service knows of the machine; None if it does not list it."""
        # Others of this role may be listed, which have ended before.
        nodes = listed[self._name]
        return next((node for node in nodes if node.id == self._launched.id), None)

    def check(self, node: Node | None, told: str) -> None:
        """Raise an error if it has ended, failed or takes too long.

        Args:
            node: The machine, as it was looked for.
            told: Why it is still awaited.
        """
        now = self._clock.monotonic()
        if node is not None:
            self._seen = now
        elif now - self._seen <= _UNLISTED_SECONDS:
            return
        what, log = "has ended", ""
        if node is not None:
            is_there = node.state is not NodeState.GONE
            if is_there and now < min(self._next_log, self.end):
                return
            self._next_log = now + _LOG_SECONDS
            log = log_of(self._pool, node.id)
            what = "is not ready in time" if is_there else what
            if bootstrap.has_failed(log):
                what = "could not start the site"
            elif is_there and now < self.end:
                return
        raise ComputeError(
            f"{self._launched.name}: its machine {what}: {told}. Its console ends:\n"
            f"{bootstrap.end_of(log)}"
        )
