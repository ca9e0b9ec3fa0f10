"""Integer buffers of role ``keep``: each site's own, from round to round.

They never travel. A site stores them after each round, so that a resumed run finds
what an uninterrupted one would have had.

Shape suffixes: m integer values of the model.
"""

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from federation.errors import CorruptObject
from federation.ids import SiteId
from federation.protocols import ObjectStore
from federation.vectors import IntegerVector, Layout, Role

# Rounds of a site whose values stay stored, in case a coordinator goes back to one.
KEEP_ROUNDS = 5


class KeptIntegers:
    """The kept integers of one site, in a store of the site's own."""

    def __init__(self, site: SiteId, layout: Layout, store: ObjectStore) -> None:
        """Keep a site's integers under ``sites/<name>/`` of a store."""
        self._prefix = f"sites/{site}/kept-"
        self._store = store
        self._mine: NDArray[np.bool_] = layout.integer_mask(Role.KEEP)
        self._any = bool(self._mine.any())

    def restore(self, integers_m: IntegerVector, round_index: int) -> IntegerVector:
        """Put the site's own values in place of the server's.

        Args:
            integers_m: What the server sent; it is not written to.
            round_index: The round that begins; values of later rounds, which a
                resumed run runs again, are not used.

        Raises:
            CorruptObject: The stored values are not what was stored.
        """
        if not self._any:
            return integers_m
        earlier = self._before(round_index)
        if not earlier:
            return integers_m
        return np.where(self._mine, self._read(earlier[-1]), integers_m)

    def keep(self, integers_m: IntegerVector, round_index: int) -> None:
        """Store the values that a round left."""
        if not self._any:
            return
        kept = np.ascontiguousarray(np.where(self._mine, integers_m, 0))
        self._store.put(self._key(round_index), [save({"kept": kept})])
        # A site that is seldom asked still needs its last values: what counts is
        # how many there are, not how old they are.
        for key in self._before(round_index + 1)[:-KEEP_ROUNDS]:
            self._store.delete(key)

    def conceal(self, integers_m: IntegerVector) -> IntegerVector:
        """Blank out what stays at the site."""
        return np.where(self._mine, 0, integers_m) if self._any else integers_m

    def _before(self, round_index: int) -> list[str]:
        """Keys of what earlier rounds left, in their order."""
        limit = self._key(round_index)
        return [o.key for o in self._store.list(self._prefix) if o.key < limit]

    def _key(self, round_index: int) -> str:
        return f"{self._prefix}{round_index:09d}.safetensors"

    def _read(self, key: str) -> IntegerVector:
        try:
            kept: IntegerVector = load(self._store.read(key))["kept"]
        except (SafetensorError, KeyError) as error:
            raise CorruptObject(
                f"{key} does not hold a site's integers ({error}); delete it to "
                "begin with the server's"
            ) from error
        if kept.shape != self._mine.shape or kept.dtype != np.int64:
            raise CorruptObject(
                f"{key} holds {kept.size} values of another model; delete it to begin "
                "with the server's"
            )
        return kept
