"""The events of a run as JSON lines: ``events.jsonl``.

One line is one event: ``{"event": "RoundFinished", "at": ..., ...}``, in ASCII.
JSON knows no NaN and no infinity; they are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, which only a float field turns back.

A file may hold several coordinators of one run, one after another: each begins
with ``RunStarted``, and where a round occurs twice the later one counts. What a
newer version has added, kinds of events and fields, is passed over; anything
else that is not as written is an error. Folding events into a view of the run
is the work of ``monitoring.run_fold``.
"""

import contextlib
import dataclasses
import json
import math
import os
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Self, Union, cast, get_args, get_origin, get_type_hints

from federation.errors import CorruptObject, RunNotFound, StoreUnavailable
from federation.events import Event

KINDS: Mapping[str, type[Event]] = types.MappingProxyType(
    {kind.__name__: kind for kind in get_args(Event)}
)

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN_CHARS = 60


class EventWriter:
    """Append events to a file; an ``Emit`` callable and a context manager.

    Each event is handed to the operating system before the call returns, so a
    killed process leaves at most its last line torn; a crash of the machine may
    cost more. One thread writes.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending and remove a torn line at its end.

        Raises:
            StoreUnavailable: The file cannot be opened or written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _mend_last_line(path)
            # Unbuffered: what could not be written is not tried again on close.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unavailable(path, error) from error

    def __call__(self, event: Event) -> None:
        """Write one line.

        Raises:
            StoreUnavailable: The disk is full, or the file is out of reach.
        """
        rest = memoryview(to_line(event).encode("ascii") + b"\n")
        start = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # Half a line must not run into the next one, should there be room then.
            # That this fails as well is not the news.
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise _unavailable(self._path, error) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the file."""
        self.close()


def to_line(event: Event) -> str:
    """Write an event as one line of JSON, without the line break."""
    record = {"event": type(event).__name__, **_encode(event)}
    return json.dumps(record, allow_nan=False, separators=(", ", ": "))


def from_line(line: str | bytes) -> Event | None:
    """Rebuild the event of a line; None if its kind is not known here.

    Raises:
        ValueError: The line is not JSON, or not an event as ``to_line`` writes it.
    """
    record = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError('not an object with a string "event"')  # noqa: TRY004
    kind = KINDS.get(record["event"])
    if kind is None:
        return None
    return cast("Event", _decode(record, kind, where=record["event"]))


def read_events(path: Path) -> list[Event]:
    """Read a log, in the order in which it was written.

    A torn last line is left out: its writer was killed, or is still writing.

    Raises:
        RunNotFound: There is no such file.
        CorruptObject: A line is not an event; the message names file and line.
        StoreUnavailable: The file cannot be read.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no event log {path}") from error
    except OSError as error:
        raise _unavailable(path, error) from error
    if _is_whole(last):
        lines.append(last)
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = from_line(line)
        except ValueError as error:
            raise CorruptObject(
                f"{path}, line {number}: {error}; remove the line to read the rest"
            ) from error
        if event is not None:
            events.append(event)
    return events


def _unavailable(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"cannot use the event log {path}: {error.strerror}")


def _is_whole(line: bytes) -> bool:
    """Whether a line without line break is complete: an object that closes."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mend_last_line(path: Path) -> None:
    """Make the file end with a line break: finish a whole line, cut a torn one."""
    if not path.is_file():
        return
    content = path.read_bytes()
    last = content[content.rfind(b"\n") + 1 :]
    if not last:
        return
    with path.open("r+b") as file:
        if _is_whole(last):
            file.seek(0, 2)
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(value: Any, hint: Any, *, where: str) -> Any:
    """Rebuild a value of the type that the hint names."""
    origin = get_origin(hint)
    if origin in {Union, types.UnionType}:
        return _decode_optional(value, hint, where)
    if origin is tuple:
        return _decode_tuple(value, get_args(hint), where)
    if dataclasses.is_dataclass(hint):
        return _decode_fields(value, cast("type", hint), where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _decode_member(value, hint, where)
    return _SCALARS[hint](value, where)


def _decode_optional(value: Any, hint: Any, where: str) -> Any:
    (inner,) = [arm for arm in get_args(hint) if arm is not type(None)]
    return None if value is None else _decode(value, inner, where=where)


def _decode_tuple(value: Any, items: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _unlike(value, "a list", where)
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise _unlike(value, f"a list of {len(items)}", where)
    return tuple(
        _decode(item, hint, where=f"{where}[{index}]")
        for index, (item, hint) in enumerate(zip(value, items, strict=True))
    )


def _decode_fields(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, dict):
        raise _unlike(value, "an object", where)
    known = {
        name: _decode(value[name], hint, where=f"{where}.{name}")
        for name, hint in _hints(kind).items()
        if name in value
    }
    for field in dataclasses.fields(kind):
        if field.name not in known and field.default is dataclasses.MISSING:
            raise ValueError(f"{where} has no {field.name!r}")
    return kind(**known)


def _decode_member(value: Any, kind: type[Enum], where: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        raise _unlike(value, f"a {kind.__name__}", where) from None


def _decode_float(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _unlike(value, "a number", where)
    try:
        return float(value)
    except OverflowError:
        raise _unlike(value, "a number that a float can hold", where) from None


def _decode_int(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unlike(value, "a whole number", where)
    return value


def _decode_bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _unlike(value, "true or false", where)
    return value


def _decode_str(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _unlike(value, "a string", where)
    return value


_SCALARS: Mapping[type, Callable[[Any, str], object]] = {
    float: _decode_float,
    int: _decode_int,
    bool: _decode_bool,
    str: _decode_str,
}


def _unlike(value: Any, wanted: str, where: str) -> ValueError:
    return ValueError(f"{where} is {repr(value)[:_SHOWN_CHARS]}, not {wanted}")
