"""What a site remembers of its ledgers, in a separate place, over all runs.

A run's ledger is in the run's folder, which may be deleted or restored. The site's
memory knows two things of every run: how many charges its ledger held, so that one
that has lost some is noticed; and what was charged, so that all runs on one dataset
together have a budget that no deleted folder refills.

Each charge is durable in both before anything is released. The ledger comes first,
inside the update of the memory: a crash in between leaves the ledger ahead, and the
memory takes over what it lacks when the ledger is opened next.

The budget of all runs counts every event as if it were about the same records. Inside
a run, training and held-out records are different ones; which are which may change
from run to run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clients.privacy.site_memory import Document, SiteMemory
from federation.epsilon_text import format_epsilon
from federation.errors import BudgetExceeded, CorruptObject, JobError
from federation.ids import RunId
from federation.messages import NO_ANCHOR, LedgerAnchor
from privacy.dp import accountant
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import Ledger, Release
from privacy.dp.ledger.ledger_format import Charge, Purpose, Terms

DOCUMENT = "ledgers"
_RUNS, _DATASETS, _REPEATED = "runs", "datasets", "repeated"
_CONTENTS, _MAX_CONTENTS = "contents", 256
_UNIT = "privacy.differential_privacy.unit"
_TARGET = "privacy.differential_privacy.target_epsilon"

_Kind = tuple[float, float, float]
_NONE = Counter[_Kind]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a run that is at work on a dataset has planned to spend.

    Attributes:
        delta: The probability that goes with its epsilon.
        planned: All that it will release, if nothing is done twice.
    """

    run_id: RunId
    delta: float
    planned: tuple[PrivacyEvent, ...]


