"""Interceptors of Flower's clients, and the SuperLink's middleware."""

from flwr.supercore.protobuf.client import (
    ProtobufCall as ProtobufCall,
    ProtobufClientInterceptor as ProtobufClientInterceptor,
    ProtobufRequestContext as ProtobufRequestContext,
)
from flwr.superlink import extensions as extensions
