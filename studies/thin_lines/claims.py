"""What others have claimed, beside what this study's rows say.

The claims are those of two papers about training in clouds: Wang and He (INCOFT 2025),
tables 1 and 3, and Huang (ITPHSS 2025), the table of frameworks and section 5.3.3; see
``studies/seeds``. Neither states an algorithm, a model and a bandwidth together. A
verdict compares ratios, since their units are of other machines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results import Result

# Within so much of a claim a figure reproduces it.
_NEAR = 0.1
# Loss that counts as no worse: half a percent.
_NO_WORSE = 1.005
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim, and what rows say of it.

    Attributes:
        source: Where it stands.
        claim: What it says.
        found: What this study's rows say.
        verdict: ``reproduced``, ``refuted``, ``beaten ...`` or ``no rows yet``.
    """

    source: str
    claim: str
    found: str
    verdict: str


_NO_ROWS = "no rows yet"


def claims(
    loss: Sequence[Result], baselines: Sequence[Result], shares: Sequence[Result]
) -> Iterator[Claim]:
    """Yield a row for each claim."""
    yield _halved_bytes(loss)
    yield _less_gradient(loss)
    yield _halved_latency(shares)
    yield from _utilisation(shares)
    yield from _frameworks(baselines)


def best_rows(loss: Iterable[Result]) -> Mapping[str, Result]:
    """Each row at the learning rate of the lowest loss with the first seed."""
    found: dict[str, Result] = {}
    for row in loss:
        if row["seed"] == 0:
            before = found.setdefault(row["row"], row)
            if row["loss"] < before["loss"]:
                found[row["row"]] = row
    return found


def _cheapest(loss: Sequence[Result], *, secure: bool) -> tuple[Result, Result] | None:
    """Synchronous AdamW, and the row of fewest bytes whose loss is no worse."""
    best = best_rows(loss)
    dense = best.get("synchronous AdamW")
    if dense is None:
        return None
    fit = [
        row
        for name, row in best.items()
        if row["loss"] <= _NO_WORSE * dense["loss"] and ("secure" in name or not secure)
    ]
    return (dense, max(fit, key=lambda row: row["x_both"])) if fit else None


def _verdict(found: float, claimed: float) -> str:
    """Judge a ratio of which more is better."""
    if found > (1 + _NEAR) * claimed:
        return f"beaten by a factor of {found / claimed:.1f}"
    return "reproduced" if found >= (1 - _NEAR) * claimed else "refuted"


def _halved_bytes(loss: Sequence[Result]) -> Claim:
    source, claim = "Wang and He, table 3", "1 TB becomes 500 GB: half the bytes"
    pair = _cheapest(loss, secure=False)
    if pair is None:
        return Claim(source=source, claim=claim, found="-", verdict=_NO_ROWS)
    dense, row = pair
    found = (
        f"{row['row']}: {row['x_both']:.0f} times fewer at a loss of {row['loss']:.3f} "
        f"(synchronous AdamW: {dense['loss']:.3f}; one seed)"
    )
    secure = _cheapest(loss, secure=True)
    if secure is None:
        found += "; no secure row is within 0.5 % of it"
    else:
        found += f"; secure: {secure[1]['row']}, {secure[1]['x_both']:.0f} times"
    verdict = _verdict(row["x_both"], 2.0)
    return Claim(source=source, claim=claim, found=found, verdict=verdict)


def _less_gradient(loss: Sequence[Result]) -> Claim:
    source = "Huang, section 5.3.3"
    claim = "compression: 20 % fewer bytes of gradients, 30 to 40 % less communication"
    pair = _cheapest(loss, secure=False)
    if pair is None:
        return Claim(source=source, claim=claim, found="-", verdict=_NO_ROWS)
    less = 1 - 1 / pair[1]["x_both"]
    found = f"{less:.1%} fewer at no worse a loss ({pair[1]['row']})"
    return Claim(source=source, claim=claim, found=found, verdict=_verdict(less, 0.4))


