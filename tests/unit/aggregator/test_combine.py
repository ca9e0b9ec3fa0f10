"""Combine rules against slow oracles, and what they refuse."""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import oracles

from aggregator import combine
from federation.compression.codec import BF16, FP16, Codec
from federation.errors import JobError, UserCodeError
from federation.job.spec import AggregationSpec
from federation.protocols import CombineRule, WeightedUpdate
from federation.vectors import Vector

Rows = list[list[float]]

SIZE = 40_000  # more than two chunks of the robust rules, the last one not full


def _updates(num_sites: int, size: int = SIZE, seed: int = 0) -> list[WeightedUpdate]:
    rng = np.random.default_rng(seed)
    return [
        WeightedUpdate(
            site=f"site-{i:02d}",
            delta_d=rng.standard_normal(size, dtype=np.float32),
            weight=float(rng.integers(1, 1000)),
        )
        for i in range(num_sites)
    ]


def _rows(updates: list[WeightedUpdate]) -> Rows:
    return [u.delta_d.astype(float).tolist() for u in updates]  # type: ignore[attr-defined]


def _of(values: Rows) -> list[WeightedUpdate]:
    return [
        WeightedUpdate(site=f"site-{i}", delta_d=np.array(v, np.float32), weight=1.0)
        for i, v in enumerate(values)
    ]


def _run(rule: CombineRule, updates: list[WeightedUpdate]) -> Vector:
    size = updates[0].delta_d.size
    return rule(iter(updates), np.full(size, np.nan, np.float32))


ROBUST = {
    "trimmed_mean": combine.trimmed_mean(byzantine_sites=1),
    "median": combine.median,
    "krum": combine.krum(byzantine_sites=1),
    "multi_krum": combine.multi_krum(byzantine_sites=1),
}
ALL = {"mean": combine.weighted_mean, **ROBUST}


@pytest.mark.parametrize("num_sites", [1, 2, 5, 16])
def test_mean_matches_oracle(num_sites: int):
    """The running mean is the mean, to float32 rounding."""
    updates = _updates(num_sites)
    expected = oracles.weighted_mean(_rows(updates), [u.weight for u in updates])
    np.testing.assert_allclose(
        expected, _run(combine.weighted_mean, updates), rtol=0, atol=2e-6
    )


def test_mean_skips_zero_weights_wherever_they_stand():
    """An update of weight 0 does not count, even as the first one."""
    a, b, c = (u.delta_d for u in _updates(3))
    weights = [0.0, 2.0, 0.0]
    updates = [
        WeightedUpdate(site=f"s{i}", delta_d=d, weight=w)
        for i, (d, w) in enumerate(zip([a, b, c], weights, strict=True))
    ]
    np.testing.assert_array_equal(b, _run(combine.weighted_mean, updates))


def test_mean_survives_absurd_weights():
    """Weights near the end of float32's range do not overflow the values."""
    updates = [
        WeightedUpdate(site=s, delta_d=np.array([v], np.float32), weight=w)
        for s, v, w in [("a", 1e30, 1e-30), ("b", 3e30, 1e38), ("c", 1e30, 1e38)]
    ]
    np.testing.assert_allclose([2e30], _run(combine.weighted_mean, updates), rtol=1e-6)


def test_mean_is_the_same_for_any_number_of_threads():
    """Every thread count gives the same bits."""
    updates, before = _updates(5, size=1_000_003), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(_run(combine.weighted_mean, updates).tobytes())
    torch.set_num_threads(before)
    assert len(set(results)) == 1


