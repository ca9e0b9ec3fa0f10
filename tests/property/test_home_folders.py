"""What a home names it has, and what has left is there, whoever removes what."""

import contextlib
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.awkward_store import AwkwardStore, Fate
from support.homes import Machine, first

from clients.home.folder_copy import LARGE_BYTES, FolderCopy
from clients.home.lease import read_head
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import HomeConflict, StoreUnavailable

pytestmark = pytest.mark.slow

NUM_MACHINES = 3
MACHINES = st.integers(0, NUM_MACHINES - 1)
SIZES = st.sampled_from([0, 100, LARGE_BYTES + 1])
FATES: st.SearchStrategy[Fate] = st.sampled_from(
    ["well", "well", "well", "lost", "late", "away"]
)
NOTES, STATE = "runs/a/notes", "runs/a/state-0000000001"


class Folders(RuleBasedStateMachine):
    """Processes that crash, machines that are lost, and one home."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.store = AwkwardStore(MemoryStore())
        folder = Path(self.place.name)
        self.machines = [first(folder / "0", self.store)]
        self.machines += [
            Machine(folder / str(n), self.store) for n in range(1, NUM_MACHINES)
        ]
        self.left: list[str] = []
        self.num_notes = 0

        assert self.machines[0].enter()

    def teardown(self) -> None:
        self.place.cleanup()

    def _start(self, one: int, *, take_over: bool = True) -> None:
        """A new process in a folder; it looks a few times and gives up."""
        self.machines[one] = Machine(self.machines[one].folder, self.store)
        with contextlib.suppress(StoreUnavailable, HomeConflict):
            self.machines[one].enter(take_over=take_over, looks=30)

    def _note(self, one: int, size: int) -> None:
        """Change files, and confirm; what is confirmed may leave."""
        machine = self.machines[one]
        self.num_notes += 1
        note = f"note-{self.num_notes}"
        for name, text in ((NOTES, f"{note}\n"), (STATE, "x" * size)):
            path = machine.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if name == NOTES else "w") as file:
                file.write(text)
        with contextlib.suppress(StoreUnavailable, HomeConflict):
            machine.home.confirm()
            self.left.append(note)

    def _holder(self) -> int:
        found = read_head(self.store.store)
        assert found is not None
        holders = [m.home.lease.holder for m in self.machines]
        return holders.index(found[0].holder) if found[0].holder in holders else 0

    @rule(one=MACHINES, take_over=st.booleans(), fate=FATES)
    def start(self, one: int, *, take_over: bool, fate: Fate) -> None:
        self.store.fates = [fate]
        self._start(one, take_over=take_over)
        self.store.fates = []

    @rule(size=SIZES, before=st.integers(0, 2), fate=FATES)
    def note(self, size: int, before: int, fate: Fate) -> None:
        """One of its writes fails, in one way or another."""
        self.store.fates = ["well"] * before + [fate]
        self._note(self._holder(), size)

    @rule(one=MACHINES, size=SIZES)
    def note_somewhere(self, one: int, size: int) -> None:
        self._note(one, size)
        self._start(one)
        self._note(one, size)

    @rule(other=MACHINES, before=st.booleans())
    def note_while_another_starts(self, other: int, *, before: bool) -> None:
        """Before its pack is written, or the head."""
        start = partial(self._start, other)

        def later() -> None:
            self.store.meanwhile = start

        self.store.meanwhile = start if before else later
        self._note(self._holder(), 100)
        self.store.meanwhile = None

    @rule(one=MACHINES)
    def lose_a_disk(self, one: int) -> None:
        folder = self.machines[one].folder
        new = folder.with_name(f"{folder.name}-{one}")
        self.machines[one] = Machine(new, self.store)

    @rule()
    def deliver(self) -> None:
        self.store.deliver()

    @invariant()
    def nothing_is_missing(self) -> None:
        """Every piece that the head names is there, and every answer's note."""
        found = read_head(self.store.store)
        assert found is not None
        copy = FolderCopy(folder=Path(), store=self.store.store, names=())
        files = {file.path: copy.content(file) for file in found[0].files}
        notes = files.get(NOTES, b"").decode().split()
        assert set(self.left) <= set(notes)


def test_a_home_has_what_it_names_and_what_has_left():
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Folders, settings=settings(max_examples=15, stateful_step_count=25)
    )
