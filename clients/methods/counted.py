"""Arrays of a method that may only follow updates which are a part of the model.

An update that did not count must not change them, as the model holds none of that round
then. Each task names the newest round whose update of the site counted. What an update
would change is kept apart from the rest until a task says that it counted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from federation.errors import CorruptObject
from federation.ids import SiteId
from federation.vectors import Arrays, Vector, is_finite

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedArrays:
    """The arrays of one method.

    Attributes:
        name: Name of the method.
        prefix: Names of its arrays begin with this; ``round`` is added here.
        pending: Name of the array that holds what the last update changes.
        follow_clipped_: Changes ``pending`` in place, given the model that the round
            began with, shape ``(d,)``, to what an update leads to that was multiplied
            by a factor.
    """

    name: str
    prefix: str
    pending: str
    follow_clipped_: Callable[[Vector, Vector, np.float32], None]

    def of_round(self, round_index: int) -> Arrays:
        """Return the array that names the round of the others."""
        return {self._round: np.array([round_index])}

    def if_counted(
        self, kept: Arrays, counted: int, *, earlier: Callable[[], Arrays], site: SiteId
    ) -> Arrays:
        """Take the arrays of the newest round whose update is in the model.

        Rounds may have been lost since, or undone by an older checkpoint. All sites go
        back to the same round, as some may have trained in these and others not.

        Args:
            kept: What a site has kept of its last round.
            counted: The newest round whose update of the site is a part of the model.
            earlier: Reads what the site has kept of that round; nothing if it is gone.
            site: For the log.

        Returns:
            ``kept``, with the method's arrays of that round. If these are gone, those
            that the last round began with; if that round is older, with ``lost``.
        """
        if self._round not in kept:
            return {**kept, self.lost: np.array([counted])} if counted else kept
        if kept[self._round][0] == counted:
            return kept
        others = {name: a for name, a in kept.items() if not self._is_own(name)}
        if counted == 0:
            return others
        found = earlier()
        if self._round in found:
            return others | {n: array for n, array in found.items() if self._is_own(n)}
        begun = {name: array for name, array in kept.items() if name != self.pending}
        if kept[self._round][0] < counted:
            _LOG.warning(
                "site %s keeps %s of round %d, but its update of round %d is a part "
                "of the model: the site lost newer state, and its corrections no "
                "longer cancel those of other sites; restore its state, or start a "
                "new run from this model (model.weights)",
                site,
                self.name,
                kept[self._round][0],
                counted,
            )
            begun[self.lost] = np.array([counted])
        return begun

    def check(self, kept: Arrays, names: tuple[str, ...], size: int) -> None:
        """Check that arrays that a site has kept are of a model of this size.

        Raises:
            CorruptObject: One of ``names`` is not.
        """
        for name in names:
            array = kept.get(name)
            if array is None:
                continue
            if array.shape != (size,) or array.dtype != np.float32:
                raise corrupt(
                    f"{name} of {array.size} values, and the model has {size}"
                )
            if not is_finite(array):
                raise corrupt(f"{name} with NaN or infinite values")

    @property
    def lost(self) -> str:
        """Name of an array with the round whose update counted, if the site lost it.

        Also in jobs without the method, if their tasks name rounds that counted.
        """
        return self.prefix + "lost"

    @property
    def _round(self) -> str:
        return self.prefix + "round"

    def _is_own(self, name: str) -> bool:
        return name.startswith(self.prefix)


def corrupt(fault: str) -> CorruptObject:
    """Return the error for a state that has a fault."""
    return CorruptObject(
        f"the site's state has {fault}: restore its files, or delete them and start a "
        "new run from the last model (model.weights)"
    )
