"""Objects in a folder of this machine, against plain files.

    python benchmarks/storage.py [--megabytes 512] [--turns 3] [--folder /tmp]

Plain copies go to a file beside the old one, which they replace when they are flushed,
as a store's objects do; one of them only copies, the other takes CRC32C and SHA-256 in
the same pass. A plain read comes with and without a CRC32C. Each turn does all of them
one after another, in another order each time. Medians are of single turns, and ratios
of medians: 0.8 is 80 % of the speed of what is plain. Then small objects: milliseconds.

JSON lines on stdout, the machine first; medians as a table on stderr.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import machine
import numpy as np

from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.disk.transfer import download, stream, upload

SMALL = 200


def seconds_of(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def copy(source: Path, target: Path, *, sums: bool) -> None:
    """Copy a file through one buffer, flush it and give it its name."""
    partial = target.with_suffix(".partial")
    buffer = memoryview(bytearray(1 << 20))
    whole, crc, digest = np.frombuffer(buffer, np.uint8), 0, hashlib.sha256()
    with (
        source.open("rb", buffering=0) as read,
        partial.open("wb", buffering=0) as file,
    ):
        while num_bytes := read.readinto(buffer):
            if sums:
                crc = google_crc32c.extend(crc, whole[:num_bytes])
                digest.update(buffer[:num_bytes])
            file.write(buffer[:num_bytes])
        os.fsync(file.fileno())
    partial.replace(target)


def drain(store: LocalStore) -> None:
    for _ in stream(store, "large"):
        pass


def turn(folder: Path, source: Path, order: np.random.Generator) -> dict[str, float]:
    """Each way once: what came before decides which memory the system has at hand."""
    store, copied = LocalStore(folder / "store"), folder / "copied"
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: copy(source, copied, sums=False),
        "summed_copy": lambda: copy(source, copied, sums=True),
        "put": lambda: upload(store, "large", source),
        "plain_read": source.read_bytes,
        "summed_read": lambda: google_crc32c.value(source.read_bytes()),
        "read": lambda: store.read("large"),
        "stream": lambda: drain(store),
        "download": lambda: download(store, "large", folder / "down"),
    }
    names = order.permutation(list(ways))
    found = {name: seconds_of(ways[name]) for name in names}
    return {name: found[name] for name in ways}


def ratios(row: dict[str, float]) -> dict[str, float]:
    """Speeds, as shares of those of the plain ways."""
    return {
        "put_to_copy": row["copy"] / row["put"],
        "put_to_summed_copy": row["summed_copy"] / row["put"],
        "read_to_plain_read": row["plain_read"] / row["read"],
        "read_to_summed_read": row["summed_read"] / row["read"],
        "stream_to_summed_read": row["summed_read"] / row["stream"],
        "download_to_copy": row["copy"] / row["download"],
        "download_to_summed_copy": row["summed_copy"] / row["download"],
    }


def small(folder: Path) -> dict[str, float]:
    """Objects of a kilobyte: what a call costs."""
    store, content = LocalStore(folder / "store"), bytes(1000)

    def write() -> None:
        for number in range(SMALL):
            store.put(f"small/{number}", [content])

    def plain() -> None:
        for number in range(SMALL):
            with (folder / f"plain-{number}").open("wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())

    def read() -> None:
        for number in range(SMALL):
            store.read(f"small/{number}")

    return {
        "put_ms": 1e3 * seconds_of(write) / SMALL,
        "plain_write_ms": 1e3 * seconds_of(plain) / SMALL,
        "read_ms": 1e3 * seconds_of(read) / SMALL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    settings = {"megabytes": args.megabytes, "turns": args.turns}
    print(json.dumps(machine.facts("storage", **settings)), flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source = folder / "source"
        with source.open("wb") as file:
            for _ in range(args.megabytes):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        order = np.random.default_rng(1)
        upload(LocalStore(folder / "store"), "large", source)
        turns = []
        for _ in range(args.turns):
            turns.append(turn(folder, source, order))
            print(json.dumps(turns[-1]), flush=True)
        row = {way: statistics.median(row[way] for row in turns) for way in turns[0]}
        row |= ratios(row)
        print(json.dumps(row))
        found = small(folder)
        print(json.dumps(found))
        row |= found
        for way, value in row.items():
            print(f"{way:>24} {value:8.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
