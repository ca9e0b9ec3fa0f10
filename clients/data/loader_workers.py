"""The worker processes that a user's ``DataLoader`` asks for."""

import multiprocessing
from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import DataLoader

from clients.factories import is_in_users_file
from federation.errors import SiteError

_COPIES = "fork"  # Other ways to start a process import the code of a dataset anew.


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
        method = context.get_start_method()
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
        return cls(settings={name: getattr(loader, name) for name in names})
