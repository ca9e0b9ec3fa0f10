"""Landlock: a process permanently gives up the right to read some files.

Linux has had what is needed here since 5.19, without root, users or namespaces; a
kernel may be built or started without. Rules allow and never deny: so every entry
beside the hidden files is allowed, and beside the folders on the way to them. What
someone later puts into one of those folders cannot be read either. A process under
such rules can also not look into processes that are not (``/proc/PID/mem``, ``root``),
nor move or link a hidden file to where it could read it.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # System calls, the same on all machines.
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVS = 38
_READ_FILE, _REFER = 1 << 2, 1 << 13
# Of the interface: before it, no process could move files between folders.
_REFER_SINCE = 2


def is_available() -> bool:
    """Whether this kernel supports it."""
    return _version() >= _REFER_SINCE


def hide(folder: Path, names: Collection[str]) -> bool:
    """Keep this thread, and what it starts, from reading some files again.

    Args:
        folder: Where they are.
        names: Names of the files, which need not exist.

    Returns:
        Whether they are hidden now: false where the kernel has no Landlock.

    Raises:
        OSError: The kernel refuses a rule.
    """
    if not is_available():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    rights = struct.pack("=Q", _READ_FILE | _REFER)
    rules = _check(libc.syscall(_CREATE, rights, ctypes.c_size_t(len(rights)), 0))
    try:
        for path in _beside(folder.resolve(), names):
            _allow(libc, rules, path)
        _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
        _check(libc.syscall(_RESTRICT, rules, 0))
    finally:
        os.close(rules)
    return True


def _version() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG))


def _beside(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """Every entry that is neither hidden nor a parent of hidden ones."""
    way = [*reversed(folder.parents), folder]
    for parent, following in zip(way, [*way[1:], None], strict=True):
        hidden = set(names) if following is None else {following.name}
        with suppress(PermissionError):  # Then nothing in it is readable anyway.
            yield from (path for path in parent.iterdir() if path.name not in hidden)


def _allow(libc: ctypes.CDLL, rules: int, path: Path) -> None:
    try:
        # A link is not followed: what it points to has an entry of its own.
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        is_folder = path.is_dir() and not path.is_symlink()
        rights = _READ_FILE | (_REFER if is_folder else 0)
        rule = struct.pack("=Qi", rights, handle)
        with suppress(OSError):  # Of a link, a socket: there is nothing to read.
            _check(libc.syscall(_ADD, rules, _PATH_BENEATH, rule, 0))
    finally:
        os.close(handle)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
