"""A ledger shows what was spent, or says that it cannot."""

import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from federation.clock import VirtualClock
from federation.errors import BudgetExceeded, FederationError, StoreUnavailable
from federation.messages import LedgerAnchor
from privacy.dp import accountant
from privacy.dp.errors import (
    ClockWentBackwards,
    LedgerBehind,
    LedgerBusy,
    LedgerDamaged,
    LedgerMismatch,
    LedgerShortened,
)
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger import ledger_files, ledger_format
from privacy.dp.ledger.ledger import (  # type: ignore[attr-defined]
    CLOCK_TOLERANCE_SECONDS,
    FileLedger,
    InMemoryLedger,
    Ledger,
    Terms,
)

START = 1_800_000_000.0
EVENT = PrivacyEvent(noise_multiplier=10, sampling_rate=1, steps=2, slack=1e-15)
TERMS = Terms(
    run_id="run-1", site="one", job_digest="ab" * 32, delta=1e-5, epsilon_cap=2
)


def opened(folder: Path, terms: Terms = TERMS, at: float = START) -> FileLedger:
    return FileLedger(folder, terms, clock=VirtualClock(at))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed ledger with three charges."""
    ledger = opened(tmp_path / "one")
    for round_index in range(3):
        ledger.charge(EVENT, round_index=round_index)
    ledger.close()
    return tmp_path / "one"


@pytest.fixture(params=["memory", "files"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    clock = VirtualClock(START)
    kept: FileLedger | InMemoryLedger
    if request.param == "memory":
        kept = InMemoryLedger(TERMS, clock=clock)
    else:
        kept = FileLedger(tmp_path, TERMS, clock=clock)
    yield kept
    kept.close()


def test_charge_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The line first, then the head, which must not name a line that may be lost."""
    ledger = opened(tmp_path / "one")
    flushed, fsync = [], os.fsync

    def watched(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    ledger.charge(EVENT, round_index=0)
    ledger.close()
    line, head = flushed.index("ledger.jsonl"), flushed.index("ledger.new")
    assert line < head < flushed.index("one")


def test_charges_add_up(ledger: Ledger):
    """To what the accountant says of the same events."""
    found = [ledger.charge(EVENT, round_index=i) for i in range(3)]
    want = [accountant.epsilon([EVENT] * n, TERMS.delta) for n in (1, 2, 3)]
    assert found == want
    assert ledger.epsilon() == want[-1]
    assert [c.epsilon_after for c in ledger.charges()] == want
    assert [c.seq for c in ledger.charges()] == [1, 2, 3]


def test_purposes_are_counted_apart(ledger: Ledger):
    """Held-out records are other records."""
    spent = ledger.charge(EVENT, round_index=1)
    assert ledger.charge(EVENT, round_index=1, purpose="evaluate") == spent
    assert ledger.epsilon("train") == ledger.epsilon("evaluate") == spent


def test_the_cap_holds(ledger: Ledger):
    """The refusal has both numbers, costs nothing, and a smaller charge may fit."""
    while ledger.epsilon() < 1.5:
        ledger.charge(EVENT, round_index=1)
    before, spent = ledger.charges(), ledger.epsilon()
    large = replace(EVENT, steps=100)
    with pytest.raises(BudgetExceeded, match=r"site 'one' to epsilon .* cap of 2 "):
        ledger.charge(large, round_index=2)
    with pytest.raises(BudgetExceeded) as caught:
        ledger.charge(large, round_index=2)
    assert caught.value.cap == 2
    assert caught.value.epsilon > 2
    assert (ledger.charges(), ledger.epsilon()) == (before, spent)
    ledger.charge(replace(EVENT, steps=1), round_index=2)


def test_what_has_no_epsilon_is_refused(ledger: Ledger):
    """Slack that uses up delta is beyond every cap."""
    with pytest.raises(BudgetExceeded, match="epsilon inf"):
        ledger.charge(replace(EVENT, slack=1e-5), round_index=1)


@pytest.mark.parametrize(("round_index", "purpose"), [(-1, "train"), (1, "other")])
def test_nonsense_is_refused(ledger: Ledger, round_index: int, purpose: str):
    """It would make a ledger that cannot be read again."""
    with pytest.raises(ValueError, match="no charge"):
        ledger.charge(EVENT, round_index=round_index, purpose=purpose)  # type: ignore[arg-type]


def test_callers_never_share_a_charge(ledger: Ledger):
    """Two threads, one chain."""
    small = replace(EVENT, noise_multiplier=100.0)

    def charge() -> None:
        for _ in range(5):
            ledger.charge(small, round_index=1)

    threads = [threading.Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [c.seq for c in ledger.charges()] == list(range(1, 21))


def test_a_clock_that_went_back_stops_the_site(tmp_path: Path):
    """Within a running site, and when it starts again; a small step is none."""
    clock = VirtualClock(START)
    ledger = FileLedger(tmp_path, TERMS, clock=clock)
    ledger.charge(EVENT, round_index=1)
    clock._seconds -= CLOCK_TOLERANCE_SECONDS
    ledger.charge(EVENT, round_index=2)
    clock._seconds -= 1
    with pytest.raises(ClockWentBackwards, match=r"shows 2027-01-15 07:59:54\+00:00"):
        ledger.charge(EVENT, round_index=3)
    ledger.close()
    with pytest.raises(ClockWentBackwards, match="old snapshot"):
        opened(tmp_path, at=START - 3600)
    opened(tmp_path).close()


def test_a_ledger_goes_on(folder: Path):
    """The same count, the same chain, after any number of restarts."""
    for more in range(2):
        ledger = opened(folder, at=START + more)
        ledger.charge(EVENT, round_index=3 + more)
        ledger.close()
        assert ledger.recovered == ""
    contents = ledger_files.read_file(folder / "ledger.jsonl")
    assert [c.round_index for c in contents.charges] == [0, 1, 2, 3, 4]
    want = accountant.epsilon([EVENT] * 5, TERMS.delta)
    assert contents.charges[-1].epsilon_after == want
    assert {p.name for p in folder.iterdir()} == {"ledger.jsonl", "ledger.head"}


def test_only_the_owner_reads_it(folder: Path):
    """Events say how a site trains."""
    assert (folder / "ledger.jsonl").stat().st_mode & 0o077 == 0


def test_one_writer_at_a_time(folder: Path):
    """The second is told, the first continues, and a reader may look."""
    first = opened(folder)
    with pytest.raises(LedgerBusy, match="another process is writing"):
        opened(folder)
    first.charge(EVENT, round_index=3)
    assert len(ledger_files.read_file(folder / "ledger.jsonl").charges) == 4
    first.close()
    opened(folder).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "run-2"),
        ("site", "two"),
        ("job_digest", "cd" * 32),
        ("delta", 1e-6),
        ("epsilon_cap", 3.0),
        ("unit", "site"),
    ],
)
def test_another_ledger_is_refused(folder: Path, field: str, value: object):
    """Every term is compared, and the message names the first that differs."""
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerMismatch, match=f"with {field} "):
        opened(folder, replace(TERMS, **{field: value}))
    assert (folder / "ledger.jsonl").read_bytes() == before


