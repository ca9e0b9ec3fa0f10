"""Properties of the combine rules, for any updates."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from support import oracles

from aggregator import combine
from federation.protocols import CombineRule, WeightedUpdate
from federation.vectors import Vector, is_finite

pytestmark = pytest.mark.slow

VALUES = st.floats(-1e6, 1e6, width=32)
EVERY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def _updates(
    draw: st.DrawFn, min_sites: int = 1, max_sites: int = 9
) -> list[WeightedUpdate]:
    num_sites = draw(st.integers(min_sites, max_sites))
    size = draw(st.integers(1, 20))
    row = st.lists(VALUES, min_size=size, max_size=size)
    weight = st.floats(1e-3, 1e9)
    return [
        WeightedUpdate(
            site=f"site-{i}",
            delta_d=np.array(draw(row), np.float32),
            weight=draw(weight),
        )
        for i in range(num_sites)
    ]


def _run(rule: CombineRule, updates: list[WeightedUpdate]) -> Vector:
    return rule(iter(updates), np.full_like(updates[0].delta_d, np.nan))


def _matrix(updates: list[WeightedUpdate]) -> NDArray[np.float64]:
    return np.array([u.delta_d for u in updates], np.float64)


def _tolerance(updates: list[WeightedUpdate]) -> float:
    """A few float32 roundings per site, of the largest value around."""
    return 4 * len(updates) * 2.0**-24 * float(np.abs(_matrix(updates)).max()) + 1e-37


ROBUST = {
    "trimmed_mean": combine.trimmed_mean(byzantine_sites=1),
    "median": combine.median,
    "krum": combine.krum(byzantine_sites=1),
    "multi_krum": combine.multi_krum(byzantine_sites=1),
}
RULES = {**ROBUST, "mean": combine.weighted_mean}


@given(updates=_updates())
def test_mean_is_the_float64_mean(updates: list[WeightedUpdate]):
    """To a few roundings of float32."""
    expected = oracles.weighted_mean(_matrix(updates), [u.weight for u in updates])
    actual = _run(combine.weighted_mean, updates)
    np.testing.assert_allclose(expected, actual, rtol=0, atol=_tolerance(updates))


@given(updates=_updates(min_sites=5), data=st.data())
def test_robust_rules_do_not_depend_on_order(
    updates: list[WeightedUpdate], data: st.DataObject
):
    """Not by a single bit, nor on the weights."""
    other = [
        WeightedUpdate(site=u.site, delta_d=u.delta_d, weight=1.0)
        for u in data.draw(st.permutations(updates))
    ]
    for name, rule in ROBUST.items():
        expected = _run(rule, updates).tobytes()
        assert expected == _run(rule, other).tobytes(), name


@given(updates=_updates(min_sites=7), data=st.data())
def test_update_that_is_not_finite_counts_for_nothing(
    updates: list[WeightedUpdate], data: st.DataObject
):
    """Wherever it stands and whatever is wrong: the others give the same bits."""
    bad = data.draw(st.integers(0, len(updates) - 1))
    place = data.draw(st.integers(0, updates[bad].delta_d.size - 1))
    updates[bad].delta_d[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    for name, handed_over in product(RULES, (False, True)):
        expected = _run(RULES[name], updates[:bad] + updates[bad + 1 :]).tobytes()
        refused: list[str] = []
        told = [
            replace(
                u,
                delta_d=u.delta_d.copy(),  # type: ignore[attr-defined]
                handed_over=handed_over,
                refuse=partial(refused.append, u.site),
            )
            for u in updates
        ]
        assert expected == _run(RULES[name], told).tobytes(), (name, handed_over)
        assert refused == [updates[bad].site], (name, handed_over)


@pytest.mark.parametrize("name", ["trimmed_mean", "median"])
@given(updates=_updates(min_sites=3, max_sites=8), data=st.data())
def test_bad_sites_cannot_leave_the_honest_range(
    name: str, updates: list[WeightedUpdate], data: st.DataObject
):
    """With as many bad sites as the rule withstands, whatever they send."""
    num_bad = (len(updates) - 1) // 2
    bad = data.draw(st.permutations(range(len(updates))))[:num_bad]
    for i in bad:
        lie = data.draw(st.sampled_from([3e38, -3e38, 0.0, 1e7]))
        updates[i].delta_d[:] = lie
    honest = _matrix([u for i, u in enumerate(updates) if i not in bad])
    rules = {
        "trimmed_mean": combine.trimmed_mean(byzantine_sites=num_bad),
        "median": combine.median,
    }
    actual = _run(rules[name], updates)
    assert (actual >= honest.min(axis=0)).all()
    assert (actual <= honest.max(axis=0)).all()


@given(updates=_updates(min_sites=5), data=st.data())
def test_krum_chooses_an_honest_update(
    updates: list[WeightedUpdate], data: st.DataObject
):
    """Bad updates far away, together or apart, are neither chosen nor averaged in."""
    num_bad = (len(updates) - 3) // 2
    bad = data.draw(st.permutations(range(len(updates))))[:num_bad]
    for i in bad:
        updates[i].delta_d[:] = data.draw(st.sampled_from([1e9, -1e9, 1e20, 3e38]))
    honest = [u.delta_d for i, u in enumerate(updates) if i not in bad]
    chosen_d = _run(combine.krum(byzantine_sites=num_bad), updates)
    assert any(np.array_equal(chosen_d, h) for h in honest)
    averaged_d = _run(combine.multi_krum(byzantine_sites=num_bad), updates)
    np.testing.assert_array_equal(
        np.mean(honest, axis=0, dtype=np.float64).astype(np.float32), averaged_d
    )


@given(values=st.lists(EVERY_FLOAT, max_size=30))
def test_is_finite_is_exact(values: list[float]):
    """Overflow of a sum or a square is no reason to refuse an update."""
    vector_d = np.array(values, np.float32)
    assert bool(np.isfinite(vector_d).all()) == is_finite(vector_d)


def test_pairs_of_extremes_are_finite():
    """Squares overflow, and neighbours cancel."""
    extremes = [3.4e38, -3.4e38, 1e-45, 0.0]
    assert all(is_finite(np.array(p, np.float32)) for p in pairwise(extremes))


@given(_updates())
def test_contributor_mean_is_over_the_sites_that_sent_a_value(
    updates: list[WeightedUpdate],
):
    """For any updates, with zeros wherever they stand."""
    weights = [update.weight for update in updates]
    expected = oracles.contributor_mean(_matrix(updates).tolist(), weights)
    np.testing.assert_allclose(
        _run(combine.contributor_mean, updates),
        expected,
        rtol=0,
        atol=4 * _tolerance(updates),
    )
