"""What ends a site's agent: every row of the table in the documentation, caused."""

import contextlib
import importlib.util
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path

import pytest
from support import agents, homes
from support.agents import consortium, proposal, propose
from support.small_jobs import small_job

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.net.tls import client_context
from cloud_adapters.relays.node import knock
from cloud_adapters.relays.server import CloudServer, server_context
from cloud_adapters.relays.task_queue import TaskQueue
from cloud_adapters.storage.memory import MemoryStore
from deploy import exit_codes
from deploy.site_host import relay_certificate
from deploy.site_host.departure import Departure
from federation import folder_lock
from federation.clock import SystemClock, VirtualClock
from federation.errors import FederationError
from federation.ids import SiteId
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    signing_request,
)
from privacy.secagg.agreement import identity, roster
from privacy.secret_files import replace_private

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

import httpx  # noqa: E402

from cloud_adapters.flower.fleet import (  # noqa: E402
    PASSING,
    FleetCalls,
    NodeGone,
    Unanswerable,
)
from deploy.site_host import service  # noqa: E402

pytestmark = pytest.mark.flower

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "explanation" / "failures.md"
UNIT = ROOT / "deploy" / "systemd" / "crossfed-site.service"
REQUEST = httpx.Request("POST", "https://host:1/v1/fleet/activate-node")
GONE = httpx.ConnectError("refused", request=REQUEST)

Cause = Callable[[Path], object]


def status(code: int, text: str = "", **headers: str) -> httpx.HTTPStatusError:
    """A refusal."""
    response = httpx.Response(code, text=text, headers=headers, request=REQUEST)
    return httpx.HTTPStatusError("no", request=REQUEST, response=response)


def untrusted(code: int) -> httpx.ConnectError:
    """A certificate that OpenSSL does not believe, for the reason of a code."""
    cause = ssl.SSLCertVerificationError("certificate verify failed")
    cause.verify_code, cause.verify_message = code, "in OpenSSL's words"
    error = httpx.ConnectError("handshake", request=REQUEST)
    error.__cause__ = cause
    return error


def asks(*errors: Exception, is_active: bool = False, seconds: float = 0.0) -> Cause:
    """The agent's node meets each of these errors for some seconds."""

    def cause(_: Path) -> None:
        for error in errors:
            clock = VirtualClock(1000.0)
            calls = FleetCalls(
                address="host:1",
                clock=clock,
                stopped=threading.Event(),
                listener=lambda _: None,
                uniform=lambda _, high: high,
            )
            if is_active:
                calls.succeed()
            end = clock.monotonic() + seconds

            def fail(error: Exception = error, clock: VirtualClock = clock) -> None:
                clock.sleep(1.0)
                raise error

            while clock.monotonic() < end:
                with contextlib.suppress(NodeGone):
                    calls.call(fail)
            with pytest.raises((NodeGone, Unanswerable, FederationError)) as caught:
                calls.call(fail)
            if isinstance(caught.value, FederationError):
                raise caught.value

    return cause


def serves(folder: Path) -> None:
    """Start an agent; it ends before it connects."""
    departure = Departure()
    departure.stopped.set()
    service.serve(
        folder / "site" / "site.toml",
        departure=departure,
        clock=SystemClock(),
        listener=lambda _: None,
    )


def prepared(folder: Path) -> Path:
    """A site's folder that an agent could start in."""
    members = consortium("site-0")
    config = agents.site_config(folder / "site", "site-0")
    members.sites["site-0"].save(config.identity)
    roster.save(members.roster, config.roster)
    return config.folder


def busy(folder: Path) -> None:
    """Another agent has the lock."""
    with folder_lock.hold(prepared(folder) / "agent.lock", "held"):
        serves(folder)


def open_key(folder: Path) -> None:
    """The key can be read by others."""
    (prepared(folder) / "identity.pem").chmod(0o644)
    serves(folder)


def no_folder(folder: Path) -> None:
    """A folder is in the place of a file."""
    (prepared(folder) / "agent.lock").mkdir()
    serves(folder)


def lost_home(folder: Path) -> None:
    """Another machine has taken over meanwhile."""
    store = MemoryStore()
    one = homes.first(folder / "one", store)
    one.enter()
    homes.Machine(folder / "two", store).enter(take_over=True)
    one.charge(1)


def wrong_key(folder: Path) -> None:
    """The roster pins the key that this folder had before."""
    path = prepared(folder) / "identity.pem"
    path.unlink()
    identity.generate(os.urandom).save(path)
    serves(folder)


