"""What a data source derives from the data to prepare it, and its privacy.

A mean that every record is scaled by depends on all of them. It has no noise and no
ledger charges it, so the privacy of a record ends where the mean of its site is used,
and that of a site where the mean over several sites is. Only the author of a source
knows what it does: its function declares it.
"""

from collections.abc import Callable
from typing import TypeVar

from federation.errors import JobError

PREPROCESSINGS = ("none", "public", "own", "pooled")
"""``none``: each record is prepared by itself. ``public``: with constants that come
from elsewhere. ``own``: with exact statistics of the site's own data. ``pooled``: with
statistics over the data of several sites."""

_ATTRIBUTE = "preprocessing"
_PERMITTED = {
    "record": ("none", "public"),
    "person": ("none", "public"),
    "joint": ("none", "public"),
    "site": ("none", "public", "own"),
}
_USES = {
    "own": "exact statistics of the site's own data",
    "pooled": "statistics over the data of several sites",
}
_Function = TypeVar("_Function", bound=Callable[..., object])


def preprocessing(kind: str) -> Callable[[_Function], _Function]:
    """Declare what a source derives from the data: a decorator.

    Setting the function's attribute ``preprocessing`` does the same, without an import.

    Args:
        kind: One of ``PREPROCESSINGS``.

    Raises:
        ValueError: ``kind`` is another word.
    """
    if kind not in PREPROCESSINGS:
        raise ValueError(f"preprocessing is {kind!r}, not one of {PREPROCESSINGS}")

    def declare(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, kind)
        return function

    return declare


def declared_by(source: object, *, name: str, key: str | None = None) -> str:
    """Return what a source's function declares; empty if it declares nothing.

    Args:
        source: The function.
        name: ``module:function``.
        key: Key of the file that names it.

    Raises:
        JobError: It declares a word that is not known.
    """
    kind = getattr(source, _ATTRIBUTE, "")
    if kind not in ("", *PREPROCESSINGS):
        known = ", ".join(PREPROCESSINGS)
        raise JobError(
            f"{name} declares the preprocessing {kind!r}: choose one of {known}",
            key=key,
        )
    return str(kind)


def fault(kind: str, unit: str, *, is_dealt: bool) -> str | None:
    """Say why data may not be used under a unit of privacy; None if it may.

    Args:
        kind: One of ``PREPROCESSINGS``, or empty for undeclared data.
        unit: Unit of privacy of the job; ``none`` permits everything.
        is_dealt: Whether one dataset is split among several sites. Its own statistics
            are then over the data of them all.
    """
    if unit == "none":
        return None
    if not kind:
        return (
            f"does not declare its preprocessing, and the job has the unit {unit!r}: "
            "statistics that records are scaled by would have no noise"
        )
    kind = "pooled" if kind == "own" and is_dealt else kind
    if kind in _PERMITTED[unit]:
        return None
    return (
        f"prepares records with {_USES[kind]}, which have no noise, and the job has "
        f"the unit {unit!r}: use constants that come from elsewhere, or leave records "
        "unscaled and set privacy.differential_privacy.standardise"
    )
