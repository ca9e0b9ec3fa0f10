"""Carbon intensity of regions, from a table that the user provides.

crossfed ships no such data. The table may be a forecast, and may be rewritten while
``crossfed up`` waits: it is read again at each look.
"""

import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from federation.errors import JobError
from federation.job import job_file
from federation.job.job_keys import key

# No grid emits as much: a slip of the decimal point must not pass.
_MOST_GRAMS = 2000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """Carbon intensity of a region's electricity.

    Attributes:
        region: Name of the cloud's region, for example `us-east-1`.
        grams_per_kwh: Grams of CO2-equivalent per kWh.
        begins: From when it holds, with its offset from UTC, for example
            `2026-11-26T18:00:00+01:00`. Default: it has always held.
        ends: Until when. Default: until a later row of the region begins.
    """

    region: str
    grams_per_kwh: float = key(low=0.0, high=_MOST_GRAMS)
    begins: str = ""
    ends: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarbonTable:
    """A table of carbon intensity.

    Attributes:
        source: Where the values are from.
        intensity: The values, one `[[intensity]]` table each.
    """

    source: str
    intensity: tuple[Intensity, ...]

    def at(self, region: str, now: float) -> float | None:
        """The intensity of a region in grams per kWh; None if no row tells it.

        Of two rows the one that begins later counts, and of two that begin together
        the higher.

        Args:
            region: As its cloud names it.
            now: Seconds since 1970.
        """
        held = [
            (begins, row.grams_per_kwh)
            for row in self.intensity
            if (begins := _seconds(row.begins, -math.inf)) <= now
            if row.region == region and now < _seconds(row.ends, math.inf)
        ]
        return max(held)[1] if held else None


def load(path: Path) -> CarbonTable:
    """Read a table.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the message
            names file and key.
    """
    return job_file.load_table(path, CarbonTable, _check)


def _check(table: CarbonTable) -> None:
    for index, row in enumerate(table.intensity):
        for name, text in (("begins", row.begins), ("ends", row.ends)):
            try:
                _seconds(text, 0.0)
            except ValueError:
                raise JobError(
                    f"{text!r:.80} is no time with an offset from UTC, for example "
                    "2026-11-26T18:00:00+01:00",
                    key=f"intensity[{index}].{name}",
                ) from None
        if _seconds(row.ends, math.inf) <= _seconds(row.begins, -math.inf):
            raise JobError(
                f"{row.ends} is not after begins = {row.begins}",
                key=f"intensity[{index}].ends",
            )


def _seconds(text: str, default: float) -> float:
    """Seconds since 1970 of a time; ``default`` for none."""
    if not text:
        return default
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(text)
    return found.timestamp()
