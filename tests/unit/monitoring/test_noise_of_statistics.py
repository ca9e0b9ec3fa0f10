"""Statistics with noise: how much each figure has, and what it leaves unknown."""

import math
from typing import Any

import numpy as np
import pytest

from deploy.cli import simulate_verb
from federation.job import job_file
from federation.job.statistics_checks import table
from federation.job.statistics_job import equal_edges
from federation.job.statistics_table import COUNTS, PRODUCTS, SQUARES, SUMS, Sums
from monitoring.views import statistics_view as view

LOW, HIGH = 10.0, 250.0
SPEC = job_file.parse(
    {
        "name": "s",
        "statistics": {
            "covariances": True,
            "columns": [{"names": ["a", "b"], "low": LOW, "high": HIGH}],
        },
        "sites": [{"name": "x"}, {"name": "y"}],
        "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 1.0}},
    }
)
ASKED = table(SPEC)
GRID = 1 << ASKED.grid_bits
NOISE = {COUNTS: 30.0, SUMS: 20.0 * GRID, SQUARES: 9.0 * GRID**2, PRODUCTS: 5 * GRID**2}


def sums_of(values_rk: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    units_rk = np.rint(GRID * (2 * values_rk - LOW - HIGH) / (HIGH - LOW)).astype(int)
    size, total_k = len(units_rk), units_rk.sum(axis=0)
    products = units_rk.T @ units_rk
    return {
        "sites": np.array([2]),
        COUNTS: np.array([size, size, size, size, 0, 0, 0, 0]),
        SUMS: np.concatenate([total_k, total_k]),
        SQUARES: products.diagonal(),
        PRODUCTS: products[np.triu_indices(2)],
    }


def reader(sums: dict[str, np.ndarray[Any, Any]]) -> Any:
    whole: Sums = {name: [int(x) for x in part] for name, part in sums.items()}
    return view._Reader(ASKED, [whole], [NOISE])


def test_stated_noise_is_what_draws_vary_by():
    """Each figure varies, over draws of the noise, by the deviation that is stated."""
    rng = np.random.default_rng(1)
    exact = sums_of(rng.normal((60.0, 150.0), (30.0, 15.0), (4000, 2)))
    found: dict[str, list[float]] = {}
    for _ in range(400):
        drawn = {
            name: part + np.rint(rng.normal(0, NOISE[name], part.shape)).astype(int)
            if name in NOISE
            else part
            for name, part in exact.items()
        }
        draw = reader(drawn)
        row = draw.column(ASKED.columns[0])
        for name in row.noise:
            found.setdefault(name, []).append(getattr(row, name))
        for place in ((0, 0), (0, 1)):
            value = draw.matrices()["covariances"][place[0]][place[1]]
            found.setdefault(str(place), []).append(value)
    stated = reader(exact).column(ASKED.columns[0]).noise
    matrix = reader(exact).matrices()["covariance_noise"]
    stated |= {"(0, 0)": matrix[0][0], "(0, 1)": matrix[0][1]}
    assert set(stated) == set(found)
    assert {"count", "missing", "sum", "mean", "variance", "deviation"} < set(stated)
    for name, values in found.items():
        assert np.std(values) == pytest.approx(stated[name], rel=0.12), name


def test_correlation_that_noise_has_taken_beyond_1_is_not_known():
    """It would look like the surest of all."""
    rows = np.full((40, 2), 60.0)
    rows[::2] = [80.0, 140.0]  # Of correlation 1.
    sums = sums_of(rows)
    exact = reader(sums).matrices()["correlations"]
    assert exact[0][1] == pytest.approx(1.0)
    sums[PRODUCTS][0] //= 2  # The variance of the first column.
    sums[PRODUCTS][0] += sums[SUMS][2] ** 2 // 80
    found = reader(sums).matrices()["correlations"]
    assert found[0][1] is None
    assert found[0][0] == found[1][1] == pytest.approx(1.0)


def test_what_noise_makes_impossible_is_not_known(capsys: pytest.CaptureFixture[str]):
    rows = np.full((40, 2), 60.0)
    rows[::2, 1] = 140.0
    sums = sums_of(rows)
    sums[SQUARES] = sums[SQUARES] // 2
    sums[PRODUCTS][0] //= 2
    draw = reader(sums)
    columns = tuple(map(draw.column, ASKED.columns))
    assert (columns[0].variance, columns[0].deviation) == (None, None)
    assert "deviation" not in columns[0].noise
    matrices = draw.matrices()
    assert matrices["covariances"][0] == (None, None)
    assert matrices["correlations"][0][0] is None
    assert matrices["covariances"][1][1] is not None
    run = view.RunStatistics(
        sites=2, records=40, columns=columns, **matrices, noise=draw.noise_on_records()
    )
    assert run.noise == {COUNTS: 30.0}
    simulate_verb._print_statistics(run)
    shown = capsys.readouterr().out
    assert shown.count("40 ±30") == 3
    assert f"0 ±{30 * math.sqrt(2):.3g}" in shown
    assert f"{columns[0].mean:.6g} ±{columns[0].noise['mean']:.3g}" in shown


def test_edges_of_bins_are_rounded_once():
    assert equal_edges(0.0, 110.0, 11) == tuple(10.0 * at for at in range(12))
    assert equal_edges(0.0, 1.0, 10) == tuple(at / 10 for at in range(11))
