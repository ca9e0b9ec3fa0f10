"""An S3 with one bucket as a process: ``python -m faults.store_process HOST PORT``.

It keeps everything in memory, so that its death loses all objects: more than a real one
does. After SIGUSR1 its disk is full, after SIGUSR2 no longer.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from support import s3_server
from support.deployment import wait_for

BUCKET = "exchange"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": s3_server.SECRET,
}
FULL, ROOM = signal.SIGUSR1, signal.SIGUSR2
_PORT = 9000
_PR_SET_PDEATHSIG = 1
_TESTS = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class _Disk:
    is_full: bool = False


def table(address: str, *, threshold_mb: int) -> str:
    """The configuration of who uses it."""
    return f"""
[exchange]
url = "s3://{BUCKET}/fed"
endpoint = "{_endpoint(address)}"
region = "us-east-1"
threshold_mb = {threshold_mb}
"""


def start(address: str, *, where: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start one, and wait until it answers.

    Args:
        address: Where it listens.
        where: What its command is preceded by.
        log: File for what it says.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*where, sys.executable, "-m", __spec__.name, address, str(_PORT)],
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    wait_for(lambda: _answers(address), "the store")
    return process


def _answers(address: str) -> bool:
    try:
        s3_server.client(_endpoint(address)).head_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError):
        return False
    return True


def _endpoint(address: str) -> str:
    return f"http://{address}:{_PORT}"


def main(host: str, port: int) -> None:
    """Serve until SIGTERM, or until the tests that started it are gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    disk = _Disk()
    signal.signal(FULL, lambda *_: setattr(disk, "is_full", True))
    signal.signal(ROOM, lambda *_: setattr(disk, "is_full", False))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with s3_server.serve(host, port, before=lambda app: _filling(app, disk)) as made:
        made.client().create_bucket(Bucket=BUCKET)
        while True:
            signal.pause()


def _filling(app: s3_server.App, disk: _Disk) -> s3_server.App:
    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if not disk.is_full or environ["REQUEST_METHOD"] not in {"PUT", "POST"}:
            return app(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        # As MinIO says it.
        text = "Storage backend has reached its minimum free drive threshold."
        status = "507 Insufficient Storage"
        return s3_server.refuse(start, status, "XMinioStorageFull", text)

    return answer


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