def lines(folder: Path) -> list[bytes]:
    return (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def put(folder: Path, found: list[bytes]) -> None:
    (folder / "ledger.jsonl").write_bytes(b"".join(found))


def _edit(folder: Path) -> None:
    found = lines(folder)
    put(folder, [*found[:2], found[2].replace(b'"steps":2', b'"steps":1'), found[3]])


def _reorder(folder: Path) -> None:
    found = lines(folder)
    put(folder, [found[0], found[2], found[1], found[3]])


def _cut_the_middle(folder: Path) -> None:
    found = lines(folder)
    put(folder, [*found[:2], found[3]])


def _double(folder: Path) -> None:
    found = lines(folder)
    put(folder, [*found, found[-1]])


def _respell(folder: Path) -> None:
    found = lines(folder)
    put(folder, [*found[:3], found[3].replace(b'":', b'": ')])


def _lose_header(folder: Path) -> None:
    put(folder, lines(folder)[1:])


def _splice(folder: Path) -> None:
    """An end of the ledger of another run, whole in itself."""
    other = opened(folder.parent / "other", replace(TERMS, run_id="run-2"))
    for round_index in range(3):
        other.charge(EVENT, round_index=round_index)
    other.close()
    put(folder, [*lines(folder)[:3], lines(folder.parent / "other")[3]])


def _not_json(folder: Path) -> None:
    put(folder, [*lines(folder), b"[" * 100_000 + b"\n"])


def _scribble_head(folder: Path) -> None:
    (folder / "ledger.head").write_text("4\n")


def _lose_head(folder: Path) -> None:
    (folder / "ledger.head").unlink()


def _rewrite(folder: Path) -> None:
    """A ledger of the same length, whole in itself, with the old head."""
    head = (folder / "ledger.head").read_bytes()
    for path in folder.iterdir():
        path.unlink()
    ledger = opened(folder)
    for round_index in range(3):
        ledger.charge(replace(EVENT, steps=1), round_index=round_index)
    ledger.close()
    (folder / "ledger.head").write_bytes(head)


DAMAGES = (
    _edit,
    _reorder,
    _cut_the_middle,
    _double,
    _respell,
    _lose_header,
    _splice,
    _not_json,
    _scribble_head,
    _lose_head,
    _rewrite,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused(folder: Path, damage: Callable[[Path], None]):
    """By whoever opens it and by whoever reads it; and nothing is mended."""
    damage(folder)
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerDamaged):
        opened(folder)
    with pytest.raises(LedgerDamaged):
        ledger_files.read_file(folder / "ledger.jsonl")
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_every_bit_counts(folder: Path):
    """One bit, anywhere in the lines, is noticed (every 13th of them)."""
    data = (folder / "ledger.jsonl").read_bytes()
    head = ledger_files.read_head(folder)
    for bit in range(0, 8 * len(data), 13):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LedgerDamaged):
            ledger_files.verify(bytes(flipped), head, "ledger")