# Of each size the last value is in a chunk of another length, or of the usual one.
CHUNK = 8192
SIZES = [1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 4097]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of several chunks that take no megabytes."""
    monkeypatch.setattr(combine, "_CHECKED_CHUNK_VALUES", CHUNK)


def _own(updates: list[WeightedUpdate], refused: list[str]) -> list[WeightedUpdate]:
    """Hand over copies of updates."""
    return [
        replace(
            update,
            delta_d=update.delta_d.copy(),  # type: ignore[attr-defined]
            handed_over=True,
            refuse=partial(refused.append, update.site),
        )
        for update in updates
    ]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_bad_value_found_late_leaves_the_mean_as_it_was(size: int, bad: int):
    """Also the very last value, when all before it has been folded."""
    updates = _updates(3, size=size)
    expected = _run(combine.weighted_mean, updates[:bad] + updates[bad + 1 :])
    for place, value in itertools.product([0, -1], [np.nan, np.inf, -np.inf]):
        updates, refused = _updates(3, size=size), list[str]()
        updates[bad].delta_d[place] = value
        owned = _own(updates, refused)
        found = _run(combine.weighted_mean, owned)
        assert expected.tobytes() == found.tobytes(), (place, value)
        assert refused == [updates[bad].site], (place, value)


def test_mean_and_one_update_are_all_that_is_held():
    """When the next update is asked for, of those before one array holds the mean."""
    arrays: list[weakref.ref[Vector]] = []

    def fresh(value: float) -> Vector:
        assert sum(array() is not None for array in arrays) <= 1
        delta_d = np.full(10, value, np.float32)
        arrays.append(weakref.ref(delta_d))
        return delta_d

    stream = (
        WeightedUpdate(site=f"s{i}", delta_d=fresh(i), weight=1.0, handed_over=True)
        for i in range(5)
    )
    mean_d = combine.weighted_mean(stream, np.empty(10, np.float32))
    np.testing.assert_allclose(np.full(10, 2.0), mean_d, rtol=1e-6)
    assert [array() is mean_d for array in arrays] == [False] * 4 + [True]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_update_that_nobody_can_refuse_is_an_error(name: str, weight: float):
    """A value that is not finite is never combined, even if its weight is 0."""
    rows = [[float(i)] for i in range(5)]
    sound = [replace(u, weight=1.0) for u in _of(rows)]
    bad = WeightedUpdate(site="z", delta_d=np.full(1, np.inf, "f4"), weight=weight)
    with pytest.raises(ValueError, match=r"'z' is not finite"):
        ALL[name](iter([*sound, bad]), np.empty(1, np.float32))


@pytest.mark.parametrize("codec", [FP16, BF16], ids=lambda codec: codec.name)
@pytest.mark.parametrize("name", ALL)
def test_words_of_a_codec_are_checked_as_values(codec: Codec, name: str):
    """Infinity and NaN, of either sign; other words are sound."""
    for value in (0x7C00, 0xFC00, 0x7E00, 0x7F80, 0xFF80, 0xFFC0):
        words = codec.encode(np.ones(3, np.float32))
        words.view(np.uint16)[-1] = value
        refused: list[str] = []
        sent = WeightedUpdate(
            site="z",
            delta_d=codec.values(words),
            weight=1.0,
            refuse=partial(refused.append, "z"),
        )
        _run(ALL[name], [*_of([[1.0] * 3] * 7), sent])
        is_bad = not np.isfinite(codec.values(words)[0:3]).all()
        assert refused == ["z"] * is_bad, hex(value)


@pytest.mark.parametrize("name", ALL)
def test_no_update_is_refused(name: str):
    """There is no mean of nothing."""
    with pytest.raises(ValueError, match=r"nothing|0 updates"):
        ALL[name](iter([]), np.empty(3, np.float32))


@pytest.mark.parametrize("name", ALL)
def test_wrong_length_is_refused(name: str):
    """One value is not spread over the whole model."""
    updates = [*_of([[1, 2, 3]] * 4), *_of([[1]])]
    with pytest.raises(ValueError, match="shape"):
        ALL[name](iter(updates), np.empty(3, np.float32))


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_bad_weight_is_refused(weight: float):
    """A weight is a finite number that is not negative."""
    update = WeightedUpdate(site="a", delta_d=np.ones(3, np.float32), weight=weight)
    with pytest.raises(ValueError, match="weight"):
        combine.weighted_mean(iter([update]), np.empty(3, np.float32))


def test_zero_total_weight_is_refused():
    """Updates that all weigh nothing have no mean."""
    update = WeightedUpdate(site="a", delta_d=np.ones(3, np.float32), weight=0.0)
    with pytest.raises(ValueError, match="sum to 0"):
        combine.weighted_mean(iter([update] * 2), np.empty(3, np.float32))


@pytest.mark.parametrize(
    ("num_sites", "cut"), [(1, 0), (3, 1), (4, 1), (5, 2), (9, 3), (16, 7)]
)
def test_trimmed_mean_matches_oracle(num_sites: int, cut: int):
    """Values cut at both ends, the rest averaged, rounded once."""
    updates = _updates(num_sites)
    expected = np.float32(oracles.trimmed_mean(_rows(updates), cut))
    actual = _run(combine.trimmed_mean(byzantine_sites=cut), updates)
    np.testing.assert_array_equal(expected, actual)


@pytest.mark.parametrize("num_sites", range(1, 12))
def test_median_matches_numpy(num_sites: int):
    """Odd and even numbers of sites."""
    updates = _updates(num_sites)
    rows = np.array([u.delta_d for u in updates], np.float64)
    expected = np.median(rows, axis=0).astype(np.float32)
    np.testing.assert_array_equal(expected, _run(combine.median, updates))


@pytest.mark.parametrize("num_rows", range(1, 11))
def test_sorting_network_sorts(num_rows: int):
    """Zeros and ones in every order: the 0-1 principle makes this a proof."""
    network = list(combine._sorting_network(num_rows))
    for bits in range(1 << num_rows):
        rows = [bits >> i & 1 for i in range(num_rows)]
        for low, high in network:
            rows[low], rows[high] = sorted((rows[low], rows[high]))
        assert rows == sorted(rows)


@pytest.mark.parametrize(("num_sites", "bad"), [(3, 0), (5, 1), (7, 2), (10, 3)])
def test_krum_matches_oracle(num_sites: int, bad: int):
    """The update of the smallest score is handed on bit by bit."""
    updates = _updates(num_sites, size=200)
    scores = oracles.krum_scores(_rows(updates), bad)
    expected = updates[scores.index(min(scores))].delta_d
    actual = _run(combine.krum(byzantine_sites=bad), updates)
    np.testing.assert_array_equal(expected, actual)


def test_multi_krum_averages_the_best():
    """N - f updates of the smallest scores, equally weighted."""
    updates = _updates(7, size=20_000)
    rows = _rows(updates)
    scores = oracles.krum_scores(rows, 2)
    best = sorted(range(7), key=scores.__getitem__)[:5]
    expected = oracles.weighted_mean([rows[i] for i in best], [1.0] * 5)
    actual = _run(combine.multi_krum(byzantine_sites=2), updates)
    np.testing.assert_array_equal(np.float32(expected), actual)


def test_krum_breaks_ties_by_name():
    """Of equal scores the first name wins, in whatever order they arrive."""
    updates = _of([[0, 1], [1, 0], [0, -1], [-1, 0]])
    for order in (updates, updates[::-1]):
        actual = _run(combine.krum(byzantine_sites=0), order)
        np.testing.assert_array_equal([0, 1], actual)


@pytest.mark.parametrize(
    ("rule", "enough"),
    [
        (combine.trimmed_mean(byzantine_sites=2), 5),
        (combine.krum(byzantine_sites=2), 7),
        (combine.multi_krum(byzantine_sites=2), 7),
    ],
)
def test_robust_rule_needs_enough_sites(rule: CombineRule, enough: int):
    """One site below the breakdown point is refused."""
    _run(rule, _updates(enough, size=3))
    with pytest.raises(ValueError, match=f"needs {enough}"):
        _run(rule, _updates(enough - 1, size=3))


@pytest.mark.parametrize("name", ALL)
def test_rule_of_a_job(name: str):
    """Every rule that a job can name is there and does what it says."""
    updates = _updates(5, size=50)
    spec = AggregationSpec(combine=name, byzantine_sites=1)
    np.testing.assert_array_equal(
        _run(ALL[name], updates), _run(combine.combine_rule(spec), updates)
    )


# The mean over the sites that sent a value.


def test_contributor_mean_leaves_out_sites_that_sent_nothing():
    """By hand: weights 1, 3 and 4; of the last coordinate no site has a value."""
    rows = [[2.0, 0.0, 5.0, 0.0], [6.0, 8.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    updates = [
        replace(one, weight=weight)
        for one, weight in zip(_of(rows), (1.0, 3.0, 4.0), strict=True)
    ]
    found = _run(combine.contributor_mean, updates)
    assert found.tolist() == [5.0, 8.0, 5.0, 0.0]


def test_contributor_mean_refuses_what_is_not_finite():
    """And counts an update without weight for nothing."""
    refused: list[str] = []
    updates = _of([[1.0, 2.0], [np.nan, 2.0], [7.0, 7.0]])
    updates[1] = replace(updates[1], refuse=lambda: refused.append("site-1"))
    updates[2] = replace(updates[2], weight=0.0)
    assert _run(combine.contributor_mean, updates).tolist() == [1.0, 2.0]
    assert refused == ["site-1"]
    with pytest.raises(ValueError, match="nothing to average"):
        _run(combine.contributor_mean, updates[2:])


def test_contributor_mean_is_what_a_job_names():
    rule = combine.combine_rule(AggregationSpec(combine="contributor_mean"))
    assert rule is combine.contributor_mean


def _geometric(updates: Sequence[Vector], weights: np.ndarray) -> Vector:
    """A rule of a user's: the weighted geometric mean of magnitudes, and the signs."""
    logs = [w * np.log(np.abs(u)) for u, w in zip(updates, weights, strict=True)]
    return np.exp(np.sum(logs, axis=0) / weights.sum()) * np.sign(np.sum(updates, 0))


