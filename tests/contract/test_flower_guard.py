"""The guard before Flower's SuperLink, at the version that is installed."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloud_adapters.flower import simulation as flower_simulation

flower_simulation.import_flower()

from fastapi.routing import APIRoute, iter_route_contexts  # noqa: E402
from flwr.common.serde import fab_to_proto, user_config_to_proto  # noqa: E402
from flwr.proto.control_pb2 import StartRunRequest  # noqa: E402
from flwr.supercore.fab import Fab  # noqa: E402
from flwr.superlink import extensions  # noqa: E402
from flwr.superlink.main import _get_middleware, create_app  # noqa: E402
from starlette.middleware.base import BaseHTTPMiddleware  # noqa: E402
from starlette.responses import Response  # noqa: E402
from support import bundles, superlink  # noqa: E402
from support.superlink import SuperLink, wait_for  # noqa: E402

from cloud_adapters.local import landlock  # noqa: E402
from cloud_adapters.superlink import (  # noqa: E402
    guard as flower_guard,
    launcher as flower_launcher,
    middleware_bypass,
    poll_cache,
)
from cloud_adapters.superlink.guard import HEADER, control_word, runtime_word  # noqa: E402
from deploy.aggregator_host import host_secrets  # noqa: E402
from deploy.aggregator_host.superlink_process import PUBLIC_PATHS  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.deploy]

CONTROL, RUNTIME = b"c" * 64, b"r" * 64
REFUSED = 401


@dataclass(frozen=True)
class Client:
    """Calls Flower's application in this process."""

    app: Any

    def request(
        self, method: str, path: str, headers: Sequence[tuple[str, str]] = ()
    ) -> httpx.Response:
        """Make one request."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="https://localhost"
            ) as client:
                return await client.request(method, path, headers=list(headers))

        return asyncio.run(ask())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Flower's own application, behind the guard."""
    # What was there before comes back.
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    poll_cache.install()
    flower_guard.install(control=CONTROL, runtime=RUNTIME, public=PUBLIC_PATHS)
    return Client(create_app())


def routes(client: Client) -> list[tuple[str, str]]:
    """Every route that Flower has, as method and path."""
    found = []
    for context in iter_route_contexts(client.app.routes):
        if isinstance(context.route, APIRoute):
            methods = sorted(context.route.methods or ())
            found += [(method, context.path) for method in methods]
    return found


def test_every_route_but_those_of_sites_wants_a_secret(client: Client):
    """Also those that a later version of Flower adds."""
    guarded = [row for row in routes(client) if row[1] not in PUBLIC_PATHS]
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task"} < {
        path for _, path in guarded
    }
    assert "/v1/fleet/register-node" in {path for _, path in guarded}
    for method, path in [*guarded, ("GET", "/docs"), ("GET", "/openapi.json")]:
        answer = client.request(method, path)
        assert answer.status_code == REFUSED, path
        assert b"secret of the aggregator's host" in answer.content


def test_looks_know_the_requests_of_flower(client: Client):
    """One that Flower renames would no longer be told from the others."""
    known = poll_cache._READS | poll_cache._OF_ANSWERS
    known |= {*poll_cache._kinds(), poll_cache._TASKS}
    assert known <= {path for _, path in routes(client)}


def test_calls_of_sites_pass(client: Client):
    """Flower itself authenticates them, by the node's key."""
    assert client.request("GET", "/health").status_code != REFUSED
    answer = client.request("POST", "/v1/fleet/pull-messages")
    assert b"secret of the aggregator's host" not in answer.content


@pytest.mark.parametrize(
    ("path", "own", "other"),
    [
        ("/v1/control/list-runs", control_word(CONTROL), runtime_word(RUNTIME)),
        ("/v1/runtime/get-nodes", runtime_word(RUNTIME), control_word(CONTROL)),
    ],
)
def test_each_interface_has_a_secret_of_its_own(
    client: Client, path: str, own: str, other: str
):
    """Who coordinates a run cannot start another one."""

    def is_refused(*sent: str) -> bool:
        headers = [(HEADER, one) for one in sent]
        answer = client.request("POST", path, headers)
        return b"secret of the aggregator's host" in answer.content

    assert not is_refused(own)
    for wrong in ([], [other], [own, own], [own[:-1]], [own.upper()], [f"{own} "[:0]]):
        assert is_refused(*wrong), wrong


def test_words_tell_neither_secret():
    """One secret in both files would still be two words."""
    assert control_word(CONTROL) != runtime_word(CONTROL)
    assert CONTROL.hex() not in control_word(CONTROL)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    """One for both tests, beside whose folder there are files of the operator."""
    above = tmp_path_factory.mktemp("guard")
    (above / host_secrets.OPERATOR).write_text("key")
    (above / "other").write_text("no key")
    folder = above / "aggregator"
    folder.mkdir(mode=0o700)
    with superlink.serve(folder, forked=True) as made:
        yield made


@pytest.mark.slow
@pytest.mark.xdist_group("guard")
def test_another_bundle_is_not_started(running: SuperLink, tmp_path: Path):
    """Even if whoever starts the run knows the secret."""
    mark = tmp_path / "code was run"
    fab = bundles.foreign(f"open({str(mark)!r}, 'w')\n")
    _start(running, fab)
    log = running.folder / "superexec.log"
    wait_for(lambda: "only this release's bundle" in log.read_text(), "refused")
    assert fab.hash_str in log.read_text()
    assert not mark.exists()


