"""Our S3 store against boto3's own transfers: time in one run, and peak memory.

Two servers on this machine: moto's, which stores objects, and a sink, which takes
and gives bytes without keeping them, so that objects can be large. Both speak plain
HTTP, where signatures cover every body with a SHA-256; over TLS neither client pays
for that. boto3 gets the best of several settings, with its own checksums (CRC-32, its
default) and without any; ours always computes CRC32C and SHA-256 of everything.
"""

import argparse
import contextlib
import importlib.machinery
import io
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from machine import facts

MIB = 1024 * 1024
BLOCK = os.urandom(MIB)
SETTINGS = [(8 * MIB, 4), (8 * MIB, 10), (16 * MIB, 8)]  # Part size, threads.
KEYS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Sink(BaseHTTPRequestHandler):
    """As much of S3 as uploads and reads of ranges need."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        left = int(self.headers.get("Content-Length") or 0)
        buffer = memoryview(bytearray(MIB))
        while left:
            left -= self.rfile.readinto(buffer[: min(left, MIB)])  # type: ignore[attr-defined]
        self._answer(200, b"", ETag='"0"')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("uploads"):
            body = b"<R><Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId></R>"
        else:
            body = b"<R><Bucket>b</Bucket><Key>k</Key><ETag>0</ETag></R>"
        self._answer(200, body)

    def do_DELETE(self) -> None:
        self._answer(204, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def teach_moto_crc32c() -> None:
    """Without this module moto takes CRC-32 for CRC32C."""
    import google_crc32c

    shim = types.ModuleType("crc32c")
    shim.crc32c = google_crc32c.value  # type: ignore[attr-defined]
    shim.__spec__ = importlib.machinery.ModuleSpec("crc32c", None)
    sys.modules.setdefault("crc32c", shim)


def serve(kind: str) -> None:
    """Serve until standard input ends; the port goes to standard output."""
    if kind == "sink":
        server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
        server.daemon_threads = True
    else:
        teach_moto_crc32c()
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            create_backend_app,
        )
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: Any) -> None:
                """Say nothing."""

        app = DomainDispatcherApplication(create_backend_app)
        server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    """A server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class Stream(io.RawIOBase):
    """A file of so many bytes that cannot be rewound, for boto3."""

    def __init__(self, size: int) -> None:
        self._left = size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        self._left -= size
        return (BLOCK * -(-size // MIB))[:size]


def blocks(size: int) -> Iterator[bytes]:
    """The same bytes, for our store."""
    for _ in range(size // MIB):
        yield BLOCK


def theirs(url: str, *, checks: bool = True) -> Any:
    import boto3
    from botocore.config import Config

    when = "when_supported" if checks else "when_required"
    return boto3.client(
        "s3",
        endpoint_url=url,
        config=Config(
            max_pool_connections=32,
            request_checksum_calculation=when,
            response_checksum_validation=when,
        ),
    )


def ours(url: str) -> Any:
    from cloud_adapters.storage.s3 import S3Store

    return S3Store("bucket", endpoint_url=url)


def config(part_bytes: int, threads: int) -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=part_bytes,
        multipart_chunksize=part_bytes,
        max_concurrency=threads,
    )


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


Work = Callable[[], object]


def compare(
    our_work: Work, their_works: Callable[[Any], list[Work]], url: str, repetitions: int
) -> dict[str, float]:
    """Median times, taken in turn; boto3's are those of its best setting."""
    checked = their_works(theirs(url))
    works = [our_work, *checked, *their_works(theirs(url, checks=False))]
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repetitions):
        for place, work in enumerate(works):
            times[place].append(seconds(work))
    medians = [statistics.median(found) for found in times]
    return against(
        medians[0], min(medians[1 : 1 + len(checked)]), min(medians[1 + len(checked) :])
    )


def against(our_s: float, checked_s: float, bare_s: float) -> dict[str, float]:
    return {
        "ours_s": round(our_s, 4),
        "boto3_s": round(checked_s, 4),
        "boto3_unchecked_s": round(bare_s, 4),
        "ratio": round(checked_s / our_s, 2),
        "ratio_unchecked": round(bare_s / our_s, 2),
    }


def on_moto(url: str, repetitions: int) -> Iterator[dict[str, object]]:
    store = ours(url)
    theirs(url).create_bucket(Bucket="bucket")
    size = 64 * MIB
    small = BLOCK[: 16 * 1024]

    def upload(client: Any) -> list[Work]:
        return [
            lambda s=s: client.upload_fileobj(  # type: ignore[misc]
                Stream(size), "bucket", "theirs", Config=config(*s)
            )
            for s in SETTINGS
        ]

    def put(client: Any) -> list[Work]:
        put_object = client.put_object
        return [
            lambda: [
                put_object(Bucket="bucket", Key=f"t/{n}", Body=small)
                for n in range(100)
            ]
        ]

    def get(client: Any, keys: list[str]) -> list[Work]:
        get_object = client.get_object
        return [
            lambda: [get_object(Bucket="bucket", Key=k)["Body"].read() for k in keys]
        ]

    def case(name: str, our_work: Work, works: Any) -> dict[str, object]:
        return {"case": name, **compare(our_work, works, url, repetitions)}

    keys = [f"s/{n}" for n in range(100)]
    yield case(
        "stream of 64 MiB up, moto", lambda: store.put("ours", blocks(size)), upload
    )
    yield case(
        "100 objects of 16 KiB up, one after the other, moto",
        lambda: [store.put(key, [small]) for key in keys],
        put,
    )
    yield case(
        "64 MiB down into memory in one request, moto",
        lambda: store.read("ours"),
        lambda client: get(client, ["ours"]),
    )
    yield case(
        "100 objects of 16 KiB down, one after the other, moto",
        lambda: [store.read(key) for key in keys],
        lambda client: get(client, keys),
    )


def large(url: str, who: str, gigabytes: int) -> None:
    """Upload a large stream to the sink, and print seconds and peak memory."""
    size = gigabytes * 1024 * MIB
    if who == "ours":
        store = ours(url)
        took = seconds(lambda: store.put("key", blocks(size)))
    else:
        kind, setting = who.split("-")
        part_bytes, threads = SETTINGS[int(setting)]
        client = theirs(url, checks=kind == "checked")
        took = seconds(
            lambda: client.upload_fileobj(
                Stream(size), "bucket", "key", Config=config(part_bytes, threads)
            )
        )
    print(json.dumps({"seconds": round(took, 2), "peak_mib": peak_mib()}))


def peak_mib() -> int:
    """Most memory that this process ever held (ru_maxrss also counts its parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def on_sink(url: str, gigabytes: int) -> Iterator[dict[str, object]]:
    def measure(who: str) -> tuple[float, int]:
        command = [sys.executable, __file__, "--large", who, "--url", url]
        output = subprocess.run(
            [*command, "--gigabytes", str(gigabytes)],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        found = json.loads(output)
        return found["seconds"], found["peak_mib"]

    def best_of(kind: str) -> tuple[float, int]:
        return min(measure(f"{kind}-{setting}") for setting in range(len(SETTINGS)))

    # As many runs as boto3 has settings: on a busy machine the best of more is better.
    our_s, our_peak = min(measure("ours") for _ in SETTINGS)
    (checked_s, checked_peak), (bare_s, _) = best_of("checked"), best_of("bare")
    yield {
        "case": f"stream of {gigabytes} GiB up, sink",
        **against(our_s, checked_s, bare_s),
        "ours_mib_per_s": round(gigabytes * 1024 / our_s),
        "ours_peak_mib": our_peak,
        "boto3_peak_mib": checked_peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gigabytes", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--large", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(KEYS)
    if options.serve:
        serve(options.serve)
        return
    if options.large:
        large(options.url, options.large, options.gigabytes)
        return
    print(json.dumps(facts(Path(__file__).stem, repetitions=options.repetitions)))
    with server("moto") as url:
        for line in on_moto(url, options.repetitions):
            print(json.dumps(line), flush=True)
    with server("sink") as url:
        for line in on_sink(url, options.gigabytes):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
