"""What a site remembers of its ledgers, in a place of its own.

A run's ledger lies in the run's folder, which may be deleted or put back. The site's
memory knows how many charges each ledger held, so that a ledger that has lost some is
noticed even where the aggregator has lost its checkpoints, too. Each charge is durable
in both before anything is released; in the ledger first, so that a crash in between
leaves the ledger ahead, which is normal.
"""

from collections.abc import Sequence
from typing import Protocol

from clients.site_memory import Document, SiteMemory
from federation.errors import CorruptObject
from federation.ids import RunId
from federation.messages import NO_ANCHOR, LedgerAnchor
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import Event
from privacy.dp.ledger import Ledger, Release
from privacy.dp.ledger_format import Charge, Purpose, Terms

DOCUMENT = "ledgers"
_RUNS = "runs"


class ClosableLedger(Ledger, Protocol):
    """A ledger that holds something open."""

    def close(self) -> None:
        """Let go of it."""
        ...


def known_anchor(memory: SiteMemory, run_id: RunId) -> LedgerAnchor:
    """Return how many charges a run's ledger is known to have held.

    Raises:
        StoreError: The memory cannot be read, or is damaged.
    """
    return _anchor(memory.read(DOCUMENT), run_id)


def keep_anchor(memory: SiteMemory, run_id: RunId, anchor: LedgerAnchor) -> None:
    """Remember an anchor of a run; one that is smaller than before changes nothing.

    Raises:
        StoreError: The memory cannot be read or made durable.
    """
    if not anchor.is_within(known_anchor(memory, run_id)):
        memory.update(DOCUMENT, lambda known: _raised(known, run_id, anchor))


class RememberedLedger:
    """A ledger whose charges its site's memory counts, too.

    Args:
        ledger: The run's own.
        memory: The site's.
    """

    def __init__(self, ledger: ClosableLedger, memory: SiteMemory) -> None:
        """Note what the ledger is ahead of the memory, as after a crash."""
        self._ledger = ledger
        self._memory = memory
        self._run_id = RunId(ledger.terms.run_id)
        keep_anchor(memory, self._run_id, ledger.anchor())

    @property
    def terms(self) -> Terms:
        """See ``Ledger.terms``."""
        return self._ledger.terms

    def charge(
        self, event: Event, *, round_index: int, purpose: Purpose = "train"
    ) -> float:
        """See ``Ledger.charge``."""
        (spent,) = self.charge_all([(event, purpose)], round_index=round_index)
        return spent

    def charge_all(
        self, releases: Sequence[Release], *, round_index: int
    ) -> tuple[float, ...]:
        """See ``Ledger.charge_all``."""
        spent = self._ledger.charge_all(releases, round_index=round_index)
        keep_anchor(self._memory, self._run_id, self._ledger.anchor())
        return spent

    def epsilon(self, purpose: Purpose = "train", *more: Event) -> float:
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
            keep_anchor(self._memory, self._run_id, anchor)
            raise

    def close(self) -> None:
        """Close the run's ledger."""
        self._ledger.close()


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
