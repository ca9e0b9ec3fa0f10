"""What a job or a ``site.toml`` names is code of a user, and runs in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from federation.errors import JobError


@contextmanager
def unable_to_exit() -> Iterator[None]:
    """Refuse a module of the user's that ends the program.

    With code 0 it would pass for a run that is done, or an agent that was stopped.

    Raises:
        JobError: It did.
    """
    try:
        yield
    except SystemExit as error:
        fault = "code of a user, which the job or site.toml names, ended the program"
        raise JobError(f"{fault}: {error!r}", outside=fault) from error
