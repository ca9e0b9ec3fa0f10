"""A stranger, and an enrolled site that means harm, against nginx and a real SuperLink.

Another node is at work all the while, and continues; nothing of the service ends.
"""

import contextlib
import importlib.util
import os
import secrets
import signal
import sqlite3
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings, strategies as st
from support import proxy_server
from support.programs import needs

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.net.ports import free_port
from cloud_adapters.nginx import config as proxy
from cloud_adapters.nginx.config import FLEET_CALLS, ProxySettings
from cloud_adapters.superlink.answer_limits import Limits
from federation.clock import SystemClock
from privacy.membership.certificates import (
    Authority,
    key_pem,
    new_key,
    signing_request,
)

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import ArrayRecord, Message, RecordDict  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from flwr.supernode import node_auth_http_interceptor as node_auth  # noqa: E402
from support import flower_node_process, superlink  # noqa: E402
from support.superlink import SuperLink, wait_for  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.flower,
    pytest.mark.xdist_group("superlink"),
    needs("nginx"),
]

# A connection that was idle for longer may be closed just as a request is sent.
FRESH = httpx.Limits(keepalive_expiry=1.0)
REFUSED = {400, 401, 403, 404, 409, 411, 413, 415, 422, 426, 429}
often = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(kw_only=True)
class Place:
    """An aggregator's host, a node at work, and what the hostile site holds."""

    server: SuperLink
    address: str
    honest: int
    hostile: int
    honest_process: int
    key: ec.EllipticCurvePrivateKey
    site: httpx.Client
    stranger: httpx.Client

    def post(
        self, call: str, body: bytes, headers: dict[str, str], client: httpx.Client
    ) -> int:
        """Call Fleet; the status, or 0 where the connection was closed."""
        url = f"https://{self.address}/v1/fleet/{call}"
        kind = {"Content-Type": "application/protobuf"}
        for _ in range(2):
            with contextlib.suppress(httpx.TransportError):
                answer = client.post(url, content=body, headers=kind | headers)
                return answer.status_code
        return 0

    def signed(self) -> dict[str, str]:
        """Headers that prove the hostile site's own key, now."""
        now = node_auth.now().isoformat()  # type: ignore[attr-defined]
        signature = self.key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
        public = public_key_to_bytes(self.key.public_key())
        return {
            node_auth.FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),  # type: ignore[attr-defined]
            node_auth.TIMESTAMP_HEADER: now,  # type: ignore[attr-defined]
            node_auth.FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),  # type: ignore[attr-defined]
        }

    def works(self) -> bool:
        """Whether the honest node still answers, over the same SuperLink."""
        message = self.server.ask("push_query", node=self.honest, size=8)
        return bool(self.server.ask("pull", message=message, size=8)["right"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("superlink")
    with (
        superlink.serve(folder, limits=LIMITS, forked=True) as server,
        contextlib.ExitStack() as stack,
    ):
        authority = Authority.load(folder, clock=SystemClock())
        port = free_port()
        at = ProxySettings(
            listen=f"127.0.0.1:{port}",
            superlink_port=int(server.address.rpartition(":")[2]),
            service_port=free_port(),
            folder=folder,
            work=folder / "proxy",
            upstream_name="127.0.0.1",
        )
        stack.enter_context(proxy_server.nginx(at))
        honest, process = _start_node(server, stack)
        context = _context(authority)
        stranger = stack.enter_context(httpx.Client(verify=context, limits=FRESH))
        key, tls = ec.generate_private_key(ec.SECP384R1()), new_key()
        pem = authority.issue_site("hostile", signing_request("hostile", tls))
        (folder / "hostile.pem").write_bytes(pem + key_pem(tls))
        context = _context(authority)
        context.load_cert_chain(folder / "hostile.pem")
        made = Place(
            server=server,
            address=f"127.0.0.1:{port}",
            honest=honest,
            honest_process=process,
            hostile=server.register(key),
            key=key,
            site=stack.enter_context(httpx.Client(verify=context, limits=FRESH)),
            stranger=stranger,
        )
        active = fleet_pb2.ActivateNodeRequest(
            public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=1000
        )
        assert _post(made, "activate-node", active).status_code == 200
        before = server.pid
        yield made
        assert server.pid == before
        assert made.works()


def _context(authority: Authority) -> Any:
    import ssl  # noqa: PLC0415

    return ssl.create_default_context(cadata=authority.pem.decode())


def _start_node(server: SuperLink, stack: contextlib.ExitStack) -> tuple[int, int]:
    """Have another process be a node that echoes."""
    key = ec.generate_private_key(ec.SECP384R1())
    node = server.register(key)
    process = flower_node_process.start(server, key, "honest")
    stack.callback(process.wait)
    stack.callback(process.kill)
    wait_for(lambda: node in server.online(), "the node is there")
    return node, process.pid


nodes = st.sampled_from(["honest", "hostile", "nobody"])
requests = {
    "activate-node": fleet_pb2.ActivateNodeRequest,
    "deactivate-node": fleet_pb2.DeactivateNodeRequest,
    "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "pull-messages": fleet_pb2.PullMessagesRequest,
    "push-messages": fleet_pb2.PushMessagesRequest,
    "pull-object": message_pb2.PullObjectRequest,
    "push-object": message_pb2.PushObjectRequest,
    "confirm-message-received": message_pb2.ConfirmMessageReceivedRequest,
    "get-run": None,
    "get-fab": None,
}
bodies = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 4000, zlib.compress(bytes(1 << 20))]
    ),
)
headers = st.dictionaries(
    st.sampled_from(
        [
            *("Content-Type", "Content-Encoding", "flwr-package-version"),
            *(node_auth.TIMESTAMP_HEADER, node_auth.FLEET_HTTP_SIGNATURE_HEADER),  # type: ignore[attr-defined]
            node_auth.FLEET_HTTP_PUBLIC_KEY_HEADER,  # type: ignore[attr-defined]
        ]
    ),
    st.sampled_from(["", "gzip", "deflate", "text/html", "0.0.0", "x" * 3000, "%00"]),
    max_size=3,
)


