"""The bundle of code that a run names, and its form in requests."""

from flwr.cli.build import build_fab_from_files as build_fab_from_files
from flwr.common.serde import (
    fab_from_proto as fab_from_proto,
    fab_to_proto as fab_to_proto,
)
from flwr.proto.fab_pb2 import (
    GetFabRequest as GetFabRequest,
    GetFabResponse as GetFabResponse,
)
from flwr.supercore.fab import Fab as Fab
from google.protobuf.message import DecodeError as DecodeError  # type: ignore[import-untyped]
