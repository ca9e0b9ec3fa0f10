"""Long-lived keys: their files and their signatures."""

import copy
import os
import pickle
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from support.secagg_parties import entropy

from privacy.secagg.agreement import identity as identities
from privacy.secagg.agreement.identity import Identity, Label, PublicIdentity
from privacy.secagg.errors import BadSignature, KeyFileRefused


@pytest.fixture
def key() -> Identity:
    return identities.generate(entropy("key"))


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_file_round_trip(tmp_path: Path, key: Identity, passphrase: bytes | None):
    """A saved key is the same key, and only its owner can read the file."""
    path = tmp_path / "id.pem"
    old = os.umask(0)
    try:
        key.save(path, passphrase=passphrase)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (b"ENCRYPTED" in path.read_bytes()) == (passphrase is not None)
    loaded = identities.load(path, passphrase=passphrase)
    assert loaded.public == key.public


def test_a_key_is_never_overwritten(tmp_path: Path, key: Identity):
    """An existing file, or a link in its place, stays as it is."""
    path, link = tmp_path / "id.pem", tmp_path / "link"
    path.write_bytes(b"mine")
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(KeyFileRefused, match="never overwritten"):
            key.save(taken)
    assert path.read_bytes() == b"mine"


def test_unwritable_folder_is_named(tmp_path: Path, key: Identity):
    """The error says which file and why."""
    with pytest.raises(KeyFileRefused, match="No such file"):
        key.save(tmp_path / "missing" / "id.pem")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_open_file_is_refused(tmp_path: Path, key: Identity, mode: int):
    """A key that anyone else could have read or exchanged is not used."""
    path = tmp_path / "id.pem"
    key.save(path)
    path.chmod(mode)
    with pytest.raises(KeyFileRefused, match=f"mode {mode:04o}"):
        identities.load(path)


def test_file_of_another_user_is_refused(
    tmp_path: Path, key: Identity, monkeypatch: pytest.MonkeyPatch
):
    """The owner must be the process's own user."""
    path = tmp_path / "id.pem"
    key.save(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(KeyFileRefused, match="belongs to user"):
        identities.load(path)


def test_missing_link_folder_and_pipe_are_refused(tmp_path: Path, key: Identity):
    """Only a regular file under its own name is read, and nothing hangs."""
    key.save(tmp_path / "id.pem")
    (tmp_path / "link").symlink_to(tmp_path / "id.pem")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("missing", "link", "", "pipe"):
        with pytest.raises(KeyFileRefused):
            identities.load(tmp_path / name)


@pytest.mark.parametrize("passphrase", [None, b"wrong"])
def test_wrong_passphrase_is_refused(
    tmp_path: Path, key: Identity, passphrase: bytes | None
):
    """The message shows neither the passphrase nor the file's content."""
    path = tmp_path / "id.pem"
    key.save(path, passphrase=b"right")
    with pytest.raises(KeyFileRefused, match="this passphrase opens") as caught:
        identities.load(path, passphrase=passphrase)
    assert caught.value.__cause__ is None
    assert "right" not in str(caught.value)


def test_other_files_are_no_identity(tmp_path: Path):
    """Garbage, another kind of key and an endless file are refused."""
    other = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for data in (b"garbage", other, b"x" * 20_000):
        path = tmp_path / "id.pem"
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(KeyFileRefused):
            identities.load(path)


def test_signature_holds_for_one_label_and_body(key: Identity):
    """Neither another label, body, key nor signature passes."""
    signature = key.sign(Label.ADVERT, b"body")
    key.public.verify(Label.ADVERT, b"body", signature, who="a")
    other = identities.generate(entropy("other")).public
    for public, label, body, bad in [
        (key.public, Label.CONFIRM, b"body", signature),
        (key.public, Label.ADVERT, b"bodY", signature),
        (other, Label.ADVERT, b"body", signature),
        (key.public, Label.ADVERT, b"body", bytes(64)),
        (key.public, Label.ADVERT, b"body", b""),
    ]:
        with pytest.raises(BadSignature, match="site-a"):
            public.verify(label, body, bad, who="site-a")


def test_fingerprint_is_readable_aloud(key: Identity):
    """Sixteen groups of four digits, frozen for a known key."""
    public = bytes.fromhex(
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    )
    fingerprint = PublicIdentity(public).fingerprint
    assert fingerprint.startswith("21fe 31df a154 a261")
    assert [len(group) for group in fingerprint.split(" ")] == [4] * 16


def test_public_key_has_32_bytes():
    """A caller's bad key is its own error."""
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        PublicIdentity(bytes(31))


def test_identity_stays_in_its_process(key: Identity):
    """It cannot be printed, copied or pickled."""
    assert repr(key) == f"Identity({key.public.fingerprint[:19]}...)"
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            leave(key)


def test_unreadable_disk_is_named(
    tmp_path: Path, key: Identity, monkeypatch: pytest.MonkeyPatch
):
    """A failing disk is an error that names the file."""

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    key.save(tmp_path / "id.pem")
    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(KeyFileRefused, match="Input/output error"):
        identities.load(tmp_path / "id.pem")
