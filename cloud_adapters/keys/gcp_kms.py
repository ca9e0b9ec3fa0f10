"""Keys that never leave Google Cloud KMS.

The context of a data key is Cloud KMS's additional authenticated data. The service
account needs cloudkms.cryptoKeyVersions.useToEncrypt to write and useToDecrypt to
read. Data keys are made here, from the system's generator, and wrapped there.

Checksums go with everything in both directions, as Google's guide to data integrity
asks: https://cloud.google.com/kms/docs/data-integrity-guidelines. A wrapped key holds
the name of the key that wrapped it, since the service does not tell a wrong key from
damage.

The requests are ours, two of them, and not google-cloud-kms's: that puts the plaintext
of data keys into its log records at the level DEBUG.
"""

import base64
import binascii
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import google.auth
import google_crc32c
import requests
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.transport.requests import AuthorizedSession

from cloud_adapters.keys.context import (
    DATA_KEY_BYTES,
    check_data_key,
    context_bytes,
    mark,
    unmark,
)
from cloud_adapters.storage.error_table import Meaning
from cloud_adapters.storage.gcs.errors import translated
from cloud_adapters.storage.retry import Retry, seconds_left
from federation.errors import (
    CorruptObject,
    KeyRefused,
    NotAuthenticated,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
)
from federation.protocols import DataKey

KIND = "gcp-kms"
DEFAULT_ENDPOINT = "https://cloudkms.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/cloudkms"

_NAME = re.compile(
    r"projects/[a-z0-9.:-]{1,100}/locations/[a-z0-9-]{1,63}/keyRings/[\w-]{1,63}"
    r"/cryptoKeys/[\w-]{1,63}"
)
_OK = 200
_MAX_WORDS = 300
CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0

# By the status of google.rpc.Code, which says more than that of HTTP.
STATUSES: Mapping[str, Meaning] = {
    "ABORTED": Meaning(StoreUnavailable, "try again later", is_temporary=True),
    "DEADLINE_EXCEEDED": Meaning(
        StoreUnavailable, "the service is slow: try again later", is_temporary=True
    ),
    "FAILED_PRECONDITION": Meaning(
        KeyRefused,
        "the key's version is disabled, destroyed or not yet ready: enable it (gcloud "
        "kms keys versions enable) and resume",
    ),
    "INTERNAL": Meaning(
        StoreUnavailable, "the service has an internal error", is_temporary=True
    ),
    "NOT_FOUND": Meaning(
        KeyRefused,
        "there is no such key, or Cloud KMS is not enabled in its project: correct "
        "storage.encryption.key",
    ),
    "PERMISSION_DENIED": Meaning(
        StoreForbidden,
        "these credentials may not use the key: grant "
        "roles/cloudkms.cryptoKeyEncrypterDecrypter on it",
    ),
    "RESOURCE_EXHAUSTED": Meaning(
        StoreThrottled, "the project's quota of requests is used up", is_temporary=True
    ),
    "UNAUTHENTICATED": Meaning(
        NotAuthenticated,
        "the service does not accept these credentials: sign in again (gcloud auth "
        "application-default login), or check the machine's service account",
    ),
    "UNAVAILABLE": Meaning(
        StoreUnavailable, "the service is unavailable", is_temporary=True
    ),
}
_DAMAGED = Meaning(
    CorruptObject, "its wrapped key was modified, or belongs to another object"
)
_REFUSED = Meaning(
    KeyRefused,
    "the service rejects the request: the key must be for symmetric encryption "
    "(purpose ENCRYPT_DECRYPT)",
)
_UNCLEAR = Meaning(
    StoreUnavailable,
    "the endpoint does not answer like Cloud KMS: check its URL, and any proxies in "
    "between",
    is_temporary=True,
)


