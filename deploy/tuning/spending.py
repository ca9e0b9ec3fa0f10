"""What the trials of a search have spent together, by the ledgers of their sites.

Each trial is a run on the same records, so what all of them release composes. A trial
that ended early or failed counts with what it released.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.tools import ledger_reader
from deploy.tuning.ledger_marks import LedgerMark
from federation.epsilon_text import format_epsilon
from federation.errors import CorruptObject
from federation.job.spec import JobSpec
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger_files import is_begun
from privacy.dp.ledger.ledger_format import PURPOSES, Purpose

# Site and purpose: training and held-out records are different ones.
Spender = tuple[str, Purpose]
_Events = Mapping[Spender, Sequence[PrivacyEvent]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpending:
    """What a search has spent.

    Attributes:
        events: Events of all trials, by site and purpose.
        delta: The largest of the ledgers.
        trials: The same of each trial, in their order.
    """

    events: _Events
    delta: float
    trials: Sequence[_Events] = ()

    def epsilon(self, delta: float) -> float:
        """Largest epsilon of any site, an upper bound; infinity if there is none."""
        return max(
            (accountant.epsilon(events, delta) for events in self.events.values()),
            default=0.0,
        )


def spent(
    trials: Mapping[Path, Mapping[str, LedgerMark | None]],
) -> SearchSpending | None:
    """Add up what runs have spent; None if none of them has a ledger.

    Args:
        trials: Folders of runs, and the sites that must have a ledger there, each with
            what it must continue, if that is known.

    Raises:
        CorruptObject: A ledger is damaged, missing or an older copy: what was spent is
            unknown.
    """
    found: dict[Spender, list[PrivacyEvent]] = defaultdict(list)
    deltas, each = [], []
    for folder, sites in trials.items():
        paths = [*filter(is_begun, ledger_reader.below(folder))]
        if lost := set(sites) - {path.parent.name for path in paths}:
            names = ", ".join(sorted(lost))
            raise _unknown(f"{folder}: the ledger of {names} is missing")
        own: dict[Spender, Sequence[PrivacyEvent]] = {}
        for path in paths:
            finding = ledger_reader.examine(path)
            if finding.contents is None:
                raise _unknown(f"{path}: {finding.error}")
            mark = sites.get(path.parent.name)
            if mark is not None and (fault := mark.fault(finding.contents)):
                raise _unknown(f"{path}: {fault}")
            terms = finding.contents.terms
            deltas.append(terms.delta)
            for purpose in PURPOSES:
                own[terms.site, purpose] = finding.contents.events(purpose)
                found[terms.site, purpose] += finding.contents.events(purpose)
        each.append(own)
    if not deltas:
        return None
    return SearchSpending(events=found, delta=max(deltas), trials=each)


def may_have_spent(folder: Path) -> bool:
    """Whether a ledger of a run holds a charge, or is damaged and may have held one."""
    findings = map(ledger_reader.examine, filter(is_begun, ledger_reader.below(folder)))
    return any(one.contents is None or one.contents.seq > 0 for one in findings)


def _unknown(what: str) -> CorruptObject:
    return CorruptObject(
        f"{what}: what the search has spent is unknown, so it does not continue; "
        "restore them, or begin again with another --out and count both"
    )


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
        job: Job of the trial.
        so_far: What earlier trials have spent.
        epsilon_cap: Cap of all trials together.
        delta: Delta of all trials.
    """
    private = job.privacy.differential_privacy
    # A search with a budget is refused if its job has none of them.
    own_cap, own_delta = private.target_epsilon or math.inf, private.delta or 1.0
    total = 2 * own_delta if delta is None else delta
    left = total - own_delta
    if left <= 0:
        return (
            f"privacy.delta is {total:g}, and one trial has {own_delta:g}: it must be "
            "larger"
        )
    reached = own_cap + (0.0 if so_far is None else so_far.epsilon(left))
    if reached <= epsilon_cap:
        return ""
    return (
        f"another trial could take a site to epsilon "
        f"{format_epsilon(reached)} at delta {total:g}, beyond "
        f"privacy.max_epsilon, {epsilon_cap:g}"
    )
