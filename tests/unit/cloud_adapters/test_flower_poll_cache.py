"""Looks for messages that are answered from memory, and those that are not."""

import asyncio
import importlib.util
import tracemalloc
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cloud_adapters.flower import simulation as flower_simulation

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.supercore.date import now  # noqa: E402
from flwr.supercore.primitives.asymmetric import (  # noqa: E402
    public_key_to_bytes,
    sign_message,
)

from cloud_adapters.flower.private.messages import Message, Node  # noqa: E402
from cloud_adapters.flower.private.node import PullMessagesRequest  # noqa: E402
from cloud_adapters.flower.private.runtime import PushAppMessagesRequest  # noqa: E402
from cloud_adapters.superlink import poll_cache  # noqa: E402

FLEET, RUNTIME = "/v1/fleet/pull-messages", "/v1/runtime/pull-messages"
NODES, PUSH = "/v1/runtime/get-nodes", "/v1/runtime/push-messages"
REFUSED = 401
KEY = ec.generate_private_key(ec.SECP384R1())


@dataclass
class Flower:
    """Counts what reaches it, and finds nothing.

    Attributes:
        content: Of its answers.
        status: Of its answers.
        asked: Paths of the requests that have reached it.
        seconds: What the clock of the looks reads.
        meanwhile: Path of a request that comes while it answers the next one.
        hold: How long looks are held back.
    """

    content: bytes = b""
    status: int = 200
    asked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    meanwhile: str = ""

    hold: float = 0.0

    def __post_init__(self) -> None:
        """Put looks before it."""
        self.cache = poll_cache.PollCache(
            self,
            monotonic=lambda: self.seconds,
            site_hold=self.hold,
            run_hold=self.hold,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == scope["body"]
        self.asked.append(scope["path"])
        if self.meanwhile:
            path, self.meanwhile = self.meanwhile, ""
            await self._request(path, b"", [])
        await send({"type": "http.response.start", "status": self.status})
        await send({"type": "http.response.body", "body": self.content})

    def request(
        self, path: str, body: bytes = b"node 1", *headers: tuple[bytes, bytes]
    ) -> tuple[int, bytes]:
        """Return status and content of an answer."""
        return asyncio.run(self._request(path, body, [*headers]))

    async def _request(
        self,
        path: str,
        body: bytes,
        headers: list[tuple[bytes, bytes]],
        method: str = "POST",
    ) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(part: Any) -> None:
            sent.append(part)

        length = (b"content-length", str(len(body)).encode())
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "body": body,
            "headers": [length, *headers],
        }
        await self.cache(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]


def signed(
    key: ec.EllipticCurvePrivateKey = KEY, timestamp: str = "", claimed: Any = None
) -> list[tuple[bytes, bytes]]:
    """Headers of a site."""
    text = timestamp or now().isoformat()
    public_key = public_key_to_bytes(claimed or key.public_key())
    signature = sign_message(key, text.encode())
    return [
        (b"flwr-public-key", b64encode(public_key)),
        (b"flwr-timestamp", text.encode()),
        (b"flwr-signature", b64encode(signature)),
    ]


def test_a_look_of_a_site_is_answered_until_a_run_sends_something():
    flower = Flower()
    for _ in range(3):
        assert flower.request(FLEET, b"node 1", *signed()) == (200, b"")
    assert flower.asked == [FLEET]
    # Its own signature and its own number, each time.
    flower.request(FLEET, b"node 2", *signed())
    flower.request(PUSH)
    flower.request(FLEET, b"node 1", *signed())
    assert flower.asked == [FLEET, FLEET, PUSH, FLEET]


def test_answers_of_sites_are_news_for_a_run_alone():
    flower = Flower()
    for path in (FLEET, RUNTIME, NODES, "/v1/fleet/push-messages"):
        flower.request(path, b"node 1", *(signed() if path == FLEET else ()))
    flower.asked.clear()
    for path in (FLEET, RUNTIME, NODES):
        flower.request(path, b"node 1", *(signed() if path == FLEET else ()))
    assert flower.asked == [RUNTIME]


def test_a_request_that_nobody_knows_may_change_all():
    flower = Flower()
    for _ in range(2):
        flower.request(RUNTIME)
        flower.request(NODES)
        flower.request("/v2/anything")
    assert flower.asked == 2 * [RUNTIME, NODES, "/v2/anything"]


@pytest.mark.parametrize("path", sorted(poll_cache._READS))
def test_reading_changes_nothing(path: str):
    flower = Flower()
    for _ in range(2):
        flower.request(RUNTIME)
        flower.request(path)
    assert flower.asked == [RUNTIME, path, path]


@pytest.mark.parametrize(
    ("path", "seconds"), [(FLEET, 5.0), (RUNTIME, 1.0), (NODES, 1.0)]
)
def test_no_answer_is_old(path: str, seconds: float):
    flower = Flower()
    headers = signed()
    for flower.seconds in (0.0, 0.9 * seconds, seconds, 1.5 * seconds):
        flower.request(path, b"node 1", *headers)
    assert flower.asked == [path, path]


def test_messages_and_refusals_come_from_flower():
    flower = Flower(content=b"a message")
    for _ in range(2):
        flower.request(RUNTIME)
    flower.content, flower.status = b"", REFUSED
    for _ in range(2):
        assert flower.request(RUNTIME) == (REFUSED, b"")
    assert flower.asked == 4 * [RUNTIME]


def test_nodes_are_kept_with_their_numbers():
    flower = Flower(content=b"three nodes")
    for _ in range(2):
        assert flower.request(NODES) == (200, b"three nodes")
    assert flower.asked == [NODES]


