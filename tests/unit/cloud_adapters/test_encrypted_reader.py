"""A reader that was written from the documented format alone reads what we write."""

import json
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from hypothesis import given, strategies as st
from support.encrypted_reader import Reader, Refused, digest_of_metadata, key_file
from support.without_report import simulate

from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore

SEGMENT = 7
METADATA = {"round": "3", "a-name": 'with "quotes" and \\'}
KEY = "r\N{LATIN SMALL LETTER E WITH ACUTE}/\N{GRINNING FACE}.bin"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    add_key(path)
    add_key(path)
    return path


def written(keys: Path, content: bytes, *, prefix: str = "job/run/") -> Reader:
    """An object of ours, as a stranger finds it."""
    below = MemoryStore()
    store = EncryptedStore(below, KeyFile(keys), prefix=prefix, segment_bytes=SEGMENT)
    store.put(KEY, [content], metadata=METADATA)
    return Reader(below.read(KEY), prefix + KEY, key_file(keys))


contents = st.binary(max_size=5 * SEGMENT)


@given(content=contents)
def test_contents_of_every_size(keys: Path, content: bytes):
    """Empty ones, whole segments and short last ones; sizes are as documented."""
    reader = written(keys, content)
    found = reader.whole()
    assert found.content == content
    assert found.metadata_digest == digest_of_metadata(METADATA)
    segments = -(-len(content) // SEGMENT)
    assert len(reader.stored) == 1024 + 92 + len(content) + 16 * segments


@pytest.mark.slow
def test_checkpoints_of_a_run(keys: Path, tmp_path: Path):
    """Those that a run leaves in its folder, bound to job and run."""
    from support.small_jobs import small_job  # noqa: PLC0415 (torch)

    storage = {"encryption": {"key": f"file:{keys}"}}
    done = simulate(small_job(storage=storage), folder=tmp_path / "run")
    found = {}
    for path in (tmp_path / "run/checkpoints").rglob("*"):
        if path.is_file():
            key = path.relative_to(tmp_path / "run").as_posix()
            bound = f"small/{done.run_id}/{key}"
            reader = Reader(path.read_bytes(), bound, key_file(keys))
            found[key] = reader.whole().content
    manifest = json.loads(found["checkpoints/round-000001.json"])
    assert manifest
    assert any(key.startswith("checkpoints/blobs/") for key in found)


REFUSALS = (Refused, InvalidTag, KeyError)


def refused(reader: Reader, stored: bytes) -> bool:
    try:
        Reader(stored, reader.bound, reader.unwrap).whole()
    except REFUSALS:
        return True
    return False


def test_every_flipped_byte_is_refused(keys: Path):
    """Wherever it is, padding included."""
    reader = written(keys, bytes(range(20)))
    for at in range(len(reader.stored)):
        changed = bytearray(reader.stored)
        changed[at] ^= 1
        assert refused(reader, bytes(changed)), at


def test_every_cut_is_refused(keys: Path):
    """Between segments too, with the trailer or without it."""
    reader = written(keys, bytes(range(21)))
    step, stored = SEGMENT + 16, reader.stored
    assert all(refused(reader, stored[:end]) for end in range(len(stored)))
    for gone in range(3):
        begin = 1024 + gone * step
        assert refused(reader, stored[:begin] + stored[begin + step :])
    assert refused(reader, stored + b"\0")


def test_moved_segments_are_refused(keys: Path):
    """Swapped, repeated, and taken from another object under the same keys."""
    reader = written(keys, bytes(range(21)))
    other = written(keys, bytes(range(21)))
    step = SEGMENT + 16
    first, second, third = (
        reader.stored[1024 + at * step : 1024 + (at + 1) * step] for at in range(3)
    )
    head, tail = reader.stored[:1024], reader.stored[-92:]
    assert not refused(reader, head + first + second + third + tail)
    assert refused(reader, head + second + first + third + tail)
    assert refused(reader, head + first + first + third + tail)
    assert refused(
        reader, head + other.stored[1024 : 1024 + step] + second + third + tail
    )
    assert refused(reader, head + first + second + third + other.stored[-92:])


def test_objects_are_bound_to_their_place(keys: Path):
    """Under another key, or in another run, nothing opens."""
    reader = written(keys, b"content")
    for bound in (f"job/other/{KEY}", "job/run/other", KEY):
        with pytest.raises(REFUSALS):
            Reader(reader.stored, bound, reader.unwrap).whole()
