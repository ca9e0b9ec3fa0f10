"""Which sites take part in a round.

Every way is a pure function of the job, the state that the round begins with and the
time: a resumed run asks the same sites again. Anyone who knows the seed can foretell
uniform samples, and the others depend on what sites did: none amplifies privacy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from federation.errors import JobError, UserCodeError
from federation.ids import SiteId
from federation.job.code_files import unpinned
from federation.job.metrics import is_function
from federation.job.spec import JobSpec
from federation.members import Standing
from federation.protocols import NEVER_ASKED, RunProgress, SiteHistory

# Keeps this draw apart from others that start from the job's seed.
_COHORT_STREAM = 0xC0480
_MISSED = 0.5  # Of a round that counted: so a dead site gets twice its share at most.
# Oort's own settings (its section 5 and its code): the exponent of slowness; the part
# of a round's places for exploration, at first, at last, and from round to round; the
# quantile at which utilities are cut off; and the weight of staleness.
_ALPHA = 2.0
_EXPLORED, _LEAST_EXPLORED, _DECAY = 0.9, 0.2, 0.98
_CUT, _STALENESS = 0.95, 0.1

Draw = Callable[[RunProgress, float], tuple[SiteId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A site that a round may ask, as a function of the user's sees it.

    Attributes:
        name: The site.
        cloud: Where it runs, as the job says; so is the region.
        history: What it has done so far.
    """

    name: str
    cloud: str
    region: str
    history: SiteHistory


UsersChoice = Callable[..., Iterable[str]]


def cohorts_of(job: JobSpec, load: Callable[[str], UsersChoice] | None = None) -> Draw:
    """Return what draws the sites of a round, in the order of the job.

    Args:
        job: A checked job; its seed starts every draw.
        load: Imports a function of the user's; None where a job cannot have one.
    """
    ways: Mapping[str, UsersChoice] = {"fair": fair, "utility": by_utility}
    name = job.schedule.sampling
    choose = ways.get(name)
    if load is not None and is_function(name):
        choose = users_choice(load(name), job, name=unpinned(name))

    def draw(state: RunProgress, now: float) -> tuple[SiteId, ...]:
        index, size = state.round_index + 1, job.cohort_size
        entropy = [job.seed, index, _COHORT_STREAM]
        generator = np.random.default_rng(np.random.SeedSequence(entropy))
        if choose is None:
            drawn = generator.choice(len(job.sites), size=size, replace=False)
            return tuple(SiteId(job.sites[i].name) for i in sorted(drawn))
        found = _candidates(job, state, size)
        chosen = choose(
            found, size=size, round_index=index, generator=generator, now=now
        )
        names = {*chosen}
        return tuple(SiteId(one.name) for one in found if one.name in names)

    return draw


def _candidates(job: JobSpec, state: RunProgress, size: int) -> Sequence[Candidate]:
    """The sites that are there; all of them if too few are."""
    away = state.members.standing(*{*Standing} - {Standing.JOINED})
    found = [
        Candidate(
            name=site.name,
            cloud=site.cloud,
            region=site.region,
            history=state.history.get(SiteId(site.name), NEVER_ASKED),
        )
        for site in job.sites
    ]
    there = [one for one in found if one.name not in away]
    return there if len(there) >= size else found


def fair(
    candidates: Sequence[Candidate],
    *,
    size: int,
    generator: np.random.Generator,
    **_: object,
) -> list[str]:
    """Choose the sites whose updates counted least often, at random among equals.

    A round that a site missed counts half. So one that is often away is asked more
    often than others, and one that never answers twice as often at most.

    Args:
        candidates: The sites.
        size: How many to choose.
        generator: Orders equals.
    """
    order = generator.permutation(len(candidates))
    mixed = [candidates[i] for i in order]
    mixed.sort(key=lambda one: _MISSED * (one.history.asked + one.history.counted))
    return [one.name for one in mixed[:size]]