class ClosableLedger(Ledger, Protocol):
    """A ledger that holds something open."""

    def close(self) -> None:
        """Close it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeBudget:
    """What all runs on one dataset of a site may spend together.

    Attributes:
        dataset: What the operator calls the data. Their content does not matter: with
            one record changed the others have still spent what they have.
        epsilon: The most; None to count and not to limit.
        delta: The probability that goes with it; None for the smallest of the runs.
        key: Key of the limit, for messages.
    """

    dataset: str
    epsilon: float | None = None
    delta: float | None = None
    key: str = "policy.total_epsilon"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeSpent:
    """What all runs on one dataset have spent together.

    Attributes:
        dataset: Its name.
        relation: Neighbouring relation of all of them.
        num_runs: How many have charged something.
        epsilon: By composition of everything that was charged; an upper bound.
        delta: The probability that goes with it.
        num_contents: How many different contents the data had, as far as is known.
    """

    dataset: str
    relation: str
    num_runs: int
    epsilon: float
    delta: float
    num_contents: int


def known_anchor(memory: SiteMemory, run_id: RunId) -> LedgerAnchor:
    """Return how many charges a run's ledger is known to have held.

    Raises:
        StoreError: The memory cannot be read, or is damaged.
    """
    return _anchor(memory.read(DOCUMENT), run_id)


def keep_anchor(memory: SiteMemory, run_id: RunId, anchor: LedgerAnchor) -> None:
    """Remember an anchor of a run; a smaller one than before changes nothing.

    Raises:
        StoreError: The memory cannot be read or made durable.
    """
    if not anchor.is_within(known_anchor(memory, run_id)):
        memory.update(DOCUMENT, lambda known: _raised(known, run_id, anchor))


def adopt(
    memory: SiteMemory, dataset: str, terms: Terms, charges: Sequence[Charge]
) -> None:
    """Count charges of another ledger of the site that its memory lacks.

    It lacks them where it was lost, or restored from a backup.

    Raises:
        JobError: The ledger is about other neighbours than those before it.
        StoreError: The memory cannot be read or made durable.
    """
    events = _merged(charge.event for charge in charges)
    document = memory.read(DOCUMENT)
    if any(_covers(d, terms.run_id, events) for d in _datasets(document)):
        return
    memory.update(DOCUMENT, lambda known: _noted(known, dataset, terms, events))


def lifetime(memory: SiteMemory, budget: LifetimeBudget) -> LifetimeSpent | None:
    """Compose what all runs on a dataset have spent; None if there is nothing.

    Raises:
        StoreError: The memory cannot be read, or is damaged.
    """
    document = memory.read(DOCUMENT)
    entry = document.get(_DATASETS, {}).get(budget.dataset)
    runs = {} if entry is None else _charged(entry["runs"])
    if entry is None or not runs:
        return None
    delta = budget.delta or min(run["delta"] for run in runs.values())
    return LifetimeSpent(
        dataset=budget.dataset,
        relation=entry["relation"],
        num_runs=len(runs),
        epsilon=accountant.epsilon(_events(runs), delta),
        delta=delta,
        num_contents=max(1, len(_contents(document, budget.dataset))),
    )


def run_epsilon(memory: SiteMemory, run_id: RunId) -> float:
    """Epsilon of all that a run was charged for, whatever its ledger still holds.

    Training and held-out records count as if they were the same ones.

    Raises:
        StoreError: The memory cannot be read, or is damaged.
    """
    found = (entry["runs"] for entry in _datasets(memory.read(DOCUMENT)))
    runs = [one[run_id] for one in found if run_id in one]
    return max(
        (accountant.epsilon(_events({run_id: run}), run["delta"]) for run in runs),
        default=0.0,
    )


def datasets(memory: SiteMemory) -> Sequence[str]:
    """Names of the datasets that runs have been charged to.

    Raises:
        StoreError: The memory cannot be read, or is damaged.
    """
    return [*memory.read(DOCUMENT).get(_DATASETS, {})]


def note_content(memory: SiteMemory, dataset: str, digest: str) -> bool:
    """Store the digest of the data behind a name; return whether it has changed.

    They have if they were others before and never these, so it is said once.

    Args:
        memory: The site's.
        dataset: The name.
        digest: See ``data_digest``.

    Raises:
        StoreError: The memory cannot be read or made durable.
    """
    before = _contents(memory.read(DOCUMENT), dataset)
    if digest in before:
        return False

    def change(document: Document) -> Document:
        known = [*_contents(document, dataset), digest]
        found = {**document.get(_CONTENTS, {}), dataset: known[-_MAX_CONTENTS:]}
        return {**document, _CONTENTS: found}

    memory.update(DOCUMENT, change)
    return bool(before)


def one_budget(dataset: str) -> str:
    """Say what changed data mean for the budget of their name."""
    return (
        f"the budget of {dataset!r} continues, because records that were there before "
        "keep what they have spent. Use a new data.name in site.toml only if the data "
        "contains no record of the old data"
    )


def _contents(document: Document, dataset: str) -> list[str]:
    found: list[str] = document.get(_CONTENTS, {}).get(dataset, [])
    return found


def dataset_of(memory: SiteMemory, run_id: str) -> str | None:
    """Return the name of the dataset that a run was charged to; None if it is unknown.

    Raises:
        StoreError: The memory cannot be read, or is damaged.
    """
    datasets = memory.read(DOCUMENT).get(_DATASETS, {})
    return next((name for name, d in datasets.items() if run_id in d["runs"]), None)


def check_plan(
    memory: SiteMemory,
    budget: LifetimeBudget,
    terms: Terms,
    planned: Iterable[PrivacyEvent],
    reserved: Sequence[Reservation] = (),
) -> None:
    """Refuse a run that the budget of all runs cannot cover to its end.

    Nothing is written. Runs that have ended or been left count with what they have
    charged.

    Args:
        memory: The site's.
        budget: Budget of all runs on the data.
        terms: Terms of the run.
        planned: All that the run will release, if nothing is done twice.
        reserved: Plans of the runs on the data that are at work beside it: they count
            whole, or two runs could each begin and neither be finished.

    Raises:
        JobError: It is not allowed, or earlier runs were about other neighbours.
        StoreError: The memory cannot be read, or is damaged.
    """
    document = memory.read(DOCUMENT)
    entry = document.get(_DATASETS, {}).get(budget.dataset, {_RUNS: {}})
    _check_relation(entry, budget.dataset, terms)
    if budget.epsilon is None:
        return
    own = _merged(_events({"": entry[_RUNS].get(terms.run_id, {"events": []})}))
    others = _with_plans(_other_runs(document, budget, terms), reserved)
    epsilon, delta = _composed(budget, terms, others, own | _merged(planned))
    if epsilon > budget.epsilon:
        before, _ = _composed(budget, terms, others, own)
        spent = "have spent or planned" if reserved else "have spent"
        raise JobError(
            f"site {terms.site!r}: all runs on {budget.dataset!r} {spent} epsilon "
            f"{format_epsilon(before)} at delta {delta:g}, this one would take it to "
            f"{format_epsilon(epsilon)}, and {budget.epsilon:g} is allowed "
            f"({budget.key}). Lower target_epsilon, or run fewer rounds",
            key=_TARGET,
            remedy={budget.key: math.ceil(100 * epsilon) / 100},
        )


class RememberedLedger:
    """A ledger whose charges are also in its site's memory.

    Args:
        ledger: The run's own.
        memory: The site's.
        budget: Budget of all runs on the data.
        planned: All that the run will release, if nothing is done twice.
        reserved: See ``check_plan``.

    Raises:
        JobError: The run could exceed the budget, or earlier runs on the data were
            about other neighbours.
        StoreError: The memory cannot be read or made durable.
    """

    def __init__(
        self,
        ledger: ClosableLedger,
        memory: SiteMemory,
        budget: LifetimeBudget,
        planned: Iterable[PrivacyEvent] = (),
        reserved: Sequence[Reservation] = (),
    ) -> None:
        """Note what the ledger is ahead of the memory, as after a crash."""
        self._ledger = ledger
        self._memory = memory
        self._budget = budget
        known = memory.read(DOCUMENT).get(_DATASETS, {}).get(budget.dataset, {})
        run = known.get(_RUNS, {}).get(ledger.terms.run_id, {})
        self._repeated = _merged(_events({"": {"events": run.get(_REPEATED, [])}}))
        self._own = _spent(ledger) - self._repeated
        self._planned = _merged(planned) | self._own
        check_plan(memory, budget, ledger.terms, planned, reserved)
        if self._own:  # A run that has charged nothing leaves no trace.
            memory.update(DOCUMENT, self._note)
        # With these other runs the plan is within the budget: a charge within it need
        # not be composed with theirs again.
        self._others = _other_runs(memory.read(DOCUMENT), budget, ledger.terms)

    @property
    def terms(self) -> Terms:
        """See ``Ledger.terms``."""
        return self._ledger.terms

    def charge(
        self, event: PrivacyEvent, *, round_index: int, purpose: Purpose = "train"
    ) -> float:
        """See ``Ledger.charge``."""
        (spent,) = self.charge_all([(event, purpose)], round_index=round_index)
        return spent

    def charge_all(
        self, releases: Sequence[Release], *, round_index: int
    ) -> tuple[float, ...]:
        """See ``Ledger.charge_all``; also refused beyond the budget of all runs."""
        found: list[float] = []

        def change(document: Document) -> Document:
            after = self._own + _merged(event for event, _ in releases)
            self._check_total(document, after, round_index)
            found.extend(self._ledger.charge_all(releases, round_index=round_index))
            # The ledger may hold one more: of a write that failed half-way.
            self._own = after | (_spent(self._ledger) - self._repeated)
            return self._note(document)

        self._memory.update(DOCUMENT, change)
        return tuple(found)

    def repeat(self, event: PrivacyEvent, *, round_index: int) -> None:
        """Charge this run for another run's release, and all runs only once.

        After a crash in between, all runs are charged twice.
        """

        def change(document: Document) -> Document:
            self._ledger.charge(event, round_index=round_index)
            self._repeated += _merged([event])
            return self._note(document)

        self._memory.update(DOCUMENT, change)

    def epsilon(self, purpose: Purpose = "train", *more: PrivacyEvent) -> float:
        """See ``Ledger.epsilon``."""
        return self._ledger.epsilon(purpose, *more)

    def charges(self) -> tuple[Charge, ...]:
        """See ``Ledger.charges``."""
        return self._ledger.charges()

    def anchor(self) -> LedgerAnchor:
        """See ``Ledger.anchor``."""
        return self._ledger.anchor()

    def check_anchor(self, anchor: LedgerAnchor) -> None:
        """See ``Ledger.check_anchor``; what is refused is kept, for the recovery."""
        try:
            self._ledger.check_anchor(anchor)
        except LedgerBehind:
            keep_anchor(self._memory, RunId(self.terms.run_id), anchor)
            raise

    def close(self) -> None:
        """Close the run's ledger."""
        self._ledger.close()

    def _note(self, document: Document) -> Document:
        """Copy the ledger's charges to the memory."""
        run_id = self.terms.run_id
        document = _raised(document, RunId(run_id), self._ledger.anchor())
        dataset, own = self._budget.dataset, self._own
        return _noted(document, dataset, self.terms, own, self._repeated)

    def _check_total(
        self, document: Document, after: Counter[_Kind], round_index: int
    ) -> None:
        limit = self._budget.epsilon
        others = _other_runs(document, self._budget, self.terms)
        if limit is None or (after <= self._planned and others == self._others):
            return
        if others != self._others:  # Another process has charged something meanwhile.
            whole = self._planned | after
            if _composed(self._budget, self.terms, others, whole)[0] <= limit:
                self._planned, self._others = whole, others
                return
        epsilon, delta = _composed(self._budget, self.terms, others, after)
        if epsilon > limit:
            raise BudgetExceeded(
                f"round {round_index} would take all runs on {self._budget.dataset!r} "
                f"at site {self.terms.site!r} to epsilon {format_epsilon(epsilon)} at "
                f"delta {delta:g}, beyond {limit:g} ({self._budget.key}); nothing was "
                "released. Only the site's operator can raise the limit",
                epsilon=epsilon,
                cap=limit,
            )


