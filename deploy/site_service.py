"""``crossfed site up``: the agent, and its place in the federation."""

import threading
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cloud_adapters.flower_node import FlowerNode
from cloud_adapters.flower_site import agent_app
from deploy import site_file
from deploy.site_agent import SiteAgent, only_one
from federation.clock import SystemClock
from federation.errors import JobError
from federation.ids import SiteId
from privacy.secagg import identity, roster
from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private


def serve(
    path: Path, *, stopped: threading.Event, listener: Callable[[str], None]
) -> None:
    """Take part in runs until ``stopped`` is set.

    Args:
        path: ``site.toml``.
        stopped: Ends it.
        listener: Called with a word about what happens.

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
            f"{config.roster} pins another key for {config.file.name!r} than that of "
            f"{config.identity}: fetch the newest roster, or enrol again",
            key="roster",
        )
    try:
        authority = config.authority.read_bytes()
    except OSError as error:
        raise JobError(
            f"cannot read {config.authority}: {error.strerror}",
            key="aggregator.authority",
        ) from error
    with only_one(config.folder):
        clock = SystemClock()
        agent = SiteAgent(config=config, identity=me, roster=members, clock=clock)
        node = FlowerNode(
            app=agent_app(agent),
            address=config.file.aggregator.address,
            root_certificates=authority,
            key=_node_key(config.node_key),
            clock=clock,
            stopped=stopped,
            listener=listener,
        )
        try:
            node.run()
        finally:
            agent.close()


def _node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileRefused(f"{path} is no key of a node: enrol this site again")
    return key