def test_coordinator_is_confined_before_anything_starts_a_thread(tmp_path: Path):
    """Only the threads of one that is confined are confined with it."""
    config = tmp_path / "aggregator.toml"
    config.write_text('[exchange]\nurl = "file:///srv/models"\nscratch = "/scratch"\n')
    code = (
        "import os, sys; from pathlib import Path; from deploy.aggregator_host import "
        "coordinator_process as c; print(*c.exchange_folders(Path(sys.argv[1])), "
        "len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["/scratch", "/srv/models", "1"]


def test_coordinator_loads_no_other_bundle():
    """Whatever the SuperLink hands out under the name of the right one."""
    ours, other = bundles.foreign("a = 1\n"), bundles.foreign("a = 2\n")
    load = flower_launcher.only(ours.hash_str)
    assert load(fab_to_proto(ours)).content == ours.content
    with pytest.raises(flower_launcher.BundleRefused, match=other.hash_str):
        load(fab_to_proto(Fab(ours.hash_str, other.content, {})))


@pytest.mark.slow
@pytest.mark.xdist_group("guard")
@pytest.mark.skipif(
    not landlock.is_available(), reason="this kernel has no Landlock: see the decision"
)
def test_coordinator_cannot_read_the_authoritys_key(running: SuperLink):
    """Nor the secret of Control, nor the key that signs rosters; all else it reads."""
    folder, above = running.folder, running.folder.parent

    def outcome(path: str) -> str:
        return str(running.ask("call", function="support.reading:outcome", path=path))

    assert running.ask("call", function="support.reading:unconfined") == []
    assert {"ca.key", "page.token", "metrics.token"} <= {*host_secrets.HIDDEN}
    for name in host_secrets.HIDDEN:
        assert (folder / name).is_file()
        assert outcome(str(folder / name)) == "PermissionError"
        around = f"/proc/{running.pid}/root{folder / name}"
        assert outcome(around) == "PermissionError"
    assert outcome(str(above / host_secrets.OPERATOR)) == "PermissionError"
    assert outcome(str(above / "other")) == "read"
    assert outcome(str(folder / "ca.crt")) == "read"
    assert outcome("/etc/passwd") == "read"


def _start(running: SuperLink, fab: Fab) -> None:
    config = user_config_to_proto({"folder": "", "config": ""})
    with running.control() as control:
        control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config))


def _middleware(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Flower's middleware by name, after short ways were installed; they are undone."""
    found: list[Any] = [each.cls for each in _get_middleware()]
    kinds = {kind.__name__: kind for kind in found}
    for kind in kinds.values():
        monkeypatch.setattr(kind, "__call__", kind.__call__)
    middleware_bypass.install()
    return kinds


PATHS = ("/v1/control/", "/v1/fleet/", "/v1/runtime/")
ALL = {*PATHS, "/health"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ControlAuthenticationMiddleware", {"/v1/control/"}),
        ("ControlEventLogMiddleware", {"/v1/control/"}),
        ("ControlLicenseMiddleware", {"/v1/control/"}),
        ("ControlSensitiveResponseMiddleware", {"/v1/control/"}),
        ("FleetEventLogMiddleware", {"/v1/fleet/"}),
        ("NodeAuthMiddleware", {"/v1/fleet/"}),
        ("RuntimeTracingMiddleware", {"/v1/runtime/"}),
        ("BaseHTTPMiddleware", ALL),
        ("ProtobufTranslationMiddleware", ALL),
    ],
)
def test_middleware_of_an_interface_sees_its_requests_alone(
    name: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
):
    """All of them: a node is authenticated before every call of a site."""
    kinds = _middleware(monkeypatch)
    if name == "RuntimeTracingMiddleware" and name not in kinds:
        return  # Flower 1.43 has none.
    seen, past = set(), set()

    async def dispatch(request: Any, _: Any) -> Any:
        seen.add(request.url.path)
        return Response()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        past.add(scope["path"])
        await Response()(scope, receive, send)

    made = kinds[name](app)
    made.dispatch_func = dispatch
    for path in ALL:
        assert Client(made).request("POST", path).status_code == 200
    assert (seen, past) == (expected, ALL - expected)


def test_every_middleware_is_known(monkeypatch: pytest.MonkeyPatch):
    """A new version of Flower may have one more, which has to be looked at."""
    kinds = _middleware(monkeypatch)
    # Flower 1.43 has one less.
    assert len(kinds) == 8 + ("RuntimeTracingMiddleware" in kinds)


TYPE = ("Content-Type", "application/protobuf")


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("GET", "/health", (), 200),
        ("GET", "/nowhere", (), 404),
        ("GET", "/v1/fleet/pull-messages", (), 405),
        ("POST", "/v1/fleet/pull-messages", (), 415),
        ("POST", "/v1/fleet/pull-messages", (TYPE,), 401),
        ("POST", "/v1/fleet/nowhere", (TYPE,), 404),
        ("POST", "/v1/runtime/acquire-task", (), 415),
        ("POST", "/v1/control/list-runs", (), 415),
    ],
)
def test_answers_are_those_without_short_ways(
    method: str,
    path: str,
    headers: Sequence[tuple[str, str]],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Of the application as Flower makes it, byte for byte."""
    before = Client(create_app()).request(method, path, headers)
    _middleware(monkeypatch)
    after = Client(create_app()).request(method, path, headers)
    assert (after.status_code, after.content) == (before.status_code, before.content)
    assert after.headers == before.headers
    assert after.status_code == expected


def test_failure_after_an_answer_has_begun_is_raised():
    """A second answer would not be one, and the server closes the connection."""

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def dispatch(request: Any, call_next: Any) -> Any:
        try:
            return await call_next(request)
        except ZeroDivisionError:
            return Response(status_code=500)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    made: Any = BaseHTTPMiddleware(app, dispatch)
    run = middleware_bypass.in_place(BaseHTTPMiddleware.__call__)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run(made, {"type": "http", "path": "/"}, None, send))
    assert [message["status"] for message in sent] == [200]
