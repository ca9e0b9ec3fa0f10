"""An aggregator in a cluster: its names there, and what its table must state.

The pod is the head of the deployment: besides the aggregator it runs ``crossfed up``,
which launches the sites in the same namespace. So nothing outside of it has to read its
keys, its book of members or its runs.
"""

from deploy.fleet.starting.user_data import is_pinned
from federation.addresses import parse_address
from federation.errors import JobError

PORT = 8443


def service(deployment: str) -> str:
    """Name of the Service and of the volume of a deployment's head."""
    return f"crossfed-{deployment}"


def address(deployment: str, namespace: str) -> str:
    """Where the other pods of a namespace reach the head of a deployment."""
    return f"{service(deployment)}.{namespace}.svc:{PORT}"


def check(image: str, *, address: str, listen: str, gpus: int) -> None:
    """Refuse the table of an aggregator whose pod could not work.

    Args:
        image: Image of its container.
        address: Where sites reach it; empty for its Service.
        listen: Where it listens; empty for ``PORT``.
        gpus: How many its pod would get.

    Raises:
        JobError: A key is missing or wrong.
    """
    if not is_pinned(image):
        what = f"{image!r:.200} names no digest" if image else "is missing"
        raise JobError(
            f"{what}: name an image of an aggregator (deploy/containers) as "
            "NAME@sha256:...",
            key="aggregator.image",
        )
    if gpus:
        raise JobError(
            "an aggregator uses no GPU: remove it", key="aggregator.cluster.gpus"
        )
    if listen and not address:
        _, port = parse_address(listen, key="aggregator.listen")
        if port != PORT:
            raise JobError(
                f"its Service leads to port {PORT}: listen there, or state where sites "
                "reach it as aggregator.address",
                key="aggregator.listen",
            )