def _spent(ledger: Ledger) -> Counter[_Kind]:
    return _merged(charge.event for charge in ledger.charges())


def _other_runs(
    document: Document, budget: LifetimeBudget, terms: Terms
) -> Mapping[str, Any]:
    entry = document.get(_DATASETS, {}).get(budget.dataset, {_RUNS: {}})
    return {name: run for name, run in entry[_RUNS].items() if name != terms.run_id}


def _with_plans(
    others: Mapping[str, Any], reserved: Iterable[Reservation]
) -> Mapping[str, Any]:
    """Count runs at work with their plans, where they have not charged more."""
    found = dict(others)
    for each in reserved:
        before = _events({"": found.get(each.run_id, {"events": []})})
        events = _merged(before) | _merged(each.planned)
        found[each.run_id] = {"delta": each.delta, "events": _listed(events)}
    return found


def _composed(
    budget: LifetimeBudget,
    terms: Terms,
    others: Mapping[str, Any],
    own: Counter[_Kind],
) -> tuple[float, float]:
    """Epsilon of other runs and of this one, and the delta that goes with it."""
    runs = _charged(others)
    delta = budget.delta or min([terms.delta, *(r["delta"] for r in runs.values())])
    events = [*_events(runs), *map(_event, own.items())]
    return accountant.epsilon(events, delta), delta


