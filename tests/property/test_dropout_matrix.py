"""Whoever drops out, and whenever: the survivors' exact sum, or a clean end.

State machines and arithmetic of the product, real keystreams, short vectors. A round
is opened if, and only if, enough sites are left at each step; what is opened is then
the plain sum of integers. Runs are set up once for each kind and then play one round
after another, so that every round also begins after whatever the last one left.
"""

import functools
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.examples import few
from support.secagg_parties import MODEL, Parties, entropy, site_name

from privacy import keystream as prg
from privacy.keystream import Mask
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.errors import OutOfOrder, TooFewSites
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.key_schedule import RoundFacts, RoundMasks
from privacy.secagg.protocol.round_memory import InMemoryRounds
from privacy.secagg.protocol.server import AggregatorRound
from privacy.secagg.protocol.setup import AggregatorSetup, SetupRecord

pytestmark = pytest.mark.slow

NUM_VALUES, NUM_SLOTS = 5, 2
MAX_ROUNDS = 1 << 20
DTYPES = {16: np.uint16, 24: np.uint8, 32: np.uint32}


@dataclass(frozen=True)
class Kind:
    """What a run is set up for."""

    num_sites: int
    threshold: int
    min_sites: int
    bits: int
    hybrid: bool = False

    @property
    def ring(self) -> RingSpec:
        return RingSpec(bits=self.bits, num_sites=self.num_sites, clip_norm=1.0)


@dataclass(frozen=True)
class Drops:
    """Who is lost at which step; a site is in one of the sets at most."""

    absent: frozenset[int]  # R1: never hears of the round
    declines: frozenset[int]  # R1: has no update
    late: frozenset[int]  # R1: its answer comes after the answers are closed
    no_consent: frozenset[int]
    no_shares: frozenset[int]

    @property
    def silent(self) -> frozenset[int]:
        return self.absent | self.declines | self.late


class Setup:
    """A setup in which some messages come late."""

    def __init__(self, kind: Kind) -> None:
        parties = Parties(kind.num_sites)
        ring = kind.ring
        contract = parties.contract(
            threshold=kind.threshold,
            min_sites=kind.min_sites,
            ring_bits=kind.bits,
            scale=ring.scale,
            amplitude=ring.amplitude,
            max_rounds=MAX_ROUNDS,
            hybrid=kind.hybrid,
        )
        policy = parties.policy(
            max_rounds=MAX_ROUNDS,
            require_hybrid=False,
            min_sites=min(3, kind.min_sites),
            header_slots=type(parties.policy().header_slots)(contract.header_slots),
        )
        self.parties, self.contract = parties, contract
        self.aggregator = AggregatorSetup(
            identity=parties.aggregator, contract=contract
        )
        self.sites = {i: parties.site_setup(i, policy=policy) for i in parties.sites}
        self._adverts = {
            i: site.on_offer(self.aggregator.offer()) for i, site in self.sites.items()
        }
        self._confirms: dict[int, bytes] = {}

    def advertise(self, numbers: frozenset[int]) -> None:
        """S1."""
        for i in numbers:
            self.aggregator.on_advert(self._adverts[i])

    def confirm(self, numbers: frozenset[int]) -> None:
        """S2."""
        book = self.aggregator.book()
        for i in numbers:
            self.aggregator.on_confirm(self.sites[i].on_book(book))

    def finish(self) -> "Run":
        record = self.aggregator.result()
        sessions = {
            i: SiteSession(
                contract=site.contract,
                identity=self.parties.sites[i],
                secrets=site.on_confirms(record.confirms),
                memory=InMemoryRounds(),
                random_bytes=entropy(f"rounds {i}"),
            )
            for i, site in self.sites.items()
        }
        return Run(record, sessions)


@dataclass
class Run:
    """A run after its setup, and the round that it is at."""

    record: SetupRecord
    sessions: dict[int, SiteSession]
    round_index: int = 0

    @property
    def contract(self) -> Contract:
        return self.record.contract


def set_up(kind: Kind) -> Run:
    """Everybody takes part."""
    begun = Setup(kind)
    everybody = frozenset(begun.sites)
    begun.advertise(everybody)
    begun.confirm(everybody)
    return begun.finish()


