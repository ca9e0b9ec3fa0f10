"""What is logged, for tests that also run where pytest's own capture of it is off."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Kept(logging.Handler):
    """Keeps whatever reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.records.append(record)


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """The records that reach the root logger, of ``level`` and above."""
    root, handler = logging.getLogger(), _Kept()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield handler.records
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
