"""A program of another user, who looks for bytes in the memory of processes.

``python -P -m support.memory_reader USER PID...`` as root, with the bytes in
hexadecimal on standard input: it gives up its rights for the user's, and prints the
processes whose memory it could read, and those where it found the bytes, as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the user saw.

    Attributes:
        readable: Processes whose memory it could read.
        matching: Those of them that hold the bytes.
    """

    readable: frozenset[int]
    matching: frozenset[int]


def read(user: int, processes: Collection[int], sought: bytes) -> Found:
    """Become a user in another process, and look there."""
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "support.memory_reader"),
            *map(str, (user, *processes)),
        ],
        input=sought.hex(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return Found(
        readable=frozenset(said["readable"]), matching=frozenset(said["matching"])
    )


def main(user: int, processes: Collection[int], sought: bytes) -> None:
    """Give up all rights but a user's, and look."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    parts = {process: list(_parts(process)) for process in processes}
    readable = [process for process, found in parts.items() if found]
    matching = [one for one in readable if any(sought in part for part in parts[one])]
    json.dump({"readable": readable, "matching": matching}, sys.stdout)


def _parts(process: int) -> Iterator[bytes]:
    """What of a process's memory can be read."""
    folder = Path(f"/proc/{process}")
    try:
        maps = (folder / "maps").read_text().splitlines()
        with (folder / "mem").open("rb", buffering=0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if rights[0] != "r" or "w" not in rights:
                    continue
                start, end = (int(number, 16) for number in span.split("-"))
                memory.seek(start)
                yield memory.read(end - start)
    except OSError:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(one) for one in sys.argv[2:]], bytes.fromhex(input()))
