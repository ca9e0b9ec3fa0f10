"""All local methods, in the order in which they change a gradient."""

from collections.abc import Callable, Sequence

from clients.methods import control_variates, fixed_ranks, normalized_steps, proximal
from clients.methods.guest import Guest, LocalRound
from federation.vectors import Arrays, Vector

Begin = Callable[[LocalRound], Guest | None]

LOCAL_METHODS: Sequence[Begin] = (
    fixed_ranks.begin,
    control_variates.begin,
    proximal.begin,
    normalized_steps.begin,
)


def begin(start: LocalRound) -> Sequence[Guest]:
    """Begin a round of every method that the job uses."""
    return [guest for each in LOCAL_METHODS if (guest := each(start)) is not None]


def arrays(guests: Sequence[Guest], local_d: Vector) -> Arrays:
    """Return what all guests keep for the next round, at the site's weights."""
    return {
        name: array for guest in guests for name, array in guest.arrays(local_d).items()
    }
