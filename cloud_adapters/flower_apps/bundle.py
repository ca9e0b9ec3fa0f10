"""The bundle that Flower needs for a run: an import here, a loader of apps there.

It is the same, byte for byte, wherever a release is installed. So a site that runs a
stock SuperNode can answer for the aggregator which bundle that gets.
"""

import functools
import hashlib
from pathlib import Path

from cloud_adapters.flower.private.bundle import (
    DecodeError,
    Fab,
    GetFabRequest,
    GetFabResponse,
    build_fab_from_files,
    fab_to_proto,
)
from cloud_adapters.flower_apps import app_shim as flower_app_shim
from federation.errors import ProtocolError

PYPROJECT = Path(__file__).with_name("bundle_pyproject.toml").read_bytes()
_SERVER = b"from deploy.aggregator_host.server_app import app  # noqa: F401\n"


@functools.cache
def bundle() -> Fab:
    """The bundle of every run."""
    content, _ = build_fab_from_files(
        {
            "pyproject.toml": PYPROJECT,
            "LICENSE": b"Apache-2.0\n",
            "crossfed_run/__init__.py": b"",
            "crossfed_run/server.py": _SERVER,
            "crossfed_run/client.py": Path(flower_app_shim.__file__).read_bytes(),
        }
    )
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


def answer(request: bytes) -> bytes:
    """Answer a SuperNode that asks for the bundle of a run.

    Args:
        request: Request of Flower's call ``get-fab``.

    Returns:
        What a SuperLink answers, with the bundle of this release.

    Raises:
        ProtocolError: It asks for another one, or is malformed.
    """
    try:
        wanted = GetFabRequest.FromString(request).hash_str
    except DecodeError as error:
        raise ProtocolError(f"a malformed request for a bundle: {error}") from error
    if wanted != bundle().hash_str:
        raise ProtocolError(
            f"the aggregator's run has the bundle {wanted[:16]!r}, and this release's "
            f"is {bundle().hash_str[:16]!r}: install the same releases of crossfed and "
            "flwr on both sides. The bundle was not fetched"
        )
    content: bytes = GetFabResponse(fab=fab_to_proto(bundle())).SerializeToString()
    return content
