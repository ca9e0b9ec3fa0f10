"""``crossfed up`` with parties in containers of the images that are built here."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import containers
from support.containers import podman
from support.deployment import CLOCK, CROSSFED, SITES, crossfed, wait_for
from support.programs import needs

from cloud_adapters.compute import local_network
from cloud_adapters.compute.containers import ContainerPool
from cloud_adapters.compute.pool import NodeSpec
from federation.errors import ComputeError

JOBS = Path(__file__).parents[2] / "jobs"
ROLES = [f"site-{site}" for site in SITES]
FIRST_ROUND_SECONDS = 120.0
ROUNDS = 30
TABLE = f"""
[sites.machine]
isolation = "container"
image = "{containers.image("site")}"
[sites.policy]
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
    needs("root", "podman", "images", "nginx"),
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A deployment of two such sites; nothing of it is left."""
    for name, value in containers.SETTINGS.items():
        monkeypatch.setenv(name, value)
    text = (JOBS / "quickstart.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace("rounds = 30", "rounds = 2"))
    path = tmp_path / "fed.toml"
    tables = (f'[[sites]]\nname = "{site}"{TABLE}' for site in SITES)
    path.write_text('name = "fed"\njob = "job.toml"\n' + "".join(tables))
    yield path
    crossfed("down", str(path))
    assert ours(path) == []
    assert not (Path("/sys/class/net") / bridge(path)).exists()


@pytest.fixture
def clouds(file: Path) -> Iterator[tuple[str, ...]]:
    """The same sites in two clouds, rehearsed here; the arguments of each command."""
    text = (JOBS.parent / "deploy" / "examples" / "two-clouds.toml").read_text()
    text = text.replace("../../jobs/quickstart.toml", "job.toml")
    path = file.parent / "clouds.toml"
    text = text.replace('name = "two-clouds"', 'name = "rehearsed"')
    path.write_text(text.replace("../../deployments/two-clouds", "rehearsed"))
    job = file.parent / "job.toml"
    job.write_text(job.read_text().replace("rounds = 2", f"rounds = {ROUNDS}"))
    images = containers.image("site").replace("-site:", ":")
    words = (str(path), "--provider", "local", "--containers", "--images", images)
    yield words
    crossfed("down", *words)
    assert names_of("rehearsed") == []


def bridge(path: Path) -> str:
    return local_network.device_name(path.parent / "deployments" / "fed" / "nodes")


def ours(path: Path) -> list[str]:
    """Every container of a deployment, at work or not."""
    return names_of("fed")


def names_of(deployment: str) -> list[str]:
    label = f"--filter=label=crossfed-deployment={deployment}"
    return podman("ps", "--all", "--format={{.Names}}", label).split()


def test_sites_in_containers_train_from_one_command(file: Path):
    """The first round is over in two minutes, where there are images."""
    begin = CLOCK.monotonic()
    result = json.loads(crossfed("up", str(file), "--json").stdout)
    took = CLOCK.monotonic() - begin
    assert (result["status"], result["rounds_completed"]) == ("completed", 2)
    assert took < FIRST_ROUND_SECONDS
    for name in ours(file):
        assert_closed(json.loads(podman("inspect", name))[0], file)
    killed, kept = sorted(ours(file))
    identity = file.parent / "deployments" / "fed" / "sites" / SITES[0] / "identity.pem"
    before = identity.read_bytes()
    podman("kill", "--signal", "KILL", killed)
    told = crossfed("up", str(file), "--detach").stderr
    assert told.count("launched") == 1
    assert {killed, kept} < {*ours(file)}
    assert identity.read_bytes() == before
    assert identity.stat().st_uid == containers.USER


def test_an_enrolment_of_a_command_that_was_killed_is_taken_up(file: Path):
    """Its container goes on, and enrols the site while no command is there."""
    folder = file.parent / "deployments" / "fed"
    site = folder / "sites" / SITES[0]
    up = subprocess.Popen(
        [*CROSSFED, "up", str(file), "--detach"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((site / "identity.pem").exists, "the site enrols")
    finally:
        up.kill()
        up.wait()
    wait_for((site / "site.pem").exists, "the site has enrolled", 60)
    assert (folder / "tokens" / SITES[0]).exists()
    crossfed("up", str(file), "--detach")
    assert not [*(folder / "tokens").iterdir()]


def assert_closed(found: dict[str, object], file: Path) -> None:
    """No right that a container can give up, and the site's folder alone."""
    host, config = found["HostConfig"], found["Config"]
    assert isinstance(host, dict)
    assert isinstance(config, dict)
    assert host["ReadonlyRootfs"]
    assert found["EffectiveCaps"] in (None, [])
    assert "no-new-privileges" in host["SecurityOpt"]
    assert config["User"] == f"{containers.USER}:{containers.USER}"
    mounts = found["Mounts"]
    assert isinstance(mounts, list)
    (mount,) = (each for each in mounts if each["Type"] == "bind")
    assert Path(mount["Source"]).parent == file.parent / "deployments" / "fed" / "sites"
    assert config["Timeout"] == 12 * 3600


