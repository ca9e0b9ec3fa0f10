"""What only Cloud Storage does over a bad network; see also tests/contract."""

import json
import signal
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import gcs_stores, tcp_proxy
from support.bad_lines import LOST_REPLY, Line, google_error
from support.fake_gcs import KIB_256, FakeGcs, Upload
from support.google_server import Answer, GoogleServer, Request, json_answer
from support.tcp_proxy import Fault

from cloud_adapters.storage.checksums import Crc32c
from cloud_adapters.storage.gcs.calls import encoded
from cloud_adapters.storage.gcs.store import GcsStore
from cloud_adapters.storage.gcs.write import MAX_SESSIONS
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreForbidden,
    StoreUnavailable,
)

pytestmark = pytest.mark.slow


def test_deleting_is_tried_again(gcs_line: Line):
    """What a lost answer leaves unknown, the next attempt finds done."""
    gcs_line.near.put("key", [b"content"])
    gcs_line.proxy.fail("DELETE", google_error(503, "backendError"))
    gcs_line.proxy.fail("DELETE", LOST_REPLY)
    gcs_line.far.delete("key")
    assert gcs_line.proxy.count("DELETE") == 3
    with pytest.raises(ObjectNotFound):
        gcs_line.near.stat("key")


def test_lost_reply_behind_the_last_chunk(gcs_line: Line):
    """The session tells that the object is there."""
    gcs_line.proxy.fail("PUT", LOST_REPLY, after=5)
    info = gcs_line.far.put("key", gcs_line.pieces(), if_absent=True)
    assert gcs_line.near.read("key", if_version=info.version) == gcs_line.big


def test_session_that_is_gone_behind_the_last_chunk(gcs_line: Line):
    """The put-id tells that the object is there, and whose it is."""
    gcs_line.proxy.fail("PUT", LOST_REPLY, after=5)
    gcs_line.proxy.fail("PUT", google_error(410, "gone"), times=100)
    info = gcs_line.far.put("key", gcs_line.pieces(), if_absent=True)
    assert gcs_line.near.read("key", if_version=info.version) == gcs_line.big


@pytest.mark.parametrize(("status", "reason"), [(404, "notFound"), (410, "gone")])
@pytest.mark.parametrize("after", [0, 2])
def test_session_that_is_gone_is_begun_again(
    gcs_line: Line, status: int, reason: str, after: int
):
    """With a content that can be read again: from its first byte, as one write."""
    gcs_line.proxy.fail("PUT", google_error(status, reason), after=after)
    info = gcs_line.far.put("key", [gcs_line.big], if_absent=True)
    assert gcs_line.near.read("key", if_version=info.version) == gcs_line.big
    assert gcs_line.near.stat("key").sha256 is not None
    assert gcs_line.proxy.count("POST") == 2


def test_sessions_are_begun_again_so_often_and_no_more(gcs_line: Line):
    """A service that forgets every one is broken."""
    gcs_line.proxy.fail("PUT", google_error(410, "gone"), times=100)
    with pytest.raises(StoreUnavailable, match="put the object again"):
        gcs_line.far.put("key", [gcs_line.big])
    assert gcs_line.proxy.count("POST") == MAX_SESSIONS
    assert list(gcs_line.near.list()) == []


def test_session_that_is_gone_with_a_stream(gcs_line: Line):
    """An upload that cannot be begun again is said to be forgotten."""
    gcs_line.proxy.fail("PUT", google_error(404, "notFound"), after=2, times=100)
    with pytest.raises(StoreUnavailable, match="put the object again"):
        gcs_line.far.put("key", gcs_line.pieces(), if_absent=True)
    assert list(gcs_line.near.list()) == []


def test_upload_that_was_not_begun_ends_no_other(gcs_line: Line):
    """The session of the upload before it has made an object."""
    gcs_line.far.put("key", gcs_line.pieces())
    gcs_line.proxy.fail("POST", google_error(403, "forbidden"), times=9)
    with pytest.raises(StoreForbidden):
        gcs_line.far.put("other", gcs_line.pieces())
    assert gcs_line.proxy.count("DELETE") == 0


def test_repeated_write_spares_a_newer_one(gcs_line: Line):
    """A write whose answer was lost is not made again over what came after it."""
    version = gcs_line.near.put("key", [b"old"]).version
    gcs_line.proxy.fail("POST", LOST_REPLY)
    gcs_line.proxy.fail("GET", google_error(503, "backendError"))
    info = gcs_line.far.put("key", [b"new"])
    assert gcs_line.proxy.count("POST") == 1
    assert int(info.version) > int(version)
    with pytest.raises(ObjectChanged):
        gcs_line.far.put("key", [b"newer"], if_version=version)


