"""Transcripts: written as messages pass, and read again with suspicion."""

import gc
import hashlib
import json
import re
import resource
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support import toy
from support.scripted_grid import ScriptedGrid, reply_to

from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.local.transcript import TranscriptGrid, check_fresh
from deploy.tools import transcript_bodies, transcript_reader as transcript
from federation.errors import (
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    StoreUnavailable,
    WireError,
)
from federation.ids import SiteId, TaskId
from federation.messages import Reply, SiteMessage, Task
from federation.rounds.coordinator import run_federation
from federation.rounds.gather import exchange
from federation.wire import frame as wire
from privacy.secagg.protocol.messages import Confirms, Decline

TASKS: list[Task] = [toy.task(), toy.secure_task()]
ANSWERS: list[SiteMessage] = [
    toy.update(),
    toy.masked(),
    toy.evaluation(),
    toy.failure(),
    toy.secure_answer(),
]
NAMES = [
    "000001-to-c-train.frame",
    "000002-to-c-survivors.frame",
    "000003-from-c-update.frame",
    "000004-from-c-masked-update.frame",
    "000005-from-c-evaluation.frame",
    "000006-from-c-failure.frame",
    "000007-from-c-survivors.frame",
]


class Script(ScriptedGrid):
    """A grid that says what it was told to say."""

    def __init__(self, messages: Sequence[SiteMessage] = tuple(ANSWERS)) -> None:
        super().__init__()
        self.messages = list(messages)

    def play(self, tasks: Sequence[tuple[TaskId, Task]]) -> Iterable[Reply]:
        del tasks
        while self.messages:
            yield reply_to(self.messages.pop(0), -1, bytes_down=1, bytes_up=2)


