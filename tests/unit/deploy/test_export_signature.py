"""The signature of an export: of its files, its run and its signer, and no others."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from deploy.cli.commands import main
from deploy.tools.export_signature import SIGNATURE, sign, verify
from federation.errors import CorruptObject, ObjectNotFound, ProtocolError
from privacy.membership import key_files
from privacy.secagg.agreement import identity
from privacy.secagg.errors import BadSignature

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def numbered(start: int) -> Any:
    """Random bytes that are not random."""
    return lambda size: bytes((start + i) % 256 for i in range(size))


SIGNER, OTHER = (identity.generate(numbered(start)) for start in (1, 2))
KEY = SIGNER.public.key.hex()


def signed(files: tuple[str, ...] = ("a/model", "README.md")) -> MemoryStore:
    """An export of empty files."""
    store = MemoryStore()
    for name in files:
        store.put(name, [b""])
    content = sign(SIGNER, "run-1", dict.fromkeys(("a/model", "README.md"), EMPTY))
    store.put(SIGNATURE, [content])
    return store


def test_a_signed_export_is_verified():
    """With its files, its run and its signer."""
    found = verify(signed(), KEY)
    assert (found.run_id, found.public_key) == ("run-1", KEY)
    assert found.sha256 == {"a/model": EMPTY, "README.md": EMPTY}


def test_another_key_did_not_sign_it():
    """Even if the document says so."""
    store = signed()
    with pytest.raises(BadSignature):
        verify(store, OTHER.public.key.hex())
    facts = json.loads(sign(SIGNER, "run-1", {}))
    facts["public_key"] = OTHER.public.key.hex()
    store.put(SIGNATURE, [json.dumps(facts).encode()])
    with pytest.raises(BadSignature):
        verify(store, OTHER.public.key.hex())


def test_the_run_is_signed_too():
    """An export cannot be passed off as that of another run."""
    store = signed()
    content = sign(SIGNER, "run-1", {}).replace(b"run-1", b"run-2")
    store.put(SIGNATURE, [content])
    with pytest.raises(BadSignature):
        verify(store, KEY)


def test_changed_missing_and_added_files_are_found():
    """By name."""
    store = signed()
    store.put("a/model", [b"x"])
    with pytest.raises(CorruptObject, match=r"'a/model' .* has changed"):
        verify(store, KEY)
    with pytest.raises(ObjectNotFound):
        verify(signed(("README.md",)), KEY)
    with pytest.raises(CorruptObject, match=r"'code\.py' .* not covered"):
        verify(signed(("a/model", "README.md", "code.py")), KEY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        sign(SIGNER, "run-1", {}).replace(b'"format":1', b'"format":2'),
        sign(SIGNER, "run-1", {"a": "not hex"}),
    ],
)
def test_malformed_signatures_are_refused(content: bytes):
    """Before any file is read."""
    store = MemoryStore()
    store.put(SIGNATURE, [content])
    with pytest.raises(ProtocolError, match="signature of an export"):
        verify(store, KEY)


def test_an_export_without_a_signature_is_not_verified():
    """It says why."""
    with pytest.raises(ObjectNotFound, match="was not signed"):
        verify(MemoryStore(), KEY)


def test_the_command_verifies_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As JSON on request; a wrong key is an error."""
    place = tmp_path / "given"
    place.mkdir()
    (place / "model").touch()
    pem = tmp_path / "mine.pem"
    made = key_files.new("mine", random_bytes=numbered(7), out=pem)
    content = sign(key_files.open_key(pem), "run-1", {"model": EMPTY})
    (place / SIGNATURE).write_bytes(content)
    words = ["verify", f"file://{place}", "--key"]
    assert main([*words, made.public_key, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == {"model": EMPTY}
    assert main([*words, made.public_key.upper()]) == 0
    assert "signed with" in capsys.readouterr().out
    assert main([*words, KEY]) == 1
    assert main([*words, "12"]) == 2


@pytest.mark.parametrize("name", ["config.json", "more/weights", "line\nbreak", "pipe"])
def test_what_the_store_leaves_out_is_refused(name: str, tmp_path: Path):
    """Programs that open the folder would follow a link; the store never does."""
    place = tmp_path / "given"
    (place / "more").mkdir(parents=True)
    (place / "a").mkdir()
    for file in ("a/model", "README.md"):
        (place / file).touch()
    files = dict.fromkeys(("a/model", "README.md"), EMPTY)
    (place / SIGNATURE).write_bytes(sign(SIGNER, "run-1", files))
    store = LocalStore(place)
    assert verify(store, KEY).sha256 == files
    evil = tmp_path / "evil"
    evil.mkdir()
    if name == "pipe":
        os.mkfifo(place / name)
    elif "\n" in name:
        (place / name).touch()
    else:
        (place / name).symlink_to(evil)
    with pytest.raises(CorruptObject, match="not cover it"):
        verify(store, KEY)


def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path):
    """Its files are not those of the export, whatever they contain."""
    place, other = tmp_path / "given", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    (place / SIGNATURE).write_bytes(sign(SIGNER, "run-1", {}))
    (place / "more").symlink_to(other)
    (other / "code.py").touch()
    with pytest.raises(CorruptObject, match="'more' in"):
        verify(LocalStore(place), KEY)
