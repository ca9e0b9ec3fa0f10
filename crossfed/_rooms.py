"""Our top-level packages come first, also beside modules of a user with their names.

``clients`` and ``deploy`` are common names. Whoever has a folder or a file called so
beside a script would otherwise hide ours, or be hidden without a word.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ROOMS = (
    "federation",
    "privacy",
    "clients",
    "aggregator",
    "cloud_adapters",
    "monitoring",
    "deploy",
)
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 -- fast


class _OurRooms:
    """Finds our packages where this one lies, and modules below them nowhere else."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        room, dot, _ = name.partition(".")
        if room not in ROOMS:
            return None
        spec = PathFinder.find_spec(name, path if dot else [_ROOT], target)
        if spec is None:
            from federation.errors import clash  # noqa: PLC0415 -- found by this class

            # Not ModuleNotFoundError: `from deploy import mine` would swallow it.
            raise ImportError(f"there is no module {name!r}: {clash(name)}", name=name)
        return spec


def come_first() -> None:
    """Put our packages before all others of their names.

    A user's module that was imported under such a name stays with whoever imported it.
    """
    if _OurRooms in sys.meta_path:
        return
    for name, module in [*sys.modules.items()]:
        room = name.partition(".")[0]
        file = getattr(module, "__file__", None) or ""
        inside = os.path.join(_ROOT, room, "")  # noqa: PTH118 -- fast
        if room in ROOMS and not os.path.realpath(file).startswith(inside):
            del sys.modules[name]
    sys.meta_path.insert(0, _OurRooms)
