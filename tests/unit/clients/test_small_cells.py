"""What few records of a site show in exact statistics: nothing, in all its answers."""

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from clients.data.tables import Table as Rows
from clients.statistics.columns import read
from clients.statistics.small_cells import grouped, hide_small
from clients.statistics.sums import sums_of
from clients.statistics.trainer import StatisticsTrainer
from federation.errors import JobError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.job.statistics_table import COARSE, COUNTS, FINE, QUANTILES, Sums
from federation.vectors import Layout, Role
from monitoring.views.run_view import COMPLETED
from monitoring.views.statistics_view import RunStatistics, statistics_of

Values = Sequence[float]
SITE = SiteId("clinic")
LOW, HIGH = 0.0, 100.0
X = {"names": ["x"], "low": LOW, "high": HIGH}
PLACES = (0, 7, 128, 255)
SUMMED = ("counts", "sums", "squares", "histograms", "categories")


def asked(column: dict[str, Any], sites: int = 1) -> JobSpec:
    names = [{"name": f"site-{at}"} for at in range(sites)]
    document = {"name": "s", "sites": names, "statistics": {"columns": [column]}}
    return job_file.parse(document)


def rows(values: Values) -> Rows:
    return Rows(columns={"x": np.array(values, float)}, index=np.arange(len(values)))


def answers(job: JobSpec, values: Values, least: int, before: Sums) -> Sums:
    part_of = table(job)
    data = read(part_of, rows(values), SITE, lambda _: None)
    stage = part_of.stages[bool(before)]
    sums = sums_of(part_of, stage, data, before)
    return hide_small(part_of, sums, data, least, before) if least > 1 else sums


def windows_at(*places: int) -> Sums:
    """Sums with which an aggregator moves the windows of as many quantiles there."""
    coarse = [0] * COARSE
    for place in places:
        coarse[place] = 100
    return {QUANTILES: coarse}


def everything(values: Values, least: int) -> tuple[Any, ...]:
    """Counts beyond the bounds, coarse bins, and the fine ones of several windows."""
    parts = np.linspace(0, 1, 2 * len(PLACES) + 1)[1::2].tolist()
    job = asked({**X, "quantiles": parts})
    first = answers(job, values, least, {})
    second = answers(job, values, least, windows_at(*PLACES))
    fine = np.array(second[QUANTILES]).reshape(len(PLACES), FINE)
    coarse = np.array(first[QUANTILES])
    assert fine.sum(axis=1).tolist() == coarse[[*PLACES]].tolist()
    return tuple(first[COUNTS]), coarse.tolist(), fine.tolist()


def test_groups_are_large_and_stay_near_their_records():
    """For every small table, and for sparse ones; grouping twice changes nothing."""
    rng = np.random.default_rng(0)
    small = (np.array(cells) for cells in itertools.product(range(4), repeat=5))
    wide = (rng.integers(0, 6, 1024) * (rng.random(1024) < 0.01) for _ in range(150))
    for exact in itertools.chain(small, wide):
        for least in (2, 3, 4):
            found = grouped(exact, least)
            assert not ((found > 0) & (found < least)).any(), exact
            assert (grouped(found, least) == found).all(), exact
            assert found.sum() == (exact.sum() if exact.sum() >= least else 0), exact
            moved = abs(np.cumsum(exact) - np.cumsum(found)).max()
            assert moved < least or exact.sum() < least, exact


def test_a_group_does_not_show_the_cell_of_one_of_its_records():
    """Whether the lowest and the highest record are in a cell or in the next one."""
    found = set()
    for low, mid, high in itertools.product((100, 101), (400, 401), (900, 901)):
        cells = np.zeros(1024, int)
        cells[[low, mid, 410, high]] = 1
        found |= {*np.flatnonzero(grouped(cells, 4)).tolist()}
    assert found == {448}


