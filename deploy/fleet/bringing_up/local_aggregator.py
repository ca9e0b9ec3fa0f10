"""The aggregator on this host: made once, started, and awaited until it serves."""

import http.client
import shutil

from cloud_adapters.net.ports import LOOPBACK, free_port
from cloud_adapters.net.tls import client_context
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.aggregator_host import config as aggregator_file, new_aggregator
from deploy.aggregator_host.config import AggregatorConfig
from deploy.fleet.bringing_up.aggregator_wait import await_service
from deploy.fleet.bringing_up.local_program import program, write_settings
from deploy.fleet.bringing_up.start_checks import check_aggregator_kept
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import AGGREGATOR
from deploy.fleet.roles import NodeRequest, Tell, fill
from federation.addresses import parse_address
from privacy.keystream import RandomBytes

_SETTINGS = "aggregator.toml"
_OK = 200


def start(
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
    path = deployment.aggregator / _SETTINGS
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
