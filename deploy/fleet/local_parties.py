"""Aggregator and sites on this host: made once, enrolled, started and awaited."""

import http.client
import shutil
from collections.abc import Callable
from pathlib import Path

import tomli_w

from cloud_adapters.compute.pool import Node, NodeState, log_of
from cloud_adapters.net.ports import LOOPBACK, free_port
from cloud_adapters.net.tls import client_context
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.aggregator_host import (
    config as aggregator_file,
    enrolment_operator,
)
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.fleet.bootstrap import end_of
from deploy.fleet.loop import NodeRequest, fill
from deploy.fleet.machine_spec import LOCAL, SiteMachine
from deploy.fleet.preflight import check_aggregator_kept
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from deploy.fleet.wanted import AGGREGATOR_FILE, SITE_FILE, WRITTEN
from deploy.site_host import enrol, enrolment_roster
from federation import durable_files
from federation.addresses import parse_address
from federation.errors import ComputeError
from privacy import own_folder
from privacy.membership.token import Token
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.roster import Roster
from privacy.secret_files import read_private, replace_private

_HEALTH_SECONDS = 60.0
_LOOK_SECONDS = 0.2
# Between two looks at its node.
_NODE_SECONDS = 2.0
_OK = 200
_PENDING = "token"


def _write_settings(path: Path, text: bytes) -> None:
    """Write what a party reads when it starts, if it is not what is there.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """
    if not path.exists() or path.read_bytes() != text:
        durable_files.replace_file(path, [text])


def await_service(
    deployment: Deployment, trouble_of: Callable[[], str | None], tell: Tell
) -> None:
    """Wait until the aggregator serves, and report what keeps its program from that.

    Args:
        deployment: Whose aggregator it is.
        trouble_of: Returns why it does not serve; None if it does.
        tell: Called with a word about every step.

    Raises:
        ComputeError: Its node has ended, or it does not serve in time; with the last
            lines that it wrote.
    """
    clock, told = deployment.clock, ""
    begin = looked = clock.monotonic()
    while (trouble := trouble_of()) is not None:
        now = clock.monotonic()
        if now - looked > _NODE_SECONDS:
            looked, node = now, _newest(deployment)
            if node.state is NodeState.GONE:
                raise ComputeError(
                    f"the aggregator has ended before it served: {node.trouble}. "
                    f"{_end_of_log(deployment, node)}"
                )
            # Once: it is started again and again, and each end reads a bit different.
            # Of a program that is ready, it is old.
            if not told and node.trouble and not node.ready:
                told = node.trouble
                tell(f"aggregator: {told}")
        if now - begin > _HEALTH_SECONDS:
            raise ComputeError(
                f"the aggregator does not serve after {_HEALTH_SECONDS:g} s: "
                f"{trouble}. {_end_of_log(deployment, _newest(deployment))}"
            )
        clock.sleep(_LOOK_SECONDS)
    tell(f"aggregator: ready after {clock.monotonic() - begin:.1f} s")


def _newest(deployment: Deployment) -> Node:
    pool = deployment.pools[LOCAL]
    labels = {DEPLOYMENT: deployment.name, ROLE: AGGREGATOR}
    *_, newest = pool.nodes(labels)
    return newest


def _end_of_log(deployment: Deployment, node: Node) -> str:
    pool = deployment.pools[LOCAL]
    return f"Its log ends:\n{end_of(log_of(pool, node.id))}"


def make_aggregator(deployment: Deployment) -> AggregatorConfig:
    """Have the folder of an aggregator, with the settings of now.

    Args:
        deployment: Whose aggregator it is.

    Raises:
        JobError: ``aggregator.address`` is not ``HOST:PORT``.
        CorruptObject: The aggregator is lost that sites have enrolled with.
    """
    from deploy.aggregator_host import new_aggregator  # noqa: PLC0415 -- the extra flower

    plan, machine = deployment.plan, deployment.plan.file.aggregator
    path = plan.aggregator / AGGREGATOR_FILE
    check_aggregator_kept(plan)
    if path.exists():
        address = machine.address or aggregator_file.load(path).address
    else:
        address = machine.address or f"{LOOPBACK}:{free_port(LOOPBACK)}"
    host, _ = parse_address(address, key="aggregator.address")
    if not path.exists():
        # No one trusts the keys of an incomplete folder yet.
        draft = plan.aggregator.with_name("aggregator.new")
        with file_errors("remove", draft):
            if draft.exists():
                shutil.rmtree(draft)
        new_aggregator.create(
            draft,
            [host],
            listen=machine.listen or address,
            proxy=True,
            organisation=plan.file.organisation or deployment.name,
            random_bytes=deployment.random_bytes,
            clock=deployment.clock,
        )
        with file_errors("make", plan.aggregator):
            draft.rename(plan.aggregator)
    document = {
        "listen": machine.listen or address,
        "hosts": [host],
        "connect_seconds": machine.connect_seconds,
        **plan.exchange,
        **plan.aggregator_tables,
    }
    _write_settings(path, f"{WRITTEN}{tomli_w.dumps(document)}".encode())
    return aggregator_file.load(path)


