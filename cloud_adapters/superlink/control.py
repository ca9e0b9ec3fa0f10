"""What the aggregator's host asks of its SuperLink: runs and nodes.

Flower's Control API requires no key; ``flower_guard``, which stands before it,
asks for the secret of the host. A run needs a bundle of code: see ``flower_bundle``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import httpx

from cloud_adapters.flower.facts import (
    FlowerNodeInfo,
    FlowerRun,
    SuperLinkUnavailable,
)
from cloud_adapters.flower.private.bundle import fab_to_proto
from cloud_adapters.flower.private.control import (
    ControlHttpClient,
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    RunStatus,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
    user_config_to_proto,
)
from cloud_adapters.flower_apps.bundle import bundle
from cloud_adapters.superlink.guard import SecretSender, control_word


class FlowerControl:
    """The SuperLink of this host; a context manager."""

    def __init__(self, address: str, root_certificates: bytes, secret: bytes) -> None:
        """Connect when it is first asked.

        Args:
            address: ``127.0.0.1:PORT``.
            root_certificates: PEM of the authority that speaks for it.
            secret: Secret of its Control API.
        """
        self._address = address
        self._client = ControlHttpClient.from_server_address(
            address,
            insecure=False,
            root_certificates=root_certificates,
            interceptors=[SecretSender(control_word(secret))],
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close connections."""
        self.disconnect()

    def disconnect(self) -> None:
        """Close connections; the next call makes new ones."""
        self._client.close()

    def start(self, settings: Mapping[str, str]) -> int:
        """Start a coordinator, and return Flower's number for the run.

        Args:
            settings: ``folder`` of the run and ``config`` of the aggregator.

        Raises:
            SuperLinkUnavailable: It cannot be reached or refuses.
        """
        request = StartRunRequest(
            fab=fab_to_proto(bundle()),
            override_config=user_config_to_proto(dict(settings)),
        )
        with self._asking():
            return int(self._client.StartRun(request).run_id)

    def runs(self) -> dict[int, FlowerRun]:
        """Every run that the SuperLink knows, by its number.

        Raises:
            SuperLinkUnavailable: It cannot be reached.
        """
        with self._asking():
            found = self._client.ListRuns(ListRunsRequest()).run_dict
        return {run_id: _fact(run.status) for run_id, run in found.items()}

    def stop(self, run_id: int) -> None:
        """End a run immediately.

        Raises:
            SuperLinkUnavailable: It cannot be reached.
        """
        with self._asking():
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def register(self, public_key: bytes) -> int:
        """Let a node in, and return its number.

        Args:
            public_key: PEM, on the curve P-384.

        Raises:
            SuperLinkUnavailable: It cannot be reached or refuses the key.
        """
        request = RegisterNodeRequest(public_key=public_key)
        with self._asking():
            return int(self._client.RegisterNode(request).node_id)

    def unregister(self, node_id: int) -> None:
        """Refuse a node from now on.

        Raises:
            SuperLinkUnavailable: It cannot be reached.
        """
        with self._asking():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))

    def nodes(self) -> list[FlowerNodeInfo]:
        """Every node that is registered.

        Raises:
            SuperLinkUnavailable: It cannot be reached.
        """
        with self._asking():
            found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [
            FlowerNodeInfo(
                node_id=node.node_id,
                status=node.status,
                public_key=bytes(node.public_key),
            )
            for node in found
        ]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise SuperLinkUnavailable(
                f"the SuperLink on {self._address} {_trouble(error)}; check "
                "that `crossfed aggregator up` is running. Its logs are in logs/"
            ) from error


def _trouble(error: httpx.HTTPError) -> str:
    """What a request came to, after the name of who was asked."""
    if isinstance(error, httpx.HTTPStatusError):
        response = error.response
        return f"rejected a request: HTTP {response.status_code}: {response.text[:200]}"
    return f"did not answer: {error}"


def _fact(status: RunStatus) -> FlowerRun:
    words = (status.status, status.sub_status, status.details)
    return FlowerRun(
        is_over=status.status == "finished", status=" ".join(filter(None, words))
    )
