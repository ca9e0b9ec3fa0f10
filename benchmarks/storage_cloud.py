"""Our S3 and Cloud Storage against boto3's and Google's clients: time, peak memory.

    python benchmarks/storage_cloud.py [--store s3] [--repetitions 5] [--gigabytes 2]

All run against ``sink.py`` on this machine, over TLS unless ``--plain`` is given.
Theirs get the best of several settings, with their own checksums (boto3: CRC-32;
Google: CRC32C) and, for boto3, without any. Ours always computes CRC32C and SHA-256 of
what it writes, and checks CRC32C of what it reads. Best times, all in turn; a ratio
above 1 means that ours is faster. CPU seconds are those of one process each.

JSON lines on stdout, the machine first.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from machine import facts
from sink import BLOCK, MIB, SIZE, SMALL, sink

Work = Callable[[], object]

KEYS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}
NUM_SMALL = 100


class Stream(io.RawIOBase):
    """A file of so many bytes; it cannot be rewound, and says where it stands."""

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
    """The same bytes, for our stores."""
    for _ in range(size // MIB):
        yield BLOCK


class Boto3:
    """Amazon's client with one of its settings."""

    name = "s3"
    # Part size, threads, and whether it checks.
    settings: ClassVar = [
        (part, threads, checks)
        for checks in (True, False)
        for part, threads in ((8 * MIB, 4), (8 * MIB, 10), (16 * MIB, 8))
    ]

    def __init__(self, url: str, setting: tuple[int, int, bool]) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        part_bytes, threads, checks = setting
        when = "when_supported" if checks else "when_required"
        self.is_checked = checks
        self._client = boto3.client(
            "s3",
            endpoint_url=url,
            config=Config(
                max_pool_connections=32,
                request_checksum_calculation=when,
                response_checksum_validation=when,
                s3={"addressing_style": "path"},
            ),
        )
        self._config = TransferConfig(
            multipart_threshold=part_bytes,
            multipart_chunksize=part_bytes,
            max_concurrency=threads,
        )

    @staticmethod
    def ours(url: str) -> Any:
        from cloud_adapters.storage.s3 import S3Store

        return S3Store("bucket", endpoint_url=url)

    def up(self, size: int) -> None:
        self._client.upload_fileobj(Stream(size), "bucket", "key", Config=self._config)

    def put(self, content: bytes) -> None:
        self._client.put_object(Bucket="bucket", Key="small", Body=content)

    def get(self, key: str) -> None:
        self._client.get_object(Bucket="bucket", Key=key)["Body"].read()

    def down(self, path: Path) -> None:
        self._client.download_file("bucket", "key", str(path), Config=self._config)


class Google:
    """Google's client with one of its chunk sizes; the last is its default."""

    name = "gcs"
    settings: ClassVar = [8 * MIB, 16 * MIB, 100 * MIB]
    is_checked = True

    def __init__(self, url: str, chunk_bytes: int) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        client = storage.Client(
            project="bench",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": url},
        )
        self._bucket = client.bucket("bucket")
        self._chunk_bytes = chunk_bytes

    @staticmethod
    def ours(url: str) -> Any:
        from google.auth.credentials import AnonymousCredentials

        from cloud_adapters.storage.gcs import GcsStore

        return GcsStore("bucket", endpoint=url, credentials=AnonymousCredentials())

    def up(self, size: int) -> None:
        blob = self._bucket.blob("key", chunk_size=self._chunk_bytes)
        blob.upload_from_file(Stream(size), size=size, checksum="crc32c")

    def put(self, content: bytes) -> None:
        self._bucket.blob("small").upload_from_string(content, checksum="crc32c")

    def get(self, key: str) -> None:
        blob = self._bucket.blob(key)
        blob.download_as_bytes(raw_download=True, checksum="crc32c")

    def down(self, path: Path) -> None:
        blob = self._bucket.blob("key")
        blob.download_to_filename(str(path), raw_download=True, checksum="crc32c")


THEIRS = {kind.name: kind for kind in (Boto3, Google)}