# One run for each kind, for all cases of all tests: setups of 64 sites are dear.
pooled = functools.cache(set_up)


@dataclass
class Values:
    """One site's plain integers."""

    vector: list[int]
    header: list[int]


def values_of(kind: Kind, rng: random.Random) -> dict[int, Values]:
    """As large as the ring allows in one place, so that sums reach its ends."""
    most = kind.ring.amplitude
    return {
        i: Values(
            [most, -most, *(rng.randint(-most, most) for _ in range(NUM_VALUES - 2))],
            [rng.randint(0, 1 << 56) for _ in range(NUM_SLOTS)],
        )
        for i in range(1, kind.num_sites + 1)
    }


def on_wire(values: list[int], bits: int) -> np.ndarray:
    width = bits // 8
    data = b"".join((v % (1 << bits)).to_bytes(width, "little") for v in values)
    return np.frombuffer(bytearray(data), DTYPES.get(bits, np.uint64))


def signed(words: np.ndarray, bits: int) -> list[int]:
    half = 1 << (bits - 1)
    return [(int(word) + half) % (1 << bits) - half for word in words]


def streams(masks: RoundMasks, part: str) -> list[Mask]:
    return [Mask(key=s.key, sign=s.sign) for s in getattr(masks, part)]


class Game:
    """One round; ``play`` gives the two sums, or raises what ended it."""

    def __init__(self, run: Run, kind: Kind, values: Mapping[int, Values]) -> None:
        run.round_index += 1
        self.run, self.kind, self.values = run, kind, values
        self.facts = RoundFacts(
            round_index=run.round_index,
            cohort=run.contract.cohort,
            model_digest=MODEL,
            task_digest=MODEL,
        )
        self.server = AggregatorRound(setup=run.record, facts=self.facts)
        self.total = MaskedSum(NUM_VALUES, kind.ring)
        self.header = np.zeros(NUM_SLOTS, np.uint64)

    def play(self, drops: Drops) -> tuple[list[int], list[int]]:
        self.answer(drops)
        if self.run.contract.setting is Setting.P2:
            self.reveal(drops)
        corrections = self.server.corrections()
        self.total.apply_masks_(streams(corrections, "vector"))
        prg.apply_masks_(self.header, streams(corrections, "header"))
        found = signed(self.total._sum_d, self.kind.bits)
        return found, signed(self.header, 64)

    def answer(self, drops: Drops) -> None:
        """R1."""
        late = []
        for i, session in self.run.sessions.items():
            if i in drops.absent:
                continue
            masks = session.begin_round(self.facts)
            if i in drops.declines:
                self.server.on_decline(session.decline())
                continue
            vector = on_wire(self.values[i].vector, self.kind.bits)
            header = on_wire(self.values[i].header, 64)
            prg.apply_masks_(vector, streams(masks, "vector"))
            prg.apply_masks_(header, streams(masks, "header"))
            digests = {
                "vector_digest": hashlib.sha256(vector).digest(),
                "header_digest": hashlib.sha256(header).digest(),
            }
            data = session.finish_masked(**digests)
            if i in drops.late:
                late.append((data, digests))
                continue
            self.server.on_masked(data, **digests)
            self.total.fold_(vector)
            self.header += header
        try:
            self.server.close_masked()
        finally:
            for data, digests in late:
                with pytest.raises(OutOfOrder):
                    self.server.on_masked(data, **digests)

    def reveal(self, drops: Drops) -> None:
        """R2 and R3."""
        request = self.server.survivors()
        alive = [i for i in self.run.sessions if i not in drops.silent]
        alive = [i for i in alive if i not in drops.no_consent]
        for i in alive:
            self.server.on_consent(self.run.sessions[i].on_survivors(request))
        self.server.close_consents()
        for i in [x for x in alive if x not in drops.no_shares]:
            reveal = self.server.reveal(site_name(i))
            self.server.on_shares(self.run.sessions[i].on_reveal(reveal))


