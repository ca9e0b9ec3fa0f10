"""The manifests of deploy/kubernetes: sound, closed, and started by podman."""

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import containers
from support.containers import podman
from support.deployment import wait_for
from support.programs import needs, program

from cloud_adapters.compute import kube_errors, kube_manifest
from cloud_adapters.compute.pool import Market, NodeLimits, NodeSpec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("aggregator", "site")
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
# A namespace for sites that `crossfed up` launches.
JOBS = "jobs"
SITES = ("gcp-us-central1", "aws-us-east-1")  # The first is that of the overlay.
CONFIG = f"{containers.STATE}/fed/aggregator.toml"
SITE = f"{containers.STATE}/site"
HOST = "aggregator.example.org"

Document = dict[str, Any]

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def manifest(folder: Path) -> str:
    """What an overlay comes to."""
    command = [program("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[Document]:
    return [*yaml.safe_load_all(text)]


def of_kind(text: str, kind: str) -> Document:
    (found,) = [each for each in documents(text) if each["kind"] == kind]
    return found


def passes(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def with_everything(tmp_path: Path) -> str:
    """The site's overlay as an operator with a GPU in some cloud has it."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    place = tmp_path / "kubernetes" / "overlays" / "site"
    file = place / "kustomization.yaml"
    lines = [f"  - ../../components/{name}" for name in COMPONENTS]
    file.write_text("\n".join([file.read_text(), "components:", *lines, ""]))
    return manifest(place)


@pytest.mark.parametrize("overlay", [*OVERLAYS, JOBS])
def test_kubernetes_accepts_them(overlay: str, tmp_path: Path):
    """By its own schema, where an unknown key is an error."""
    file = tmp_path / "manifest.yaml"
    file.write_text(manifest(FOLDER / "overlays" / overlay))
    passes(program("kubernetes-validate"), "--strict", file)


def test_kubernetes_accepts_all_components(with_everything: str, tmp_path: Path):
    file = tmp_path / "manifest.yaml"
    file.write_text(with_everything)
    passes(program("kubernetes-validate"), "--strict", file)
    limits = _containers(with_everything)[-1]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    account = of_kind(with_everything, "ServiceAccount")
    assert len(account["metadata"]["annotations"]) == 2


def test_components_open_what_they_name_and_nothing_else(with_everything: str):
    """Private and link-local addresses are closed to a site without them."""
    policy = of_kind(with_everything, "NetworkPolicy")

    def ways(rules: list[Document]) -> set[tuple[str, int]]:
        return {
            (block["ipBlock"]["cidr"], port["port"])
            for rule in rules
            for block in rule["to"]
            if "ipBlock" in block
            for port in rule["ports"]
        }

    bare = of_kind(manifest(FOLDER / "overlays" / "site"), "NetworkPolicy")
    before, after = (ways(each["spec"]["egress"]) for each in (bare, policy))
    assert after - before == {
        ("169.254.170.23/32", 80),  # The agent of EKS Pod Identity.
        ("10.20.32.0/28", 443),  # Interface endpoints.
        *(
            (f"169.254.169.{host}/32", port)
            for host in (252, 254)
            for port in (80, 988)
        ),
    }
    assert before <= after


@pytest.mark.slow
@pytest.mark.parametrize("overlay", [*OVERLAYS, JOBS])
def test_checkov_finds_nothing(overlay: str, tmp_path: Path):
    """Or the manifest says at that place why it is so."""
    file = tmp_path / "manifest.yaml"
    file.write_text(manifest(FOLDER / "overlays" / overlay))
    options = ("--skip-download", "--quiet", "--compact", "--framework", "kubernetes")
    passes(program("checkov"), *options, "--file", file)


def launched(**changed: Any) -> str:
    """The job of a site as `crossfed up` asks for it."""
    given: dict[str, Any] = {
        "name": "site-a",
        "command": ["/bin/sh", "-c", "exit 0"],
        "labels": {"crossfed-deployment": "fed"},
        "max_seconds": 600.0,
        "image": f"registry.example.org/crossfed-site@sha256:{'ab' * 32}",
        "user_data": "name = 'a'\n",
        "limits": NodeLimits(cpus=2, memory_gb=4.5, gpus=1),
        **changed,
    }
    made = kube_manifest.job(NodeSpec(**given), "0" * 40)
    made["metadata"]["namespace"] = "crossfed"
    return yaml.safe_dump(made)


@pytest.mark.parametrize("market", list(Market))
def test_kubernetes_accepts_jobs_that_are_launched(market: Market, tmp_path: Path):
    file = tmp_path / "manifest.yaml"
    file.write_text(launched(market=market, zones=("a", "b"), machine="c"))
    passes(program("kubernetes-validate"), "--strict", file)


@pytest.mark.slow
def test_checkov_finds_nothing_in_jobs_that_are_launched(tmp_path: Path):
    """Without an exception, in the namespace that is made for them."""
    file = tmp_path / "manifest.yaml"
    file.write_text(f"{manifest(FOLDER / 'overlays' / JOBS)}---\n{launched()}")
    options = ("--skip-download", "--quiet", "--compact", "--framework", "kubernetes")
    passes(program("checkov"), *options, "--file", file)


def test_jobs_are_launched_into_a_namespace_that_is_closed():
    """Their labels are those of its network policy; it admits restricted pods alone."""
    text = manifest(FOLDER / "overlays" / JOBS)
    labels = yaml.safe_load(launched())["spec"]["template"]["metadata"]["labels"]
    selector = of_kind(text, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= labels.items()
    namespace = of_kind(text, "Namespace")["metadata"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_operators_may_do_what_a_pool_asks_for_and_no_more():
    """As the message says that an operator sees who may not."""
    text = manifest(FOLDER / "overlays" / JOBS)
    assert _rights(of_kind(text, "Role")["rules"]) == {
        (resource, verb)
        for line in kube_errors.PERMISSIONS
        for resource, _, verbs in [line.partition(": ")]
        for verb in verbs.split(", ")
    }


def _rights(rules: list[Document]) -> set[tuple[str, str]]:
    return {
        (f"{resource}.{group}".rstrip("."), verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _pod(text: str) -> Document:
    return dict(of_kind(text, "StatefulSet")["spec"]["template"]["spec"])


def _containers(text: str) -> list[Document]:
    return [*_pod(text)["initContainers"], *_pod(text)["containers"]]


@each_overlay
def test_no_volume_with_keys_is_shared(overlay: str):
    """A claim belongs to one pod; what is mounted beside it holds no key of a party."""
    text = manifest(FOLDER / "overlays" / overlay)
    stateful = of_kind(text, "StatefulSet")["spec"]
    assert stateful["replicas"] == 1
    (claim,) = stateful["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    kinds = {kind for v in _pod(text)["volumes"] for kind in v if kind != "name"}
    assert kinds <= {"emptyDir", "configMap", "secret"}
    # The token is for the container that enrols, and for no other.
    main = _pod(text)["containers"][0]
    assert "token" not in {mount["name"] for mount in main["volumeMounts"]}


def test_nothing_connects_in_to_a_site():
    """And it connects out to DNS, the aggregator and public addresses alone."""
    policy = of_kind(manifest(FOLDER / "overlays" / "site"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    ports = [{p["port"] for p in rule["ports"]} for rule in policy["egress"]]
    assert ports == [{53}, {443}, {8443}]
    (public,) = policy["egress"][1]["to"]
    assert {"10.0.0.0/8", "169.254.0.0/16"} <= {*public["ipBlock"]["except"]}


def as_pods(text: str, address: str, names: dict[str, str], token: Path) -> str:
    """The same pods for podman, which knows neither StatefulSets nor namespaces.

    Args:
        text: Of an overlay.
        address: Of the aggregator.
        names: What is called otherwise.
        token: Folder of the token; podman 4.3 finds no secret that is optional.
    """
    stateful = of_kind(text, "StatefulSet")
    name = f"{stateful['metadata']['name']}-0"
    pod = copy.deepcopy(_pod(text))
    pod["hostAliases"] = [{"ip": address, "hostnames": [HOST]}]
    for volume in pod["volumes"]:
        if volume.pop("secret", None):
            volume["hostPath"] = {"path": str(token)}
    # Podman would publish them on every address of this machine.
    pod["containers"][0].pop("ports", None)
    (template,) = stateful["spec"]["volumeClaimTemplates"]
    claim = f"{template['metadata']['name']}-{name}"
    pod["volumes"] += [
        {**template["metadata"], "persistentVolumeClaim": {"claimName": claim}}
    ]
    # Or podman 4.3 removes init containers, at times before they have ended.
    kept = {"io.podman.annotations.init.container.type": "always"}
    found = [
        of_kind(text, "ConfigMap"),
        _document("PersistentVolumeClaim", {"name": claim}, template["spec"]),
        _document("Pod", {"name": name, "annotations": kept}, pod),
    ]
    made = str(yaml.safe_dump_all(found))
    for party in OVERLAYS:
        before = f"registry.example.org/crossfed-{party}:0.1.0-cpu"
        made = made.replace(before, containers.image(party))
    for before, after in names.items():
        made = made.replace(before, after)
    return made


def _document(kind: str, metadata: Document, spec: Document) -> Document:
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}


class Pods:
    """An aggregator and two sites, as pods on a network of podman's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []
        subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.network = f"crossfed-{os.getpid()}"
        self.aggregator = f"{subnet}.10"
        podman("network", "create", "--subnet", f"{subnet}.0/24", self.network)

    def play(
        self, host: str, overlay: str, names: dict[str, str], token: str = ""
    ) -> None:
        folder = containers.folder(self.folder / host)
        (folder / "token").write_text(token)
        (folder / "token").chmod(0o444)
        text = manifest(FOLDER / "overlays" / overlay)
        file = self.folder / f"{host}.yaml"
        file.write_text(as_pods(text, self.aggregator, names, folder))
        self.files.append(file)
        place = ["--network", self.network]
        place += ["--ip", self.aggregator] if host == "aggregator" else []
        done = containers.run("kube", "play", *place, str(file))
        assert done.returncode == 0, done.stderr + self.logs()

    def logs(self) -> str:
        """What every container has said."""
        names = podman("ps", "--all", "--format", "{{.Names}}").split()
        found = {name: containers.run("logs", name) for name in names}
        return "".join(f"{n}: {d.stdout}{d.stderr}" for n, d in found.items())

    def end(self) -> None:
        """End all pods, and remove their volumes."""
        for file in self.files:
            podman("kube", "play", "--down", str(file), code=None)
            for each in documents(file.read_text()):
                if each["kind"] in {"PersistentVolumeClaim", "ConfigMap"}:
                    name = each["metadata"]["name"]
                    podman("volume", "rm", "--force", name, code=None)
        podman("network", "rm", "--force", self.network, code=None)


def at(container: str, *command: str) -> str:
    return podman("exec", container, *command)


def is_ready(container: str, overlay: str) -> bool:
    """By the manifest's own probe."""
    text = manifest(FOLDER / "overlays" / overlay)
    probe = _pod(text)["containers"][0]["readinessProbe"]["exec"]["command"]
    return containers.run("exec", container, *probe).returncode == 0


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    program("iptables")  # Of podman's networks.
    made = Pods(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("containers")
@needs("root", "podman", "images")
def test_pods_of_the_overlays_train(pods: Pods):
    """jobs/private.toml, with the policy of the overlay: keys stay in three volumes."""
    pods.play("aggregator", "aggregator", {})
    aggregator = "crossfed-aggregator-0-aggregator"
    wait_for(lambda: is_ready(aggregator, "aggregator"), "it is ready", 180)
    inside = {}
    for number, site in enumerate(SITES):
        words = ("crossfed", "aggregator", "invite", site, "--config", CONFIG)
        token = at(aggregator, *words).split()[-1]
        party = f"crossfed-site{number}"
        names = {"crossfed-site-": f"{party}-", f'"{SITES[0]}"': f'"{site}"'}
        names["name: crossfed-site\n"] = f"name: {party}\n"
        inside[site] = f"{party}-0-site"
        pods.play(site, "site", names, token)
    for site, container in inside.items():
        wait_for(lambda c=container: is_ready(c, "site"), f"{site} is ready", 180)
        roster = ("crossfed", "enroll", "--roster", "--folder", SITE)
        shown = at(container, *roster)
        if "--accept" in shown:
            at(container, *roster, "--accept", shown.split("--accept")[1].split()[0])
    podman("cp", str(ROOT / "jobs" / "private.toml"), f"{aggregator}:{CONFIG[:-15]}")
    job = f"{containers.STATE}/fed/private.toml"
    run = ("crossfed", "run", job, "--aggregator", CONFIG, "--json")
    result = json.loads(at(aggregator, *run, "--set", "rounds=2"))
    assert [each["status"] for each in result["rounds"]] == ["completed"] * 2
