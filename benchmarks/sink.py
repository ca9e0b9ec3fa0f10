"""A server on this machine that takes and gives bytes and keeps none of them.

It speaks as much of S3 and of Cloud Storage's JSON API as transfers need, so objects
can be large and the disk counts for nothing. Over TLS, as the services are reached:
without it S3's clients sign bodies, which costs a SHA-256 that nobody pays otherwise.
"""

import base64
import contextlib
import datetime as dt
import functools
import ipaddress
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import google_crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

MIB = 1024 * 1024
SIZE = 128 * MIB  # Of an object that is read.
SMALL = 16 * 1024  # Of one under a key that ends in "small".
BLOCK = os.urandom(MIB)


class Sink(BaseHTTPRequestHandler):
    """What both services have in common."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def pieces(self) -> Iterator[memoryview]:
        """The request's body."""
        buffer = memoryview(bytearray(MIB))
        for size in self._lengths():
            left = size
            while left:
                num_bytes = self.rfile.readinto(buffer[: min(left, MIB)])  # type: ignore[attr-defined]
                yield buffer[:num_bytes]
                left -= num_bytes

    def _lengths(self) -> Iterator[int]:
        """Of the body; or of each of its chunks, as boto3 sends what it sums."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield int(self.headers.get("Content-Length") or 0)
            return
        while size := int(self.rfile.readline(), 16):
            yield size
            self.rfile.readline()
        self.rfile.readline()

    def body(self) -> bytes:
        return b"".join(bytes(piece) for piece in self.pieces())

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def size(self) -> int:
        """Of the object that the path names: ``small``, ``3-gib``, or any other."""
        name = urlsplit(self.path).path
        if found := re.search(r"(\d+)-gib$", name):
            return int(found[1]) * 1024 * MIB
        return SMALL if name.endswith("small") else SIZE

    def give(self, **headers: str) -> None:
        """Answer with an object, or a range of one."""
        size, found = self.size(), None
        if "Range" in self.headers:
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"])
        first, last = 0, size - 1
        if found is not None:
            first, last = int(found[1]), min(int(found[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send_response(200 if found is None else 206)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        while first <= last:
            at = first % MIB
            piece = memoryview(BLOCK)[at : at + last - first + 1]
            self.wfile.write(piece)
            first += len(piece)


def encoded(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


@functools.cache
def crc_of(size: int) -> str:
    """CRC32C of an object that is given."""
    crc = 0
    for start in range(0, size, MIB):
        crc = google_crc32c.extend(crc, BLOCK[: size - start])
    return encoded(crc)


@functools.cache
def crc32_of(size: int) -> str:
    """The same of CRC-32, which boto3 takes by default."""
    crc = 0
    for start in range(0, size, MIB):
        crc = zlib.crc32(BLOCK[: size - start], crc)
    return encoded(crc)


class S3Sink(Sink):
    """Uploads in one request or in parts, reads, and looks at an object."""

    def do_PUT(self) -> None:
        for _ in self.pieces():
            pass
        self.answer(200, ETag='"0"')

    def do_POST(self) -> None:
        self.body()
        kind = "UploadId" if self.path.endswith("uploads") else "ETag"
        text = f"<R><Bucket>b</Bucket><Key>k</Key><{kind}>u</{kind}></R>"
        self.answer(200, text.encode())

    def do_DELETE(self) -> None:
        self.answer(204)

    def about(self) -> dict[str, str]:
        """What the service says: of checksums it has the writer's."""
        is_ours = "crossfed" in self.headers.get("User-Agent", "")
        kind, crc = ("crc32c", crc_of) if is_ours else ("crc32", crc32_of)
        return {
            "ETag": '"0"',
            "Last-Modified": "Sat, 21 Nov 2026 12:00:00 GMT",
            f"x-amz-checksum-{kind}": crc(self.size()),
            "x-amz-checksum-type": "FULL_OBJECT",
        }

    def do_GET(self) -> None:
        about = self.about()
        if "Range" in self.headers:  # Checksums are of whole objects.
            about = {n: v for n, v in about.items() if "checksum" not in n}
        self.give(**about)

    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in self.about().items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(self.size()))
        self.end_headers()


class GcsSink(Sink):
    """The same of the JSON API; what arrives is counted, since clients compare."""

    uploads: dict[str, tuple[int, int]] = {}  # noqa: RUF012 (one sink, one table)

    def do_POST(self) -> None:
        body = self.body()
        query = parse_qs(urlsplit(self.path).query)
        if query["uploadType"] == ["resumable"]:
            name = str(len(self.uploads))
            self.uploads[name] = (0, 0)
            scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
            where = f"{scheme}://{self.headers['Host']}/upload?upload_id={name}"
            self.answer(200, Location=where)
        else:
            content = body.split(b"\r\n\r\n", 2)[2].rsplit(b"\r\n--", 1)[0]
            self._object(len(content), encoded(google_crc32c.value(content)))

    def do_PUT(self) -> None:
        name = parse_qs(urlsplit(self.path).query)["upload_id"][0]
        size, crc = self.uploads[name]
        for piece in self.pieces():
            crc = google_crc32c.extend(crc, bytes(piece))
            size += len(piece)
        self.uploads[name] = (size, crc)
        found = re.search(r"/(\d+)$", self.headers["Content-Range"])
        if found and int(found[1]) == size:
            self._object(size, encoded(crc))
        else:
            self.answer(308, Range=f"bytes=0-{size - 1}")

    def do_GET(self) -> None:
        if "alt=media" not in self.path:
            self._object(self.size(), crc_of(self.size()))
            return
        self.give(
            X_Goog_Generation="1",
            X_Goog_Hash=f"crc32c={crc_of(self.size())}",
            X_Goog_Stored_Content_Length=str(self.size()),
        )

    def _object(self, size: int, crc: str) -> None:
        resource = {"name": "key", "size": str(size), "generation": "1", "crc32c": crc}
        self.answer(200, json.dumps(resource).encode(), Content_Type="application/json")


def make_certificate(folder: Path) -> None:
    """Write a certificate for this machine, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)


def serve(kind: str, folder: str) -> None:
    """Serve until standard input ends; the port goes to standard output."""
    handler = S3Sink if kind == "s3" else GcsSink
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if folder:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(folder) / "cert.pem", Path(folder) / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def sink(kind: str, *, tls: bool) -> Iterator[str]:
    """Run a sink in a process of its own; this one, and its children, trust it."""
    with tempfile.TemporaryDirectory() as folder:
        if tls:
            make_certificate(Path(folder))
            for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
                os.environ[name] = str(Path(folder) / "cert.pem")
        process = subprocess.Popen(
            [sys.executable, __file__, kind, folder if tls else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        scheme = "https" if tls else "http"
        try:
            yield f"{scheme}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait()
            process.stdout.close()


if __name__ == "__main__" and len(sys.argv) > 1:
    serve(*sys.argv[1:])
