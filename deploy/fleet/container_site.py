"""Sites in containers of this host: what is done for one before it starts.

Its keys are made and used in containers of its own image, by its user, who owns the
site's folder; this process only reads there what is public.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.compute.containers import INSIDE, USER, ContainerPool
from cloud_adapters.compute.pool import NodeSpec
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.fleet.deployment_file import SiteMachine
from privacy.membership.token import Token
from privacy.secagg.agreement.roster import Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSite:
    """A site in a container.

    Attributes:
        site: Its table.
        folder: Its folder on this host.
        pool: Runs its containers.
    """

    site: SiteMachine
    folder: Path
    pool: ContainerPool

    def spec(self, name: str, max_seconds: float) -> NodeSpec:
        """Its node, whose folder is given to the container's user.

        Raises:
            StoreUnavailable: It cannot be.
        """
        self._give_folder()
        config = str(INSIDE / "site.toml")
        return self._spec(name, max_seconds, ("site", "up", "--config", config))

    def enrol(self, token: Token, organisation: str) -> None:
        """Make it a member; the token is passed where no other user can read it.

        Raises:
            ComputeError: It could not be enrolled; with the reason.
        """
        words = ("enroll", "-", "--folder", str(INSIDE), "--organisation", organisation)
        self._run(*words, given=f"{token.text}\n")

    def accept(self, roster: Roster) -> None:
        """Have it trust the sites of the aggregator's roster.

        Raises:
            ComputeError: It could not; with the reason.
        """
        accept = ("--accept", roster.digest.hex())
        self._run("enroll", "--roster", "--folder", str(INSIDE), *accept)

    def _give_folder(self) -> None:
        """Make the container's user the owner of the folder and its files."""
        with file_errors("give away", self.folder):
            # Not further down: there, it could have put links to files of others.
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, USER, USER, follow_symlinks=False)

    def _run(self, *command: str, given: str = "") -> None:
        self._give_folder()
        self.pool.run_once(self._spec(self.site.name, 0.0, command), given=given)

    def _spec(self, name: str, max_seconds: float, command: Sequence[str]) -> NodeSpec:
        return NodeSpec(
            name=name,
            command=command,
            labels={},
            max_seconds=max_seconds,
            image=self.site.machine.image,
            line=self.site.line,
            folder=str(self.folder),
        )
