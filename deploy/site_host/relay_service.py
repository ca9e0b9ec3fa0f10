"""``crossfed site up`` for a relay: it serves the sites of its cloud.

To the aggregator it is a node like a site's, to its sites an HTTPS server.
"""

import threading
from collections.abc import Callable

from flwr.clientapp import ClientApp

from cloud_adapters.flower.node import FlowerNode
from cloud_adapters.flower.relay import relay_app
from cloud_adapters.relays.server import CloudServer, server_context
from cloud_adapters.relays.task_queue import TaskQueue
from deploy.site_host import folder as site_folder, relay_certificate
from deploy.site_host.config import ServeSpec, SiteConfig
from deploy.site_host.departure import Departure
from deploy.site_host.relay_agent import RelayAgent
from deploy.wiring import exchange
from federation.addresses import parse_address
from federation.ids import SiteId
from federation.protocols import Clock
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster


def serve_sites(
    config: SiteConfig,
    serve: ServeSpec,
    keys: tuple[Identity, Roster],
    departure: Departure,
    *,
    connect: Callable[[ClientApp], FlowerNode],
    clock: Clock,
    listener: Callable[[str], None],
    begun: Callable[[FlowerNode], None],
) -> None:
    """Pass questions on until the relay is to leave.

    Args:
        config: Its ``site.toml``.
        serve: Whom it serves, and where.
        keys: Its identity, and the roster that pins it.
        departure: Ends it.
        connect: Makes the node that brings the aggregator's tasks to an app.
        clock: Tells time.
        listener: Called with a word about what happens.
        begun: Called with the node before it connects.

    Raises:
        JobError: A file holds no certificate.
        KeyFileRefused: A key file is open to others or damaged.
        SiteError: The aggregator is not the pinned one, or does not know this relay.
        FederationError: Another process has the port, the folder cannot be written, or
            the store of ``[exchange]`` cannot be opened.
    """
    own = config.folder.resolve() / "relay"
    context = server_context(site_folder.authority(config))
    relay_certificate.prepare(own, serve.hosts, context, clock)
    queue = TaskQueue([SiteId(name) for name in serve.sites], clock)
    identity, roster = keys
    host, port = parse_address(serve.listen, key="serve.listen")
    scratch = config.folder / "scratch"
    server = CloudServer(
        queue,
        context,
        host=host,
        port=port,
        clock=clock,
        scratch=config.folder / "scratch-answers",
    )
    with (
        exchange.opened(config.file.exchange, scratch) as frames,
        server.listening(),
    ):
        agent = RelayAgent(
            config=config,
            identity=identity,
            roster=roster,
            ask=queue.ask,
            served=queue.sites,
            clock=clock,
            frames=frames,
            stopped=departure.stopped,
            listener=listener,
        )
        node = connect(relay_app(agent))
        listener(
            f"serves {', '.join(serve.sites)} at {serve.listen}; they pin "
            f"{own / 'ca.crt'}"
        )
        again = (own, serve.hosts, context, clock, departure.stopped)
        threading.Thread(
            target=relay_certificate.keep_certified, args=again, daemon=True
        ).start()
        site_folder.keep_fresh(config, clock, departure.stopped, listener)
        begun(node)
        node.run()
