"""Enrolment over TLS, through a real nginx, from the first byte to the revocation."""

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support import proxy_server
from support.enrolments import Federation
from support.programs import needs
from support.proxy_server import RunningProxy

from cloud_adapters.net.ports import free_port
from deploy.aggregator_host import enrolment_http, enrolment_operator, host_facts
from deploy.doctor import site as doctor_site
from deploy.doctor.checks import Check
from deploy.site_host import config as site_file, enrol as enrolment_site
from deploy.site_host.enrol import SiteEnrolled
from deploy.site_host.enrolment_connection import Aggregator
from federation.clock import SystemClock, VirtualClock
from federation.errors import JobError, SiteError
from privacy.membership.certificates import Authority
from privacy.membership.token import EnrolmentRefused, Token

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    needs("nginx"),
]

FLEET = "POST /v1/fleet/pull-messages HTTP/1.1"


@dataclass(kw_only=True)
class Host:
    """An aggregator's host."""

    federation: Federation
    proxy: RunningProxy
    bodies: list[bytes]
    """What sites have sent to be enrolled or renewed."""

    def invite(self, site: str, *, host: str = "127.0.0.1") -> Token:
        return enrolment_operator.invite(
            self.federation.config,
            site,
            random_bytes=os.urandom,
            clock=SystemClock(),
            address=f"{host}:{self.proxy.port}",
        )

    def enroll(self, token: Token) -> SiteEnrolled:
        return enrolment_site.enroll(
            token,
            self.federation.folder / token.site,
            organisation=token.site,
            clock=SystemClock(),
        )

    def config(self, site: str) -> site_file.SiteConfig:
        return site_file.load(self.federation.folder / site / "site.toml")


@contextlib.contextmanager
def _host(folder: Path) -> Iterator[Host]:
    federation = Federation(folder=folder, clock=SystemClock())
    service = federation.service()
    bodies: list[bytes] = []

    def handle(body: bytes) -> tuple[int, bytes]:
        bodies.append(body)
        return service.handle(body)

    handlers = {
        "GET /enroll": service.authority,
        "POST /enroll": handle,
        "GET /health": lambda _body: (200, b""),
    }
    authority = Authority.load(federation.aggregator, clock=SystemClock())
    with (
        enrolment_http.serve(handlers) as port,
        proxy_server.serve_before(
            federation.aggregator,
            authority,
            service_port=port,
            host="0.0.0.0",  # noqa: S104
        ) as proxy,
    ):
        yield Host(federation=federation, proxy=proxy, bodies=bodies)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with _host(tmp_path_factory.mktemp("host")) as running:
        yield running


def test_life_of_a_site(host: Host):
    """Enrolled, let in, renewed without an interruption, revoked and shut out."""
    found = host.enroll(host.invite("site-a"))
    config = host.config("site-a")
    assert found.site == config.file.name == "site-a"
    assert host.proxy.ask(FLEET, certificate=config.certificate) == "200"
    old = config.folder / "old.pem"
    old.write_bytes(config.certificate.read_bytes())

    enrolment_site.renew(config, clock=SystemClock())
    assert config.certificate.read_bytes() != old.read_bytes()
    assert host.proxy.ask(FLEET, certificate=config.certificate) == "200"
    assert host.proxy.ask(FLEET, certificate=old) == "200"

    assert host.federation.revoke("site-a").proxy
    for certificate in (config.certificate, old):
        assert host.proxy.ask(FLEET, certificate=certificate) == "403"
    with pytest.raises(EnrolmentRefused, match="expired or revoked"):
        enrolment_site.renew(config, clock=SystemClock())


def test_doctor_compares_rosters(host: Host):
    """A site that has enrolled before others learns it from no one else."""
    host.enroll(host.invite("site-g"))
    path = host.config("site-g").path

    def roster() -> Check:
        found = {each.name: each for each in doctor_site.checks(path, SystemClock())}
        return found["newest roster"]

    assert roster().status == "ok"
    host.enroll(host.invite("site-h"))
    assert roster().status == "warning"
    assert roster().advice == f"crossfed enroll --roster --folder {path.parent}"


