"""What a benchmark ran on, for the first of its JSON lines."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path


def facts(benchmark: str, **settings: object) -> dict[str, object]:
    """Name machine, versions and commit beside the benchmark's own settings."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = ""
    if shutil.which("git"):
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return {
        "benchmark": benchmark,
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "torch", "flwr", "ray")},
        "commit": commit,
        **settings,
    }
