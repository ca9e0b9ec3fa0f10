"""Pods of a fake cluster, as processes of this host."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.forked_program import forked_program

from cloud_adapters.compute.kube_manifest import STATE, USER_DATA


class PodProcess:
    """A pod that the cluster was asked for, as a process of this host.

    Attributes:
        name: Of its job.
        folder: Of all that it has.
        state: What is mounted there for its state.
        process: Runs its command.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        """Begin."""
        self.folder, self.name = folder, job["metadata"]["name"]
        self.state = folder / "state"
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        folder.mkdir()
        # As the volume of a pod with fsGroup.
        self.state.mkdir()
        self.state.chmod(0o2777)
        settings = folder / "user-data"
        settings.write_text(template["metadata"]["annotations"]["crossfed/user-data"])
        self._stack = ExitStack()
        self._stack.enter_context(forked_program(folder / "crossfed", folder / "log"))
        shell, option, script = (
            # As Kubernetes reads it.
            word.replace("$$", "$")
            for word in container["command"]
        )
        script = script.replace(f"{STATE}/", f"{self.state}/")
        script = script.replace(USER_DATA, str(settings))
        # As in the image, Python is that of the product.
        python = Path(sys.executable).parent
        path = os.pathsep.join([str(folder), str(python), os.environ["PATH"]])
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [shell, option, script],
                env={**os.environ, "PATH": path},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def site(self) -> Path:
        """Folder of the site."""
        return self.state / "site"

    @property
    def log(self) -> str:
        """What it has written."""
        return (self.folder / "log").read_text()

    def end(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it, and what it has started in its session."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self._stack.close()