def test_every_call_is_tried():
    """A call that is let in and not in this list would go untested."""
    assert set(requests) == set(FLEET_CALLS)


@given(call=st.sampled_from(FLEET_CALLS), body=bodies, more=headers)
@often
def test_strangers_reach_nothing(
    place: Place, call: str, body: bytes, more: dict[str, str]
):
    """Without a certificate of the federation nothing is even looked at."""
    before = place.server.log.count("/v1/fleet/")
    assert place.post(call, body, place.signed() | more, place.stranger) == 403
    assert place.server.log.count("/v1/fleet/") == before


@given(
    call=st.sampled_from(FLEET_CALLS),
    body=bodies,
    more=headers,
    signs=st.sampled_from(["signed", "unsigned"]),
)
@often
def test_malformed_requests_of_a_site(
    place: Place, call: str, body: bytes, more: dict[str, str], signs: str
):
    """With a certificate, with its own signature or without: refused."""
    own = place.signed() if signs == "signed" else {}
    assert place.post(call, body, own | more, place.site) in REFUSED | {0}
    assert place.site.get(f"https://{place.address}/nothing").status_code == 404


@pytest.mark.parametrize("call", [name for name, kind in requests.items() if kind])
def test_site_is_no_other_node(place: Place, call: str):
    """Flower binds a key to the number of its node, for every call that names one.

    Neither the honest one's nor one that no node has.
    """
    kind = requests[call]
    assert kind is not None
    for number in (place.honest, 12345):
        body = kind()
        if call == "activate-node":
            body.public_key = b"another"
        elif hasattr(body, "node_id"):
            body.node_id = number
        else:
            body.node.CopyFrom(Node(node_id=number))
        status = place.post(call, body.SerializeToString(), place.signed(), place.site)
        assert status == 401, number
    assert place.works()


