"""Users' code, which a job or a ``site.toml`` names, and its errors.

Its mistakes are shown with the user's own lines, only on this machine: what is raised
there may quote a record.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from federation import OURS
from federation.errors import (
    FederationError,
    InvalidUpdate,
    JobError,
    PrivacyError,
    ProtocolError,
)

if TYPE_CHECKING:  # Not to import NumPy where help is shown.
    from federation.messages import Task

_NOT_THE_USERS = {*OURS, "crossfed", "torch", "numpy", *sys.stdlib_module_names}
# What only our adapters call; a model or data of a user may well be of another library.
_NOT_THE_USERS |= {"boto3", "botocore", "cryptography", "google", "requests"}
_NOT_THE_USERS |= {"safetensors", "urllib3"}
_MOST_FRAMES = 3


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
        fault = "user code named by the job or site.toml exited the program"
        raise JobError(f"{fault}: {error!r}", outside=fault) from error


def frames_of(error: BaseException) -> traceback.StackSummary:
    """The user's own frames, the innermost last; empty if there are none."""
    found = traceback.StackSummary.extract(
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS
    )
    own = [frame for frame in found if "site-packages" not in frame.filename]
    return traceback.StackSummary.from_list(own) if own else found


def place_of(error: BaseException) -> str:
    """The user's own file and line that an error comes from, in brackets."""
    frames = frames_of(error)
    if not frames:
        return ""
    name = frames[-1].filename.replace("\\", "/").rpartition("/")[2]
    return f" ({name}, line {frames[-1].lineno})"


def origin(error: BaseException) -> BaseException:
    """The user's exception, if it is the cause of one of ours."""
    cause = error.__cause__
    if not isinstance(error, FederationError) or cause is None:
        return error
    found = origin(cause)
    return found if frames_of(found) or isinstance(found, SyntaxError) else error


def sentence(error: BaseException) -> str:
    """An error in one line: its kind, its text, the user's line, and advice."""
    kind = "" if isinstance(error, FederationError) else f"{type(error).__name__}: "
    place = "" if isinstance(error, FederationError) else place_of(error)
    return "; ".join([f"{kind}{error}{place}", *getattr(error, "__notes__", ())])


def last_frames(error: BaseException) -> str:
    """The user's last frames, each with its file, line and source, and the error."""
    found = origin(error)
    said = traceback.format_exception_only(found)
    if isinstance(found, FederationError):
        said = [str(found)]
    shown = traceback.format_list(frames_of(found)[-_MOST_FRAMES:])
    return "".join([*shown, *said]).rstrip()


@dataclass(eq=False)
class FirstFailure:
    """Shows the first failure of a simulation's sites when it happens.

    Attributes:
        show: Shows site and round, and the error.
        error: The first error; None so far.
    """

    show: Callable[[str, Exception], None]
    error: Exception | None = field(init=False, default=None)
    _lock: Lock = field(init=False, default_factory=Lock)

    def __call__(self, task: "Task", error: Exception) -> None:
        """Record an error; a refusal is not a failure."""
        is_refusal = isinstance(error, (ProtocolError, PrivacyError))
        with self._lock:
            if self.error is not None or (
                is_refusal and not isinstance(error, InvalidUpdate)
            ):
                return
            self.error = error
            # Another site that fails waits, so that its failure is reported after.
            place = f"site {task.site}, round {task.round_index}"
            self.show(f"first failure: {place}", error)
        cause: BaseException | None = error
        while cause is not None:  # The run continues, and frames hold batches.
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