def check(run: Run, kind: Kind, drops: Drops, rng: random.Random) -> None:
    """The property itself."""
    values = values_of(kind, rng)
    game = Game(run, kind, values)
    answered = [i for i in values if i not in drops.silent]
    left = [len(answered) - len(drops.no_consent)]
    left.append(left[0] - len(drops.no_shares))
    several = kind.threshold < kind.num_sites
    enough = len(answered) >= max(kind.threshold, kind.min_sites)
    enough = enough and (not several or min(left) >= kind.threshold)
    if not enough:
        with pytest.raises(TooFewSites):
            game.play(drops)
        # Nor is it opened by asking again.
        with pytest.raises((TooFewSites, OutOfOrder)):
            game.server.corrections()
        return
    vector, header = game.play(drops)
    rows = [values[i] for i in answered]
    assert [sum(c) for c in zip(*(r.vector for r in rows), strict=True)] == vector
    assert [sum(c) for c in zip(*(r.header for r in rows), strict=True)] == header


def draw_drops(kind: Kind, sizes: tuple[int, ...], rng: random.Random) -> Drops:
    """Random sites, as many as asked for and there are."""
    order = rng.sample(range(1, kind.num_sites + 1), kind.num_sites)
    several = kind.threshold < kind.num_sites
    sets = []
    for size in sizes[: 5 if several else 3]:
        sets.append(frozenset(order[:size]))
        order = order[size:]
    sets += [frozenset()] * (5 - len(sets))
    return Drops(*sets)


