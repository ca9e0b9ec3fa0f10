"""Give our top-level packages precedence over a user's modules of the same names.

``clients`` and ``deploy`` are common names. A user's folder or file of that name
beside a script would otherwise hide ours, or be hidden silently.
"""

import os
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 -- fast


class _OurRooms:
    """Finds our packages where this one is, and modules below them nowhere else."""

    # Until the list of all of them is read, there is only the package that holds it.
    names: Collection[str] = ("federation",)

    @classmethod
    def find_spec(
        cls,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        room, dot, _ = name.partition(".")
        if room not in cls.names:
            return None
        spec = PathFinder.find_spec(name, path if dot else [_ROOT], target)
        if spec is None:
            from federation.errors import clash  # noqa: PLC0415 -- found by this class

            # Not ModuleNotFoundError: `from deploy import mine` would swallow it.
            raise ImportError(f"there is no module {name!r}: {clash(name)}", name=name)
        return spec


def come_first() -> None:
    """Give our packages precedence over others with their names.

    A user's module that was imported under such a name stays with its importer.
    """
    if _OurRooms in sys.meta_path:
        return
    sys.meta_path.insert(0, _OurRooms)
    _forget_others()
    from federation import OURS  # noqa: PLC0415 -- ours comes first by now

    _OurRooms.names = OURS
    _forget_others()


def _forget_others() -> None:
    for name, module in [*sys.modules.items()]:
        room = name.partition(".")[0]
        file = getattr(module, "__file__", None) or ""
        inside = os.path.join(_ROOT, room, "")  # noqa: PTH118 -- fast
        if room in _OurRooms.names and not os.path.realpath(file).startswith(inside):
            del sys.modules[name]
