"""Whether a site can reach the relay of its cloud, or whom a relay serves."""

from collections.abc import Iterator

from cloud_adapters.relays.node import knock
from deploy.doctor.checks import Check, ok, or_problem
from deploy.site_host import folder as site_folder
from deploy.site_host.config import SiteConfig


@or_problem("relay", "start the relay, and compare [relay] with its [serve]")
def checks(config: SiteConfig) -> Iterator[Check]:
    """Check the line to the relay; nothing if the site has none.

    The relay learns that the site is there; no question is taken from it.
    """
    serve, relay = config.file.serve, config.file.relay
    if serve is not None:
        yield ok("relay", f"serves {', '.join(serve.sites)} at {serve.listen}")
    if relay is not None:
        authority = site_folder.relay_authority(config, relay)
        knock(relay.address, authority, config.certificate)
        yield ok("relay", f"{relay.address} serves this site")