def _anchor(document: Document, run_id: RunId) -> LedgerAnchor:
    found = document.get(_RUNS, {}).get(run_id)
    if found is None:
        return NO_ANCHOR
    counts = [found.get(name) for name in ("train", "evaluate")]
    if not all(type(n) is int and n >= 0 for n in counts):
        raise CorruptObject(
            f"this site's memory of its ledger of run {run_id} is damaged: restore the "
            f"document {DOCUMENT!r}"
        )
    return LedgerAnchor(train=counts[0], evaluate=counts[1])


def _raised(document: Document, run_id: RunId, anchor: LedgerAnchor) -> Document:
    joined = _anchor(document, run_id).joined(anchor)
    entry = {"train": joined.train, "evaluate": joined.evaluate}
    return {**document, _RUNS: {**document.get(_RUNS, {}), run_id: entry}}


def _noted(
    document: Document,
    dataset: str,
    terms: Terms,
    events: Counter[_Kind],
    repeated: Counter[_Kind] = _NONE,
) -> Document:
    """Put a run's events into a dataset's entry; what it had before stays, or grows."""
    datasets = document.get(_DATASETS, {})
    entry = datasets.get(dataset, {"relation": terms.relation, "runs": {}})
    _check_relation(entry, dataset, terms)
    before = entry["runs"].get(terms.run_id)
    kept = events if before is None else events | _merged(_events({"": before}))
    run = {"delta": terms.delta, "events": _listed(kept)}
    if repeated:
        run[_REPEATED] = _listed(repeated)
    elif before is not None and _REPEATED in before:
        run[_REPEATED] = before[_REPEATED]
    runs = {**entry["runs"], terms.run_id: run}
    return {**document, _DATASETS: {**datasets, dataset: {**entry, "runs": runs}}}


