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

# Older rounds that stay behind, in case a coordinator goes back to one.
KEEP_ROUNDS = 4


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
        before = self._key(round_index)
        earlier = [o.key for o in self._store.list(self._prefix) if o.key < before]
        if not earlier:
            return integers_m
        return np.where(self._mine, self._read(earlier[-1]), integers_m)

    def keep(self, integers_m: IntegerVector, round_index: int) -> None:
        """Store the values that a round left."""
        if not self._any:
            return
        kept = np.ascontiguousarray(np.where(self._mine, integers_m, 0))
        self._store.put(self._key(round_index), [save({"kept": kept})])
        oldest = self._key(max(round_index - KEEP_ROUNDS, 0))
        for info in list(self._store.list(self._prefix)):
            if info.key < oldest:
                self._store.delete(info.key)

    def conceal(self, integers_m: IntegerVector) -> IntegerVector:
        """Blank out what stays at the site."""
        return np.where(self._mine, 0, integers_m) if self._any else integers_m

    def _key(self, round_index: int) -> str:
        return f"{self._prefix}{round_index:06d}.safetensors"

    def _read(self, key: str) -> IntegerVector:
        try:
            kept: IntegerVector = load(self._store.read(key))["kept"]
        except (SafetensorError, KeyError) as error:
            raise CorruptObject(
                f"{key} does not hold a site's integers ({error}); delete it to "
                "begin with the server's"
            ) from error
        if kept.shape != self._mine.shape:
            raise CorruptObject(f"{key} holds {kept.size} integers of another model")
        return kept
