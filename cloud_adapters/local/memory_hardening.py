"""Protect the memory of root's programs whose processes drop root.

The kernel closes the memory of a process that changes its user: other processes of the
new user can neither trace it nor open ``/proc/PID/mem``. Some programs, nginx among
them, then ask for core dumps (``prctl(PR_SET_DUMPABLE, 1)``), which opens it again. A
seccomp filter answers that request and ignores it, here and in all that is started.

Sources: https://man7.org/linux/man-pages/man2/PR_SET_DUMPABLE.2const.html,
https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

# Of a machine: its number in seccomp (AUDIT_ARCH), and that of the call prctl.
_MACHINES = {"x86_64": (0xC000003E, 157), "aarch64": (0xC00000B7, 167)}
_SET_DUMPABLE, _SET_SECCOMP, _FILTER_MODE, _NO_NEW_PRIVS = 4, 22, 2, 38
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # struct seccomp_data
_DO, _ANSWER_ZERO = 0x7FFF0000, 0x00050000
KERNEL_SETTINGS = Path("/proc/sys")


def obstacle() -> str:
    """Why this host cannot protect the memory; empty if it can."""
    has_filters = (KERNEL_SETTINGS / "kernel/seccomp/actions_avail").exists()
    if platform.machine() not in _MACHINES or not has_filters:
        return "crossfed knows no seccomp filter for this machine or kernel"
    # The kernel then leaves the memory open where a process changes its user.
    if (KERNEL_SETTINGS / "fs/suid_dumpable").read_text().strip() == "1":
        return (
            "fs.suid_dumpable is 1, which leaves the memory of these processes readable"
        )
    return ""


def keep() -> None:
    """Keep this process, and what it starts, from opening its memory again.

    Raises:
        OSError: The kernel refuses the filter, or see ``obstacle``.
    """
    if found := obstacle():
        raise OSError(errno.ENOSYS, found)
    code = _program(*_MACHINES[platform.machine()])
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    if libc.prctl(_SET_SECCOMP, _FILTER_MODE, program) == 0:
        return
    # A container's root lacks CAP_SYS_ADMIN: it must give up set-user-ID programs.
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_SET_SECCOMP, _FILTER_MODE, program):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _program(machine: int, prctl: int) -> bytes:
    """Answer ``prctl(PR_SET_DUMPABLE)`` with success, and let all else through."""
    steps = (
        (_LOAD, 0, 0, _MACHINE_AT),
        (_JUMP_IF_EQUAL, 0, 5, machine),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 3, prctl),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_IF_EQUAL, 0, 1, _SET_DUMPABLE),
        (_RETURN, 0, 0, _ANSWER_ZERO),
        (_RETURN, 0, 0, _DO),
    )
    return b"".join(struct.pack("HBBI", *step) for step in steps)
