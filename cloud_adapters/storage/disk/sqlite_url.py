"""The file of a SQLite database as a URL, which is how SQLAlchemy and Flower name it.

In a URL ``?`` begins options and ``%3F`` is a ``?``: a folder with such a name would
become another file.
"""

import re
from pathlib import Path
from urllib.parse import quote

_SPECIAL = re.compile(r"[?%]")


def sqlite_url(file: Path) -> str:
    """Name a database by the path of its file, relative or absolute."""
    path = str(file)
    return "sqlite:///" + (quote(path) if _SPECIAL.search(path) else path)
