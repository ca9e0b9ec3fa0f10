"""Values of a message's header, written as JSON text and read from parsed JSON.

Each reader names the field that is wrong in a ``WireError``. Which values a kind of
message has is in ``wire_fields``.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

from federation.errors import WireError
from federation.ids import check_name
from federation.messages import (
    MAX_CLASSES,
    MAX_MEASURED,
    MAX_METRICS,
    METRIC_NAME,
    Energy,
    FailureKind,
    LedgerAnchor,
    MetricSums,
    Phase,
    PrivacySpent,
    Resources,
    SecureStep,
    TaskKind,
)

Fields = dict[str, Any]

MAX_COUNT = (1 << 53) - 1  # exact in float64 and in every JSON reader
MAX_PHASES = 64
MAX_PHASE_NAME_CHARS = 64
MAX_TEXT_CHARS = 1000

_MAX_SUMS = MAX_METRICS + MAX_CLASSES**2 + MAX_MEASURED

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Controls, line and paragraph separators, direction overrides and lone surrogates
# would let a site rewrite what an operator's terminal or log shows.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_Word = TypeVar("_Word", TaskKind, SecureStep, FailureKind)


def one_line(text: str) -> str:
    """Make any text fit for a ``SiteFailure``.

    Line breaks and other unprintable characters become spaces; a text over
    ``MAX_TEXT_CHARS`` is cut and ends in three dots.
    """
    flat = _UNSAFE.sub(" ", text)
    if len(flat) <= MAX_TEXT_CHARS:
        return flat
    return flat[: MAX_TEXT_CHARS - 3] + "..."


# Both directions: a value that is spelt as it is, checked.

_SUMS = ("count", "loss_sum")
_PHASE = frozenset({"name", "start_seconds", "seconds"})
_SPENT = frozenset({"epsilon", "delta", "held_out_epsilon", "anchor"})
_RESOURCES = frozenset({"busy_seconds", "cpu_seconds", "peak_memory_bytes", "method"})
_MEASURED = _RESOURCES | {"energy"}
_ENERGY = frozenset({"joules", "grams", "method"})
_ANCHOR = frozenset({"train", "evaluate"})


def check_members(value: object, names: frozenset[str]) -> Fields:
    """Check that a JSON value is an object with exactly these members."""
    if not isinstance(value, dict) or value.keys() != names:
        raise WireError(f"expected an object with exactly {sorted(names)}")
    return value


def count(value: object, name: str, maximum: int = MAX_COUNT) -> int:
    """Check a whole number from 0 to a maximum."""
    # A bool is an int to isinstance, and no count.
    if type(value) is not int or not 0 <= value <= maximum:
        raise WireError(f"{name} is {value!r:.80}, not a count of 0 to {maximum}")
    return value


def _whole(value: object, name: str) -> int:
    """Check a sum over predictions: a count that noise may have made negative."""
    if type(value) is not int or not -MAX_COUNT <= value <= MAX_COUNT:
        raise WireError(
            f"{name} is {value!r:.80}, not a whole number of at most {MAX_COUNT} to "
            "either side of 0"
        )
    return value


def flag(value: object, name: str) -> bool:
    """Check true or false."""
    if type(value) is not bool:
        raise WireError(f"{name} is {value!r:.80}, not true or false")
    return value


def text(value: object, name: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Check one line of text without unprintable characters."""
    if type(value) is not str or len(value) > max_chars or _UNSAFE.search(value):
        raise WireError(
            f"{name} is {value!r:.80}, not one line of at most {max_chars} characters"
        )
    return value


def name_of(value: object, name: str) -> str:
    """Check the name of a run or of a site."""
    if type(value) is not str:
        raise WireError(f"{name} is {value!r:.80}, not text")
    try:
        return check_name(value)
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error


def digest(value: object, name: str) -> str:
    """Check the digest of a layout."""
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise WireError(f"{name} is {value!r:.80}, not 64 hexadecimal digits")
    return value


def _duration(seconds: float, name: str) -> float:
    if not 0 <= seconds < math.inf:
        raise WireError(f"{name} is {seconds} s, not a finite time of at least 0 s")
    return seconds


def _range(ends: tuple[float, float], name: str) -> tuple[float, float]:
    low, high = ends
    if not 0 <= low <= high < math.inf:
        raise WireError(f"{name} is {ends}, not two finite ends of a range from 0 on")
    return ends


def _epsilon(epsilon: float, name: str) -> float:
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise WireError(f"{name} is {epsilon}, not finite and at least 0")
    return epsilon


def _delta(delta: float, name: str) -> float:
    if not 0 < delta < 1:
        raise WireError(f"{name} is {delta}, not between 0 and 1")
    return delta


