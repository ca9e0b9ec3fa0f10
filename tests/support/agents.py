"""Site agents with keys and folders, and a grid that reaches them through bytes."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from support.deployment import wait_for

from cloud_adapters.local.inproc_grid import Fault, InProcessGrid, no_fault
from deploy.aggregator_host.handshake import SignedHandshake
from deploy.aggregator_host.parties import Parties
from deploy.site_host import config as site_file
from deploy.site_host.agent import SiteAgent
from deploy.site_host.config import SiteConfig
from federation.clock import SystemClock
from federation.errors import FederationError
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    RoundTask,
    SecureTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Clock
from federation.rounds.failures import failure
from federation.wire import frame as wire
from privacy.membership import introduction
from privacy.membership.introduction import Introduction, Proposal
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.identity import Identity, generate
from privacy.secagg.agreement.roster import RELAY, SITE, Roster, RosterEntry

RUN_ID = RunId("20260102-030405-abcdef")

# What a rehearsal of small jobs on public data needs.
OPEN_POLICY: Mapping[str, Any] = {
    "privacy": "none",
    "secure_aggregation": False,
    "accept_two_sites": True,
    "accept_dropouts": True,
    "max_clip_norm": 100.0,
    "total_epsilon": 1000.0,
    "functions": [
        "clients.models:*",
        "clients.frozen_features:oriented_gradients",
        "clients.data:digits",
        "support.small_jobs:blobs",
    ],
}


@dataclass(frozen=True, kw_only=True)
class Consortium:
    """The keys of an aggregator and its sites.

    Attributes:
        aggregator: The aggregator's.
        sites: Those of the sites.
        roster: Pins all of them.
    """

    aggregator: Identity
    sites: Mapping[str, Identity]
    roster: Roster

    @property
    def parties(self) -> Parties:
        """The aggregator's view."""
        return Parties(identity=self.aggregator, roster=self.roster)


def consortium(
    *names: str, relays: Collection[str] = (), legal_form: str = ""
) -> Consortium:
    """Make everybody's keys; ``relays`` are those of the names that are no sites."""
    aggregator = generate(os.urandom)
    sites = {name: generate(os.urandom) for name in names}
    return Consortium(
        aggregator=aggregator,
        sites=sites,
        roster=Roster(
            serial=1,
            aggregator_organisation="office",
            aggregator_key=aggregator.public.key,
            sites=tuple(
                RosterEntry(
                    site=SiteId(name),
                    organisation=f"{name}{legal_form}",
                    public_key=identity.public.key,
                    role=RELAY if name in relays else SITE,
                )
                for name, identity in sorted(sites.items())
            ),
        ),
    )


def site_config(folder: Path, name: str, **tables: Any) -> SiteConfig:
    """Write and read a ``site.toml``; tables replace those of an open site."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": name,
        "aggregator": {"address": "127.0.0.1:1", "authority": "ca.crt"},
        "policy": OPEN_POLICY,
    }
    path = folder / "site.toml"
    path.write_text(tomli_w.dumps(document | tables))
    return site_file.load(path)


def agent(
    folder: Path,
    name: str,
    members: Consortium,
    *,
    clock: Clock | None = None,
    **tables: Any,
) -> SiteAgent:
    """A site's agent, as it is after a start of its process."""
    config = site_config(folder / name, name, **tables)
    roster.save(members.roster, config.roster)
    return SiteAgent(
        config=config,
        identity=members.sites[name],
        roster=members.roster,
        clock=clock or SystemClock(),
    )


def proposal(job: JobSpec, **changes: Any) -> Proposal:
    """Propose a job as an aggregator of this release does."""
    made = Proposal(
        version=introduction.VERSION,
        run_id=RUN_ID,
        job=tomli_w.dumps(job_file.document(job)),
        release=introduction.release(),
        code_hash=code_hash().hex(),
        nonce="00" * 16,
    )
    return replace(made, **changes)


def propose(site: SiteAgent, members: Consortium, made: Proposal) -> Introduction:
    """Bring a proposal to a site, and read what it answers."""
    sealed = introduction.seal_proposal(made, members.aggregator)
    answer = site.introduce(sealed)
    return introduction.open_introduction(answer, members.roster, sealed)


class AgentGrid:
    """Agents that a coordinator reaches as through Flower: by bytes, and no more.

    Attributes:
        agents: The agents by site; put another in its place to restart a site.
        seen: Every task that was sent.
        questions: What coordinators have asked all agents, in order.
        at_work: Sites that have a task now.
    """

    def __init__(self, agents: Mapping[str, SiteAgent]) -> None:
        """Connect nobody yet."""
        self.agents = dict(agents)
        self.seen: list[Task] = []
        self.questions: list[bytes] = []
        self.at_work: list[SiteId] = []
        self._grids: list[InProcessGrid] = []

    def end(self) -> None:
        """End the grids of all coordinators, and wait for sites that are at work."""
        while self._grids:
            self._grids.pop().close()
        wait_for(lambda: not self.at_work, "no site is at work")

    @contextmanager
    def connected(self) -> Iterator["AgentGrid"]:
        """Close the agents at the end."""
        try:
            yield self
        finally:
            for each in self.agents.values():
                each.close()

    def connect(
        self,
        handshake: SignedHandshake,
        sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
        fault: Fault = no_fault,
    ) -> InProcessGrid:
        """Call the roll, as ``deployed_run.Connect`` does; then spoil answers."""
        assert quorum <= required <= len(sites)
        while True:
            question = handshake.question
            self.questions.append(question)
            for name in (each for each in sites if each not in handshake.absent):
                assert handshake.site_of(self.agents[name].introduce(question)) == name
            if not handshake.move_on():
                break
        assert len(sites) - len(handshake.absent) >= required
        handlers = {
            name: _Far(self, name, is_absent=name in handshake.absent) for name in sites
        }
        self._grids.append(InProcessGrid(handlers, clock=SystemClock(), fault=fault))
        return self._grids[-1]


@dataclass(frozen=True)
class _Far:
    grid: AgentGrid
    name: SiteId
    is_absent: bool

    def handle(self, task: Task) -> SiteMessage:
        if self.is_absent:
            return failure(task, FailureKind.UNREACHABLE, "has not connected")
        arrived = wire.decode(wire.encode_bytes(task))
        assert isinstance(arrived, RoundTask | SecureTask)
        self.grid.seen.append(arrived)
        self.grid.at_work.append(self.name)
        try:
            answer = self.grid.agents[self.name].answer(arrived)
        except FederationError as error:  # As in cloud_adapters.flower.site.
            answer = SiteFailure(
                run_id=task.run_id,
                round_index=task.round_index,
                site=task.site,
                kind=FailureKind.CRASHED,
                message=wire.one_line(f"{type(error).__name__}: {error}"),
            )
        finally:
            self.grid.at_work.remove(self.name)
        found = wire.decode(wire.encode_bytes(answer))
        assert not isinstance(found, RoundTask | SecureTask)
        return found

    def close(self) -> None:
        """Nothing to do: agents outlive a grid."""