@pytest.mark.flower
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_node_of_a_revoked_site_ends(host: Host):
    """It says why, and does not knock for ever."""
    from flwr.clientapp import ClientApp  # noqa: PLC0415

    from cloud_adapters.flower.node import FlowerNode  # noqa: PLC0415
    from privacy.membership.certificates import load_key  # noqa: PLC0415

    host.enroll(host.invite("site-n"))
    config = host.config("site-n")
    host.federation.revoke("site-n")
    log = host.proxy.settings.work / "access.log"
    facts = host_facts.Host(host.federation.config, SystemClock(), log=log)
    for certificate in (config.certificate, None):
        node = FlowerNode(
            app=ClientApp(),
            address=host.proxy.address,
            root_certificates=config.authority.read_bytes(),
            key=load_key(config.node_key),
            clock=SystemClock(),
            certificate=certificate,
        )
        with pytest.raises(SiteError, match="expired or revoked"):
            node.run()
    # Whom the operator is told of: nginx writes when a request has ended.
    proxy_server.wait_for(log.exists, "the log of nginx")
    knocks: dict[str, int] = {}
    while not knocks:
        knocks = facts.facts().knocks
    assert all(key.startswith("127.0.0.1 (") for key in knocks)
    assert "site-n" in next(iter(knocks))
    broken = config.folder / "broken.pem"
    broken.write_bytes(b"none")
    with pytest.raises(JobError, match="certificate with its key"):
        replace(node, certificate=broken).run()


def test_wrong_authority_is_told_nothing(host: Host, tmp_path: Path):
    """The token's fingerprint is another's: no secret, no key, no name is sent."""
    other = Authority.create("test", clock=SystemClock())
    token = replace(host.invite("site-b"), authority=other.fingerprint)
    host.enroll(host.invite("site-s"))
    assert host.bodies, "or this test cannot fail"
    host.bodies.clear()

    with pytest.raises(EnrolmentRefused, match=r"man-in-the-middle.*nothing was sent"):
        enrolment_site.enroll(
            token, tmp_path / "b", organisation="B", clock=SystemClock()
        )
    assert host.bodies == []
    assert not list((tmp_path / "b").iterdir())


def test_name_that_is_not_in_the_certificate(host: Host):
    """What the operator has to add, and where."""
    token = host.invite("site-c", host="127.0.0.2")
    with pytest.raises(EnrolmentRefused, match=r"hosts in aggregator\.toml"):
        host.enroll(token)


def test_nobody_there(host: Host):
    """The address, and what to look at."""
    token = replace(host.invite("site-d"), address=f"127.0.0.1:{free_port()}")
    with pytest.raises(EnrolmentRefused, match="aggregator up is running"):
        host.enroll(token)


def test_something_else_there(host: Host):
    """Here the SuperLink itself, which knows no such path."""
    address = f"127.0.0.1:{host.proxy.settings.superlink_port}"
    token = replace(host.invite("site-e"), address=address)
    with pytest.raises(EnrolmentRefused, match="not a crossfed aggregator"):
        host.enroll(token)


def test_many_sites_of_one_address_enrol(host: Host):
    """The proxy admits twenty requests at once; who is refused asks again."""
    token = host.invite("site-f")
    way = Aggregator(token.address, b"")
    with pytest.raises(EnrolmentRefused, match=r"HTTP 429; .*: try again") as caught:
        deque((way.authority(token.authority) for _ in range(100)), maxlen=0)
    assert caught.value.status == 429
    assert host.enroll(token).site == "site-f"


def test_service_that_is_down(tmp_path: Path):
    """Nginx is there, and what is behind it is not."""
    federation = Federation(folder=tmp_path, clock=SystemClock())
    authority = Authority.load(federation.aggregator, clock=SystemClock())
    with proxy_server.serve_before(
        federation.aggregator, authority, service_port=free_port()
    ) as proxy:
        token = replace(federation.invite("site-a"), address=proxy.address)
        with pytest.raises(EnrolmentRefused, match="it may be starting"):
            enrolment_site.enroll(
                token, tmp_path / "a", organisation="A", clock=VirtualClock()
            )