def _metrics(found: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(found) > _MAX_SUMS or not all(map(METRIC_NAME.fullmatch, found)):
        raise WireError(f"metrics are not at most {_MAX_SUMS} names and numbers")
    return found


# Reading.


def read_word(value: Any, name: str, words: type[_Word]) -> _Word:
    """Read one word of an enumeration."""
    try:
        return words(value)
    except ValueError as error:
        allowed = [str(word) for word in words]
        raise WireError(f"{name} is {value!r:.80}, not one of {allowed}") from error


def _float(value: Any, name: str) -> float:
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{name} is {value!r:.80}, not a hexadecimal float") from error
    if number.hex() != value:
        raise WireError(
            f"{name} is {value!r:.80}, not in the form that float.hex writes"
        )
    return number


def _seconds(value: Any, name: str) -> float:
    return _duration(_float(value, name), name)


def read_sums(value: object, _name: str) -> MetricSums:
    """Read sums over examples; what is neither count nor loss is a metric."""
    names = value.keys() - {*_SUMS} if isinstance(value, dict) else set()
    fields = check_members(value, frozenset({*_SUMS, *names}))
    found = {name: fields[name] for name in sorted(names)}
    return MetricSums(
        count=count(fields["count"], "count"),
        loss_sum=_float(fields["loss_sum"], "loss_sum"),
        metrics={
            name: _float(item, name) if isinstance(item, str) else _whole(item, name)
            for name, item in _metrics(found).items()
        },
    )


def read_spent(value: object, _name: str) -> PrivacySpent:
    """Read the spending in a privacy ledger."""
    fields = check_members(value, _SPENT)
    held_out = fields["held_out_epsilon"]
    return PrivacySpent(
        delta=_delta(_float(fields["delta"], "delta"), "delta"),
        epsilon=_epsilon(_float(fields["epsilon"], "epsilon"), "epsilon"),
        held_out_epsilon=(
            None
            if held_out is None
            else _epsilon(_float(held_out, "held_out_epsilon"), "held_out_epsilon")
        ),
        anchor=read_anchor(fields["anchor"], "anchor"),
    )


def read_anchor(value: object, _name: str) -> LedgerAnchor:
    """Read how many charges a privacy ledger holds."""
    fields = check_members(value, _ANCHOR)
    return LedgerAnchor(
        train=count(fields["train"], "train"),
        evaluate=count(fields["evaluate"], "evaluate"),
    )


def read_phases(value: object, name: str) -> tuple[Phase, ...]:
    """Read the phases of a site's work."""
    if not isinstance(value, list) or len(value) > MAX_PHASES:
        raise WireError(f"{name} is not a list of at most {MAX_PHASES}")
    phases = [check_members(item, _PHASE) for item in value]
    return tuple(
        Phase(
            name=text(phase["name"], "name", MAX_PHASE_NAME_CHARS),
            start_seconds=_seconds(phase["start_seconds"], "start_seconds"),
            seconds=_seconds(phase["seconds"], "seconds"),
        )
        for phase in phases
    )


def read_resources(value: object, _name: str) -> Resources:
    """Read the resources of work."""
    taken = value.get("energy") if isinstance(value, dict) else None
    fields = check_members(value, _RESOURCES if taken is None else _MEASURED)
    cpu, memory = fields["cpu_seconds"], fields["peak_memory_bytes"]
    return Resources(
        busy_seconds=_seconds(fields["busy_seconds"], "busy_seconds"),
        cpu_seconds=None if cpu is None else _seconds(cpu, "cpu_seconds"),
        peak_memory_bytes=None if memory is None else count(memory, "peak memory"),
        method=text(fields["method"], "method", MAX_PHASE_NAME_CHARS),
        energy=None if taken is None else _read_energy(taken),
    )


def _read_energy(value: object) -> Energy:
    fields = check_members(value, _ENERGY)
    return Energy(
        joules=_read_range(fields["joules"], "joules"),
        grams=_read_range(fields["grams"], "grams"),
        method=text(fields["method"], "method", MAX_PHASE_NAME_CHARS),
    )


def _read_range(value: Any, name: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:  # noqa: PLR2004 -- two ends
        raise WireError(f"{name} is {value!r:.80}, not the two ends of a range")
    return _range((_float(value[0], name), _float(value[1], name)), name)


# Writing: canonical JSON without spaces, members in the order of their names. Text of
# the fixed forms is joined here, because a general encoder takes longer than a site
# that has little to do; names and digests, the same in many messages, are kept.

_kept = lru_cache(maxsize=1024, typed=True)


def spell(members: Mapping[str, str]) -> str:
    """Write an object, given the JSON text of each member."""
    spelt = [f'"{name}":{members[name]}' for name in sorted(members)]
    return f"{{{','.join(spelt)}}}"


def spelled_size(members: Mapping[str, str]) -> int:
    """Length of the text of ``spell``."""
    return len("".join(members)) + len("".join(members.values())) + 4 * len(members) + 1


def write_count(value: object, name: str, maximum: int = MAX_COUNT) -> str:
    """Write a whole number from 0 to a maximum."""
    # A call less than by ``count`` alone, of which most headers have a dozen.
    is_count = type(value) is int and 0 <= value <= maximum
    return f"{value if is_count else count(value, name, maximum)}"


def write_flag(value: object, name: str) -> str:
    """Write true or false."""
    return "true" if flag(value, name) else "false"


@_kept
def write_name(value: object, name: str) -> str:
    """Write the name of a run or of a site."""
    return f'"{name_of(value, name)}"'


@_kept
def write_digest(value: object, name: str) -> str:
    """Write the digest of a layout."""
    return f'"{digest(value, name)}"'


def write_word(value: Any, name: str, words: type[_Word]) -> str:
    """Write one word of an enumeration."""
    return f'"{read_word(value, name, words).value}"'


def write_one_line(value: str, _name: str) -> str:
    """Write any text, made fit to send."""
    return encode_basestring_ascii(one_line(value))


def write_sums(sums: MetricSums, _name: str) -> str:
    """Write sums over examples."""
    members = {
        name: f"{_whole(item, name)}" if isinstance(item, int) else _hex(float(item))
        for name, item in _metrics(sums.metrics).items()
    }
    members["count"] = write_count(sums.count, "count")
    members["loss_sum"] = _hex(float(sums.loss_sum))
    return spell(members)


def write_spent(spent: PrivacySpent, _name: str) -> str:
    """Write the spending in a privacy ledger."""
    held_out = "null"
    if spent.held_out_epsilon is not None:
        held_out = _hex(_epsilon(float(spent.held_out_epsilon), "held_out_epsilon"))
    return (
        f'{{"anchor":{write_anchor(spent.anchor, "anchor")},'
        f'"delta":{_hex(_delta(float(spent.delta), "delta"))},'
        f'"epsilon":{_hex(_epsilon(float(spent.epsilon), "epsilon"))},'
        f'"held_out_epsilon":{held_out}}}'
    )


def write_anchor(anchor: LedgerAnchor, _name: str) -> str:
    """Write how many charges a privacy ledger holds."""
    evaluate = write_count(anchor.evaluate, "evaluate")
    return f'{{"evaluate":{evaluate},"train":{write_count(anchor.train, "train")}}}'


def write_phases(phases: tuple[Phase, ...], name: str) -> str:
    """Write the phases of a site's work."""
    if len(phases) > MAX_PHASES:
        raise WireError(f"{name} is not a list of at most {MAX_PHASES}")
    return f"[{','.join([_write_phase(phase) for phase in phases])}]"


def _write_phase(phase: Phase) -> str:
    start = _write_seconds(phase.start_seconds, "start_seconds")
    return (
        f'{{"name":{_write_text(phase.name, "name")},'
        f'"seconds":{_write_seconds(phase.seconds, "seconds")},'
        f'"start_seconds":{start}}}'
    )


def write_resources(used: Resources, _name: str) -> str:
    """Write the resources of work."""
    cpu, memory = used.cpu_seconds, used.peak_memory_bytes
    cpu_text = "null" if cpu is None else _write_seconds(cpu, "cpu_seconds")
    memory_text = "null" if memory is None else write_count(memory, "peak memory")
    return (
        f'{{"busy_seconds":{_write_seconds(used.busy_seconds, "busy_seconds")},'
        f'"cpu_seconds":{cpu_text},'
        f"{'' if used.energy is None else _write_energy(used.energy)}"
        f'"method":{_write_text(used.method, "method")},'
        f'"peak_memory_bytes":{memory_text}}}'
    )


def _write_energy(found: Energy) -> str:
    return (
        f'"energy":{{"grams":{_write_range(found.grams, "grams")},'
        f'"joules":{_write_range(found.joules, "joules")},'
        f'"method":{_write_text(found.method, "method")}}},'
    )


def _write_range(ends: tuple[float, float] | None, name: str) -> str:
    if ends is None:
        return "null"
    low, high = _range(ends, name)
    return f"[{_hex(float(low))},{_hex(float(high))}]"


def _hex(number: float) -> str:
    return f'"{number.hex()}"'


def _write_seconds(seconds: float, name: str) -> str:
    return f'"{_duration(float(seconds), name).hex()}"'


@_kept
def _write_text(value: str, name: str) -> str:
    return encode_basestring_ascii(text(value, name, MAX_PHASE_NAME_CHARS))