def test_signature_of_another_time_is_refused(place: Place):
    """An old one, that somebody has kept, or one of the future."""
    body = fleet_pb2.PullMessagesRequest(node=Node(node_id=place.hostile))
    content = body.SerializeToString()
    assert place.post("pull-messages", content, place.signed(), place.site) == 200
    other = place.signed() | {node_auth.TIMESTAMP_HEADER: "2026-01-01T00:00:00+00:00"}  # type: ignore[attr-defined]
    assert place.post("pull-messages", content, other, place.site) == 401


@pytest.mark.parametrize("knows", ["all but the id", "the id"])
@pytest.mark.parametrize("name", ["of another", "its own"])
def test_answer_to_another_nodes_question(place: Place, knows: str, name: str):
    """Nobody answers a question that another node was asked, in no node's name."""
    os.kill(place.honest_process, signal.SIGSTOP)
    try:
        question = place.server.ask("push_query", node=place.honest, size=8)
        known = question if knows == "the id" else secrets.token_hex(32)
        who = place.honest if name == "of another" else place.hostile
        pushed = _push(place, _reply(place, known, b"forged", node=who))
        assert pushed.status == 409
    finally:
        os.kill(place.honest_process, signal.SIGCONT)
    assert place.server.ask("pull", message=question, size=8)["right"]


def test_no_node_sends_tasks(place: Place):
    """A message that answers nothing would be a task for another node."""
    task = _reply(place, "", b"train on this", node=1, to=place.honest)
    assert _push(place, task).status == 409
    assert place.works()


def test_a_whole_answer_is_taken(place: Place):
    """Or the tests of what is refused would show nothing."""
    question = place.server.ask("push_query", node=place.hostile, size=8)
    pushed = _push(place, _reply(place, question, b"an answer"))
    assert pushed.status == 200, pushed.text
    assert pushed.objects == [200] * len(pushed.objects)
    assert pushed.objects
    found = place.server.ask("pull", message=question, size=8)
    assert found == {"error": None, "right": False}


@pytest.mark.parametrize("next_push", ["a word", "an answer"])
def test_run_has_the_envelope_of_an_answer_before_its_parts(
    place: Place, next_push: str
):
    """They come until the site answers something else; a word on a probe is nothing."""
    question, other = (
        place.server.ask("push_query", node=place.hostile, size=8) for _ in range(2)
    )
    kind = flower_site.PROBE if next_push == "a word" else "query"
    pushed_meanwhile: list[Pushed] = []

    def meanwhile() -> None:
        look = {"function": "support.lossy_app:look", "message": question}
        assert place.server.ask("call", **look) == 0
        reply = _reply(place, other, b"meanwhile", kind=kind)
        pushed_meanwhile.append(_push(place, reply))

    answer = _reply(place, question, b"an answer")
    pushed = _push(place, answer, meanwhile=meanwhile)
    assert pushed_meanwhile[0].status == 200
    status = 200 if next_push == "a word" else 409
    assert set(pushed.objects) == {status}


def test_answer_beyond_its_limit(place: Place):
    """120 parts of 5 MiB, before any round: what is stored stays below the limit."""
    question = place.server.ask("push_query", node=place.hostile, size=8)
    before = _stored(place)
    pushed = _push(place, _reply(place, question, bytes(20 * MIB), parts=True))
    assert pushed.status == 200
    assert 413 in pushed.objects
    assert _stored(place) - before < LIMITS.answer
    assert "limits.answer_mib in aggregator.toml" in pushed.text
    assert place.works()


def test_answers_of_a_site_beyond_their_limit(place: Place):
    """Each within its own limit; the other site continues meanwhile."""
    codes: list[int] = []
    for number in range(5):
        question = place.server.ask("push_query", node=place.hostile, size=number)
        pushed = _push(place, _reply(place, question, secrets.token_bytes(6 * MIB)))
        codes += [pushed.status, *pushed.objects]
    assert 413 in codes
    assert "limits.site_mib in aggregator.toml" in pushed.text
    assert place.works()


