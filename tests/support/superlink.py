"""A real SuperLink with its SuperExec, as an aggregator's host runs them.

TLS by an authority of our own, state in SQLite, node keys, a secret for the SuperExec,
no telemetry. A ServerApp does what the test asks of it over a socket: see
``support.superlink_app``.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from support import forked as forks, superlink_state
from support.forked import Forked

from cloud_adapters.net.ports import free_port
from cloud_adapters.superlink.answer_limits import Limits
from cloud_adapters.superlink.guard import SecretSender, control_word
from deploy.aggregator_host import (
    host_secrets,
    superexec_process,
    superlink_process,
)
from deploy.aggregator_host.config import LimitsSpec
from federation.clock import SystemClock
from privacy.membership.certificates import Authority, key_pem, new_key

# Far more than anything takes: a busy machine fails no test.
PATIENCE_SECONDS = 120.0

# What an aggregator has by default.
LIMITS = LimitsSpec().bytes()

_TESTS = Path(__file__).parents[1]
_BIN = Path(sys.executable).parent

_PROJECT = """
[project]
name = "crossfed-test"
version = "1.0.0"
description = "Does what a test asks"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "crossfed"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "shim.server_app:app"
clientapp = "shim.client_app:app"

[tool.flwr.app.config]
socket = ""
"""
_SHIM = """
from flwr.serverapp import ServerApp
from support import superlink_app

app = ServerApp()


@app.main()
def main(grid, context):
    superlink_app.serve(grid, context.run_config["socket"])
"""
# For Flower's own node. One of ours must never run it: it leaves a file behind.
_CLIENT = """
import importlib
import os
import pathlib

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

pathlib.Path({trap!r}).touch()
if name := os.environ.get("CLIENT_IMPORTS"):
    importlib.import_module(name)

app = ClientApp()


@app.train()
def train(message, context):
    metrics = MetricRecord(dict([("num-examples", 1)]))
    content = RecordDict(dict(arrays=message.content["arrays"], metrics=metrics))
    return Message(content, reply_to=message)
