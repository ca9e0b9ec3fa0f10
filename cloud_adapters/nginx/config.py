"""The reverse proxy before the aggregator: nginx, and what it lets in.

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

from cloud_adapters.local import closed_memory
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
OWN_USER = "run crossfed aggregator as a user of its own, who owns the folder"

_PROGRAMS = ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/local/bin/nginx")
_NOT_QUOTED = frozenset("\"'\\${};\n\r")

_TEXT = """\
# Made by crossfed aggregator up: changes are lost.
daemon off;
pid {pid};
error_log {error_log} warn;
worker_processes 2;
# So that a revoked site's long request ends, too.
worker_shutdown_timeout 10s;

events {{
    worker_connections 1024;
}}

http {{
    server_tokens off;
    default_type application/octet-stream;
    client_body_temp_path "{temporary}/body";
    proxy_temp_path "{temporary}/proxy";
    fastcgi_temp_path "{temporary}/fastcgi";
    uwsgi_temp_path "{temporary}/uwsgi";
    scgi_temp_path "{temporary}/scgi";

    # Sites ask ten times a second: only what fails, and enrolments, are worth a line.
    # No header is written: one of them signs for the node.
    map "$status $crossfed_way" $crossfed_logged {{
        default 1;
        "~^2.. (fleet|health)$" 0;
    }}
    log_format crossfed escape=json
        '{{"time":"$time_iso8601","from":"$remote_addr","certificate":"$ssl_client_verify",'
        '"site":"$ssl_client_s_dn","request":"$request","status":$status,'
        '"bytes_in":$request_length,"bytes_out":$bytes_sent,"seconds":$request_time}}';
    access_log {access_log} crossfed if=$crossfed_logged;

    # The whole request line as it came, and nothing else, decides.
    map $request $crossfed_way {{
        default "";
        "~^POST /v1/fleet/({calls}) HTTP/1\\.1$" fleet;
        # Load balancers ask in HTTP/1.0, some of them.
        "~^GET /health HTTP/1\\.[01]$" health;
        "~^(GET|POST) /enroll HTTP/1\\.1$" enroll;
    }}
    limit_req_zone $binary_remote_addr zone=health:1m rate=10r/s;
    limit_req_zone $binary_remote_addr zone=enroll:1m rate=2r/s;
    limit_conn_zone $binary_remote_addr zone=connections:1m;
    limit_req_status 429;
    limit_conn_status 429;

    upstream superlink {{
        server 127.0.0.1:{superlink_port};
        keepalive 16;
        # Less than the SuperLink's own 5 s, or one of its closings meets a request.
        keepalive_timeout 3s;
    }}

    server {{
        listen {listen} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.3;
        ssl_client_certificate {authority};
        ssl_crl {revoked};
        ssl_verify_client optional;
        ssl_verify_depth 1;
        # A session that is taken up again would bring back a revoked certificate.
        ssl_session_tickets off;
        ssl_session_cache off;

        client_header_timeout 10s;
        client_body_timeout 30s;
        send_timeout 30s;
        keepalive_timeout 75s;
        keepalive_requests 100000;
        # Nginx looks at a certificate when a connection begins: one that expires
        # meanwhile is good for so long at most.
        keepalive_time {connection_seconds}s;
        reset_timedout_connection on;
        client_header_buffer_size 4k;
        large_client_header_buffers 4 8k;
        client_max_body_size {max_enrolment_bytes};
        limit_conn connections {max_connections};

        proxy_http_version 1.1;
        proxy_set_header Host localhost;
        proxy_set_header Connection "";
        proxy_set_header X-Forwarded-For "";
        proxy_set_header X-Forwarded-Proto "";
        proxy_set_header Forwarded "";
        # Of the host alone: see cloud_adapters/superlink/guard.py.
        proxy_set_header X-Crossfed-Secret "";
        proxy_next_upstream off;
        proxy_connect_timeout 5s;
        proxy_max_temp_file_size 0;

        # A certificate that is expired, revoked or not ours.
        error_page 495 = @refused;

        if ($crossfed_way = "") {{
            return 404;
        }}

        location /v1/fleet/ {{
            if ($ssl_client_verify != SUCCESS) {{
                return 403;
            }}
            client_max_body_size {max_fleet_bytes};
            proxy_request_buffering off;
            proxy_read_timeout 60s;
            proxy_send_timeout 60s;
            proxy_ssl_protocols TLSv1.3;
            proxy_ssl_verify on;
            proxy_ssl_name {upstream_name};
            proxy_ssl_server_name on;
            proxy_ssl_trusted_certificate {authority};
            proxy_pass https://superlink;
        }}

        location = /health {{
            limit_req zone=health burst=20 nodelay;
            proxy_read_timeout 10s;
            proxy_pass http://127.0.0.1:{service_port};
        }}

        location = /enroll {{
            limit_req zone=enroll burst=20 nodelay;
            client_body_buffer_size {max_enrolment_bytes};
            proxy_read_timeout 30s;
            proxy_pass http://127.0.0.1:{service_port};
        }}

        location / {{
            return 404;
        }}

        location @refused {{
            return 403;
        }}
    }}
}}
"""


class ProxyFailed(FederationError):
    """Nginx is missing, does not accept its configuration or does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """What the proxy's configuration is made from.

    Attributes:
        listen: ``ADDRESS:PORT`` where sites connect.
        superlink_port: Of the SuperLink on the loopback.
        service_port: Of health and enrolment on the loopback.
        folder: Holds ``ca.crt``, ``ca.crl``, ``server.crt`` and ``server.key``.
        work: Folder of nginx's own: configuration, pid, logs, what does not fit into
            memory.
        upstream_name: A name in the SuperLink's certificate; nginx compares no
            addresses.
        max_connections: Open at a time from one address.
        connection_seconds: How old a connection may grow.
    """

    listen: str
    superlink_port: int
    service_port: int
    folder: Path
    work: Path
    upstream_name: str = "localhost"
    max_connections: int = 64
    connection_seconds: int = 600

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
    return _TEXT.format(
        listen=f"{_plain(bracketed(host))}:{port}",
        superlink_port=settings.superlink_port,
        service_port=settings.service_port,
        upstream_name=_plain(settings.upstream_name),
        max_connections=settings.max_connections,
        connection_seconds=settings.connection_seconds,
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
    find_program()
    if trouble := open_memory():
        raise ProxyFailed(f"{trouble}: {OWN_USER}")
    (settings.work / "temporary").mkdir(parents=True, exist_ok=True)
    settings.config.write_text(config_text(settings), encoding="utf-8")
    check(settings.work)
    starter = [sys.executable, "-I", "-m", "cloud_adapters.nginx.processes"]
    return [*starter, str(settings.work.resolve())]


def find_program() -> str:
    """Where nginx is.

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
    """Why other programs could read the key in nginx's memory; empty if none can.

    Without root there is nothing to close: nginx runs as the service's own user, whose
    programs can read the key's file.
    """
    if os.geteuid() != 0 or not (found := closed_memory.obstacle()):
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
            f"{text!r} has a character that nginx gives a meaning to: choose another",
            key="proxy",
        )
    return text