@st.composite
def kinds(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Kind:
    """Every threshold that the contract allows."""
    num_sites = draw(sizes)
    threshold = draw(st.integers(2 * num_sites // 3 + 1, num_sites))
    bits = draw(st.sampled_from([16, 24, 32] if num_sites <= 16 else [24, 32]))
    usual = min(3, num_sites)
    highest = draw(st.sampled_from([usual, usual, num_sites]))
    return Kind(num_sites, threshold, highest, bits)


@st.composite
def steps(draw: st.DrawFn, kind: Kind) -> tuple[int, ...]:
    """How many are lost at each of five occasions: mostly about as many as may be."""
    room = kind.num_sites - kind.threshold
    left = draw(st.sampled_from([0, room, room, room, room + 1, room + 2]))
    sizes = []
    for _ in range(4):
        sizes.append(draw(st.integers(0, left)))
        left -= sizes[-1]
    sizes.append(left if draw(st.booleans()) else 0)
    return tuple(sizes)


@st.composite
def cases(
    draw: st.DrawFn, sizes: st.SearchStrategy[int]
) -> tuple[Kind, Drops, random.Random]:
    kind = draw(kinds(sizes))
    lost = draw(st.permutations(draw(steps(kind))))
    rng = random.Random(draw(st.integers(0, 2**64 - 1)))  # noqa: S311  # No secret.
    return kind, draw_drops(kind, tuple(lost), rng), rng


# Rounds grow with the cube of the number of sites: most cases are small ones.
SMALL = st.sampled_from([2, 3, 4, 4, 4, 5, 5, 5, 6, 6, 7, 8])
MEDIUM = st.sampled_from([9, 10, 10, 11, 12, 12, 13, 16])
Case = tuple[Kind, Drops, random.Random]


def every_step(room: int, occasions: int) -> Iterator[tuple[int, ...]]:
    """How many may be lost at each occasion: up to two more than there is room for."""
    for sizes in itertools.product(range(room + 3), repeat=occasions):
        if sum(sizes) <= room + 2:
            yield sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_sites", "threshold"),
    [
        pytest.param(n, t, marks=[pytest.mark.long] * (n > 6))
        for n in range(2, 9)
        for t in range(2 * n // 3 + 1, n + 1)
    ],
)
def test_few_sites(num_sites: int, threshold: int):
    """2 to 8 sites: every number of dropouts at every step."""
    rng = random.Random(100 * num_sites + threshold)  # noqa: S311  # No secret.
    room = num_sites - threshold
    for sizes in every_step(room, 5 if room else 3):
        usual = min(3, num_sites)
        lowest = rng.choice([usual, usual, num_sites])
        kind = Kind(num_sites, threshold, lowest, rng.choice([16, 24, 32]))
        check(pooled(kind), kind, draw_drops(kind, sizes, rng), rng)


@pytest.mark.slow
@few(20)  # `test_ten_thousand_cases` has the rest.
@given(case=cases(MEDIUM))
def test_more_sites(case: Case):
    """9 to 16 sites."""
    kind, drops, rng = case
    check(pooled(kind), kind, drops, rng)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_sites", "bits", "lost"),
    [
        (24, 24, (1, 2, 1, 2, 1)),
        (40, 32, (14, 0, 0, 0, 0)),
        # The setup of 64 sites takes seconds.
        pytest.param(64, 32, (5, 0, 6, 4, 6), marks=pytest.mark.long),
    ],
)
def test_many_sites(num_sites: int, bits: int, lost: tuple[int, ...]):
    """The lowest threshold: within what it tolerates, or one site beyond it."""
    kind = Kind(num_sites, 2 * num_sites // 3 + 1, 3, bits)
    rng = random.Random(num_sites)  # noqa: S311  # No secret.
    check(pooled(kind), kind, draw_drops(kind, lost, rng), rng)


@pytest.mark.slow
def test_64_sites_in_one_exchange():
    """P1 at the most sites that a contract may have; then one of them is silent."""
    kind = Kind(64, 64, 3, 32)
    rng = random.Random(64)  # noqa: S311  # No secret.
    for lost in ((0, 0, 0), (0, 0, 1)):
        check(pooled(kind), kind, draw_drops(kind, lost, rng), rng)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=10_000)
@given(case=cases(st.one_of(SMALL, SMALL, SMALL, st.integers(2, 16))))
def test_ten_thousand_cases(case: Case):
    """2 to 16 sites."""
    kind, drops, rng = case
    check(pooled(kind), kind, drops, rng)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_sites", range(2, 65))
def test_every_number_of_sites(num_sites: int):
    """2 to 64: one exchange, the lowest threshold, and one site too many lost."""
    rng = random.Random(num_sites)  # noqa: S311  # No secret.
    bits = rng.choice([16, 24, 32] if num_sites <= 16 else [24, 32])
    lowest = 2 * num_sites // 3 + 1
    for threshold in {lowest, num_sites}:
        kind = Kind(num_sites, threshold, min(3, num_sites), bits)
        run, room = set_up(kind), num_sites - threshold
        check(run, kind, draw_drops(kind, (0, 0, room, 0, 0), rng), rng)
        check(run, kind, draw_drops(kind, (0, room // 2, 0, 0, room // 2), rng), rng)
        check(run, kind, draw_drops(kind, (0, 0, room, 0, 1), rng), rng)


@st.composite
def unfinished(draw: st.DrawFn) -> tuple[Kind, frozenset[int], frozenset[int]]:
    """A small run whose adverts, or confirms, are not all there at first."""
    kind = draw(kinds(st.integers(2, 6)))
    everybody = st.sampled_from(range(1, kind.num_sites + 1))
    adverts = draw(st.frozensets(everybody))
    return kind, adverts, draw(st.frozensets(everybody))


@pytest.mark.slow
@few(30)
@given(case=unfinished(), hybrid=st.booleans(), seed=st.integers(0, 2**64 - 1))
def test_dropouts_of_the_setup(
    case: tuple[Kind, frozenset[int], frozenset[int]], *, hybrid: bool, seed: int
):
    """S1 and S2: no run begins without a site; with it, late, it begins as usual."""
    kind, adverts, confirms = case
    kind = replace(kind, hybrid=hybrid)
    begun = Setup(kind)
    everybody = frozenset(begun.sites)
    begun.advertise(adverts)
    if adverts != everybody:
        with pytest.raises(TooFewSites):
            begun.aggregator.book()
        begun.advertise(everybody - adverts)
    begun.confirm(confirms)
    if confirms != everybody:
        with pytest.raises(TooFewSites):
            begun.aggregator.result()
        begun.confirm(everybody - confirms)
    rng = random.Random(seed)  # noqa: S311  # No secret.
    room = kind.num_sites - kind.threshold
    drops = draw_drops(kind, (0, 0, room, 0, 0), rng)
    check(begun.finish(), kind, drops, rng)
