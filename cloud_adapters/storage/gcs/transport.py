"""The transport under Google's client: one attempt of each request, bounded in time.

google-cloud-storage makes the requests and reads the answers; google-auth signs them
and renews a token that has run out. What they cannot do is here or in ``store``, with
the test that fails with the library alone:

- ``Retry`` repeats requests, and not the library: it knows neither a Retry-After nor
  how often it has tried (``test_the_service_may_ask_for_long_waits``,
  ``test_attempts_are_bounded_and_counted_once``);
- a service may keep a part of a chunk, which ends the library's upload with a
  ValueError (``test_service_may_keep_a_part_of_a_chunk``);
- the URL of an upload session, a permission by itself, is in the library's exceptions
  and gets a token with each chunk (``test_no_secret_is_told``,
  ``test_upload_outlives_its_token``).
"""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import requests
from google.auth.credentials import Credentials
from google.auth.transport.requests import AuthorizedSession
from requests.adapters import HTTPAdapter

from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.request_count import note_request
from cloud_adapters.storage.retry import Retry, seconds_left
from federation.errors import CorruptObject, StoreError, StoreUnavailable
from federation.protocols import Buffer

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0  # Between two pieces of an answer; less if a call's time is up.
NUM_CONNECTIONS = 32

_OK = frozenset({200, 201, 204, 206})
_GO_ON = 308
_BEYOND = 416  # The range begins behind the object's end.


class _Call(threading.local):
    """A call of a store, which makes its requests in one thread.

    Attributes:
        doing: For messages: ``read gs://bucket/key``.
        upload_url: The upload session that it began last.
        crc32c: See ``Transport.doing``.
    """

    doing = "ask Cloud Storage"
    upload_url = ""
    crc32c: Callable[[], str] | None = None


