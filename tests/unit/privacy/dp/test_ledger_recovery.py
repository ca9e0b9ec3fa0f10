"""Charges that a ledger has lost are made again: an upper bound, whatever is left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from federation.clock import VirtualClock
from federation.errors import PrivacyError
from federation.messages import LedgerAnchor
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_files import HEAD_NAME, LEDGER_NAME, read_file
from privacy.dp.ledger.ledger_format import Purpose, Terms
from privacy.dp.ledger.ledger_recovery import (
    MAX_RECOVERED,
    RecoveryResult,
    recover,
)

CLOCK = VirtualClock(1_800_000_000.0)
TERMS = Terms(run_id="r", site="one", job_digest="ab" * 32, delta=1e-5, epsilon_cap=9)
TRAIN, HELD_OUT, ONCE = (
    PrivacyEvent(noise_multiplier=n, sampling_rate=1, steps=1, slack=0.0)
    for n in (10.0, 20.0, 30.0)
)
EVENTS: dict[Purpose, PrivacyEvent] = {"train": TRAIN, "evaluate": HELD_OUT}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ledger with two rounds: each trained, and was evaluated."""
    ledger = FileLedger(tmp_path / "one", TERMS, clock=CLOCK)
    for round_index in (1, 2):
        releases = [(TRAIN, "train"), (HELD_OUT, "evaluate")]
        ledger.charge_all(releases, round_index=round_index)  # type: ignore[arg-type]
    ledger.close()
    return tmp_path / "one"


def recovered(folder: Path, train: int, evaluate: int) -> RecoveryResult:
    anchor = LedgerAnchor(train=train, evaluate=evaluate)
    return recover(
        folder, TERMS, anchor=anchor, events=EVENTS, once=(ONCE,), clock=CLOCK
    )


def charged(folder: Path, purpose: Purpose) -> list[PrivacyEvent]:
    return [*read_file(folder / LEDGER_NAME).events(purpose)]


def test_what_is_missing_is_charged(folder: Path):
    """What is charged once comes first, even above the cap; the rest as a round's."""
    found = recovered(folder, 4, 3)
    assert (found.before, found.set_aside) == (LedgerAnchor(train=2, evaluate=2), None)
    assert found.after == LedgerAnchor(train=4, evaluate=3)
    assert charged(folder, "train") == [TRAIN, TRAIN, ONCE, TRAIN]
    assert charged(folder, "evaluate") == [HELD_OUT] * 3
    assert recovered(folder, 1, 1).after == found.after  # Nothing is given back.


def cut(line: int) -> Callable[[Path], None]:
    """Lose every line from one on."""

    def damage(folder: Path) -> None:
        path = folder / LEDGER_NAME
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:line]))

    return damage


def spoil(old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / LEDGER_NAME
        lines = path.read_bytes().splitlines(keepends=True)
        assert old in lines[1]
        lines[1] = lines[1].replace(old, new)
        path.write_bytes(b"".join(lines))

    return damage


def lose(folder: Path) -> None:
    (folder / LEDGER_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "train", "evaluate"),
    [
        (cut(4), 3, 2),  # The lost line may have been of either.
        (cut(1), 4, 4),
        (lose, 4, 4),
        (spoil(b'"train"', b'"other"'), 2, 3),
        (spoil(b"{", b"["), 2, 3),
        (spoil(b'"purpose"', b'"pose"'), 2, 3),
    ],
)
def test_what_cannot_be_read_counts_for_both(
    folder: Path, damage: Callable[[Path], None], train: int, evaluate: int
):
    """The anchor may be older than what was charged."""
    damage(folder)
    found = recovered(folder, 1, 1)
    assert found.after == LedgerAnchor(train=train, evaluate=evaluate)
    assert found.set_aside is not None
    assert (found.set_aside / HEAD_NAME).exists()


def test_what_no_run_charges_is_refused(folder: Path):
    """A purpose that this run has not, and more rounds than any run has."""
    with pytest.raises(LedgerBehind, match="the number is wrong"):
        recovered(folder, MAX_RECOVERED + 1, 0)
    anchor = LedgerAnchor(train=2, evaluate=3)
    with pytest.raises(PrivacyError, match="1 charges of 'evaluate'"):
        recover(folder, TERMS, anchor=anchor, events={"train": TRAIN}, clock=CLOCK)