@pytest.mark.parametrize("seed", range(8))
def test_a_table_without_small_cells_gives_the_same_answers_on_quantiles(seed: int):
    """So no count below ``least`` follows from any of them, nor from all together."""
    rng = np.random.default_rng(seed)
    least = int(rng.choice([2, 3, 10]))
    edges = [-1.0, LOW, 0.2, 0.3, 2.8, 50.1, 99.9, HIGH, 101.0]
    times = rng.choice([0, 1, 1, 2, 3, 9, 10, 25], len(edges))
    values = np.concatenate([np.repeat(edges, times), rng.uniform(LOW, HIGH, 40)])
    shown = everything(values, least)
    below, above = shown[0][3:]
    part_of = table(asked({**X, "quantiles": [0.5]}))
    data = read(part_of, rows(values), SITE, lambda _: None)
    fine = []
    for place, size in enumerate(shown[1]):
        before = windows_at(place)
        sums = sums_of(part_of, part_of.stages[1], data, before) if size else {}
        found = hide_small(part_of, sums, data, least, before) if size else {}
        fine += found.get(QUANTILES, [0] * FINE)
    fine[0] -= below
    fine[-1] -= above
    middles = (np.arange(COARSE * FINE) + 0.5) * (HIGH - LOW) / (COARSE * FINE)
    inside = np.repeat(middles, fine)
    for size in (below, above, *fine):
        assert size == 0 or size >= least
    other = np.concatenate([[-1.0] * below, inside, [101.0] * above])
    assert everything(other, least) == shown


def test_few_records_beside_a_bound_are_not_the_difference_of_two_rounds():
    """One is at the bound, and 20 below it: the first fine bin has 21."""
    rng = np.random.default_rng(0)
    values = [-1.0] * 20 + [LOW] + [0.2] * 60 + rng.uniform(1, 90, 419).tolist()
    for sign, place in ((1, 0), (-1, -1)):
        beyond = np.array(values) if sign > 0 else HIGH - np.array(values)
        counts, _, fine = everything(beyond, 10)
        count = counts[3] if sign > 0 else counts[4]
        rest = fine[place][place] - count
        assert count == 20
        assert rest == 0 or rest >= 10


@pytest.mark.parametrize("bins", [0, 1, 3])
def test_no_difference_of_counts_is_that_of_few_records(bins: int):
    """Every sum and difference of what is shown that counts some of the records."""
    rng = np.random.default_rng(bins)
    values = [-1.0, *np.linspace(LOW, HIGH, max(bins, 1) * 2 + 1)[1::2], 101.0]
    cells = len(values)
    whole = np.ones(cells, int)
    below, above = np.eye(cells, dtype=int)[[0, -1]]
    each = np.eye(cells, dtype=int)[1:-1]
    each[0] += below
    each[-1] += above
    known = np.array([whole, below, above, *(each if bins else [])])
    times = np.array([*itertools.product((-1, 0, 1), repeat=len(known))])
    job = asked({**X, "bins": bins})
    for _ in range(150):
        least = int(rng.choice([2, 5, 10]))
        sizes = rng.choice([0, 1, 3, 4, 5, 9, 10, 12, 25], cells)
        found = answers(job, np.repeat(values, sizes).tolist(), least, {})
        shown = np.array([*found[COUNTS][2:], *found.get("histograms", ())])
        # A number that is not shown is of no use.
        sums = times[~times[:, shown == 0].any(axis=1)] @ known
        counted = sums[((sums == 0) | (sums == 1)).all(axis=1)] @ sizes
        assert not ((counted > 0) & (counted < least)).any(), (least, sizes)


def pooled(
    sites: Sequence[Values], least: int, column: dict[str, Any]
) -> RunStatistics:
    """What a run over these sites finds; each leaves out its small cells."""
    job = asked(column, sites=len(sites))
    part_of = table(job)
    table_d = np.zeros(part_of.num_values, np.float32)
    before: Sums = {}
    summed = dict[str, Any]()
    for stage in part_of.stages:
        for site, values in zip(job.sites, sites, strict=True):
            sums = answers(job, values, least, before)
            table_d += part_of.write(stage, sums)
            found = {n: tuple(sums.get(n, ())) for n in SUMMED}
            summed.setdefault(site.name, SimpleNamespace(**found))
        before = part_of.read(stage, table_d)
    done = SimpleNamespace(answered=tuple(summed))
    first = SimpleNamespace(finished=done, status=COMPLETED)
    view: Any = SimpleNamespace(
        guaranteed=None, privacy=None, rounds=(first,), summed=summed
    )
    of_run = statistics_of(job, table_d, view)
    assert of_run is not None
    return of_run


