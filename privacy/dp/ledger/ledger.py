"""A site's ledger: what it has released, written down before it is released.

``charge`` makes a charge durable and only then returns; a release comes after
that. Whatever happens to the process, the ledger never shows less than was released.
It may show more: a charge whose release was lost in a crash stays charged.

Two files. ``ledger.jsonl`` only grows; its format is in ``ledger_format``. A chain of
hashes alone cannot show that lines are missing at its end, so ``ledger.head`` holds the
place and hash of the last line. The order of a charge is

1. append the line, or those of all that a round releases, and flush to the disk,
2. replace the head, flush it and its folder,
3. return; only now may anything be released.

A crash before 1 ends leaves a ledger without the line, or with a torn one, and nothing
was released: the torn line is dropped, and a note of it is added. A crash between 1
and 2 leaves a ledger ahead of its head: its lines count. So the head is
never ahead of the ledger, unless lines were lost; the other order would leave the same
picture after a crash as after a loss. Where the site has a key, it signs the head.

What no file on the same disk can show is that all of them are gone, or were put back
together from one backup or snapshot. So every answer carries the number of charges
that were made for it, the *anchor*; the aggregator keeps it and sends it back with
every proposal and task. A ledger ahead of its anchor is normal: a charge was made, and
its answer never arrived. One that is behind it is refused, until ``ledger_recovery``
has charged what is missing.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from federation.epsilon_text import format_epsilon
from federation.errors import BudgetExceeded, StoreUnavailable
from federation.messages import NO_ANCHOR, LedgerAnchor
from federation.protocols import Clock
from privacy.dp.accountant import EpsilonCurve
from privacy.dp.errors import ClockWentBackwards, LedgerBehind, LedgerMismatch
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger import ledger_files, ledger_format
from privacy.dp.ledger.ledger_files import HeadKey
from privacy.dp.ledger.ledger_format import (
    PURPOSES,
    Charge,
    Contents,
    Purpose,
    Terms,
)

# A clock that is set by the network may step back by so much.
CLOCK_TOLERANCE_SECONDS = 5.0


# What is released, and of which of the site's records.
Release = tuple[PrivacyEvent, Purpose]


class Ledger(Protocol):
    """Records a site's releases. Implementations: in memory, in files."""

    @property
    def terms(self) -> Terms:
        """Terms that apply to every charge."""
        ...

    def charge(
        self, event: PrivacyEvent, *, round_index: int, purpose: Purpose = "train"
    ) -> float:
        """Write a release down, durably, before it is made.

        Two callers never share a charge.

        Args:
            event: What will be released.
            round_index: In which round, at least 0.
            purpose: On which of the site's records; see ``ledger_format.Charge``.

        Returns:
            Epsilon of this purpose, with this charge: an upper bound.

        Raises:
            BudgetExceeded: It would be above the cap; nothing was written.
            ClockWentBackwards: The clock is before the last entry.
            StoreUnavailable: It could not be made durable; nothing may be released.
        """
        ...

    def charge_all(
        self, releases: Sequence[Release], *, round_index: int
    ) -> tuple[float, ...]:
        """Write several releases down before any of them is made: all, or none.

        A crash in between may leave some of them charged, and nothing released.

        Returns:
            Epsilon of each release's purpose, with all charges up to it.

        Raises:
            PrivacyError: As for ``charge``; nothing was written.
            StoreUnavailable: As for ``charge``.
        """
        ...

    def epsilon(self, purpose: Purpose = "train", *more: PrivacyEvent) -> float:
        """What has been spent on one purpose, and would be with more: upper bounds."""
        ...

    def charges(self) -> tuple[Charge, ...]:
        """Everything that was charged, in its order."""
        ...

    def anchor(self) -> LedgerAnchor:
        """How many charges it holds, which goes out with every answer."""
        ...

    def check_anchor(self, anchor: LedgerAnchor) -> None:
        """Check that no charge of an answer is missing.

        Raises:
            LedgerBehind: It holds fewer charges than ``anchor``.
        """
        ...


