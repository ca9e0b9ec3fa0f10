"""Machines of one site never both spend, whatever stores, clocks and pauses do."""

import contextlib
from dataclasses import dataclass, field
from functools import partial

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.awkward_store import AwkwardStore

from clients.home.lease import HomeLease, StoredFile, read_head
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.errors import HomeConflict, StoreUnavailable

NUM_MACHINES = 3
MACHINES = st.integers(0, NUM_MACHINES - 1)
LOOKS = 30


@dataclass
class Machine:
    """A process that may hold the home; its clock is its own."""

    store: AwkwardStore
    name: str
    clock: VirtualClock = field(default_factory=VirtualClock)
    lease: HomeLease | None = None

    def start(self, *, take_over: bool) -> None:
        lease = HomeLease(
            self.store, self.clock, site="a", node=self.name, seconds=10.0
        )
        looks = iter(range(LOOKS))

        def wait(seconds: float) -> bool:
            self.clock.sleep(seconds)
            return next(looks, None) is None

        with contextlib.suppress(StoreUnavailable):
            lease.acquire(wait=wait, listener=print, take_over=take_over)
        self.lease = lease

    def charge(self, path: str) -> bool:
        """Whether a charge is confirmed, so that its answer may leave."""
        if self.lease is None:
            return False
        try:
            files = (*self.lease.head.files, StoredFile(path=path, pieces=()))
            self.lease.write(files)
        except (StoreUnavailable, HomeConflict):
            return False
        return True


class Site(RuleBasedStateMachine):
    """What left is what the home says; and fences only rise."""

    def __init__(self) -> None:
        super().__init__()
        self.store = AwkwardStore(MemoryStore())
        self.machines = [Machine(self.store, f"m{n}") for n in range(NUM_MACHINES)]
        self.left: list[str] = []
        self.num_charges = 0
        self.fence = 0

    @rule(one=MACHINES, take_over=st.booleans())
    def start(self, one: int, *, take_over: bool) -> None:
        self.machines[one].start(take_over=take_over)

    @rule(one=MACHINES)
    def charge(self, one: int) -> None:
        self.num_charges += 1
        path = f"charge-{self.num_charges}"
        if self.machines[one].charge(path):
            self.left.append(path)

    @rule(one=MACHINES, other=MACHINES)
    def charge_while_another_starts(self, one: int, other: int) -> None:
        """A machine is paused between its look and its write."""
        start = self.machines[other].start
        self.store.meanwhile = partial(start, take_over=True)
        self.charge(one)
        self.store.meanwhile = None

    @rule(one=MACHINES, released=st.booleans())
    def renew(self, one: int, *, released: bool) -> None:
        lease = self.machines[one].lease
        if lease is not None:
            with contextlib.suppress(StoreUnavailable, HomeConflict):
                lease.write(released=released)

    @rule(one=MACHINES, seconds=st.floats(0.0, 100.0))
    def pass_time(self, one: int, seconds: float) -> None:
        self.machines[one].clock.sleep(seconds)

    @rule(fate=st.sampled_from(["lost", "late", "away"]))
    def spoil_the_next_write(self, fate: str) -> None:
        self.store.fates.append(fate)  # type: ignore[arg-type]

    @rule()
    def deliver(self) -> None:
        self.store.deliver()

    @rule(is_away=st.booleans())
    def come_and_go(self, *, is_away: bool) -> None:
        self.store.is_away = is_away

    @invariant()
    def every_answer_was_charged(self) -> None:
        found = read_head(self.store.store)
        known = [] if found is None else [file.path for file in found[0].files]
        assert [path for path in known if path in self.left] == self.left
        assert len(set(known)) == len(known)

    @invariant()
    def fences_rise(self) -> None:
        found = read_head(self.store.store)
        now = 0 if found is None else found[0].fence
        assert now >= self.fence
        self.fence = now


def test_machines_never_both_spend():
    """Three of them, in any order of what can happen."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Site, settings=settings(max_examples=60, stateful_step_count=40)
    )
