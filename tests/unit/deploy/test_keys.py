"""Key files as a person works with them."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.secagg_parties import entropy

from privacy.membership import key_files as keys
from privacy.secagg.agreement import identity
from privacy.secagg.errors import KeyFileRefused


def new(path: Path, **fields: Any) -> keys.KeyFacts:
    return keys.new("left", random_bytes=entropy("left"), out=path, **fields)


def test_new_key_is_the_one_that_is_shown(tmp_path: Path):
    """What is printed is public, and the file is private."""
    path = tmp_path / "left.pem"
    facts = new(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.show(path) == facts
    assert facts.public_key == identity.load(path).public.key.hex()
    secret = entropy("left")(32).hex()
    assert secret not in str(facts)


def test_key_is_named_after_its_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the working folder, unless another file is named."""
    monkeypatch.chdir(tmp_path)
    facts = keys.new("left", random_bytes=os.urandom)
    assert facts.file == "left.pem"
    assert Path("left.pem").is_file()


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"\nsecond line"])
def test_passphrase_is_the_first_line(tmp_path: Path, ending: bytes):
    """However the line ends."""
    path, words = tmp_path / "left.pem", tmp_path / "words"
    words.write_bytes(b"correct horse" + ending)
    assert new(path, passphrase_file=words).encrypted is True
    assert keys.is_encrypted(path.read_bytes())
    assert keys.show(path, passphrase_file=words).encrypted is True
    identity.load(path, passphrase=b"correct horse")


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 1024])
def test_unusable_passphrase_makes_no_key(tmp_path: Path, content: bytes):
    """Empty or too long: the error names the file and not the content."""
    words = tmp_path / "words"
    words.write_bytes(content)
    with pytest.raises(KeyFileRefused, match="not a passphrase") as caught:
        new(tmp_path / "left.pem", passphrase_file=words)
    assert "xxx" not in str(caught.value)
    assert not (tmp_path / "left.pem").exists()


def test_key_errors_name_the_file_and_the_way_out(tmp_path: Path):
    """Missing, taken, encrypted, not a file, no folder, no passphrase file."""
    path, words = tmp_path / "left.pem", tmp_path / "words"
    with pytest.raises(KeyFileRefused, match=r"left\.pem.*crossfed keys new"):
        keys.show(path)
    with pytest.raises(KeyFileRefused, match=r"words.*first line"):
        new(path, passphrase_file=words)
    words.write_bytes(b"correct horse")
    new(path, passphrase_file=words)
    with pytest.raises(KeyFileRefused, match=r"left\.pem.*--passphrase-file"):
        keys.show(path)
    with pytest.raises(KeyFileRefused, match="move it away"):
        new(path)
    with pytest.raises(KeyFileRefused, match="create its folder first"):
        new(tmp_path / "none" / "left.pem")
    with pytest.raises(KeyFileRefused, match="use a key file"):
        keys.show(tmp_path)
    with pytest.raises(KeyFileRefused, match="accessible to this user"):
        keys.show(path / "inner")


def test_open_key_is_not_shown(tmp_path: Path):
    """What others can read is no identity any more."""
    path = tmp_path / "left.pem"
    new(path)
    path.chmod(0o644)
    with pytest.raises(KeyFileRefused, match="chmod it to 0600"):
        keys.show(path)


def test_missing_key_is_named_with_what_to_do(tmp_path: Path):
    with pytest.raises(KeyFileRefused, match=r"none\.pem.*restore it from a backup"):
        identity.load(tmp_path / "none.pem")


def test_name_that_is_none_is_refused(tmp_path: Path):
    """Before a file is made, even with --out."""
    with pytest.raises(KeyFileRefused, match=r"'\.\./x' is not a name"):
        keys.new("../x", random_bytes=os.urandom, out=tmp_path / "left.pem")
    assert not list(tmp_path.iterdir())