def test_every_loss_at_the_end_is_noticed(folder: Path):
    """Whether a line or a byte is missing: the head knows."""
    data = (folder / "ledger.jsonl").read_bytes()
    for size in range(0, len(data), 37):
        (folder / "ledger.jsonl").write_bytes(data[:size])
        with pytest.raises(LedgerShortened, match="lines are missing"):
            opened(folder)


def test_a_lost_ledger_is_not_a_new_one(folder: Path):
    """Its head is still there."""
    (folder / "ledger.jsonl").unlink()
    with pytest.raises(LedgerShortened, match="has no complete line"):
        opened(folder)


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_a_torn_line_is_taken_away_and_noted(folder: Path, kept: int):
    """Of the charge that was being written when the site was stopped."""
    head = (folder / "ledger.head").read_bytes()
    whole = lines(folder)
    ledger = opened(folder)
    ledger.charge(EVENT, round_index=3)
    ledger.close()
    torn = lines(folder)[-1][:kept]
    put(folder, [*whole, torn])
    (folder / "ledger.head").write_bytes(head)

    assert ledger_files.read_file(folder / "ledger.jsonl").torn_bytes == len(torn)
    ledger = opened(folder)
    assert f"unfinished line of {len(torn)} bytes" in ledger.recovered
    assert len(ledger.charges()) == 3
    ledger.charge(EVENT, round_index=3)
    ledger.close()
    contents = ledger_files.read_file(folder / "ledger.jsonl")
    assert (contents.num_recoveries, contents.torn_bytes) == (1, 0)
    assert [c.seq for c in contents.charges] == [1, 2, 3, 5]


def test_a_line_ahead_of_its_head_counts(folder: Path):
    """The crash between the two: charged, though perhaps not released."""
    head = (folder / "ledger.head").read_bytes()
    ledger = opened(folder)
    ledger.charge(EVENT, round_index=3)
    ledger.close()
    (folder / "ledger.head").write_bytes(head)
    ledger = opened(folder)
    assert len(ledger.charges()) == 4
    ledger.close()
    assert (folder / "ledger.head").read_bytes() != head  # It has caught up.


@pytest.mark.parametrize("left", [b"", b'{"accountant":"pl'])
def test_a_ledger_that_was_never_begun_is_begun(tmp_path: Path, left: bytes):
    """Killed before its header was whole: nothing can have been charged."""
    (tmp_path / "ledger.jsonl").write_bytes(left)
    ledger = opened(tmp_path)
    ledger.charge(EVENT, round_index=0)
    ledger.close()
    assert len(ledger_files.read_file(tmp_path / "ledger.jsonl").charges) == 1


def test_what_cannot_be_kept_is_not_released(folder: Path):
    """A disk that fails: the charge is an error, until the disk can be written."""
    ledger = opened(folder)
    away = folder.rename(folder.parent / "away")
    folder.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="nothing is released"):
            ledger.charge(EVENT, round_index=3)
    assert len(ledger.charges()) == 3
    folder.unlink()
    away.rename(folder)
    ledger.charge(EVENT, round_index=4)
    # The line of the first try was written; it counts.
    assert [each.round_index for each in ledger.charges()] == [0, 1, 2, 3, 4]
    ledger.close()
    with pytest.raises(StoreUnavailable, match="open it again"):
        ledger.charge(EVENT, round_index=5)
    ledger = opened(folder)
    assert len(ledger.charges()) == 5
    ledger.close()


def test_a_ledger_that_lost_charges_with_its_disk_stays_closed(folder: Path):
    """What comes back has to hold all that was charged."""
    ledger = opened(folder)
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    ledger.charge(EVENT, round_index=3)
    away = folder.rename(folder.parent / "away")
    with pytest.raises(StoreUnavailable):
        ledger.charge(EVENT, round_index=4)
    away.rename(folder)
    for name, data in old.items():
        (folder / name).write_bytes(data)
    for _ in range(2):
        with pytest.raises(LedgerBehind):
            ledger.charge(EVENT, round_index=5)


