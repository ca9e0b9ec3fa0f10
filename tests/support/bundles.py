"""A bundle of Flower's that is not the one of this release."""

import hashlib
import warnings

from flwr.cli.build import build_fab_from_files
from flwr.supercore.fab import Fab

from cloud_adapters.flower_apps import bundle as flower_bundle


def foreign(code: str) -> Fab:
    """A bundle whose server half is a file of any code."""
    with warnings.catch_warnings():  # Of its dependencies' plans.
        warnings.simplefilter("ignore", DeprecationWarning)
        content, _ = build_fab_from_files(
            {
                "pyproject.toml": flower_bundle.PYPROJECT,
                "LICENSE": b"None\n",
                "crossfed_run/__init__.py": b"",
                "crossfed_run/server.py": code.encode(),
                "crossfed_run/client.py": b"",
            }
        )
    return Fab(hashlib.sha256(content).hexdigest(), content, {})
