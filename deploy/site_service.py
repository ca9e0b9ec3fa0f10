"""``crossfed site up``: the agent, and its place in the federation."""

import threading
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cloud_adapters.flower_node import FlowerNode
from cloud_adapters.flower_site import agent_app
from deploy import enrolment_site, exchange, site_file
from deploy.site_agent import SiteAgent, only_one
from deploy.site_file import SiteConfig
from federation.clock import SystemClock
from federation.errors import FederationError, JobError
from federation.ids import SiteId
from federation.protocols import Clock
from privacy.secagg import identity, roster
from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private

RENEWAL_LOOK_SECONDS = 6 * 3600.0


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
    clock = SystemClock()
    agent = SiteAgent(config=config, identity=me, roster=members, clock=clock)
    scratch = config.folder / "scratch"
    with (
        only_one(config.folder),
        exchange.opened(config.file.exchange, scratch, watch=agent.watch) as frames,
    ):
        node = FlowerNode(
            app=agent_app(agent, frames),
            address=config.file.aggregator.address,
            root_certificates=authority,
            key=_node_key(config.node_key),
            certificate=config.certificate,
            clock=clock,
            stopped=stopped,
            listener=listener,
        )
        renewal = threading.Thread(
            target=_renew, args=(config, clock, stopped, listener), daemon=True
        )
        renewal.start()
        try:
            node.run()
        finally:
            agent.close()


def _renew(
    config: SiteConfig,
    clock: Clock,
    stopped: threading.Event,
    listener: Callable[[str], None],
) -> None:
    """Renew the certificate when it is due, for as long as the agent runs."""
    while True:
        try:
            found = enrolment_site.renew_when_due(config, clock=clock)
        except FederationError as error:
            listener(f"the certificate could not be renewed: {error}")
        else:
            if found is not None:
                listener("the certificate was renewed")
        if stopped.wait(RENEWAL_LOOK_SECONDS):
            return


def _node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileRefused(f"{path} is no key of a node: enrol this site again")
    return key
