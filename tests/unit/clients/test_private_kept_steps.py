"""Private steps over an interruption: charged once, and in one answer at most."""

import random
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.private_tokens import (
    EVENT,
    LEDGER,
    NOISES,
    STATE,
    STEPS,
    TERMS,
    Agent,
    Killed,
)

from federation.clock import VirtualClock
from federation.messages import NO_ANCHOR, LedgerAnchor
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger_recovery import recover

Answer = tuple[int, ...]


class Ticking(VirtualClock):
    """No two entries of a ledger have the same time."""

    def now(self) -> float:
        self.sleep(1.0)
        return super().now()


class World:
    """A site's folder, what it has sent, and what the aggregator knows of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Ticking(1.8e9)
        self.sent: list[Answer] = []
        self.anchor = NO_ANCHOR
        self.events: list[PrivacyEvent] = []

    def ask(
        self,
        round_index: int = 1,
        model: float = 1.0,
        *,
        leaves_after: int = 0,
        dies_after: int = 0,
        every_seconds: float = 0.0,
        num_steps: int = STEPS,
        level: int = 0,
    ) -> Answer:
        """Ask a new process for a round; return what it sends, if anything.

        Raises:
            LedgerBehind: It does not begin.
        """
        agent = Agent(
            self.folder,
            self.clock,
            anchor=self.anchor,
            leaves_after=leaves_after,
            dies_after=dies_after,
            every_seconds=every_seconds,
            level=level,
        )
        found: Answer = ()
        with closing(agent.ledger):
            with suppress(Killed):
                found = agent.answer(round_index, model, num_steps)
            if found:
                self.sent.append(found)
                self.anchor = self.anchor.joined(agent.ledger.anchor())
            self.events = [charge.event for charge in agent.ledger.charges()]
        self.check()
        return found

    @property
    def charged(self) -> list[int]:
        return [event.steps for event in self.events]

    def check(self) -> None:
        """No answer is of steps that the ledger does not show, with their noise."""
        tokens = {token for answer in self.sent for token in answer}
        for level, noise in enumerate(NOISES):  # Less noise costs more.
            paid = [e.steps for e in self.events if e.noise_multiplier <= noise]
            made = sum(token % 2 <= level for token in tokens)
            assert made <= sum(paid), (self.sent, self.events)

    def recover(self, anchor: LedgerAnchor | None = None) -> None:
        recover(
            self.folder / LEDGER,
            TERMS,
            anchor=self.anchor if anchor is None else anchor,
            events={"train": replace(EVENT, steps=STEPS + 1)},
            clock=self.clock,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "site")


@pytest.mark.parametrize("after", range(1, STEPS + 1))
@pytest.mark.parametrize("round_index", [1, 2])
def test_interrupted_round_costs_what_an_undisturbed_one_does(
    world: World, after: int, round_index: int
):
    """Also as the next round, where a secure sum counts each number once."""
    assert world.ask(leaves_after=after) == ()
    assert len(world.ask(round_index)) == STEPS
    assert world.charged == [STEPS, 0]
    assert not (world.folder / STATE).exists()
    world.ask(round_index + 1, 2.0)
    assert world.charged == [STEPS, 0, STEPS]


def test_each_machine_that_leaves_in_order_hands_the_round_on(world: World):
    for _ in range(STEPS):
        assert world.ask(leaves_after=1) == ()
    world.ask()
    assert world.charged == [STEPS, 0, 0, 0]


def test_kept_steps_are_those_of_the_answer(world: World):
    """They are not drawn again: no one could look for the better ones."""
    world.ask(leaves_after=2)
    kept = (world.folder / STATE).read_bytes()
    one = world.ask()
    (world.folder / STATE).write_bytes(kept)
    other = world.ask()  # The same two, in another answer: paid for.
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert world.charged == [STEPS, 0, STEPS]


def test_another_model_begins_anew_with_what_was_paid(world: World):
    """Nothing of the first round has left, so that it is no second answer."""
    world.ask(leaves_after=2)
    world.ask(2, model=2.0)
    assert world.charged == [STEPS, 0]


@pytest.mark.parametrize("num_steps", [1, STEPS + 1])
def test_a_round_of_other_steps_is_paid_for_by_itself(world: World, num_steps: int):
    """And begins anew: it might have more of them than it was charged for."""
    world.ask(leaves_after=2)
    assert len(world.ask(num_steps=num_steps)) == num_steps
    assert world.charged == [STEPS, num_steps]


def test_steps_with_other_noise_are_not_continued(world: World):
    """As after records came or went: a copy of dropped ones would be in an answer."""
    world.ask(leaves_after=2)
    kept = (world.folder / STATE).read_bytes()
    world.ask(2, model=2.0)
    (world.folder / STATE).write_bytes(kept)
    world.ask(level=1)
    assert world.charged == [STEPS, 0, STEPS]


def test_no_charge_has_two_answers(world: World):
    """The same task again, whatever of the kept steps is put back."""
    world.ask(leaves_after=1)
    kept = (world.folder / STATE).read_bytes()
    world.ask()
    for again in (1, 2, 1):
        (world.folder / STATE).write_bytes(kept)
        world.ask(again)
    assert world.charged == [STEPS, 0, STEPS, STEPS, STEPS]


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9])


@pytest.mark.parametrize("spoil", [lose, cut])
def test_lost_steps_are_paid_for_again(world: World, spoil: Callable[[Path], None]):
    """What was charged stays charged."""
    world.ask(leaves_after=2)
    spoil(world.folder / STATE)
    world.ask()
    assert world.charged == [STEPS, STEPS]


def test_damaged_steps_are_taken_again_for_what_was_paid(world: World):
    """None of them has left."""
    world.ask(leaves_after=2)
    content = bytearray((world.folder / STATE).read_bytes())
    content[-40] ^= 1
    (world.folder / STATE).write_bytes(content)
    world.ask()
    assert world.charged == [STEPS, 0]


def test_a_killed_process_has_lost_its_charge(world: World):
    """It may have been killed by what its steps led to; copies save the steps only."""
    world.ask(dies_after=2, every_seconds=1e-9)
    assert (world.folder / STATE).exists()
    world.ask(dies_after=2)
    world.ask(leaves_after=1)
    world.ask(dies_after=3)
    world.ask()
    assert world.charged == [STEPS, STEPS, STEPS, 0, STEPS]


@pytest.mark.parametrize("put_back", [False, True])
def test_a_ledger_from_before_the_answer_is_refused(world: World, put_back: bool):  # noqa: FBT001
    """With the kept steps of that time, or without: the aggregator knows of more."""
    world.ask(leaves_after=1)
    before = world.folder.with_name("before")
    shutil.copytree(world.folder, before)
    world.ask()
    shutil.rmtree(world.folder / LEDGER)
    shutil.copytree(before / LEDGER, world.folder / LEDGER)
    if put_back:
        shutil.copytree(before / "sites", world.folder / "sites", dirs_exist_ok=True)
    with pytest.raises(LedgerBehind):
        world.ask()
    world.recover()
    world.ask()
    assert world.charged == [STEPS, STEPS + 1, STEPS]


def test_an_entry_in_the_place_of_a_lost_one_is_another(world: World):
    """Kept steps name the lost one, which no answer's anchor shows to be missing."""
    world.ask()
    shutil.copytree(world.folder / LEDGER, world.folder / "before")
    world.ask(2, leaves_after=1)
    kept = (world.folder / STATE).read_bytes()
    shutil.rmtree(world.folder / LEDGER)
    shutil.copytree(world.folder / "before", world.folder / LEDGER)
    (world.folder / STATE).unlink()
    world.ask(2)
    (world.folder / STATE).write_bytes(kept)
    world.ask(2)
    assert world.charged == [STEPS, STEPS, STEPS]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_answer_is_of_steps_that_were_not_charged(
    world: World, seed: int
):
    """Interrupted, killed, copied, put back and asked again in any order."""
    draw = random.Random(seed)  # noqa: S311 -- no secret
    state, olds = world.folder / STATE, list[bytes]()
    places = [world.folder.with_name(f"place-{number}") for number in range(2)]
    for _ in range(25):
        if state.exists() and draw.random() < 0.5:
            olds.append(state.read_bytes())
        what = draw.randrange(12)
        if what == 0 and state.exists():
            state.unlink()
        elif what <= 2 and olds:
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_bytes(draw.choice(olds))
        elif what == 3 and (world.folder / LEDGER).exists():
            place = draw.choice(places)
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(world.folder, place)
        elif what == 4 and (place := draw.choice(places)).exists():
            whole = draw.random() < 0.5
            old, new = (
                (place, world.folder)
                if whole
                else (
                    place / LEDGER,
                    world.folder / LEDGER,
                )
            )
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(old, new)
        try:
            world.ask(
                draw.choice([1, 1, 2]),
                draw.choice([1.0, 1.0, 2.0]),
                leaves_after=draw.choice([0, 0, 1, 2, 3]),
                dies_after=draw.choice([0, 0, 0, 1, 2, 3]),
                every_seconds=draw.choice([0.0, 1e-9]),
                num_steps=draw.choice([1, STEPS, STEPS, STEPS, STEPS + 1]),
                level=draw.choice([0, 0, 0, 1]),
            )
        except LedgerBehind:
            world.recover()
    assert world.sent