def seconds(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def against(ours: float, checked: Sequence[float], bare: Sequence[float]) -> Any:
    row = {"ours_s": ours, "theirs_s": min(checked), "ratio": min(checked) / ours}
    if bare:
        row |= {"unchecked_s": min(bare), "ratio_unchecked": min(bare) / ours}
    return {name: round(value, 3) for name, value in row.items()}


def compare(ours: Work, theirs: Sequence[tuple[Any, Work]], repetitions: int) -> Any:
    """Best times, each alternating with the others; theirs of their best setting.

    Ours runs once for each of their settings that checks: on a busy machine the best
    of more runs is better.
    """
    found: dict[bool | None, list[float]] = {None: [], True: [], False: []}
    for number in range(1 + repetitions):
        for client, work in theirs:
            times = {client.is_checked: seconds(work)}
            if client.is_checked:
                times[None] = seconds(ours)
            if number:  # The first is for caches and connections.
                for whose, took in times.items():
                    found[whose].append(took)
    return against(min(found[None]), found[True], found[False])


def flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def cases(kind: Any, url: str, repetitions: int) -> Iterator[dict[str, object]]:
    from cloud_adapters.storage.transfer import download

    store = kind.ours(url)
    clients = [kind(url, setting) for setting in kind.settings]
    content = BLOCK[:SMALL]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file"
        some: Mapping[str, tuple[Work, Callable[[Any], object]]] = {
            "stream of 128 MiB up": (
                lambda: store.put("key", blocks(SIZE)),
                lambda client: client.up(SIZE),
            ),
            "100 objects of 16 KiB up, one after the other": (
                lambda: [store.put("small", [content]) for _ in range(NUM_SMALL)],
                lambda client: [client.put(content) for _ in range(NUM_SMALL)],
            ),
            "128 MiB down into memory, in one request": (
                lambda: store.read("key"),
                lambda client: client.get("key"),
            ),
            "128 MiB down into a file": (
                lambda: download(store, "key", path),
                lambda client: client.down(path),
            ),
            # Ours is on the disk when it returns; theirs is made so here.
            "128 MiB down into a file, both flushed": (
                lambda: download(store, "key", path),
                lambda client: (client.down(path), flush(path)),
            ),
            "100 objects of 16 KiB down, one after the other": (
                lambda: [store.read("small") for _ in range(NUM_SMALL)],
                lambda client: [client.get("small") for _ in range(NUM_SMALL)],
            ),
        }
        for case, (ours, theirs) in some.items():
            works = [(client, lambda c=client: theirs(c)) for client in clients]  # noqa: B023 (used before the next)
            yield {"case": case, **compare(ours, works, repetitions)}


def large(kind: Any, url: str, who: str, gigabytes: int) -> None:
    """Upload a large stream, and print seconds and peak memory."""
    size = gigabytes * 1024 * MIB
    if who == "ours":
        store = kind.ours(url)
        took = seconds(lambda: store.put("key", blocks(size)))
    else:
        client = kind(url, kind.settings[int(who)])
        took = seconds(lambda: client.up(size))
    # ru_maxrss also counts the parent's.
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    cpu = time.process_time()
    found = {"seconds": took, "cpu_seconds": cpu, "peak_mib": peak_kib // 1024}
    print(json.dumps(found))


def on_large(kind: Any, url: str, gigabytes: int, repetitions: int) -> Any:
    """One process for each run, in turn; the best of each."""

    def measure(who: str) -> Any:
        command = [sys.executable, __file__, "--store", kind.name, "--url", url]
        output = subprocess.run(
            [*command, "--large", who, "--gigabytes", str(gigabytes)],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        return json.loads(output)

    checked = [
        str(number)
        for number, setting in enumerate(kind.settings)
        if kind is Google or setting[2]
    ]
    # As many runs of ours as of theirs: see compare().
    runs = [(measure("ours"), measure(who)) for who in checked * repetitions]
    mine, theirs = (
        min(found, key=lambda run: run["seconds"]) for found in zip(*runs, strict=True)
    )
    return {
        "case": f"stream of {gigabytes} GiB up",
        **against(mine["seconds"], [theirs["seconds"]], []),
        "ours_cpu_s": round(mine["cpu_seconds"], 2),
        "theirs_cpu_s": round(theirs["cpu_seconds"], 2),
        "ours_mib_per_s": round(gigabytes * 1024 / mine["seconds"]),
        "ours_peak_mib": mine["peak_mib"],
        "theirs_peak_mib": theirs["peak_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=tuple(THEIRS), help="by default both")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gigabytes", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="HTTP in place of TLS")
    parser.add_argument("--large", help="only one upload: ours, or a setting's number")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(KEYS)
    if options.url:
        large(THEIRS[options.store], options.url, options.large, options.gigabytes)
        return
    print(json.dumps(facts("storage_cloud", **vars(options))), flush=True)
    for kind in THEIRS.values() if options.store is None else [THEIRS[options.store]]:
        run(kind, options)


def run(kind: Any, options: argparse.Namespace) -> None:
    """All cases of one store, or the one upload that is asked for."""
    with sink(kind.name, tls=not options.plain) as url:
        if options.large:
            large(kind, url, options.large, options.gigabytes)
            return
        for line in cases(kind, url, options.repetitions):
            print(json.dumps({"store": kind.name, **line}), flush=True)
        line = on_large(kind, url, options.gigabytes, max(1, options.repetitions // 2))
        print(json.dumps({"store": kind.name, **line}), flush=True)


if __name__ == "__main__":
    main()
