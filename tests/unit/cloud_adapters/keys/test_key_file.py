"""Keys in a file: who may read it, what it looks like, and how keys change."""

import os
import stat
from pathlib import Path

import pytest

from cloud_adapters.keys.key_file import KeyFile, add_key, read_keys
from federation.durable_files import private_draft
from federation.errors import KeyRefused

CONTEXT = {"key": "a"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    add_key(tmp_path / "keys.toml")
    return tmp_path / "keys.toml"


def test_file_is_closed_to_others(path: Path):
    """From the beginning and after a new key, whatever the umask."""
    old = os.umask(0)
    try:
        add_key(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["keys.toml"]


def test_newest_encrypts_and_all_decrypt(path: Path):
    """A file continues opening what its older keys have wrapped."""
    before = KeyFile(path).generate(CONTEXT)
    newest = add_key(path)
    after = KeyFile(path)
    assert after.unwrap(before.wrapped, CONTEXT) == before.plaintext
    assert bytes.fromhex(newest) in after.generate(CONTEXT).wrapped
    assert [key.key_id for key in read_keys(path)][-1] == newest


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_open_file_is_refused(path: Path, mode: int):
    """With the command that closes it."""
    path.chmod(mode)
    with pytest.raises(KeyRefused, match=f"chmod 600 {path}"):
        KeyFile(path)
    with pytest.raises(KeyRefused, match="chmod 600"):
        add_key(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = 3",
        "keys = []",
        "[[keys]]",
        '[[keys]]\nid = "00"\nsecret = "c2VjcmV0"',
        '[[keys]]\nid = "0011223344556677"\nsecret = "c2VjcmV0"',
        '[[keys]]\nid = "0011223344556677"\nsecret = "not base64: c2VjcmV0!"',
        "c2VjcmV0 = [",
    ],
)
def test_other_files_are_refused(path: Path, text: str):
    """Without a word of what is in them; adding a key does not replace them."""
    path.write_text(text)
    for verb in (KeyFile, add_key):
        with pytest.raises(KeyRefused, match=r"keys\.toml") as caught:
            verb(path)
        assert "c2VjcmV0" not in str(caught.value)
        assert caught.value.__cause__ is None
    assert path.read_text() == text


def test_one_id_twice_is_refused(path: Path):
    """It is not clear which one opens."""
    text = path.read_text()
    path.write_text(text + text[text.index("[[keys]]") :])
    with pytest.raises(KeyRefused, match="twice"):
        KeyFile(path)


def test_what_is_no_file_is_refused(tmp_path: Path):
    """A folder, a pipe, bytes, nothing at all, a link that leads nowhere."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "bytes").chmod(0o600)
    (tmp_path / "link").symlink_to("nowhere")
    for name in (".", "pipe", "bytes", "none", "link", "none/inner"):
        with pytest.raises(KeyRefused, match="key file"):
            KeyFile(tmp_path / name)
    for name in ("link", "none/inner"):
        with pytest.raises(KeyRefused, match="key file"):
            add_key(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "link", "pipe"]


def test_draft_of_a_killed_writer_is_removed_next_time(path: Path):
    """It may hold keys; another writer's at work, and other files, are left alone."""
    path.with_name(".keys.toml.0123abcd.new").touch()
    other = path.with_name(".other.toml.0123abcd.new")
    other.touch()
    with private_draft(path, b"") as at_work:
        add_key(path)
        assert sorted(path.parent.iterdir()) == sorted([path, other, at_work])
    assert sorted(path.parent.iterdir()) == sorted([path, other])
