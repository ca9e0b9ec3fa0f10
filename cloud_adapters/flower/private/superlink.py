"""Inside the SuperLink's own process: handlers, state, its migrations, stored objects."""

from flwr.common.constant import (
    SUPERLINK_NODE_ID as SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE as SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER as TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE as TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2 import (
    PushMessagesRequest as PushMessagesRequest,
    PushMessagesResponse as PushMessagesResponse,
)
from flwr.proto.message_pb2 import (
    PushObjectRequest as PushObjectRequest,
    PushObjectResponse as PushObjectResponse,
)
from flwr.server.superlink.linkstate import LinkState as LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState as SqlLinkState
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER as FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER as FLEET_HTTP_SIGNATURE_HEADER,
)
from flwr.supercore.date import now as now
from flwr.supercore.inflatable.inflatable_object import (
    iterate_object_tree as iterate_object_tree,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key as bytes_to_public_key,
    verify_signature as verify_signature,
)
from flwr.supercore.state.alembic.utils import (
    build_alembic_config as build_alembic_config,
    run_migrations as run_migrations,
)
from flwr.supercore.utils import uint64_to_int64 as uint64_to_int64
from flwr.superlink.cli import flower_superlink as flower_superlink
from flwr.superlink.main import _get_middleware
from flwr.superlink.servicer.fleet import fleet_handlers as fleet_handlers

superlink_middleware = _get_middleware
