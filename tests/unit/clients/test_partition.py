"""Dealing examples out to sites."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import ArrayLike
from support.examples import few

from clients.data import Dataset, Examples, as_dataset
from clients.data.partition import Parts, partition
from federation.errors import SiteError
from federation.job.spec import PartitionSpec


def dataset(
    classes: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group_names: tuple[str, ...] = (),
):
    """Make a dataset whose only content is its classes or groups."""
    rows = classes if classes is not None else groups
    return as_dataset(
        Examples(
            inputs=np.zeros((len(rows), 1), np.float32),
            targets=None if classes is None else np.asarray(classes),
            groups=None if groups is None else np.asarray(groups),
            group_names=group_names,
        ),
        name="test data",
    )


def balanced(per_class: int, num_classes: int = 4):
    return dataset(np.repeat(np.arange(num_classes), per_class))


def deal(train: Dataset, held_out: Dataset, num_sites: int, seed: int = 0, **spec: Any):
    return partition(
        train,
        held_out,
        PartitionSpec(**spec),
        site_names=[f"site-{i}" for i in range(num_sites)],
        rng=np.random.default_rng(seed),
    )


def sizes(parts: Parts):
    return np.array([[len(train), len(held_out)] for train, held_out in parts])


KINDS = st.sampled_from(
    [
        {"kind": "iid"},
        {"kind": "stratified"},
        {"kind": "dirichlet", "alpha": 1.0},
        {"kind": "dirichlet", "alpha": 100.0},
    ]
)


@few(60)
@given(
    spec=KINDS,
    num_sites=st.integers(1, 5),
    per_class=st.integers(20, 40),
    seed=st.integers(0, 2**32),
)
def test_every_example_is_dealt_once(
    spec: Any, num_sites: int, per_class: int, seed: int
):
    """Training and held-out indices are each dealt out exactly once, in order."""
    train, held_out = balanced(per_class), balanced(10)
    parts = deal(train, held_out, num_sites, seed, **spec)
    for side, data in enumerate((train, held_out)):
        dealt = [part[side] for part in parts]
        assert list(range(len(data))) == sorted(np.concatenate(dealt).tolist())
        assert all((np.diff(indices) > 0).all() for indices in dealt)


@few(40)
@given(spec=KINDS, seed=st.integers(0, 2**32))
def test_result_depends_on_the_generator_alone(spec: Any, seed: int):
    """The same seed deals the same examples to the same sites."""
    first, again = (deal(balanced(30), balanced(10), 3, seed, **spec) for _ in "ab")
    for mine, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(mine[0], other[0])
        np.testing.assert_array_equal(mine[1], other[1])


@few(40)
@given(
    kind=st.sampled_from(["iid", "stratified"]),
    num_sites=st.integers(1, 7),
    classes=st.lists(st.integers(0, 3), min_size=7, max_size=60),
)
def test_iid_and_stratified_are_balanced(kind: str, num_sites: int, classes: list[int]):
    """No site has two examples more than another, on either side."""
    data = dataset(classes)
    spread = np.ptp(sizes(deal(data, data, num_sites, kind=kind)), axis=0)
    assert spread.max() <= 1


@few(40)
@given(
    num_sites=st.integers(1, 7),
    classes=st.lists(st.integers(0, 3), min_size=7, max_size=60),
)
def test_stratified_balances_each_class(num_sites: int, classes: list[int]):
    """No site has two examples of a class more than another."""
    data, labels = dataset(classes), np.asarray(classes)
    parts = deal(data, data, num_sites, kind="stratified")
    counts = [np.bincount(labels[train], minlength=4) for train, _ in parts]
    assert np.ptp(counts, axis=0).max() <= 1


def test_dirichlet_uses_the_same_shares_on_both_sides():
    """A site's held-out classes are spread like its training classes."""
    train, held_out = balanced(1000), balanced(500)
    for mine, held in deal(train, held_out, 3, kind="dirichlet", alpha=0.5):
        expected = np.bincount(train.labels()[mine], minlength=4) / 1000
        actual = np.bincount(held_out.labels()[held], minlength=4) / 500
        np.testing.assert_allclose(actual, expected, atol=0.003)


