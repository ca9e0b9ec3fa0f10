"""The figures of the page on choosing epsilon, computed again."""

import math
from pathlib import Path

import pytest

from privacy.dp import accountant
from privacy.dp.budget import default_delta
from privacy.dp.calibration import noise_multiplier
from privacy.dp.errors import PrivacyUnreachable
from privacy.dp.events import PrivacyEvent

PAGE = Path(__file__).resolve().parents[4] / "docs/howto/choose-epsilon.md"
FALSE_ALARMS = (0.001, 0.01, 0.1)
CAUGHT = "caught, at 0.1 % false alarms"
CALIBRATED = 1e-3  # How far a calibrated multiplier may be above the smallest.


def _tables() -> list[list[list[str]]]:
    """Cells of all tables of the page, without what is above their rules."""
    tables: list[list[list[str]]] = [[]]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ---"):
            tables.append([])
        elif line.startswith("| "):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


def _table(*header: str) -> list[list[str]]:
    """The rows below a header that begins with these cells."""
    tables = _tables()
    (index,) = (
        i for i, table in enumerate(tables) if table[-1][: len(header)] == [*header]
    )
    return tables[index + 1]


def _caught(epsilon: float, delta: float, false_alarms: float) -> float:
    other = 1 - (1 - delta - false_alarms) * math.exp(-epsilon)
    return min(1.0, math.exp(epsilon) * false_alarms + delta, other)


def _percent(share: float) -> str:
    """Two digits."""
    digits = max(0, 1 - math.floor(math.log10(100 * share)))
    return f"{100 * share:.{digits}f} %"


def _is_right(z: float, epsilon: float, records: int, batch: int, steps: int) -> bool:
    """Whether a cell is what the calibration gives, which takes ten times as long.

    With more noise than it says, to its last digit, epsilon is kept; with less, and
    with as much less as a calibrated multiplier may be too large, it is not.
    """
    margin = max(CALIBRATED * z, 8e-3)

    def found(noise: float) -> float:
        event = PrivacyEvent(
            noise_multiplier=noise, sampling_rate=batch / records, steps=steps
        )
        return accountant.epsilon([event], default_delta(records))

    return found(z + margin) <= epsilon <= found(z - margin - CALIBRATED * z)


def _multiplier(epsilon: float, records: int, batch: int, steps: int) -> float:
    return noise_multiplier(epsilon, default_delta(records), batch / records, steps)


def test_what_a_test_for_membership_can_reach():
    """From one epsilon and one delta."""
    for epsilon, *cells, guess in _table("epsilon", CAUGHT):
        found = [_percent(_caught(float(epsilon), 1e-6, each)) for each in FALSE_ALARMS]
        assert cells == found
        assert guess == f"{100 / (1 + math.exp(-float(epsilon))):.0f} %"


@pytest.mark.slow
def test_what_it_can_reach_for_a_run():
    """The least over many deltas."""
    deltas = [10 ** (-k / 4) for k in range(1, 25)] + [0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
    for target, noise, *cells in _table("epsilon at delta 1e-6"):
        multiplier = noise_multiplier(float(target), 1e-6, 0.02, 2000)
        assert float(noise) == pytest.approx(multiplier, rel=CALIBRATED, abs=8e-3)
        event = PrivacyEvent(
            noise_multiplier=multiplier, sampling_rate=0.02, steps=2000
        )
        curve = [(accountant.epsilon([event], delta), delta) for delta in deltas]
        assert cells == [
            _percent(min(_caught(epsilon, delta, each) for epsilon, delta in curve))
            for each in FALSE_ALARMS
        ]


def test_default_deltas():
    """As a site takes them."""
    (header,) = next(table for table in _tables() if table[-1][-1] == "1,000,000")
    (row,) = next(table for table in _tables() if table[0][0] == "delta")
    for records, delta in zip(header[1:], row[1:], strict=True):
        assert float(delta) == default_delta(int(records.replace(",", "")))


@pytest.mark.slow
def test_noise_by_records():
    """Batches of 256, 1,000 steps."""
    for cell, *cells in _table("Records of the site", "z for epsilon 1"):
        num = int(cell.replace(",", ""))
        for z, epsilon in zip(map(float, cells), (1, 3, 8), strict=True):
            assert _is_right(z, epsilon, num, 256, 1000), (cell, z)


@pytest.mark.slow
def test_noise_by_batch_and_steps():
    """10,000 records, epsilon 3: the multiplier, and in brackets over the batch."""
    for cell, *cells in _table("Batch"):
        batch = int(cell.replace(",", ""))
        pairs = [each.rstrip(")").split(" (") for each in cells]
        for (z, share), steps in zip(pairs, (100, 1000, 10_000), strict=True):
            assert _is_right(float(z), 3, 10_000, batch, steps), (cell, z)
            assert float(share) * batch == pytest.approx(float(z), rel=0.05)


def test_advice():
    """The message is what the calibration says."""
    with pytest.raises(PrivacyUnreachable) as raised:
        _multiplier(0.1, 1000, 900, 5000)
    assert str(raised.value) in PAGE.read_text(encoding="utf-8")
