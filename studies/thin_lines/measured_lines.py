"""The product's own federation on this machine, whose sites are at the ends of lines.

``crossfed up`` brings it up, each site in a network of its own behind a shaped line,
and ``crossfed run`` runs jobs on it. See ``utilisation.py``.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from cloud_adapters.compute import local_network
from cloud_adapters.compute.pool import Line
from federation.job import job_file
from monitoring.runs.run_folder import RunFolder

MODEL = "./paced_model.py:paced_gpt"
_CROSSFED = (sys.executable, "-m", "crossfed")  # The package is installed.
_POLICY: Mapping[str, Any] = {
    "privacy": "none",
    "secure_aggregation": False,
    "min_group": 1,
    "max_clip_norm": 100.0,
    "functions": [MODEL, "clients.models:*", "clients.data:*"],
}


def refusal(mbit: float) -> str:
    """Why this machine cannot have such lines; empty if it can."""
    why = local_network.refusal(Line(rate_mbit=mbit))
    if not why and shutil.which("nginx") is None:
        why = "nginx is missing: apt-get install nginx-light"
    return why


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A federation that is up.

    Attributes:
        folder: All of it, and where its commands run.
    """

    folder: Path

    @property
    def aggregator(self) -> Path:
        """Its folder."""
        return self.folder / "deployments" / "thin" / "aggregator"

    def up(self, start: Mapping[str, Any], mbit: float) -> None:
        """Start it, or replace its sites by others with lines of another width.

        Args:
            start: A short job, which runs first.
            mbit: Of each line, in each direction.
        """
        self._write_job(start)
        machine = {"isolation": "namespace", "line": {"rate_mbit": mbit}}
        sites = [
            {"name": site["name"], "policy": dict(_POLICY), "machine": machine}
            for site in start["sites"]
        ]
        table = {"name": "thin", "job": f"{start['name']}.toml", "sites": sites}
        (self.folder / "fed.toml").write_text(tomli_w.dumps(table))
        self._call("up", "fed.toml")

    def run(self, job: Mapping[str, Any]) -> RunFolder:
        """Run a job to its end."""
        path = self._write_job(job)
        words = ["run", path, "--json"]
        words += ["--aggregator", str(self.aggregator / "aggregator.toml")]
        result = json.loads(self._call(*words))
        return RunFolder(self.aggregator / "runs" / job["name"] / result["run_id"])

    def interface_bytes(self) -> Mapping[str, int]:
        """What each site's interface has counted, in both directions.

        Interfaces of sites that were replaced stay for a while.
        """
        found = {}
        for place in (self.aggregator.parent / "nodes").glob("site-*"):
            link = Path("/sys/class/net") / local_network.device_name(place)
            counters = [link / "statistics" / f"{w}_bytes" for w in ("rx", "tx")]
            with contextlib.suppress(FileNotFoundError):
                found[place.name] = sum(int(path.read_text()) for path in counters)
        return found

    def _write_job(self, document: Mapping[str, Any]) -> str:
        job_file.parse(dict(document))  # A mistake shows before anything starts.
        name = f"{document['name']}.toml"
        (self.folder / name).write_text(tomli_w.dumps(document))
        return name

    def down(self) -> None:
        """End everything, if it was begun."""
        if (self.folder / "fed.toml").exists():
            self._call("down", "fed.toml")

    def _call(self, *words: str) -> str:
        done = subprocess.run(  # noqa: S603 -- ours
            [*_CROSSFED, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout} {done.stderr}")
        return done.stdout


@contextmanager
def deployment() -> Iterator[Deployment]:
    """Have a folder for a federation, and end what was started in it."""
    with TemporaryDirectory() as name:
        made = Deployment(folder=Path(name))
        source = Path(__file__).with_name("paced_model.py")
        shutil.copy(source, made.folder / source.name)
        os.environ["OMP_NUM_THREADS"] = "1"  # Four sites share the cores.
        # Whoever ends this process does not leave a federation behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            yield made
        finally:
            made.down()
