"""Dataclasses as JSON, and back with every type checked.

JSON knows no NaN and no infinity; they are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, which only a float field turns back. Fields that are
not known are passed over: a newer version has added them. Numbers by name, a field that
is a mapping, are among the other fields of their object; a number whose name is that of
such a field, or begins with the mapping's name and a dot, gets these two in front.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache, partial
from itertools import repeat
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN_CHARS = 60
_ABSENT = object()
_PLAIN = frozenset({str, int, bool, type(None)})  # JSON has these as they are.


def encode(value: Any) -> Any:
    """Encode a dataclass in values that ``json.dumps`` accepts."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, tuple):
        return [item if type(item) in _PLAIN else encode(item) for item in value]
    fields = _field_names(kind)
    return value if fields is None else _encode_fields(value, fields)


def _encode_fields(value: Any, fields: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields:
        item = getattr(value, field)
        if type(item) in _PLAIN:
            found[field] = item
        elif not isinstance(item, Mapping):
            found[field] = encode(item)
        else:
            mark = f"{field}."
            for name, number in item.items():
                is_taken = name in fields or name.startswith(mark)
                found[mark + name if is_taken else name] = encode(number)
    return found


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Fields of a dataclass; None of another type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def refuse_constant(word: str) -> None:
    """For ``parse_constant`` of ``json.loads``.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{word} is not JSON")


def decode(value: Any, hint: Any, *, where: str) -> Any:
    """Rebuild a value of the type that the hint names.

    Args:
        value: From ``json.loads``.
        hint: A dataclass, or the type of a field of one.
        where: What it is called in an error.

    Raises:
        ValueError: It is not as ``encode`` writes it.
    """
    try:
        return _decoder(hint)(value)
    except _Unlike as error:
        raise ValueError(f"{where}{error.place} {error}") from None


class _Unlike(Exception):
    """A value that is not as it must be, and its place below the one that is read."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.place = ""

    def below(self, place: str) -> "_Unlike":
        self.place = place + self.place
        return self


# A log has a hundred thousand values of a few types: each type is looked at once.
@cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    origin = get_origin(hint)
    if origin in {Union, types.UnionType}:
        (inner,) = [arm for arm in get_args(hint) if arm is not type(None)]
        decode_inner = _decoder(inner)
        return lambda value: None if value is None else decode_inner(value)
    if origin is tuple:
        return _tuple_decoder(get_args(hint))
    if dataclasses.is_dataclass(hint):
        return _fields_decoder(cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return partial(_decode_member, hint)
    return _SCALARS[hint]


def _tuple_decoder(items: tuple[Any, ...]) -> Callable[[Any], tuple[Any, ...]]:
    is_open = items[-1] is Ellipsis
    decoders = [_decoder(item) for item in items if item is not Ellipsis]

    def decode_tuple(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _unlike(value, "a list")
        if not is_open and len(value) != len(decoders):
            raise _unlike(value, f"a list of {len(decoders)}")
        found = []
        each = repeat(decoders[0]) if is_open else decoders
        for item, decode_item in zip(value, each, strict=False):
            try:
                found.append(decode_item(item))
            except _Unlike as error:
                raise error.below(f"[{len(found)}]") from None
        return tuple(found)

    return decode_tuple


def _fields_decoder(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    named = [name for name, hint in hints.items() if get_origin(hint) is Mapping]
    decoders = [
        (name, _usual(hint), _decoder(hint))
        for name, hint in hints.items()
        if name not in named
    ]

    def decode_fields(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _unlike(value, "an object")
        known: dict[str, Any] = {}
        name = ""
        try:
            for name, usual, decode_field in decoders:
                item = value.get(name, _ABSENT)
                if type(item) is usual:  # Most are, and a call takes longer.
                    known[name] = item
                elif item is not _ABSENT:
                    known[name] = decode_field(item)
        except _Unlike as error:
            raise error.below(f".{name}") from None
        for name in named:
            known[name] = _numbers(value, hints, f"{name}.")
        return _made(kind, known)

    return decode_fields


def _usual(hint: Any) -> type | None:
    """The type of most values of a field, if they need no decoding."""
    arms = [arm for arm in get_args(hint) or (hint,) if arm is not type(None)]
    return arms[0] if arms[0] in _SCALARS and get_origin(hint) is not tuple else None


def _made(kind: type, known: Mapping[str, Any]) -> Any:
    try:
        return kind(**known)
    except TypeError:
        for field in dataclasses.fields(kind):
            if field.name not in known and field.default is dataclasses.MISSING:
                raise _Unlike(f"has no {field.name!r}") from None
        raise


def _numbers(value: Mapping[str, Any], hints: Collection[str], mark: str) -> Any:
    """The numbers by name among the fields of an object."""
    found = {}
    for name in value:
        if name in hints:
            continue
        try:
            found[name.removeprefix(mark)] = _decode_number(value[name])
        except _Unlike as error:
            raise error.below(f".{name}") from None
    return found


def _decode_member(kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError:
        raise _unlike(value, f"a {kind.__name__}") from None


def _decode_float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unlike(value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _unlike(value, "a number that fits into a float") from None


def _decode_number(value: Any) -> float:
    return value if type(value) is int else _decode_float(value)


def _scalar_decoder(kind: type, wanted: str) -> Callable[[Any], Any]:
    def decode_scalar(value: Any) -> Any:
        if type(value) is not kind:  # A bool is no whole number.
            raise _unlike(value, wanted)
        return value

    return decode_scalar


_SCALARS: Mapping[type, Callable[[Any], object]] = {
    float: _decode_float,
    int: _scalar_decoder(int, "a whole number"),
    bool: _scalar_decoder(bool, "true or false"),
    str: _scalar_decoder(str, "a string"),
}


def _unlike(value: Any, wanted: str) -> _Unlike:
    return _Unlike(f"is {repr(value)[:_SHOWN_CHARS]}, not {wanted}")
