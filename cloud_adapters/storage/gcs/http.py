"""Requests to Google Cloud Storage's JSON API: one at a time, never repeated here.

google-auth signs them, and renews a token that has run out. The layers of Google's
client above that are left aside for three reasons: attempts are counted once, in
``Retry``; bodies are read in large pieces, and what has arrived before a cut is kept;
the URL of an upload session, a permission by itself, gets into no exception.

Source: https://cloud.google.com/storage/docs/json_api/v1.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import google.auth
import google.auth.exceptions
import requests
import urllib3.exceptions
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.transport.requests import AuthorizedSession
from requests.adapters import HTTPAdapter

from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.request_count import note_request
from cloud_adapters.storage.retry import seconds_left
from federation.protocols import Buffer

DEFAULT_ENDPOINT = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0  # Between two pieces of an answer; less if a call's time is up.
NUM_CONNECTIONS = 32
READ_BYTES = 1024 * 1024  # What is taken from a socket at once.

_OK = frozenset({200})
_FAILURES = (
    google.auth.exceptions.GoogleAuthError,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    OSError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request.

    Attributes:
        doing: For messages: ``read gs://bucket/key``.
        method: HTTP method.
        url: Below the endpoint; or whole, of an upload session.
        params: Parameters of the query.
        headers: Besides those for authentication.
        body: The content.
        json: Instead of a body.
        ok: Statuses that are no failure.
        is_session: Whether the URL is an upload session's: it needs no token, so an
            upload outlives one, and its exceptions are not kept as causes.
        is_stream: Whether the answer's body is read later.
    """

    doing: str
    method: str
    url: str
    params: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None
    body: Buffer | None = None
    json: Mapping[str, Any] | None = None
    ok: Collection[int] = _OK
    is_session: bool = False
    is_stream: bool = False


class GcsHttp:
    """Connections to one endpoint."""

    def __init__(self, endpoint: str | None, credentials: Credentials | None) -> None:
        """Prepare; credentials are looked for at the first request.

        Args:
            endpoint: Instead of Google's own. To one without TLS goes no token,
                unless ``credentials`` are given.
            credentials: By default the environment's ("application default").
        """
        self.endpoint = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        self._credentials = credentials
        self._lock = threading.Lock()
        self._plain = _with_pool(requests.Session())
        self._authorized: requests.Session | None = None

    def credentials(self, doing: str) -> Credentials:
        """Return the credentials, found on the first call.

        Raises:
            NotAuthenticated: There are none.
        """
        with self._lock:
            if self._credentials is None:
                self._credentials = self._find_credentials(doing)
            return self._credentials

    def _find_credentials(self, doing: str) -> Credentials:
        if urlsplit(self.endpoint).scheme == "http":
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        with translated(doing):
            found: Credentials = google.auth.default(scopes=[SCOPE])[0]
        return found

    def send(self, ask: Ask) -> requests.Response:
        """Make a request.

        Raises:
            StoreError: There is no answer, or not one of ``ask.ok``.
        """
        session = self._plain if ask.is_session else self._session(ask.doing)
        note_request()
        with translated(ask.doing, keep_cause=not ask.is_session):
            response = session.request(
                ask.method,
                ask.url if ask.is_session else self.endpoint + ask.url,
                params=ask.params,
                # Of an empty view requests would make a chunked body.
                data=ask.body or None,
                json=ask.json,
                headers=ask.headers,
                timeout=(CONNECT_SECONDS, min(READ_SECONDS, seconds_left())),
                stream=ask.is_stream,
                allow_redirects=False,  # 308 is "continue" here, not a redirection.
            )
        if response.status_code not in ask.ok:
            with response:
                raise gcs_errors.of_answer(
                    response, ask.doing, is_session=ask.is_session
                )
        return response

    def _session(self, doing: str) -> requests.Session:
        credentials = self.credentials(doing)
        with self._lock:
            if self._authorized is None:
                session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
                self._authorized = _with_pool(session)
            return self._authorized

    def close(self) -> None:
        """End the connections."""
        self._plain.close()
        if self._authorized is not None:
            self._authorized.close()


def pieces(response: requests.Response, doing: str) -> Generator[bytes, None, None]:
    """Yield an answer's body as it was sent, and check its length.

    Raises:
        StoreUnavailable: It ended early; what was yielded until then is good.
    """
    with response, translated(doing):
        # read() would lose what came before a cut.
        while piece := response.raw.read1(READ_BYTES, decode_content=False):
            yield piece


def json_of(response: requests.Response, doing: str) -> dict[str, Any]:
    """Return an answer that is JSON.

    Raises:
        StoreUnavailable: It is something else.
    """
    with translated(doing):
        body = response.json()
    if not isinstance(body, dict):
        raise gcs_errors.UNCLEAR.told(doing, "its answer is not a JSON object")
    return body


def quoted(name: str) -> str:
    """Write an object's name as one segment of a path."""
    return quote(name, safe="~")


@contextlib.contextmanager
def translated(doing: str, *, keep_cause: bool = True) -> Iterator[None]:
    """Turn failures of connections and credentials into errors of ours."""
    try:
        yield
    except _FAILURES as error:
        translation = gcs_errors.of_exception(error, doing)
        raise translation from (error if keep_cause else None)


def _without_session(record: logging.LogRecord) -> bool:
    """Keep the URL of an upload session, a permission, out of urllib3's debug log."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            re.sub(r"upload_id=[^&\s]+", "upload_id=...", arg)
            if isinstance(arg, str)
            else arg
            for arg in record.args
        )
    return True


logging.getLogger("urllib3.connectionpool").addFilter(_without_session)


def _with_pool(session: requests.Session) -> requests.Session:
    adapter = HTTPAdapter(pool_maxsize=NUM_CONNECTIONS, max_retries=0)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session