def by_utility(
    candidates: Sequence[Candidate],
    *,
    size: int,
    round_index: int,
    generator: np.random.Generator,
    **_: object,
) -> list[str]:
    """Choose sites from which the model learns most in the least time.

    Oort (Lai et al. 2021, arXiv:2010.06081, section 4 and Algorithm 1). A site ``i``
    of mean training loss ``l_i`` over ``B_i`` predictions, that was asked last in
    round ``L_i`` and took ``t_i`` seconds, has in round ``R`` the utility::

        (B_i l_i / max_j B_j l_j + sqrt(0.1 ln R / L_i)) (T / t_i)^2   if T < t_i

    and without the last factor otherwise. Losses are cut off at their 95 % quantile, so
    that a site which claims a large one gains little. Sites are drawn with
    probabilities in proportion.

    Other than there: sites report the mean of their losses and not its root mean
    square; ``T`` is the median of ``t_i``; and exploration, 0.9 of the places at first
    and 0.2 at last, takes the sites that were not asked for longest, where Oort takes
    only those never asked. So no site is forgotten, however slow it once was.

    Args:
        candidates: The sites.
        size: How many to choose.
        round_index: The round, from 1.
        generator: Draws them.
    """
    share = max(_LEAST_EXPLORED, _EXPLORED * _DECAY ** (round_index - 1))
    order = generator.permutation(len(candidates))
    oldest = sorted(order, key=lambda i: candidates[i].history.last_round)
    known = [i for i in oldest if candidates[i].history.loss is not None]
    num_exploited = min(len(known), size - round(share * size))
    weights = _utilities([candidates[i].history for i in known], round_index)
    exploited: set[int] = set()
    if num_exploited:
        drawn = generator.choice(known, num_exploited, replace=False, p=weights)
        exploited = {*drawn.tolist()}
    rest = [i for i in oldest if i not in exploited]
    chosen = [*exploited, *rest[: size - num_exploited]]
    return [candidates[i].name for i in chosen]


def _utilities(sites: Sequence[SiteHistory], round_index: int) -> list[float]:
    """Utilities of sites that have a loss, as probabilities."""
    if not sites:
        return []
    losses = np.array([max(0.0, (s.loss or 0.0) * s.predictions) for s in sites])
    losses = np.minimum(losses, np.quantile(losses, _CUT))
    last = np.array([max(1, site.last_round) for site in sites])
    found = losses / max(float(losses.max()), np.finfo(float).tiny)
    found += np.sqrt(_STALENESS * np.log(round_index) / last)
    seconds = np.array([site.seconds or 0.0 for site in sites])
    usual = median(seconds.tolist())
    slow = np.maximum(seconds, max(usual, np.finfo(float).tiny))
    found *= (max(usual, np.finfo(float).tiny) / slow) ** _ALPHA
    found += np.finfo(np.float32).tiny  # Each may be drawn.
    return [*map(float, found / found.sum())]


def users_choice(function: UsersChoice, job: JobSpec, *, name: str) -> UsersChoice:
    """Check what a function of the user's chooses.

    Args:
        function: Called as ``by_utility``, with ``now``, the time in seconds since
            1970, too; returns names.
        job: Says how few sites are enough.
        name: The function, as the job file names it.
    """

    def choose(
        candidates: Sequence[Candidate], *, size: int, **about: object
    ) -> list[str]:
        try:
            found = [*function(candidates, size=size, **about)]
        except Exception as error:
            # Foreign code may raise anything. This translates and does not continue.
            raise UserCodeError(name, error) from error
        odd = [each for each in found if each not in {one.name for one in candidates}]
        fewest = job.minimum_sites
        if odd or len({*found}) < len(found) or not fewest <= len(found) <= size:
            raise JobError(
                f"{name} chose {len(found)} sites"
                f"{f', among them {odd[0]!r:.80}' if odd else ''}: return {fewest} to "
                f"{size} names of the sites that it was given, each once",
                key="schedule.sampling",
            )
        return found

    return choose
