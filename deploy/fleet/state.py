"""A deployment's folder: who owns it, what was launched, and where its parties are.

``deployment.json``: the owner's name, which every node carries, and of the last launch
of each role the number, and after how long its node ends. ``aggregator/``: the
aggregator's folder. ``sites/NAME/``: folders of sites that run on this host.
``operator.pem``, ``operator.json``: see ``deploy.fleet.roster_operator``.
``nodes/``: processes of this host. ``lock``: held by the command that changes any of
it. ``ended``: there after ``crossfed down``.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.local_files import check_own
from cloud_adapters.compute.pool import ComputePool, Node
from cloud_adapters.extras import naming_extras
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.fleet import reconcile
from deploy.fleet.machine_spec import AWS, KUBERNETES, LOCAL
from deploy.fleet.spec import DeploymentPlan
from federation import durable_files, folder_lock
from federation.errors import CorruptObject, StoreUnavailable, os_errors
from federation.protocols import Clock
from privacy import own_folder
from privacy.keystream import RandomBytes

_RECORD = "deployment.json"
_DAMAGED = (
    "restore it, or end the nodes with crossfed down --any-owner, which begins a new "
    "one"
)

_ENDED = "ended"
_OWNER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLaunch:
    """The last launch of a role, and after how long its node ends."""

    role: str
    number: int
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """A cloud's compute service; the file may name another one later."""

    pool: str
    provider: str
    region: str
    project: str
    endpoint: str
    context: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """Who owns a folder, what it has launched, and where."""

    name: str
    owner: str
    launches: tuple[LastLaunch, ...] = ()
    places: tuple[PoolPlace, ...] = ()


def read_record(folder: Path) -> DeploymentRecord | None:
    """Read the record of a deployment's folder; None if there is none.

    Raises:
        CorruptObject: It is damaged.
        StoreUnavailable: It cannot be read.
    """
    return durable_files.read_json(folder / _RECORD, DeploymentRecord, advice=_DAMAGED)


def write_record(folder: Path, record: DeploymentRecord) -> None:
    """Write the record of a deployment's folder.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    durable_files.write_json(folder / _RECORD, record)


def pools_of(plan: DeploymentPlan, clock: Clock) -> Mapping[str, ComputePool]:
    """Open every compute service that a deployment names or has used, this host first.

    Raises:
        ComputeError: The name of a region or a profile is wrong.
        MissingExtra: The library of one is not installed.
    """
    # A user's own models and data are found from where the deployment file is.
    here = plan.path.parent.absolute()
    local = LocalPool(folder=nodes_folder(plan), working_folder=here, clock=clock)
    clouds = {name: _cloud(place, clock) for name, place in places(plan).items()}
    return {LOCAL: local, **clouds}


def places(plan: DeploymentPlan) -> Mapping[str, PoolPlace]:
    """Clouds that the file names, then those that only the folder's record does."""
    try:
        record = read_record(plan.folder)
    except CorruptObject:  # ``deployment.opened`` raises it.
        record = None
    before = {} if record is None else {each.pool: each for each in record.places}
    found = named_places(plan)
    return {**found, **{k: v for k, v in before.items() if k not in found}}


def named_places(plan: DeploymentPlan) -> Mapping[str, PoolPlace]:
    """Clouds that the file names, by the names of their pools."""
    return {
        site.pool: PoolPlace(
            pool=site.pool,
            provider=site.provider,
            region=site.machine.region,
            project=site.machine.project,
            endpoint=site.machine.endpoint,
            context=site.machine.cluster.context,
            namespace=site.machine.cluster.namespace,
        )
        for site in plan.file.sites
        if site.pool != LOCAL
    }


def nodes_folder(plan: DeploymentPlan) -> Path:
    """Folder of the nodes of this host."""
    return plan.folder / "nodes"


def _cloud(place: PoolPlace, clock: Clock) -> ComputePool:
    with naming_extras():
        if place.provider == KUBERNETES:
            from cloud_adapters.compute import kube_jobs  # noqa: PLC0415 -- the extra

            return kube_jobs.connect(
                place.context, place.namespace, clock=clock, endpoint=place.endpoint
            )
        if place.provider == AWS:
            from cloud_adapters.compute import ec2  # noqa: PLC0415 -- the extra aws

            return ec2.connect(place.region, place.endpoint, clock=clock)
        from cloud_adapters.compute import gce  # noqa: PLC0415 -- the extra gcp

        return gce.connect(place.project, place.endpoint)


