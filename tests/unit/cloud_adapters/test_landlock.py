"""A process that has given up reading some files."""

import subprocess
import sys
from pathlib import Path

import pytest

from cloud_adapters.local import landlock

pytestmark = pytest.mark.skipif(
    not landlock.is_available(), reason="this kernel has no Landlock"
)

HIDE = """
import os, subprocess, sys
from pathlib import Path
from cloud_adapters.local import landlock

folder = Path(sys.argv[1])
assert landlock.hide(folder, ["secret"])


def outcome(deed):
    try:
        deed()
    except OSError as error:
        return type(error).__name__
    return "done"


def child():
    if subprocess.run(["cat", folder / "secret"], stderr=subprocess.DEVNULL).returncode:
        raise PermissionError


def linked():
    (folder / "link").symlink_to(folder / "secret")
    (folder / "link").read_bytes()


def moved():
    (folder / "secret").rename(folder / "inner" / "secret")


for deed in (
    lambda: (folder / "secret").read_bytes(),
    lambda: os.open(f"/proc/{os.getppid()}/root{folder}/secret", os.O_RDONLY),
    lambda: Path(f"/proc/{os.getppid()}/mem").open("rb").close(),
    lambda: os.link(folder / "secret", folder / "inner" / "secret"),
    moved, linked, child,
):
    print(outcome(deed))
print("open:")
for deed in (
    lambda: (folder / "public").read_bytes(),
    lambda: (folder / "inner" / "new").write_bytes(b"new"),
    lambda: (folder / "inner" / "new").read_bytes(),
    lambda: (folder / "inner" / "new").rename(folder / "inner" / "deep" / "new"),
    lambda: Path("/etc/passwd").read_bytes(),
    lambda: Path("/proc/self/status").read_bytes(),
):
    print(outcome(deed))
"""


def test_hidden_file_is_read_in_no_way(tmp_path: Path):
    """Nor by a link, a child, another process's eyes; all others are as before."""
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "public").write_text("public")
    done = subprocess.run(
        [sys.executable, "-I", "-c", HIDE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hidden, _, others = done.stdout.partition("open:\n")
    assert "done" not in hidden, hidden
    assert len(hidden.split()) == 7
    assert set(others.split()) == {"done"}, others
