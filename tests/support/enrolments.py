"""An aggregator's folder, and sites that enrol in it without a network."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_adapters.identity.platforms import PlatformVerifier
from deploy.aggregator_host import enrolment_operator
from deploy.aggregator_host.config import AggregatorConfig, AggregatorFile
from deploy.aggregator_host.enrolment_service import EnrolmentService
from deploy.site_host import config as site_file, enrol as enrolment_site
from deploy.site_host.enrol import SiteEnrolled
from federation.clock import VirtualClock
from federation.errors import StoreUnavailable
from privacy.membership import key_files as keys, roster_file
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    server_names,
)
from privacy.membership.messages import read_refusal
from privacy.membership.token import EnrolmentRefused, Token
from privacy.secret_files import write_new

NOW = 1_800_000_000.0


@dataclass(kw_only=True)
class Nodes:
    """A SuperLink's register of nodes."""

    known: dict[bytes, int] = field(default_factory=dict)
    is_down: bool = False

    def register(self, public_key: bytes) -> int:
        self._check_up()
        return self.known.setdefault(public_key, 100 + len(self.known))

    def unregister(self, node_id: int) -> None:
        self._check_up()
        self.known = {k: n for k, n in self.known.items() if n != node_id}

    def _check_up(self) -> None:
        if self.is_down:
            raise StoreUnavailable("the SuperLink is down")


@dataclass(kw_only=True)
class Direct:
    """The way to a service in this process; keeps every body that went over it."""

    service: EnrolmentService
    bodies: list[bytes] = field(default_factory=list)

    def authority(self, _: str) -> bytes:
        return self.service.authority()[1]

    def post(self, body: bytes) -> bytes:
        self.bodies.append(body)
        status, answer = self.service.handle(body)
        if status != 200:
            raise EnrolmentRefused(read_refusal(answer), status=status)
        return answer


@dataclass(kw_only=True)
class Federation:
    """An aggregator, its SuperLink's nodes, and a clock for everybody."""

    folder: Path
    clock: Any = field(default_factory=lambda: VirtualClock(NOW))
    nodes: Nodes = field(default_factory=Nodes)
    said: list[str] = field(default_factory=list)
    sts: str = ""
    google_certificates: str = ""

    def __post_init__(self) -> None:
        self.verifier = PlatformVerifier(
            clock=self.clock,
            sts_endpoint=self.sts,
            google_certificates=self.google_certificates,
        )
        self.aggregator.mkdir(mode=0o700)
        authority = Authority.create("test", clock=self.clock)
        authority.save(self.aggregator)
        key = new_key()
        names = server_names(self.config.file.hosts)
        write_new(self.aggregator / "server.key", key_pem(key))
        certificate = authority.issue_server(names, key)
        write_new(self.aggregator / "server.crt", certificate, mode=0o644)
        made = keys.new(
            "aggregator",
            random_bytes=os.urandom,
            out=self.aggregator / "aggregator.pem",
        )
        self.pin(None, made.public_key)
        self.way = Direct(service=self.service())

    @property
    def aggregator(self) -> Path:
        return self.folder / "aggregator"

    @property
    def config(self) -> AggregatorConfig:
        file = AggregatorFile(listen="127.0.0.1:8443", hosts=("127.0.0.1",))
        return AggregatorConfig(file=file, folder=self.aggregator)

    def service(self) -> EnrolmentService:
        return EnrolmentService(
            config=self.config,
            register=self.nodes.register,
            verifier=self.verifier,
            clock=self.clock,
            listener=self.said.append,
        )

    def pin(self, site: str | None, key: str) -> None:
        roster_file.trust(
            self.aggregator / "roster.toml",
            site=site,
            organisation="Test" if site is None else site,
            key=key,
        )

    def invite(self, site: str, **options: str) -> Token:
        return enrolment_operator.invite(
            self.config, site, random_bytes=os.urandom, clock=self.clock, **options
        )

    def enroll(self, token: Token, folder: str | None = None) -> SiteEnrolled:
        return enrolment_site.enroll(
            token,
            self.folder / (folder or token.site),
            organisation=token.site,
            clock=self.clock,
            connect=lambda *_: self.way,
        )

    def site(self, name: str) -> "EnrolledSite":
        """Invite and enrol a site."""
        self.enroll(self.invite(name))
        return EnrolledSite(federation=self, name=name)

    def revoke(self, site: str) -> enrolment_operator.RevocationResult:
        return enrolment_operator.revoke(
            self.config, site, unregister=self.nodes.unregister, clock=self.clock
        )


@dataclass(kw_only=True)
class EnrolledSite:
    """A site's folder."""

    federation: Federation
    name: str

    @property
    def folder(self) -> Path:
        return self.federation.folder / self.name

    @property
    def config(self) -> site_file.SiteConfig:
        return site_file.load(self.folder / "site.toml")

    def renew(self) -> SiteEnrolled:
        return enrolment_site.renew(
            self.config,
            clock=self.federation.clock,
            connect=lambda *_: self.federation.way,
        )
