"""An S3 on loopback: moto's, and what Amazon's enforces but moto does not.

Added here: CRC32C and SHA-256 of what arrives, the size and the checksum of a whole
multipart upload, If-Match on completing one, signatures in URLs, and one write at a
time (moto looks first and writes afterwards, so that two racers could both win).
"""

import base64
import contextlib
import hashlib
import importlib.machinery
import io
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import parse_qs, unquote
from urllib.request import Request, urlopen

import google_crc32c
from botocore.config import Config
from support.buckets import borrowed, quick_retry

from cloud_adapters.net.aws_session import new_session
from cloud_adapters.storage.s3.store import S3Store

REGION = "us-east-1"
ACCOUNT = "123456789012"
# Of the clients below, which alone sign URLs.
SECRET = "test-secret"  # noqa: S105 (of nothing)

_Environ = dict[str, Any]
_StartResponse = Callable[[str, list[tuple[str, str]]], Any]
App = Callable[[_Environ, _StartResponse], Iterable[bytes]]

# Of all servers of this process: moto keeps one set of buckets for all of them.
_numbers = itertools.count(1)

_BAD_DIGEST = "The CRC32C that you specified did not match the content received."


class S3Server:
    """A running server, and what it has been asked."""

    def __init__(self, url: str, requests: list[str]) -> None:
        self.url = url
        self.requests = requests
        self._client: Any = None

    def client(self) -> Any:
        """The one that all tests use: making one takes long."""
        self._client = self._client or client(self.url)
        return self._client

    def bucket(self) -> str:
        """Make a new bucket and return its name."""
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        self.client().create_bucket(Bucket=name)
        return name

    def enforce_policies(self, *, after: float = 0) -> None:
        """Hold requests against IAM, after so many; never if infinite."""
        request = Request(  # noqa: S310 (loopback)
            f"{self.url}/moto-api/reset-auth",
            data=f"{after:g}".encode(),
            headers={"Content-Type": "text/plain"},
        )
        urlopen(request).close()  # noqa: S310

    def store(self, prefix: str = "", **options: Any) -> S3Store:
        """A store in a bucket of its own, whose waits take no time."""
        options = {"client": self.client(), "retry": quick_retry()} | options
        return S3Store(options.pop("bucket", None) or self.bucket(), prefix, **options)


def _as_is(app: App) -> App:
    return app


def named_store(url: str, endpoint: str) -> AbstractContextManager[S3Store]:
    """A store in a bucket of somebody's; it is empty before and after."""
    bucket = url.removeprefix("s3://").rstrip("/")
    return borrowed(S3Store(bucket, endpoint_url=endpoint or None))


def client(endpoint_url: str, **options: Any) -> Any:
    """A client as ``s3_calls.connect`` makes it, with test credentials."""
    credentials = {
        "aws_access_key_id": options.pop("key", "test-key"),
        "aws_secret_access_key": options.pop("secret", SECRET),
        "aws_session_token": options.pop("token", None),
    }
    config = Config(
        connect_timeout=5,
        read_timeout=options.pop("read_timeout", 5),
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        s3={"addressing_style": "path"},
        max_pool_connections=32,
    )
    return new_session().client(
        options.pop("service", "s3"),
        endpoint_url=endpoint_url,
        region_name=REGION,
        config=config,
        **credentials,
        **options,
    )