class _Account:
    """The arithmetic of a ledger: what was spent, and what may still be."""

    def __init__(self, terms: Terms, clock: Clock) -> None:
        self.terms = terms
        self.charges: list[Charge] = []
        self.seq = 0
        self.time = -math.inf
        self.clock = clock
        self._curves = {purpose: EpsilonCurve(terms.delta) for purpose in PURPOSES}

    def now(self) -> float:
        """The time of the next line: never before the last one's."""
        now = self.clock.now()
        if now < self.time - CLOCK_TOLERANCE_SECONDS:
            raise ClockWentBackwards(
                f"the clock of site {self.terms.site!r} shows {_utc(now)}, but its "
                f"ledger's last entry is from {_utc(self.time)}: the machine may run "
                "from an old snapshot, so nothing is released. Set the clock right and "
                "try again; if the entry was written with a clock that was ahead, wait "
                "until that time or start a new run"
            )
        return max(now, self.time)

    def epsilon(self, purpose: Purpose, *more: PrivacyEvent) -> float:
        return self._curves[purpose].epsilon(*more)

    def prepare(
        self, releases: Sequence[Release], round_index: int, *, capped: bool = True
    ) -> tuple[Charge, ...]:
        """The next charges, if all of them may be made."""
        charges: list[Charge] = []
        for event, purpose in releases:
            if round_index < 0 or purpose not in PURPOSES:
                raise ValueError(f"no charge for round {round_index}, {purpose!r}")
            before = [c.event for c in charges if c.purpose == purpose]
            after = self.epsilon(purpose, *before, event)
            if capped:
                self._check_cap(after, purpose, round_index)
            charges.append(
                Charge(
                    seq=self.seq + 1 + len(charges),
                    round_index=round_index,
                    purpose=purpose,
                    event=event,
                    time=self.now(),
                    epsilon_after=after,
                )
            )
        return tuple(charges)

    def _check_cap(self, after: float, purpose: Purpose, round_index: int) -> None:
        cap = self.terms.epsilon_cap
        if after <= cap:
            return
        spent = format_epsilon(self.epsilon(purpose))
        raise BudgetExceeded(
            f"round {round_index} would take site {self.terms.site!r} to epsilon "
            f"{format_epsilon(after)} at delta {self.terms.delta:g}, beyond its cap of "
            f"{cap:g} (spent so far on {_WHAT[purpose]}: {spent}); nothing was "
            "released. Stop here, or start a run with fewer rounds or more noise; "
            "only the site's operator can raise the cap",
            epsilon=after,
            cap=cap,
        )

    def anchor(self) -> LedgerAnchor:
        return _anchor(self.charges)

    def check_anchor(self, anchor: LedgerAnchor, name: str) -> None:
        check_number(self.charges, self.terms, anchor, name)

    def add(self, charge: Charge) -> None:
        """Count a charge that was made."""
        self.charges.append(charge)
        self._curves[charge.purpose].add(charge.event)
        self.seq, self.time = charge.seq, charge.time


def _anchor(charges: Iterable[Charge]) -> LedgerAnchor:
    counts = Counter(charge.purpose for charge in charges)
    return LedgerAnchor(train=counts["train"], evaluate=counts["evaluate"])


def check_number(
    charges: Iterable[Charge], terms: Terms, anchor: LedgerAnchor, name: str
) -> None:
    """Check that a ledger holds every charge that its site is known to have made.

    Args:
        charges: The charges that it holds.
        terms: Name the site and the run in the error.
        anchor: How many the site is known to have made.
        name: What the error calls the ledger.

    Raises:
        LedgerBehind: It holds fewer.
    """
    here = _anchor(charges)
    if anchor.is_within(here):
        return
    raise LedgerBehind(
        f"{name} holds {here.train} charges of training and {here.evaluate} of "
        f"evaluation, but site {terms.site!r} is known to have made "
        f"{anchor.train} and {anchor.evaluate} in run {terms.run_id}: charges are "
        "missing, as after a file was deleted or restored from a backup, so nothing is "
        f"released. Restore the newest ledger. {ledger_files.RECOVER}"
    )


_WHAT = {"train": "training records", "evaluate": "held-out records"}