@pytest.mark.parametrize(
    ("alpha", "low", "high"), [(0.05, 0.3, 0.51), (1000.0, 0.0, 0.03)]
)
def test_alpha_sets_how_uneven_dirichlet_is(alpha: float, low: float, high: float):
    """Small alpha gives each class to few sites, large alpha to all alike.

    The deviation of a class's shares over four sites is at most 0.433 (all at one
    site) and tends to 0.433 / sqrt(1 + 4 alpha).
    """
    train = balanced(1000, num_classes=20)
    parts = deal(train, train, 4, kind="dirichlet", alpha=alpha)
    shares = [np.bincount(train.labels()[t], minlength=20) / 1000 for t, _ in parts]
    assert low <= np.std(shares, axis=0).mean() <= high


def test_dirichlet_gives_up_with_advice():
    """A demand that no draw can meet ends with the site's name and a remedy."""
    with pytest.raises(SiteError, match=r"site 'site-\d'.*100 draws.*raise alpha"):
        deal(balanced(5), balanced(5), 2, kind="dirichlet", min_examples=11)


@pytest.mark.parametrize("kind", ["stratified", "dirichlet"])
def test_classes_are_needed(kind: str):
    """Kinds that go by class refuse data without classes."""
    data = dataset(groups=[0, 1], group_names=("a", "b"))
    with pytest.raises(SiteError, match="no integer targets"):
        deal(data, data, 2, kind=kind)


def test_site_without_training_example_is_refused():
    """More sites than examples leaves a site empty, which is named."""
    with pytest.raises(SiteError, match="'site-2' gets 0 training examples"):
        deal(dataset([0, 1]), balanced(5), 3)


def test_site_without_held_out_example_is_refused():
    """More sites than held-out examples is refused too."""
    with pytest.raises(SiteError, match="'site-2' gets no held-out example"):
        deal(balanced(5), dataset([0, 1]), 3)


def grouped(counts: list[int]):
    names = tuple(f"group-{i}" for i in range(len(counts)))
    return dataset(groups=np.repeat(np.arange(len(counts)), counts), group_names=names)


@few(40)
@given(num_sites=st.integers(1, 4), counts=st.lists(st.integers(1, 9), min_size=4))
def test_groups_stay_whole_and_sites_near_equal(num_sites: int, counts: list[int]):
    """A group lives at one site, and sites differ by one group at most."""
    train = grouped(counts)
    held_out = grouped([1] * len(counts))
    parts = deal(train, held_out, num_sites, kind="by_group")
    of_site = [set(train.groups[mine].tolist()) for mine, _ in parts]
    assert len(counts) == sum(len(groups) for groups in of_site)
    assert of_site == [set(held_out.groups[held].tolist()) for _, held in parts]
    assert np.ptp(sizes(parts)[:, 0]) <= max(counts)


def test_groups_are_needed():
    """Data without groups cannot be dealt by group."""
    with pytest.raises(SiteError, match="the data has none"):
        deal(balanced(2), balanced(2), 2, kind="by_group")


def test_too_few_groups():
    """Three sites cannot share two groups."""
    with pytest.raises(SiteError, match=r"2 groups .* 3 sites"):
        deal(grouped([4, 4]), grouped([1, 1]), 3, kind="by_group")


def test_group_names_must_agree():
    """Both sides must number their groups alike."""
    with pytest.raises(SiteError, match="different groups"):
        deal(grouped([4, 4]), grouped([1, 1, 1]), 2, kind="by_group")


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_proportional_parts_follow_the_speeds(speeds: list[float], seed: int):
    """To within one example; each goes to one site."""
    train, held_out = balanced(250), balanced(250)
    # Nobody is so slow as to be left without.
    parts = deal(
        train,
        held_out,
        len(speeds),
        seed=seed,
        kind="proportional",
        speeds=tuple(speed + 5 for speed in speeds),
    )
    total = sum(speed + 5 for speed in speeds)
    for (train_n, held_n), speed in zip(parts, speeds, strict=True):
        expected = 1000 * (speed + 5) / total
        assert abs(len(train_n) - expected) <= 1
        assert abs(len(held_n) - expected) <= 1
    everything = np.concatenate([train_n for train_n, _ in parts])
    assert sorted(everything.tolist()) == list(range(1000))
