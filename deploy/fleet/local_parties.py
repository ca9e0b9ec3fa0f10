"""Aggregator and sites on this host: made once, enrolled, started and awaited."""

import http.client
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from cloud_adapters.compute.pool import Node, NodeSpec, NodeState, log_of
from cloud_adapters.net.ports import LOOPBACK, free_port
from cloud_adapters.net.tls import client_context
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.aggregator_host import (
    config as aggregator_file,
    enrolment_operator,
    new_aggregator,
)
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.fleet.bootstrap import end_of
from deploy.fleet.loop import NodeRequest, fill
from deploy.fleet.machine_spec import SiteMachine
from deploy.fleet.preflight import check_aggregator_kept
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE, SITE_PREFIX
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from deploy.site_host import enrol, enrolment_roster
from federation import durable_files
from federation.addresses import parse_address
from federation.errors import ComputeError
from federation.job import code_files
from privacy import own_folder
from privacy.keystream import RandomBytes
from privacy.membership.token import Token
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.roster import Roster
from privacy.secret_files import read_private, replace_private

_WRITTEN = "# Written by crossfed up from the deployment file: change that one."

_HEALTH_SECONDS = 60.0
_LOOK_SECONDS = 0.2
# Between two looks at its node.
_NODE_SECONDS = 2.0
_AGGREGATOR_FILE = "aggregator.toml"
_OK = 200
_SITE_FILE, _TOKEN = "site.toml", "token"


def program(deployment: Deployment, role: str, words: Sequence[str]) -> NodeSpec:
    """A node of this host that runs a command of crossfed.

    Args:
        deployment: The node belongs to it.
        role: Name of the node.
        words: The command, without ``crossfed``.
    """
    named_in = (deployment.plan.job, deployment.plan.path.resolve())
    folders = dict.fromkeys(str(file.parent) for file in named_in)
    return NodeSpec(
        name=role,
        command=[sys.executable, "-m", "crossfed", *words],
        # A user's own files are found from the files that name them.
        environment={code_files.FOLDERS: os.pathsep.join(folders)},
        labels={},
        max_seconds=deployment.max_seconds,
    )


def write_settings(path: Path, document: Mapping[str, Any]) -> None:
    """Write what a party reads when it starts, if it is not what is there.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """
    text = f"{_WRITTEN}\n{tomli_w.dumps(document)}".encode()
    if path.read_bytes() != text:
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
    pool = deployment.pools[deployment.plan.file.aggregator.pool]
    labels = {DEPLOYMENT: deployment.name, ROLE: AGGREGATOR}
    *_, newest = pool.nodes(labels)
    return newest


def _end_of_log(deployment: Deployment, node: Node) -> str:
    pool = deployment.pools[deployment.plan.file.aggregator.pool]
    return f"Its log ends:\n{end_of(log_of(pool, node.id))}"


def start_aggregator(
    deployment: Deployment, random_bytes: RandomBytes, tell: Tell
) -> AggregatorConfig:
    """Have an aggregator work, and return its configuration.

    Args:
        deployment: Whose aggregator it is.
        random_bytes: ``os.urandom``.
        tell: Called with a word about every step.

    Raises:
        JobError: ``aggregator.address`` is not ``HOST:PORT``.
        CorruptObject: The aggregator is lost that sites have enrolled with.
        ComputeError: It could not be launched, or does not serve in time.
    """
    path = deployment.aggregator / _AGGREGATOR_FILE
    machine = deployment.plan.file.aggregator
    check_aggregator_kept(deployment)
    if path.exists():
        address = machine.address or aggregator_file.load(path).address
    else:
        address = machine.address or f"{LOOPBACK}:{free_port(LOOPBACK)}"
    host, _ = parse_address(address, key="aggregator.address")
    if not path.exists():
        # No one trusts the keys of an incomplete folder yet.
        draft = deployment.aggregator.with_name("aggregator.new")
        with file_errors("remove", draft):
            if draft.exists():
                shutil.rmtree(draft)
        new_aggregator.create(
            draft,
            [host],
            listen=machine.listen or address,
            proxy=True,
            organisation=deployment.plan.file.organisation or deployment.name,
            random_bytes=random_bytes,
            clock=deployment.clock,
        )
        with file_errors("make", deployment.aggregator):
            draft.rename(deployment.aggregator)
    write_settings(
        path,
        {
            "listen": machine.listen or address,
            "hosts": [host],
            "connect_seconds": machine.connect_seconds,
            **deployment.plan.exchange,
            **deployment.plan.platforms,
        },
    )
    config = aggregator_file.load(path)
    words = ("aggregator", "up", "--config", str(path))
    spec = program(deployment, AGGREGATOR, words)
    fill(deployment, NodeRequest(machine.pool, spec, path.read_bytes()), tell)
    _await_health(deployment, config, tell)
    return config


def address_of(deployment: Deployment, config: AggregatorConfig) -> str:
    """Where sites find the aggregator, which may listen on another port."""
    return deployment.plan.file.aggregator.address or config.address


def _await_health(deployment: Deployment, config: AggregatorConfig, tell: Tell) -> None:
    """Wait until the aggregator serves.

    Raises:
        ComputeError: It does not; with the last lines that it wrote.
    """
    address = address_of(deployment, config)
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
    random_bytes: RandomBytes,
    tell: Tell,
) -> None:
    """Make a site on this host a member, and write its ``site.toml``.

    Raises:
        EnrolmentRefused: It could not be enrolled.
    """
    folder = deployment.site(site.name)
    pending = folder / _TOKEN
    address = address_of(deployment, config)
    # The certificate is written last. A token that is still there then was left by a
    # command that was killed.
    if not (folder / "site.pem").exists():
        organisation = site.organisation or deployment.plan.file.organisation
        made = _token(config, site.name, pending, random_bytes, deployment)
        enrol.enroll(
            made,
            folder,
            organisation=organisation or site.name,
            clock=deployment.clock,
        )
        tell(f"{SITE_PREFIX}{site.name}: enrolled")
    with file_errors("remove", pending):
        pending.unlink(missing_ok=True)
    document = {
        "name": site.name,
        "certificate": "site.pem",
        "aggregator": {"address": address, "authority": "ca.crt"},
        **deployment.plan.settings[site.name],
    }
    write_settings(folder / _SITE_FILE, document)


def _token(
    config: AggregatorConfig,
    site: str,
    pending: Path,
    random_bytes: RandomBytes,
    deployment: Deployment,
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
        random_bytes=random_bytes,
        clock=deployment.clock,
        address=address_of(deployment, config),
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
    config = enrol.config_of(deployment.site(site.name))
    kept = roster.load(config.roster).digest
    newest = enrol.newest_roster(config, clock=deployment.clock)
    if newest.digest != kept:
        digest = newest.digest if signed is None else signed.digest
        enrolment_roster.accept_roster(config, newest, digest.hex())


def site_request(deployment: Deployment, site: SiteMachine) -> NodeRequest:
    """The node of a site on this host."""
    path = deployment.site(site.name) / _SITE_FILE
    words = ("site", "up", "--config", str(path))
    spec = program(deployment, f"{SITE_PREFIX}{site.name}", words)
    return NodeRequest(site.pool, spec, path.read_bytes())
