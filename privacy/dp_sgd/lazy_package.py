"""Import parts of a package without what its ``__init__`` imports.

``importlib.util.LazyLoader`` does not help here: an import of a part asks the package
for its path, which loads all of it.
"""

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LOCK = threading.RLock()
# What a package defines in ``__init__``, in spite of the underscores.
_DEFINED = {"__all__", "__version__"}


def defer(name: str) -> None:
    """Run a package's ``__init__`` when something first asks for what it defines.

    Its parts can be imported before that, and remain the same modules after it. A
    package that is imported already, or that is not there, does not change.

    Args:
        name: A package that is not part of another.
    """
    with _LOCK:
        if name in sys.modules:
            return
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return
        package = importlib.util.module_from_spec(spec)
        vars(package)["__getattr__"] = _Loading(package, spec)
        sys.modules[name] = package


class _Loading:
    """The ``__getattr__`` of a package whose ``__init__`` has not run yet."""

    def __init__(self, package: ModuleType, spec: ModuleSpec) -> None:
        self._package, self._spec = package, spec

    def __call__(self, name: str) -> Any:
        """Find what is missing, by running ``__init__``.

        Raises:
            AttributeError: The package has no such attribute.
        """
        is_internal = name.startswith("__") and name not in _DEFINED
        if not is_internal:
            self._run()
        if name in vars(self._package):
            return vars(self._package)[name]
        raise AttributeError(f"module {self._spec.name!r} has no attribute {name!r}")

    def _run(self) -> None:
        """Run it once; after an error, the next caller tries again."""
        with _LOCK:
            if vars(self._package).pop("__getattr__", None) is None:
                return
            try:
                self._spec.loader.exec_module(self._package)  # type: ignore[union-attr]
            except BaseException:
                vars(self._package)["__getattr__"] = self
                raise