def test_answer_is_begun_so_often_and_no_more(place: Place):
    """Every beginning leaves a row at the SuperLink."""
    question = place.server.ask("push_query", node=place.hostile, size=8)
    reply = _reply(place, question, b"again")
    codes = [_push(place, reply, only_announce=True).status for _ in range(66)]
    assert codes == [200] * 64 + [413] * 2


def test_object_of_no_answer(place: Place):
    """Flower stores an object that anybody has announced."""
    question = place.server.ask("push_query", node=place.hostile, size=8)
    reply = _reply(place, question, b"mine")
    assert _push(place, reply, only_announce=True).status == 200
    assert set(_push(place, reply, session="").objects) == {409}
    assert set(_push(place, reply, session=secrets.token_hex(16)).objects) == {409}


MIB = 1 << 20
LIMITS = Limits(answer=8 * MIB, site=20 * MIB, run=64 * MIB, reserve=80 * MIB)


@dataclass
class Pushed:
    """What became of an answer: the status of each request, and the last refusal."""

    status: int
    objects: list[int]
    text: str


def _reply(
    place: Place,
    question: str,
    content: bytes,
    *,
    node: int | None = None,
    to: int = 1,
    parts: bool = False,
    kind: str = "query",
) -> Message:
    """Make an answer as a node does; ``to`` somebody, in somebody's name."""
    node = place.hostile if node is None else node
    TaskIdentity.run_id, TaskIdentity.node_id = place.server._run, node
    TaskIdentity.task_id = 0
    asked = Message(RecordDict(), node, kind)
    asked.metadata.__dict__.update(_src_node_id=1, _message_id=question or "none")
    record = flower_site.pack_bytes(content)
    if parts:
        record = RecordDict({"arrays": ArrayRecord([np.frombuffer(content, np.uint8)])})
    made = Message(record, reply_to=asked)
    made.metadata.ttl = 100.0
    made.metadata.__dict__.update(_reply_to_message_id=question)
    with no_object_id_recompute():
        made.metadata.__dict__.update(_dst_node_id=to, _message_id=made.object_id)
    return made


def _push(
    place: Place,
    message: Message,
    *,
    only_announce: bool = False,
    session: str | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Pushed:
    """Push a message with the hostile site's own keys; parts after ``meanwhile``."""
    with no_object_id_recompute():
        objects, tree = get_all_nested_objects(message), get_object_tree(message)
    me = Node(node_id=place.hostile)
    push = fleet_pb2.PushMessagesRequest(
        node=me,
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[tree],
    )
    taken = _post(place, "push-messages", push)
    made = Pushed(status=taken.status_code, objects=[], text=taken.text)
    if taken.status_code != 200 or only_announce:
        return made
    found = fleet_pb2.PushMessagesResponse.FromString(taken.content)
    meanwhile()
    for name in found.objects_to_push:
        piece = message_pb2.PushObjectRequest(
            node=me,
            run_id=place.server._run,
            object_id=name,
            object_content=objects[name].deflate(),
            session_id=found.session_id if session is None else session,
        )
        answer = _post(place, "push-object", piece)
        made.objects.append(answer.status_code)
        if answer.status_code != 200:
            made.text = answer.text
    return made


def _post(place: Place, call: str, request: Any) -> httpx.Response:
    return place.site.post(
        f"https://{place.address}/v1/fleet/{call}",
        content=request.SerializeToString(),
        headers={"Content-Type": "application/protobuf", **place.signed()},
        timeout=60.0,
    )


def _stored(place: Place) -> int:
    """Bytes of objects in the SuperLink's database."""
    with contextlib.closing(sqlite3.connect(place.server.folder / "state.db")) as found:
        (total,) = found.execute(
            "SELECT coalesce(sum(length(content)), 0) FROM objects"
        ).fetchone()
    return int(total)


def test_oversize_bodies(place: Place):
    """Told from the length alone, before a byte of it is read."""
    for client in (place.stranger, place.site):
        most = proxy.MAX_FLEET_BYTES + 1
        assert place.post("push-object", bytes(most), {}, client) in {403, 413, 0}
    assert place.works()