def _halved_latency(shares: Sequence[Result]) -> Claim:
    """Compare seconds that a step waits, at the narrowest line that was measured."""
    source, claim = "Wang and He, table 3", "latency falls from 200 to 100"
    measured = [row for row in shares if row["part"] == "measured"]
    if not measured:
        return Claim(source=source, claim=claim, found="-", verdict=_NO_ROWS)
    mbit = min(row["mbit"] for row in measured)
    here = [row for row in measured if row["mbit"] == mbit]
    waits = {
        f"{row['way']}{', overlapped' if row['overlap_steps'] else ''}": (
            row["round_seconds"] / row["local_steps"] - row["step_seconds"]
        )
        for row in here
    }
    dense = waits.pop("DDP", None)
    if dense is None or not waits:
        return Claim(source=source, claim=claim, found="-", verdict=_NO_ROWS)
    name = min(waits, key=lambda each: waits[each])
    found = (
        f"at {mbit:g} Mbit/s a step of DDP waits {dense:.2f} s, one of {name} "
        f"{waits[name]:.3f} s"
    )
    times = dense / max(waits[name], 1e-9)
    return Claim(source=source, claim=claim, found=found, verdict=_verdict(times, 2.0))


def _utilisation(shares: Sequence[Result]) -> Iterator[Claim]:
    source, claim = "Wang and He, table 1", "GPUs are used 95 % instead of 60 %"
    measured = [row for row in shares if row["part"] == "measured"]
    if not measured:
        yield Claim(source=source, claim=claim, found="-", verdict=_NO_ROWS)
        return
    for mbit in sorted({row["mbit"] for row in measured}):
        here = {
            (row["way"], row["overlap_steps"] > 0): row["utilisation"]
            for row in measured
            if row["mbit"] == mbit
        }
        dense = here.pop(("DDP", False), None)
        if dense is None or not here:
            continue
        (way, overlaps), best = max(here.items(), key=lambda item: item[1])
        found = (
            f"at {mbit:g} Mbit/s DDP {dense:.0%}, {way}"
            f"{', overlapped' if overlaps else ''} {best:.0%}"
        )
        verdict = _verdict(best / dense, 95 / 60)
        yield Claim(source=source, claim=claim, found=found, verdict=verdict)


_FRAMEWORKS = (  # Method, their name, their gigabytes, their utilisation.
    ("parameter server", "parameter server", 120, 80),
    ("all-reduce, recursive doubling", "all-reduce", 100, 85),
    ("ZeRO-3 (FSDP2)", "ZeRO", 150, 75),
)
_RING, _RING_GIGABYTES = "all-reduce, ring", 95


def _frameworks(baselines: Sequence[Result]) -> Iterator[Claim]:
    """Compare bytes with those of a ring, all measured on one line."""
    rows = timed(baselines)
    for method, theirs, gigabytes, percent in _FRAMEWORKS:
        source = "Huang, table of frameworks"
        claimed = gigabytes / _RING_GIGABYTES
        claim = (
            f"{theirs}: {gigabytes} GB where a ring sends {_RING_GIGABYTES} "
            f"({claimed:.2f} times), GPUs used {percent} %"
        )
        if method not in rows or _RING not in rows:
            yield Claim(source=source, claim=claim, found="-", verdict=_NO_ROWS)
            continue
        row, ring = rows[method], rows[_RING]
        ratio = row["interface_up"] / ring["interface_up"]
        formula = row["formula_each_way"] / ring["formula_each_way"]
        found = (
            f"{ratio:.2f} times a ring's bytes at a site's interface ({formula:.2f} by "
            f"formula), sites train {row['trains']:.0%} at {row['mbit']:g} Mbit/s"
        )
        if method == _FRAMEWORKS[0][0]:
            found += f"; the server's own line carries that of {row['sites']} sites"
        is_near = abs(ratio / claimed - 1) <= _NEAR
        verdict = "bytes reproduced" if is_near else "bytes refuted"
        yield Claim(source=source, claim=claim, found=found, verdict=verdict)


def timed(baselines: Iterable[Result]) -> Mapping[str, Any]:
    """Rows of one line and model on which all methods were timed, by method."""
    lines: dict[tuple[float, int], dict[str, Result]] = {}
    for row in baselines:
        if row["interface_up"] is not None:
            place = (row["mbit"], row["parameters"])
            lines.setdefault(place, {})[row["method"]] = row
    return max(lines.values(), key=len, default={})
