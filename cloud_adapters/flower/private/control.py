"""Control: runs and nodes, as the aggregator's host asks its SuperLink for them."""

from flwr.common.serde import user_config_to_proto as user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest as ListNodesRequest,
    ListRunsRequest as ListRunsRequest,
    RegisterNodeRequest as RegisterNodeRequest,
    StartRunRequest as StartRunRequest,
    StopRunRequest as StopRunRequest,
    UnregisterNodeRequest as UnregisterNodeRequest,
)
from flwr.proto.run_pb2 import RunStatus as RunStatus
from flwr.supercore.control.control_http_client import (
    ControlHttpClient as ControlHttpClient,
)
