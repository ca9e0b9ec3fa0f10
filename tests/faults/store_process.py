"""An S3 with one bucket as a process: ``python -m faults.store_process HOST PORT``.

It keeps everything in memory, so that its death loses all objects: more than a real one
does. After SIGUSR1 its disk is full, after SIGUSR2 no longer.
"""

import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from support import s3_server

BUCKET = "exchange"
FULL, ROOM = signal.SIGUSR1, signal.SIGUSR2


@dataclass(slots=True)
class _Disk:
    is_full: bool = False


def main(host: str, port: int) -> None:
    """Serve until SIGTERM."""
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
