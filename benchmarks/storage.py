"""Objects in a folder of this machine, against plain files.

    python benchmarks/storage.py [--megabytes 1024] [--turns 3] [--folder /tmp]

A store's write takes two checksums and flushes content, record and folder to the
disk; a plain copy only copies and flushes. A store's read is checked. Each turn does
all of them one after another, and ratios are of one turn: more than 1 is slower than
plain. Then small objects: writes and reads per second.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import machine

from cloud_adapters.storage.local import LocalStore
from cloud_adapters.storage.transfer import download, stream, upload

SMALL = 200


def seconds_of(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def copy(source: Path, target: Path) -> None:
    """Copy a file through this process, and flush it."""
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as file:
        shutil.copyfileobj(read, file, 8 << 20)
        os.fsync(file.fileno())


def drain(store: LocalStore) -> None:
    for _ in stream(store, "large"):
        pass


def turn(folder: Path, source: Path) -> dict[str, float]:
    """Each way once; what is written is replaced, as a checkpoint is."""
    store = LocalStore(folder / "store")
    return {
        "copy": seconds_of(lambda: copy(source, folder / "copied")),
        "put": seconds_of(lambda: upload(store, "large", source)),
        "plain_read": seconds_of((folder / "copied").read_bytes),
        "read": seconds_of(lambda: store.read("large")),
        "stream": seconds_of(lambda: drain(store)),
        "download": seconds_of(lambda: download(store, "large", folder / "down")),
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
    parser.add_argument("--megabytes", type=int, default=1024)
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
        turns = []
        for _ in range(args.turns):
            row = turn(folder, source)
            row["put_to_copy"] = row["put"] / row["copy"]
            row["read_to_plain"] = row["read"] / row["plain_read"]
            row["download_to_copy"] = row["download"] / row["copy"]
            print(json.dumps(row), flush=True)
            turns.append(row)
        for way in turns[0]:
            median = statistics.median(row[way] for row in turns)
            print(f"{way:>18} {median:8.3f}", file=sys.stderr)
        row = small(folder)
        print(json.dumps(row))
        for way, value in row.items():
            print(f"{way:>18} {value:8.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
