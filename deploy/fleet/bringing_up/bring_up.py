"""``crossfed up``: start what a deployment lacks, and hand its job over.

Every step looks at what is there, does what is missing and can be done again: a command
that was killed is given once more.
"""

import http.client
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from cloud_adapters.compute.pool import Line, NodeSpec
from cloud_adapters.net.ports import free_port
from cloud_adapters.net.tls import client_context
from cloud_adapters.storage.disk.part_file import file_errors
from deploy.aggregator_host import (
    config as aggregator_file,
    enrolment_operator,
    new_aggregator,
    run_queue,
)
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.aggregator_host.parties import Parties, check
from deploy.exit_codes import DONE
from deploy.fleet import reconcile
from deploy.fleet.bringing_up import cloud_checks, cloud_sites
from deploy.fleet.bringing_up.start_checks import check_aggregator_kept, check_moved
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, SITE_PREFIX
from deploy.fleet.roles import NodeRequest, Tell, fill
from deploy.fleet.tables.providers import LOCAL
from deploy.fleet.tables.site_machine import SiteMachine
from deploy.site_host import enrol, enrolment_roster
from federation import durable_files
from federation.addresses import parse_address
from federation.errors import ComputeError
from federation.ids import new_run_id
from federation.job import code_files, job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from privacy import own_folder
from privacy.keystream import RandomBytes
from privacy.membership.token import Token
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.roster import Roster
from privacy.secret_files import read_private, replace_private

_AGGREGATOR_TOML, _SITE_TOML = "aggregator.toml", "site.toml"
_TOKEN = "token"  # noqa: S105 -- the name of a file
_HEALTH_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_OK = 200
_PORT, _ROSTER = 8443, "roster.toml"
_SHOWN_LOG = 2000
_WRITTEN = "# Written by crossfed up from the deployment file: change that one."


def bring_up(
    deployment: Deployment,
    job: JobSpec,
    *,
    random_bytes: RandomBytes,
    tell: Tell,
    accept: str = "",
) -> RunFolder | None:
    """Start every node of a deployment that does not run, and hand its job over.

    Args:
        deployment: What is wanted, and what is known of it.
        job: Its job, which ``start_checks.check_before`` has passed.
        random_bytes: ``os.urandom``.
        tell: Called with a word about every step.
        accept: Digits of the digest of a roster with sites of other operators, which
            machines of clouds may trust; a person has compared it.

    Returns:
        The run, which may have ended; None if sites of the job have yet to enrol.

    Raises:
        JobError: The job cannot be run so.
        CorruptObject: The aggregator is lost that sites have enrolled with.
        ComputeError: A node could not be launched, is another folder's, or has not
            enrolled in time.
        RosterRefused: The aggregator's roster names keys that no site has shown.
        EnrolmentRefused: A site could not be enrolled.
    """
    for pool in deployment.pools.values():
        nodes = pool.nodes({DEPLOYMENT: deployment.name})
        reconcile.check_owner(nodes, deployment.owner, deployment.name)
    check_moved(deployment)
    cloud_checks.check_gpus(deployment)
    _end_unwanted(deployment, tell)
    config = _aggregator(deployment, random_bytes, tell)
    sites = [each for each in deployment.plan.file.sites if each.provider == LOCAL]
    for site in sites:
        _enrol(deployment, config, site, random_bytes, tell)
    signed = cloud_sites.bring_up(
        deployment,
        config,
        _address(deployment, config),
        accept=accept,
        random_bytes=random_bytes,
        tell=tell,
    )
    for site in sites:
        _accept_roster(deployment, site, roster.load(config.folder / _ROSTER), signed)
    for site in sites:
        fill(deployment, _site_request(deployment, site), tell)
    return _hand_over(deployment, config, job, random_bytes, tell)


def _end_unwanted(deployment: Deployment, tell: Tell) -> None:
    """End nodes of sites that the deployment file no longer has."""
    plan = deployment.plan
    sites = [site.name for site in plan.file.sites]
    for pool in deployment.pools.values():
        ours = {DEPLOYMENT: deployment.name, reconcile.OWNER: deployment.owner}
        found = reconcile.unwanted(pool.nodes(ours), sites, is_head=plan.is_head)
        for node in found:
            tell(f"{node.name}: no longer in the file; {node.id} is ended")
        if found:
            pool.terminate({node.id for node in found})