class _LockedLedger:
    """What ledgers share: an account that one thread at a time charges.

    Args:
        terms: What holds for every charge.
        clock: For the times of charges.
        name: What errors call the ledger.
    """

    def __init__(self, terms: Terms, clock: Clock, name: str) -> None:
        """Begin with nothing spent."""
        self._account = _Account(terms, clock)
        self._lock = threading.Lock()
        self._name = name

    @property
    def terms(self) -> Terms:
        """See ``Ledger.terms``."""
        return self._account.terms

    def charge(
        self, event: PrivacyEvent, *, round_index: int, purpose: Purpose = "train"
    ) -> float:
        """See ``Ledger.charge``."""
        (spent,) = self.charge_all([(event, purpose)], round_index=round_index)
        return spent

    def charge_all(
        self, releases: Sequence[Release], *, round_index: int
    ) -> tuple[float, ...]:
        """See ``Ledger.charge_all``."""
        with self._lock:
            return self._charge(releases, round_index)

    def epsilon(self, purpose: Purpose = "train", *more: PrivacyEvent) -> float:
        """See ``Ledger.epsilon``."""
        with self._lock:
            return self._account.epsilon(purpose, *more)

    def charges(self) -> tuple[Charge, ...]:
        """See ``Ledger.charges``."""
        with self._lock:
            return tuple(self._account.charges)

    def anchor(self) -> LedgerAnchor:
        """See ``Ledger.anchor``."""
        with self._lock:
            return self._account.anchor()

    def check_anchor(self, anchor: LedgerAnchor) -> None:
        """See ``Ledger.check_anchor``."""
        with self._lock:
            self._account.check_anchor(anchor, self._name)

    def _charge(
        self, releases: Sequence[Release], round_index: int, *, capped: bool = True
    ) -> tuple[float, ...]:
        charges = self._account.prepare(releases, round_index, capped=capped)
        self._keep(charges)
        for charge in charges:
            self._account.add(charge)
        return tuple(charge.epsilon_after for charge in charges)

    def _keep(self, charges: Sequence[Charge]) -> None:
        """Make charges durable, before any of them counts."""


class InMemoryLedger(_LockedLedger):
    """For runs that store nothing: lost when the process ends.

    Args:
        terms: What holds for every charge.
        clock: For the times of charges.
    """

    def __init__(self, terms: Terms, *, clock: Clock) -> None:
        """Begin with nothing spent."""
        super().__init__(terms, clock, "the ledger in memory")

    def close(self) -> None:
        """Do nothing: nothing outlives the process."""


