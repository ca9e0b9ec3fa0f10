"""One bucket of Google Cloud Storage, and single requests to it by Google's client."""

import base64
import threading
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar
from urllib.parse import urlsplit

import google.auth
import requests
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud.storage import Blob, Bucket, Client

from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.gcs.transport import Transport
from cloud_adapters.storage.retry import Retry
from federation.errors import ObjectNotFound, StoreError, StoreForbidden
from federation.protocols import ObjectInfo

DEFAULT_ENDPOINT = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

# Metadata that the store adds; they are no metadata of the writer's.
PUT_ID = "crossfed-put-id"
SHA256 = "crossfed-sha256"

_Result = TypeVar("_Result")


class GcsCalls:
    """One bucket, and how requests to it are made; threads may share it."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None,
        credentials: Credentials | None,
        retry: Retry,
    ) -> None:
        """Prepare; the client is made, and credentials are found, at the first request.

        Args:
            bucket: Its name.
            endpoint: Instead of Google's own. To one without TLS goes no token, unless
                ``credentials`` are given.
            credentials: By default the environment's ("application default").
            retry: How often to try.
        """
        self.bucket_name = bucket
        self.retry = retry
        self._endpoint = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        self._credentials = credentials
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._transport: Transport | None = None

    def _connected(self) -> tuple[Client, Transport]:
        with self._lock:
            if self._client is None or self._transport is None:
                credentials = self._credentials or self._find_credentials()
                self._transport = Transport(self._endpoint, credentials, self.retry)
                self._client = Client(
                    project=None,
                    credentials=credentials,
                    client_options={"api_endpoint": self._endpoint},
                    _http=self._transport,
                )
                # It would look at the bucket, which needs a permission of its own.
                self._client._bucket_metadata_cache = None  # noqa: SLF001
            return self._client, self._transport

    def _find_credentials(self) -> Credentials:
        if urlsplit(self._endpoint).scheme == "http":
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        found: Credentials = google.auth.default(scopes=[SCOPE])[0]
        return found

    def once(
        self,
        doing: str,
        request: Callable[[Bucket], _Result],
        *,
        crc32c: Callable[[], str] | None = None,
    ) -> _Result:
        """Make a request with the library.

        Args:
            doing: For messages: ``read gs://bucket/key``.
            request: Called with the bucket.
            crc32c: See ``Transport.doing``.

        Raises:
            StoreError: It failed; see ``gcs.errors``.
        """
        with gcs_errors.translated(doing):
            client, transport = self._connected()
        with transport.doing(doing, crc32c):
            return request(client.bucket(self.bucket_name))

    def call(self, doing: str, request: Callable[[Bucket], _Result]) -> _Result:
        """Make a request, and make it again while that may help."""
        return self.retry.call(lambda _: self.once(doing, request))

    def get_media(
        self, name: str, query: str, headers: dict[str, str], doing: str
    ) -> requests.Response:
        """Ask once for bytes of an object, to be read from the answer."""

        def request(bucket: Bucket) -> requests.Response:
            url = f"{self._endpoint}/storage/v1{Blob(name, bucket).path}?alt=media"
            _, transport = self._connected()
            return transport.request("GET", url + query, headers=headers, stream=True)

        return self.once(doing, request)

    def lookup(self, name: str, doing: str, generation: int | None = None) -> Blob:
        """Return what the service knows of an object; one attempt.

        Raises:
            ObjectNotFound: There is no such object.
            ObjectChanged: It is not of ``generation``.
            StoreError: See ``gcs.errors``.
        """

        def request(bucket: Bucket) -> Blob:
            blob = bucket.blob(name)
            blob.reload(if_generation_match=generation, retry=None)
            return blob

        try:
            return self.once(doing, request)
        except StoreForbidden as error:
            raise self.told_apart(name, doing, error) from error

    def told_apart(self, name: str, doing: str, error: StoreForbidden) -> StoreError:
        """Say whether a refused object is only missing.

        Without permission to list the whole bucket, the answer for a missing object is
        403. With permission to list a prefix, a listing shows whether it is missing.

        Args:
            name: Name of the object.
            doing: For messages.
            error: The refusal.

        Returns:
            ``ObjectNotFound`` if there is no such object; otherwise ``error``.
        """
        try:
            found = self.once(
                doing,
                # The first name with this beginning is this name, if it is there.
                lambda bucket: list(
                    bucket.list_blobs(
                        prefix=name, max_results=1, fields="items(name)", retry=None
                    )
                ),
            )
        except StoreError:
            return error
        if found and found[0].name == name:
            return error
        return ObjectNotFound(f"cannot {doing}: there is no such object")

    def delete(self, name: str, doing: str, generation: int | None = None) -> None:
        """Remove an object, of a generation or of any; also if there is none."""
        try:
            self.call(
                doing,
                lambda bucket: bucket.delete_blob(
                    name, if_generation_match=generation, retry=None
                ),
            )
        except ObjectNotFound:
            return  # Never there, or the answer to an earlier attempt was lost.

    def abandon_upload(self) -> None:
        """See ``Transport.abandon_upload``."""
        self._connected()[1].abandon_upload()

    def close(self) -> None:
        """End the connections."""
        if self._transport is not None:
            self._transport.close()


def info_of(key: str, blob: Blob) -> ObjectInfo:
    """Read an object's information from the library's.

    Raises:
        StoreUnavailable: The service does not say what is needed.
    """
    doing = f"look at {key!r}"
    metadata = blob.metadata or {}
    updated: datetime | None = blob.updated
    return ObjectInfo(
        key=key,
        size=number_in(blob, "size", doing),
        version=str(number_in(blob, "generation", doing)),
        crc32c=None if blob.crc32c is None else decoded(blob.crc32c),
        sha256=metadata.get(SHA256),
        metadata={k: v for k, v in metadata.items() if k not in {PUT_ID, SHA256}},
        updated=None if updated is None else updated.timestamp(),
    )


def number_in(blob: Blob, name: str, doing: str) -> int:
    """Read a required number: a size, or a generation.

    Raises:
        StoreUnavailable: The service does not say it.
    """
    try:
        number = getattr(blob, name)
    except ValueError:
        number = None
    if not isinstance(number, int) or number < 0:
        raise gcs_errors.UNCLEAR.told(doing, f"no {name} in its answer")
    return number


def encoded(crc32c: str) -> str:
    """Write a checksum in the service's form: base64 of 4 bytes."""
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


def decoded(crc32c: str) -> str:
    """Write a checksum of the service as 8 hexadecimal digits."""
    return base64.b64decode(crc32c).hex()