def test_a_users_rule_is_given_all_updates_in_the_order_of_sites():
    updates = _updates(5, size=30)
    expected = _geometric([u.delta_d for u in updates], _weights(updates))
    spec = AggregationSpec(combine="rules:geometric")
    rule = combine.combine_rule(spec, {"rules:geometric": _geometric}.__getitem__)
    found = _run(rule, updates[::-1])
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert found.dtype == np.float32


def test_a_users_rule_sees_no_update_that_is_not_finite():
    updates, refused = _updates(3, size=4), []
    bad = WeightedUpdate(
        site="site-00",
        delta_d=np.full(4, np.nan, np.float32),
        weight=1.0,
        refuse=lambda: refused.append("site-00"),
    )
    rule = combine.users_rule(lambda each, _: each[0], name="rules:first")
    found = _run(rule, [bad, *updates[1:]])
    np.testing.assert_array_equal(found, updates[1].delta_d)
    assert refused == ["site-00"]


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda each, _: each[0][:-1], JobError, r"shape \(3,\) .* \(4,\)"),
        (lambda each, _: each[0].astype(int), JobError, "type int64"),
        (lambda *_: None, JobError, "type object"),
        (lambda each, _: each[0] * np.inf, JobError, "NaN or infinite"),
        (lambda each, _: each[0].fill(0), UserCodeError, "rules:f .*read-only"),
        (lambda each, _: each[7], UserCodeError, "rules:f .*IndexError"),
    ],
)
def test_what_a_users_rule_does_wrong_moves_no_model(
    function: combine.UsersRule, error: type[Exception], text: str
):
    updates = _updates(2, size=4)
    before = [np.array(update.delta_d) for update in updates]
    with pytest.raises(error, match=text):
        _run(combine.users_rule(function, name="rules:f"), updates)
    for update, values in zip(updates, before, strict=True):
        np.testing.assert_array_equal(update.delta_d, values)


def _weights(updates: list[WeightedUpdate]) -> np.ndarray:
    return np.array([update.weight for update in updates])
