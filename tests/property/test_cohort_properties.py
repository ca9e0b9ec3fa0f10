"""Which sums may be added: the rule on groups against plain linear algebra."""

from collections.abc import Collection
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from clients.privacy.cohorts import Cohort, atoms, singled_out
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


def null_space(rows: list[list[Fraction]], width: int) -> list[list[Fraction]]:
    """A basis of the vectors that a matrix sends to nothing."""
    rows, pivots = [list(row) for row in rows], []
    for column in range(width):
        at = len(pivots)
        found = next((r for r in range(at, len(rows)) if rows[r][column]), None)
        if found is None:
            continue
        rows[at], rows[found] = rows[found], rows[at]
        rows[at] = [x / rows[at][column] for x in rows[at]]
        for r, row in enumerate(rows):
            if r != at:
                rows[r] = [
                    x - row[column] * y for x, y in zip(row, rows[at], strict=True)
                ]
        pivots.append(column)
    basis = []
    for free in sorted({*range(width)} - {*pivots}):
        vector = [Fraction(i == free) for i in range(width)]
        for row, pivot in zip(rows, pivots, strict=False):
            vector[pivot] = -row[free]
        basis.append(vector)
    return basis


def leaves_few(bare: list[Cohort], private: list[Cohort], *, smallest: int) -> bool:
    """Whether a combination that uses open sums leaves few of their sites over.

    Searches all sets of too few sites of open sums, beside any that private sums hold:
    whether some combination is zero on all other sites of open sums and not on these.
    """
    known = [*bare, *private]
    exposed = sorted(frozenset().union(*bare))
    for size in range(1, smallest):
        for left in combinations(exposed, size):
            others = [site for site in exposed if site not in left]
            matrix = [[Fraction(site in c) for c in known] for site in others]
            for weights in null_space(matrix, len(known)):
                for site in left:
                    total = sum(
                        w for w, c in zip(weights, known, strict=True) if site in c
                    )
                    if total:
                        return True
    return False


@given(cohorts, st.lists(st.frozensets(st.sampled_from(NAMES), min_size=1), max_size=3))
@settings(max_examples=150, deadline=None)
def test_noise_of_others_does_not_single_out_sites_of_open_sums(
    bare: list[Cohort], private: list[Cohort]
) -> None:
    """Whatever is added to open sums, their sites are left over in groups of k.

    Sites of private sums alone may be left over beside them: with their own noise.
    """
    if not singled_out(bare, private, smallest=3) and len({*bare, *private}) > 1:
        assert not leaves_few(bare, private, smallest=3)


def test_private_sum_and_an_open_one_single_out_a_site() -> None:
    """Five without noise and four with: the fifth, but for the noise of the four."""
    five, four = [cohort(0, 1, 2, 3, 4)], [cohort(0, 1, 2, 3)]
    assert leaves_few(five, four, smallest=2)
    assert singled_out(five, four, smallest=3) == [cohort(4)]
    assert not leaves_few(four, five, smallest=3)  # The noise of the fifth is in it.
    assert singled_out(four, five, smallest=3) == []
    assert singled_out([], [*five, *four], smallest=3) == []


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
