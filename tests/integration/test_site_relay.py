"""The relay of a stock SuperNode, before a real nginx: what passes, and what not."""

import importlib.util
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from support import proxy_server
from support.programs import needs
from support.proxy_server import RunningProxy, wait_for

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.net.ports import free_port
from cloud_adapters.nginx.config import MAX_FLEET_BYTES
from federation.clock import SystemClock
from federation.errors import FederationError, JobError
from privacy.membership.certificates import key_pem, new_key

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse  # noqa: E402

from cloud_adapters.flower_apps.bundle import bundle  # noqa: E402
from deploy.site_host import relay as site_relay  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    bundle()  # Flower's way to make one warns; it is made once.

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    needs("nginx"),
]

FLEET = "/v1/fleet"


@dataclass
class Relay:
    """A relay in a thread of this process.

    Attributes:
        folder: The site's.
        said: What it told its operator.
        stopped: Ends it.
    """

    folder: Path
    said: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        path = self.folder / "site.toml"
        site_relay.serve(
            path,
            port=0,
            stopped=self.stopped,
            clock=SystemClock(),
            listener=self.said.append,
        )

    @property
    def is_up(self) -> bool:
        return any("start it with" in line for line in self.said)

    @property
    def command(self) -> str:
        """What it tells to start."""
        (line,) = (line for line in self.said if "start it with" in line)
        return line

    @property
    def url(self) -> str:
        """Where it listens."""
        words = self.command.split()
        return f"https://{words[words.index('--superlink') + 1]}"

    @property
    def context(self) -> ssl.SSLContext:
        """Believes its certificate."""
        return ssl.create_default_context(cafile=self.folder / "relay/ca.crt")

    def client(self) -> httpx.Client:
        """A node."""
        return httpx.Client(base_url=self.url, verify=self.context, timeout=60)


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    with proxy_server.serve() as running:
        yield running


def site_folder(folder: Path, proxy: RunningProxy, certificate: str) -> Path:
    """A site as enrolment leaves it."""
    folder.mkdir()
    (folder / "site.toml").write_text(
        f'name = "lab"\ncertificate = "{certificate}"\n'
        f'[aggregator]\naddress = "{proxy.address}"\nauthority = "ca.crt"\n'
    )
    (folder / "ca.crt").write_bytes(proxy.authority.pem)
    (folder / "node.pem").write_bytes(key_pem(new_key()))
    (folder / "node.pem").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def relay(
    proxy: RunningProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    certificate, _ = proxy.issue("lab")
    certificate.chmod(0o600)
    folder = tmp_path_factory.mktemp("relay") / "lab"
    running = Relay(site_folder(folder, proxy, str(certificate)))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        wait_for(lambda: running.is_up, "it listens")
        yield running
    finally:
        running.stopped.set()
        thread.join()


def test_call_of_a_node_reaches_the_fleet(relay: Relay, proxy: RunningProxy):
    """With the site's certificate, also a large one; one connection serves several."""
    before = len(proxy.fleet)
    with relay.client() as client:
        for size in (0, 3, 6 << 20):
            answer = client.post(f"{FLEET}/push-object", content=bytes(size))
            assert (answer.status_code, answer.text) == (200, str(size))
    assert proxy.fleet[before:] == [f"POST {FLEET}/push-object HTTP/1.1"] * 3


@pytest.mark.parametrize(
    "path",
    [
        f"{FLEET}/register-node",
        f"{FLEET}/pull-messages?x=1",
        f"{FLEET}//pull-messages",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/enroll",
    ],
)
def test_nothing_else_passes(relay: Relay, proxy: RunningProxy, path: str):
    """Only what a node calls once it is enrolled."""
    before = len(proxy.fleet), len(proxy.service)
    with relay.client() as client:
        assert client.post(path, content=b"x").status_code == 404
        assert client.get(f"{FLEET}/pull-messages").status_code == 501
    assert (len(proxy.fleet), len(proxy.service)) == before


def test_bundle_is_that_of_the_site(relay: Relay, proxy: RunningProxy):
    """The aggregator is not even asked for one."""
    before = len(proxy.fleet)
    request = GetFabRequest(hash_str=bundle().hash_str)
    with relay.client() as client:
        answer = client.post(
            f"{FLEET}/get-fab", content=request.SerializeToString()
        ).raise_for_status()
    assert GetFabResponse.FromString(answer.content).fab.content == bundle().content
    assert len(proxy.fleet) == before


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (GetFabRequest(hash_str="ab" * 32).SerializeToString(), "'abababababababab'"),
        (b"\xff\xff", "malformed request"),
    ],
)
def test_another_bundle_does_not_come_in(
    relay: Relay, proxy: RunningProxy, body: bytes, complaint: str
):
    """A SuperNode takes 403 for a run that has ended, and its operator is told."""
    before = len(proxy.fleet)
    with relay.client() as client:
        assert client.post(f"{FLEET}/get-fab", content=body).status_code == 403
    assert "a bundle was refused: " in relay.said[-1]
    assert complaint in relay.said[-1]
    assert len(proxy.fleet) == before


