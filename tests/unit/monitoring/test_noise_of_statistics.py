"""Statistics with noise: how much each figure has, and what it leaves unknown."""

import math
from typing import Any

import numpy as np
import pytest

from deploy.cli import simulate_verb
from federation.job import job_file
from federation.job.statistics_checks import table
from federation.job.statistics_job import equal_edges
from federation.job.statistics_table import (
    COARSE,
    COUNTS,
    FINE,
    PRODUCTS,
    QUANTILES,
    SQUARES,
    SUMS,
    Sums,
    windows,
)
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


def reader(sums: dict[str, np.ndarray[Any, Any]], times: float = 1.0) -> Any:
    whole: Sums = {name: [int(x) for x in part] for name, part in sums.items()}
    noise = {name: size * times for name, size in NOISE.items()}
    return view._Reader(ASKED, [whole], [noise])


@pytest.mark.parametrize(
    ("correlated", "times"), [(0.0, 0.5), (0.5, 0.5), (-1.0, 0.25)]
)
def test_stated_noise_is_what_draws_vary_by(correlated: float, times: float):
    """Each figure varies, over draws of the noise, by the deviation that is stated."""
    rng = np.random.default_rng(1)
    rows = rng.normal((60.0, 150.0), (30.0, 15.0), (4000, 2))
    rows[:, 1] += rows[:, 0] * correlated
    exact = sums_of(rows)
    found: dict[str, list[float]] = {}
    for _ in range(400):
        drawn = {
            name: part
            + np.rint(rng.normal(0, NOISE[name] * times, part.shape)).astype(int)
            if name in NOISE
            else part
            for name, part in exact.items()
        }
        draw = reader(drawn, times)
        row = draw.column(ASKED.columns[0])
        for name in row.noise:
            found.setdefault(name, []).append(getattr(row, name))
        matrices = draw.matrices()
        for i, j in ((0, 0), (0, 1)):
            found.setdefault(f"{i}{j}", []).append(matrices["covariances"][i][j])
        found.setdefault("ratio", []).append(matrices["correlations"][0][1])
    stated = reader(exact, times).column(ASKED.columns[0]).noise
    matrices = reader(exact, times).matrices()
    matrix = matrices["covariance_noise"]
    stated |= {"00": matrix[0][0], "01": matrix[0][1]}
    stated["ratio"] = matrices["correlation_noise"][0][1]
    assert matrices["correlation_noise"][0][0] == 0.0
    assert set(stated) == set(found)
    assert {"count", "missing", "sum", "mean", "variance", "deviation"} < set(stated)
    for name, values in found.items():
        assert np.std(values) == pytest.approx(stated[name], rel=0.12), name


def test_correlation_that_noise_has_taken_beyond_1_is_not_known():
    """It would look like the surest of all."""
    rows = np.full((40, 2), 60.0)
    rows[::2] = [80.0, 140.0]  # Of correlation 1.
    sums = sums_of(rows)
    exact = reader(sums, 1e-3).matrices()["correlations"]
    assert exact[0][1] == pytest.approx(1.0)
    sums[PRODUCTS][0] //= 2  # The variance of the first column.
    sums[PRODUCTS][0] += sums[SUMS][2] ** 2 // 80
    found = reader(sums, 1e-3).matrices()["correlations"]
    assert found[0][1] is None
    assert found[0][0] == found[1][1] == pytest.approx(1.0)


def test_what_noise_makes_impossible_is_not_known(capsys: pytest.CaptureFixture[str]):
    rows = np.full((40, 2), 60.0)
    rows[::2, 1] = 140.0
    sums = sums_of(rows)
    sums[SQUARES] = sums[SQUARES] // 2
    sums[PRODUCTS][0] //= 2
    draw = reader(sums, 0.01)
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
    assert run.noise == {COUNTS: 0.3}
    simulate_verb.print_statistics(run)
    shown = capsys.readouterr().out
    assert shown.count("40 ±0.3") == 4  # Of records, two columns, and complete ones.
    assert f"0 ±{0.3 * math.sqrt(2):.3g}" in shown
    assert f"{columns[0].mean:.6g} ±{columns[0].noise['mean']:.3g}" in shown


