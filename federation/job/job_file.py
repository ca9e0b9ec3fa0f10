"""Job files: TOML in, a checked ``JobSpec`` out, or one message naming the key.

After ``load`` nothing in the product reads a dictionary or fills in a default.
Writing TOML is left to ``deploy``: the standard library can only read it.
"""

import dataclasses
import difflib
import functools
import logging
import math
import operator
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from federation.errors import JobError, joined, os_errors
from federation.job import code_files
from federation.job.evaluation_job import make_evaluation
from federation.job.fleet import drawn
from federation.job.job_checks import check
from federation.job.job_keys import documented, keys_below
from federation.job.spec import FleetSpec, JobSpec
from federation.job.statistics_checks import filled
from federation.job.statistics_job import StatisticsSpec

MAX_JOB_FILE_BYTES = 1 << 20

_LOG = logging.getLogger(__name__)

Table = typing.TypeVar("Table")

_MOST_FAULTS = 10  # Of a table, in one message.

MAX_KEY_PARTS = 32

# Strings and comments, left to right as `tomllib` reads them. Nothing is read twice:
# one that does not end is taken to the end of its line, or of the text.
_NO_KEYS = re.compile(
    r'"""(?:[^"\\]|\\[\s\S]|"(?!""))*+"{0,5}'
    r"|'''(?:[^']|'(?!''))*+'{0,5}"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+"
)
_DEEP = re.compile(
    rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}", re.ASCII
)

_TOO_LARGE = 2**63  # TOML's whole numbers have 64 bits.


def load(path: Path, overrides: Iterable[str] = (), *, evaluated: str = "") -> JobSpec:
    """Read and check a job file, and pin the users' code that it names.

    Args:
        path: A TOML file.
        overrides: ``key=value`` texts that replace keys of the file: dotted keys,
            ``sites.0.name`` for an entry of a list; values in TOML, or bare words.
            An empty value takes the key out.
        evaluated: A model; the job then evaluates it, and trains none.

    Raises:
        JobError: The file cannot be read, is not TOML, or asks for something that
            is unknown, out of range or unsafe: all such things at once.
    """
    document = read_toml(path)
    for text in overrides:
        name, equals, raw = text.partition("=")
        if not equals or not name.strip():
            fault = f"cannot set {text!r}: write key=value, for example rounds=3"
            raise JobError(fault)
        override(document, name.strip(), _toml_value(raw.strip()))
    document = dict(_with_fleet(document, path.parent))
    if evaluated:
        make_evaluation(document, evaluated)
    code_files.pin(document, path.parent)
    return parse(document)


