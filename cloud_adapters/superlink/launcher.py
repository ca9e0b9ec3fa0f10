"""Flower's SuperExec and ServerApp, started without a secret on a command line.

Flower's SuperExec starts whatever bundle a run names, by a program whose arguments
hold the run's token, and every user of the host can read arguments. Here it starts
``deploy.aggregator_host.coordinator_process`` instead, only for the bundle of this
release, and hands over token and secret through a pipe. The process that is started
compares the bundle that it gets once more.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from cloud_adapters.flower.private.bundle import Fab, fab_from_proto
from cloud_adapters.flower.private.http import ProtobufClientInterceptor
from cloud_adapters.flower.private.runtime import (
    ExecutionSpec,
    LaunchResult,
    RuntimeHttpClient,
    TaskType,
    http_grid,
    mirror_output_to_queue,
    restore_output,
    serverapp_module,
    superexec_module,
)
from cloud_adapters.local import process_end
from cloud_adapters.superlink.guard import SecretSender, runtime_word


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperLinkPlace:
    """Where a SuperLink is.

    Attributes:
        address: ``127.0.0.1:PORT``.
        authority: File of the certificates that speak for it.
    """

    address: str
    authority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Confines:
    """What a coordinator's process is kept to.

    Attributes:
        bundle: SHA-256 of the only bundle that may be loaded, in hexadecimal.
        folder: The aggregator's, whose secrets the process may not read.
        config: The aggregator's configuration; empty for none.
    """

    bundle: str
    folder: str
    config: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a coordinator's process is given through its standard input.

    Attributes:
        address: Address of the SuperLink.
        authority: File of the certificates that speak for it.
        bundle: SHA-256 of the only bundle that may be loaded, in hexadecimal.
        parent: Process with which it ends.
        folder: The aggregator's, whose secrets the process may not read.
        config: The aggregator's configuration; empty for none.
        token: Flower's, for this run.
        word: What Runtime wants to see.
    """

    address: str
    authority: str
    bundle: str
    folder: str
    config: str
    parent: int
    token: str
    word: str


def run_superexec(
    place: SuperLinkPlace, confines: Confines, *, secret: bytes, command: Sequence[str]
) -> None:
    """Become a SuperExec.

    Args:
        place: The SuperLink.
        confines: Of the processes that are started.
        secret: That of Runtime.
        command: Starts the process that is given a ``Launch``.
    """
    word = runtime_word(secret)
    executor = CoordinatorExecutor(confines, word=word, command=command)
    module = superexec_module()
    module.get_executor = lambda *_, **__: executor
    module.RuntimeHttpClient = _client_with(word)
    module.run_superexec(
        runtime_api_address=place.address,
        insecure=False,
        root_certificates_path=place.authority,
        superexec_auth_secret=secret,
        runtime_dependency_install=False,
    )


class CoordinatorExecutor:
    """Starts coordinators, and nothing else: what Flower calls an executor."""

    def __init__(
        self, confines: Confines, *, word: str, command: Sequence[str]
    ) -> None:
        """Start none yet.

        Args:
            confines: Of the processes that are started.
            word: What Runtime wants to see.
            command: Starts a process that reads a ``Launch``.
        """
        self._confines = confines
        self._word = word
        self._command = list(command)
        self._processes: list[subprocess.Popen[bytes]] = []

    def get_eligible_capacity(
        self, supported_task_types: Collection[TaskType], **_: Any
    ) -> tuple[set[TaskType], set[str]]:
        """Ask the SuperLink only for coordinators."""
        return {TaskType.SERVER_APP} & set(supported_task_types), set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Return immediately: there is always room for one more."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a coordinator."""
        bundle = self._confines.bundle
        if spec.task_type is not TaskType.SERVER_APP or spec.fab_hash != bundle:
            return LaunchResult.failed(
                f"the run has the bundle {spec.fab_hash!r:.80}, but only this "
                f"release's bundle is started, {bundle}"
            )
        launch = Launch(
            address=spec.runtime_api_address,
            authority=spec.root_certificates_path or "",
            bundle=bundle,
            folder=self._confines.folder,
            config=self._confines.config,
            parent=os.getpid(),
            token=spec.token,
            word=self._word,
        )
        process = subprocess.Popen(  # noqa: S603 -- our own command
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        if process.stdin is not None:
            try:
                with process.stdin as pipe:
                    pipe.write(json.dumps(asdict(launch)).encode())
            except OSError as error:
                return LaunchResult.failed(f"the coordinator stopped: {error}")
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Forget those that have ended."""
        self._processes = [one for one in self._processes if one.poll() is None]

    def close(self) -> None:
        """Leave them: they end with this process."""


class BundleRefused(Exception):
    """A run's bundle is not the one of this release."""


def only(bundle: str) -> Callable[[Any], Fab]:
    """Make a reader of bundles that refuses all but one.

    Args:
        bundle: Its SHA-256, in hexadecimal.
    """

    def checked(message: Any) -> Fab:
        fab: Fab = fab_from_proto(message)
        found = hashlib.sha256(fab.content).hexdigest()
        if found != bundle:
            raise BundleRefused(
                f"the run has the bundle {found}, but only {bundle} is loaded"
            )
        return fab

    return checked


def run_serverapp(launch: Launch) -> None:
    """Become the ServerApp that a launch describes."""
    grid: Any = http_grid
    grid.RuntimeHttpClient = _client_with(launch.word)
    module = serverapp_module()
    module.fab_from_proto = only(launch.bundle)
    register = module.register_signal_handlers

    def register_and_explain(*arguments: Any, **more: Any) -> None:
        register(*arguments, **more)
        process_end.explain(launch.parent)

    module.register_signal_handlers = register_and_explain
    lines: Queue[str | None] = Queue()
    mirror_output_to_queue(lines)
    module.run_serverapp(
        runtime_api_address=launch.address,
        log_queue=lines,
        token=launch.token,
        insecure=False,
        certificates=Path(launch.authority).read_bytes(),
        parent_pid=launch.parent,
        runtime_dependency_install=False,
    )
    restore_output()


def _client_with(word: str) -> type[RuntimeHttpClient]:
    """Flower's client of Runtime, which adds the secret."""

    class Client(RuntimeHttpClient):
        def __init__(
            self,
            *arguments: Any,
            interceptors: Sequence[ProtobufClientInterceptor] = (),
            **more: Any,
        ) -> None:
            found = (*interceptors, SecretSender(word))
            super().__init__(*arguments, interceptors=found, **more)

    return Client
