"""The coordinator as Flower's ServerApp: started by the aggregator's SuperExec."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from flwr.app import Context
from flwr.serverapp import Grid as FlowerApi, ServerApp

from cloud_adapters.flower import runtime as flower_runtime
from cloud_adapters.flower.grid import SUPERLINK_POLL_SECONDS, Delivery, FlowerGrid
from cloud_adapters.flower.handshake import SPARE_SECONDS, Attendance, tell
from cloud_adapters.flower_apps.apps import FlowerApps
from cloud_adapters.storage.disk.scratch import allocator
from cloud_adapters.transport.frames import Frames
from cloud_adapters.transport.relay_lines import RelayLines, fewest_nodes, nodes_of
from deploy import exit_codes
from deploy.aggregator_host import config as aggregator_file
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.deployed_run import Connect, DeployedRun
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.aggregator_host.handshake import SignedHandshake
from deploy.aggregator_host.joining import Door, SiteJoins, take_in
from deploy.aggregator_host.parties import Parties
from deploy.aggregator_host.run_queue import (
    Outcome,
    goes_on,
    is_to_stop,
    leave_outcome,
    note_slots,
)
from deploy.wiring import exchange
from federation.clock import SystemClock
from federation.errors import (
    FederationError,
    JobError,
    RunConflict,
    RunStopped,
)
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import Clock, Grid
from federation.rounds.schedule import waits_for_all
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult

_LOG = logging.getLogger(__name__)
_Read = TypeVar("_Read")

app = ServerApp()


@app.main()
def main(api: FlowerApi, context: Context) -> None:
    """Coordinate the run that the context names."""
    settings = context.run_config
    config = aggregator_file.load(Path(str(settings["config"])))
    run = RunFolder(Path(str(settings["folder"])))
    coordinate(api, run, config, str(context.run_id))


def coordinate(
    api: FlowerApi, run: RunFolder, config: AggregatorConfig, flower_run: str
) -> None:
    """Start or resume a run; write its outcome if nothing is left to do.

    Args:
        api: Flower's interface to the SuperLink.
        run: Folder of the run, with its job, checkpoints and events.
        config: What ``aggregator.toml`` says.
        flower_run: Number of this coordinator, as the service has noted it.

    Raises:
        RunConflict: Another coordinator works on it, and may not know yet that
            Flower has given it up: this one makes way, without an outcome.
        StoreUnavailable: The disk is full: there is no outcome either, and the run
            continues when there is room.
    """
    clock, doors = SystemClock(), list[Door]()

    def is_over() -> bool:
        """Look between two rounds whether to stop, and who may join."""
        stops = is_to_stop(run)
        for door in () if stops else doors:
            door.look()
        return stops

    try:
        deployed = DeployedRun(
            run,
            read_own(lambda: Parties.of_run(config.folder, run)),
            clock=clock,
            holder=flower_run,
            stop_requested=is_over,
            goes_on=goes_on,
            allocate=allocator(config.file.disk_mib, run.path / "scratch"),
        )
        with exchange.opened(
            config.file.exchange, run.path / "scratch", watch=deployed.watch
        ) as frames:
            wait = SiteWait(run=run)
            connect = _connector(api, config, frames, deployed, wait, clock=clock)
            tell_end = partial(_tell_end, api, deployed, config, clock)
            door = Door(flower_runtime.over(api), run, deployed, clock)
            doors.append(door)
            result = _run(deployed, run, connect, frames, tell_end)
    except SiteJoins as joins:
        take_in(run, joins, clock)
        raise
    except FederationError as error:
        if not goes_on(error):
            code = exit_codes.of_error(error)
            leave_outcome(run, Outcome(code=code, message=str(error)))
        raise
    code = exit_codes.BY_STATUS[result.status]
    leave_outcome(run, Outcome(code=code, message=result.status))


class ReplacedMeanwhile(Exception):
    """A file was replaced while this process started, which may not read it now.

    It has given up reading what is new in the aggregator's folder, with the secrets
    that are there. Another coordinator reads the file that is there now.
    """


def read_own(read: Callable[[], _Read]) -> _Read:
    """Read files of the aggregator's folder.

    Raises:
        ReplacedMeanwhile: One may not be read: another coordinator continues
            the run.
        FederationError: Whatever else is wrong with one.
    """
    try:
        return read()
    except FederationError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, PermissionError):
                raise ReplacedMeanwhile(str(error)) from error
            cause = cause.__cause__
        raise


def _run(
    deployed: DeployedRun,
    run: RunFolder,
    connect: Connect,
    frames: Frames,
    tell_end: Callable[[bytes], None],
) -> RunResult:
    """Run it, and then always clear the exchange and tell the sites that it is over.

    A last task says so, too, but not to a site that missed it, and not every run has
    one: it may end early, or have spare rounds.
    """
    try:
        result = deployed.run(connect)
    except RunConflict:  # The exchange is the other coordinator's.
        raise
    except FederationError as error:
        _tidy(run, frames)
        if not goes_on(error):
            outcome = exit_codes.status_of(exit_codes.of_error(error))
            _over(run, tell_end, deployed.sealed_end(outcome=outcome))
        raise
    _tidy(run, frames)
    _over(run, tell_end, deployed.sealed_end(outcome=result.status))
    return result


def _over(run: RunFolder, tell_end: Callable[[bytes], None], end: bytes) -> None:
    with run.locked():  # Or the service takes this process for dead meanwhile.
        tell_end(end)


def _tell_end(
    api: FlowerApi,
    deployed: DeployedRun,
    config: AggregatorConfig,
    clock: Clock,
    end: bytes,
) -> None:
    """Tell sites that no more tasks will come; relays pass it on to theirs."""
    relays = relays_of(deployed.job)
    behind = {name for names in relays.values() for name in names}
    agents = {each.name for each in deployed.job.sites if each.flower_app is None}
    told = agents - behind | relays.keys()
    try:
        enrolled = enrolled_nodes(config.folder)
        nodes = [enrolled[site] for site in enrolled if site in told]
        tell(flower_runtime.over(api), nodes, end, clock=clock)
    except Exception:  # noqa: BLE001 -- how the run has ended does not change
        _LOG.exception("the sites do not hear that the run has ended")


def _tidy(run: RunFolder, frames: Frames) -> None:
    run_id = run.run_id()
    if run_id is not None:
        job = run.read_spec()
        names = [*(s.name for s in job.sites), *(r.name for r in job.relays)]
        frames.end_run(run_id, [SiteId(name) for name in names])


@dataclass(kw_only=True)
class SiteWait:
    """Ends a coordinator that waits for sites, when its run is to stop or make way.

    A coordinator at work looks for that itself, after each round.

    Attributes:
        is_over: Whether the sites are there.
    """

    run: RunFolder
    is_over: bool = False

    def look(self) -> bool:
        """Look while the grid waits; this does not show that Flower has ended.

        Raises:
            RunStopped: The run is to end.
            TurnOver: It is to make way.
        """
        if not self.is_over and is_to_stop(self.run):
            raise RunStopped("the run was stopped while it waited for its sites")
        return False


def _connector(
    api: FlowerApi,
    config: AggregatorConfig,
    frames: Frames,
    deployed: DeployedRun,
    wait: SiteWait,
    *,
    clock: Clock,
) -> Connect:
    def connect(
        handshake: SignedHandshake,
        sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
    ) -> Grid:
        enrolled = read_own(lambda: enrolled_nodes(config.folder))
        known = known_nodes(enrolled, deployed.job, absent=handshake.absent)
        behind = relays_of(deployed.job)
        spare_seconds = SPARE_SECONDS if deployed.begun else math.inf
        grid = FlowerGrid(
            FlowerApps(flower_runtime.over(api), deployed.job, deployed.layout, known),
            [*nodes_of(sites, behind)],
            clock=clock,
            attendance=Attendance(
                handshake=handshake,
                known=known,
                enrolled=enrolled,
                required=fewest_nodes(sites, behind, required),
                quorum=fewest_nodes(sites, behind, quorum),
                grace=deployed.job.schedule.grace,
                replicas=deployed.job.schedule.replicas,
                connect_seconds=config.file.connect_seconds,
                spare_seconds=None if behind else spare_seconds,
                tell=deployed.note_connected,
                revoked=deployed.revoked,
            ),
            delivery=Delivery(
                frames=frames,
                ordered=waits_for_all(deployed.job),
                poll_seconds=SUPERLINK_POLL_SECONDS,
                asks_again=deployed.job.repeats_tasks,
            ),
            stopped=wait.look,
        )
        wait.is_over = True
        note_slots(wait.run, handshake.slots())
        for reason in handshake.absent.values():
            _LOG.warning("%s; the run continues without it", reason)
        if not behind:
            return grid
        absent = [*handshake.absent]
        return RelayLines(grid, behind, absent=absent, now=clock.monotonic)

    return connect


def relays_of(job: JobSpec) -> dict[SiteId, Sequence[SiteId]]:
    """The sites behind each relay of a job."""
    return {SiteId(each.name): [*map(SiteId, each.sites)] for each in job.relays}


def enrolled_nodes(folder: Path) -> dict[SiteId, int]:
    """Nodes of all enrolled sites and relays, from the aggregator's folder.

    Raises:
        BookDamaged: The record of sites cannot be read.
    """
    members = BookFile(folder=folder).read().members
    return {SiteId(each.site): int(each.node_id) for each in members}


def known_nodes(
    enrolled: Mapping[SiteId, int], job: JobSpec, *, absent: Collection[SiteId] = ()
) -> dict[SiteId, int]:
    """Nodes of enrolled sites that a handshake must exclude.

    An app of Flower cannot answer one: its site is known by the key of its node, which
    enrolment has bound to its name. Sites of other jobs are ignored.

    Args:
        enrolled: Nodes of all enrolled sites.
        job: Says who runs an app.
        absent: Sites that the run does without.

    Raises:
        JobError: A site of the job runs an app and is not enrolled.
    """
    agents = {site.name for site in job.sites if site.flower_app is None}
    asked = agents | {relay.name for relay in job.relays}
    known = {site: node for site, node in enrolled.items() if site not in asked}
    for index, site in enumerate(job.sites):
        if site.name not in agents | known.keys() | {*absent}:
            raise JobError(
                f"site {site.name!r} runs a Flower app and is not enrolled: see "
                "crossfed aggregator invite",
                key=f"sites[{index}].flower_app",
            )
    return known
