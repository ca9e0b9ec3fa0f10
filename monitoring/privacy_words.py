"""The guarantees of differential privacy, in words for a terminal or a page.

An epsilon never stands alone: with it come delta, the unit, the neighbouring relation,
the accountant and what that assumes of the sampling. Nothing here accounts.
"""

import math
from collections.abc import Iterable, Iterator

from federation.epsilon_text import format_cap, format_epsilon
from federation.events import ModelEvaluated, PrivacyPlanned, SitePrivacy
from federation.job.metrics import MAX_LOSS
from federation.messages import PrivacySpent
from monitoring.units import format_count, format_delta
from privacy.dp.budget import MIN_SIGNAL_TO_NOISE

NOISY = "~"  # before a number that carries noise

_RELATIONS = {
    "add or remove one record": "one record added or removed",
    "add or remove all records of one person": (
        "all records of one person added or removed"
    ),
}

# Whose epsilon it is.
_WHOSE = {
    "record": "at each site",
    "person": "at each site",
    "joint": "for the records of each site",
    "site": "for each site",
}


def terms(planned: PrivacyPlanned) -> str:
    """The terms of an epsilon: ``one record added or removed; PLD; ...``."""
    relation = _RELATIONS.get(planned.relation, planned.relation)
    # What follows a colon explains the assumption, which has its place elsewhere.
    sampling = planned.sampling.split(":")[0]
    return f"{relation}; {planned.accountant.upper()}; {sampling}"


def cap(planned: PrivacyPlanned) -> float | None:
    """The largest epsilon that any site allows; None without sites."""
    return max((site.epsilon_cap for site in planned.sites), default=None)


BY_RESULTS = "the run's results decided when it stopped, so the cap is the guarantee"


def epsilon_of_cap(
    epsilon: float | None, planned: PrivacyPlanned, *, by_results: bool = False
) -> str:
    """The spent part of the cap: ``7.93 of 8``; the guarantee comes first.

    Args:
        epsilon: What was spent.
        planned: What was promised.
        by_results: Whether results ended the run. What is spent then depends on what
            was released, and only the cap was fixed before: ``8 (2.35 charged)``.
    """
    bound = cap(planned)
    if by_results and bound is not None:
        return f"{format_cap(bound)} ({format_epsilon(epsilon)} charged)"
    of_cap = "" if bound is None else f" of {format_cap(bound)}"
    return f"{format_epsilon(epsilon)}{of_cap}"


def spent(
    planned: PrivacyPlanned, total: PrivacySpent | None, *, by_results: bool = False
) -> str:
    """The guarantee and its terms, in one line without ``epsilon``."""
    if total is None:
        return f"not reported by any site ({terms(planned)})"
    held_out = ""
    if total.held_out_epsilon is not None:
        held_out = f", held-out {format_epsilon(total.held_out_epsilon)}"
        if by_results:
            guarantee = epsilon_of_cap(total.held_out_epsilon, planned, by_results=True)
            held_out = f", held-out {guarantee}"
    why = f"; {BY_RESULTS}" if by_results else ""
    # The largest of each are then of different sites, and hold for all of them.
    bound = "at most " if len({site.delta for site in planned.sites}) > 1 else ""
    return (
        f"{bound}{epsilon_of_cap(total.epsilon, planned, by_results=by_results)} "
        f"at delta {format_delta(total.delta)} ({terms(planned)}){held_out}{why}"
    )


def promise(planned: PrivacyPlanned) -> str:
    """The guarantee before anything is spent, in one line."""
    bound = cap(planned)
    deltas = [site.delta for site in planned.sites]
    at_most = "no bound" if bound is None else f"epsilon at most {format_cap(bound)}"
    at_delta = f" at delta {format_delta(max(deltas))}" if deltas else ""
    relation = _RELATIONS.get(planned.relation, planned.relation)
    whose = _WHOSE.get(planned.unit, "at each site")
    return (
        f"unit {planned.unit}: {at_most}{at_delta} {whose} "
        f"({relation}; {planned.accountant.upper()}; {planned.sampling})"
    )


_UNITS = {
    "record": "any one training record of a site",
    "person": "all records of any one person at a site",
    "joint": "any one training record of a site",
    "site": "all that any one site holds",
}


def is_in_sum(planned: PrivacyPlanned | None) -> bool:
    """Whether the noise is only in the secure sum, and not at single sites."""
    return planned is not None and planned.unit in {"joint", "site"}


def is_of_sites(planned: PrivacyPlanned | None) -> bool:
    """Whether a whole site is the unit, so that epsilon is the same for all."""
    return planned is not None and planned.unit == "site"


def unit(planned: PrivacyPlanned) -> str:
    """The protected unit, in words: ``any one training record of a site``."""
    return _UNITS.get(planned.unit, f"any one {planned.unit}")


def meaning(
    planned: PrivacyPlanned, total: PrivacySpent | None, *, by_results: bool = False
) -> str:
    """The guarantee in plain words, with the spending."""
    whose = unit(planned)
    seen = "the sums of the sites'" if is_in_sum(planned) else "the sites'"
    text = (
        f"Whatever is computed from {seen} updates and from the model would look "
        f"almost the same with {whose} left out or added"
    )
    if total is None:
        return f"{text}. No site has reported its spending yet."
    where = "For every site" if is_of_sites(planned) else "At each site"
    why = f" {BY_RESULTS[0].upper()}{BY_RESULTS[1:]}." if by_results else ""
    return (
        f"{text}: no outcome is more than e^epsilon times as likely, up to a "
        f"probability of delta. {where}, epsilon is at most "
        f"{epsilon_of_cap(total.epsilon, planned, by_results=by_results)} at delta "
        f"{format_delta(total.delta)} ({terms(planned)}).{why}"
    )


