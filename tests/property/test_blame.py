"""Whatever liars do to shares: sums are exact, and runs continue without the liars."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st
from support.dealers import (
    Dealer,
    Played,
    disputing,
    flipped,
    in_bundle,
    play,
    value_of,
    wrong_share,
)
from support.examples import few
from support.secagg_parties import Run, site_name, start

from aggregator.blame import Blame
from privacy.secagg.agreement.contract import smallest_threshold
from privacy.secagg.protocol.commitments import SECRET
from privacy.secagg.protocol.messages import Shares

pytestmark = pytest.mark.slow

ROUNDS = 10


def _spoil_bundles(own: int, some: list[int], rng: random.Random) -> Dealer:
    at, bit = rng.randrange(3), rng.randrange(33 * 8)
    change = in_bundle(at, lambda share: flipped(share, bit))
    return Dealer(bundles={x: change for x in some if x != own})


def _spoil_sealed(own: int, some: list[int], rng: random.Random) -> Dealer:
    bit = rng.randrange(1000)
    changes = {x: lambda data: flipped(data, bit) for x in some if x != own}
    return Dealer(sealed=changes)


def _spoil_rows(own: int, some: list[int], rng: random.Random) -> Dealer:
    bit = rng.randrange(1000)
    return Dealer(rows={x: lambda row: flipped(row, bit) for x in some if x != own})


def _commit_to_wrong_shares(own: int, some: list[int], rng: random.Random) -> Dealer:
    bit = rng.randrange(32 * 8)
    change = in_bundle(0, lambda share: flipped(share, bit))
    return Dealer(committed={some[0]: change})


def _commit_to_another_secret(own: int, some: list[int], rng: random.Random) -> Dealer:
    return Dealer(rows={SECRET: flipped})


def _release_wrong_shares(own: int, some: list[int], rng: random.Random) -> Dealer:
    bit = rng.randrange(33 * 8)

    def release(shares: Shares) -> Shares:
        for dealer in [x for x in some if x in shares.self_shares]:
            shares = wrong_share(dealer, lambda share: flipped(share, bit))(shares)
        return shares

    return Dealer(release=release)


def _accuse(own: int, some: list[int], rng: random.Random) -> Dealer:
    return Dealer(release=disputing(*(x for x in some if x != own)))


def _nothing(own: int, some: list[int], rng: random.Random) -> Dealer:
    return Dealer()


LIES: list[Callable[[int, list[int], random.Random], Dealer]] = [
    *(_spoil_bundles, _spoil_sealed, _spoil_rows, _commit_to_wrong_shares),
    *(_commit_to_another_secret, _release_wrong_shares, _accuse, _accuse, _nothing),
]


@dataclass
class Liar:
    """What a site does in each round.

    Attributes:
        lies: One for each round; the last repeats for ever.
        silent_from: The round from which on it releases nothing.
    """

    number: int
    lies: list[int]
    seed: int
    silent_from: int

    def dealer(self, run: Run, round_index: int) -> Dealer:
        rng = self.rng(round_index)
        lie = LIES[self.lies[min(round_index, len(self.lies)) - 1]]
        some = rng.sample(run.contract.cohort, rng.randint(1, 4))
        return lie(self.number, some, rng)

    def rng(self, round_index: int) -> random.Random:
        return random.Random(f"{self.seed}/{round_index}")  # noqa: S311  # No secret.


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[Liar]]:
    """Runs of P2 with as many liars as sites may be missing, or fewer."""
    num_sites = draw(st.integers(4, 8))
    threshold = draw(st.integers(smallest_threshold(num_sites), num_sites - 1))
    most = num_sites - threshold
    numbers = draw(st.sets(st.integers(1, num_sites), min_size=1, max_size=most))
    lies = st.lists(st.integers(0, len(LIES) - 1), min_size=1, max_size=4)
    liars = [
        Liar(
            number,
            draw(lies),
            draw(st.integers(0, 2**32)),
            draw(st.sampled_from([2, 5, ROUNDS + 1, ROUNDS + 1])),
        )
        for number in sorted(numbers)
    ]
    return num_sites, threshold, liars


def played(run: Run, liars: list[Liar], blame: Blame, round_index: int) -> Played:
    """A round without those who are left out, as a coordinator would have it."""
    left_out = blame.left_out()
    absent = [i for i in run.contract.cohort if site_name(i) in left_out]
    found = play(
        run,
        {liar.number: liar.dealer(run, round_index) for liar in liars},
        round_index=round_index,
        absent=absent,
        silent=[x.number for x in liars if round_index >= x.silent_from],
    )
    blame.note(found.server)
    return found


@few(10)  # Ten rounds each.
@given(case=cases())
def test_run_goes_on_whatever_liars_do_to_shares(case: tuple[int, int, list[Liar]]):
    """Lost rounds are few, sums exact, and nobody honest is found at fault."""
    num_sites, threshold, liars = case
    run = start(num_sites, threshold=threshold, hybrid=False)
    names = {site_name(liar.number) for liar in liars}
    blame = Blame(run.contract)
    lost = []
    for round_index in range(1, ROUNDS + 1):
        found = played(run, liars, blame, round_index)
        assert found.server.faults.keys() <= names
        assert all(names & {*pair} for pair in found.server.disputes)
        if found.masks is None:
            lost.append(round_index)
            continue
        rows = [value_of(i) for i in found.server._survivors]
        assert found.total == [sum(column) for column in zip(*rows, strict=True)]
    left_out = set(blame.left_out())
    assert len(left_out - names) <= len(names - left_out)
    assert len(lost) <= 3 * len(liars), lost


@few(10)
@given(case=cases())
def test_nobody_is_named_where_nobody_lies(case: tuple[int, int, list[Liar]]):
    """With sites that are silent in one round and there in the next."""
    num_sites, threshold, liars = case
    run = start(num_sites, threshold=threshold, hybrid=False)
    blame = Blame(run.contract)
    for round_index in range(1, 5):
        silent = [x.number for x in liars if x.rng(round_index).random() < 0.5]
        found = play(run, {}, round_index=round_index, silent=silent)
        assert found.masks is not None
        assert blame.note(found.server) == []
    assert not blame.left_out()
