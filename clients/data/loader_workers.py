"""The worker processes that a user's ``DataLoader`` asks for."""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import DataLoader

from clients.factories import is_in_users_file
from federation.errors import SiteError

_PR_SET_PDEATHSIG = 1
_COPIES = "fork"  # Any other way of starting a process imports the code again.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorkers:
    """What a ``DataLoader`` says about its worker processes.

    Attributes:
        settings: Arguments of a ``DataLoader`` that reads in the same way.
    """

    settings: dict[str, Any]

    @classmethod
    def of(cls, loader: "DataLoader[Any]", *, name: str) -> Self | None:
        """Take the settings of a loader; None if it has no workers.

        Args:
            loader: A user's.
            name: Of the part of the data that it reads.

        Raises:
            SiteError: Its workers could not import a user's file.
        """
        if loader.num_workers == 0:
            return None
        context: Any = loader.multiprocessing_context or multiprocessing
        # Not to be asked for without allow_none, which would settle it for the process.
        chosen = context.get_start_method(allow_none=True)
        method = chosen or multiprocessing.get_all_start_methods()[0]
        used = (type(loader.dataset), loader.collate_fn, loader.worker_init_fn)
        if method != _COPIES and any(map(is_in_users_file, used)):
            raise SiteError(
                f"{name} is a DataLoader whose worker processes start with {method!r} "
                "and cannot import the file that data.source names: set "
                'multiprocessing_context="fork" or num_workers=0, or install the file '
                "as a module"
            )
        names = (
            "num_workers",
            "prefetch_factor",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
        )
        settings = {name: getattr(loader, name) for name in names}
        settings["worker_init_fn"] = _Begin(loader.worker_init_fn)
        return cls(settings=settings)


@dataclass(frozen=True, slots=True)
class _Begin:
    """What a worker process does first.

    Attributes:
        users: The loader's ``worker_init_fn``, if it has one.
    """

    users: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # The site's handlers are for the site, which ends its workers itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux":
            # Torch has a worker look for its parent between two batches only, so that
            # one that waits for a record would outlive a site that was killed.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.users is not None:
            self.users(worker)