def test_quantiles_of_sites_without_small_cells_are_near_and_have_a_range():
    rng = np.random.default_rng(0)
    sites = [rng.normal(60, 15, n).tolist() for n in (600, 250, 120, 30)]
    quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
    (found,) = pooled(sites, 10, {**X, "quantiles": quantiles}).columns
    values = np.concatenate(sites)
    exact = np.quantile(values, quantiles, method="inverted_cdf")
    assert [*found.quantiles.values()] == pytest.approx(exact.tolist(), abs=0.9)
    for value, (low, high) in zip(exact, found.quantile_ranges.values(), strict=True):
        assert low <= value <= high
    widths = [high - low for low, high in found.quantile_ranges.values()]
    assert widths[2] < 4.0  # 36 of 1,000 records on either side.
    plain = pooled(sites, 1, {**X, "quantiles": quantiles}).columns[0]
    assert [*plain.quantiles.values()] == pytest.approx(exact.tolist(), abs=100 / 32768)
    assert plain.quantile_ranges == {}


@pytest.mark.parametrize("seed", range(5))
def test_the_range_of_a_quantile_holds_it_whatever_the_records(seed: int):
    """With ties, gaps, sites of few records and values beyond the bounds."""
    rng = np.random.default_rng(seed)
    sites = [
        np.concatenate(
            [
                rng.choice(rng.uniform(-10, 110, 4), rng.integers(10, 40)),
                rng.uniform(-5, rng.uniform(0, 105), int(rng.integers(120))),
            ]
        )
        for _ in range(3)
    ]
    quantiles = [0.1, 0.5, 0.8]
    (found,) = pooled(sites, 5, {**X, "quantiles": quantiles}).columns
    values = np.clip(np.concatenate(sites), LOW, HIGH)
    assert found.count == len(values)
    exact = np.quantile(values, quantiles, method="inverted_cdf")
    ranges = found.quantile_ranges.values()
    for value, (low, high) in zip(exact, ranges, strict=True):
        assert low - 1e-9 <= value <= high + 1e-9


def test_what_sites_leave_out_is_counted_and_stated():
    sites = [[5.0] * 30 + [55.0] * 4 + [95.0] * 12, [5.0] * 20, [55.0] * 3]
    found = pooled(sites, 10, {**X, "bins": 10})
    (column,) = found.columns
    assert (found.records, found.sites, found.sites_left_out) == (66, 3, 1)
    assert (column.count, sum(column.histogram), column.hidden) == (66, 50, 16)
    assert "16 of x" in found.left_out
    assert "1 of the sites" in found.left_out
    assert RunStatistics.parse(found.document()) == found
    exact = pooled(sites, 1, {**X, "bins": 10})
    assert exact.columns[0].hidden == 0
    assert exact.left_out == ""


def test_cells_that_a_site_leaves_out_are_not_compared_as_if_empty():
    """They are compared as one, so that the distance is that of fewer cells."""
    sites = [[5.0] * 40 + [35.0] * 9 + [65.0] * 3, [5.0] * 90 + [35.0] * 90]
    (row,) = pooled(sites, 10, {**X, "bins": 10}).drift
    assert row.distance is not None
    # The first leaves out the bin of 9 and that of 3; the second none.
    shares = ([40, 12], [90, 90])
    assert row.distance == pytest.approx(jensenshannon(*shares, base=2))
    left_out = [[5.0] * 4, [5.0] * 90]
    (row,) = pooled(left_out, 10, {**X, "bins": 10}).drift
    assert row.distance is None


def test_a_quantile_of_no_values_is_not_known():
    found = pooled([[5.0] * 3], 10, {**X, "quantiles": [0.5]})
    assert found.columns[0].quantiles == {"0.5": None}


def test_other_places_are_noted_before_the_second_round_is_answered():
    job = asked({**X, "quantiles": [0.5]})
    part_of, seen = table(job), list[tuple[int, ...]]()

    def note(places: Sequence[int]) -> None:
        if seen:
            raise JobError("no more", key="statistics")
        seen.append(tuple(places))

    trainer = trainer_of(job, note)
    table_d = np.zeros(part_of.num_values, np.float32)
    none = np.zeros(0, np.int64)
    table_d += trainer.fit(table_d, none, round_index=1).update_d
    assert seen == []
    trainer.fit(table_d, none, round_index=2)
    assert len(seen) == 1
    with pytest.raises(JobError):
        trainer.fit(table_d, none, round_index=2)


def trainer_of(
    job: JobSpec, note: Callable[[Sequence[int]], None]
) -> StatisticsTrainer:
    part_of = table(job)
    sums = ("sums", (part_of.num_values,), "float32", Role.PARAMETER)
    return StatisticsTrainer(
        part_of,
        SITE,
        layout=Layout.build([sums]),
        train=rows(np.linspace(LOW, HIGH, 100).tolist()),
        least_count=10,
        note_places=note,
    )
