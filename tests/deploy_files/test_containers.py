"""The images of deploy/containers: what is in them, and a federation of three of them.

The parties are on networks of their own, 80 ms from each other, with a read-only root
and no right that a container may give up.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import containers, network, programs
from support.containers import CLOSED, STATE, image, podman
from support.deployment import CLOCK, wait_for
from support.line import Line
from support.programs import needs

ROOT = Path(__file__).parents[2]
SITES = ("aws-us-east-1", "gcp-us-central1")
AGGREGATOR = "aggregator"
CONFIG = f"{STATE}/fed/aggregator.toml"
ONE_WAY = Line(delay_seconds=0.02)  # Two lines are between two hosts.
ROUND_TRIP_SECONDS = 0.08
STOP_SECONDS = 10.0
POLICY = """
privacy = "none"
accept_two_sites = true
min_group = 1
max_clip_norm = 100.0
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("containers"),
    needs("root", "podman", "images"),
]


def _inside(party: str, command: str, code: int | None = 0) -> str:
    """Run a shell's command in a new container of an image."""
    start = ("run", "--rm", "--network", "none", *CLOSED, "--entrypoint", "/bin/sh")
    return podman(*start, image(party), "-c", command, code=code)


@pytest.mark.parametrize("party", ["aggregator", "site"])
def test_images_have_no_root_and_no_tools(party: str):
    """Neither a compiler nor an installer is left, nor what its user could change."""
    assert _inside(party, "id -u; id -g").split() == ["10001", "10001"]
    tools = ("gcc", "cc", "make", "pip", "git", "curl", "buildah")
    found = _inside(party, f"command -v {' '.join(tools)}", code=None)
    assert found == ""
    assert "No module named pip" in _inside(party, "python -m pip 2>&1; true")
    assert _inside(party, "find /opt/crossfed -perm /6000 -o -writable ! -type l") == ""


def test_the_bill_of_materials_is_of_what_is_installed():
    """CycloneDX names every installed package with its version."""
    for party in ("aggregator", "site"):
        bill = json.loads((containers.PLACE / f"{party}.cdx.json").read_text())
        listed = {(c["name"].lower(), c["version"]) for c in bill["components"]}
        code = (
            "from importlib.metadata import distributions as d; "
            "print(*[f'{x.name}=={x.version}' for x in d()], sep='\\n')"
        )
        installed = _inside(party, f'python -I -c "{code}"').split()
        assert bill["bomFormat"] == "CycloneDX"
        assert {tuple(p.lower().split("==")) for p in installed} == listed
        assert ("torch", "2.13.0+cpu") in listed


class Federation:
    """Three containers, each with a network, a folder and an image of its own."""

    def __init__(self, folder: Path, hosts: network.Network) -> None:
        self.folder = folder
        self.hosts = hosts
        self.names = {
            host: f"crossfed-{folder.name}-{host}" for host in hosts.addresses
        }

    def arguments(self, host: str) -> list[str]:
        party = AGGREGATOR if host == AGGREGATOR else "site"
        return [
            *CLOSED,
            *("--network", f"ns:/run/netns/{self.hosts.namespaces[host]}"),
            *("--add-host", f"{AGGREGATOR}:{self.hosts.addresses[AGGREGATOR]}"),
            *("--volume", f"{self.folder / host}:{STATE}"),
            image(party),
        ]

    def once(self, host: str, *command: str, given: str = "") -> str:
        start = ("run", "--rm", "--interactive", *self.arguments(host))
        return podman(*start, *command, given=given)

    def start(self, host: str) -> None:
        podman("run", "--detach", "--name", self.names[host], *self.arguments(host))

    def at(self, host: str, *command: str, code: int | None = 0) -> str:
        return podman("exec", self.names[host], *command, code=code)

    def is_well(self, host: str) -> bool:
        return containers.is_well(self.names[host])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("containers")
    hosts = (AGGREGATOR, *SITES)
    with ExitStack() as stack:
        if why := programs.missing("ip", "TUN devices"):
            pytest.skip(why)
        lines = stack.enter_context(network.network(hosts, distant=hosts))
        for host in hosts:
            containers.folder(folder / host)
            lines.shape(host, ONE_WAY)
        made = Federation(folder, lines)
        stack.callback(lambda: containers.end(list(made.names.values())))
        made.once(
            AGGREGATOR, "aggregator", "init", f"{STATE}/fed", "--host", AGGREGATOR
        )
        made.start(AGGREGATOR)
        wait_for(lambda: made.is_well(AGGREGATOR), "the aggregator is well", 120)
        for site in SITES:
            words = ("crossfed", "aggregator", "invite", site, "--config", CONFIG)
            token = made.at(AGGREGATOR, *words).split()[-1]
            made.once(site, "enroll", "-", "--folder", f"{STATE}/site", given=token)
        for site in SITES:
            roster = ("enroll", "--roster", "--folder", f"{STATE}/site")
            shown = made.once(site, *roster)
            if "--accept" in shown:
                digest = shown.split("--accept")[1].split()[0]
                made.once(site, *roster, "--accept", digest)
            settings = folder / site / "site" / "site.toml"
            before, _, _ = settings.read_text().partition("[policy]")
            settings.write_text(f"{before}[policy]\n{POLICY}")
            made.start(site)
        yield made


def test_three_containers_train(federation: Federation):
    """jobs/quickstart.toml, with secure aggregation, across three networks."""
    for host in federation.names:
        wait_for(lambda host=host: federation.is_well(host), f"{host} is well", 120)
    job = federation.folder / AGGREGATOR / "quickstart.toml"
    shutil.copy(ROOT / "jobs" / "quickstart.toml", job)
    begin = CLOCK.monotonic()
    words = ("run", f"{STATE}/{job.name}", "--aggregator", CONFIG, "--json")
    said = federation.at(AGGREGATOR, "crossfed", *words, "--set", "rounds=3")
    result = json.loads(said)
    assert result["status"] == "completed"
    assert [each["status"] for each in result["rounds"]] == ["completed"] * 3
    assert CLOCK.monotonic() - begin > 3 * ROUND_TRIP_SECONDS


def test_nothing_else_can_be_written(federation: Federation):
    """The root is read-only in every container of the run above."""
    for host in federation.names:
        touched = federation.at(host, "touch", "/opt/crossfed/mine", code=1)
        assert touched == ""


def test_a_site_is_unwell_without_its_aggregator_and_leaves_in_time(
    federation: Federation,
):
    """The check can fail; and SIGTERM ends a container long before it is killed."""
    first, second = SITES
    begin = CLOCK.monotonic()
    podman("stop", "--time", "60", federation.names[first])
    assert CLOCK.monotonic() - begin < STOP_SECONDS
    state = podman(
        "inspect", "--format", "{{.State.ExitCode}}", federation.names[first]
    )
    assert state.strip() == "0"
    assert federation.is_well(second)
    podman("stop", "--time", "60", federation.names[AGGREGATOR])
    wait_for(lambda: not federation.is_well(second), "the site is unwell", 60)
