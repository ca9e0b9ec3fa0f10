"""What is in the folder of a store and is none of its objects."""

import os
from collections.abc import Iterator
from pathlib import Path

from cloud_adapters.storage.disk.records import RECORD_FOLDER
from cloud_adapters.storage.disk.store import PARTIAL_FOLDER
from cloud_adapters.storage.object_keys import check_key

_SCHEME = "file://"


def strays(url: str) -> Iterator[str]:
    """Yield paths that ``LocalStore.list`` leaves out, relative to the folder.

    These are links, pipes and other special files, and names that no key can have.
    The store never reads them, but a program that opens the folder itself would.

    Args:
        url: URL of a store. Others than folders have no strays.
    """
    if not url.startswith(_SCHEME):
        return
    root = Path(url.removeprefix(_SCHEME))
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        own = {PARTIAL_FOLDER, RECORD_FOLDER} if here == root else set[str]()
        for name in (*folders, *files):
            path = here / name
            is_usual = path.is_dir() if name in folders else path.is_file()
            if path.is_symlink() or not is_usual or not _is_key(path, root):
                yield path.relative_to(root).as_posix()
        folders[:] = [name for name in folders if name not in own]


def _is_key(path: Path, root: Path) -> bool:
    try:
        check_key(path.relative_to(root).as_posix())
    except ValueError:
        return False
    return True
