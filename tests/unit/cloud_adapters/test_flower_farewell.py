"""A node says that it leaves, unless another process has its place by now."""

import importlib.util
import socket

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cloud_adapters.flower import simulation as flower_simulation
from federation.clock import SystemClock

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.clientapp import ClientApp  # noqa: E402

from cloud_adapters.flower.node import FlowerNode  # noqa: E402

pytestmark = pytest.mark.flower


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_node_that_is_replaced_says_nothing(*, is_replaced: bool):
    """Flower knows both by one key, and would count the other as gone."""
    with socket.create_server(("127.0.0.1", 0)) as aggregator:
        node = FlowerNode(
            app=ClientApp(),
            address=f"127.0.0.1:{aggregator.getsockname()[1]}",
            root_certificates=None,
            key=ec.generate_private_key(ec.SECP384R1()),
            clock=SystemClock(),
            is_replaced=lambda: is_replaced,
            node_id=1,
        )
        node.leave()
        aggregator.settimeout(0.0)
        if is_replaced:
            with pytest.raises(BlockingIOError):
                aggregator.accept()
        else:
            aggregator.accept()[0].close()