@dataclass(kw_only=True)
class Deployment:
    """A deployment that this process may change.

    Attributes:
        plan: What is wanted.
        pools: Compute services by their names, as ``SiteMachine.pool``.
        clock: Tells time.
        owner: Random name of this folder; every node carries it.
        random_bytes: ``os.urandom``.
        held_back: Roles of which no machine is launched now: the last ones could not
            start.
        launch_first: Roles whose new machine is launched before the old one ends, which
            goes on if there is no capacity. Their sites have a home, whose lease lets
            one of them work.
    """

    plan: DeploymentPlan
    pools: Mapping[str, ComputePool]
    clock: Clock
    owner: str
    random_bytes: RandomBytes = os.urandom
    held_back: frozenset[str] = frozenset()
    launch_first: frozenset[str] = frozenset()
    _launches: dict[str, LastLaunch] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self.plan.file.name

    @property
    def is_ended(self) -> bool:
        """Whether ``crossfed down`` was given, and no ``crossfed up`` since."""
        return (self.plan.folder / _ENDED).exists()

    def note_ended(self) -> None:
        """Write down that no node is wanted, for those who keep the deployment.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        if self.plan.folder.exists():
            durable_files.replace_file(self.plan.folder / _ENDED, [b""])

    def note_wanted(self) -> None:
        """Write down that its nodes are wanted.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        with file_errors("remove", self.plan.folder / _ENDED):
            (self.plan.folder / _ENDED).unlink(missing_ok=True)

    def listed(self) -> Mapping[str, Sequence[Node]]:
        """All nodes of the deployment, by pool: one request to each service.

        Raises:
            ComputeError: A service fails.
        """
        labels = {reconcile.DEPLOYMENT: self.name}
        return {name: pool.nodes(labels) for name, pool in self.pools.items()}

    def launched(self, role: str) -> int:
        """Number of the last launch of a role; 0 for none."""
        last = self._launches.get(role)
        return 0 if last is None else last.number

    def launched_for(self, role: str, number: int) -> float | None:
        """Seconds after which the node of a launch ends; None if nobody knows."""
        last = self._launches.get(role)
        return last.max_seconds if last is not None and last.number == number else None

    def note_launch(self, role: str, number: int, max_seconds: float) -> None:
        """Write down that a role is about to be launched with a number.

        Args:
            role: Name of the node: a site's, or ``aggregator``.
            number: Counts the launches for the role, from 1.
            max_seconds: After so long, the node ends by itself.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        self._launches[role] = LastLaunch(
            role=role, number=number, max_seconds=max_seconds
        )
        self._write(places(self.plan))

    def forget_places(self) -> None:
        """Stop looking where only an earlier file has named a cloud: nothing is left.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        named = named_places(self.plan)
        # Most deployments end as they began: nothing is written on a full disk.
        if self.plan.folder.exists() and places(self.plan) != named:
            self._write(named)

    def _write(self, found: Mapping[str, PoolPlace]) -> None:
        record = DeploymentRecord(
            name=self.name,
            owner=self.owner,
            launches=tuple(self._launches.values()),
            places=tuple(found.values()),
        )
        write_record(self.plan.folder, record)


@contextmanager
def opened(
    plan: DeploymentPlan,
    *,
    random_bytes: RandomBytes,
    clock: Clock,
    any_owner: bool = False,
    make: bool = True,
) -> Iterator[Deployment]:
    """Hold a deployment's folder, which is made if there is none.

    It is not made if a service fails, or if nodes of this name run from another one.

    Args:
        plan: The deployment.
        random_bytes: ``os.urandom``.
        clock: Tells time.
        any_owner: Whether a damaged record counts as a lost one: the nodes of its owner
            are then another's.
        make: Whether to make the folder. If not, and there is none, the deployment has
            an owner that no node carries, and nothing is held.

    Raises:
        ComputeError: A service fails, nodes run from another folder, or another user
            could write to this one.
        FederationError: Another command works on it.
        CorruptObject: Its record is damaged, or belongs to another deployment.
        StoreUnavailable: The folder cannot be made or written.
    """
    folder, pools = plan.folder, pools_of(plan, clock)
    if not folder.exists():
        if not make:
            owner = random_bytes(_OWNER_BYTES).hex()
            yield Deployment(
                plan=plan,
                pools=pools,
                clock=clock,
                owner=owner,
                random_bytes=random_bytes,
            )
            return
        for pool in pools.values():
            nodes = pool.nodes({reconcile.DEPLOYMENT: plan.file.name})
            reconcile.check_owner(nodes, "", plan.file.name)
    advice = "name a folder that this user can make and write to"
    with os_errors(StoreUnavailable, f"make {folder}", advice):
        own_folder.make(folder)
    check_own(folder)
    complaint = f"another crossfed command works on {folder}: wait until it has ended"
    with folder_lock.hold(folder / "lock", complaint):
        try:
            record = read_record(folder)
        except CorruptObject:
            if not any_owner:
                raise
            record = None
        if record is None:
            owner = random_bytes(_OWNER_BYTES).hex()
            record = DeploymentRecord(name=plan.file.name, owner=owner)
            write_record(folder, record)
        if record.name != plan.file.name:
            raise CorruptObject(
                f"{folder} belongs to deployment {record.name!r} and not to "
                f"{plan.file.name!r}: name another folder"
            )
        yield Deployment(
            plan=plan,
            pools=pools,
            clock=clock,
            owner=record.owner,
            random_bytes=random_bytes,
            _launches={launch.role: launch for launch in record.launches},
        )