def read_toml(path: Path, advice: str = "") -> dict[str, Any]:
    """Read a TOML file of at most ``MAX_JOB_FILE_BYTES``.

    Args:
        path: The file.
        advice: What a person can do if it cannot be read; the message then has the
            whole path, since the file may be one that a command looks for by default.

    Raises:
        JobError: It cannot be read, is too large or is not TOML.
    """
    if "\0" in str(path):  # A path from a file, which no system can open.
        raise JobError(f"{str(path)!r:.100} is no path")
    shown = path.absolute() if advice else path
    with os_errors(JobError, f"read {shown}", advice), path.open("rb") as file:
        raw = file.read(MAX_JOB_FILE_BYTES + 1)
    if len(raw) > MAX_JOB_FILE_BYTES:
        raise JobError(f"{path} is larger than {MAX_JOB_FILE_BYTES} bytes")
    try:
        # Some editors begin a file with a mark of its encoding.
        return loads_toml(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise JobError(f"{path} is not TOML: {error}") from error


def loads_toml(text: str) -> dict[str, Any]:
    """Parse TOML of anyone in a time that follows from its length.

    ``tomllib`` takes time with the square of a dotted key's parts: a minute for 80 kB.

    Raises:
        ValueError: It is not TOML, or a key has more than ``MAX_KEY_PARTS`` parts.
    """
    if _DEEP.search(_NO_KEYS.sub("x", text)):
        raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts with dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def build(cls: type[Table], table: Any) -> Table:
    """Build a dataclass whose fields are declared with ``job_keys.key``.

    Raises:
        JobError: A key is unknown, missing or of another type or range.
    """
    return typing.cast("Table", _build(cls, table, ""))


def load_table(
    path: Path,
    cls: type[Table],
    check_table: Callable[[Table], None],
    renamed: Mapping[str, str] = types.MappingProxyType({}),
    *,
    advice: str = "",
) -> Table:
    """Read a configuration other than a job; see ``build``.

    Args:
        path: A TOML file.
        cls: What it holds.
        check_table: Refuses what contradicts itself.
        renamed: New names of tables by the old ones, which are read with a warning.
        advice: What a person can do if the file cannot be read.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the
            message names file and key.
    """
    try:
        document = read_toml(path, advice)
        for old in document.keys() & renamed.keys():
            _rename(document, old, renamed[old], path)
        table = build(cls, document)
        check_table(table)
    except JobError as error:
        if str(path) in error.reason:
            raise
        raise JobError(f"{path}: {error}") from error
    return table


def _rename(document: dict[str, Any], old: str, new: str, path: Path) -> None:
    if new in document:
        raise JobError(f"is the old name of [{new}]: keep only one of them", key=old)
    document[new] = document.pop(old)
    _LOG.warning("%s: [%s] is now [%s]: rename the table", path, old, new)


def loads(text: str) -> JobSpec:
    """Check the job that a TOML text describes; see ``load``.

    Raises:
        JobError: It is not TOML, or see ``parse``.
    """
    return parse(parse_toml(text))


def parse_toml(text: str) -> dict[str, Any]:
    """Read the TOML text of a job, without checking its values.

    Raises:
        JobError: It is not TOML.
    """
    try:
        return loads_toml(text)
    except ValueError as error:
        raise JobError(f"the job is not TOML: {error}") from error


def parse(document: Mapping[str, Any]) -> JobSpec:
    """Turn nested mappings into a checked job.

    Raises:
        JobError: See ``load``.
    """
    return check(_build(JobSpec, _with_statistics(_with_fleet(document)), ""))


def _with_statistics(document: Any) -> Any:
    """Fill in the tables that follow from ``[statistics]``.

    Raises:
        JobError: It is not a valid table.
    """
    if not isinstance(document, Mapping) or "statistics" not in document:
        return document
    spec = _build(StatisticsSpec, document["statistics"], "statistics")
    return filled(document, spec)


def _with_fleet(
    document: Mapping[str, Any], folder: Path | None = None
) -> Mapping[str, Any]:
    """Replace ``simulation.fleet`` by the sites and machines that it stands for.

    Args:
        document: A job.
        folder: Where its file is; None for a job that may be someone else's, which has
            no file read here.

    Raises:
        JobError: It is not a valid table or file, or its trace not a valid file, or the
            job also lists sites.
    """
    name, simulation = "simulation.fleet", None
    if isinstance(document, Mapping):
        simulation = document.get("simulation")
    if not isinstance(simulation, Mapping) or "fleet" not in simulation:
        return document
    seed = document.get("seed")
    table = simulation["fleet"]
    if isinstance(table, str):
        fleet, folder = _fleet_file(table, folder)
    else:
        fleet = _build(FleetSpec, table, name)
    found = drawn(fleet, seed if isinstance(seed, int) and seed > 0 else 0, folder)
    if "sites" in document or "machines" in simulation:
        raise JobError("names all sites: remove [[sites]] and their machines", key=name)
    simulation = {k: v for k, v in simulation.items() if k != "fleet"}
    simulation["machines"] = found["machines"]
    return {**document, "sites": found["sites"], "simulation": simulation}


def _fleet_file(name: str, folder: Path | None) -> tuple[FleetSpec, Path]:
    """Read a fleet from a file of its own; also return the folder that the file is in.

    Raises:
        JobError: There is no folder, or the file is not a valid table.
    """
    key = "simulation.fleet"
    if folder is None:
        raise JobError("a file is read only for a job in a file of your own", key=key)
    path = folder / name
    try:
        return _build(FleetSpec, read_toml(path), ""), path.parent
    except JobError as error:
        where = "" if error.key is None else f"{path}: "
        raise JobError(f"{where}{error}", key=key) from error


def document(job: JobSpec) -> dict[str, Any]:
    """Return a job as nested plain mappings that ``parse`` accepts.

    Every key is there with its value, defaults too; a key without a value
    (None) is left out, as TOML has no word for it.
    """
    return typing.cast("dict[str, Any]", _plain(job))


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List the dotted keys in which two job documents differ, with both values."""
    return [
        f"{name}: {left!r} here, {right!r} there"
        for name, (left, right) in differing(mine, other).items()
    ]


def differing(
    mine: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Both values of the dotted keys in which two documents differ, in their order.

    A key that one of them lacks has the value ``"not set"`` there.
    """
    left, right = dict(_leaves(mine, "")), dict(_leaves(other, ""))
    return {
        name: (left.get(name, "not set"), right.get(name, "not set"))
        for name in sorted(left.keys() | right.keys())
        if repr(left.get(name)) != repr(right.get(name))  # 1 is not true, nor 1.0
    }


def _leaves(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{index}]")
    else:
        yield name, value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(inner) for name, inner in pairs if inner is not None}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value


