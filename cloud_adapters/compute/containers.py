"""Nodes that are containers of this host, run by podman as root.

Found by their labels, and by a digest of their folder, so that another deployment's
are never touched. Each has a network of its own, as in ``local_network``; one folder
of the host; and no right that a container can give up. One whose program has ended is
gone: launch another one with another token.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_adapters.compute import local_network
from cloud_adapters.compute.pool import Line, Market, Node, NodeSpec, NodeState
from cloud_adapters.compute.refusals import Refusal
from federation.errors import ComputeError, MachineRefused, StoreUnavailable
from federation.os_errors import os_errors

# Of the user in our images, whom the folder must belong to.
USER = 10001
# Where the folder of a node is in its container.
INSIDE = Path("/var/lib/crossfed/site")

_FOLDER, _NAME, _MARKET = "crossfed-folder", "crossfed-name", "crossfed-market"
_LOCK = "containers.lock"
_TOKEN_DIGITS, _FOLDER_DIGITS = 12, 16
# What a site needs to say that it leaves, before it is killed.
_PATIENCE_SECONDS = 30
_LOG_LINES, _LOG_CHARS = 1000, 64 << 10
_STATES = {
    "created": NodeState.STARTING,
    "configured": NodeState.STARTING,
    "initialized": NodeState.STARTING,
    "running": NodeState.RUNNING,
    "paused": NodeState.RUNNING,
    "stopping": NodeState.STOPPING,
}
_CLOSED = (
    "--init",
    "--read-only",
    "--read-only-tmpfs=false",
    *("--tmpfs", "/tmp:rw,size=1g,mode=1777"),  # noqa: S108 -- in the container
    *("--cap-drop", "all"),
    *("--security-opt", "no-new-privileges"),
    *("--user", f"{USER}:{USER}"),
)
_KILLED = 137
_NO_IMAGE = Refusal(MachineRefused, "build or pull the image first")
_OTHER = Refusal(ComputeError, "see podman's own words")
# A line of podman's log, as logrus writes it; errors begin with ``Error:``.
_LOG_LINE = re.compile(r'time="[^"]*" level=\w+ ')
_SHOWN_LINES = 4


def lacks(image: str) -> str:
    """Why an image that is made on its host cannot be started; empty if it can be."""
    if not image.startswith("localhost/"):
        return ""  # Podman can pull it.
    done = _call("image", "exists", image)
    if not done.returncode:
        return ""
    said = done.stderr.strip()
    return said or f"there is no image {image}: build it (deploy/containers)"


def refusal() -> str:
    """Why this host cannot run containers as nodes; empty if it can."""
    if shutil.which("podman") is None:
        return "podman is missing: install it"
    return local_network.refusal(Line())


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPool:
    """Containers of one deployment; see ``ComputePool``.

    Attributes:
        folder: Names the pool, and the bridge that its nodes are connected to.
    """

    folder: Path

    def launch(self, spec: NodeSpec, token: str) -> Node:
        """See ``ComputePool``."""
        if why := refusal():
            raise MachineRefused(f"cannot launch {spec.name}: {why}")
        # Names are the host's; tokens are the deployment's.
        text = f"{self._digest}/{token}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:_TOKEN_DIGITS]
        name = f"{spec.name}-{digest}"
        with _alone(self.folder):
            found = self._find(name)
            if found is not None and found.state is NodeState.STARTING:
                # A launch that was killed has made it, but not started it.
                _podman("rm", "--force", name)
                found = None
            if found is None:
                self._run(spec, name)
            return self._find(name) or _missing(name)

    def run_once(self, spec: NodeSpec, *, given: str) -> str:
        """Run a command in a container as a node's, to its end, and return its output.

        Args:
            spec: Command, image, folder and line.
            given: The command's input; it may be secret.

        Raises:
            ComputeError: It failed; with what it wrote.
        """
        name = f"{spec.name}-once"
        # One of a command that was killed goes on by itself: it is replaced.
        own = (f"--name={self._once(spec.name)}", "--replace", "--stop-timeout=1")
        with self._networked(spec, name) as options:
            words = ("run", "--rm", "--interactive", *own, *options)
            return _podman(*words, spec.image, *spec.command, given=given)

    def end_once(self, name: str) -> None:
        """End what ``run_once`` of a command that was killed has left running.

        Args:
            name: Name of the node.

        Raises:
            ComputeError: It could not be ended.
        """
        _podman("rm", "--force", "--ignore", "--time=0", self._once(name))

    def _once(self, name: str) -> str:
        return f"{name}-once-{self._digest}"

    def run_in(self, node_id: str, *command: str) -> str:
        """Run a command in a node that is at work, and return its output.

        Raises:
            ComputeError: It failed, or the node is not at work; with what was said.
        """
        return _podman("exec", node_id, *command)

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """See ``ComputePool``."""
        wanted = {_FOLDER: self._digest, **labels}
        filters = [f"--filter=label={name}={value}" for name, value in wanted.items()]
        said = _podman("ps", "--all", "--no-trunc", "--format=json", *filters)
        found = map(_node, json.loads(said or "[]"))
        return sorted(found, key=lambda node: (node.launched, node.id))

    def terminate(self, ids: Collection[str]) -> None:
        """See ``ComputePool``."""
        ours = [node for node in self.nodes({}) if node.id in ids]
        names = [node.id for node in ours if node.state is not NodeState.GONE]
        if not names:
            return
        # In the background, since it waits for them.
        words = ("podman", "stop", f"--time={_PATIENCE_SECONDS}", *names)
        quiet = 'exec "$@" > /dev/null 2>&1 &'
        subprocess.run(  # noqa: S603 -- ours
            ["/bin/sh", "-c", quiet, "sh", *words], check=True, start_new_session=True
        )

    def log(self, node_id: str) -> str:
        """See ``ComputePool``."""
        if all(node.id != node_id for node in self.nodes({})):
            return ""
        done = _call("logs", f"--tail={_LOG_LINES}", node_id)
        return (done.stdout + done.stderr)[-_LOG_CHARS:]

    def clean_up(self) -> None:
        """See ``ComputePool``."""
        nodes = self.nodes({})
        gone = [node.id for node in nodes if node.state is NodeState.GONE]
        if gone:
            _podman("rm", "--force", *gone)

    @property
    def _digest(self) -> str:
        where = str(self.folder.resolve()).encode()
        return hashlib.sha256(where).hexdigest()[:_FOLDER_DIGITS]

    def _find(self, name: str) -> Node | None:
        return next((node for node in self.nodes({}) if node.id == name), None)

    def _run(self, spec: NodeSpec, name: str) -> None:
        labels = {
            _FOLDER: self._digest,
            _NAME: spec.name,
            _MARKET: spec.market.value,
            **spec.labels,
        }
        options = [f"--label={key}={value}" for key, value in labels.items()]
        options += [f"--env={key}={value}" for key, value in spec.environment.items()]
        options += [f"--timeout={math.ceil(spec.max_seconds)}"]
        options += [f"--stop-timeout={_PATIENCE_SECONDS}"]
        with self._networked(spec, name) as more:
            words = ("run", "--detach", f"--name={name}", *options, *more)
            try:
                _podman(*words, spec.image, *spec.command)
            except ComputeError:
                # What could not be started; never another's that has this name.
                if self._find(name) is not None:
                    _call("rm", "--force", name)
                raise

    @contextlib.contextmanager
    def _networked(self, spec: NodeSpec, name: str) -> Iterator[Sequence[str]]:
        """What a container has that is not its own: a network and a folder."""
        inside = spec.inside or INSIDE
        mounts = [f"--volume={spec.folder}:{inside}:Z"] if spec.folder else []
        line, serves = spec.line or Line(), spec.served
        with local_network.joined(self.folder, name, line, serves) as network:
            yield [*_CLOSED, f"--network=ns:{network}", *mounts]


def _missing(name: str) -> Node:
    raise ComputeError(f"container {name} went while it was looked at")


def _node(row: Mapping[str, Any]) -> Node:
    """A container as ``podman ps`` describes it."""
    labels: Mapping[str, str] = row["Labels"]
    state = _STATES.get(row["State"], NodeState.GONE)
    is_gone, code = state is NodeState.GONE, row["ExitCode"]
    own = {_FOLDER, _NAME, _MARKET}
    trouble = "it was killed, or its time was over" if code == _KILLED else ""
    if not trouble and code:
        trouble = f"its program ended with {code} (podman logs {row['Names'][0]})"
    return Node(
        id=row["Names"][0],
        name=labels[_NAME],
        state=state,
        labels={key: value for key, value in labels.items() if key not in own},
        market=Market(labels[_MARKET]),
        launched=float(row["Created"]),
        ended=float(row["ExitedAt"]) if is_gone else None,
        trouble=trouble if is_gone else "",
    )


def _podman(*words: str, given: str = "") -> str:
    """Run podman and return its output.

    Raises:
        ComputeError: It failed.
    """
    done = _call(*words, given=given)
    if done.returncode:
        said = words_of(done.stderr) or done.stdout
        kind = _NO_IMAGE if "image" in said and "not known" in said else _OTHER
        raise kind.told(f"podman {words[0]}", said)
    return done.stdout


def words_of(stderr: str) -> str:
    """The end of what podman and its program have written, without podman's log.

    Its log complains on many hosts, for example that no systemd runs health checks, and
    the error comes last.
    """
    lines = [line for line in stderr.splitlines() if line.strip()]
    own = [line for line in lines if not _LOG_LINE.match(line)]
    return "\n".join((own or lines)[-_SHOWN_LINES:])


def _call(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    with os_errors(MachineRefused, "start podman", "install it"):
        return subprocess.run(  # noqa: S603 -- ours
            ["podman", *words],  # noqa: S607 -- where it is differs
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Launch alone in a folder: of two launches with one token, one makes the node."""
    with os_errors(StoreUnavailable, f"lock {folder / _LOCK}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
