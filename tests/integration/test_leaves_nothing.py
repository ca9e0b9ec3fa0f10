"""A run leaves its folder and nothing else: no process, no thread, no stray file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import CROSSFED, workplace

pytestmark = [pytest.mark.slow]

FAST = ("--set", "rounds=2", "--set", "training.local_steps=1")


def _files(*folders: Path) -> set[Path]:
    return {
        path
        for folder in folders
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def test_run_leaves_no_process_and_no_stray_file(tmp_path: Path) -> None:
    """Its process group is empty, and home and temporary folder are untouched."""
    place = workplace(tmp_path / "place")
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    before = _files(tmp_path)
    process = subprocess.Popen(
        [CROSSFED, "simulate", "job.toml", *FAST, "--out", "run"],
        cwd=place,
        env={**os.environ, "HOME": str(home), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.wait(timeout=120) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    run = place / "run"
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
    new = {path for path in _files(tmp_path) - before if run not in path.parents}
    # Caches of libraries: matplotlib's list of fonts, torch's empty folder.
    ours = {p for p in new if not {home, temporary} & {p, *p.parents}}
    assert ours == {run}
    foreign = {str(p.relative_to(tmp_path)) for p in new - ours if p.is_file()}
    assert all(path.startswith("home/.cache/matplotlib/") for path in foreign)


_TWICE = """
import os, sys, threading
sys.path.append(os.getcwd())
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
"""


def test_call_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    """Also as a function of a longer-lived program."""
    place = workplace(tmp_path / "place")
    subprocess.run([sys.executable, "-c", _TWICE], cwd=place, check=True)