@pytest.mark.parametrize("num_bytes", [0, 1000, KIB_256 - 1])
def test_upload_goes_on_where_it_broke(gcs_line: Line, num_bytes: int):
    """A reset inside a chunk costs at most that chunk."""
    gcs_line.proxy.fail("PUT", Fault(reset_up=num_bytes), after=1)
    gcs_line.proxy.fail("PUT", Fault(reset_up=num_bytes), after=2)
    gcs_line.far.put("key", gcs_line.pieces(), if_absent=True)
    assert gcs_line.near.read("key") == gcs_line.big
    # Six chunks, two of them twice.
    assert gcs_line.proxy.count("PUT") == 8
    assert gcs_line.proxy.count("POST") == 1


def test_service_may_keep_a_part_of_a_chunk(
    gcs_line: Line, gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch
):
    """The rest of it is sent from where the service has it."""
    monkeypatch.setattr(gcs_server, "kept_at_once", 3 * KIB_256)
    bucket, url = gcs_line.bucket, gcs_line.proxy.url
    store = gcs_stores.store(
        gcs_server, bucket=bucket, endpoint=url, chunk_bytes=4 * KIB_256
    )
    store.put("run/key", gcs_line.pieces())
    store.close()
    assert gcs_line.near.read("key") == gcs_line.big
    ranges = [r.headers.get("content-range") for r in gcs_server.requests]
    assert f"bytes {3 * KIB_256}-{4 * KIB_256 - 1}/*" in ranges
    assert gcs_line.proxy.count("PUT") == 3


@pytest.mark.timeout(30)
def test_service_that_does_not_get_on_ends_every_call(
    gcs_server: FakeGcs, gcs_store: GcsStore, monkeypatch: pytest.MonkeyPatch
):
    """It takes nothing of an upload, and repeats a page."""
    monkeypatch.setattr(gcs_server, "kept_at_once", 0)
    before = {*gcs_server.uploads}
    with pytest.raises(StoreUnavailable, match=r"took nothing of a chunk.*\(tried"):
        gcs_store.put("large", iter([bytes(KIB_256), b"x"]))
    assert {*gcs_server.uploads} == before
    page = {"kind": "storage#objects", "items": [], "nextPageToken": "again"}
    methods = {**gcs_server._methods, "storage.objects.list": lambda *_: page}
    monkeypatch.setattr(gcs_server, "_methods", methods)
    with pytest.raises(StoreUnavailable, match="the same page"):
        list(gcs_store.list())


def test_upload_that_the_service_ends_early_makes_no_object(
    gcs_server: FakeGcs, gcs_store: GcsStore, monkeypatch: pytest.MonkeyPatch
):
    """Of a stream nobody else knows how much there is."""

    def end(upload: Upload, request: Request) -> Answer:
        upload.content += request.body
        return gcs_server._finish(upload, "")

    monkeypatch.setattr(gcs_server, "_take", end)
    with pytest.raises(CorruptObject, match=f"{KIB_256} bytes .* instead of"):
        gcs_store.put("key", iter([bytes(KIB_256), b"the rest"]))
    assert list(gcs_store.list()) == []


@pytest.mark.parametrize(
    "fault", [Fault(flip_up=300), Fault(flip_up=KIB_256 - 7)], ids=["early", "late"]
)
def test_changed_chunk_makes_no_object(
    gcs_line: Line, gcs_server: FakeGcs, fault: Fault
):
    """The service compares with the checksum before it gives the object its name."""
    gcs_line.proxy.fail("PUT", fault, after=1)
    with pytest.raises(CorruptObject, match="write 'key'"):
        gcs_line.far.put("key", gcs_line.pieces())
    assert list(gcs_line.near.list()) == []
    assert gcs_server.uploads == {}


@pytest.mark.parametrize(("start", "length"), [(0, None), (10, 5 * KIB_256)])
def test_read_goes_on_where_it_broke(
    gcs_line: Line, gcs_server: FakeGcs, start: int, length: int | None
):
    """What has arrived is not asked for again."""
    gcs_line.near.put("key", [gcs_line.big])
    gcs_line.proxy.fail("GET", Fault(end_down=400_000), times=2)
    expected = gcs_line.big[start : None if length is None else start + length]
    assert gcs_line.far.read("key", start=start, length=length) == expected
    ranges = [request.headers.get("range", "") for request in gcs_server.requests]
    assert ranges[-1].startswith(f"bytes={start + 800_000}-")


