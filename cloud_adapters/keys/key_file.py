"""Keys in a file of this machine: for one machine, for tests, for a mounted secret.

The file is TOML and holds one or more keys of 32 bytes. The newest, the last one,
wraps; each unwraps what it has wrapped. It is as secret as what it encrypts: it must
belong to the user and be closed to everybody else.

A wrapped key is ``file:``, the id of the wrapping key (8 bytes), a nonce (12 bytes) and
the data key under AES-256-GCM with the context as associated data (NIST SP
800-38D). Nonces are random: one key may wrap 2^32 data keys, by section 8.3 there.
"""

import base64
import errno
import os
import secrets
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloud_adapters.keys.context import (
    DATA_KEY_BYTES,
    check_data_key,
    context_bytes,
    mark,
    unmark,
)
from federation.durable_files import private_draft
from federation.errors import CorruptObject, KeyRefused, os_errors
from federation.protocols import DataKey

KIND = "file"

_ID_BYTES = 8
_NONCE_BYTES = 12
_MAX_FILE_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WARNING = (
    "# Keys of crossfed that encrypt objects. Who has this file can read them, and\n"
    "# without it they are lost. The last key encrypts, all of them decrypt.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKey:
    """A key of the file.

    Attributes:
        key_id: 16 hexadecimal digits; says nothing of the key.
        secret: 32 bytes.
    """

    key_id: str
    secret: bytes = field(repr=False)


class KeyFile:
    """A ``federation.protocols.KeyService`` over a file."""

    def __init__(self, path: Path | str) -> None:
        """Read the keys.

        Raises:
            KeyRefused: The file is not there, open to others or not of this form.
        """
        self._path = Path(path)
        self._keys = {key.key_id: key for key in read_keys(self._path)}

    @property
    def name(self) -> str:
        """Which file."""
        return f"{KIND}:{self._path}"

    def generate(self, context: Mapping[str, str]) -> DataKey:
        """Make a new key for an object; see ``KeyService.generate``."""
        plaintext = secrets.token_bytes(DATA_KEY_BYTES)
        return DataKey(plaintext=plaintext, wrapped=self.wrap(plaintext, context))

    def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
        """Lock a key with the newest of the file; see ``KeyService.wrap``."""
        check_data_key(plaintext)
        newest = list(self._keys.values())[-1]
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = AESGCM(newest.secret).encrypt(nonce, plaintext, context_bytes(context))
        return mark(KIND, bytes.fromhex(newest.key_id) + nonce + sealed)

    def unwrap(self, wrapped: bytes, context: Mapping[str, str]) -> bytes:
        """Unlock a key with the one that locked it; see ``KeyService.unwrap``."""
        blob = unmark(KIND, wrapped, self.name)
        key_id = blob[:_ID_BYTES].hex()
        found = self._keys.get(key_id)
        if found is None:
            raise KeyRefused(
                f"the object was encrypted with the key {key_id}, which is not in "
                f"{self._path} (it has {', '.join(self._keys)}): use the key file of "
                "that run"
            )
        nonce = blob[_ID_BYTES : _ID_BYTES + _NONCE_BYTES]
        sealed = blob[_ID_BYTES + _NONCE_BYTES :]
        try:
            plaintext = AESGCM(found.secret).decrypt(
                nonce, sealed, context_bytes(context)
            )
        except (InvalidTag, ValueError) as error:  # ValueError: too short.
            raise CorruptObject(
                f"the object's wrapped key does not open with the key {key_id}: it was "
                "modified, or belongs to another object"
            ) from error
        return plaintext

    def is_newest(self, wrapped: bytes) -> bool:
        """Whether a key was wrapped with the newest of the file."""
        blob = unmark(KIND, wrapped, self.name)
        return blob[:_ID_BYTES].hex() == list(self._keys)[-1]

    def close(self) -> None:
        """Do nothing: the file is not open."""


def read_keys(path: Path) -> Sequence[FileKey]:
    """Read a key file: at least one key, the newest last.

    Raises:
        KeyRefused: The file is not there, open to others or not of this form.
    """
    text = _read_private(path)
    try:
        entries = tomllib.loads(text)["keys"]
        found = [_key(entry) for entry in entries]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError):
        # Without the cause: its text may quote the file.
        raise KeyRefused(
            f"{path} is not a crossfed key file: create one with 'crossfed keys "
            "storage FILE'"
        ) from None
    if not found or len({key.key_id for key in found}) != len(found):
        raise KeyRefused(f"{path} holds no key, or the same id twice")
    return found


def add_key(path: Path) -> str:
    """Add a new key to a key file, and make the file if there is none.

    The new file is written beside the old one and then takes its name, so that a
    crash leaves the old file or the new one.

    Returns:
        The new key's id.

    Raises:
        KeyRefused: The file is there and cannot be read, or cannot be written.
    """
    path = Path(path)
    # lexists: a link that leads nowhere is not to be replaced by a file.
    known = read_keys(path) if os.path.lexists(path) else []
    new = FileKey(
        key_id=secrets.token_hex(_ID_BYTES), secret=secrets.token_bytes(DATA_KEY_BYTES)
    )
    content = "\n".join([_WARNING, *map(_entry, (*known, new))]).encode()
    with os_errors(KeyRefused, f"write the key file {path}"):
        _write_private(path, content, is_new=not known)
    return new.key_id


def _entry(key: FileKey) -> str:
    secret = base64.b64encode(key.secret).decode()
    return f'[[keys]]\nid = "{key.key_id}"\nsecret = "{secret}"\n'


def _key(entry: Mapping[str, str]) -> FileKey:
    secret = base64.b64decode(entry["secret"], validate=True)
    if len(bytes.fromhex(entry["id"])) != _ID_BYTES or len(secret) != DATA_KEY_BYTES:
        raise ValueError
    return FileKey(key_id=entry["id"].lower(), secret=secret)


def _read_private(path: Path) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        advice = (
            "create one with 'crossfed keys storage FILE', or copy the run's own"
            if error.errno == errno.ENOENT
            else f"{error.strerror}"
        )
        raise KeyRefused(f"cannot read the key file {path}: {advice}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise KeyRefused(f"the key file {path} is not a regular file")
        if found.st_mode & _OTHERS or found.st_uid not in {os.geteuid(), 0}:
            raise KeyRefused(
                f"other users can read the key file {path} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}): close it with chmod 600 {path}"
            )
        content = os.read(file, _MAX_FILE_BYTES)
    finally:
        os.close(file)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise KeyRefused(f"{path} is not a crossfed key file: it is not text") from None


def _write_private(path: Path, content: bytes, *, is_new: bool) -> None:
    with private_draft(path, content) as draft:
        if is_new:  # Of two that make the file at once, one must fail.
            os.link(draft, path)
        else:
            draft.replace(path)