def test_two_clouds_are_rehearsed_in_containers_and_their_aggregator_killed(
    clouds: tuple[str, ...],
):
    """The aggregator, too; killed in a round, another one goes on with the run."""
    begin = CLOCK.monotonic()
    crossfed("up", *clouds, "--detach")
    place = Path(clouds[0]).parent / "rehearsed.containers"
    (events,) = (place / "aggregator" / "runs").glob("*/*/")
    log = events / "events.jsonl"
    wait_for(lambda: rounds_of(log) >= 1, "the first round")
    assert CLOCK.monotonic() - begin < FIRST_ROUND_SECONDS
    assert {*names_of("rehearsed")} == {
        node["id"] for node in json.loads(crossfed("nodes", *clouds, "--json").stdout)
    }
    (aggregator,) = (n for n in names_of("rehearsed") if n.startswith("aggregator"))
    assert_own_folder(json.loads(podman("inspect", aggregator))[0], place)
    podman("kill", "--signal", "KILL", aggregator)
    before = rounds_of(log)
    result = json.loads(crossfed("up", *clouds, "--json").stdout)
    assert result["status"] == "completed"
    # With two secret sites, the round in which it was killed is lost.
    assert result["rounds_completed"] >= ROUNDS - 1
    assert 1 <= before < ROUNDS
    shutil.rmtree(place)  # All that this host knew of it.
    told = crossfed("down", *clouds, code=1).stderr
    assert "brought up from another" in told
    assert "3 nodes ended" in crossfed("down", *clouds, "--any-owner").stdout
    assert "0 nodes ended" in crossfed("down", *clouds).stdout


def rounds_of(log: Path) -> int:
    return log.read_bytes().count(b'"RoundFinished"') if log.exists() else 0


def assert_own_folder(found: dict[str, object], place: Path) -> None:
    """The aggregator's folder alone, without a site's keys, and no root."""
    host, config, mounts = found["HostConfig"], found["Config"], found["Mounts"]
    assert isinstance(host, dict)
    assert isinstance(config, dict)
    assert isinstance(mounts, list)
    assert host["ReadonlyRootfs"]
    assert config["User"] == f"{containers.USER}:{containers.USER}"
    sources = [each["Source"] for each in mounts if each["Type"] == "bind"]
    assert sources == [str(place / "aggregator")]


def test_an_image_that_is_missing_is_named_before_anything_starts(
    clouds: tuple[str, ...],
):
    words = (*clouds[:-1], "localhost/not-built:1")
    told = crossfed("up", *words, code=2).stderr
    assert "there is no image localhost/not-built-" in told
    assert names_of("rehearsed") == []


@pytest.mark.usefixtures("file")
def test_another_container_of_the_same_name_is_left_alone(tmp_path: Path):
    pool = ContainerPool(folder=tmp_path / "nodes")
    spec = NodeSpec(
        name="site-x",
        command=["sleep", "60"],
        labels={},
        max_seconds=60.0,
        image=containers.BASE,
    )
    name = pool.launch(spec, "token").id
    containers.end([name])
    podman("create", f"--name={name}", containers.BASE, "sleep", "1")
    try:
        with pytest.raises(ComputeError, match="already in use"):
            pool.launch(spec, "token")
        assert name in podman("ps", "--all", "--format={{.Names}}")
    finally:
        containers.end([name])
        local_network.remove(pool.folder)