def override(document: dict[str, Any], name: str, value: Any) -> None:
    """Replace a value of a job's document.

    Args:
        document: Nested mappings.
        name: Dotted key; ``sites.0.name`` for an entry of a list.
        value: The new value; None removes the key.

    Raises:
        JobError: The name leads to no place.
    """
    *path, last = name.split(".")
    table: Any = document
    for index, part in enumerate(path):
        full = ".".join(path[: index + 1])
        if isinstance(table, list):
            table = table[_index(table, part, full)]
        elif part not in table and value is None:
            return  # What is not there need not be taken out.
        else:
            table = table.setdefault(part, {})
        if not isinstance(table, dict | list):
            raise JobError(f"is {_describe(table)}, not a table", key=full)
    place: Any = _index(table, last, name) if isinstance(table, list) else last
    if value is not None:
        table[place] = value
    elif place in table or isinstance(table, list):
        del table[place]


def _index(entries: list[Any], index: str, name: str) -> int:
    if not entries:
        raise JobError(f"has no entry {index!r}: the list is empty", key=name)
    # Few digits only: int() refuses thousands of them with an error of its own.
    if not index.isdecimal() or len(index) > 9 or int(index) >= len(entries):  # noqa: PLR2004
        raise JobError(
            f"has no entry {index!r:.20}: count from 0 to {len(entries) - 1}", key=name
        )
    return int(index)


def _toml_value(raw: str) -> Any:
    """Read the value of an override; None, which TOML lacks, for an empty one."""
    if not raw:
        return None
    try:
        return loads_toml(f"value = {raw}")["value"]
    except ValueError:
        return raw  # A bare word: --set aggregation.combine=median


def _build(cls: type, table: Any, name: str) -> Any:
    """Build the dataclass ``cls`` from a TOML table found under ``name``."""
    if not isinstance(table, Mapping):
        raise JobError(f"must be a table, not {_describe(table)}", key=name or None)
    fields, hints = _fields_of(cls)
    # All at once, but few: a stranger may have written them.
    unknown = [key for key in table if key not in fields][:_MOST_FAULTS]
    faults = [
        _unknown(f"{name}.{key}" if name else key, key, fields, cls) for key in unknown
    ]
    values = {}
    for key, field in fields.items():
        full = f"{name}.{key}" if name else key
        try:
            if key in table:
                values[key] = _convert(hints[key], table[key], full)
                _check_range(values[key], field.metadata, full)
            elif _is_required(field):
                _, said = documented(cls)
                raise JobError(f"is missing: {said.get(key)}", key=full)  # noqa: TRY301
        except JobError as error:
            faults.append(error)
    if faults:
        raise joined(faults[:_MOST_FAULTS])
    return cls(**values)


