"""How far the ledgers of a trial had come, as the search itself remembers it.

A ledger and its head are both in the trial's folder, so an older copy of that folder
looks sound: it hides what was spent since. The search keeps the place and the hash of
each ledger's last line in its study, after every round.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deploy.tools import ledger_reader
from privacy.dp.ledger.ledger_format import Contents

ATTRIBUTE = "ledgers"  # Of a trial in the study.


@dataclass(frozen=True, slots=True)
class LedgerMark:
    """The last line of a ledger that a search has seen.

    Attributes:
        seq: Its place; the header is 0.
        hash: Hash of the line, which covers all lines before it.
    """

    seq: int
    hash: str

    def fault(self, contents: Contents) -> str:
        """What is wrong with a ledger that is read now; empty if it continues this."""
        if contents.seq < self.seq:
            return (
                f"it has {contents.seq} entries, and the search has seen {self.seq}: "
                "an older copy is in its place"
            )
        if contents.hashes[self.seq] != self.hash:
            return (
                f"entry {self.seq} is not the one that the search has seen: a copy was "
                "put in its place and continued"
            )
        return ""


def marks_below(
    folder: Path, before: Mapping[str, LedgerMark] = MappingProxyType({})
) -> Mapping[str, LedgerMark]:
    """Mark the ledgers of a trial by site.

    A mark never goes back: that of a ledger which is lost, damaged or an older copy
    stays, so that ``spending.spent`` finds it and ends the search.

    Args:
        folder: Folder of the trial's run.
        before: Earlier marks.
    """
    found = dict(before)
    for path in ledger_reader.below(folder):
        site, contents = path.parent.name, ledger_reader.examine(path).contents
        if contents is None or (site in before and before[site].fault(contents)):
            continue
        found[site] = LedgerMark(contents.seq, contents.hashes[-1])
    return found


def document(marks: Mapping[str, LedgerMark]) -> dict[str, Any]:
    """Marks as values for JSON."""
    return {site: list(astuple(mark)) for site, mark in marks.items()}


def parse(attributes: Mapping[str, Any]) -> Mapping[str, LedgerMark]:
    """Read the marks of a trial; it has none before its first round ends."""
    found: Mapping[str, Any] = attributes.get(ATTRIBUTE, {})
    return {site: LedgerMark(*values) for site, values in found.items()}
