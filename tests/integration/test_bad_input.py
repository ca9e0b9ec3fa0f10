"""What an operator may get wrong: the message, the exit code, and no traceback."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import proxy_server
from support.deployment import crossfed
from support.enrolments import Federation
from support.programs import needs
from support.proxy_server import RunningProxy

from cloud_adapters.net.ports import free_port
from deploy.doctor import site as doctor_site
from deploy.doctor.checks import Check
from federation.clock import SystemClock, VirtualClock
from privacy.membership.certificates import Authority

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    needs("nginx"),
]


@dataclass(kw_only=True)
class Place:
    """An aggregator behind nginx, and an enrolled site."""

    federation: Federation
    proxy: RunningProxy

    @property
    def path(self) -> Path:
        return self.federation.folder / "site-a" / "site.toml"

    def connect_to(self, address: str) -> None:
        """Write another address of the aggregator into ``site.toml``."""
        text = re.sub("address = .*", f'address = "{address}"', self.path.read_text())
        self.path.write_text(text)

    def examined(self, clock: VirtualClock | SystemClock) -> dict[str, Check]:
        return {each.name: each for each in doctor_site.checks(self.path, clock)}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    federation = Federation(folder=tmp_path, clock=SystemClock())
    token = federation.invite("site-a")
    federation.enroll(token)
    authority = Authority.load(federation.aggregator, clock=SystemClock())
    with proxy_server.serve_before(
        federation.aggregator, authority, service_port=free_port()
    ) as proxy:
        made = Place(federation=federation, proxy=proxy)
        made.connect_to(proxy.address)
        yield made


def test_wrong_authority(place: Place):
    """As of an aggregator that somebody else has put there."""
    other = Authority.create("other", clock=SystemClock())
    (place.path.parent / "ca.crt").write_bytes(other.pem)
    told = crossfed("site", "up", "--config", str(place.path), code=2).stderr
    assert f"{place.proxy.address} does not prove that" in told
    assert "certificate authority" in told
    assert "Traceback" not in told
    found = place.examined(SystemClock())["aggregator"]
    assert found.status == "problem"
    assert "does not prove" in found.found


def test_doctor_tells_all_that_is_wrong_at_once(place: Place):
    """Before a run would: an agent tries to connect for ever, and loads data late."""
    address = f"127.0.0.1:{free_port()}"
    place.connect_to(address)
    text = place.path.read_text()
    place.path.write_text(text.replace('source = ""', 'source = "file:///nowhere"'))
    (place.path.parent / "node.pem").chmod(0o644)
    told = crossfed("doctor", "--site", str(place.path), code=1).stdout
    assert f"problem  aggregator: {address} cannot be reached" in told
    assert "running, that its port" in told
    assert "problem  data: there is no index.json in file:///nowhere" in told
    assert "problem  node key: " in told
    assert told.count("problem  ") == 3


def test_address_that_is_none(place: Place):
    """The key is named, with its file."""
    place.connect_to("aggregator.example.org")
    told = crossfed("site", "up", "--config", str(place.path), code=2).stderr
    assert f"{place.path}: aggregator.address: " in told
    assert "is not HOST:PORT" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("seconds", [600.0, 20.0, -600.0])
def test_clock_skew(place: Place, seconds: float):
    """Nodes sign the time: Flower takes an old signature, but none of the future."""
    now = SystemClock().now()
    found = place.examined(VirtualClock(now + seconds))["clock skew"]
    assert found.status == "problem"
    assert found.found.endswith("the aggregator's")
    assert "ntp" in found.advice.lower()
    assert place.examined(VirtualClock(now - 100.0))["clock skew"].status == "ok"


def test_way_to_the_aggregator_is_measured(place: Place):
    """By what it reads to its end and does not take."""
    found = place.examined(SystemClock())
    assert found["admission"].status == "ok"
    assert found["bandwidth"].found.endswith("MB/s to the aggregator")
    assert place.proxy.fleet[-1] == "POST /v1/fleet/push-object HTTP/1.1"


def test_doctor_says_that_a_site_was_revoked(place: Place):
    """And not to wait; its bandwidth is nobody's business."""
    place.federation.revoke("site-a")
    found = place.examined(SystemClock())
    assert found["admission"].status == "problem"
    assert found["admission"].found.endswith("was revoked")
    assert "empty folder" in found["admission"].advice
    assert found["aggregator"].status == "ok"
    assert "bandwidth" not in found
    (place.path.parent / "site.pem").chmod(0o644)
    assert place.examined(SystemClock())["admission"].status == "problem"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("site", "up", "--config", "none/site.toml"), "none/site.toml"),
        (("aggregator", "up", "--config", "none/a.toml"), "none/a.toml"),
        (("ps", "--aggregator", "none/a.toml"), "there is no none/a.toml"),
        (("run", "none.toml", "--aggregator", "none/a.toml"), "none.toml"),
    ],
)
def test_file_that_is_not_there(arguments: tuple[str, ...], text: str):
    """Each is named, and the exit code is that of a wrong job."""
    told = crossfed(*arguments, code=2).stderr
    assert text in told
    assert "Traceback" not in told
