"""Messages, their objects and Flower's numbers: on both sides."""

from flwr.app.message import (
    make_message as make_message,
    remove_content_from_message as remove_content_from_message,
)
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.common.serde import (
    message_from_proto as message_from_proto,
    message_to_proto as message_to_proto,
)
from flwr.proto.message_pb2 import Message as Message, ObjectTree as ObjectTree
from flwr.proto.node_pb2 import Node as Node, NodeInfo as NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject as InflatableObject,
    get_all_nested_objects as get_all_nested_objects,
    get_object_tree as get_object_tree,
    iterate_object_tree as iterate_object_tree,
    no_object_id_recompute as no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf as make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf as make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf as make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError as ObjectPullError,
    inflate_object_from_contents as inflate_object_from_contents,
    pull_objects as pull_objects,
    push_objects as push_objects,
)
from flwr.supercore.task_identity import TaskIdentity as TaskIdentity

# Up to 1.42 the SuperLink keeps what is in an envelope, and questions and answers in two
# tables; from 1.43 on, metadata alone, in one. The request was changed with them.
KEEPS_CONTENT = "message_ids" in PullAppMessagesRequest.DESCRIPTOR.fields_by_name