@functools.cache  # A job has forty tables, and a process reads many jobs.
def _fields_of(
    cls: type,
) -> tuple[Mapping[str, "dataclasses.Field[Any]"], Mapping[str, Any]]:
    """The fields of a dataclass by name, and the types that they are to have."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    return fields, typing.get_type_hints(cls)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _unknown(full: str, key: str, fields: Mapping[str, Any], cls: type) -> JobError:
    near = difflib.get_close_matches(str(key), fields, n=1)
    if not near:
        outer, ends = str(full).removesuffix(str(key)), (f".{key}", f"_{key}")
        near = [outer + deep for deep in keys_below(cls) if deep.endswith(ends)]
    meant = f"did you mean {' or '.join(map(repr, sorted({*near})[:3]))}?"
    hint = meant if near else f"known keys: {', '.join(fields)}"
    return JobError(f"unknown key; {hint}", key=full)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Check ``value`` against a type hint of a job field and return it typed."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        first, *others = (a for a in arguments if a is not type(None))
        inner = type(value) if type(value) in others else first
        return _convert(inner, value, name)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise JobError(f"must be a list, not {_describe(value)}", key=name)
        return tuple(
            _convert(arguments[0], item, f"{name}[{index}]")
            for index, item in enumerate(value)
        )
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type", hint), value, name)
    if origin is not None:  # Mapping[str, ...]
        if not isinstance(value, Mapping):
            raise JobError(f"must be a table, not {_describe(value)}", key=name)
        return {
            str(key): _convert(arguments[1], item, f"{name}.{key}")
            for key, item in value.items()
        }
    return _option(value, name) if hint is Any else _scalar(hint, value, name)


def _option(value: Any, name: str) -> Any:
    """Copy an option of a factory, which may be anything that JSON can hold.

    Options go into every checkpoint's manifest: a date or a NaN would not return.
    """
    if isinstance(value, Mapping):
        return {str(k): _option(item, f"{name}.{k}") for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [_option(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if type(value) not in _TYPE_NAMES:
        known = ", ".join(_TYPE_NAMES.values())
        raise JobError(
            f"must be {known}, a list or a table, not {_describe(value)}", key=name
        )
    return _scalar(type(value), value, name)


def _scalar(hint: Any, value: Any, name: str) -> Any:
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise JobError("must fit into 64 bits, with its sign", key=name)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise JobError(f"must be {_TYPE_NAMES[hint]}, not {_describe(value)}", key=name)
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"must be a finite number, not {value}", key=name)
    return value


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, date | time):
        return f"the date or time {value}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return "a number of more than 64 bits"  # Which Python may refuse to print.
    return f"{value!r:.80}"


def _check_range(value: Any, metadata: Mapping[str, Any], name: str) -> None:
    """Check choices and bounds that the field declares."""
    if value is None or not metadata:
        return
    choices, limits = metadata["choices"], metadata["bounds"]
    if isinstance(value, str):
        if not choices or value in choices:
            return
        nearest = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        if {*limits.values()} != {None}:
            choices = (*choices, "a number")
        raise JobError(
            f"{value!r:.80} is not a choice; {hint}choose {_either(choices)}", key=name
        )
    for bound, word, holds in (
        ("low", "at least", operator.ge),
        ("above", "above", operator.gt),
        ("high", "at most", operator.le),
        ("below", "below", operator.lt),
    ):
        limit = limits[bound]
        if limit is not None and not holds(value, limit):
            raise JobError(f"must be {word} {limit}, not {value}", key=name)


def _either(choices: tuple[str, ...]) -> str:
    return (
        " or ".join((", ".join(choices[:-1]), choices[-1]))
        if choices[1:]
        else choices[0]
    )
