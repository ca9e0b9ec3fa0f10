"""Our Cloud Storage store against Google's own client: time in one run, peak memory.

The server is a sink on this machine: it takes an upload, counts its CRC32C and keeps
nothing, and gives out as many bytes as it is asked for, so that objects can be large.
Google's client gets the best of several chunk sizes and verifies CRC32C, as ours does;
ours computes SHA-256 as well.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import google_crc32c
from machine import facts

MIB = 1024 * 1024
BLOCK = os.urandom(MIB)
CHUNKS = [8 * MIB, 16 * MIB, 100 * MIB]  # The last is its default.
SIZE = 128 * MIB


def crc_of_blocks(num_blocks: int) -> str:
    crc = 0
    for _ in range(num_blocks):
        crc = google_crc32c.extend(crc, BLOCK)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class Sink(BaseHTTPRequestHandler):
    """As much of the JSON API as uploads and whole reads need."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    down_crc = ""
    uploads: dict[str, tuple[int, int]] = {}  # noqa: RUF012 (one sink, one table)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = parse_qs(urlsplit(self.path).query)
        if query["uploadType"] == ["resumable"]:
            name = str(len(self.uploads))
            self.uploads[name] = (0, 0)
            host = self.headers["Host"]
            location = f"http://{host}/upload?upload_id={name}"
            self._answer(200, b"", Location=location)
        else:
            content = body.split(b"\r\n\r\n", 2)[2].rsplit(b"\r\n--", 1)[0]
            self._object(len(content), google_crc32c.value(content))

    def do_PUT(self) -> None:
        name = parse_qs(urlsplit(self.path).query)["upload_id"][0]
        size, crc = self.uploads[name]
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, MIB))
            crc = google_crc32c.extend(crc, piece)
            size += len(piece)
            left -= len(piece)
        self.uploads[name] = (size, crc)
        found = re.search(r"/(\d+)$", self.headers["Content-Range"])
        if found and int(found[1]) == size:
            self._object(size, crc)
        else:
            self._answer(308, b"", Range=f"bytes=0-{size - 1}")

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Goog-Generation", "1")
        self.send_header("X-Goog-Hash", f"crc32c={self.down_crc}")
        self.send_header("X-Goog-Stored-Content-Length", str(SIZE))
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        for _ in range(SIZE // MIB):
            self.wfile.write(BLOCK)

    def _object(self, size: int, crc: int) -> None:
        resource = {
            "name": "key",
            "size": str(size),
            "generation": "1",
            "crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode(),
        }
        body = json.dumps(resource).encode()
        self._answer(200, body, **{"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve() -> None:
    """Serve until standard input ends; the port goes to standard output."""
    Sink.down_crc = crc_of_blocks(SIZE // MIB)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """A sink in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
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
    """A file of so many bytes, for Google's client: it asks where it stands."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._place
        size = left if size < 0 else min(size, left)
        self._place += size
        return (BLOCK * -(-size // MIB))[:size]


def blocks(size: int) -> Iterator[bytes]:
    """The same bytes, for our store."""
    for _ in range(size // MIB):
        yield BLOCK


def ours(url: str) -> Any:
    from cloud_adapters.storage.gcs import GcsStore

    return GcsStore("bucket", endpoint=url)


def theirs(url: str) -> Any:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(
        project="bench",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": url},
    )
    return client.bucket("bucket")


def their_upload(bucket: Any, size: int, chunk_bytes: int) -> None:
    blob = bucket.blob("key")
    blob.chunk_size = chunk_bytes
    blob.upload_from_file(Stream(size), size=size, checksum="crc32c")


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(
    our_work: Callable[[], object],
    their_works: list[Callable[[], object]],
    repetitions: int,
) -> dict[str, float]:
    """Best times, each alternating with the others; theirs of their best setting."""
    works = (our_work, *their_works)
    for work in works:
        work()
    times = [[seconds(work) for work in works] for _ in range(repetitions)]
    mine, *others = (min(found) for found in zip(*times, strict=True))
    return {
        "ours_s": round(mine, 4),
        "google_s": round(min(others), 4),
        "ratio": round(min(others) / mine, 3),
    }


def cases(url: str, repetitions: int) -> Iterator[dict[str, object]]:
    store, bucket = ours(url), theirs(url)
    yield {
        "case": "stream of 128 MiB up",
        **compare(
            lambda: store.put("key", blocks(SIZE)),
            [lambda c=c: their_upload(bucket, SIZE, c) for c in CHUNKS],  # type: ignore[misc]
            repetitions,
        ),
    }
    small = BLOCK[: 16 * 1024]
    yield {
        "case": "100 objects of 16 KiB up, one after the other",
        **compare(
            lambda: [store.put("key", [small]) for _ in range(100)],
            [
                lambda: [
                    bucket.blob("key").upload_from_string(small, checksum="crc32c")
                    for _ in range(100)
                ]
            ],
            repetitions,
        ),
    }
    yield {
        "case": "128 MiB down into memory",
        **compare(
            lambda: store.read("key"),
            [
                lambda: bucket.blob("key").download_as_bytes(
                    raw_download=True, checksum="crc32c"
                )
            ],
            repetitions,
        ),
    }


def large(url: str, who: str, gigabytes: int) -> None:
    """Upload a large stream, and print seconds and peak memory."""
    size = gigabytes * 1024 * MIB
    if who == "ours":
        store = ours(url)
        took = seconds(lambda: store.put("key", blocks(size)))
    else:
        bucket = theirs(url)
        took = seconds(lambda: their_upload(bucket, size, int(who)))
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    print(json.dumps({"seconds": round(took, 2), "peak_mib": peak_kib // 1024}))


def on_large(url: str, gigabytes: int) -> dict[str, object]:
    found = {}
    for who in ("ours", *map(str, CHUNKS)):
        command = [sys.executable, __file__, "--large", who, "--url", url]
        output = subprocess.run(
            [*command, "--gigabytes", str(gigabytes)],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        found[who] = json.loads(output)
    mine = found.pop("ours")
    best = min(found.values(), key=lambda f: f["seconds"])
    return {
        "case": f"stream of {gigabytes} GiB up",
        "ours_s": mine["seconds"],
        "google_s": best["seconds"],
        "ratio": round(best["seconds"] / mine["seconds"], 3),
        "ours_mib_per_s": round(gigabytes * 1024 / mine["seconds"]),
        "ours_peak_mib": mine["peak_mib"],
        "google_peak_mib": best["peak_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gigabytes", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--large", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.large:
        large(options.url, options.large, options.gigabytes)
    else:
        print(json.dumps(facts(Path(__file__).stem, repetitions=options.repetitions)))
        with sink() as url:
            for line in cases(url, options.repetitions):
                print(json.dumps(line), flush=True)
            print(json.dumps(on_large(url, options.gigabytes)))


if __name__ == "__main__":
    main()