def start_aggregator(
    deployment: Deployment,
    config: AggregatorConfig,
    request: NodeRequest,
    address: str,
    tell: Tell,
) -> None:
    """Have an aggregator work.

    Args:
        deployment: Whose aggregator it is.
        config: Its configuration.
        request: Its node.
        address: Where sites reach it, which may be another port than it listens on.
        tell: Called with a word about every step.

    Raises:
        ComputeError: It could not be launched, or does not serve in time; with the
            last lines that it wrote.
    """
    fill(deployment, request, tell)
    await_service(deployment, lambda: _trouble(config, address), tell)


def _trouble(config: AggregatorConfig, address: str) -> str | None:
    """Why an aggregator does not serve; None if it does."""
    host, port = parse_address(address, key="aggregator.address")
    context = client_context((config.folder / "ca.crt").read_bytes(), None)
    connection = http.client.HTTPSConnection(host, port, timeout=5, context=context)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        text = answer.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"{host}:{port}: {error}"
    finally:
        connection.close()
    return None if answer.status == _OK else f"it answers {answer.status}: {text}"


def enroll(
    deployment: Deployment,
    config: AggregatorConfig,
    site: SiteMachine,
    request: NodeRequest,
    *,
    address: str,
    tell: Tell,
) -> None:
    """Make a site on this host a member, and write its ``site.toml``.

    Args:
        deployment: Whose site it is.
        config: The aggregator, which serves.
        site: Its table in the deployment file.
        request: Its node, whose settings are the file.
        address: Where sites reach the aggregator.
        tell: Called with a word about every step.

    Raises:
        EnrolmentRefused: It could not be enrolled.
    """
    folder = deployment.plan.site(site.name)
    pending = folder / _PENDING
    # The certificate is written last. A token that is still there then was left by a
    # command that was killed.
    if not (folder / "site.pem").exists():
        organisation = site.organisation or deployment.plan.file.organisation
        made = _token(deployment, config, site.name, pending, address)
        enrol.enroll(
            made,
            folder,
            organisation=organisation or site.name,
            clock=deployment.clock,
        )
        tell(f"{site.role}: enrolled")
    with file_errors("remove", pending):
        pending.unlink(missing_ok=True)
    _write_settings(folder / SITE_FILE, request.settings)


def _token(
    deployment: Deployment,
    config: AggregatorConfig,
    site: str,
    pending: Path,
    address: str,
) -> Token:
    """Find the token that an earlier command was about to use, or make one.

    The keys that it was first used with may use it again: an answer that was lost is
    no harm.
    """
    if pending.exists():
        kept = Token.parse(read_private(pending).decode("ascii", "replace"))
        book = BookFile(folder=config.folder).read().at(deployment.clock.now())
        if any(each.digest == kept.digest for each in book.invitations):
            return kept
    made = enrolment_operator.invite(
        config,
        site,
        random_bytes=deployment.random_bytes,
        clock=deployment.clock,
        address=address,
    )
    with file_errors("make", pending.parent):
        own_folder.make(pending.parent)
    replace_private(pending, made.text.encode())
    return made


def accept_roster(
    deployment: Deployment, site: SiteMachine, signed: Roster | None
) -> None:
    """Have a site trust the sites that have enrolled after it, or the signed roster.

    The user who brings it up is the operator of all its sites: there is no one
    else to compare the digest with.
    """
    config = enrol.config_of(deployment.plan.site(site.name))
    kept = roster.load(config.roster).digest
    newest = enrol.newest_roster(config, clock=deployment.clock)
    if newest.digest != kept:
        digest = newest.digest if signed is None else signed.digest
        at = deployment.clock.now()
        enrolment_roster.accept_roster(config, newest, digest.hex(), at=at)
