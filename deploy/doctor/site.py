"""``crossfed doctor --site FILE``: whether a site is ready to take part in runs.

Nothing is changed, but for an object in the exchange, and no task is taken. The
aggregator is asked for its health, which needs no certificate, and for messages without
naming a node, which a proxy answers with 403 if it does not let the certificate in; and
it is sent some megabytes that mean nothing, to see how fast they arrive.
"""

import http.client
import os
import ssl
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from clients import preprocessing
from clients.privacy.source_check import declared
from clients.user_code import unable_to_exit
from cloud_adapters.flower.facts import forbids_signing
from cloud_adapters.net.outbound import https_line, proxy_note
from cloud_adapters.net.tls import client_context, clock_doubt
from deploy.doctor import (
    checks as doctor,
    exchange as doctor_exchange,
    home as doctor_home,
    relay as doctor_relay,
)
from deploy.doctor.checks import (
    Check,
    ok,
    or_problem,
    problem,
    warning,
)
from deploy.doctor.exchange import PROBE_BYTES, SLOW_BYTES_PER_SECOND
from deploy.site_host import config as site_file, folder as site_folder
from deploy.site_host.config import SiteConfig
from deploy.site_host.enrol import newest_roster
from deploy.wiring.job_data import load_data
from federation.addresses import parse_address
from federation.errors import FederationError
from federation.protocols import Clock
from privacy.membership.certificates import parse_certificate
from privacy.secagg.agreement import roster
from privacy.secret_files import read_private

CALL_SECONDS = 30.0  # A slow connection is measured and reported.
SOON_DAYS = 14
_DAY_SECONDS = 86400.0
_OK, _FORBIDDEN = 200, 403
_ENROL = "enrol this site again"


def checks(path: Path, clock: Clock) -> Iterator[Check]:
    """Check a site's configuration, its keys and its connection to the aggregator.

    Args:
        path: ``site.toml``.
        clock: This machine's.
    """
    try:
        config = site_file.load(path)
    except FederationError as error:
        advice = "correct the file: see docs/reference" if path.is_file() else ""
        yield problem("site", str(error), advice)
        return
    yield ok("site", f"{config.file.name!r}, from {path}")
    yield doctor.check_flower()
    yield from doctor_home.checks(config)
    is_elsewhere = doctor_home.is_elsewhere(config)
    if is_elsewhere:
        yield warning(
            "identity",
            "in the home: crossfed site up copies it to here",
            "start the agent, then check the connection to the aggregator",
        )
    else:
        yield from doctor.check_identity(config.identity, config.roster, lost=_ENROL)
        yield from _node_key(config)
        yield from _certificate(config, clock)
    yield from doctor.check_folder(
        "folder", config.folder, otherwise="set another folder in site.toml"
    )
    yield from doctor.check_closed(config.folder)
    yield from _data(config)
    yield from _budget(config)
    yield from doctor_exchange.checks(
        config.file.exchange, site=config.file.name, clock=clock
    )
    if not is_elsewhere:
        yield from _aggregator(config, clock)
        yield from doctor_relay.checks(config)


@or_problem("node key", _ENROL)
def _node_key(config: SiteConfig) -> Iterator[Check]:
    if b"PRIVATE KEY-----" in read_private(config.node_key):
        yield ok("node key", str(config.node_key))
    else:
        yield problem("node key", f"{config.node_key} holds no key", _ENROL)


@or_problem("certificate", _ENROL)
def _certificate(config: SiteConfig, clock: Clock) -> Iterator[Check]:
    path, renew = config.certificate, "crossfed enroll --renew"
    if path is None:
        found = (
            "none: only an aggregator on this machine's loopback interface accepts it"
        )
        yield warning("certificate", found)
        return
    until = parse_certificate(read_private(path)).not_valid_after_utc.timestamp()
    days = (until - clock.now()) / _DAY_SECONDS
    if days <= 0:
        found = f"{path} expired {-days:.0f} days ago"
        yield problem("certificate", found, f"{renew}, or enrol again")
    elif days < SOON_DAYS:
        found = f"{path} expires in {days:.0f} days"
        advice = f"start the agent, which renews it, or {renew}"
        yield warning("certificate", found, advice)
    else:
        found = f"{path} is valid for {days:.0f} days"
        yield ok("certificate", found)


@or_problem("data", "correct [data] in site.toml")
def _data(config: SiteConfig) -> Iterator[Check]:
    own = config.file.data
    if not own.source:
        found = "none: the site takes part with public data that a job names"
        yield warning("data", found)
        return
    with unable_to_exit():
        train, held_out = load_data(own.source, own.options)
    yield ok("data", f"{len(train)} records to train on, {len(held_out)} held out")
    kind = declared(own.source, train) or own.preprocessing
    fault = preprocessing.fault(kind, "record", is_dealt=False)
    if fault is not None:
        yield warning(
            "preprocessing", f"{own.source} {fault}", "see data.preprocessing"
        )


def _budget(config: SiteConfig) -> Iterator[Check]:
    """Whether private jobs are possible at all: a site without a limit refuses them."""
    limit = config.file.policy.total_epsilon
    if limit is None:
        yield warning(
            "budget",
            "site.toml sets no limit for all runs together, so the site refuses every "
            "job with differential privacy",
            "set policy.total_epsilon",
        )
    else:
        name = config.file.data.name
        yield ok("budget", f"epsilon {limit:g} for all runs on {name!r} together")


