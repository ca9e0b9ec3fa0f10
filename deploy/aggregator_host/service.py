"""``crossfed aggregator up``: watches Flower's processes, and starts runs."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from cloud_adapters.flower_apps.bundle import bundle
from cloud_adapters.identity.platforms import PlatformVerifier
from cloud_adapters.local.child_process import Child
from cloud_adapters.net import ports
from cloud_adapters.net.ports import LOOPBACK
from cloud_adapters.nginx import config as proxy, processes as proxy_processes
from cloud_adapters.nginx.config import ProxySettings
from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.superlink.answer_limits import Limits
from cloud_adapters.superlink.control import FlowerControl
from deploy import audit_log
from deploy.aggregator_host import (
    admission,
    disk_reserve,
    enrolment_http,
    enrolment_nodes,
    enrolment_operator,
    host_secrets,
    log_files,
    monitor_process,
    newcomers,
    run_queue,
    superexec_process,
    superlink_process,
)
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_service import EnrolmentService
from deploy.aggregator_host.owner_service import OwnerService
from deploy.aggregator_host.run_queue import (
    CoordinatorStart,
    DeadCoordinators,
    FolderInUse,
    GiveUp,
    Outcome,
    QueuedRun,
    Requeue,
)
from deploy.exit_codes import STOPPED, status_of
from deploy.service_manager import ALIVE, READY, Notify
from federation import folder_lock
from federation.addresses import parse_address
from federation.durable_files import replace_file
from federation.errors import FederationError
from federation.protocols import Clock
from monitoring.runs.run_folder import RunFolder
from privacy import own_folder
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    server_names,
)
from privacy.secret_files import write_new

LOOK_SECONDS, START_LOOK_SECONDS = 1.0, 0.2
# A SuperLink that does not answer for so long may never do.
START_SECONDS = 60.0
RENEWAL_LOOK_SECONDS = 3600.0
SUPERLINK, SUPEREXEC, MONITOR = "superlink", "superexec", "monitor"
_OK, _UNAVAILABLE = 200, 503

# Settings that keep Flower's programs from calling home.
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def initialise(folder: Path, hosts: Sequence[str], *, clock: Clock) -> Authority:
    """Make an aggregator's certificates and secrets in a folder.

    Raises:
        KeyFileRefused: There are some.
        StoreUnavailable: The folder cannot be made.
    """
    with file_errors("make", folder):
        own_folder.make(folder)
    authority = Authority.create("crossfed aggregator", clock=clock)
    authority.save(folder)
    key = new_key()
    certificate = authority.issue_server(server_names(tuple(hosts)), key)
    write_new(folder / "server.key", key_pem(key))
    write_new(folder / "server.crt", certificate, mode=0o644)
    host_secrets.make(folder)
    return authority


@dataclass(kw_only=True)
class AggregatorService:
    """Everything that runs on the aggregator's host.

    Attributes:
        config: The operator's ``aggregator.toml``.
        config_path: Where that is.
        clock: Tells time.
        stopped: Set it to end ``run``.
        listener: Called with a word about what happens.
        notify: What the service manager hears, about once a second.
    """

    config: AggregatorConfig
    config_path: Path
    clock: Clock
    stopped: threading.Event = field(default_factory=threading.Event)
    listener: Callable[[str], None] = print
    notify: Notify = lambda _: None
    _children: list[Child] = field(default_factory=list, init=False)
    # Whether the SuperLink has answered since the service began.
    _answers: bool = field(default=False, init=False)
    # Runs whose coordinator was seen at work, since it holds the lock of their
    # folder, and how many looks ago.
    _dead: DeadCoordinators = field(default_factory=DeadCoordinators, init=False)
    _next_renewal: float = field(default=0.0, init=False)
    _told: set[str] = field(default_factory=set, init=False)
    # Folders of runs that the service has started and that have not ended.
    _at_work: set[Path] = field(default_factory=set, init=False)
    # Whether the disk has too little room for answers.
    _is_full: bool = field(default=False, init=False)

    def run(self) -> None:
        """Serve until ``stopped`` is set.

        Raises:
            FederationError: Nginx or Flower is not installed, a port is taken, or a
                file of the folder is missing or damaged.
        """
        config = self.config
        for folder in (config.folder, config.flower, config.logs, config.runs):
            with file_errors("make", folder):
                own_folder.make(folder)
                own_folder.close(folder, self.listener)
        for site in enrolment_operator.prepare(config, clock=self.clock):
            self.listener(
                f"sites.json is older than ca.crl and did not list site {site!r} as "
                "revoked: it is revoked again. Check the output of crossfed aggregator "
                "sites"
            )
        now, who = self.clock.now(), audit_log.SERVICE
        audit_log.note_settings(config.folder, asdict(config.file), at=now, who=who)
        port = self._port()
        authority = (config.folder / "ca.crt").read_bytes()
        with ExitStack() as stack:
            complaint = (
                f"another aggregator is running in {config.folder}: stop it first"
            )
            stack.enter_context(folder_lock.hold(config.lock, complaint))
            self._await_ports(port)
            self._prepare_disk()
            secret = self._secret()
            control = stack.enter_context(
                FlowerControl(f"{LOOPBACK}:{port}", authority, secret)
            )
            handlers = self._handlers(control)
            service_port = stack.enter_context(
                enrolment_http.serve(handlers, config.file.service_port)
            )
            self._children = [
                *self._flower(port),
                *self._proxy(port, service_port),
                *self._monitor(),
            ]
            for child in self._children:
                stack.callback(child.stop)
            # A SuperLink that ends waits for its clients to close their connections.
            stack.callback(control.disconnect)
            self._serve(control)
        self.listener(
            "the aggregator has ended on request; unfinished runs continue when it is "
            "started again"
        )

    def _secret(self) -> bytes:
        """The secret of Control; both secrets are made if somebody has removed them.

        Raises:
            KeyFileRefused: Others may read a secret.
            StoreUnavailable: One cannot be written.
        """
        folder = self.config.folder
        with file_errors("write secrets in", folder):
            for name in host_secrets.make(folder):
                self.listener(f"{folder / name} was missing and has been created")
        host_secrets.read(folder / host_secrets.RUNTIME)
        return host_secrets.read(folder / host_secrets.CONTROL)

    @property
    def _limits(self) -> Limits:
        return self.config.file.limits.bytes()

    def _prepare_disk(self) -> None:
        """See that the SuperLink's state gives space back, and keep some in reserve.

        Raises:
            StoreUnavailable: The state is damaged or cannot be written.
        """
        superlink_process.prepare(self.config.state)
        self._look_at_disk()

    def _look_at_disk(self) -> None:
        """Report when the disk is too full for answers, and when it no longer is."""
        shortage = disk_reserve.shortage(self.config)
        is_full = bool(shortage)
        if is_full and not self._is_full:
            self.listener(shortage)
        elif self._is_full and not is_full:
            self.listener(
                f"the disk of {self.config.folder} has enough free space again"
            )
        self._is_full = is_full
        if not is_full and not disk_reserve.is_there(self.config.folder):
            disk_reserve.fill(self.config.folder)

    def _handlers(self, control: FlowerControl) -> dict[str, enrolment_http.Handler]:
        enrolment = EnrolmentService(
            config=self.config,
            register=partial(enrolment_nodes.register, control),
            verifier=PlatformVerifier(
                clock=self.clock,
                sts_endpoint=self.config.file.platforms.sts,
                google_certificates=self.config.file.platforms.google_certificates,
            ),
            clock=self.clock,
            listener=self.listener,
        )
        return {
            "GET /health": self._health,
            "GET /enroll": enrolment.authority,
            "POST /enroll": enrolment.handle,
            "POST /owner": OwnerService(
                config=self.config, clock=self.clock, listener=self.listener
            ).handle,
        }

    @property
    def _serves(self) -> bool:
        needed = (child for child in self._children if child.name != MONITOR)
        return self._answers and all(child.is_up for child in needed)

    def _health(self, body: bytes) -> tuple[int, bytes]:
        """Return only whether every program runs and the disk has space."""
        del body
        disk = "disk full" if self._is_full else "ok"
        state = disk if self._serves else "starting"
        status = _OK if state == "ok" else _UNAVAILABLE
        return status, json.dumps({"status": state}).encode()

    def _serve(self, control: FlowerControl) -> None:
        trouble, patience_ends = "", self.clock.monotonic() + START_SECONDS
        while not self.stopped.is_set():
            pause = LOOK_SECONDS if self._answers else START_LOOK_SECONDS
            for child in self._children:
                # A SuperExec that cannot reach it waits longer with every attempt.
                if self._answers or child.name != SUPEREXEC:
                    child.watch()
            self._bound_logs()
            self._look_at_disk()
            try:
                if not self._answers:
                    control.nodes()
                    self._answers = True
                self._renew(control)
                self._schedule(control)
            except FederationError as error:
                # It takes seconds to start; after that, a person must know why not.
                tells = self._answers or self.clock.monotonic() > patience_ends
                if str(error) != trouble and tells:
                    self.listener(str(error))
                    trouble = str(error)
            else:
                trouble = ""
            self._tell_state()
            self.stopped.wait(pause)

    def _tell_state(self) -> None:
        file = self.config.file
        if self._serves:
            place = file.listen if file.proxy else "your own reverse proxy"
            self._tell_once(f"the aggregator is ready: sites connect to {place}")
        self.notify(f"{READY}\n{ALIVE}" if self._serves else ALIVE)

    def _bound_logs(self) -> None:
        try:
            log_files.bound((self.config.logs, self.config.proxy))
        except OSError as error:
            self._tell_once(f"cannot limit the size of a log: {error}")

    def _renew(self, control: FlowerControl) -> None:
        """Renew the server's certificate when it is due; the SuperLink restarts."""
        now = self.clock.monotonic()
        if now < self._next_renewal:
            return
        self._next_renewal = now + RENEWAL_LOOK_SECONDS
        if enrolment_operator.renew_server(self.config, clock=self.clock):
            self.listener("the server's certificate was renewed")
            for child in self._children:
                if child.name == SUPERLINK:
                    control.disconnect()
                    child.stop()

    def _schedule(self, control: FlowerControl) -> None:
        """Start runs whose turn it is; fail runs that make no progress."""
        queue = run_queue.handed_over(self.config.runs)
        for one in queue.damaged:
            self._tell_once(f"run {one.run.path.name} is not started: {one.reason}")
        # A coordinator whose files were damaged under it is let finish.
        self._tell_ends(queue.runs)
        is_busy = any(one.run.is_locked() for one in queue.damaged)
        if is_busy or all(one.outcome is not None for one in queue.runs):
            return
        self._tell_revoked(queue.runs)
        self._end_dead(control, queue.runs)
        flower, now = control.runs(), self.clock.now()
        working = [one for one in queue.runs if one.works(flower)]
        self._end_hanging(control, working)
        newcomers.note(self.config.folder, working, run_queue.slots_of(queue.runs))
        plan = admission.admission(self.config, queue.runs, flower, now=now).plan()
        self._ask_to_yield(one for one in queue.runs if one.name in plan.pause)
        for action in run_queue.decide(queue.runs, flower, plan.start):
            run = action.handed.run
            if isinstance(action, GiveUp):
                self._give_up(control, action)
            elif isinstance(action, FolderInUse):
                self._tell_once(
                    f"run {run.path.name} waits for a process that holds {run.lock}, "
                    "probably its last coordinator: if it does not end, end it"
                )
            elif isinstance(action, Requeue):
                run_queue.requeue(action.handed, at=now)
                self.listener(f"run {run.path.name} waits for its next turn")
            else:
                self._start(control, action, run)

    def _tell_revoked(self, runs: Iterable[QueuedRun]) -> None:
        gone = admission.revoked(self.config)
        for one in runs:
            for site in gone.intersection(one.request.sites):
                if one.outcome is None:
                    self._tell_once(
                        f"site {site} of run {one.run.path.name} was revoked: the run "
                        "goes on without it, or fails if it needs all of its sites"
                    )

    def _ask_to_yield(self, runs: Iterable[QueuedRun]) -> None:
        for one in runs:
            if not one.yields:
                run_queue.ask_to_yield(one.run)
                self.listener(f"run {one.name} makes way after its round")

    def _end_hanging(self, control: FlowerControl, runs: Iterable[QueuedRun]) -> None:
        """End coordinators that note nothing for longer than a round may take."""
        now, limit = self.clock.now(), self.config.file.connect_seconds
        for one in runs:
            if one.coordinator and one.hangs(now, connect_seconds=limit):
                self.listener(
                    f"the coordinator of run {one.name} has noted nothing for longer "
                    "than a round may take, and is ended: its sites are free"
                )
                control.stop(int(one.coordinator.flower_run))

    def _tell_ends(self, runs: Sequence[QueuedRun]) -> None:
        for one in runs:
            if one.outcome is not None and one.run.path in self._at_work:
                try:
                    self._note("run.end", one.run, status=one.status, reason=one.reason)
                except FederationError as error:  # Tried again; others go on.
                    self._tell_once(str(error))
                    continue
                self._at_work.remove(one.run.path)
                reason = f": {one.reason}" if one.reason else ""
                self.listener(f"run {one.run.path.name} {one.status}{reason}")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.listener(text)

    def _end_dead(self, control: FlowerControl, handed: Sequence[QueuedRun]) -> None:
        """End Flower's run if its coordinator was killed.

        Flower itself would notice after a minute.
        """
        for run, number in self._dead.look(handed, self.clock.now()):
            self.listener(f"the coordinator of run {run.path.name} has died")
            control.stop(number)

    def _give_up(self, control: FlowerControl, action: GiveUp) -> None:
        run, reason = action.handed.run, action.reason
        how = status_of(action.code)
        self.listener(f"run {run.path.name} {how}: {reason}")
        self._note("run.end", run, reason=reason)
        self._at_work.discard(run.path)
        # First: its coordinator, if one works, does not say otherwise when it ends.
        run_queue.leave_outcome(run, Outcome(code=action.code, message=reason))
        if action.code == STOPPED and action.at_work is None:
            run_queue.note_stopped(run, reason, at=self.clock.now())
        if action.at_work is not None:
            control.stop(action.at_work)

    def _start(
        self, control: FlowerControl, action: CoordinatorStart, run: RunFolder
    ) -> None:
        run_queue.check_room(run)
        self._note("run.start", run)
        number = control.start(
            {
                "folder": str(run.path.resolve()),
                "config": str(self.config_path.resolve()),
            }
        )
        run_queue.note_start(
            action.handed, number, fruitless=action.fruitless, at=self.clock.now()
        )
        again = "" if action.handed.coordinator is None else " again"
        self._at_work.add(run.path)
        self.listener(f"run {run.path.name} is started{again}")

    def _note(self, action: str, run: RunFolder, **details: str) -> None:
        folder, now, who = self.config.folder, self.clock.now(), audit_log.SERVICE
        audit_log.note(folder, action, run.path.name, at=now, who=who, **details)

    def _port(self) -> int:
        """Port of the SuperLink; a chosen one is stored, so nodes find it again."""
        port = self.config.superlink_port()
        if port is None:
            port = ports.free_port()
            replace_file(self.config.port_file, [str(port).encode()])
        return port

    def _await_ports(self, port: int) -> None:
        """Check that no other program listens where nginx and the SuperLink are to.

        Raises:
            PortTaken: Someone does.
        """
        proxy_processes.end_processes(self.config.proxy)
        file = self.config.file
        key = "superlink_port" if file.proxy else "listen"
        if file.proxy and not file.superlink_port:
            advice = f"stop what listens there, or remove {self.config.port_file}"
        else:
            advice = f"stop what listens there, or change {key} in aggregator.toml"
        ports.await_free(LOOPBACK, port, advice=advice, clock=self.clock)
        if file.proxy:
            host, outside = parse_address(file.listen, key="listen")
            advice = "stop what listens there, or change listen in aggregator.toml"
            # An nginx that was left over is gone by now.
            ports.await_free(
                host, outside, advice=advice, clock=self.clock, patience_seconds=1.0
            )

    def _flower(self, port: int) -> list[Child]:
        folder = self.config.folder.resolve()
        link = [
            *("--ssl-ca-certfile", str(folder / "ca.crt")),
            *("--ssl-certfile", str(folder / "server.crt")),
            *("--ssl-keyfile", str(folder / "server.key")),
            *("--host", LOOPBACK, "--port", str(port)),
            *("--isolation", "process", "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        ]
        database = self.config.state.resolve()
        start = superlink_process.command(self._limits, database, folder, link)
        execute = superexec_process.command(
            f"{LOOPBACK}:{port}",
            folder=folder,
            bundle=bundle().hash_str,
            config=self.config_path.resolve(),
        )
        return [self._child(SUPERLINK, start), self._child(SUPEREXEC, execute)]

    def _proxy(self, port: int, service_port: int) -> list[Child]:
        if not self.config.file.proxy:
            return []
        settings = ProxySettings(
            listen=self.config.file.listen,
            superlink_port=port,
            service_port=service_port,
            folder=self.config.folder,
            work=self.config.proxy,
        )
        return [self._child("proxy", proxy.prepare(settings))]

    def _monitor(self) -> list[Child]:
        file = self.config.file
        if file.monitor.port:
            self.listener(
                "serves the live page: crossfed aggregator page prints its address"
            )
        elif not (file.alerts or file.monitor.traces):
            return []
        command = monitor_process.command(self.config_path.resolve())
        return [self._child(MONITOR, command)]

    def _child(self, name: str, command: Sequence[str]) -> Child:
        programs = str(Path(sys.executable).parent)
        environment = {
            **os.environ,
            **_QUIET,
            "FLWR_HOME": str(self.config.flower.resolve()),
            "PATH": os.pathsep.join((programs, os.environ.get("PATH", os.defpath))),
        }
        return Child(
            name=name,
            command=command,
            environment=environment,
            logs=self.config.logs,
            clock=self.clock,
            listener=self.listener,
        )
