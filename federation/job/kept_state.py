"""Everything that a site keeps from one round to the next, in one list.

What a site has kept decides what it computes. With secure aggregation, an aggregator
that steered one site's history would read that site's update off the difference of two
sums. So all sites of a sum begin a round with the state of one round, which the task
names and which is in every mask key; a site that lacks it does not answer, and all
begin with an older one, or with none. A method that is missing here, and whose
description does not say that it keeps arrays, keeps nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from federation.job.spec import JobSpec
from federation.methods.method import Method
from federation.methods.registry import METHODS
from federation.vectors import Layout, Role

# States that a site keeps with secure aggregation: a number of none of its keys.
KEPT_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Keeper:
    """A method that keeps values at a site.

    Attributes:
        is_on: Whether a job uses it, with a model of this layout.
        evaluates: Whether the site's evaluations depend on these values too.
    """

    is_on: Callable[[JobSpec, Layout], bool]
    evaluates: bool = False


def _keeper(method: Method) -> Keeper:
    return Keeper(lambda job, _: method.is_on(job))


KEEPERS: Mapping[str, Keeper] = {
    **{method.name: _keeper(method) for method in METHODS if method.keeps},
    "residual of a codec": Keeper(lambda job, _: job.communication.links.feedback > 0),
    "personal parts": Keeper(lambda _, layout: layout.num_personal > 0, evaluates=True),
    "integers of its own": Keeper(
        lambda _, layout: bool(layout.integer_mask(Role.KEEP).any()), evaluates=True
    ),
}


def keepers(job: JobSpec, layout: Layout, *, trains: bool = True) -> tuple[str, ...]:
    """Name what a site keeps that training, or else an evaluation, depends on."""
    return tuple(
        name
        for name, keeper in KEEPERS.items()
        if (trains or keeper.evaluates) and keeper.is_on(job, layout)
    )
