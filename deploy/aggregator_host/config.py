"""``aggregator.toml``: where the aggregator listens and stores its files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cloud_adapters.superlink.answer_limits import Limits
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.addresses import bracketed, is_host, parse_address, parse_port
from federation.errors import FederationError, JobError
from federation.job import job_file
from federation.job.job_keys import key

_ADVICE = (
    "run this in the aggregator's folder, or name its aggregator.toml (--config FILE); "
    "`crossfed aggregator init FOLDER` creates one"
)
# What an answer brings beside a vector that just does not go through the exchange.
ANSWER_ROOM_MIB = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSpec:
    """How much uncollected data sites may leave on the aggregator's disk.

    Attributes:
        answer_mib: Largest size of one answer in MiB; at least `exchange.threshold_mb`
            + 16. Raise it for a Flower app with larger answers.
        site_mib: Largest total size, in MiB, of one site's uncollected answers.
        run_mib: Largest total size, in MiB, of a run's uncollected answers.
        reserve_mib: Disk space, in MiB, that answers may not use. With less free space,
            the aggregator refuses answers, reports it in its log and in `/health`, and
            can still revoke a site.
    """

    answer_mib: int = key(default=96, low=1)
    site_mib: int = key(default=384, low=1)
    run_mib: int = key(default=16384, low=1)
    reserve_mib: int = key(
        default=256, low=80
    )  # A revocation's, and more: disk_reserve.

    def bytes(self) -> Limits:
        """The same in bytes."""
        return Limits(
            answer=self.answer_mib << 20,
            site=self.site_mib << 20,
            run=self.run_mib << 20,
            reserve=self.reserve_mib << 20,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformsSpec:
    """Services of clouds that vouch for machines, if they are not the clouds' own.

    Attributes:
        sts: URL of the AWS Security Token Service.
        google_certificates: URL of the certificates of Google's identity tokens.
    """

    sts: str = ""
    google_certificates: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """How many runs are at work at once, and whose turn it is.

    Attributes:
        max_runs: Runs at once; each has a coordinator with the model on this host. A
            run also needs a slot at each of its sites (`max_runs` in `site.toml`).
        slice_seconds: The shortest turn of a run while one of the same priority waits
            whose owner has used less than its share.
        age_seconds: Waiting time that raises a run by one priority.
        functions: Functions that a job submitted with an owner's token may name, as
            `policy.functions` of `site.toml`: the coordinator on this host calls them
            with the job's options.
        prices: A [speeds file](speeds-file.md), relative to this file, whose prices
            owners' dollars are counted with. A run that `crossfed up` has started and
            predicted has those of its own prediction.
    """

    prices: str = ""
    max_runs: int = key(default=1, low=1)
    slice_seconds: float = key(default=600.0, above=0.0)
    age_seconds: float = key(default=3600.0, above=0.0)
    functions: tuple[str, ...] = ("clients.models:*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSpec:
    """How the operator sees the runs.

    Attributes:
        port: Port of the live page and of `/metrics` on the loopback interface; 0 for
            neither. `crossfed aggregator page` prints the address.
        traces: URL of an OpenTelemetry collector that gets each ended round as a trace,
            for example `http://127.0.0.1:4318/v1/traces`; empty for none. Tokens and
            certificates are in its own variables, `OTEL_EXPORTER_OTLP_...`.
    """

    port: int = key(default=0, low=0, high=65535)
    traces: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSpec:
    """A place that is told when a run stalls or fails, or when the host needs care.

    Give one of `webhook`, `command` and `email`.

    Attributes:
        webhook: URL that gets `{"text": ...}` as JSON, as Slack, Mattermost and
            Microsoft Teams take it.
        command: A program and its arguments; it gets the text on standard input.
        email: An address.
        smtp: `HOST:PORT` of the mail server that takes the message.
        sender: The address that it comes from; by default the same.
    """

    webhook: str = ""
    command: tuple[str, ...] = ()
    email: str = ""
    smtp: str = "127.0.0.1:25"
    sender: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorFile:
    """The aggregator's configuration.

    Attributes:
        listen: `ADDRESS:PORT` that sites connect to, through the proxy.
        hosts: Names and addresses that sites use for this host; its certificate lists
            them.
        superlink_port: Port of Flower's SuperLink on the loopback interface; 0 for any
            free port.
        service_port: Port of health and enrolment on the loopback interface; 0 for any
            free port.
        proxy: Whether nginx runs in front of the SuperLink and admits only enrolled
            sites. Without it, the SuperLink itself listens on `listen`, which must be a
            loopback address.
        connect_seconds: How long a run waits for its sites to connect.
        limits: What sites may leave on this host's disk.
        exchange: Where large models travel; the same at all sites.
        platforms: Who vouches for machines that enrol by their cloud identity.
        queue: How many runs are at work at once, and whose turn it is.
        monitor: How the operator sees the runs.
        alerts: Whom to tell what needs a person.
        disk_mib: Models of this many MiB or more, sums of updates and the server
            optimiser's state are in files of the run's folder, and pass through memory
            in pieces; 0 for none.
    """

    listen: str = "0.0.0.0:8443"
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1")
    superlink_port: int = key(default=0, low=0, high=65535)
    service_port: int = key(default=0, low=0, high=65535)
    proxy: bool = True
    connect_seconds: float = key(default=600.0, above=0.0)
    limits: LimitsSpec = LimitsSpec()
    exchange: ExchangeSpec = ExchangeSpec()
    platforms: PlatformsSpec = PlatformsSpec()
    queue: QueueSpec = QueueSpec()
    monitor: MonitorSpec = MonitorSpec()
    alerts: tuple[AlertSpec, ...] = ()
    disk_mib: int = key(default=0, low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorConfig:
    """The aggregator's configuration and its folder, which holds the file.

    ``ca.key``, ``ca.crt``, ``server.key``, ``server.crt``: certificates.
    ``control.secret``, ``superexec.secret``: see
    ``deploy.aggregator_host.host_secrets``. ``aggregator.pem``, ``roster.toml``: the
    identity, and whom it believes. ``machines/``, ``roster.signature``: see
    ``deploy.aggregator_host.enrolment_machines``. ``flower/``: state of the SuperLink.
    ``proxy/``: of nginx. ``runs/``: runs. ``logs/``: logs.

    Attributes:
        file: What was read.
    """

    file: AggregatorFile
    folder: Path

    @property
    def address(self) -> str:
        """Its address for sites, ``HOST:PORT``: the first of ``hosts``."""
        _, port = parse_address(self.file.listen, key="listen")
        return f"{bracketed(self.file.hosts[0])}:{port}"

    @property
    def runs(self) -> Path:
        """Folder of all runs."""
        return self.folder / "runs"

    @property
    def flower(self) -> Path:
        """State of the SuperLink, and the ports that were chosen."""
        return self.folder / "flower"

    @property
    def state(self) -> Path:
        """File of the SuperLink's state."""
        return self.flower / "state.db"

    @property
    def port_file(self) -> Path:
        """Holds the SuperLink's port, if none is configured."""
        return self.flower / "port"

    def superlink_port(self) -> int | None:
        """Port of the SuperLink on the loopback; None before one was chosen.

        Raises:
            FederationError: The file of the chosen port is damaged.
        """
        if not self.file.proxy:
            return parse_address(self.file.listen, key="listen")[1]
        if self.file.superlink_port:
            return self.file.superlink_port
        if not self.port_file.exists():
            return None
        port = parse_port(self.port_file.read_text(errors="replace").strip())
        if port is None:
            raise FederationError(f"{self.port_file} holds no port number: remove it")
        return port

    @property
    def proxy(self) -> Path:
        """Folder of nginx."""
        return self.folder / "proxy"

    @property
    def lock(self) -> Path:
        """Held by the service while it runs."""
        return self.folder / "service.lock"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.folder / "logs"


