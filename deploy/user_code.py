"""What a job names is code of its user, and runs in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from federation.errors import JobError


@contextmanager
def unable_to_exit() -> Iterator[None]:
    """Refuse a module of the user's that ends the program.

    With code 0 it would pass for a run that is done.

    Raises:
        JobError: It did.
    """
    try:
        yield
    except SystemExit as error:
        raise JobError(
            f"code that the job names ended the program: {error!r}"
        ) from error