def _aggregator(
    deployment: Deployment, random_bytes: RandomBytes, tell: Tell
) -> AggregatorConfig:
    """Have an aggregator work, and return its configuration."""
    path = deployment.aggregator / _AGGREGATOR_TOML
    machine = deployment.plan.file.aggregator
    check_aggregator_kept(deployment)
    meeting, boxed = deployment.meeting(), deployment.boxed
    if path.exists():
        address = machine.address or aggregator_file.load(path).address
    else:
        # Every port is free where it is alone.
        port = free_port(meeting) if boxed is None else _PORT
        address = machine.address or f"{meeting}:{port}"
    host, _ = parse_address(address, key="aggregator.address")
    deployment.check_host(host)
    if not path.exists():
        # A folder that is not whole has no keys that anybody trusts yet.
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
        if boxed is not None:
            boxed.give_new(draft)
        with file_errors("make", deployment.aggregator):
            draft.rename(deployment.aggregator)
    _write_settings(
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
    read = path.read_bytes()
    if boxed is None:
        spec = _program(deployment, AGGREGATOR, words)
    else:
        spec = boxed.spec(deployment.max_seconds, meeting)
        read += spec.image.encode()
    fill(deployment, NodeRequest(machine.pool, spec, read), tell)
    _await_health(deployment, config, tell)
    return config


def _program(
    deployment: Deployment, role: str, words: Sequence[str], line: Line | None = None
) -> NodeSpec:
    """A node of this host that runs a command of ours."""
    named_in = (deployment.plan.job, deployment.plan.path.resolve())
    folders = dict.fromkeys(str(file.parent) for file in named_in)
    return NodeSpec(
        name=role,
        command=[sys.executable, "-m", "crossfed", *words],
        # A user's own files are found from the files that name them.
        environment={code_files.FOLDERS: os.pathsep.join(folders)},
        labels={},
        max_seconds=deployment.max_seconds,
        line=line,
    )


def _site_request(deployment: Deployment, site: SiteMachine) -> NodeRequest:
    """The node of a site on this host."""
    path = deployment.site(site.name) / _SITE_TOML
    name, container = f"{SITE_PREFIX}{site.name}", deployment.container(site)
    if container is not None:
        spec = container.spec(name, deployment.max_seconds)
        return NodeRequest(site.pool, spec, path.read_bytes() + spec.image.encode())
    words = ("site", "up", "--config", str(path))
    spec = _program(deployment, name, words, site.line)
    return NodeRequest(site.pool, spec, path.read_bytes())


def _await_health(deployment: Deployment, config: AggregatorConfig, tell: Tell) -> None:
    """Wait until the aggregator serves.

    Raises:
        ComputeError: It does not; with the last lines that it wrote.
    """
    clock = deployment.clock
    begin = clock.monotonic()
    address = _address(deployment, config)
    while (trouble := _trouble(config, address)) is not None:
        if clock.monotonic() - begin > _HEALTH_SECONDS:
            pool = deployment.pools[deployment.plan.file.aggregator.pool]
            labels = {DEPLOYMENT: deployment.name, reconcile.ROLE: AGGREGATOR}
            *_, newest = pool.nodes(labels)
            raise ComputeError(
                f"the aggregator does not serve after {_HEALTH_SECONDS:g} s: "
                f"{trouble}. Its log ends:\n{pool.log(newest.id)[-_SHOWN_LOG:]}"
            )
        clock.sleep(_LOOK_SECONDS)
    tell(f"aggregator: serves after {clock.monotonic() - begin:.1f} s")


def _address(deployment: Deployment, config: AggregatorConfig) -> str:
    """Where sites find the aggregator, which may listen on another port."""
    return deployment.plan.file.aggregator.address or config.address


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


def _enrol(
    deployment: Deployment,
    config: AggregatorConfig,
    site: SiteMachine,
    random_bytes: RandomBytes,
    tell: Tell,
) -> None:
    """Make a site on this host a member, and write its ``site.toml``."""
    folder = deployment.site(site.name)
    address = _address(deployment, config)
    pending = folder / _TOKEN
    if pending.exists() or not (folder / "site.pem").exists():
        organisation = site.organisation or deployment.plan.file.organisation
        made = _token(config, site.name, pending, random_bytes, deployment)
        container = deployment.container(site)
        if container is not None:
            container.enrol(made, organisation or site.name)
        else:
            enrol.enroll(
                made,
                folder,
                organisation=organisation or site.name,
                clock=deployment.clock,
            )
        with file_errors("remove", pending):
            pending.unlink()
        tell(f"{SITE_PREFIX}{site.name}: enrolled")
    document = {
        "name": site.name,
        "certificate": "site.pem",
        "aggregator": {"address": address, "authority": "ca.crt"},
        **deployment.plan.settings[site.name],
    }
    _write_settings(folder / _SITE_TOML, document)


def _write_settings(path: Path, document: Mapping[str, Any]) -> None:
    """Write what a party reads when it starts, if it is not what is there."""
    text = f"{_WRITTEN}\n{tomli_w.dumps(document)}".encode()
    if path.read_bytes() != text:
        durable_files.replace_file(path, [text])


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
    address, boxed = _address(deployment, config), deployment.boxed
    if boxed is not None:
        made = boxed.invite(site, address)
    else:
        made = enrolment_operator.invite(
            config,
            site,
            random_bytes=random_bytes,
            clock=deployment.clock,
            address=address,
        )
    with file_errors("make", pending.parent):
        own_folder.make(pending.parent)
    replace_private(pending, made.text.encode())
    return made


def _accept_roster(
    deployment: Deployment, site: SiteMachine, current: Roster, signed: Roster | None
) -> None:
    """Have a site trust the sites that have enrolled after it, or the signed roster.

    The user who brings it up is the operator of all its sites: there is no one
    else to compare the digest with.
    """
    config = enrol.config_of(deployment.site(site.name))
    kept = roster.load(config.roster).digest
    container = deployment.container(site)
    if container is not None:
        if current.digest != kept:
            container.accept(current if signed is None else signed)
        return
    newest = enrol.newest_roster(config, clock=deployment.clock)
    if newest.digest != kept:
        digest = newest.digest if signed is None else signed.digest
        enrolment_roster.accept_roster(config, newest, digest.hex())


def _hand_over(
    deployment: Deployment,
    config: AggregatorConfig,
    job: JobSpec,
    random_bytes: RandomBytes,
    tell: Tell,
) -> RunFolder | None:
    """Submit the job, or resume or find its newest run."""
    known = roster.load(config.folder / _ROSTER)
    enrolled = {entry.site for entry in known.sites}
    missing = [site.name for site in job.sites if site.name not in enrolled]
    if missing:
        tell(
            f"the job waits for {', '.join(missing)} to enrol: invite each with "
            "crossfed aggregator invite SITE --config "
            f"{config.folder}/aggregator.toml, then give this command again"
        )
        return None
    runs = [
        one
        for one in run_queue.handed_over(config.runs).runs
        if one.run.path.parent.name == job.name
    ]
    newest = runs[-1] if runs else None
    if newest is not None and not _is_another(job, newest.run):
        if newest.outcome is None:
            return newest.run
        if newest.outcome.code == DONE:
            tell(
                f"run {newest.run.path.name} is completed; crossfed run "
                f"{deployment.plan.job} --aggregator {config.folder}/aggregator.toml "
                "starts another"
            )
            return newest.run
        run = _resumed(deployment, config, job)
        tell(f"run {run.path.name} is resumed")
        return run
    run = _submitted(deployment, config, job, random_bytes)
    tell(f"run {run.path.name} is submitted")
    return run


def _resumed(
    deployment: Deployment, config: AggregatorConfig, job: JobSpec
) -> RunFolder:
    """Have the aggregator take up the job's newest run, which ended early."""
    if deployment.boxed is not None:
        name = deployment.boxed.hand_over(_text(job), resume=True)
        return RunFolder(config.runs / job.name / name)
    run = run_queue.find_ended(job, config.runs)
    check(job, Parties.of_run(config.folder, run), resumed=run.run_id() is not None)
    run_queue.take_up(run, at=deployment.clock.now())
    return run


def _submitted(
    deployment: Deployment,
    config: AggregatorConfig,
    job: JobSpec,
    random_bytes: RandomBytes,
) -> RunFolder:
    """Hand a new run of the job to the aggregator."""
    if deployment.boxed is not None:
        name = deployment.boxed.hand_over(_text(job), resume=False)
        return RunFolder(config.runs / job.name / name)
    check(job, Parties.load(config.folder))
    if job.model.weights is not None:  # The coordinator looks for it there.
        from clients.models import starting_weights  # noqa: PLC0415 -- imports torch

        starting_weights.find(job, config.folder)
    now = deployment.clock.now()
    run = RunFolder(config.runs / job.name / new_run_id(now, random_bytes(3)))
    run_queue.submit(job, run, at=now)
    return run


def _text(job: JobSpec) -> bytes:
    return tomli_w.dumps(job_file.document(job)).encode()


def _is_another(job: JobSpec, run: RunFolder) -> bool:
    kept = job_file.document(job_file.loads(run.read_job()))
    return bool(job_file.differences(kept, job_file.document(job)))
