"""A run leaves its folder and nothing else: no process, no thread, no stray file."""

import contextlib
import os
import pty
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import CROSSFED, ForkServer, workplace

pytestmark = [pytest.mark.slow]

FAST = ("--set", "rounds=2", "--set", "training.local_steps=1")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has run in a process of its own, on a terminal.

    Attributes:
        place: Its working folder, beside those for its home and temporary files.
        before: What was there when it began.
        pid: Of the leader of its session.
        code: Its exit code.
        stdout: What it wrote to a pipe.
        shown: What the terminal got.
    """

    place: Path
    before: set[Path]
    pid: int
    code: int
    stdout: bytes
    shown: bytes


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The whole command, as installed: starting it takes longer than the run."""
    folder = tmp_path_factory.mktemp("installed")
    place = workplace(folder / "place")
    home, temporary = folder / "home", folder / "tmp"
    temporary.mkdir()
    # Matplotlib's list of fonts, which takes seconds to make.
    fonts = Path.home() / ".cache" / "matplotlib"
    if fonts.is_dir():
        shutil.copytree(fonts, home / ".cache" / "matplotlib")
    home.mkdir(exist_ok=True)
    before = _files(folder)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [CROSSFED, "simulate", "job.toml", *FAST, "--out", "run"],
        cwd=place,
        env={
            **os.environ,
            "TERM": "xterm",
            "HOME": str(home),
            "TMPDIR": str(temporary),
        },
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # A terminal without a writer.
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    stdout, _ = process.communicate(timeout=120)
    return Ended(
        place=place,
        before=before,
        pid=process.pid,
        code=process.returncode,
        stdout=stdout,
        shown=shown,
    )


def _files(*folders: Path) -> set[Path]:
    return {
        path
        for folder in folders
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def test_run_leaves_no_process_and_no_stray_file(ended: Ended) -> None:
    """Its process group is empty, and home and temporary folder are untouched."""
    assert ended.code == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(ended.pid, 0)
    run, folder = ended.place / "run", ended.place.parent
    found = {str(path.relative_to(run)) for path in _files(run) if path.is_file()}
    stored = ("checkpoints/", ".about/")
    assert {path for path in found if not path.startswith(stored)} == {
        ".lock",
        "events.jsonl",
        "job.toml",
        "model.safetensors",
        "report.html",
        "result.json",
    }
    new = {path for path in _files(folder) - ended.before if run not in path.parents}
    # Caches of libraries: matplotlib's list of fonts, torch's empty folder.
    home, temporary = folder / "home", folder / "tmp"
    ours = {p for p in new if not {home, temporary} & {p, *p.parents}}
    assert ours == {run}
    foreign = {str(p.relative_to(folder)) for p in new - ours if p.is_file()}
    assert all(path.startswith("home/.cache/matplotlib/") for path in foreign)


_TWICE = """
import os, threading
from pathlib import Path
from deploy.wiring.simulation import simulate
from federation.job import job_file

job = job_file.load(Path("job.toml"), ["rounds=1", "training.local_steps=1"])
for number in range(2):
    simulate(job, folder=Path(f"run-{number}"))
    names = [thread.name for thread in threading.enumerate()]
    assert names == ["MainThread"], names
    handles = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{n}")}
    ours = [path for path in handles if f"run-{number}" in path]
    assert not ours, ours
print("done")
"""


def test_call_leaves_no_thread_and_no_open_file(
    server: ForkServer, tmp_path: Path
) -> None:
    """Also as a function of a longer-lived program, which has a job's folder on its
    path: that of its script."""
    place = workplace(tmp_path / "place")
    script = place / "twice.py"
    script.write_text(_TWICE)
    done = server.run(folder=place, script=script)
    assert (done.code, done.stdout) == (0, "done\n"), done.stderr