@pytest.mark.parametrize(
    ("length", "status"), [(MAX_FLEET_BYTES + 1, 413), ("1" * 99, 413), ("x", 411)]
)
def test_body_has_a_limit(relay: Relay, length: object, status: int):
    """It is refused by its announcement."""
    head = f"POST {FLEET}/push-object HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
    host, _, port = relay.url.removeprefix("https://").partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        relay.context.wrap_socket(plain, server_hostname=host) as tls,
    ):
        tls.sendall(head.encode())
        assert tls.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_key_is_the_node_s_in_openssh_s_format(relay: Relay):
    """For its owner alone."""
    path = relay.folder / "relay" / "node"
    assert isinstance(
        load_ssh_private_key(path.read_bytes(), None), ec.EllipticCurvePrivateKey
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert f"--auth-supernode-private-key {path} " in relay.command


def test_node_that_speaks_no_tls_stops_nobody(relay: Relay):
    """Whoever connects and says nothing waits alone."""
    host, _, port = relay.url.removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with relay.client() as client:
            assert client.post(f"{FLEET}/get-run").status_code == 200


def test_aggregator_that_is_away_is_tried_again(
    tmp_path: Path, proxy: RunningProxy, relay: Relay
):
    """A SuperNode repeats a call that 503 answers."""
    config = relay.folder / "site.toml"
    text = config.read_text()
    certificate = text.split('"')[3]
    folder = site_folder(tmp_path / "lab", proxy, certificate)
    away = (folder / "site.toml").read_text()
    away = away.replace(proxy.address, f"127.0.0.1:{free_port()}")
    (folder / "site.toml").write_text(away)
    lost = Relay(folder)
    thread = threading.Thread(target=lost.run)
    thread.start()
    try:
        wait_for(lambda: lost.is_up, "it listens")
        with lost.client() as client:
            assert client.post(f"{FLEET}/get-run").status_code == 503
        assert "the aggregator cannot be reached: ConnectionRefused" in lost.said[-1]
    finally:
        lost.stopped.set()
        thread.join()


def test_one_works_in_a_folder(relay: Relay):
    """An agent and a relay of one site would answer for each other."""
    with pytest.raises(FederationError, match="another agent or relay"):
        Relay(relay.folder).run()


def test_mistakes_are_told(tmp_path: Path, proxy: RunningProxy):
    """Before anything listens."""
    with pytest.raises(JobError, match="without a proxy") as caught:
        Relay(site_folder(tmp_path / "a", proxy, "")).run()
    assert caught.value.key == "certificate"
    with pytest.raises(JobError, match="enrol the site again"):
        Relay(site_folder(tmp_path / "b", proxy, "missing.pem")).run()


@pytest.mark.parametrize("port", [-1, 70_000])
def test_port_that_is_none(
    relay: Relay, tmp_path: Path, proxy: RunningProxy, port: int
):
    """Or one that is taken."""
    certificate = (relay.folder / "site.toml").read_text().split('"')[3]
    folder = site_folder(tmp_path / "lab", proxy, certificate)
    with pytest.raises(FederationError, match=f"cannot listen on 127.0.0.1:{port}"):
        site_relay.serve(
            folder / "site.toml",
            port=port,
            stopped=threading.Event(),
            clock=SystemClock(),
            listener=print,
        )
