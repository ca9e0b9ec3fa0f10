"""Values of a message's header, written to and read from JSON.

Each reader names the field that is wrong in a ``WireError``. Which values a kind of
message has is in ``wire_fields``.
"""

import math
import re
from typing import Any, TypeVar

from federation.errors import WireError
from federation.ids import check_name
from federation.messages import (
    FailureKind,
    LedgerAnchor,
    MetricSums,
    Phase,
    PrivacySpent,
    SecureStep,
    TaskKind,
)

Fields = dict[str, Any]

MAX_COUNT = (1 << 53) - 1  # exact in float64 and in every JSON reader
MAX_PHASES = 64
MAX_PHASE_NAME_CHARS = 64
MAX_TEXT_CHARS = 1000

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Controls, line and paragraph separators, direction overrides and lone surrogates
# would let a site rewrite what an operator's terminal or log shows.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_Word = TypeVar("_Word", TaskKind, SecureStep, FailureKind)


def one_line(text: str) -> str:
    """Make any text fit to travel in a ``SiteFailure``.

    Line breaks and other unprintable characters become spaces; a text over
    ``MAX_TEXT_CHARS`` is cut and ends in three dots.
    """
    flat = _UNSAFE.sub(" ", text)
    if len(flat) <= MAX_TEXT_CHARS:
        return flat
    return flat[: MAX_TEXT_CHARS - 3] + "..."


# Reading.

_SUMS = frozenset({"count", "loss_sum", "correct"})
_PHASE = frozenset({"name", "start_seconds", "seconds"})
_SPENT = frozenset({"epsilon", "delta", "held_out_epsilon", "anchor"})
_ANCHOR = frozenset({"train", "evaluate"})


def check_members(value: object, names: frozenset[str]) -> Fields:
    """Check that a JSON value is an object with exactly these members."""
    if not isinstance(value, dict) or value.keys() != names:
        raise WireError(f"expected an object with exactly {sorted(names)}")
    return value


def read_count(fields: Fields, name: str, maximum: int = MAX_COUNT) -> int:
    """Read a whole number from 0 to a maximum."""
    value = fields[name]
    # A bool is an int to isinstance, and no count.
    if type(value) is not int or not 0 <= value <= maximum:
        raise WireError(f"{name} is {value!r:.80}, not a count of 0 to {maximum}")
    return value


def read_flag(fields: Fields, name: str) -> bool:
    """Read true or false."""
    value = fields[name]
    if type(value) is not bool:
        raise WireError(f"{name} is {value!r:.80}, not true or false")
    return value


def read_text(fields: Fields, name: str, max_chars: int) -> str:
    """Read one line of text without unprintable characters."""
    value = fields[name]
    if type(value) is not str or len(value) > max_chars or _UNSAFE.search(value):
        raise WireError(
            f"{name} is {value!r:.80}, not one line of at most {max_chars} characters"
        )
    return value


def read_name(fields: Fields, name: str) -> str:
    """Read the name of a run or of a site."""
    value = fields[name]
    if type(value) is not str:
        raise WireError(f"{name} is {value!r:.80}, not text")
    try:
        return check_name(value)
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error


def read_digest(fields: Fields) -> str:
    """Read the digest of a layout."""
    value = fields["layout_digest"]
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise WireError(f"layout_digest is {value!r:.80}, not 64 hexadecimal digits")
    return value


def read_word(fields: Fields, name: str, words: type[_Word]) -> _Word:
    """Read one word of an enumeration."""
    value = fields[name]
    if type(value) is str:
        for word in words:
            if word == value:
                return word
    allowed = [str(word) for word in words]
    raise WireError(f"{name} is {value!r:.80}, not one of {allowed}")


def _float(fields: Fields, name: str) -> float:
    value = fields[name]
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{name} is {value!r:.80}, not a float in hex") from error
    if number.hex() != value:
        raise WireError(f"{name} is {value!r:.80}, written unlike float.hex does")
    return number


def _duration(fields: Fields, name: str) -> float:
    seconds = _float(fields, name)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise WireError(f"{name} is {seconds} s, not a finite time of at least 0 s")
    return seconds


def read_sums(value: object) -> MetricSums:
    """Read sums over examples."""
    fields = check_members(value, _SUMS)
    return MetricSums(
        count=read_count(fields, "count"),
        loss_sum=_float(fields, "loss_sum"),
        correct=read_count(fields, "correct"),
    )


def read_sums_or_none(value: object) -> MetricSums | None:
    """Read sums over examples, or null."""
    return None if value is None else read_sums(value)


def read_spent(value: object) -> PrivacySpent | None:
    """Read what a privacy ledger says, or null."""
    if value is None:
        return None
    fields = check_members(value, _SPENT)
    delta = _float(fields, "delta")
    if not 0 < delta < 1:
        raise WireError(f"delta is {delta}, not between 0 and 1")
    held_out = fields["held_out_epsilon"]
    return PrivacySpent(
        epsilon=_epsilon(fields, "epsilon"),
        delta=delta,
        held_out_epsilon=(
            None if held_out is None else _epsilon(fields, "held_out_epsilon")
        ),
        anchor=read_anchor(fields["anchor"]),
    )


def read_anchor(value: object) -> LedgerAnchor:
    """Read how many charges a privacy ledger holds."""
    fields = check_members(value, _ANCHOR)
    return LedgerAnchor(
        train=read_count(fields, "train"), evaluate=read_count(fields, "evaluate")
    )


def _epsilon(fields: Fields, name: str) -> float:
    epsilon = _float(fields, name)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise WireError(f"{name} is {epsilon}, not finite and at least 0")
    return epsilon


def read_phases(fields: Fields) -> tuple[Phase, ...]:
    """Read the phases of a site's work."""
    value = fields["phases"]
    if not isinstance(value, list) or len(value) > MAX_PHASES:
        raise WireError(f"phases is not a list of at most {MAX_PHASES}")
    phases = [check_members(item, _PHASE) for item in value]
    return tuple(
        Phase(
            name=read_text(phase, "name", MAX_PHASE_NAME_CHARS),
            start_seconds=_duration(phase, "start_seconds"),
            seconds=_duration(phase, "seconds"),
        )
        for phase in phases
    )


# Writing.


def write_sums(sums: MetricSums | None) -> Fields | None:
    """Spell sums over examples, or null."""
    if sums is None:
        return None
    loss_sum = float(sums.loss_sum).hex()
    return {"count": sums.count, "loss_sum": loss_sum, "correct": sums.correct}


def write_spent(spent: PrivacySpent | None) -> Fields | None:
    """Spell what a privacy ledger says, or null."""
    if spent is None:
        return None
    held_out = spent.held_out_epsilon
    return {
        "epsilon": float(spent.epsilon).hex(),
        "delta": float(spent.delta).hex(),
        "held_out_epsilon": None if held_out is None else float(held_out).hex(),
        "anchor": write_anchor(spent.anchor),
    }


def write_anchor(anchor: LedgerAnchor) -> Fields:
    """Spell how many charges a privacy ledger holds."""
    return {"train": anchor.train, "evaluate": anchor.evaluate}


def write_phases(phases: tuple[Phase, ...]) -> list[Fields]:
    """Spell the phases of a site's work."""
    return [
        {
            "name": phase.name,
            "start_seconds": float(phase.start_seconds).hex(),
            "seconds": float(phase.seconds).hex(),
        }
        for phase in phases
    ]
