"""Sites that enrol while a run trains, and join it between two rounds.

Between two rounds the coordinator asks each newcomer that the run's sites have agreed
on (``schedule.open_to``), with the job and that site in it. If it accepts, the run's
job and roster become the new ones, and the next coordinator proposes them to all: the
others accept by themselves what ``federation.job.job_extension`` allows. Nobody waits
for a newcomer. Every other one hears why it cannot join.
"""

import math
from dataclasses import dataclass, field, replace

from flwr.serverapp import Grid as FlowerApi

from cloud_adapters.flower.handshake import Candidate, tell
from deploy.aggregator_host import newcomers, run_queue
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.aggregator_host.newcomers import Newcomer
from deploy.aggregator_host.run_queue import TurnOver
from deploy.wiring import extension
from federation.durable_files import replace_file
from federation.ids import SiteId
from federation.job.job_extension import joining_fault
from federation.job.spec import JobSpec, SiteSpec
from federation.protocols import Clock
from monitoring.runs.run_folder import RunFolder
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.roster import Roster

# A site that has refused is asked again after so long: its operator may have seen why.
AGAIN_SECONDS = 300.0


class SiteJoins(TurnOver):
    """A site joins a run, which continues with it."""

    def __init__(self, job: JobSpec, members: Roster) -> None:
        """Keep the job and the roster with the site."""
        super().__init__(f"site {job.sites[-1].name!r} joins the run")
        self.job, self.members = job, members


@dataclass
class Door:
    """Lets newcomers into a run, as its coordinator looks between two rounds.

    Attributes:
        api: Flower's own grid.
        run: The run's folder.
        deployed: Its coordinator.
        clock: Tells time.
    """

    api: FlowerApi
    run: RunFolder
    deployed: DeployedRun
    clock: Clock
    _asked: dict[str, tuple[Candidate, JobSpec]] = field(
        default_factory=dict, init=False
    )
    # When each that was turned away may be asked again.
    _again: dict[str, float] = field(default_factory=dict, init=False)

    def look(self) -> None:
        """See who is there, and what those have answered that were asked.

        Raises:
            SiteJoins: One has accepted the run.
        """
        found, now = newcomers.read(self.run), self.clock.monotonic()
        sites = () if found is None else found.sites
        due = [one for one in sites if now >= self._again.get(one.site, -math.inf)]
        if found is None or not due:
            return
        online = {*self.api.get_node_ids()}
        for one in due:
            if int(one.node) in online:
                self._look_at(one, roster.parse(found.roster), now)

    def _look_at(self, one: Newcomer, members: Roster, now: float) -> None:
        if one.site not in self._asked:
            job = self.deployed.job
            site = SiteSpec(name=one.site, cloud=one.cloud)
            longer = replace(job, sites=(*job.sites, site))
            if turned := joining_fault(job, longer):
                self._again[one.site] = math.inf
                self.deployed.warn(f"site {one.site!r} enrolled meanwhile: {turned}")
                end = self.deployed.sealed_end(reason=turned)
                tell(self.api, [int(one.node)], end, clock=self.clock)
                return
            handshake = self.deployed.with_site(longer, members)
            asked = Candidate(self.api, handshake, SiteId(one.site), int(one.node))
            self._asked[one.site] = asked, longer
        asked, longer = self._asked[one.site]
        fault = asked.look(now)
        if fault == "":
            raise SiteJoins(longer, members)
        if fault is not None:
            del self._asked[one.site]
            self._again[one.site] = now + AGAIN_SECONDS
            self.deployed.warn(f"site {one.site!r} does not join the run: {fault}")


def take_in(run: RunFolder, found: SiteJoins, clock: Clock) -> None:
    """Give a run that no process works on a job and a roster with one more site.

    Raises:
        StoreUnavailable: Its folder cannot be written.
    """
    replace_file(run.path / "roster.toml", [roster.dumps(found.members).encode()])
    extension.record(found.job, run, clock)
    run_queue.note_job(run)
