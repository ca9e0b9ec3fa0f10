"""Our S3 and Cloud Storage against boto3's and Google's clients: time, peak memory.

    python benchmarks/storage_cloud.py [--store s3] [--repetitions 1] [--gigabytes 1]
    python benchmarks/storage_cloud.py --s3-url s3://BUCKET [--s3-endpoint https://...]
    python benchmarks/storage_cloud.py --store gcs --large ours --gigabytes 10

Without a URL all run against ``sink.py`` on this machine, over TLS unless ``--plain``
is given. With one they run in that bucket, with the environment's credentials, below a
prefix of their own that is deleted in the end, unless the process is killed; somebody
pays for that.
There is a large object only with ``--gigabytes`` or ``--large``; its download needs its
size on the disk of ``TMPDIR``.

Theirs get the best of several settings, with their own checksums (boto3: CRC-32;
Google: CRC32C) and, for boto3, without any. Ours always computes CRC32C and SHA-256 of
what it writes, and checks CRC32C of what it reads. Best times, all in turn; a ratio
above 1 means that ours is faster. CPU seconds are those of one process each.

JSON lines on stdout, the machine first.
"""

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cloud_clients import THEIRS, Google, Ours, Place
from machine import facts
from sink import BLOCK, MIB, SIZE, SMALL, sink

Work = Callable[[], object]

KEYS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}
NUM_SMALL = 100


WAYS = {"up": "up, a stream", "down": "down into a file, flushed"}


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


def cases(kind: Any, place: Place, repetitions: int) -> Iterator[dict[str, object]]:
    ours = Ours(kind, place)
    clients = [kind(place, setting) for setting in kind.settings]
    content = BLOCK[:SMALL]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file"
        some: Mapping[str, Callable[[Any], object]] = {
            "stream of 128 MiB up": lambda client: client.up("key", SIZE),
            "100 objects of 16 KiB up, one after the other": lambda client: [
                client.put("small", content) for _ in range(NUM_SMALL)
            ],
            "128 MiB down into memory, in one request": (
                lambda client: client.get("key")
            ),
            "128 MiB down into a file": lambda client: client.down("key", path),
            # Ours is on the disk when it returns; theirs is made so here.
            "128 MiB down into a file, both flushed": (
                lambda client: (client.down("key", path), flush(path))
            ),
            "100 objects of 16 KiB down, one after the other": lambda client: [
                client.get("small") for _ in range(NUM_SMALL)
            ],
        }
        for case, work in some.items():
            works = [(client, partial(work, client)) for client in clients]
            yield {"case": case, **compare(partial(work, ours), works, repetitions)}


def large(kind: Any, place: Place, who: str, way: str, gigabytes: int) -> None:
    """Move a large object up or down, and print seconds and peak memory."""
    client = (
        Ours(kind, place) if who == "ours" else kind(place, kind.settings[int(who)])
    )
    key = f"{gigabytes}-gib"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        if way == "up":
            took = seconds(lambda: client.up(key, gigabytes * 1024 * MIB))
        else:
            client.look(key)  # The sink sums it when it is first asked for it.
            took = seconds(lambda: (client.down(key, path), flush(path)))
    # ru_maxrss also counts the parent's.
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    cpu = time.process_time()
    found = {"seconds": took, "cpu_seconds": cpu, "peak_mib": peak_kib // 1024}
    print(json.dumps(found))


def measure(kind: Any, place: Place, who: str, way: str, gigabytes: int) -> Any:
    """Run ``large`` in a process of its own."""
    command = [sys.executable, __file__, "--store", kind.name, "--large", who]
    command += ["--way", way, "--gigabytes", str(gigabytes)]
    command += [f"--{kind.name}-url", place.url]
    if place.endpoint:
        command += [f"--{kind.name}-endpoint", place.endpoint]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def on_large(
    kind: Any, place: Place, way: str, gigabytes: int, repetitions: int
) -> dict[str, object]:
    """Runs in turn; the best of each."""
    checked = [
        str(number)
        for number, setting in enumerate(kind.settings)
        if kind is Google or setting[2]
    ]
    # As many runs of ours as of theirs: see compare().
    runs = [
        [measure(kind, place, who, way, gigabytes) for who in ("ours", theirs)]
        for theirs in checked * repetitions
    ]
    mine, theirs = (
        min(found, key=lambda run: run["seconds"]) for found in zip(*runs, strict=True)
    )
    return {
        "case": f"{gigabytes} GiB {WAYS[way]}",
        **against(mine["seconds"], [theirs["seconds"]], []),
        "ours_cpu_s": round(mine["cpu_seconds"], 2),
        "theirs_cpu_s": round(theirs["cpu_seconds"], 2),
        "ours_mib_per_s": round(gigabytes * 1024 / mine["seconds"]),
        "ours_peak_mib": mine["peak_mib"],
        "theirs_peak_mib": theirs["peak_mib"],
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=tuple(THEIRS), help="by default both")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument(
        "--gigabytes", type=int, help="of a large object; by default 2 with --large"
    )
    parser.add_argument("--plain", action="store_true", help="HTTP in place of TLS")
    parser.add_argument(
        "--large", help="only one large object up and down: ours, or a setting's number"
    )
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--s3-url", help="s3://BUCKET[/PREFIX]")
    parser.add_argument("--s3-endpoint", help="of another service, or nearer")
    parser.add_argument("--gcs-url", help="gs://BUCKET[/PREFIX]")
    parser.add_argument("--gcs-endpoint", help="of another service, or nearer")
    return parser


@contextlib.contextmanager
def place_of(kind: Any, options: argparse.Namespace) -> Iterator[Place]:
    """The user's bucket, left as it was; or the sink."""
    url = getattr(options, f"{kind.name}_url")
    endpoint = getattr(options, f"{kind.name}_endpoint")
    if url is None:
        os.environ.update(KEYS)
        with sink(kind.name, tls=not options.plain) as endpoint:
            yield Place("any://bucket/bench", endpoint)
        return
    place = Place(f"{url.rstrip('/')}/benchmark-{secrets.token_hex(4)}", endpoint)
    try:
        yield place
    finally:
        store = kind.store(place)
        for info in store.list():
            store.delete(info.key)


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    if options.gigabytes is None:
        options.gigabytes = 2 if options.large else 0
    if options.way:  # One of measure()'s processes.
        kind = THEIRS[options.store]
        url = getattr(options, f"{kind.name}_url")
        place = Place(url, getattr(options, f"{kind.name}_endpoint"))
        large(kind, place, options.large, options.way, options.gigabytes)
        return
    given = [kind for kind in THEIRS.values() if getattr(options, f"{kind.name}_url")]
    kinds = given or list(THEIRS.values())
    if options.store is not None:
        kinds = [THEIRS[options.store]]
    print(json.dumps(facts("storage_cloud", **vars(options))), flush=True)
    for kind in kinds:
        with place_of(kind, options) as place:
            for line in lines(kind, place, options):
                print(json.dumps({"store": kind.name, **line}), flush=True)


def lines(
    kind: Any, place: Place, options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """All cases of one store, or the one object that is asked for."""
    size = options.gigabytes
    if options.large:
        for way, case in WAYS.items():
            found = measure(kind, place, options.large, way, size)
            yield {"case": f"{size} GiB {case}", "who": options.large, **found}
        return
    yield from cases(kind, place, options.repetitions)
    for way in WAYS if size else ():
        yield on_large(kind, place, way, size, max(1, options.repetitions // 2))


if __name__ == "__main__":
    main()
