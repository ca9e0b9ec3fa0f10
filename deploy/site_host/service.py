"""``crossfed site up``: the agent and its node."""

import threading
from collections.abc import Callable
from pathlib import Path

from cloud_adapters.flower.node import FlowerNode
from cloud_adapters.flower.site import Leaves, agent_app, end_work
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.site_host import config as site_file, folder as site_folder
from deploy.site_host.agent import SiteAgent
from deploy.wiring import exchange
from federation.errors import JobError
from federation.ids import SiteId
from federation.protocols import Clock
from privacy import own_folder
from privacy.secagg.agreement import identity, roster
from privacy.secret_files import read_private


def serve(
    path: Path,
    *,
    stopped: threading.Event,
    leaves: Leaves,
    clock: Clock,
    listener: Callable[[str], None],
    begun: Callable[[FlowerNode], None] = lambda _node: None,
) -> None:
    """Take part in runs until ``stopped`` is set.

    Args:
        path: ``site.toml``.
        stopped: Ends it.
        leaves: Why it is about to end; None as long as it is not.
        clock: Of the agent.
        listener: Called with a word about what happens.
        begun: Called with the node before it connects.

    Raises:
        JobError: The configuration is wrong, or the roster does not pin this site's
            identity.
        KeyFileRefused: A key file is missing, open to others or damaged.
        SiteError: The aggregator is not the pinned one, or does not know this site.
        FederationError: Another agent works in the folder.
    """
    config = site_file.load(path)
    me = identity.load(config.identity)
    members = roster.load(config.roster)
    pinned = members.entry(SiteId(config.file.name)).public_key
    if pinned != me.public.key:
        raise JobError(
            f"{config.roster} pins another key for {config.file.name!r} than "
            f"{config.identity}: get the newest roster, or enrol again",
            key="roster",
        )
    authority = site_folder.authority(config)
    if config.certificate is not None:
        read_private(config.certificate)  # TLS would take a key that is open to others.
    agent = SiteAgent(
        config=config, identity=me, roster=members, clock=clock, listener=listener
    )
    scratch = config.folder / "scratch"
    with file_errors("make", config.folder):
        own_folder.make(config.folder)
        own_folder.close(config.folder, listener)
    with (
        site_folder.only_one(config.folder),
        exchange.opened(config.file.exchange, scratch, watch=agent.watch) as frames,
    ):
        node = FlowerNode(
            app=agent_app(agent, frames, leaves),
            address=config.file.aggregator.address,
            root_certificates=authority,
            key=site_folder.node_key(config.node_key),
            certificate=config.certificate,
            clock=clock,
            stopped=stopped,
            listener=listener,
        )
        begun(node)
        site_folder.keep_fresh(config, clock, stopped, listener)
        try:
            node.run()
            end_work()
        finally:
            agent.close()
