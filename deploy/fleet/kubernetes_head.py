"""An aggregator in a pod, which is the head of its deployment and starts its sites.

``crossfed up`` starts the head and follows it: in a pod that outlives the command, the
head does what ``crossfed up --keep`` does on a host. This side knows only what the
cluster lists and what the head's log shows.

The pod reads a bundle: a deployment file for the pod, and the job. There is no secret
in it, since anyone who may list pods can read it. Its first program is ``python -m
deploy.fleet.kubernetes_head BUNDLE FOLDER``, which writes these files. Keys, runs and
the record of launches on the volume are from pods before.

Kubernetes ends the pod with SIGTERM and kills what still runs 30 seconds later.
Meanwhile the aggregator stops, so that what it knows is on the volume and closed. The
next head continues the run from there; sites keep running and connect to it.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from cloud_adapters.compute.kube_head import IN_CLUSTER
from cloud_adapters.compute.kube_manifest import STATE, USER_DATA
from cloud_adapters.compute.pool import (
    ClusterHead,
    ComputePool,
    Node,
    NodeSpec,
    NodeState,
)
from deploy.exit_codes import FAILED
from deploy.fleet import loop, machine_spec, reconcile, state
from deploy.fleet.loop import NodeRequest
from deploy.fleet.machine_spec import HEAD_PORT
from deploy.fleet.reconcile import ACCEPTED, AGGREGATOR, DEPLOYMENT, HEAD, OWNER, ROLE
from deploy.fleet.spec import DeploymentFile, DeploymentPlan, Tell
from deploy.fleet.state import Deployment
from federation import durable_files
from federation.addresses import parse_address
from federation.errors import (
    ComputeError,
    ComputeUnavailable,
    CorruptObject,
    FederationError,
    JobError,
)
from federation.job import job_file
from federation.protocols import Clock
from federation.typed_json import encode

# Kubernetes allows 256 KiB for all annotations of a pod together.
MAX_BUNDLE_BYTES = 200 << 10
# In the folder of the pod.
FED_FILE, JOB_FILE, DEPLOYMENT_FOLDER = "fed.toml", "job.toml", "deployment"
# Keys of the aggregator's table that are the same in the pod.
_KEPT = ("connect_seconds", "dollars_per_hour", "dollars_per_gigabyte")

# As a shell reports a program that SIGTERM has ended. With 0, the job would be complete
# and its pod not be replaced.
TERMINATED = 143
# Of the 30 seconds of ``kube_manifest.GRACE_SECONDS``.
STOP_SECONDS = 25.0
HEAD_FOLDER = f"{STATE}/fed"
_LOOK_SECONDS = 2.0
# For what programs write beside their volume.
_SCRATCH_GB = 4
# A job that was just launched may not be listed yet.
_UNLISTED_SECONDS = 60.0
# The head's job outlasts the hours of the deployment, so that the head can end its
# sites: replacements among them would run for as many hours again.
_MARGIN_SECONDS = 900.0
_ENDED = re.compile(r"crossfed head: up ended with ([0-9]{1,3})")
# A shell that waits for a program ignores SIGTERM, and the first process of a container
# does so always. ``up`` stops the aggregator; when the shell ends, so does all that is
# left in the container. The code is not 0: see ``TERMINATED``.
_SCRIPT = """\
set -eu
trap 'exit 143' TERM
umask 077
mkdir -p {folder}
python -m deploy.fleet.kubernetes_head {bundle} {folder}
trap 'kill "$!"; wait "$!" || :; exit 143' TERM
code=0
crossfed up {folder}/{file} --keep{words} &
wait "$!" || code=$?
trap - TERM
echo "crossfed head: up ended with $code"
exit "$code"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBundle:
    """What a head is given.

    Attributes:
        name: Name of the deployment.
        owner: Random name of the folder that launches it; its nodes carry it, too.
        deployment: Text of its deployment file.
        job: Text of the job.
    """

    name: str
    owner: str
    deployment: str
    job: str

    def text(self) -> str:
        """The bundle as the pod reads it.

        Raises:
            JobError: It is larger than an annotation may be.
        """
        found = json.dumps(encode(self))
        if len(found.encode()) > MAX_BUNDLE_BYTES:
            raise JobError(
                f"deployment file and job have {len(found.encode())} bytes, and a pod "
                f"takes {MAX_BUNDLE_BYTES}: shorten one of them",
                key="job",
            )
        return found