def signal(planned: PrivacyPlanned) -> str | None:
    """How far updates stand out of the noise; None if that is not reported."""
    ratio = planned.signal_to_noise
    if ratio is None:
        return None
    text = (
        f"signal-to-noise ratio {ratio:.2g}: the largest mean update that clipping "
        "allows, divided by its noise"
    )
    return text if ratio >= MIN_SIGNAL_TO_NOISE else f"{text}; mostly noise"


def means(planned: PrivacyPlanned, sites: Iterable[SitePrivacy]) -> str:
    """How sites keep their promise, in one line; a range where they differ."""
    found = tuple(sites)
    multiplier = _range((site.noise_multiplier for site in found), ".3f")
    parts = [f"noise multiplier {multiplier}"]
    if is_in_sum(planned):
        parts = [f"noise multiplier {multiplier} in the sum"]
    if is_of_sites(planned):  # They are not sampled, and a round is one release.
        return parts[0]
    rate = _range((site.sampling_rate for site in found), ".4g")
    parts.append(f"sampling rate {rate}")
    steps = {site.steps_per_round for site in found}
    noun = "step" if steps == {1} else "steps"
    parts.append(f"{_range(steps, 'd')} {noun} a round")
    noises = [s.held_out_noise for s in found if s.held_out_noise is not None]
    if noises:
        parts.append(f"held-out counts +-{_range(noises, '.3g')}")
    return "  ".join(parts)


def lines(planned: PrivacyPlanned, max_sites: int) -> Iterator[str]:
    """The lines on a run's privacy at its start.

    Args:
        planned: What is promised.
        max_sites: With more sites than this they share a line.
    """
    yield promise(planned)
    if planned.holds_against:
        yield f"holds against {planned.holds_against}"
    if len(planned.sites) <= max_sites and not is_of_sites(planned):
        yield from (f"{s.site}  {means(planned, [s])}" for s in planned.sites)
    else:
        num_sites = format_count(len(planned.sites), "site")
        yield f"{num_sites}  {means(planned, planned.sites)}"
    found = signal(planned)
    if found is not None:
        yield found
    yield from planned.withheld
    if has_noise(planned):
        yield f"{NOISY} marks a result with noise, +- its standard deviation"
    yield from (f"layer replaced  {layer}" for layer in planned.replaced)


def has_noise(planned: PrivacyPlanned | None) -> bool:
    """Whether held-out results leave some site with noise."""
    return planned is not None and any(
        site.held_out_noise is not None for site in planned.sites
    )


def accuracy_noise(
    planned: PrivacyPlanned | None, event: ModelEvaluated | None
) -> float | None:
    """Standard deviation of the noise on a pooled accuracy, as a fraction.

    To first order: the numbers of right predictions and of all of them carry noise
    of the same size s, so that of r / n is ``s * sqrt(1 + (r / n)^2) / n``.

    Returns:
        None if the accuracy carries no noise, or if there is none.
    """
    if event is None or not _counts_right(event):
        return None
    noise = count_noise(planned, event) / event.pooled.count
    return noise * math.hypot(1, event.pooled.accuracy) if noise else None


def loss_noise(
    planned: PrivacyPlanned | None, event: ModelEvaluated | None
) -> float | None:
    """Standard deviation of the noise on a pooled loss, in nats; as for accuracy.

    A prediction adds up to ``MAX_LOSS`` to the sum of losses, and 1 to the number of
    right ones: the noise on the first is as many times larger. The bounds of an
    objective of a user's are not in the events, and its noise is not known here.
    """
    if event is None or not _counts_right(event):
        return None
    noise = count_noise(planned, event) / event.pooled.count
    return noise * math.hypot(MAX_LOSS, event.pooled.loss) if noise else None


def _counts_right(event: ModelEvaluated) -> bool:
    """Whether there are predictions, and a number of correct ones."""
    return event.pooled.count > 0 and "correct" in event.pooled.metrics


def count_noise(planned: PrivacyPlanned | None, event: ModelEvaluated) -> float:
    """Standard deviation of the noise on a count of predictions of all sites."""
    noises = _noises(planned)
    variance = sum((noises.get(site) or 0.0) ** 2 for site in event.sites)
    return math.sqrt(variance)


def _noises(planned: PrivacyPlanned | None) -> dict[str, float | None]:
    sites = planned.sites if planned else ()
    return {site.site: site.held_out_noise for site in sites}


def format_points(noise: float) -> str:
    """A standard deviation of an accuracy in percentage points: ``0.6``."""
    points = 100 * noise
    return f"{points:.1f}" if points >= 0.05 else f"{points:.1g}"  # noqa: PLR2004


def plus_minus(noise: float | None) -> str:
    """The noise on a loss, to be put behind it: `` +-0.17``; nothing for None."""
    return "" if noise is None else f" +-{noise:.2g}"


def _range(values: Iterable[float], form: str) -> str:
    texts = [format(value, form) for value in sorted(values)]
    if not texts:
        return "-"
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
