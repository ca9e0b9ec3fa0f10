"""The reverse proxy in front of the aggregator: nginx, and what it accepts.

Flower's SuperLink answers three interfaces on one port. Control starts code and Runtime
hands out tasks, so it listens on the loopback, and this proxy lets in the third alone,
Fleet, and that only for sites with a certificate of our authority that is not revoked.
What is let in is a list of whole request lines, held against the bytes as they came: no
path is taken apart, so no trick with one can matter.

The configuration is text made from a value, and ``check`` has nginx read it. Its
processes are in ``proxy_processes``.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.local import memory_hardening
from federation.addresses import bracketed, parse_address
from federation.errors import FederationError, JobError

# Flower sends objects in parts of 5 MB.
MAX_FLEET_BYTES = 64 << 20
MAX_ENROLMENT_BYTES = 64 << 10
# What a node calls. To register is not among it: that is what enrolment is for.
FLEET_CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "pull-object",
    "push-object",
    "confirm-message-received",
    "get-run",
    "get-fab",
)
PID_FILE = "nginx.pid"
CONFIG_FILE = "nginx.conf"
CHECK_SECONDS = 60.0
OWN_USER = "run crossfed aggregator as a separate user that owns the folder"

_PROGRAMS = ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/local/bin/nginx")
_TEMPLATE = Path(__file__).with_name("nginx.conf.j2")
_NOT_QUOTED = frozenset("\"'\\${};\n\r")


class ProxyFailed(FederationError):
    """Nginx is missing, does not accept its configuration or does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Settings of the proxy.

    Attributes:
        listen: ``ADDRESS:PORT`` where sites connect.
        superlink_port: Port of the SuperLink on the loopback.
        service_port: Port of health and enrolment on the loopback.
        folder: Holds ``ca.crt``, ``ca.crl``, ``server.crt`` and ``server.key``.
        work: Folder of nginx's own: configuration, pid, logs, what does not fit into
            memory.
        upstream_name: A name in the SuperLink's certificate; nginx compares no
            addresses.
        max_connections: Open at a time from one address.
        connection_seconds: How old a connection may grow.
        head_seconds: How long a request's head may take.
    """

    listen: str
    superlink_port: int
    service_port: int
    folder: Path
    work: Path
    upstream_name: str = "localhost"
    max_connections: int = 64
    connection_seconds: int = 600
    head_seconds: int = 10

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.work / CONFIG_FILE

    @property
    def pid_file(self) -> Path:
        """Holds nginx's process id while it runs."""
        return self.work / PID_FILE


def config_text(settings: ProxySettings) -> str:
    """Write nginx's configuration.

    Raises:
        JobError: ``listen`` is no address and port, or a path has a character that
            nginx gives a meaning to.
    """
    host, port = parse_address(settings.listen, key="listen")
    folder, work = settings.folder.resolve(), settings.work.resolve()
    import jinja2  # noqa: PLC0415 -- what starts nginx imports this module, too

    environment = jinja2.Environment(  # noqa: S701 -- paths are checked, and no HTML
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        listen=f"{_plain(bracketed(host))}:{port}",
        superlink_port=settings.superlink_port,
        service_port=settings.service_port,
        upstream_name=_plain(settings.upstream_name),
        max_connections=settings.max_connections,
        connection_seconds=settings.connection_seconds,
        head_seconds=settings.head_seconds,
        calls="|".join(FLEET_CALLS),
        max_fleet_bytes=MAX_FLEET_BYTES,
        max_enrolment_bytes=MAX_ENROLMENT_BYTES,
        certificate=_quoted(folder / "server.crt"),
        key=_quoted(folder / "server.key"),
        authority=_quoted(folder / "ca.crt"),
        revoked=_quoted(folder / "ca.crl"),
        pid=_quoted(work / PID_FILE),
        access_log=_quoted(work / "access.log"),
        error_log=_quoted(work / "error.log"),
        temporary=_plain(str(work / "temporary")),
    )


def prepare(settings: ProxySettings) -> list[str]:
    """Write the configuration, have nginx check it, and return its command.

    The command stays in the foreground. It first ends what an nginx before it has left
    (``proxy_processes``), so it may be started again whatever happened.

    Raises:
        ProxyFailed: Nginx is not installed or does not accept the configuration, or
            root starts it and its workers' memory cannot be closed.
        JobError: See ``config_text``.
    """
    if trouble := open_memory():
        raise ProxyFailed(f"{trouble}: {OWN_USER}")
    find_program()
    (settings.work / "temporary").mkdir(parents=True, exist_ok=True)
    settings.config.write_text(config_text(settings), encoding="utf-8")
    check(settings.work)
    starter = [sys.executable, "-I", "-m", "cloud_adapters.nginx.processes"]
    return [*starter, str(settings.work.resolve())]


def find_program() -> str:
    """Path of nginx.

    Raises:
        ProxyFailed: It is not installed.
    """
    found = shutil.which("nginx")
    for path in _PROGRAMS:
        if found is None and os.access(path, os.X_OK):
            found = path
    if found is None:
        raise ProxyFailed(
            "nginx is not installed: apt-get install nginx-light, or set proxy = false "
            "in aggregator.toml to try it out on the loopback"
        )
    return found


def open_memory() -> str:
    """Why other programs could read the key in nginx's memory; empty if they cannot.

    Without root there is nothing to close: nginx runs as the service's own user, whose
    programs can read the key's file.
    """
    if os.geteuid() != 0 or not (found := memory_hardening.obstacle()):
        return ""
    return (
        "other programs of the user 'nobody' could read the server's key in the "
        f"memory of root's nginx ({found})"
    )


def command(work: Path) -> list[str]:
    """Nginx, with the configuration of a folder.

    Raises:
        ProxyFailed: It is not installed.
    """
    whole = work.resolve()
    return [find_program(), "-p", str(whole), "-c", str(whole / CONFIG_FILE)]


def check(work: Path) -> None:
    """Have nginx check its configuration and its certificates.

    Raises:
        ProxyFailed: It does not accept them, or is not installed.
    """
    try:
        tried = subprocess.run(  # noqa: S603 -- our own arguments
            [*command(work), "-t", "-q"],
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProxyFailed(f"nginx does not start: {error}") from error
    if tried.returncode:
        raise ProxyFailed(
            f"nginx does not accept its configuration: {tried.stderr.strip()[-500:]}"
        )


def _quoted(path: Path) -> str:
    return f'"{_plain(str(path))}"'


def _plain(text: str) -> str:
    if _NOT_QUOTED & set(text):
        raise JobError(
            f"{text!r} contains a character that is special to nginx: choose another",
            key="proxy",
        )
    return text
