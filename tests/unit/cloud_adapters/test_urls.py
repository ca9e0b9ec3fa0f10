"""Which store a URL opens."""

from pathlib import Path

import pytest

from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.urls import open_store
from federation.errors import JobError


def test_file_url_absolute(tmp_path: Path):
    """Three slashes lead to an absolute folder."""
    open_store(f"file://{tmp_path}/runs").put("key", [b"x"])
    assert (tmp_path / "runs" / "key").read_bytes() == b"x"


def test_file_url_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a third slash it is a folder below the working directory."""
    monkeypatch.chdir(tmp_path)
    open_store("file://my runs/100%").put("key", [b"x"])
    assert (tmp_path / "my runs" / "100%" / "key").read_bytes() == b"x"


def test_memory_url_opens_an_empty_store():
    """Each memory URL is a store of its own."""
    open_store("memory://").put("key", [b"x"])
    store = open_store("memory://")
    assert isinstance(store, MemoryStore)
    assert list(store.list()) == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/runs", "not built yet"),
        ("gs://bucket/runs", "not built yet"),
        ("ftp://host/runs", "'ftp' is unknown"),
        ("runs", "not a URL"),
        ("file:runs", "not a URL"),
        ("file://", "names no store"),
        ("file://a\0b", "names no store"),
        ("memory://name", "names no store"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str):
    """The message names the key, the reason and what is possible."""
    with pytest.raises(JobError, match=f"storage.url: .*{reason}.*file://") as caught:
        open_store(url)
    assert caught.value.key == "storage.url"
