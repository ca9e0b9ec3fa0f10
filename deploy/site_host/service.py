"""``crossfed site up``: the agent and its node."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

from flwr.clientapp import ClientApp

from cloud_adapters.compute import notices
from cloud_adapters.compute.notices import Look
from cloud_adapters.flower.node import FlowerNode
from cloud_adapters.flower.site import agent_app
from cloud_adapters.relays.node import GivenAnswer, RelayedNode
from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.transport.frames import Frames
from cloud_adapters.transport.task_work import answer_frame, end_work
from deploy.site_host import (
    config as site_file,
    enrolment_machine,
    folder as site_folder,
    home as site_home,
    machine_use,
    ranks,
    site_page,
)
from deploy.site_host.agent import SiteAgent
from deploy.site_host.config import SiteConfig
from deploy.site_host.departure import Departure, watch
from deploy.site_host.machine_use import UseLog
from deploy.site_host.relay_service import serve_sites
from deploy.wiring import exchange
from federation.errors import JobError
from federation.ids import SiteId
from federation.protocols import Buffer, Clock
from privacy import own_folder
from privacy.secagg.agreement import identity, roster
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster
from privacy.secret_files import read_private

# How to ask the cloud that runs the machine, by ``compute.notices`` in site.toml.
_LOOKS: Mapping[str, Callable[[Clock, Callable[[str], None]], Look | None]] = {
    "none": lambda _clock, _listener: None,
    "aws": notices.Ec2Notices,
    "gcp": lambda _clock, _listener: notices.gce(),
}


class SiteNode(Protocol):
    """What serves a site: over Flower, or behind a relay."""

    def run(self) -> None:
        """Serve until the site is to leave."""
        ...

    def leave(self) -> None:
        """Say that it leaves, within a short time."""
        ...


def serve(
    path: Path,
    *,
    departure: Departure,
    clock: Clock,
    listener: Callable[[str], None],
    begun: Callable[[SiteNode], None] = lambda _node: None,
    standby: Callable[[], None] = lambda: None,
    take_over: bool = False,
) -> None:
    """Take part in runs until the site is to leave.

    Args:
        path: ``site.toml``.
        departure: Ends it, and says why.
        clock: Clock of the agent.
        listener: Called with a word about what happens.
        begun: Called with the node before it connects.
        standby: Called before the site waits for the machine that holds its home.
        take_over: Do not wait for it.

    Raises:
        JobError: The configuration is wrong, or the roster does not pin this site's
            identity.
        KeyFileRefused: A key file is missing, open to others or damaged.
        SiteError: The aggregator is not the pinned one, or does not know this site.
        HomeConflict: Another machine has taken over.
        FederationError: Another agent works in the folder.
    """
    config = site_file.load(path)
    ranks.check_gpus(config.file)
    if not config.file.home.url:
        check_keys(config)  # Before there is a folder.
    with file_errors("make", config.folder):
        own_folder.make(config.folder)
        own_folder.close(config.folder, listener)
    with site_folder.only_one(config.folder):
        if config.file.home.url:
            standby()
        with site_home.entered(
            config,
            departure=departure,
            clock=clock,
            listener=listener,
            take_over=take_over,
        ) as held:
            if held is not None:
                with (
                    site_folder.noting_end(held.folder),
                    site_page.served(held, clock=clock, listener=listener),
                ):
                    _serve(held, departure, clock=clock, listener=listener, begun=begun)


def check_keys(config: SiteConfig) -> tuple[Identity, Roster]:
    """Read a site's identity and the roster that pins it. Raises like ``serve``."""
    me = identity.load(config.identity)
    members = roster.load(config.roster)
    pinned = members.entry(SiteId(config.file.name)).public_key
    if pinned != me.public.key:
        raise JobError(
            f"{config.roster} pins another key for {config.file.name!r} than "
            f"{config.identity}: get the newest roster, or enrol again",
            key="roster",
        )
    if config.certificate is not None:
        read_private(config.certificate)  # TLS would take a key that is open to others.
    return me, members


