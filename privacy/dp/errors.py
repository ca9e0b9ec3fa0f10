"""Errors of accounting, in one tree.

FederationError
|-- JobError
|   `-- PrivacyUnreachable    no sensible noise reaches the target
`-- PrivacyError
    |-- BudgetExceeded        (of ``federation.errors``) a release beyond the cap
    |-- LedgerDamaged         a ledger that was edited, reordered or cannot be read
    |   `-- LedgerShortened   a ledger that lacks what was charged
    |-- LedgerBehind          a ledger with fewer charges than were answered for
    |-- LedgerMismatch        a ledger of another run, site or job, or of other terms
    |-- LedgerBusy            a ledger that another process writes
    `-- ClockWentBackwards    a time before the ledger's last

Catching one of these means that nothing was released: a charge is refused
before anything is written or after what was written is durable, never in between.
"""

from federation.errors import JobError, PrivacyError


class PrivacyUnreachable(JobError):
    """The requested epsilon needs more noise than training can tolerate."""


class LedgerDamaged(PrivacyError):
    """A ledger is not one unbroken chain from its header to its end."""


class LedgerShortened(LedgerDamaged):
    """A ledger ends before what is known to have been charged."""


class LedgerBehind(PrivacyError):
    """A ledger holds fewer charges than the site is known to have made."""


class LedgerMismatch(PrivacyError):
    """A ledger belongs to another run, site or job, or has other terms."""


class LedgerBusy(PrivacyError):
    """Another process has the ledger open for writing."""


class ClockWentBackwards(PrivacyError):
    """The clock shows a time before the ledger's last entry."""