def test_a_figure_that_is_not_far_beyond_its_noise_is_not_known():
    """Its deviation would be a first-order guess of something else."""
    rng = np.random.default_rng(2)
    sums = sums_of(rng.normal((60.0, 150.0), (30.0, 15.0), (4000, 2)))
    for times, has_mean, has_spread in ((1, True, True), (6, True, False)):
        draw = reader(sums, times)
        column = draw.column(ASKED.columns[1])
        assert (column.mean is not None) == has_mean
        assert (column.variance is not None) == has_spread
        assert ("deviation" in column.noise) == has_spread
        assert (draw.matrices()["correlations"][0][1] is not None) == has_spread
        assert (draw.matrices()["correlation_noise"][0][1] is None) != has_spread
    column = reader(sums, 60).column(ASKED.columns[0])
    assert column.mean is None
    assert "mean" not in column.noise
    assert column.noise["sum"] > 0


@pytest.mark.parametrize(("quantile", "size"), [(0.5, 30.0), (0.02, 30.0), (0.9, 4.0)])
def test_a_quantile_is_where_it_is_said_to_be(quantile: float, size: float):
    """With 95 % of draws of the noise on all bins; and closer with less noise."""
    column = {"names": ["a"], "low": LOW, "high": HIGH, "quantiles": [quantile]}
    document = {**job_file.document(SPEC), "statistics": {"columns": [column]}}
    for key in ("model", "training", "rounds"):
        document.pop(key)
    asked = table(job_file.parse(document))
    rng, width = np.random.default_rng(3), (HIGH - LOW) / (COARSE * FINE)
    values = np.clip(rng.normal(110.0, 30.0, 20_000), LOW, HIGH)
    exact = np.quantile(values, quantile, method="inverted_cdf")
    places = np.minimum(((values - LOW) / width).astype(int), COARSE * FINE - 1)
    counts = np.bincount(places, minlength=COARSE * FINE).reshape(COARSE, FINE)
    inside, widths, unknown = 0, [], 0
    for _ in range(300):
        coarse = counts.sum(axis=1) + np.rint(rng.normal(0, size, COARSE)).astype(int)
        first: Sums = {QUANTILES: coarse.tolist()}
        ((_, _, at, _, _),) = windows(asked, first)
        fine = counts[at] + np.rint(rng.normal(0, size, FINE)).astype(int)
        sums = [first, {QUANTILES: fine.tolist()}]
        noise = [{QUANTILES: size}] * 2
        found, ranges = view._quantiles(asked, sums, noise)
        low, high = ranges["a"][f"{quantile:g}"]
        inside += low - width <= exact <= high + width
        widths.append(high - low)
        value = found["a"][f"{quantile:g}"]
        unknown += value is None
        assert value is None or low <= value <= high
    assert inside >= 0.95 * 300
    assert unknown == 0
    # Not by being vague: a bound on the deviation of the counts, by the density there.
    density = max(1.0, counts.sum(axis=1)[int((exact - LOW) / width) // FINE])
    steps = 8 * size * math.sqrt(COARSE / 4 + FINE) / density + 2
    assert np.median(widths) < steps * width * FINE
    far = view._quantiles(asked, sums, [{QUANTILES: 1e5}] * 2)
    assert far[0]["a"][f"{quantile:g}"] is None
    assert far[1]["a"][f"{quantile:g}"] == [LOW, HIGH]


def test_edges_of_bins_are_rounded_once():
    assert equal_edges(0.0, 110.0, 11) == tuple(10.0 * at for at in range(12))
    assert equal_edges(0.0, 1.0, 10) == tuple(at / 10 for at in range(11))