"""


@dataclass
class SuperLink:
    """The processes of an aggregator's host.

    Attributes:
        folder: State, certificates and logs.
        address: ``127.0.0.1:PORT``.
        database: As Flower names it; a path is below ``folder``.
        limits: What nodes may leave there.
        forked: Whether programs of ours are forks; see ``support.forked``.
    """

    folder: Path
    address: str
    database: str = "state.db"
    limits: Limits = LIMITS
    forked: bool = False
    _processes: dict[str, subprocess.Popen[bytes] | Forked] = field(
        default_factory=dict
    )
    _app: socket.socket | None = None
    _run: int = 0

    @property
    def trap(self) -> Path:
        """A file that is there once somebody has run the bundle's code for sites."""
        return self.folder / "trap"

    @property
    def authority(self) -> bytes:
        """Root certificate, PEM."""
        return (self.folder / "ca.crt").read_bytes()

    @property
    def log(self) -> str:
        """What the SuperLink has said so far."""
        return (self.folder / "superlink.log").read_text()

    @property
    def pid(self) -> int:
        """Number of the SuperLink's process."""
        return self._processes["superlink"].pid

    def start(self) -> None:
        """Start the SuperLink, also after ``kill``."""
        host, _, port = self.address.partition(":")
        arguments = [
            *("--host", host, "--port", port),
            *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt"),
            *("--ssl-keyfile", "server.key"),
            *("--isolation", "process", "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        ]
        database = self.folder / self.database
        superlink_process.prepare(database)
        command = superlink_process.command(
            self.limits, database, self.folder, arguments
        )
        self._spawn("superlink", command)
        wait_for(self._is_up, "the SuperLink listens")

    def start_superexec(self) -> None:
        """Start what starts the ServerApp."""
        command = superexec_process.command(
            self.address, folder=self.folder, bundle=self._bundle().hash_str
        )
        self._spawn("superexec", command)

    def kill(self) -> None:
        """Kill the SuperLink; its database stays."""
        process = self._processes.pop("superlink")
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End all that was started, the ServerApp's process among it."""
        if self._app is not None:
            self._app.close()
        while self._processes:
            _, process = self._processes.popitem()
            with contextlib.suppress(ProcessLookupError):
                # Each leads a group of its own, in which its children are.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def register(self, key: ec.EllipticCurvePrivateKey) -> int:
        """Make a node's key known; its number."""
        public = key.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
        with self.control() as control:
            answer = control.RegisterNode(RegisterNodeRequest(public_key=public))
            return int(answer.node_id)

    def start_app(self) -> None:
        """Have a ServerApp run that does what ``ask`` tells it."""
        path = self.folder / "app.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(PATIENCE_SECONDS)
            config = user_config_to_proto({"socket": str(path)})
            request = StartRunRequest(
                fab=fab_to_proto(self._bundle()), override_config=config
            )
            with self.control() as control:
                self._run = int(control.StartRun(request).run_id)
            self._app, _ = listener.accept()
        self._app.settimeout(PATIENCE_SECONDS)

    def stop_app(self) -> None:
        """Stop the run, as a person does."""
        with self.control() as control:
            control.StopRun(StopRunRequest(run_id=self._run))
        if self._app is not None:
            self._app.close()

    def start_flower_node(
        self, name: str, key: ec.EllipticCurvePrivateKey, **environment: str
    ) -> None:
        """Start a node of Flower's own, which runs the app that it is sent."""
        self.register(key)
        (self.folder / f"{name}.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        )
        self._spawn(
            name,
            [_BIN / "flower-supernode"],
            *("--root-certificates", "ca.crt", "--superlink", self.address),
            *("--auth-supernode-private-key", f"{name}.key"),
            *("--port", str(free_port())),
            **environment,
        )

    def ask(self, op: str, **arguments: Any) -> Any:
        """Have the ServerApp do something and tell what came of it."""
        assert self._app is not None
        self._app.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
        with self._app.makefile("rb") as answers:
            answer = json.loads(answers.readline())
        assert not isinstance(answer, dict) or "raised" not in answer, answer["raised"]
        return answer

    def online(self) -> dict[int, float]:
        """Nodes that Flower counts as there, and until when."""
        return {int(node): until for node, until in self.ask("nodes").items()}

    def _bundle(self) -> Fab:
        with warnings.catch_warnings():  # Of its dependencies' plans.
            warnings.simplefilter("ignore", DeprecationWarning)
            content = build_fab_from_disk(self._project())
        return Fab(hashlib.sha256(content).hexdigest(), content, {})

    def _project(self) -> Path:
        """The bundle, before it is one."""
        folder = self.folder / "app"
        (folder / "shim").mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(_PROJECT)
        (folder / "LICENSE").write_text("None.\n")
        (folder / "shim" / "__init__.py").write_text("")
        (folder / "shim" / "server_app.py").write_text(_SHIM)
        client = _CLIENT.format(trap=str(self.trap))
        (folder / "shim" / "client_app.py").write_text(client)
        return folder

    def _is_up(self) -> bool:
        assert self._processes["superlink"].poll() is None, self.log
        try:
            host, _, port = self.address.partition(":")
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def control(self) -> Iterator[ControlHttpClient]:
        insecure = False
        secret = host_secrets.read(self.folder / host_secrets.CONTROL)
        client = ControlHttpClient.from_server_address(
            self.address,
            insecure,
            self.authority,
            interceptors=[SecretSender(control_word(secret))],
        )
        with client:
            yield client

    def _spawn(
        self, name: str, program: list[Any], *arguments: str, **more: str
    ) -> None:
        environment = os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONPATH": str(_TESTS),
            # The SuperExec starts the ServerApp by its name alone.
            "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            **more,
        }
        path = self.folder / f"{name}.log"
        entry, words = forks.program([*program, *arguments])
        if self.forked and entry:
            self._processes[name] = forks.shared().start(
                *words[1:],
                out=path,
                err=path,
                environment=environment,
                call=entry,
                folder=self.folder,
            )
            return
        with path.open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*program, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextlib.contextmanager
def serve(
    folder: Path,
    *,
    database: str = "state.db",
    limits: Limits = LIMITS,
    forked: bool = False,
) -> Iterator[SuperLink]:
    """Run a SuperLink and a ServerApp until the end of the block."""
    address = f"127.0.0.1:{free_port()}"
    running = SuperLink(folder, address, database, limits, forked)
    # A ServerApp cannot read in folders that are made beside its secrets later.
    for name in ("home", "store", "scratch"):
        (folder / name).mkdir()
    host_secrets.make(folder)
    authority = Authority.create("test", clock=SystemClock())
    authority.save(folder)
    key = new_key()
    (folder / "server.key").write_bytes(key_pem(key))
    certificate = authority.issue_server(("127.0.0.1",), key)
    (folder / "server.crt").write_bytes(certificate)
    if forked:
        superlink_state.place(folder / database)
    try:
        running.start()
        running.start_superexec()
        running.start_app()
        yield running
    finally:
        running.stop()


def wait_for(
    condition: Callable[[], Any], what: str, *, seconds: float = PATIENCE_SECONDS
) -> Any:
    """Wait until something holds, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:g} s in vain until {what}")