@contextlib.contextmanager
def serve(
    host: str = "127.0.0.1", port: int = 0, *, before: Callable[[App], App] = _as_is
) -> Iterator[S3Server]:
    """Run a server until the end of the block.

    Args:
        host: Where it listens.
        port: There; any that is free by default.
        before: Puts something before the server.
    """
    # moto computes CRC32C with this module if there is one, and CRC-32 if not.
    shim = types.ModuleType("crc32c")
    shim.crc32c = google_crc32c.value  # type: ignore[attr-defined]
    shim.__spec__ = importlib.machinery.ModuleSpec("crc32c", None)
    sys.modules.setdefault("crc32c", shim)
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 (a second to import)
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415

    log: list[str] = []
    app = before(_Strict(DomainDispatcherApplication(create_backend_app), log))
    server = make_server(host, port, app, threaded=True, request_handler=_handler())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3Server(f"http://{host}:{server.server_port}", log)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler() -> type[Any]:
    from moto.moto_server.werkzeug_app import MotoRequestHandler  # noqa: PLC0415

    class Quiet(MotoRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    return Quiet


class _Strict:
    """WSGI middleware that checks what moto takes on trust."""

    def __init__(self, app: App, log: list[str]) -> None:
        self._app = app
        self._log = log
        self._writing = threading.Lock()

    def __call__(self, environ: _Environ, start: _StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        self._log.append(f"{method} {environ.get('RAW_URI', environ['PATH_INFO'])}")
        if method not in {"PUT", "POST"}:
            return self._app(environ, start)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        refusal = _refusal(environ, body)
        with self._writing:
            refusal = refusal or _completing(environ)
            if refusal is not None:
                return refuse(start, *refusal)
            return list(self._app(environ, start))


def _refusal(environ: _Environ, body: bytes) -> tuple[str, str, str] | None:
    """What Amazon says to a body that is not what its headers say."""
    crc32c = environ.get("HTTP_X_AMZ_CHECKSUM_CRC32C")
    completes = (
        "uploadId" in environ["QUERY_STRING"] and environ["REQUEST_METHOD"] == "POST"
    )
    found = base64.b64encode(google_crc32c.value(body).to_bytes(4, "big")).decode()
    if crc32c is not None and not completes and crc32c != found:
        return "400 Bad Request", "BadDigest", _BAD_DIGEST
    sha256 = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "UNSIGNED-PAYLOAD")
    if len(sha256) == 64 and sha256 != hashlib.sha256(body).hexdigest():
        return "400 Bad Request", "XAmzContentSHA256Mismatch", "The digests differ."
    return None


def _completing(environ: _Environ) -> tuple[str, str, str] | None:
    """Conditions and checksums of a multipart upload that is being completed."""
    upload = parse_qs(environ["QUERY_STRING"]).get("uploadId")
    if upload is None or environ["REQUEST_METHOD"] != "POST":
        return None
    from moto.s3.models import s3_backends  # noqa: PLC0415

    backend = s3_backends[ACCOUNT]["aws"]
    _, bucket, key = unquote(environ["PATH_INFO"]).split("/", 2)
    wanted = environ.get("HTTP_IF_MATCH")
    existing = backend.get_object(bucket, key)
    if wanted is not None and existing is None:
        return "404 Not Found", "NoSuchKey", "There is no object to match."
    if wanted is not None and existing.etag.strip('"') != wanted.strip('"'):
        return "412 Precondition Failed", "PreconditionFailed", "If-Match"
    multipart = backend.get_bucket(bucket).multiparts.get(upload[0])
    return None if multipart is None else _refusal_of_whole(environ, multipart)


def _refusal_of_whole(environ: _Environ, multipart: Any) -> tuple[str, str, str] | None:
    whole = b"".join(multipart.parts[n].value for n in sorted(multipart.parts))
    if int(environ.get("HTTP_X_AMZ_MP_OBJECT_SIZE", len(whole))) != len(whole):
        return "400 Bad Request", "InvalidRequest", "The sizes differ."
    found = base64.b64encode(google_crc32c.value(whole).to_bytes(4, "big")).decode()
    if environ.get("HTTP_X_AMZ_CHECKSUM_CRC32C", found) != found:
        return "400 Bad Request", "BadDigest", _BAD_DIGEST
    return None


def refuse(
    start: _StartResponse, status: str, code: str, message: str
) -> Iterable[bytes]:
    start(status, [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]