def test_a_full_disk_is_tried_again(folder: Path):
    """A line that was written in part is removed, and the next charge counts."""
    ledger = opened(folder)
    kept, small = resource.getrlimit(resource.RLIMIT_FSIZE), 100
    size = (folder / ledger_files.LEDGER_NAME).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + small, kept[1]))
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="nothing is released"):
                ledger.charge(EVENT, round_index=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    ledger.charge(EVENT, round_index=4)
    assert [each.round_index for each in ledger.charges()] == [0, 1, 2, 4]
    assert "unfinished line" in ledger.recovered
    ledger.close()
    assert len(opened(folder).charges()) == 4


def test_a_ledger_behind_its_anchor_is_refused(folder: Path, tmp_path: Path):
    """One that goes on, and one that would be new; what is there stays as it was."""

    def anchored(place: Path, train: int) -> FileLedger:
        anchor, clock = LedgerAnchor(train=train), VirtualClock(START)
        return FileLedger(place, TERMS, clock=clock, anchor=anchor)

    before = (folder / ledger_files.LEDGER_NAME).read_bytes()
    with pytest.raises(LedgerBehind, match="known to have made 4 and 0"):
        anchored(folder, 4)
    assert (folder / ledger_files.LEDGER_NAME).read_bytes() == before
    with pytest.raises(LedgerBehind, match="holds 0 charges"):
        anchored(tmp_path / "new", 1)
    assert (tmp_path / "new" / ledger_files.LEDGER_NAME).read_bytes() == b""
    anchored(folder, 3).close()


def test_a_ledger_that_could_not_be_opened_is_not_locked(folder: Path):
    """Nor does it keep a file open, whatever was wrong with it."""
    head = folder / ledger_files.HEAD_NAME
    kept, num_open = head.read_bytes(), len([*Path("/proc/self/fd").iterdir()])
    head.unlink()
    head.mkdir()
    with pytest.raises(StoreUnavailable):
        opened(folder)
    head.rmdir()
    head.write_bytes(kept)
    ledger = opened(folder)
    with pytest.raises(LedgerBusy):
        opened(folder)
    ledger.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == num_open


def test_a_line_that_is_written_in_pieces_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A disk may take less than it is given."""
    write = os.write
    ledger = opened(folder)
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:100]))
    ledger.charge(EVENT, round_index=3)
    ledger.close()
    assert len(ledger_files.read_file(folder / ledger_files.LEDGER_NAME).charges) == 4


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    """Before anything is trained."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="cannot write the ledger"):
        opened(tmp_path / "file")
    with pytest.raises(StoreUnavailable, match="cannot read the ledger"):
        ledger_files.read_file(tmp_path / "nowhere" / "ledger.jsonl")


def forged(**change: object) -> bytes:
    """A ledger whose chain is right and whose only charge is not."""
    header, digest = ledger_format.header_line(TERMS, START)
    document = {
        "kind": "charge",
        "seq": 1,
        "round_index": 1,
        "purpose": "train",
        "event": EVENT.document(),
        "time": START,
        "epsilon_after": 1.0,
    }
    line, _ = ledger_format._line(document | change, digest)
    return header + line


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 2},
        {"seq": True},
        {"time": START - 1},
        {"time": 1},
        {"round_index": -1},
        {"round_index": 1.0},
        {"purpose": "other"},
        {"purpose": []},
        {"event": {}},
        {"event": EVENT.document() | {"steps": -1}},
        {"epsilon_after": -1.0},
        {"epsilon_after": "1"},
        {"more": 1},
        {"kind": "header"},
        {"kind": "other"},
        {"kind": "recovery"},
    ],
    ids=json.dumps,
)
def test_impossible_lines_are_refused(change: dict[str, object]):
    """Though their hashes fit."""
    ledger_format.read(forged(), "ledger")
    with pytest.raises(LedgerDamaged, match="ledger, line 2"):
        ledger_format.read(forged(**change), "ledger")


@pytest.mark.parametrize(
    "change", [{"delta": 0.0}, {"delta": 1.0}, {"epsilon_cap": 0.0}]
)
def test_terms_are_numbers_that_mean_something(change: dict[str, float]):
    """Refused otherwise."""
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(TERMS, **change)


def test_errors_are_of_the_tree():
    """Whoever handles a FederationError handles these."""
    for kind in (LedgerBusy, LedgerDamaged, LedgerMismatch, ClockWentBackwards):
        assert issubclass(kind, FederationError)
