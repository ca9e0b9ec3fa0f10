"""Errors of the operating system as errors of this product."""

from collections.abc import Iterator
from contextlib import contextmanager

from federation.errors import FederationError


@contextmanager
def os_errors(
    kind: type[FederationError], doing: str, advice: str = ""
) -> Iterator[None]:
    """Raise an error of ours for one of the system, which becomes its cause.

    Args:
        kind: What to raise.
        doing: What cannot be done: ``write PATH``.
        advice: What a person can do; empty if nothing is known.
    """
    try:
        yield
    except OSError as error:
        said = f"cannot {doing}: {error.strerror or error}"
        raise kind(f"{said}; {advice}" if advice else said) from error
