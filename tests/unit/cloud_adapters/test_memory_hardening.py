"""A process that cannot open its memory to its user any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import programs

from cloud_adapters.local import memory_hardening

ROOT = Path(__file__).resolve().parents[3]
USER = 54321

# Closes itself as the kernel does when root is given up, and then asks like nginx.
_PROGRAM = """
import ctypes, os, sys
from cloud_adapters.local import memory_hardening
if sys.argv[1:]:
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.prctl(4, 0)
memory_hardening.keep()
child = os.fork()
if child == 0:
    print(libc.prctl(4, 1), libc.prctl(3), libc.prctl(15, b"name"), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("user", [None, USER])
def test_memory_stays_closed(user: int | None):
    """With rights, and without: the request is answered, and changes nothing."""
    if user is not None and (why := programs.missing("root")):
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, *([] if user is None else [str(user)])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "0 0 0\n", done.stderr


def test_host_that_cannot_keep_it_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is named, and nothing is started."""
    assert memory_hardening.obstacle() == ""
    monkeypatch.setattr(memory_hardening, "KERNEL_SETTINGS", tmp_path)
    assert "seccomp" in memory_hardening.obstacle()
    with pytest.raises(OSError, match="seccomp"):
        memory_hardening.keep()
