"""Numbers for people: sizes, durations, fractions, losses."""

import math
from decimal import ROUND_CEILING, Decimal

_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_KILO = 1000.0
_UNITS = ("B", "kB", "MB", "GB", "TB")
_ROUNDS_UP = 0.99995  # 999.96 kB would be shown as 1000.0
_SHORT_SECONDS = 9.95
_SHOWN_IN_MILLISECONDS = 0.0995
_SMALL = 0.001
_LARGE = 10_000


def format_bytes(size: float) -> str:
    """A size in decimal units: ``301.2 kB``."""
    if size < _KILO:
        return f"{size:.0f} B"
    *_, unit = (
        unit for power, unit in enumerate(_UNITS) if size >= _ROUNDS_UP * _KILO**power
    )
    return f"{size / _KILO ** _UNITS.index(unit):.1f} {unit}"


def format_span(ends: tuple[int, int]) -> str:
    """A range: ``1,200 to 1,264``; one number if both are the same."""
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_range(ends: tuple[float, float], unit: float = 1.0) -> str:
    """A measured range in a unit: ``4,410 to 4,530``; one number if both look alike."""
    low, high = (f"{float(f'{each / unit:.3g}'):,.15g}" for each in ends)
    return low if low == high else f"{low} to {high}"


def format_duration(seconds: float) -> str:
    """A duration: ``12 ms``, ``0.8 s``, ``42 s``, ``3 min 05 s``, ``2 h 05 min``."""
    if 0 < seconds < _SHOWN_IN_MILLISECONDS:
        return f"{1000 * seconds:.0f} ms"
    if seconds < _SHORT_SECONDS:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02d} h"


def format_fraction(fraction: float | None) -> str:
    """A fraction in per cent: ``91.3 %``; a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def format_number(value: float | None) -> str:
    """A loss or a norm: ``0.412``, ``3.1e-05``; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value and not _SMALL <= abs(value) < _LARGE:
        return f"{value:.1e}"
    return f"{value:.3f}"


def format_count(count: int, noun: str) -> str:
    """A number of things: ``1 site``, ``1,000 sites``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_delta(delta: float) -> str:
    """A small probability, rounded up to two digits: ``1e-05``, ``2.5e-06``."""
    exact = Decimal(repr(delta))
    if not exact:
        return "0"
    up = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), ROUND_CEILING)
    return f"{float(up):.1e}".replace(".0e", "e")
