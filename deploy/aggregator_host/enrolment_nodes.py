"""Register and unregister nodes at the SuperLink of this host, for enrolment."""

from cloud_adapters.flower.facts import SuperLinkUnavailable
from cloud_adapters.net.ports import LOOPBACK
from cloud_adapters.superlink.control import FlowerControl
from deploy.aggregator_host import host_secrets
from deploy.aggregator_host.config import AggregatorConfig

_SHUT_OUT = "unregistered"


def register(control: FlowerControl, public_key: bytes) -> int:
    """Register a node; a registered one keeps its number.

    Args:
        control: The SuperLink.
        public_key: PEM, on the curve P-384.

    Returns:
        Flower's number for it.

    Raises:
        SuperLinkUnavailable: The SuperLink cannot be reached or refuses the key.
    """
    for node in control.nodes():
        if node.public_key == public_key and node.status != _SHUT_OUT:
            return node.node_id
    return control.register(public_key)


def unregister(config: AggregatorConfig, node_id: int) -> None:
    """Unregister a node; an unknown one is ignored.

    Raises:
        SuperLinkUnavailable: The SuperLink cannot be reached, or has never run.
        KeyFileRefused: This host's secret cannot be read.
        FederationError: The file of its port is damaged.
    """
    with _control(config) as control:
        for node in control.nodes():
            if node.node_id == node_id and node.status != _SHUT_OUT:
                control.unregister(node_id)


def connected(config: AggregatorConfig) -> set[int]:
    """Numbers of the nodes that are connected.

    Raises:
        FederationError: As ``unregister``.
    """
    with _control(config) as control:
        return {each.node_id for each in control.nodes() if each.status == "online"}


def _control(config: AggregatorConfig) -> FlowerControl:
    port = config.superlink_port()
    if port is None:
        raise SuperLinkUnavailable(
            "crossfed aggregator up has not run yet, so no SuperLink is running"
        )
    authority = (config.folder / "ca.crt").read_bytes()
    secret = host_secrets.read(config.folder / host_secrets.CONTROL)
    return FlowerControl(f"{LOOPBACK}:{port}", authority, secret)
