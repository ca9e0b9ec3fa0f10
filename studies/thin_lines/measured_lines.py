"""The product's own federation on this machine, whose sites are at the ends of lines.

Each site is in a network of its own behind a cable that the kernel makes narrow
(``tests/support/network.py``), and ``crossfed run`` runs jobs on it. See
``utilisation.py``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import network, programs
from support.deployment import deployed

from federation.job import code_files, job_file
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


def refusal() -> str:
    """Why this machine cannot have such lines; empty if it can."""
    return network.refusal() or programs.missing("nginx")


@dataclass(kw_only=True)
class Deployment:
    """A federation that is up.

    Attributes:
        folder: All of it, and where its commands run.
        stack: Ends what was started.
    """

    folder: Path
    stack: ExitStack
    _hosts: network.Network | None = field(default=None, init=False)

    @property
    def aggregator(self) -> Path:
        """Its folder."""
        return self.folder / "aggregator"

    def up(self, start: Mapping[str, Any], mbit: float) -> None:
        """Have it up, with lines of a width, and run a first job.

        Args:
            start: A short job; the first one names the sites.
            mbit: Of each line, in each direction.
        """
        if self._hosts is None:
            sites = [site["name"] for site in start["sites"]]
            self._hosts = self.stack.enter_context(network.network(sites))
            self.stack.enter_context(
                deployed(
                    self.folder,
                    tomli_w.dumps(_POLICY),
                    host=self._hosts.address,
                    namespaces=self._hosts.namespaces,
                    environment={code_files.FOLDERS: str(self.folder)},
                    sites=sites,
                    forked=False,
                )
            )
        for site in self._hosts.namespaces:
            self._hosts.narrow(site, mbit)
        self.run(start)

    def run(self, job: Mapping[str, Any]) -> RunFolder:
        """Run a job to its end."""
        path = self._write_job(job)
        words = ["run", path, "--json"]
        words += ["--aggregator", str(self.aggregator / "aggregator.toml")]
        result = json.loads(self._call(*words))
        return RunFolder(self.aggregator / "runs" / job["name"] / result["run_id"])

    def interface_bytes(self) -> Mapping[str, int]:
        """What each site's interface has counted, in both directions."""
        hosts = self._hosts
        return {} if hosts is None else {s: hosts.num_bytes(s) for s in hosts.addresses}

    def _write_job(self, document: Mapping[str, Any]) -> str:
        job_file.parse(dict(document))  # A mistake shows before anything starts.
        name = f"{document['name']}.toml"
        (self.folder / name).write_text(tomli_w.dumps(document))
        return name

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
    with TemporaryDirectory() as name, ExitStack() as stack:
        made = Deployment(folder=Path(name), stack=stack)
        source = Path(__file__).with_name("paced_model.py")
        shutil.copy(source, made.folder / source.name)
        os.environ["OMP_NUM_THREADS"] = "1"  # Four sites share the cores.
        # Whoever ends this process does not leave a federation behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        yield made
