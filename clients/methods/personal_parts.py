"""Personal parts, which a site trains and never sends: see ``clients.models.personal``.

Their values come into the model wherever it is loaded, also to be evaluated; here they
are kept of a round.
"""

from clients.methods.guest import UNSTABLE, Guest, LocalRound, NotFinite
from clients.models import personal
from federation.vectors import Arrays, IntegerVector, Vector, is_finite


class PersonalParts(Guest):
    """A site's personal parts in one round."""

    def __init__(self, start: LocalRound) -> None:
        """Hold on to the parts that the round began with."""
        self._model, self._layout, self._kept = start.model, start.layout, start.kept
        unit = start.job.privacy.differential_privacy.unit
        self._must_not_tell = unit == "site"

    def arrays(self, _local_d: Vector, _local_m: IntegerVector) -> Arrays:
        """Return what the site keeps of its personal parts.

        Raises:
            NotFinite: Training left the finite numbers: every later round would begin
                with these. Not where whole sites are protected, whose answer must
                not tell this: then the parts are those that the round began with.
        """
        own = self.state()
        if all(map(is_finite, own.values())):
            return own
        if not self._must_not_tell:
            raise NotFinite(UNSTABLE)
        return personal.unchanged(self._kept)

    def state(self) -> Arrays:
        """Return the parts as they are now."""
        return personal.to_keep(self._model, self._layout)

    def restore(self, state: Arrays) -> None:
        """Put parts of the same round into the model."""
        own_p = personal.own_part(state)
        if own_p is not None:
            personal.load(self._model, self._layout, own_p)


def begin(start: LocalRound) -> PersonalParts | None:
    """Begin a round, if the model has personal parts."""
    return PersonalParts(start) if start.layout.num_personal else None
