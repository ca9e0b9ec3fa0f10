"""The worker processes that a user's ``DataLoader`` asks for."""

from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorkers:
    """What a ``DataLoader`` says about its worker processes.

    Attributes:
        settings: Arguments of a ``DataLoader`` that reads in the same way.
    """

    settings: dict[str, Any]

    @classmethod
    def of(cls, loader: "DataLoader[Any]") -> Self | None:
        """Take the settings of a loader; None if it has no workers."""
        if loader.num_workers == 0:
            return None
        names = (
            "num_workers",
            "prefetch_factor",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
        )
        return cls(settings={name: getattr(loader, name) for name in names})