def test_one_of_many_big_writers_wins(gcs_line: Line, gcs_server: FakeGcs):
    """Of 16 that upload in chunks one wins, whatever the network loses."""
    gcs_line.proxy.fail("PUT", LOST_REPLY, after=7, times=5)
    barrier = threading.Barrier(16)
    contents = [bytes([n]) * (2 * KIB_256 + n) for n in range(16)]

    def race(racer: int) -> bool:
        barrier.wait()
        try:
            gcs_line.far.put("prize", iter([contents[racer]]), if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert sum(won) == 1
    assert gcs_line.near.read("prize") == contents[won.index(True)]
    assert len(gcs_server.uploads) <= 1


RESOURCE = {"name": "run/key", "size": "7", "generation": "5", "crc32c": "AAAAAA=="}


@pytest.mark.parametrize("lost", ["size", "generation"])
@pytest.mark.parametrize("verb", ["stat", "list"])
def test_answer_that_leaves_out_what_is_needed(gcs_line: Line, lost: str, verb: str):
    """Is an endpoint that does not answer as Cloud Storage does, and no KeyError."""
    said = {name: value for name, value in RESOURCE.items() if name != lost}
    body = json.dumps({"items": [said]} if verb == "list" else said).encode()
    fault = tcp_proxy.answer(200, body, "Content-Type: application/json")
    gcs_line.proxy.fail("GET", fault, times=1000)
    with pytest.raises(StoreUnavailable, match=f"no {lost} in its answer"):
        _ = list(gcs_line.far.list()) if verb == "list" else gcs_line.far.stat("key")


def test_answer_that_is_no_object(gcs_line: Line):
    """JSON of another kind."""
    fault = tcp_proxy.answer(200, b"[]", "Content-Type: application/json")
    gcs_line.proxy.fail("GET", fault, times=1000)
    with pytest.raises(StoreUnavailable, match="not a JSON object"):
        gcs_line.far.stat("key")


PUT_AND_DIE = """
import os, signal, sys
from cloud_adapters.storage.checksums import Crc32c
from cloud_adapters.storage.gcs.calls import encoded
from cloud_adapters.storage.gcs.store import GcsStore
url, bucket = sys.argv[1:]
store = GcsStore(bucket, "run", endpoint=url, chunk_bytes=256 * 1024)
def pieces():
    for _ in range(4):
        yield bytes(256 * 1024)
    os.kill(os.getpid(), signal.SIGKILL)
store.put("key", pieces(), if_absent=True)
"""


def test_killed_upload_leaves_no_object(gcs_line: Line, gcs_server: FakeGcs):
    """Its session shows nowhere, and the next process creates the object."""
    command = [sys.executable, "-c", PUT_AND_DIE, gcs_server.url, gcs_line.bucket]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (left,) = gcs_server.uploads.values()
    assert len(left.content) == 4 * KIB_256
    assert list(gcs_line.near.list()) == []
    gcs_line.near.put("key", gcs_line.pieces(), if_absent=True)
    assert gcs_line.near.read("key") == gcs_line.big


@pytest.mark.parametrize("content", [b"x", bytes(KIB_256 + 1)], ids=["whole", "parts"])
def test_service_that_keeps_other_bytes_makes_no_object(content: bytes):
    """One that passes over checksums: what it made is removed, and no newer one."""
    size = str(len(content))
    kept = {"size": size, "generation": "7", "crc32c": "AAAAAA=="}

    def serve(request: Request) -> Answer:
        if request.method == "DELETE":
            return Answer(204)
        url = f"http://{request.headers['host']}/up?upload_id=1"
        if request.query.get("uploadType") == "resumable":
            return Answer(200, {"Location": url})
        if request.headers.get("content-range", "").endswith("/*"):
            return Answer(308, {"Range": f"bytes=0-{KIB_256 - 1}"})
        return json_answer(kept)

    with GoogleServer(serve) as server:
        store = GcsStore("b", endpoint=server.url, chunk_bytes=KIB_256)
        with pytest.raises(CorruptObject, match=f"AAAAAA== instead of {size} bytes"):
            store.put("key", [content])
        store.close()
        removed = [r.query for r in server.requests if r.path.endswith("/o/key")]
    assert [query["ifGenerationMatch"] for query in removed] == ["7"]


def test_upload_holds_one_chunk():
    """However large the content is."""
    chunk, sums = 4 * KIB_256, Crc32c()

    def serve(request: Request) -> Answer:
        if request.method == "POST":
            host = request.headers["host"]
            return Answer(200, {"Location": f"http://{host}/up?upload_id=1"})
        sums.update(request.body)
        if request.headers["content-range"].endswith("/*"):
            return Answer(308, {"Range": f"bytes=0-{sums.size - 1}"})
        said = {"size": str(sums.size), "generation": "1"}
        return json_answer({**said, "crc32c": encoded(sums.crc32c)})

    with GoogleServer(serve) as server:
        store = GcsStore("b", endpoint=server.url, chunk_bytes=chunk)
        tracemalloc.start()
        try:
            info = store.put("key", (bytes(100_000) for _ in range(400)))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        store.close()
    assert info.size == 40_000_000
    # One here, and one or two that the server reads.
    assert peak < 6 * chunk