def test_what_comes_during_a_look_may_be_too_late_for_it():
    flower = Flower(meanwhile=PUSH)
    for _ in range(2):
        flower.request(FLEET, b"node 1", *signed())
    assert flower.asked == [FLEET, PUSH, FLEET]


def test_only_who_signs_is_answered():
    """Flower refuses the others, and says why."""
    flower = Flower()
    flower.request(FLEET, b"node 1", *signed())
    flower.status = REFUSED
    other = ec.generate_private_key(ec.SECP384R1())
    for headers in (
        signed(other, claimed=KEY.public_key()),
        signed(timestamp="2020-01-01T00:00:00+00:00"),
        signed(timestamp="today"),
        signed()[:2],
        [*signed()[:2], (b"flwr-signature", b"?")],
        [],
    ):
        assert flower.request(FLEET, b"node 1", *headers) == (REFUSED, b"")
    assert flower.request(FLEET, b"node 1", *signed()) == (200, b"")


def test_a_run_sends_its_token():
    flower = Flower()
    flower.request(RUNTIME, b"", (b"token", b"of this run"))
    flower.status = REFUSED
    assert flower.request(RUNTIME, b"", (b"token", b"of another")) == (REFUSED, b"")
    assert flower.request(RUNTIME, b"", (b"token", b"of this run")) == (200, b"")


def test_large_requests_and_too_many_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(poll_cache, "MAX_KEPT", 2)
    flower = Flower()
    for body in (b"1", b"2", b"3", b"3", b"1"):
        flower.request(RUNTIME, body)
    assert flower.asked == 4 * [RUNTIME]
    large = bytes(poll_cache.MAX_BYTES + 1)
    for _ in range(2):
        flower.request(RUNTIME, large)
    assert flower.asked == 6 * [RUNTIME]


def test_another_method_is_another_request():
    flower = Flower()
    for method in ("POST", "GET", "POST"):
        asyncio.run(flower._request(RUNTIME, b"", [], method))
    assert flower.asked == [RUNTIME, RUNTIME]


def test_requests_of_a_site_do_not_fill_the_memory():
    """It chooses what it sends, up to the limit of a body, again and again."""
    flower = Flower()
    tracemalloc.start()
    try:
        for number in range(64):
            body = number.to_bytes(1) * poll_cache.MAX_BYTES
            flower.request(FLEET, body, *signed())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(flower.asked) == 64
    assert held < 8 * poll_cache.MAX_BYTES


def look_of(node: int) -> bytes:
    return PullMessagesRequest(node=Node(node_id=node)).SerializeToString()


def tasks_for(*nodes: int) -> bytes:
    found = PushAppMessagesRequest()
    for node in nodes:
        message = Message()
        message.metadata.dst_node_id = node
        found.messages_list.append(message)
    return found.SerializeToString()


async def _held(flower: Flower, path: str, body: bytes) -> asyncio.Task[Any]:
    """A look that Flower has found nothing for."""
    known = len(flower.asked)
    look = asyncio.create_task(
        flower._request(path, body, signed() if path == FLEET else [])
    )
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(flower.asked) == known + 1 and not look.done()  # noqa: PT018
    return look


@pytest.mark.parametrize(
    ("path", "change"), [(FLEET, PUSH), (RUNTIME, "/v1/fleet/push-messages")]
)
def test_held_look_finds_what_comes(path: str, change: str):
    async def scene() -> None:
        flower = Flower(hold=20.0)
        look = await _held(flower, path, look_of(1))
        flower.content = b"a message"
        await flower._request(change, tasks_for(1), [])
        assert await look == (200, b"a message")
        assert flower.asked == [path, change, path]

    asyncio.run(scene())


def test_tasks_of_others_leave_a_held_look_alone_and_what_is_not_read_may_be_anyones():
    async def scene() -> None:
        flower = Flower(hold=20.0)
        looks = [await _held(flower, FLEET, look_of(node)) for node in (1, 2)]
        flower.content = b"a message"
        await flower._request(PUSH, tasks_for(2, 3), [])
        assert await looks[1] == (200, b"a message")
        assert not looks[0].done()
        await flower._request(PUSH, b"\xff", [])
        assert await looks[0] == (200, b"a message")
        assert flower.asked.count(FLEET) == 4

    asyncio.run(scene())


def test_parts_of_a_task_leave_held_looks_alone():
    """It is found by its envelope, and each part would be a look of every site."""

    async def scene() -> None:
        flower = Flower(hold=0.01)
        look = await _held(flower, FLEET, look_of(1))
        await flower._request("/v1/runtime/push-object", b"a part", [])
        assert await look == (200, b"")
        assert flower.asked.count(FLEET) == 1

    asyncio.run(scene())


def test_held_look_of_a_site_that_is_revoked_is_refused():
    async def scene() -> None:
        flower = Flower(hold=20.0)
        look = await _held(flower, FLEET, look_of(1))
        flower.status = REFUSED
        await flower._request("/v1/control/unregister-node", b"", [])
        assert await look == (REFUSED, b"")

    asyncio.run(scene())


def test_look_is_held_for_a_while_only():
    async def scene() -> None:
        flower = Flower(hold=0.01)
        for _ in range(2):
            assert await flower._request(FLEET, look_of(1), signed()) == (200, b"")
        assert flower.asked == [FLEET]

    asyncio.run(scene())


def test_change_during_a_look_is_looked_for_again():
    flower = Flower(hold=0.01, meanwhile=PUSH)
    assert flower.request(FLEET, look_of(1), *signed()) == (200, b"")
    assert flower.asked == [FLEET, PUSH, FLEET]
