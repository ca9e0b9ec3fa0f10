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
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN_CHARS = 60


def encode(value: Any) -> Any:
    """Encode a dataclass in values that ``json.dumps`` accepts."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        found: dict[str, Any] = {}
        for field, item in fields.items():
            if not isinstance(item, Mapping):
                found[field] = encode(item)
                continue
            mark = f"{field}."
            for name, number in item.items():
                is_taken = name in fields or name.startswith(mark)
                found[mark + name if is_taken else name] = encode(number)
        return found
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def refuse_constant(word: str) -> None:
    """For ``parse_constant`` of ``json.loads``.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{word} is not JSON")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def decode(value: Any, hint: Any, *, where: str) -> Any:
    """Rebuild a value of the type that the hint names.

    Args:
        value: From ``json.loads``.
        hint: A dataclass, or the type of a field of one.
        where: What it is called in an error.

    Raises:
        ValueError: It is not as ``encode`` writes it.
    """
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
    return None if value is None else decode(value, inner, where=where)


def _decode_tuple(value: Any, items: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _unlike(value, "a list", where)
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise _unlike(value, f"a list of {len(items)}", where)
    return tuple(
        decode(item, hint, where=f"{where}[{index}]")
        for index, (item, hint) in enumerate(zip(value, items, strict=True))
    )


def _decode_fields(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, dict):
        raise _unlike(value, "an object", where)
    hints = _hints(kind)
    named = [name for name, hint in hints.items() if get_origin(hint) is Mapping]
    known = {
        name: decode(value[name], hint, where=f"{where}.{name}")
        for name, hint in hints.items()
        if name in value and name not in named
    }
    for name in named:
        known[name] = {
            inner.removeprefix(f"{name}."): _decode_number(number, f"{where}.{inner}")
            for inner, number in value.items()
            if inner not in hints
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
        raise _unlike(value, "a number that fits into a float", where) from None


def _decode_number(value: Any, where: str) -> float:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole else _decode_float(value, where)


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
