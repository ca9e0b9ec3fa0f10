"""``crossfed doctor --aggregator FILE``: whether an aggregator can serve.

Nothing is changed, but for an object in the exchange; the service may run meanwhile.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from cloud_adapters.local import landlock
from cloud_adapters.local.child_process import installed_program
from cloud_adapters.net import ports
from cloud_adapters.nginx import config as proxy
from deploy.aggregator_host import (
    config as aggregator_file,
    enrolment_book,
    host_secrets,
    run_queue,
)
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.doctor import (
    checks as doctor,
    exchange as doctor_exchange,
)
from deploy.doctor.checks import Check, ok, or_problem, problem, warning
from federation import folder_lock
from federation.addresses import parse_address
from federation.errors import FederationError
from federation.protocols import Clock
from privacy.membership.certificates import names_in, read_certificate, server_names

_DAY_SECONDS = 86_400.0
_RESTORE = "restore the folder from a backup"


def checks(path: Path, clock: Clock) -> Iterator[Check]:
    """Check an aggregator's configuration, its folder and its ports.

    Args:
        path: ``aggregator.toml``.
        clock: This machine's.
    """
    try:
        config = aggregator_file.load(path)
    except FederationError as error:
        advice = "correct the file: see docs/reference" if path.is_file() else ""
        yield problem("aggregator", str(error), advice)
        return
    yield ok("aggregator", f"{path} is valid")
    yield doctor.check_flower()
    folder = config.folder
    yield from doctor.check_identity(
        folder / "aggregator.pem", folder / "roster.toml", lost=_RESTORE
    )
    yield from doctor.check_closed(config.folder)
    yield _confinement()
    yield from _authority(config, clock)
    yield from _server(config, clock)
    yield from _programs(config)
    yield from _ports(config, clock)
    yield from doctor.check_folder(
        "runs folder", config.runs, otherwise="move the aggregator's folder elsewhere"
    )
    for one in run_queue.handed_over(config.runs).damaged:
        yield warning("run", one.reason, "the other runs continue without it")
    yield from doctor_exchange.checks(config.file.exchange, site=None, clock=clock)


def _confinement() -> Check:
    """Whether a coordinator can be kept from reading the aggregator's secrets."""
    if landlock.is_available():
        return ok("landlock", "coordinators cannot read the authority's key")
    return warning(
        "landlock",
        "this kernel does not support it: a coordinator could read the authority's key",
        "use Linux 5.19 or later with Landlock switched on (the lsm= parameter)",
    )


@or_problem("authority", _RESTORE)
def _authority(config: AggregatorConfig, clock: Clock) -> Iterator[Check]:
    """The root, the secrets of this host, and who is enrolled or revoked."""
    book_file = BookFile(folder=config.folder)
    authority = enrolment_book.open_authority(config.folder, clock=clock)
    for name in (host_secrets.CONTROL, host_secrets.RUNTIME):
        # A missing one is made when the service starts.
        if (config.folder / name).exists():
            host_secrets.read(config.folder / name)
    book = book_file.read()
    forgotten = book.shut_out(book_file.read_revocations(authority).revoked)
    if forgotten:
        yield problem(
            "sites",
            f"{book_file.path} is older than ca.crl and does not list "
            f"{', '.join(forgotten)} as revoked",
            "start the service, which revokes it again, then check crossfed aggregator "
            "sites",
        )
    else:
        number = len(book.members)
        yield ok("sites", f"{number} are enrolled")


@or_problem("certificate", _RESTORE)
def _server(config: AggregatorConfig, clock: Clock) -> Iterator[Check]:
    name, advice = "certificate", "restart the service, which renews it"
    found = read_certificate(config.folder / "server.crt")
    days = (found.not_valid_after_utc.timestamp() - clock.now()) / _DAY_SECONDS
    missing = frozenset(server_names(config.file.hosts)) - names_in(found)
    if days <= 0:
        yield problem(
            name, f"the server's certificate expired {-days:.0f} days ago", advice
        )
    elif missing:
        text = f"the server's certificate does not list {', '.join(sorted(missing))}"
        yield warning(name, text, advice)
    else:
        yield ok(name, f"the server's certificate is valid for {days:.0f} days")


@or_problem("programs", "install it, then run this check again")
def _programs(config: AggregatorConfig) -> Iterator[Check]:
    found = [installed_program("flower-superlink")]
    if config.file.proxy:
        if trouble := proxy.open_memory():
            yield problem("user", trouble, proxy.OWN_USER)
        found.append(proxy.find_program())
    yield ok("programs", ", ".join(found))
    for command in (spec.command for spec in config.file.alerts if spec.command):
        if shutil.which(command[0]) is None:
            yield warning(
                "alerts",
                f"this host has no program {command[0]}, so its alerts tell nobody",
                "install it, or correct command in [[alerts]]",
            )


@or_problem("service", "then start crossfed aggregator up")
def _ports(config: AggregatorConfig, clock: Clock) -> Iterator[Check]:
    """Whether the service runs, or could."""
    if folder_lock.is_held(config.lock):
        yield ok("service", f"the service is running in {config.folder}")
        return
    host, port = parse_address(config.file.listen, key="listen")
    ports.await_free(
        host,
        port,
        advice="stop what listens there, or change listen",
        clock=clock,
        patience_seconds=0.0,
    )
    yield ok("service", f"it is not running; {config.file.listen} is free")
