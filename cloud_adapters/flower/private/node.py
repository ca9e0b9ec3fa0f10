"""Fleet: what a site's node asks the SuperLink."""

from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest as ActivateNodeRequest,
    DeactivateNodeRequest as DeactivateNodeRequest,
    PullMessagesRequest as PullMessagesRequest,
    PushMessagesRequest as PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import (
    SendNodeHeartbeatRequest as SendNodeHeartbeatRequest,
)
from flwr.supercore.error import (
    ApiErrorCode as ApiErrorCode,
    FlowerError as FlowerError,
)
from flwr.supercore.interceptors.http.utils import add_headers as add_headers
from flwr.supercore.primitives.asymmetric import (
    public_key_to_bytes as public_key_to_bytes,
)
from flwr.supercore.runtime_version_compatibility import (
    RuntimeVersionMetadata as RuntimeVersionMetadata,
)
from flwr.supernode.fleet_http_client import FleetHttpClient as FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import (
    NodeAuthHttpInterceptor as NodeAuthHttpInterceptor,
)
