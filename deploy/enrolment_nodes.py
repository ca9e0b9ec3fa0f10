"""Nodes at the SuperLink of this host, as enrolment lets them in and shuts them out."""

from cloud_adapters.flower_control import FlowerControl
from deploy.aggregator_file import AggregatorConfig
from deploy.site_file import check_address
from federation.errors import StoreUnavailable

_LOOPBACK = "127.0.0.1"
_SHUT_OUT = "unregistered"


def register(control: FlowerControl, public_key: bytes) -> int:
    """Let a node in; one that is in already keeps its number.

    Args:
        control: The SuperLink.
        public_key: PEM, on the curve P-384.

    Returns:
        Flower's number for it.

    Raises:
        StoreUnavailable: The SuperLink cannot be reached or refuses the key.
    """
    for node in control.nodes():
        if node.public_key == public_key and node.status != _SHUT_OUT:
            return node.node_id
    return control.register(public_key)


def unregister(config: AggregatorConfig, node_id: int) -> None:
    """Let a node in no more; one that is not in is left as it is.

    Raises:
        StoreUnavailable: The SuperLink cannot be reached.
    """
    authority = (config.folder / "ca.crt").read_bytes()
    with FlowerControl(_superlink(config), authority) as control:
        for node in control.nodes():
            if node.node_id == node_id and node.status != _SHUT_OUT:
                control.unregister(node_id)


def _superlink(config: AggregatorConfig) -> str:
    """Where the SuperLink listens, or did when it was last up."""
    file = config.file
    if not file.proxy:
        return f"{_LOOPBACK}:{check_address(file.listen, key='listen')[1]}"
    if file.superlink_port:
        return f"{_LOOPBACK}:{file.superlink_port}"
    try:
        return f"{_LOOPBACK}:{int((config.flower / 'port').read_text())}"
    except (OSError, ValueError):
        raise StoreUnavailable(
            "crossfed aggregator up has not run yet, so there is no SuperLink to tell"
        ) from None