def _aggregator(config: SiteConfig, clock: Clock) -> Iterator[Check]:
    address = config.file.aggregator.address
    begin = clock.monotonic()
    try:
        status, date = _ask(config, "GET", "/health")
    except ssl.SSLCertVerificationError as error:
        yield problem(
            "aggregator",
            f"{address} does not prove that it is the aggregator: "
            f"{error.verify_message}",
            clock_doubt(error)
            or "compare its address and authority with the operator's",
        )
        return
    except FederationError as error:
        yield problem("aggregator", str(error), _ENROL)
        return
    except (OSError, http.client.HTTPException) as error:
        host, _ = parse_address(address, key="address")
        found = f"{address} cannot be reached: {error}{proxy_note(host)}"
        advice = (
            "check that it is running, that its port is open, and that no firewall "
            "blocks it"
        )
        yield problem("aggregator", found, advice)
        return
    seconds = clock.monotonic() - begin
    took = f"answers in {1e3 * seconds:.0f} ms"
    if status == _OK:
        yield ok("aggregator", f"{address} is healthy and {took}")
    elif status == _FORBIDDEN and config.certificate is not None:
        # It shows its health to nobody with a bad certificate: see "admission".
        yield ok("aggregator", f"{address} {took}")
    else:
        yield warning(
            "aggregator",
            f"{address} answers, but is not ready (HTTP {status})",
            "wait, or ask its operator to check its logs",
        )
    yield from _skew(date, clock.now(), seconds)
    yield from _is_let_in(config, clock)
    if status == _OK and config.certificate is not None:
        yield from _roster(config, clock)


def _skew(date: str, now: float, waited: float) -> Iterator[Check]:
    """Compare the clocks, as far as a date in whole seconds that was under way can."""
    try:
        skew = now - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return  # It does not tell the time.
    doubt = 1.0 + waited
    found = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the aggregator's"
    if abs(skew) <= doubt:
        found = f"less than {2 * doubt:.1f} s"
    if forbids_signing(skew):
        yield problem(
            "clock skew", found, "set whichever of the two clocks is wrong (NTP)"
        )
    else:
        yield ok("clock skew", found)


@or_problem("admission", _ENROL)
def _is_let_in(config: SiteConfig, clock: Clock) -> Iterator[Check]:
    if config.certificate is None:
        return
    try:
        status, _ = _ask(config, "POST", "/v1/fleet/pull-messages")
    except (OSError, http.client.HTTPException) as error:
        yield problem("admission", f"the connection ended: {error}", "try again")
        return
    if status == _FORBIDDEN:
        yield _rejected(config.certificate, clock)
    else:
        found = "the aggregator accepts this site's certificate"
        yield ok("admission", found)
        yield from _bandwidth(config, clock)


def _rejected(path: Path, clock: Clock) -> Check:
    """Why the proxy rejects a certificate from the aggregator's own authority."""
    found = "the aggregator rejects this site's certificate: it "
    until = parse_certificate(read_private(path)).not_valid_after_utc.timestamp()
    if until > clock.now():
        return problem(
            "admission",
            f"{found}was revoked",
            "ask the aggregator's operator why; with a new invitation, enrol in an "
            "empty folder, because revoked keys are never accepted again",
        )
    return problem("admission", f"{found}expired", "enrol again")


@or_problem("newest roster", _ENROL)
def _roster(config: SiteConfig, clock: Clock) -> Iterator[Check]:
    """Whether the aggregator has a newer one: sites refuse jobs over another."""
    held = roster.load(config.roster).serial
    newest = newest_roster(config, clock=clock).serial
    if newest > held:
        yield warning(
            "newest roster",
            f"the aggregator has roster {newest}, this site {held}: it refuses jobs "
            "with secure aggregation until it has the same",
            f"crossfed enroll --roster --folder {config.folder}",
        )
    else:
        yield ok("newest roster", f"{held}, as at the aggregator")


def _bandwidth(config: SiteConfig, clock: Clock) -> Iterator[Check]:
    """Send a body that every aggregator reads to its end, and refuses."""
    begin = clock.monotonic()
    try:
        _ask(config, "POST", "/v1/fleet/push-object", body=os.urandom(PROBE_BYTES))
    except (OSError, http.client.HTTPException) as error:
        yield problem("bandwidth", f"the connection ended: {error}", "try again")
        return
    speed = PROBE_BYTES / max(clock.monotonic() - begin, 1e-9)
    found = f"{speed / 1e6:.1f} MB/s to the aggregator"
    if speed >= SLOW_BYTES_PER_SECOND:
        yield ok("bandwidth", found)
    else:
        yield warning("bandwidth", found, "use a store for large models: [exchange]")


def _ask(
    config: SiteConfig, method: str, path: str, *, body: bytes | None = None
) -> tuple[int, str]:
    """Make a request; its status and the time of the answer."""
    host, port = parse_address(config.file.aggregator.address, key="address")
    context = client_context(site_folder.authority(config), config.certificate)
    connection = https_line(host, port, context=context, seconds=CALL_SECONDS)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.getheader("Date") or ""
    finally:
        connection.close()
