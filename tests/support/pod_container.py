"""Pods of a fake cluster, as containers of the images that are built here."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import containers
from support.containers import CLOSED, STATE, USER

from cloud_adapters.compute.kube_manifest import USER_DATA


class PodContainer:
    """A pod that the cluster was asked for, as a container on this host's network.

    Attributes:
        name: Of its job.
        process: Ends with the container, with the same code.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        """Begin."""
        self.folder, self.name = folder, job["metadata"]["name"]
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        folder.mkdir()
        state = folder / "state"
        containers.folder(state)
        settings = folder / "user-data"
        settings.write_text(template["metadata"]["annotations"]["crossfed/user-data"])
        settings.chmod(0o444)
        shell, *words = (word.replace("$$", "$") for word in container["command"])
        labels = job["metadata"]["labels"]
        party = labels["app.kubernetes.io/name"].removeprefix("crossfed-")
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("podman", "run", "--name", self.name, *CLOSED),
                    *("--network", "host", "--user", f"{USER}:{USER}"),
                    *("--volume", f"{state}:{STATE}"),
                    *("--volume", f"{settings}:{USER_DATA}:ro"),
                    *("--entrypoint", shell, containers.image(party), *words),
                ],
                env=containers.environment(),
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        """What it has written."""
        return (self.folder / "log").read_text()

    def end(self) -> None:
        """Ask its first process to end, as the kubelet does."""
        containers.run("kill", "--signal", "TERM", self.name)

    def close(self) -> None:
        """End it, and leave nothing of it."""
        containers.end([self.name])
        self.process.wait(30)
