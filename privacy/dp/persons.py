"""Group records by person, for steps that sample persons instead of records.

A step draws persons by Poisson sampling, and of each of them at most so many records,
uniformly without replacement ("user-level sampling" in Charles et al. 2024,
arXiv:2407.07737, section 3). Which of its own records a person brings costs no privacy:
whatever they are, the person adds one clipped vector.

Shape suffixes: n records, p persons, c records of the chosen persons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
DrawWords = Callable[[int], NDArray[np.uint64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnRecords:
    """Records of a batch, those of one person side by side.

    Attributes:
        records: Indices of the records, shape ``(c,)``.
        sizes: How many of them each person has, shape ``(p,)``, each at least 1; None
            where every record is a unit by itself.
    """

    records: Indices
    sizes: Indices | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Persons:
    """The records of each person of a dataset.

    Attributes:
        order_n: Indices of all records, person by person, ascending for each.
        starts: Where each person's records begin in ``order_n``, and the end: shape
            ``(p + 1,)``.
    """

    order_n: Indices
    starts: Indices

    @classmethod
    def of(cls, ids: NDArray[Any]) -> Self:
        """Group records by their person.

        Args:
            ids: Person of each record, shape ``(n,)``; integers or texts.
        """
        _, codes = np.unique(ids, return_inverse=True)
        counts = np.bincount(codes)
        return cls(
            order_n=np.argsort(codes, kind="stable").astype(np.int64),
            starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        )

    @property
    def count(self) -> int:
        """Number of persons."""
        return len(self.starts) - 1

    def records_of(self, chosen: Indices) -> tuple[Indices, Indices]:
        """Return all records of some persons.

        Args:
            chosen: Numbers of the persons, shape ``(p,)``.

        Returns:
            The records, those of one person side by side, shape ``(c,)``; and how many
            each person has, shape ``(p,)``.
        """
        sizes = self.starts[chosen + 1] - self.starts[chosen]
        before = np.cumsum(sizes) - sizes
        places = np.arange(sizes.sum()) + np.repeat(self.starts[chosen] - before, sizes)
        return self.order_n[places], sizes

    def draw(
        self, chosen: Indices, *, most: int, draw_words: DrawWords
    ) -> DrawnRecords:
        """Take at most ``most`` records of each chosen person, at random.

        Args:
            chosen: Numbers of the persons, shape ``(p,)``.
            most: At least 1.
            draw_words: Draws so many uniform words, from a source that is used for
                nothing that is released; only called if a person has more records.

        Returns:
            The records, in the order of ``chosen``.
        """
        sizes = self.starts[chosen + 1] - self.starts[chosen]
        owners = np.repeat(np.arange(len(chosen)), sizes)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        within = np.arange(len(owners)) - first
        places = within + np.repeat(self.starts[chosen], sizes)
        if (sizes > most).any():
            # The records with the smallest words of a person are a uniform choice.
            rank = np.empty_like(within)
            rank[np.lexsort((draw_words(len(owners)), owners))] = within
            keep = rank < most
            owners, places = owners[keep], places[keep]
        return DrawnRecords(
            records=self.order_n[places],
            sizes=np.bincount(owners, minlength=len(chosen)).astype(np.int64),
        )
