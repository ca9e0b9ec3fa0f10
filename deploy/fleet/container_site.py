"""Parties in containers of this host: what is done for one before and while it works.

Their folders belong to the user of their containers. A site's keys are made and used
in containers of its own image; this process only reads there what is public. What the
aggregator writes, a command in its container writes; this process makes its folder,
and reads.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloud_adapters.compute.containers import INSIDE, USER, ContainerPool
from cloud_adapters.compute.pool import Line, NodeSpec, NodeState
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.fleet import reconcile
from deploy.fleet.tables.site_machine import SiteMachine
from federation import durable_files
from federation.errors import ComputeError
from privacy.membership.token import Token
from privacy.secagg.agreement.roster import Roster

# In a container of an aggregator, as in its image.
_CONFIG, _JOB = PurePosixPath("/var/lib/crossfed/fed/aggregator.toml"), "job.toml"


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
        _give(self.folder)
        config = str(INSIDE / "site.toml")
        return self._spec(name, max_seconds, ("site", "up", "--config", config))

    def enrol(self, token: Token, organisation: str) -> None:
        """Make it a member; the token is passed where no other user can read it.

        Raises:
            ComputeError: It could not be enrolled; with the reason.
        """
        words = ("enroll", "-", "--folder", str(INSIDE), "--organisation", organisation)
        self._run(*words, given=f"{token.text}\n")

    def end_enrolment(self) -> None:
        """End an enrolment that a command has left running that was killed.

        Raises:
            ComputeError: It could not be ended.
        """
        self.pool.end_once(self.site.name)

    def accept(self, roster: Roster) -> None:
        """Have it trust the sites of the aggregator's roster.

        Raises:
            ComputeError: It could not; with the reason.
        """
        accept = ("--accept", roster.digest.hex())
        self._run("enroll", "--roster", "--folder", str(INSIDE), *accept)

    def _run(self, *command: str, given: str = "") -> None:
        _give(self.folder)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAggregator:
    """An aggregator in a container.

    Attributes:
        image: Image of its container.
        folder: Its folder on this host.
        pool: Runs its container.
        labels: By which its container is found.
    """

    image: str
    folder: Path
    pool: ContainerPool
    labels: Mapping[str, str]

    def spec(self, max_seconds: float, served: str) -> NodeSpec:
        """Its node, whose folder is given to the container's user.

        Args:
            max_seconds: After so long it ends by itself.
            served: Its address for sites.

        Raises:
            StoreUnavailable: It cannot be given.
        """
        _give(self.folder)
        return NodeSpec(
            name=reconcile.AGGREGATOR,
            command=("aggregator", "up", "--config", str(_CONFIG)),
            labels={},
            max_seconds=max_seconds,
            image=self.image,
            line=Line(),
            folder=str(self.folder),
            inside=str(_CONFIG.parent),
            served=served,
        )

    def give_new(self, draft: Path) -> None:
        """Make the container's user the owner of a folder that no container has had.

        Raises:
            StoreUnavailable: It cannot be.
        """
        with file_errors("give away", draft):
            for path in (draft, *draft.rglob("*")):
                os.chown(path, USER, USER, follow_symlinks=False)

    def invite(self, site: str, address: str) -> Token:
        """Make a token that lets a site enrol, once.

        Raises:
            ComputeError: It could not be made; with the reason.
        """
        said = self._run("aggregator", "invite", site, "--address", address)
        return Token.parse(str(json.loads(said)["token"]))

    def hand_over(self, job: bytes, *, resume: bool) -> str:
        """Submit a job, or resume its newest run; the id of the run.

        Raises:
            ComputeError: It cannot be run so; with the reason.
            StoreUnavailable: The job cannot be written beside the aggregator's files.
        """
        durable_files.replace_file(self.folder / _JOB, [job])
        _give(self.folder)
        more = ["--resume"] if resume else []
        path = str(_CONFIG.parent / _JOB)
        said = self._run("run", path, "--detach", *more)
        return str(json.loads(said)["run_id"])

    def stop(self, run: str) -> None:
        """Ask a run to end after its current round.

        Raises:
            ComputeError: It could not be asked; with the reason.
        """
        self._run("stop", run)

    def _run(self, verb: str, *words: str) -> str:
        labels = {**self.labels, reconcile.ROLE: reconcile.AGGREGATOR}
        alive = [
            node for node in self.pool.nodes(labels) if node.state is NodeState.RUNNING
        ]
        if not alive:
            raise ComputeError(
                "the aggregator's container has ended: run this command again"
            )
        config = "--aggregator" if verb in {"run", "stop"} else "--config"
        end = (config, str(_CONFIG), "--json")
        return self.pool.run_in(alive[-1].id, "crossfed", verb, *words, *end)


def _give(folder: Path) -> None:
    """Make the container's user the owner of a folder and its files."""
    with file_errors("give away", folder):
        # Not further down: there, it could have put links to files of others.
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER, follow_symlinks=False)
