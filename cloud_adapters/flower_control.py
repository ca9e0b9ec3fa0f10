"""What the aggregator's host asks of its SuperLink: runs and nodes.

Flower's Control API asks nobody for a key, so it is reached on the loopback alone. A
run needs a bundle of code: see ``flower_bundle``.

The other files that know Flower's private modules are that one, ``flower_node`` and
``flower_fleet``.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control.control_http_client import ControlHttpClient

from cloud_adapters.flower_bundle import bundle
from cloud_adapters.flower_facts import FlowerNodeInfo, FlowerRun
from federation.errors import StoreUnavailable

CALL_SECONDS = 10.0


class FlowerControl:
    """The SuperLink of this host; a context manager."""

    def __init__(self, address: str, root_certificates: bytes) -> None:
        """Connect when it is first asked.

        Args:
            address: ``127.0.0.1:PORT``.
            root_certificates: PEM of the authority that speaks for it.
        """
        self._address = address
        self._client = ControlHttpClient.from_server_address(
            address,
            insecure=False,
            root_certificates=root_certificates,
            interceptors=[],
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close connections."""
        self._client.close()

    def start(self, settings: Mapping[str, str]) -> int:
        """Start a coordinator, and return Flower's number for the run.

        Args:
            settings: ``folder`` of the run and ``config`` of the aggregator.

        Raises:
            StoreUnavailable: The SuperLink cannot be reached or refuses.
        """
        request = StartRunRequest(
            fab=fab_to_proto(bundle()),
            override_config=user_config_to_proto(dict(settings)),
        )
        try:
            return int(self._client.StartRun(request).run_id)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error

    def runs(self) -> dict[int, FlowerRun]:
        """Every run that the SuperLink knows, by its number.

        Raises:
            StoreUnavailable: The SuperLink cannot be reached.
        """
        try:
            found = self._client.ListRuns(ListRunsRequest()).run_dict
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        return {
            run_id: FlowerRun(
                is_over=run.status.status == "finished",
                status=" ".join(
                    word
                    for word in (
                        run.status.status,
                        run.status.sub_status,
                        run.status.details,
                    )
                    if word
                ),
            )
            for run_id, run in found.items()
        }

    def stop(self, run_id: int) -> None:
        """End a run at once.

        Raises:
            StoreUnavailable: The SuperLink cannot be reached.
        """
        try:
            self._client.StopRun(StopRunRequest(run_id=run_id))
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error

    def register(self, public_key: bytes) -> int:
        """Let a node in, and return its number.

        Args:
            public_key: PEM, on the curve P-384.

        Raises:
            StoreUnavailable: The SuperLink cannot be reached or refuses the key.
        """
        try:
            answer = self._client.RegisterNode(
                RegisterNodeRequest(public_key=public_key)
            )
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        return int(answer.node_id)

    def unregister(self, node_id: int) -> None:
        """Let a node in no more.

        Raises:
            StoreUnavailable: The SuperLink cannot be reached.
        """
        try:
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error

    def nodes(self) -> list[FlowerNodeInfo]:
        """Every node that is registered.

        Raises:
            StoreUnavailable: The SuperLink cannot be reached.
        """
        try:
            found = self._client.ListNodes(ListNodesRequest()).nodes_info
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        return [
            FlowerNodeInfo(
                node_id=node.node_id,
                status=node.status,
                last_heartbeat=max(0, node.online_until - 2 * node.heartbeat_interval),
                public_key=bytes(node.public_key),
            )
            for node in found
        ]

    def _unavailable(self, error: httpx.HTTPError) -> StoreUnavailable:
        text = str(error)
        if isinstance(error, httpx.HTTPStatusError):
            text = f"HTTP {error.response.status_code}: {error.response.text[:200]}"
        return StoreUnavailable(
            f"the SuperLink on {self._address} does not do what it is asked: {text}; "
            "is `crossfed aggregator up` running? Its logs are in logs/",
            temporary=True,
        )