def load(path: Path) -> AggregatorConfig:
    """Read an ``aggregator.toml``.

    Raises:
        JobError: It cannot be read, or a key is unknown or wrong.
    """
    file = job_file.load_table(path, AggregatorFile, check, advice=_ADVICE)
    return AggregatorConfig(file=file, folder=path.parent)


_NO_URL = "give a URL that begins with https:// or http:// and names a host"
_MAILBOX = re.compile(r"[^\s,;<>@]+@[^\s,;<>@]+")

NO_PROXY = (
    "proxy = false: before a site can enrol, a proxy of your own must be in front of "
    "listen and service_port. docs/howto/two-machines.md says what it must do"
)


def check(file: AggregatorFile) -> None:
    """Refuse contradictory settings.

    Raises:
        JobError: It does.
    """
    host, port = parse_address(file.listen, key="listen")
    if not file.proxy and host not in {"127.0.0.1", "::1", "localhost"}:
        raise JobError("without a proxy this must be a loopback address", key="listen")
    if not file.hosts:
        raise JobError("name at least one", key="hosts")
    for name in file.hosts:
        if not is_host(name):
            raise JobError(f"{name!r:.200} is not a host name or address", key="hosts")
    exchange.check(file.exchange)
    _check_limits(file)
    others = {port, file.superlink_port, file.service_port}
    if file.monitor.port and file.monitor.port in others:
        raise JobError("another key has this port, too", key="monitor.port")
    check_watching(file.monitor, file.alerts)


