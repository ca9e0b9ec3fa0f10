"""Many simulated sites from a few numbers: the table ``simulation.fleet``."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from federation.errors import JobError, os_errors
from federation.job.spec import FleetSpec

# A normal variable is within so many standard deviations 19 times of 20.
_MOST_DEVIATIONS = 1.96
_TRACE = "simulation.fleet.trace"
# Of the table event_trace; node_name and event_end_reason say nothing of time.
_NODE, _TYPE, _BEGIN = "node_id", "event_type", "event_start_time"
_ENDS = ("event_stop_time", "event_end_time")  # In files, and in their description.
_AWAY = 0
_ROUNDING = 1e-3  # Seconds.
_PRICES = ("dollars_per_hour", "dollars_per_gigabyte")
_DRAWN = ("examples_per_second", "down_mbit", "up_mbit", "latency_seconds")


def drawn(
    fleet: FleetSpec, seed: int, folder: Path | None = None
) -> Mapping[str, list[dict[str, Any]]]:
    """Draw the sites of a fleet and their machines.

    Args:
        fleet: How many, and of which speeds: each is log-normal about its median.
        seed: The job's.
        folder: Where a trace is; None to read none.

    Returns:
        Entries of ``sites`` and of ``simulation.machines``, as in a job file.

    Raises:
        JobError: The fleet has a trace, and there is no folder, or the trace is damaged
            or has fewer nodes.
    """
    generator = np.random.default_rng([seed, fleet.sites])
    deviation = np.log(fleet.spread) / _MOST_DEVIATIONS
    factors = np.exp(deviation * generator.standard_normal((fleet.sites, len(_DRAWN))))
    digits = len(str(fleet.sites))
    names = [f"site-{number:0{digits}}" for number in range(1, fleet.sites + 1)]
    medians = {key: getattr(fleet, key) for key in _DRAWN}
    prices = {key: price for key in _PRICES if (price := getattr(fleet, key))}
    away = {"away_share": fleet.away_share, "away_seconds": fleet.away_seconds}
    absences: list[dict[str, Any]] = [away] * fleet.sites
    if fleet.trace:
        absences = _traced(fleet, folder)
    machines: list[dict[str, Any]] = [
        {
            "site": name,
            **{
                key: float(medians[key] * f) for key, f in zip(_DRAWN, row, strict=True)
            },
            **prices,
            **absent,
        }
        for name, row, absent in zip(names, factors, absences, strict=True)
    ]
    return {"sites": [{"name": name} for name in names], "machines": machines}


def _traced(fleet: FleetSpec, folder: Path | None) -> list[dict[str, Any]]:
    if folder is None:
        raise JobError("is read only for a job in a file of your own", key=_TRACE)
    if fleet.away_share:
        raise JobError("says when sites are away: remove away_share", key=_TRACE)
    path = folder / fleet.trace
    away, seconds = read_trace(path, fleet.sites)
    if len(away) < fleet.sites:
        raise JobError(
            f"{path} has too few nodes ({len(away)}) for the fleet ({fleet.sites} "
            "sites): set fewer sites",
            key=_TRACE,
        )
    return [{"away": each, "away_every": seconds} for each in away]


def read_trace(path: Path, nodes: int) -> tuple[list[list[list[float]]], float]:
    """Read when the machines of a trace were away.

    The file is a table ``event_trace`` of the Failure Trace Archive (Kondo et al. 2010,
    doi:10.1109/CCGRID.2010.71; fta.scem.westernsydney.edu.au, "FTA format"): columns
    are separated by tabs and named in the first line, after ``#``. Each line says that
    a node (``node_id``) was away (``event_type`` 0) or there (1) from
    ``event_start_time`` to ``event_stop_time``, in seconds. Other columns are ignored.
    Before its first and after its last line a node is away.

    Args:
        path: The file.
        nodes: How many to read: the first ones.

    Returns:
        Of each node its absences, begin and end in seconds from the trace's first
        event; and how long the trace lasts.

    Raises:
        JobError: The file cannot be read; or a line is damaged, overlaps with the one
            of the same node before it, or leaves a gap after it.
    """
    away: dict[str, list[list[float]]] = {}
    ends: dict[str, float] = {}
    first, last = math.inf, -math.inf
    for where, node, kind, begin, end in _events(path):
        first, last = min(first, begin), max(last, end)
        if node not in ends:
            if len(ends) == nodes:
                continue
            away[node] = [[-math.inf, begin]]
        elif abs(begin - ends[node]) > _ROUNDING:
            what = "overlaps with" if begin < ends[node] else "leaves a gap after"
            raise JobError(
                f"{where}: node {node} from {begin:.15g} {what} its line before, which "
                f"ends at {ends[node]:.15g}",
                key=_TRACE,
            )
        ends[node] = end
        if kind == _AWAY:
            away[node].append([begin, end])
    for node, end in ends.items():
        away[node].append([end, last])
    return [_merged(each, first, last) for each in away.values()], last - first


def _merged(away: list[list[float]], first: float, last: float) -> list[list[float]]:
    """Count from the first event, and leave out what is empty or follows at once."""
    found: list[list[float]] = []
    for begin, end in away:
        since, until = max(begin, first) - first, min(end, last) - first
        if found and since - found[-1][1] <= _ROUNDING:
            found[-1][1] = max(until, found[-1][1])
        elif until > since:
            found.append([since, until])
    return found


def _events(path: Path) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield place, node, type, begin and end of each event."""
    with os_errors(JobError, f"read {path}"), path.open(encoding="latin-1") as file:
        lines, head, names = enumerate(file, start=1), 1, list[str]()
        for number, line in lines:  # Comments may be before the line of names.
            head = number
            names = [name.strip() for name in line.lstrip("#").split("\t")]
            if _NODE in names or not line.startswith("#"):
                break
        stop = next((name for name in _ENDS if name in names), _ENDS[0])
        missing = [n for n in (_NODE, _TYPE, _BEGIN, stop) if n not in names]
        if missing:
            raise JobError(
                f"{path}:{head}: has no column {missing[0]}: give event_trace.tab of "
                "the Failure Trace Archive, with its line of names",
                key=_TRACE,
            )
        places = [names.index(name) for name in (_NODE, _TYPE, _BEGIN, stop)]
        for number, line in lines:
            if not line.strip() or line.startswith("#"):
                continue
            where, cells = f"{path}:{number}", [*map(str.strip, line.split("\t"))]
            try:
                node, kind, *times = (cells[place] for place in places)
                begin, end = map(float, times)
                wrong = not 0 <= begin <= end < math.inf or int(kind) not in {0, 1}
            except (IndexError, ValueError):
                wrong = True
            if wrong:
                raise JobError(
                    f"{where}: {line.strip()!r:.80}: must name a node, 0 (away) or 1 "
                    "(there), and seconds from 0 on, the end after the begin",
                    key=_TRACE,
                )
            yield where, node, int(kind), begin, end