class Transport:
    """Connections to one endpoint; its ``request`` is what Google's client calls."""

    def __init__(self, endpoint: str, credentials: Credentials, retry: Retry) -> None:
        """Prepare.

        Args:
            endpoint: The beginning of every URL.
            credentials: Sign every request that is not of an upload session.
            retry: How often to try each request of an upload session; other requests
                are made once.
        """
        authorized = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        self._authorized = _prepared(authorized, endpoint)
        self._plain = _prepared(requests.Session(), endpoint)
        self._retry = retry
        self._call = _Call()

    @contextlib.contextmanager
    def doing(self, what: str, crc32c: Callable[[], str] | None) -> Iterator[None]:
        """Name what the requests in a block are for, and translate what fails there.

        Args:
            what: For messages: ``read gs://bucket/key``.
            crc32c: Returns the checksum of a whole content that is uploaded, in the
                service's form, when its last chunk is sent: the service compares.
        """
        before, self._call.doing = self._call.doing, what
        self._call.crc32c = crc32c
        try:
            with gcs_errors.translated(what):
                yield
        finally:
            self._call.doing, self._call.crc32c = before, None

    def request(
        self,
        method: str,
        url: str,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        stream: bool = False,
        timeout: object = None,  # noqa: ARG002 -- that of the library, for all requests
    ) -> requests.Response:
        """Make a request.

        Args:
            method: HTTP method.
            url: The whole URL.
            data: The body.
            headers: Besides those for authentication.
            stream: Whether the body of the answer is read later.
            timeout: Not used.

        Raises:
            StoreError: There is no answer, or one that is a failure.
        """
        if "upload_id=" in url:
            return self._send_chunk(url, data, headers or {})
        if "uploadType=resumable" in url:
            self._call.upload_url = ""
            # An abandoned session leaves no object: repeating is safe.
            answer = self._retry.call(lambda _: self._once(method, url, data, headers))
            self._call.upload_url = answer.headers.get("Location", "")
            return answer
        return self._once(method, url, data, headers, stream=stream)

    def _once(
        self,
        method: str,
        url: str,
        data: Any,
        headers: Mapping[str, str] | None,
        *,
        stream: bool = False,
        is_chunk: bool = False,
    ) -> requests.Response:
        doing = self._call.doing
        note_request()
        try:
            answer = (self._plain if is_chunk else self._authorized).request(
                method,
                url,
                # Of an empty view requests would make a chunked body.
                data=data or None,
                headers=headers,
                timeout=(CONNECT_SECONDS, min(READ_SECONDS, seconds_left())),
                stream=stream,
                allow_redirects=False,  # 308 is "continue" here, not a redirection.
            )
        except gcs_errors.FAILURES as error:
            failure = gcs_errors.of_exception(error, doing)
            raise failure from (None if is_chunk else error)
        status = answer.status_code
        if not (
            status in _OK
            or (is_chunk and status == _GO_ON)
            or (stream and status == _BEYOND)
        ):
            with answer:
                raise gcs_errors.of_answer(answer, doing, is_session=is_chunk)
        if status in _OK and not stream and answer.content:
            self._check_json(answer)
        return answer

    def _check_json(self, answer: requests.Response) -> None:
        with gcs_errors.translated(self._call.doing):
            said = answer.json()
        if not isinstance(said, dict):
            raise gcs_errors.UNCLEAR.told(
                self._call.doing, "its answer is not a JSON object"
            )

    def _send_chunk(
        self, url: str, content: Buffer, headers: Mapping[str, str]
    ) -> requests.Response:
        """Send a chunk until the service has all of it, or has made the object."""
        if not headers["content-range"].endswith("/*") and self._call.crc32c:
            headers = {**headers, "x-goog-hash": f"crc32c={self._call.crc32c()}"}
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(.+)", headers["content-range"])
        if span is None:  # The content has ended with the chunk before.
            return self._retry.call(
                lambda _: self._once("PUT", url, None, headers, is_chunk=True)
            )
        first, end, total = int(span[1]), int(span[2]) + 1, span[3]
        begin, view = first, memoryview(content)

        def attempt(_: int) -> requests.Response:
            nonlocal begin
            while True:
                # What the service has already, it passes over.
                ours = {"content-range": f"bytes {begin}-{end - 1}/{total}"}
                rest = view[begin - first :]
                answer = self._once(
                    "PUT", url, rest, {**headers, **ours}, is_chunk=True
                )
                arrived = _num_arrived(answer)
                if answer.status_code != _GO_ON or arrived == end:
                    return answer
                if not begin < arrived < end:
                    raise StoreUnavailable(
                        f"cannot {self._call.doing}: the service took nothing of a "
                        f"chunk (it has {arrived} bytes, of {begin} to {end}); put the "
                        "object again",
                        temporary=True,
                    )
                begin = arrived

        try:
            return self._retry.call(attempt)
        except CorruptObject as error:
            # A chunk before this one may be at fault: sending it again is no use.
            raise CorruptObject(str(error)) from error.__cause__

    def abandon_upload(self) -> None:
        """Let the service drop what it has received of this thread's last upload."""
        if not self._call.upload_url:
            return
        # One attempt, which may not hang for long: the caller waits for its error.
        once = replace(self._retry, deadline_seconds=0.0)
        try:
            once.call(
                lambda _: self._once(
                    "DELETE", self._call.upload_url, None, None, is_chunk=True
                )
            )
        except StoreError:
            return  # Or it ends by itself after a week, and nothing shows it.

    def close(self) -> None:
        """End the connections."""
        self._plain.close()
        self._authorized.close()


def _num_arrived(answer: requests.Response) -> int:
    """Read how many bytes of a content the service has."""
    found = re.fullmatch(r"bytes=0-(\d+)", answer.headers.get("Range", ""))
    return int(found[1]) + 1 if found else 0


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


def _prepared(session: requests.Session, endpoint: str) -> requests.Session:
    session.mount(endpoint, HTTPAdapter(pool_maxsize=NUM_CONNECTIONS, max_retries=0))
    # The environment's proxies and authorities are looked up once: to do so for each
    # request takes a quarter of the CPU time of a small one.
    found = session.merge_environment_settings(endpoint, {}, None, None, None)
    session.proxies, session.verify = found["proxies"], found["verify"]
    session.trust_env = False
    return session