def check_watching(monitor: MonitorSpec, alerts: Sequence[AlertSpec]) -> None:
    """Refuse a collector and places that nothing would ever reach.

    Raises:
        JobError: It does.
    """
    if monitor.traces and not _is_http(monitor.traces):
        raise JobError(_NO_URL, key="monitor.traces")
    for index, spec in enumerate(alerts):
        check_alert(spec, key=f"alerts[{index}]")


def check_alert(spec: AlertSpec, *, key: str) -> None:
    """Refuse a place that no alert would ever reach.

    Args:
        spec: The place.
        key: The entry's.

    Raises:
        JobError: It does.
    """
    if sum(map(bool, (spec.webhook, spec.command, spec.email))) != 1:
        raise JobError("give one of webhook, command and email", key=key)
    if spec.webhook and not (_is_http(spec.webhook) and "@" not in spec.webhook):
        raise JobError(f"{_NO_URL}, and without a user's name", key=f"{key}.webhook")
    if spec.command and not spec.command[0]:
        raise JobError("begin with the name of a program", key=f"{key}.command")
    for name, address in (("email", spec.email), ("sender", spec.sender)):
        is_plain = address.isascii() and address.isprintable()
        if address and not (is_plain and _MAILBOX.fullmatch(address)):
            raise JobError(
                f"{address!r:.200} is not one address such as ops@example.org",
                key=f"{key}.{name}",
            )
    parse_address(spec.smtp, key=f"{key}.smtp")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises if it is none.
    except ValueError:
        return False
    is_plain = re.fullmatch(r"[!-~]+", url) is not None
    return is_plain and parts.scheme in {"http", "https"} and bool(parts.hostname)


def _check_limits(file: AggregatorFile) -> None:
    limits, least = file.limits, file.exchange.threshold_mb + ANSWER_ROOM_MIB
    if limits.answer_mib < least:
        raise JobError(
            f"must be at least {least}: an answer may hold a vector of "
            f"exchange.threshold_mb = {file.exchange.threshold_mb}",
            key="limits.answer_mib",
        )
    for key_, value, below, least in (
        ("site_mib", limits.site_mib, "answer_mib", limits.answer_mib),
        ("run_mib", limits.run_mib, "site_mib", limits.site_mib),
    ):
        if value < least:
            raise JobError(
                f"must be at least limits.{below} = {least}", key=f"limits.{key_}"
            )