def wrong_file(folder: Path) -> None:
    """It has a key that nobody knows."""
    with (prepared(folder) / "site.toml").open("a") as file:
        file.write("\n[nonsense]\n")
    serves(folder)


def no_certificate(folder: Path) -> None:
    """It is damaged."""
    (folder / "site.pem").write_text("damaged")
    authority = Authority.create("aggregator", clock=SystemClock())
    client_context(authority.pem, folder / "site.pem")


def refused_job(folder: Path) -> None:
    """The job has a source that the site does not allow; then the disk is full."""
    members = consortium("site-0")
    site = agents.agent(folder, "site-0", members, policy={"functions": []})
    made = proposal(small_job())
    assert propose(site, members, made).refused
    site = agents.agent(folder / "other", "site-0", members)
    full = site.config.folder / "runs" / made.run_id / ".proposal.tmp"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    assert propose(site, members, made).refused


def foreign_relay(folder: Path) -> None:
    """It serves another site."""
    clock = SystemClock()
    authority = Authority.create("the aggregator's", clock=clock)
    context = server_context(authority.pem)
    relay_certificate.prepare(folder, ("127.0.0.1",), context, clock)
    key, path = new_key(), folder / "site.pem"
    issued = authority.issue_site("west", signing_request("west", key))
    replace_private(path, issued + key_pem(key))
    queue = TaskQueue([SiteId("east")], clock)
    relay = CloudServer(
        queue, context, host="127.0.0.1", port=0, clock=clock, scratch=folder
    )
    with relay.listening() as port:
        knock(f"127.0.0.1:{port}", (folder / "ca.crt").read_bytes(), path)


CAUSES: Mapping[str, Cause] = {
    "the aggregator or relay cannot be reached": asks(GONE),
    "the aggregator is overloaded, restarting or out of disk space": asks(
        *map(status, sorted(PASSING))
    ),
    "the site's clock is more than 4 s ahead of the aggregator's, or more than 4 "
    "minutes behind it": asks(
        *(status(code, Date=formatdate(5000.0, usegmt=True)) for code in (401, 403)),
        status(401, Date=formatdate(990.0, usegmt=True)),
        seconds=3600.0,
    ),
    "the certificate of the aggregator or relay is not valid yet, or has expired": asks(
        untrusted(9), untrusted(10), seconds=3600.0
    ),
    "the clock of the aggregator was ahead when it signed the site's certificate": (
        asks(status(503), seconds=3600.0)  # See tests/integration/test_proxy.py.
    ),
    "an agent with the same key was killed a moment ago": asks(
        status(412, '{"code": 2004, "detail": "no"}')
    ),
    "the aggregator refuses one message": asks(status(404), is_active=True),
    "the site refuses a job, or its disk is full": refused_job,
    "another agent uses the folder": busy,
    "the key file is missing, damaged or readable by others": open_key,
    "the site's folder cannot be written when the agent starts": no_folder,
    "another machine has taken over the site's home": lost_home,
    "`site.toml` is wrong": wrong_file,
    "the roster pins another key for this site": wrong_key,
    "`site.pem` holds no certificate with its key": no_certificate,
    "the certificate of the aggregator or relay is from another authority, or for "
    "another name": asks(untrusted(18), untrusted(62)),
    "the aggregator does not know the site's key": asks(status(401)),
    "the site's certificate is missing, expired or revoked": asks(status(403)),
    "the relay does not serve this site": foreign_relay,
    "another agent stays active with the same key": asks(
        status(412, '{"code": 2004, "detail": "no"}'), seconds=61.0
    ),
}
KINDS = {exit_codes.DONE: "passing", exit_codes.FAILED: "restarts", 2: "final"}


def test_the_page_lists_these_causes():
    """In their order; and the unit restarts what is not final."""
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines()]
    kinds = set(KINDS.values())
    listed = {
        r[0].strip(): r[1].strip() for r in rows if r[1:] and r[1].strip() in kinds
    }
    assert list(listed) == list(CAUSES)
    assert "RestartPreventExitStatus=2\n" in UNIT.read_text()


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_ends_the_agent_as_the_page_says(cause: str, tmp_path: Path):
    """For good, or for the service manager to start it again, or not at all."""
    code = exit_codes.DONE
    try:
        CAUSES[cause](tmp_path)
    except FederationError as error:
        code = exit_codes.of_error(error)
    assert f"| {cause} | {KINDS[code]} |" in PAGE.read_text()
