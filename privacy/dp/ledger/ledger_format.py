"""The lines of a ledger: one spelling, chained by hashes, checked when read.

A ledger is JSON lines in ASCII. The first says what holds for all (``Terms``); each
later one is a charge, or the note that a torn line was taken away. Every line carries
the SHA-256 of its own canonical bytes (sorted keys, no spaces, without ``hash``) and
the hash of the line before it, so that no line can be changed, taken out, put in or
moved without all later ones being wrong.

The chain has no key. It finds accidents (an editor, a bad disk, a backup that was put
back, the ledger of another run) and not a person who computes it afresh: anyone who can
write to the site's disk can also release without a ledger. Nothing here opens a file.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from privacy.dp.errors import LedgerDamaged
from privacy.dp.events import PrivacyEvent

VERSION = 1
START = "0" * 64

Purpose = Literal["train", "evaluate"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a ledger is about: its first line.

    Attributes:
        site: The site, whose records are protected.
        job_digest: SHA-256 of the job, in hexadecimal digits.
        delta: Probability that is left to chance, for each purpose.
        epsilon_cap: What may be spent at most.
        unit: What one neighbour has more than the other.
        relation: Neighbouring relation.
        sampling: What the accountant assumes of the batches.
        accountant: What ``epsilon_after`` was computed by.
    """

    run_id: str
    site: str
    job_digest: str
    delta: float
    epsilon_cap: float
    unit: str = "record"
    relation: str = "add or remove one record"
    sampling: str = "poisson"
    accountant: str = "pld"

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta}, not in (0, 1)")
        if not (math.isfinite(self.epsilon_cap) and self.epsilon_cap > 0):
            raise ValueError(f"epsilon_cap is {self.epsilon_cap}, not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One release, or a few of one kind, as it was written before it was made.

    Attributes:
        seq: Place in the ledger, from 1; the header is 0.
        purpose: ``train`` spends on training records, ``evaluate`` on held-out ones.
            These are different records, so each purpose has the whole budget
            (parallel composition).
        event: The mechanism.
        time: Seconds since the epoch; never before the line before.
        epsilon_after: Epsilon of its purpose, with this charge.
    """

    seq: int
    round_index: int
    purpose: Purpose
    event: PrivacyEvent
    time: float
    epsilon_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a valid ledger.

    Attributes:
        terms: Its header.
        charges: In their order.
        num_recoveries: How often a torn line was removed.
        hashes: Hash of every line, by its place.
        time: Time of the last line.
        torn_bytes: Length of an unfinished line at the end, which is not counted.
    """

    terms: Terms
    charges: tuple[Charge, ...]
    num_recoveries: int
    hashes: tuple[str, ...]
    time: float
    torn_bytes: int

    @property
    def seq(self) -> int:
        """Place of the last line."""
        return len(self.hashes) - 1

    def events(self, purpose: Purpose) -> tuple[PrivacyEvent, ...]:
        """What was spent for one purpose."""
        return tuple(c.event for c in self.charges if c.purpose == purpose)


def header_line(terms: Terms, time: float) -> tuple[bytes, str]:
    """First line of a ledger, and its hash."""
    document = {
        **asdict(terms),
        "kind": "header",
        "version": VERSION,
        "seq": 0,
        "time": float(time),
        "delta": float(terms.delta),
        "epsilon_cap": float(terms.epsilon_cap),
    }
    return _line(document, START)


def charge_line(charge: Charge, previous: str) -> tuple[bytes, str]:
    """The line of a charge after one with the hash ``previous``, and its hash."""
    document = {
        **asdict(charge),
        "kind": "charge",
        "time": float(charge.time),
        "event": charge.event.document(),
    }
    return _line(document, previous)


def recovery_line(
    seq: int, time: float, dropped_bytes: int, previous: str
) -> tuple[bytes, str]:
    """The note that an unfinished line was removed, and its hash."""
    return _line(
        {
            "kind": "recovery",
            "seq": seq,
            "time": float(time),
            "dropped_bytes": dropped_bytes,
        },
        previous,
    )


def read(data: bytes, name: str) -> Contents:
    """Check a whole ledger.

    Args:
        data: The bytes of the file.
        name: What errors call it.

    Raises:
        LedgerDamaged: A line is not the one spelling of what it says, does not follow
            the line before it, or says something impossible.
    """
    whole, _, torn = data.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    if not lines:
        raise LedgerDamaged(f"{name} has no header, so it is not a ledger")
    reader = _LineReader(name)
    for number, line in enumerate(lines, 1):
        reader.take(line, number)
    return reader.contents(len(torn))


class _LineReader:
    """Checks one line after another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terms: Terms | None = None
        self._charges: list[Charge] = []
        self._num_recoveries = 0
        self._hashes: list[str] = []
        self._time = -math.inf

    def take(self, line: bytes, number: int) -> None:
        """Check one line against all before it."""
        try:
            self._take(self._chained(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LedgerDamaged(
                f"{self._name}, line {number}: {_fault(error)}; the ledger was changed "
                "after it was written, so what was spent is not known and nothing is "
                "released. Restore the original file, or start a new run with a budget "
                "that counts what this one may have spent"
            ) from error

    def _take(self, document: dict[str, Any]) -> None:
        kind = document.pop("kind")
        if (kind == "header") != (len(self._hashes) == 1):
            raise ValueError(f"a {kind} is out of place")
        self._follow(document)
        if kind == "header":
            self._terms = _terms(document)
        elif kind == "charge":
            self._charges.append(_charge(document))
        elif kind == "recovery" and set(document) == {"seq", "time", "dropped_bytes"}:
            self._num_recoveries += 1
        else:
            raise ValueError(f"there is no line type {kind!r}")

    def contents(self, torn_bytes: int) -> Contents:
        """What was read."""
        if self._terms is None:
            raise AssertionError("the first line was checked to be a header")
        return Contents(
            terms=self._terms,
            charges=tuple(self._charges),
            num_recoveries=self._num_recoveries,
            hashes=tuple(self._hashes),
            time=self._time,
            torn_bytes=torn_bytes,
        )

    def _chained(self, line: bytes) -> dict[str, Any]:
        document = json.loads(line)
        if not isinstance(document, dict):
            raise TypeError("it is not an object")
        claimed, previous = document.pop("hash"), document.pop("prev")
        again, found = _line(document, previous)
        if found != claimed or again != line + b"\n":
            raise ValueError("its hash does not match its contents")
        if previous != (self._hashes[-1] if self._hashes else START):
            raise ValueError("it does not follow the previous line")
        self._hashes.append(found)
        return document

    def _follow(self, document: Mapping[str, Any]) -> None:
        seq, time = document["seq"], document["time"]
        place = len(self._hashes) - 1
        if type(seq) is not int or seq != place:
            raise ValueError(f"its place is {seq!r} instead of {place}")
        if type(time) is not float or not math.isfinite(time) or time < self._time:
            raise ValueError(f"its time {time!r} is before that of the previous line")
        self._time = time


def _fault(error: Exception) -> str:
    """What is wrong with a line, in words."""
    if isinstance(error, UnicodeDecodeError | json.JSONDecodeError | RecursionError):
        return "it is not a ledger line"
    if isinstance(error, KeyError):
        return f"it has no field {error}"
    return str(error)


def _terms(document: dict[str, Any]) -> Terms:
    version = document.pop("version")
    if version != VERSION:
        raise ValueError(f"version {version!r} is not {VERSION}")
    names = {"seq", "time", *(field.name for field in fields(Terms))}
    if set(document) != names:
        raise ValueError(
            f"a header must have exactly the fields {', '.join(sorted(names))}"
        )
    del document["seq"], document["time"]
    for name, value in document.items():
        kind = float if name in {"delta", "epsilon_cap"} else str
        if type(value) is not kind:
            raise TypeError(f"{name} has the wrong type: {value!r}")
    return Terms(**document)


def _charge(document: dict[str, Any]) -> Charge:
    event = PrivacyEvent.parse(document.pop("event"))
    charge = Charge(event=event, **document)
    if type(charge.round_index) is not int or charge.round_index < 0:
        raise ValueError(f"its round {charge.round_index!r} is not valid")
    if charge.purpose not in PURPOSES:
        raise ValueError(f"its purpose {charge.purpose!r} is not valid")
    spent = charge.epsilon_after
    if type(spent) is not float or not (math.isfinite(spent) and spent >= 0):
        raise ValueError(f"its epsilon {spent!r} is not valid")
    return charge


def _line(document: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Canonical bytes with their hash, for the file."""
    chained = {**document, "prev": previous}
    digest = hashlib.sha256(_canonical(chained)).hexdigest()
    return _canonical({**chained, "hash": digest}) + b"\n", digest


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")
