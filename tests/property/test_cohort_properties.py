"""Which sums may be added: the rule on groups against plain linear algebra."""

from collections.abc import Collection
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.cohorts import Cohort, atoms, singled_out
from federation.ids import SiteId

NAMES = [SiteId(f"site-{i}") for i in range(7)]

cohorts = st.lists(
    st.frozensets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=5
)


def cohort(*numbers: int) -> Cohort:
    """A cohort by the numbers of its sites."""
    return frozenset(SiteId(f"site-{i}") for i in numbers)


def rank(rows: list[list[Fraction]]) -> int:
    """Rank of a matrix, by elimination in exact fractions."""
    rows, found = [list(row) for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in rows[found:] if r[column]), None)
        if pivot is None:
            continue
        rows.remove(pivot)
        rows.insert(found, pivot)
        for row in rows[found + 1 :]:
            factor = row[column] / pivot[column]
            row[:] = [x - factor * y for x, y in zip(row, pivot, strict=True)]
        found += 1
    return found


def smallest_support(known: Collection[Cohort]) -> int:
    """Fewest sites that some linear combination of the sums leaves over.

    A combination is zero on a set of sites, and not everywhere, if and only if the
    columns of that set alone have a smaller rank than all columns.
    """
    rows = [[Fraction(site in cohort) for site in NAMES] for cohort in known]
    whole = rank(rows)
    for size in range(1, len(NAMES) + 1):
        for left in combinations(range(len(NAMES)), size):
            others = [[x for i, x in enumerate(row) if i not in left] for row in rows]
            if rank(others) < whole:
                return size
    raise AssertionError("every sum holds somebody")


@given(cohorts, st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_large_groups_leave_nobody_alone(known: list[Cohort], smallest: int) -> None:
    """If every atom has k sites, no combination of sums leaves fewer than k over."""
    if all(len(atom) >= smallest for atom in atoms(known)):
        assert smallest_support(known) >= smallest


@given(cohorts)
@settings(max_examples=100, deadline=None)
def test_every_combination_leaves_whole_groups(known: list[Cohort]) -> None:
    """Atoms are a partition, and every cohort is a union of some of them."""
    found = atoms(known)
    assert sorted(s for atom in found for s in atom) == sorted(
        frozenset().union(*known)
    )
    for each in known:
        assert each == frozenset().union(*(a for a in found if a <= each))
        assert all(atom <= each or not atom & each for atom in found)


def test_three_sums_that_differ_pairwise_single_out_a_site() -> None:
    """{1,2,3} + {3,4,5} - {1,2,4,5} is twice site 3: pairs of sums do not show it."""
    known = [cohort(1, 2, 3), cohort(3, 4, 5), cohort(1, 2, 4, 5)]
    assert all(len(a ^ b) >= 3 for a, b in combinations(known, 2))
    assert smallest_support(known) == 1
    assert cohort(3) in singled_out(known, smallest=3)


def test_rule_is_stricter_than_the_algebra() -> None:
    """Small atoms need not be told apart: the converse of the rule is false."""
    known = [cohort(1, 2, 3, 4), cohort(3, 4, 5, 6)]
    assert smallest_support(known) == 4
    assert singled_out(known, smallest=3) != []


@pytest.mark.parametrize("size", [2, 5])
def test_one_cohort_is_no_difference(size: int) -> None:
    """How many sites one sum must hold is the contract's, however often it is made."""
    known = [cohort(*range(size))] * 2
    assert singled_out(known, smallest=3) == []
