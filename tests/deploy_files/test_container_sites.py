"""``crossfed up`` with sites in containers of the image that is built here."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import containers, proxy_server
from support.containers import podman
from support.deployment import CLOCK, SITES, crossfed

from cloud_adapters.compute import local_network

JOBS = Path(__file__).parents[2] / "jobs"
ROLES = [f"site-{site}" for site in SITES]
FIRST_ROUND_SECONDS = 120.0
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
    pytest.mark.skipif(
        bool(containers.missing()) or not proxy_server.installed(),
        reason=containers.missing() or "nginx is not installed (make nginx)",
    ),
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


def bridge(path: Path) -> str:
    return local_network.device_name(path.parent / "deployments" / "fed" / "nodes")


def ours(path: Path) -> list[str]:
    """Every container of a deployment, at work or not."""
    label = "--filter=label=crossfed-deployment=fed"
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
