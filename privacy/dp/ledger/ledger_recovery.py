"""Charge again what a ledger has lost, before its site may continue.

What was released is known only from anchors (see ``ledger``), so each charge that is
missing is made as if its mechanism had run. What cannot be read counts for both
purposes. The result is an upper bound, which may be beyond the cap: then nothing more
is released in this run.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from federation.errors import PrivacyError
from federation.messages import LedgerAnchor
from federation.protocols import Clock
from privacy.dp.errors import LedgerBehind, LedgerDamaged
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger import ledger_files
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_files import HeadKey
from privacy.dp.ledger.ledger_format import PURPOSES, Purpose, Terms

# No honest run comes near it; each charge has to be composed and written.
MAX_RECOVERED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryResult:
    """The result of a recovery.

    Attributes:
        path: The ledger.
        before: Charges that it held.
        after: Charges that it holds now.
        set_aside: Where the files are that could not be read; None if all could.
        epsilon: What has been spent by now, by purpose.
    """

    path: Path
    before: LedgerAnchor
    after: LedgerAnchor
    set_aside: Path | None
    epsilon: Mapping[Purpose, float]


def recover(
    folder: Path,
    terms: Terms,
    *,
    anchor: LedgerAnchor,
    events: Mapping[Purpose, PrivacyEvent],
    once: tuple[PrivacyEvent, ...] = (),
    clock: Clock,
    key: HeadKey | None = None,
) -> RecoveryResult:
    """Charge a ledger until it reaches an anchor.

    1. A ledger that is damaged is set aside; its lines are counted.
    2. Every charge that is missing is written, and a new head with it.

    Args:
        folder: Folder of the ledger; nothing need be in it.
        terms: Terms of the run at this site.
        anchor: The largest that is known.
        events: What each charge of a purpose is made as, in this run.
        once: What training is charged for once, before all else.
        clock: For the times of entries.
        key: Signs the head.

    Raises:
        LedgerBehind: The anchor is beyond what any run charges.
        PrivacyError: The ledger belongs to another run, or another process has it open.
        StoreUnavailable: It cannot be written.
    """
    set_aside = None
    try:
        ledger = FileLedger(folder, terms, clock=clock, key=key)
    except LedgerDamaged:  # 1.
        anchor = anchor.joined(_counted(folder, events))
        _check_possible(anchor, folder)
        set_aside = _set_aside(folder)
        ledger = FileLedger(folder, terms, clock=clock, key=key)
    with contextlib.closing(ledger):
        before = ledger.anchor()
        _check_possible(anchor, folder)
        for purpose in PURPOSES:  # 2.
            missing = getattr(anchor, purpose) - getattr(before, purpose)
            if missing <= 0:
                continue
            if purpose not in events:
                raise PrivacyError(
                    f"{folder}: the anchor says that {missing} charges of {purpose!r} "
                    "are missing, but this run makes none: it belongs to another run"
                )
            first = once if purpose == "train" else ()
            _restore(ledger, purpose, missing, first=first, then=events[purpose])
        return RecoveryResult(
            path=folder / ledger_files.LEDGER_NAME,
            before=before,
            after=ledger.anchor(),
            set_aside=set_aside,
            epsilon={purpose: ledger.epsilon(purpose) for purpose in events},
        )


def _restore(
    ledger: FileLedger,
    purpose: Purpose,
    missing: int,
    *,
    first: Iterable[PrivacyEvent],
    then: PrivacyEvent,
) -> None:
    """Write so many charges: first those of events that are charged once."""
    known = {charge.event for charge in ledger.charges()}
    lost = [event for event in first if event not in known][:missing]
    for event in lost:
        ledger.restore(event, purpose=purpose, count=1)
    if missing > len(lost):
        ledger.restore(then, purpose=purpose, count=missing - len(lost))


def _check_possible(anchor: LedgerAnchor, folder: Path) -> None:
    if max(anchor.train, anchor.evaluate) > MAX_RECOVERED:
        raise LedgerBehind(
            f"the ledger in {folder} would need {anchor.train} charges of training and "
            f"{anchor.evaluate} of evaluation, beyond {MAX_RECOVERED}: no run has so "
            "many rounds, so the number is wrong. Start a new run, and ask the "
            "aggregator's operator where it comes from"
        )


def _counted(folder: Path, events: Mapping[Purpose, PrivacyEvent]) -> LedgerAnchor:
    """Count the charges of a ledger that may be damaged; in doubt, for each purpose."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        data = ledger_files.read_all(folder / ledger_files.LEDGER_NAME)
        lines = data.splitlines()
    # The first line is the header; it may have been lost, too.
    first = 1 if lines and b'"kind":"header"' in lines[0] else 0
    counts = Counter(p for line in lines[first:] for p in _purposes(line))
    known = 0
    with contextlib.suppress(LedgerDamaged):
        head = ledger_files.read_head(folder)
        known = 0 if head is None else head.seq
    lost = max(0, known - max(0, len(lines) - 1))
    return LedgerAnchor(**{purpose: counts[purpose] + lost for purpose in events})


def _purposes(line: bytes) -> tuple[Purpose, ...]:
    try:
        document = json.loads(line)
        purpose = document["purpose"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return PURPOSES
    return (purpose,) if purpose in PURPOSES else PURPOSES


def _set_aside(folder: Path) -> Path:
    """Rename both files, so that a new ledger can begin and nothing is destroyed."""
    number = 1
    while (aside := folder / f"damaged-{number}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    for name in (ledger_files.LEDGER_NAME, ledger_files.HEAD_NAME):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(aside / name)
    return aside