def _listed(kinds: Counter[_Kind]) -> list[list[float]]:
    return [[*kind, steps] for kind, steps in sorted(kinds.items())]


def _check_relation(entry: Document, dataset: str, terms: Terms) -> None:
    before = entry.get("relation", terms.relation)
    if before != terms.relation:
        raise JobError(
            f"site {terms.site!r}: earlier runs on {dataset!r} were about {before!r} "
            f"and this one is about {terms.relation!r}; the two cannot be added into "
            "one epsilon. Use the same unit as before; different data needs a "
            "different data.name in site.toml",
            key=_UNIT,
        )


def _datasets(document: Document) -> Iterable[Document]:
    found: Mapping[str, Document] = document.get(_DATASETS, {})
    return found.values()


def _covers(entry: Document, run_id: str, events: Counter[_Kind]) -> bool:
    run = entry["runs"].get(run_id)
    if run is None:
        return False
    repeated = {"events": run.get(_REPEATED, [])}
    return events <= _merged(_events({run_id: run, "": repeated}))


def _charged(runs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: run for name, run in runs.items() if run["events"]}


def _events(runs: Mapping[str, Any]) -> list[PrivacyEvent]:
    try:
        return [
            PrivacyEvent(
                noise_multiplier=noise, sampling_rate=rate, slack=slack, steps=steps
            )
            for run in runs.values()
            for noise, rate, slack, steps in run["events"]
        ]
    except (TypeError, ValueError, KeyError) as error:
        raise CorruptObject(
            f"this site's memory of what runs have spent is damaged: {error}; restore "
            f"the document {DOCUMENT!r}"
        ) from error


def _merged(events: Iterable[PrivacyEvent]) -> Counter[_Kind]:
    """Steps of each kind of event."""
    steps = Counter[_Kind]()
    for event in events:
        kind = (event.noise_multiplier, event.sampling_rate, event.slack)
        steps[kind] += event.steps
    return steps


def _event(item: tuple[_Kind, int]) -> PrivacyEvent:
    (noise, rate, slack), steps = item
    return PrivacyEvent(
        noise_multiplier=noise, sampling_rate=rate, slack=slack, steps=steps
    )