def written(folder: Path, script: Script | None = None) -> list[Reply]:
    grid = TranscriptGrid(script or Script(), folder)
    return list(exchange(grid, TASKS, deadline_seconds=1.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A transcript of one message of every kind."""
    written(tmp_path / "seen")
    return tmp_path / "seen"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows(folder: Path) -> list[dict[str, object]]:
    text = (folder / "index.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_message_becomes_its_wire_frame(folder: Path):
    """In order, byte for byte, in files of their own."""
    assert names(folder) == [*NAMES, "index.jsonl"]
    for name, message in zip(NAMES, [*TASKS, *ANSWERS], strict=True):
        assert (folder / name).read_bytes() == wire.encode_bytes(message)


def test_index_tells_of_every_file(folder: Path):
    """Size and digest are the file's."""
    found = rows(folder)
    assert [row["file"] for row in found] == NAMES
    for row in found:
        data = (folder / str(row["file"])).read_bytes()
        assert row["bytes"] == len(data)
        assert row["sha256"] == hashlib.sha256(data).hexdigest()
    assert {k: v for k, v in found[3].items() if k not in {"bytes", "sha256"}} == {
        "sequence": 4,
        "file": NAMES[3],
        "direction": "from",
        "site": "c",
        "round": 1,
        "kind": "masked-update",
        "step": None,
    }


def test_only_the_owner_can_read_it(folder: Path):
    """It may hold every site's update."""
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_used_folder_is_refused(folder: Path, tmp_path: Path):
    """One transcript a folder; an empty one will do."""
    before = names(folder)
    for attempt in (check_fresh, lambda path: TranscriptGrid(Script(), path)):
        with pytest.raises(ObjectExists, match="not empty: use a new folder"):
            attempt(folder)
    assert names(folder) == before
    (tmp_path / "empty").mkdir()
    check_fresh(tmp_path / "empty")
    check_fresh(tmp_path / "none")


def test_disk_errors_are_ours(tmp_path: Path):
    """A file where a folder must be, a file in a frame's place."""
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(StoreUnavailable, match=r"taken.*way of a folder"):
        check_fresh(tmp_path / "taken")
    with pytest.raises(StoreUnavailable, match="taken"):
        TranscriptGrid(Script(), tmp_path / "taken/seen")
    grid = TranscriptGrid(Script(), tmp_path / "seen")
    (tmp_path / "seen" / NAMES[2]).symlink_to("elsewhere")
    with pytest.raises(StoreUnavailable, match=re.escape(NAMES[2])):
        list(exchange(grid, TASKS, deadline_seconds=1.0))
    assert not (tmp_path / "seen/elsewhere").exists()


def test_half_a_frame_is_not_left(tmp_path: Path):
    """When the disk takes no more; nothing passes that is not written down."""
    script = Script([toy.update(delta_d=np.zeros(100_000, np.float32))])
    grid = TranscriptGrid(script, tmp_path / "seen")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match="File too large"):
            list(exchange(grid, TASKS, deadline_seconds=1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(script.withdrawn) == 1
    assert names(tmp_path / "seen") == [*NAMES[:2], "index.jsonl"]
    list(transcript.read(tmp_path / "seen"))


def test_message_that_cannot_travel_is_not_written(tmp_path: Path):
    """Nor does a site's name lead out of the folder."""
    script = Script([toy.update(SiteId("../../x"))])
    with pytest.raises(WireError):
        written(tmp_path / "seen", script)
    assert len(script.withdrawn) == 1
    assert names(tmp_path) == ["seen"]
    assert len(rows(tmp_path / "seen")) == len(TASKS)


def test_one_update_is_held_at_a_time(tmp_path: Path):
    """The receiver's copy is the only one, as over the grid below."""
    script = Script([toy.update(), toy.update()])
    grid = TranscriptGrid(script, tmp_path / "seen")
    replies = exchange(grid, TASKS, deadline_seconds=1.0)
    first = next(replies)
    seen = weakref.ref(first.message.delta_d)  # type: ignore[union-attr]
    del first
    second = next(replies)
    gc.collect(1)  # All that the test made is young.
    assert seen() is None
    assert second.message.site == "c"


def test_run_is_the_same_with_a_transcript(tmp_path: Path):
    """Same weights, and every round's messages in the folder."""
    expected = toy.Toy(job=toy.job()).run()
    again = toy.Toy(job=toy.job())
    with InProcessGrid(again.handlers(), clock=again.clock) as inner:
        grid = TranscriptGrid(inner, tmp_path / "seen")
        state = run_federation(again.job, again.parts(grid))
    assert np.array_equal(state.weights_d, expected.weights_d)
    found = list(transcript.read(tmp_path / "seen"))
    trained = [r for r in found if r["kind"] == "update"]
    assert [r["round"] for r in trained] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_reader_shows_clear_fields_and_opaque_sections(folder: Path):
    """Every header field as it stands, every part of the payload by digest."""
    found = list(transcript.read(folder))
    assert [row["file"] for row in found] == NAMES
    masked = found[3]
    assert masked["clear"].keys() == {
        *("run_id", "round_index", "site", "layout_digest", "spent"),
        *("based_on", "fragment", "num_integers", "words_bytes", "body_bytes"),
    }
    assert [p["name"] for p in masked["sections"]] == ["words", "header_h", "body"]
    assert not any(p["in_clear"] for p in masked["sections"])
    words = toy.masked().words
    assert masked["sections"][0]["sha256"] == hashlib.sha256(words).hexdigest()
    update = found[2]
    assert {p["name"] for p in update["sections"] if p["in_clear"]} == {
        "delta_d",
        "integers_m",
    }
    assert update["clear"]["num_examples"] == 10


DECLINE = Decline(number=2, context=b"\x01" * 32, signature=b"\x02" * 64).to_bytes()


def test_reader_decodes_protocol_messages(tmp_path: Path):
    """Every field of what is one; other bytes are bytes."""
    tagged = (13).to_bytes(8, "big") + b"xsa-v2/advert" + b"more"
    strange = (13).to_bytes(8, "big") + b"xsa-v2/gossip"
    bodies = [DECLINE, tagged, strange, b""]
    script = Script([toy.secure_answer(body=body) for body in bodies])
    written(tmp_path / "seen", script)
    task, step, decline, *others = [
        row["sections"][-1] for row in transcript.read(tmp_path / "seen")
    ]
    assert decline["message"] == "decline"
    assert decline["holds"] == "'decline' of xsa-v2"
    assert decline["fields"] == {
        "number": 2,
        "context": "01" * 32,
        "signature": "02" * 64,
    }
    assert others[0]["holds"].startswith("calls itself 'advert' and cannot be read: ")
    assert others[1]["holds"].startswith("calls itself 'gossip' and cannot be read: ")
    assert task["holds"] == others[2]["holds"] == "empty"
    assert step["holds"].startswith("protocol bytes")
    assert not any(part["fields"] for part in (task, step, *others))


def test_nonsense_within_nonsense_is_not_followed_for_ever():
    """A hostile site may send it; the reader must not run out of stack."""
    body = DECLINE
    for _ in range(2000):
        body = Confirms(confirms={1: body}).to_bytes()
    ((name, value),) = transcript_bodies.decode(body).items()
    assert name.count("confirms[1]") <= 4
    assert "bytes, sha256" in str(value)


def test_one_message_is_found_by_its_number(tmp_path: Path):
    """With its fields in words; a number too large is named with those that exist."""
    written(tmp_path / "seen", Script([toy.secure_answer(body=DECLINE)]))
    found = transcript.find(tmp_path / "seen", 3)
    assert "        field   body: number = 2" in transcript.lines(found, fields=True)
    assert not any("field" in line for line in transcript.lines(found))
    for number in (0, 4, -1):
        with pytest.raises(ObjectNotFound, match=rf"no message {number}: .* 1 to 3"):
            transcript.find(tmp_path / "seen", number)


def change_row(folder: Path, at: int, **fields: object) -> None:
    found = rows(folder)
    found[at].update(fields)
    text = "".join(json.dumps(row) + "\n" for row in found)
    (folder / "index.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("site", "d"),
        ("round", 2),
        ("kind", "update"),
        ("step", "reveal"),
        ("bytes", 1),
        ("sha256", "0" * 64),
        ("direction", "to"),
        ("sequence", 9),
        ("file", "../seen/none.frame"),
        ("file", NAMES[0]),
    ],
)
def test_index_is_not_believed(folder: Path, field: str, value: object):
    """Whatever differs from the frame is found."""
    change_row(folder, 3, **{field: value})
    with pytest.raises(CorruptObject):
        list(transcript.read(folder))


@pytest.mark.parametrize("line", ["{", "[]", '{"sequence": 8}'])
def test_torn_index_is_found(folder: Path, line: str):
    """After what is whole has been read."""
    with (folder / "index.jsonl").open("a") as file:
        file.write(line)
    replies = transcript.read(folder)
    assert len([next(replies) for _ in NAMES]) == len(NAMES)
    with pytest.raises(CorruptObject, match="line 8"):
        next(replies)


def test_changed_missing_and_added_files_are_found(folder: Path):
    """A bit flipped, a frame gone, a frame too many."""
    path = folder / NAMES[6]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptObject, match="damaged"):
        list(transcript.read(folder))
    path.unlink()
    with pytest.raises(CorruptObject, match="No such file"):
        list(transcript.read(folder))
    path.write_bytes(data)
    (folder / "000008-to-c-train.frame").write_bytes(data)
    with pytest.raises(CorruptObject, match="not in the index"):
        list(transcript.read(folder))


def test_folder_without_transcript_is_named(tmp_path: Path):
    """With the way to get one; an unreadable index is another matter."""
    with pytest.raises(ObjectNotFound, match="--transcript"):
        list(transcript.read(tmp_path))
    (tmp_path / "index.jsonl").write_bytes(b"\xff")
    with pytest.raises(CorruptObject, match="cannot read"):
        list(transcript.read(tmp_path))
