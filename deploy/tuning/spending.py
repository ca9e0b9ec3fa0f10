"""What the trials of a search have spent together, by the ledgers of their sites.

Each trial is a run on the same records, so what all of them release composes. A trial
that ended early or failed counts with what it released.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from deploy.tools import ledger_reader
from federation.errors import CorruptObject
from federation.job.spec import JobSpec
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger_format import PURPOSES, Purpose

# By site and purpose: training and held-out records are different ones.
_Events = Mapping[tuple[str, Purpose], Sequence[PrivacyEvent]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpending:
    """What a search has spent.

    Attributes:
        events: Of all trials, by site and purpose.
        delta: The largest of the ledgers.
    """

    events: _Events
    delta: float

    def epsilon(self, delta: float) -> float:
        """Largest epsilon of any site, an upper bound; infinity if there is none."""
        return max(
            (accountant.epsilon(events, delta) for events in self.events.values()),
            default=0.0,
        )


def spent(trials: Sequence[Path]) -> SearchSpending | None:
    """Add up what runs have spent; None if none of them has a ledger.

    Raises:
        CorruptObject: A ledger is damaged, so that nobody knows what was spent.
    """
    found: dict[tuple[str, Purpose], list[PrivacyEvent]] = defaultdict(list)
    deltas = []
    for path in chain.from_iterable(map(ledger_reader.below, trials)):
        finding = ledger_reader.examine(path)
        if finding.contents is None:
            raise CorruptObject(
                f"{path}: {finding.error}: what the search has spent is unknown, so it "
                "does not continue; restore the file, or begin again with another "
                "--out and count both"
            )
        terms = finding.contents.terms
        deltas.append(terms.delta)
        for purpose in PURPOSES:
            found[terms.site, purpose] += finding.contents.events(purpose)
    return SearchSpending(events=found, delta=max(deltas)) if deltas else None


def refusal(
    job: JobSpec,
    so_far: SearchSpending | None,
    *,
    epsilon_cap: float,
    delta: float | None,
) -> str:
    """Why a trial may not start; empty if it may.

    A run ends at its cap, `target_epsilon` at its own delta. By basic composition
    (Dwork and Roth 2014, theorem 3.16) epsilons and deltas add up: what was spent so
    far is counted at what its delta leaves.

    Args:
        job: Of the trial.
        so_far: What earlier trials have spent.
        epsilon_cap: Of all trials; 0 for no limit.
        delta: Of all trials.
    """
    private = job.privacy.differential_privacy
    if not epsilon_cap or not private.enabled:
        return ""
    if private.target_epsilon is None or private.delta is None:
        return "privacy.max_epsilon needs a job with a delta, to know what a trial adds"
    total = 2 * private.delta if delta is None else delta
    left = total - private.delta
    if left <= 0:
        return (
            f"privacy.delta is {total:g}, and one trial has {private.delta:g}: it must "
            "be larger"
        )
    before = 0.0 if so_far is None else so_far.epsilon(left)
    if before + private.target_epsilon <= epsilon_cap:
        return ""
    return (
        f"another trial could take a site to epsilon "
        f"{before + private.target_epsilon:.4g} at delta {total:g}, beyond "
        f"privacy.max_epsilon, {epsilon_cap:g}"
    )