def _serve(
    config: SiteConfig,
    departure: Departure,
    *,
    clock: Clock,
    listener: Callable[[str], None],
    begun: Callable[[SiteNode], None],
) -> None:
    me, members = check_keys(config)
    if config.file.serve is not None:
        serve_sites(
            config,
            config.file.serve,
            (me, members),
            departure,
            connect=partial(
                _flower_node, config, departure, clock=clock, listener=listener
            ),
            clock=clock,
            listener=listener,
            begun=begun,
        )
        return
    agent = SiteAgent(
        config=config,
        identity=me,
        roster=members,
        clock=clock,
        listener=listener,
        departure=departure,
    )
    if config.file.roster_signer:
        agent.refresh = partial(
            enrolment_machine.refresh, config, clock=clock, listener=listener
        )
    log = _use_log(config, departure, clock)
    if log is not None:
        agent.energy = log.energy_so_far
    scratch = config.folder / "scratch"
    with exchange.opened(config.file.exchange, scratch, watch=agent.watch) as frames:
        node = _node(config, agent, frames, departure, clock=clock, listener=listener)
        begun(node)
        site_folder.keep_fresh(config, clock, departure.stopped, listener)
        look = _LOOKS[config.file.compute.notices](clock, listener)
        if look is not None:
            watch(look, departure, clock, listener)
        try:
            with machine_use.measured(log, listener) if log else nullcontext():
                node.run()
                end_work()
        finally:
            agent.close()


def _use_log(config: SiteConfig, departure: Departure, clock: Clock) -> UseLog | None:
    """Log what the machine does, if the operator has not switched that off."""
    if not config.file.compute.measure:
        return None
    return UseLog(
        folder=config.folder,
        clock=clock,
        is_at_work=lambda: departure.is_at_work,
        read=machine_use.Machine().read,
        grams_per_kwh=config.file.compute.grams_per_kwh,
    )


def _node(
    config: SiteConfig,
    agent: SiteAgent,
    frames: Frames,
    departure: Departure,
    *,
    clock: Clock,
    listener: Callable[[str], None],
) -> SiteNode:
    """Make what brings tasks to a site: from its relay, or from the aggregator."""
    if config.file.relay is not None:
        return RelayedNode(
            introduce=agent.introduce,
            answer=partial(_answer, agent, departure),
            address=config.file.relay.address,
            authority=site_folder.relay_authority(config, config.file.relay),
            certificate=config.certificate,
            stopped=departure.stopped,
            last=departure.last,
            listener=listener,
            is_replaced=departure.is_replaced,
            scratch=config.folder / "scratch",
            heard=partial(site_folder.note_contact, config.folder),
        )
    app = agent_app(agent, frames, departure.at_once, departure.after_this)
    return _flower_node(config, departure, app, clock=clock, listener=listener)


def _flower_node(
    config: SiteConfig,
    departure: Departure,
    app: ClientApp,
    *,
    clock: Clock,
    listener: Callable[[str], None],
) -> FlowerNode:
    """Make what brings the aggregator's tasks to a site or a relay."""
    return FlowerNode(
        app=app,
        address=config.file.aggregator.address,
        root_certificates=site_folder.authority(config),
        key=site_folder.node_key(config.node_key),
        certificate=config.certificate,
        clock=clock,
        stopped=departure.stopped,
        last=departure.last,
        listener=listener,
        is_replaced=departure.is_replaced,
        max_runs=config.file.max_runs,
        heard=partial(site_folder.note_contact, config.folder),
    )


def _answer(
    agent: SiteAgent, departure: Departure, frame: Buffer, seconds: float
) -> GivenAnswer:
    """Answer a task that a relay has passed on."""
    body, lasts = answer_frame(
        agent,
        frame,
        seconds,
        leaves=departure.at_once,
        leaves_after=departure.after_this,
    )
    return GivenAnswer(body=body, lasts=lasts)
