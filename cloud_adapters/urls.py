"""From the URL in a job file to the store that it names."""

from pathlib import Path

from cloud_adapters.storage.local import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import JobError
from federation.protocols import ObjectStore

_KEY = "storage.url"
_POSSIBLE = "use file://FOLDER or memory://"
_PLANNED = frozenset({"s3", "gs"})


def open_store(url: str) -> ObjectStore:
    """Open the store that a URL names; nothing is read or written yet.

    Args:
        url: ``file://`` and a path, relative to the working directory or absolute,
            taken as it stands; or ``memory://``, a new and empty store.

    Raises:
        JobError: The URL is malformed, or names a store that is not built.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise JobError(f"{url!r} is not a URL; {_POSSIBLE}", key=_KEY)
    if scheme in _PLANNED:
        raise JobError(f"{scheme}:// is not built yet; {_POSSIBLE}", key=_KEY)
    if scheme == "file" and rest and "\0" not in rest:
        return LocalStore(Path(rest))
    if scheme == "memory" and not rest:
        return MemoryStore()
    if scheme in {"file", "memory"}:
        raise JobError(f"{url!r} names no store; {_POSSIBLE}", key=_KEY)
    raise JobError(f"the scheme {scheme!r} is unknown; {_POSSIBLE}", key=_KEY)