class FileLedger(_LockedLedger):
    """A ledger in a folder of the site's own, with one writer at a time.

    It is locked while it is open; ``close`` lets go.

    Args:
        folder: Where; made if it is missing.
        terms: What holds for every charge; those of a ledger that is there must be
            the same.
        clock: For the times of entries.
        anchor: How many charges it is known to have held.
        key: Signs the head, which must have been signed by it; None where sites have
            no keys.

    Raises:
        LedgerBehind: It holds fewer charges than ``anchor``.
        LedgerBusy: Another process writes it.
        LedgerDamaged: It was changed, or lines are missing (``LedgerShortened``).
        LedgerMismatch: It belongs to another run, site or job, or has other terms.
        ClockWentBackwards: The clock is before the last entry.
        StoreUnavailable: It cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        terms: Terms,
        *,
        clock: Clock,
        anchor: LedgerAnchor = NO_ANCHOR,
        key: HeadKey | None = None,
    ) -> None:
        """Open or create the ledger."""
        self._folder = folder
        self._key = key
        self._path = folder / ledger_files.LEDGER_NAME
        super().__init__(terms, clock, str(self._path))
        self._hash = ledger_format.START
        self._recovered = ""
        self._handle: int | None = None
        self._is_in_doubt = False
        self._open(anchor)

    @property
    def recovered(self) -> str:
        """What was repaired when the ledger was opened; empty if nothing was."""
        return self._recovered

    def restore(self, event: PrivacyEvent, *, purpose: Purpose, count: int) -> None:
        """Write down charges that were lost, even above the cap.

        They are entered in round 0, since their own is unknown.

        Args:
            event: What each of them is charged as.
            purpose: On which records.
            count: How many.

        Raises:
            StoreUnavailable: As for ``charge``.
        """
        with self._lock:
            self._charge([(event, purpose)] * count, 0, capped=False)

    def close(self) -> None:
        """Release the ledger to other processes; no more charges follow."""
        self._is_in_doubt = False
        self._let_go()

    def _charge(
        self, releases: Sequence[Release], round_index: int, *, capped: bool = True
    ) -> tuple[float, ...]:
        if self._is_in_doubt:
            self._open_again()
        return super()._charge(releases, round_index, capped=capped)

    def _open(self, anchor: LedgerAnchor) -> None:
        try:
            self._handle = ledger_files.open_locked(self._folder)
            self._begin_or_go_on(anchor)
        except OSError as error:
            self._let_go()
            raise self._unavailable(error) from error
        except BaseException:
            self._let_go()
            raise

    def _open_again(self) -> None:
        """Go on after a write failed, with what is in the files by now."""
        before = self._account
        self._account = _Account(before.terms, before.clock)
        try:
            self._open(before.anchor())
        except BaseException:
            self._account = before
            raise
        self._is_in_doubt = False

    def _let_go(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _keep(self, charges: Sequence[Charge]) -> None:
        if not charges:
            return
        lines, digest = [], self._hash
        for charge in charges:
            line, digest = ledger_format.charge_line(charge, digest)
            lines.append(line)
        self._write(b"".join(lines), digest, charges[-1].seq)

    def _begin_or_go_on(self, anchor: LedgerAnchor) -> None:
        assert self._handle is not None  # noqa: S101 -- opened by the caller
        head = ledger_files.read_head(self._folder)
        data = ledger_files.read_all(self._path)
        if b"\n" in data or head is not None:
            contents = ledger_files.verify(data, head, self._name, self._key)
            _check_terms(contents.terms, self.terms, self._name)
            self._go_on(contents, len(data))
            self._account.check_anchor(anchor, self._name)
            return
        # Before anything is written: what is there stays as it was found.
        self._account.check_anchor(anchor, self._name)
        # New, or killed while its first line was written: nothing was charged.
        os.ftruncate(self._handle, 0)
        self._account.time = self._account.now()
        line, digest = ledger_format.header_line(self.terms, self._account.time)
        self._write(line, digest, 0)

    def _go_on(self, contents: Contents, size: int) -> None:
        account = self._account
        for charge in contents.charges:
            account.add(charge)
        account.seq, account.time = contents.seq, contents.time
        self._hash = contents.hashes[-1]
        now = account.now()
        if not contents.torn_bytes:
            # The head may be one behind, and must not fall further behind.
            ledger_files.replace_head(self._folder, account.seq, self._hash, self._key)
            return
        assert self._handle is not None  # noqa: S101 -- opened by the caller
        os.ftruncate(self._handle, size - contents.torn_bytes)
        line, digest = ledger_format.recovery_line(
            account.seq + 1, now, contents.torn_bytes, self._hash
        )
        self._write(line, digest, account.seq + 1)
        account.seq, account.time = account.seq + 1, now
        self._recovered = (
            f"{self._path} ended in an unfinished line of {contents.torn_bytes} bytes, "
            "written when the site was stopped; nothing was released for it, and it "
            "was removed"
        )

    def _write(self, line: bytes, digest: str, seq: int) -> None:
        """Steps 1 and 2: after this, and only then, a release may be made."""
        if self._handle is None:
            raise StoreUnavailable(
                f"{self._path} is closed: open it again, so that it is checked, "
                "before anything is released"
            )
        try:
            ledger_files.append(self._handle, line)
            ledger_files.replace_head(self._folder, seq, digest, self._key)
        except OSError as error:
            # How much of the line is durable is not known: the next charge opens the
            # files again, and counts what is there.
            self._let_go()
            self._is_in_doubt = True
            raise self._unavailable(error) from error
        self._hash = digest

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"cannot write the ledger {self._path}: {error.strerror}; nothing is "
            "released: free some space, or make it writable for this user"
        )


def _check_terms(found: Terms, wanted: Terms, name: str) -> None:
    for field in Terms.__slots__:
        ours, theirs = getattr(wanted, field), getattr(found, field)
        if ours != theirs:
            raise LedgerMismatch(
                f"{name} is a ledger with {field} {theirs!r} but this run has "
                f"{ours!r}: it belongs to another run, site or job, or the terms were "
                "changed; nothing is released. Give this run its own folder, or "
                "continue with the original job"
            )


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s"
