"""What commands say: data on standard output, and words on standard error."""

import contextlib
import sys


def say(text: str) -> None:
    """Write a line of data."""
    sys.stdout.write(text + "\n")


def tell(text: str) -> None:
    """Tell a person something, if there is anybody left to read it."""
    with contextlib.suppress(OSError):
        print(f"crossfed: {text}", file=sys.stderr, flush=True)  # noqa: T201