def for_pod(document: Mapping[str, Any], file: DeploymentFile) -> str:
    """Write the deployment file of a head: the aggregator is local there.

    Args:
        document: The deployment file as it was written.
        file: What was read of it.
    """
    machine = file.aggregator
    table = document.get("aggregator", {})
    aggregator = {name: table[name] for name in _KEPT if name in table}
    aggregator["address"] = machine.address
    aggregator["listen"] = machine.listen or f"0.0.0.0:{HEAD_PORT}"
    return tomli_w.dumps(
        {
            **document,
            "job": JOB_FILE,
            "folder": DEPLOYMENT_FOLDER,
            "aggregator": aggregator,
            "sites": [_site(each) for each in document["sites"]],
        }
    )


def _site(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A site's table, whose cluster is that of the pod.

    The pod knows its API server, and the file's endpoint may work only from outside,
    for example through a tunnel. One without TLS stays: no credentials are sent to it,
    and those of the pod are not read.
    """
    machine = dict(table["machine"])
    machine["cluster"] = {**machine["cluster"], "context": IN_CLUSTER}
    if not machine.get("endpoint", "").startswith("http:"):
        machine.pop("endpoint", None)
    return {**table, "machine": machine}


class HeadTerminated(BaseException):
    """Raised by the handler of SIGTERM, wherever a head is at work."""


def stop_aggregator(pool: ComputePool, name: str, clock: Clock, tell: Tell) -> None:
    """Stop the aggregator of a head, but none of its sites.

    Args:
        pool: The pool of this pod's own processes.
        name: Name of the deployment.
        clock: Tells time.
        tell: Called with a word about every step.

    Raises:
        ComputeError: The aggregator's node cannot be read.
    """
    tell("head: its pod has to end (SIGTERM): the aggregator stops, sites keep running")
    begin = clock.monotonic()
    nodes = pool.nodes({DEPLOYMENT: name, ROLE: AGGREGATOR})
    try:
        loop.end_nodes(
            pool,
            name,
            nodes,
            what="the aggregator ended",
            seconds=STOP_SECONDS,
            clock=clock,
        )
    except ComputeError as error:
        tell(f"head: {error}; it is killed with the pod, which costs at most one round")
    else:
        tell(
            f"head: the aggregator has stopped after {clock.monotonic() - begin:.1f} s"
        )
    tell(
        "head: the next head resumes the run: the cluster starts one if it has taken "
        "this pod away; otherwise, run crossfed up again"
    )


def up(deployment: Deployment, *, accept: str, tell: Tell, older: str = "") -> Node:
    """Start the head of a deployment, or replace one that has other settings.

    Args:
        deployment: One with its aggregator in a cluster.
        accept: As ``crossfed up --accept``.
        tell: Called with a word about every step.
        older: As ``crossfed up --older``, for a head that this starts.

    Raises:
        ComputeError: It could not be launched, or nodes of another folder run.
        JobError: The folder has an aggregator of this host, deployment file and job
            are too long, or a head runs that was started with another ``--accept``.
    """
    for pool in deployment.pools.values():
        nodes = pool.nodes({DEPLOYMENT: deployment.name})
        reconcile.check_owner(nodes, deployment.owner, deployment.name)
    if deployment.plan.aggregator.exists():
        raise JobError(
            f"{deployment.plan.path}: {deployment.plan.aggregator} has the aggregator "
            "of this deployment, and its sites trust no other one: name another "
            "deployment, or another folder",
            key="aggregator.provider",
        )
    _warn_of_neighbours(deployment, tell)
    wanted = head_request(deployment, accept, older)
    running = loop.decide(deployment, wanted).node
    if running is not None:
        _check_accepted(running, deployment, accept)
    return loop.fill(deployment, wanted, tell)


def _warn_of_neighbours(deployment: Deployment, tell: Tell) -> None:
    """Name other deployments of the namespace, whose launchers can read the volume.

    Who else may launch jobs there cannot be seen with an operator's rights.
    """
    machine = deployment.plan.file.aggregator
    nodes = deployment.pools[machine.pool].nodes({})
    if names := reconcile.others(nodes, deployment.name):
        namespace = machine.cluster.namespace
        tell(
            f"head: namespace {namespace} also has jobs of {', '.join(names)}. Anyone "
            f"who may launch jobs there can mount the volume of {deployment.name} and "
            "read its keys: give each deployment a namespace of its own"
        )


def _check_accepted(running: Node, deployment: Deployment, accept: str) -> None:
    """Refuse to give a head that runs a digest to accept: it reads one at its start.

    To replace it would interrupt a round. When it has to sign a roster that it must
    not, it ends and names the digest, and the next head is started with that.

    Raises:
        JobError: ``accept`` names another roster than the head's.
    """
    given, known = _digits(accept), running.labels.get(ACCEPTED, "")
    if not given or (known and (given.startswith(known) or known.startswith(given))):
        return
    namespace = deployment.plan.file.aggregator.cluster.namespace
    raise JobError(
        f"{running.id} runs, and was started with {known or 'no digest'}: run "
        "crossfed up without --accept to follow it. If it has to accept another "
        f"roster, it ends and says so. To have it accept {given} now: kubectl -n "
        f"{namespace} delete job {running.id}, then run this command again, which "
        "resumes the run",
        key="--accept",
    )


def _digits(accept: str) -> str:
    return "".join(accept.split()).lower()


def head_request(deployment: Deployment, accept: str, older: str = "") -> NodeRequest:
    """The job of a deployment's head.

    Args:
        deployment: One with its aggregator in a cluster.
        accept: As ``crossfed up --accept``.
        older: As ``crossfed up --older``.

    Raises:
        JobError: Deployment file and job are too long, or cannot be read.
    """
    plan, machine = deployment.plan, deployment.plan.file.aggregator
    given = HeadBundle(
        name=deployment.name,
        owner=deployment.owner,
        deployment=for_pod(job_file.read_toml(plan.path), plan.file),
        job=plan.job.read_text(encoding="utf-8"),
    ).text()
    spec = NodeSpec(
        name=HEAD,
        command=head_command(accept, older),
        labels={ACCEPTED: _digits(accept)} if accept else {},
        max_seconds=deployment.plan.max_seconds + _MARGIN_SECONDS,
        user_data=given,
        image=machine.image,
        disk_gb=_SCRATCH_GB,
        identity=machine.identity,
        limits=machine.cluster.limits,
        head=_head(plan),
    )
    # A head that runs is not replaced for the digest that this command names or omits.
    read = f"{head_command('')}\n{given}\n{spec.image}\n{spec.identity}\n{spec.limits}"
    return NodeRequest(machine.pool, spec, f"{read}\n{spec.head}".encode())


def _head(plan: DeploymentPlan) -> ClusterHead:
    machine = plan.file.aggregator
    name = machine_spec.head_service(plan.file.name)
    own = machine_spec.head_address(plan.file.name, machine.cluster.namespace)
    host, port = parse_address(own, key="aggregator.address")
    return ClusterHead(
        service=name,
        host=host if machine.address == own else "",
        port=port,
        volume=name,
        volume_gb=machine.disk_gb,
    )


def head_command(accept: str, older: str = "") -> Sequence[str]:
    """The command of a head's pod, whose user data is its bundle.

    Args:
        accept: As ``crossfed up --accept``; empty for nothing.
        older: As ``crossfed up --older``; likewise.
    """
    given = {"--accept": accept, "--older": older}
    text = _SCRIPT.format(
        folder=HEAD_FOLDER,
        bundle=USER_DATA,
        file=FED_FILE,
        words="".join(f" {name} {shlex.quote(v)}" for name, v in given.items() if v),
    )
    return ("/bin/sh", "-c", text)


def follow(
    deployment: Deployment, launched: Node, tell: Tell, show: Callable[[str], None]
) -> int:
    """Show the log of a head until it ends.

    Args:
        deployment: One with its aggregator in a cluster.
        launched: Its head.
        tell: Called with a word about the head itself.
        show: Called with each line of its log.

    Returns:
        The exit code of the ``crossfed up`` in the pod.

    Raises:
        ComputeError: The service refuses to answer, or no longer lists the head.
    """
    clock = deployment.clock
    before: Sequence[str] = ()
    told, begin = "", clock.monotonic()
    while True:
        node, lines, news = _look(deployment, launched.id)
        for line in new_lines(before, lines):
            show(line)
        before = lines or before
        is_unlisted = node is None and not news
        if is_unlisted and clock.monotonic() - begin > _UNLISTED_SECONDS:
            raise ComputeError(
                f"{launched.id} is not listed any more: crossfed nodes shows what runs"
            )
        if node is not None and node.state is NodeState.GONE:
            return _code(before, node, tell)
        if news and news != told:
            tell(news)
        told = news
        clock.sleep(_LOOK_SECONDS)


def _look(
    deployment: Deployment, node_id: str
) -> tuple[Node | None, Sequence[str], str]:
    """A head, the end of its log, and what is wrong; empty if nothing is.

    The head goes on while its service cannot be reached from here.
    """
    pool = deployment.pools[deployment.plan.file.aggregator.pool]
    labels = {DEPLOYMENT: deployment.name, OWNER: deployment.owner}
    lines: Sequence[str] = ()
    news = ""
    try:
        found = [each for each in pool.nodes(labels) if each.id == node_id]
        try:
            lines = pool.log(node_id).splitlines()
        except ComputeUnavailable:  # It may have the code that the head ended with.
            raise
        except ComputeError as error:
            news = f"{error}; read again until it succeeds"
    except ComputeUnavailable as error:
        return None, (), f"{error}; looked at again until it succeeds"
    if not found:
        return None, lines, news
    (node,) = found
    return node, lines, f"{node.name}: {node.trouble}" if node.trouble else news


def _code(lines: Sequence[str], node: Node, tell: Tell) -> int:
    """The exit code that a head has ended with, by the last line of its log.

    A log also has text that others have sent, so a killed head never counts as done.
    """
    found = _ENDED.fullmatch(lines[-1]) if lines else None
    code = None if found is None else int(found[1]) & 0xFF
    if code is not None and (code or not node.trouble):
        return code
    tell(
        f"{node.id} has ended ({node.trouble or 'no reason is known'}), and its sites "
        "wait for it: run crossfed up again, which continues, or crossfed down"
    )
    return FAILED


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """Lines of a log that were not there at the last look.

    Args:
        before: The end of the log then.
        after: Its end now; early lines may be missing, and all if it is another log.
    """
    for start in range(len(before)):
        known = len(before) - start
        if after[:known] == before[start:]:
            return after[known:]
    return after


def write_files(given: Path, folder: Path) -> None:
    """Write the files of a bundle.

    Args:
        given: The bundle.
        folder: Folder of the head.

    Raises:
        CorruptObject: The bundle or the volume's record is damaged, or the volume
            belongs to another deployment.
        StoreUnavailable: The volume is full or cannot be written.
    """
    bundle = durable_files.read_json(given, HeadBundle, advice="run crossfed up again")
    if bundle is None:
        raise CorruptObject(f"{given} is missing: run crossfed up again")
    state.adopt(folder / DEPLOYMENT_FOLDER, bundle.name, bundle.owner)
    for name, text in ((JOB_FILE, bundle.job), (FED_FILE, bundle.deployment)):
        durable_files.replace_file(folder / name, [text.encode()])


def main(arguments: list[str]) -> None:
    """Write the files, or say why not."""
    try:
        write_files(Path(arguments[0]), Path(arguments[1]))
    except FederationError as error:
        sys.exit(f"crossfed: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