class GcpKms:
    """A ``federation.protocols.KeyService`` over a key of Google Cloud KMS."""

    def __init__(
        self,
        key: str,
        *,
        endpoint: str | None = None,
        credentials: Credentials | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Use a key; nothing is asked yet.

        Args:
            key: ``projects/P/locations/L/keyRings/R/cryptoKeys/K``: its primary version
                wraps, every enabled one unwraps.
            endpoint: Instead of Google's own. To one without TLS goes no token,
                unless ``credentials`` are given.
            credentials: By default the environment's ("application default").
            retry: How often to try.

        Raises:
            ValueError: ``key`` is not the name of one.
        """
        if _NAME.fullmatch(key) is None:
            raise ValueError(
                f"{key!r} is not the name of a Cloud KMS key "
                "(projects/P/locations/L/keyRings/R/cryptoKeys/K)"
            )
        self._key = key
        self._endpoint = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        self._credentials = credentials
        self._retry = retry or Retry()
        self._lock = threading.Lock()
        self._session: requests.Session | None = None

    @property
    def name(self) -> str:
        """Which key."""
        return f"{KIND}:{self._key}"

    def generate(self, context: Mapping[str, str]) -> DataKey:
        """Make a new key for an object; see ``KeyService.generate``."""
        plaintext = secrets.token_bytes(DATA_KEY_BYTES)
        return DataKey(plaintext=plaintext, wrapped=self.wrap(plaintext, context))

    def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
        """Lock a key with the primary version; see ``KeyService.wrap``."""
        fields = _encoded("plaintext", check_data_key(plaintext))
        answer = self._call("encrypt", "wrap a data key", fields, context)
        verified = (
            "verifiedPlaintextCrc32c",
            "verifiedAdditionalAuthenticatedDataCrc32c",
        )
        if not all(answer.get(name) is True for name in verified):
            raise _UNCLEAR.told(
                f"wrap a data key with {self.name}", "checksums not verified"
            )
        blob = self._decoded(answer, "ciphertext", "wrap a data key")
        return mark(KIND, self._key.encode() + b"\0" + blob)

    def unwrap(self, wrapped: bytes, context: Mapping[str, str]) -> bytes:
        """Unlock a key with the version that locked it; see ``KeyService.unwrap``."""
        key, separator, blob = unmark(KIND, wrapped, self.name).partition(b"\0")
        if not separator or _NAME.fullmatch(key.decode("ascii", "replace")) is None:
            raise CorruptObject(f"this is not a key wrapped by {self.name}")
        if key.decode() != self._key:
            raise KeyRefused(
                f"the object was encrypted with the key {key.decode()}, but the job "
                f"has {self._key} in storage.encryption.key"
            )
        fields = _encoded("ciphertext", blob)
        answer = self._call("decrypt", "unwrap a data key", fields, context)
        plaintext = self._decoded(answer, "plaintext", "unwrap a data key")
        try:
            return check_data_key(plaintext)
        except ValueError as error:
            raise CorruptObject(f"{self.name} gave no data key: {error}") from error

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            if self._session is not None:
                self._session.close()

    def _call(
        self,
        method: str,
        verb: str,
        fields: Mapping[str, str],
        context: Mapping[str, str],
    ) -> Mapping[str, Any]:
        doing = f"{verb} with {self.name}"
        about = _encoded("additionalAuthenticatedData", context_bytes(context))

        def once(_attempt: int) -> Mapping[str, Any]:
            with translated(doing):
                response = self._connected().post(
                    f"{self._endpoint}/v1/{self._key}:{method}",
                    json={**fields, **about},
                    timeout=(CONNECT_SECONDS, min(READ_SECONDS, seconds_left())),
                    allow_redirects=False,
                )
            return _answer(response, doing, is_decrypt=method == "decrypt")

        return self._retry.call(once)

    def _connected(self) -> requests.Session:
        with self._lock:
            if self._session is None:
                credentials = self._credentials or self._find_credentials()
                self._session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
            return self._session

    def _find_credentials(self) -> Credentials:
        if urlsplit(self._endpoint).scheme == "http":
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        found: Credentials = google.auth.default(scopes=[SCOPE])[0]
        return found

    def _decoded(self, answer: Mapping[str, Any], name: str, verb: str) -> bytes:
        doing = f"{verb} with {self.name}"
        try:
            content = base64.b64decode(answer[name], validate=True)
            checksum = int(answer[f"{name}Crc32c"])
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise _UNCLEAR.told(doing, f"no {name}") from None
        if google_crc32c.value(content) != checksum:
            raise _UNCLEAR.told(doing, f"the checksum of the {name} does not match")
        return content


def _encoded(name: str, content: bytes) -> Mapping[str, str]:
    """Encode bytes for the API, with their checksum."""
    return {
        name: base64.b64encode(content).decode(),
        f"{name}Crc32c": str(google_crc32c.value(content)),
    }


def _answer(
    response: requests.Response, doing: str, *, is_decrypt: bool
) -> Mapping[str, Any]:
    try:
        body = response.json()
    except requests.RequestException:
        body = None
    if not isinstance(body, dict):
        raise _UNCLEAR.told(doing, f"status {response.status_code}, not JSON")
    if response.status_code == _OK:
        return body
    raise _refusal(
        response.status_code, body.get("error"), doing, is_decrypt=is_decrypt
    )


def _refusal(
    http_status: int, error: Any, doing: str, *, is_decrypt: bool
) -> StoreError:
    fields = error if isinstance(error, dict) else {}
    status = str(fields.get("status", ""))
    if status == "INVALID_ARGUMENT":
        meaning = _DAMAGED if is_decrypt else _REFUSED
    else:
        meaning = STATUSES.get(status, _UNCLEAR)
    words = " ".join(str(fields.get("message", "")).split())[:_MAX_WORDS]
    return meaning.told(doing, f"{http_status} {status} {words}")
