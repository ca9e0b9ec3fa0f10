"""Requests to one bucket of S3: how they are made, tried again and understood.

Not here: what an object store promises (``s3.store``), uploads (``s3.upload``) and
bodies that break off (``resumed_read``).
"""

import base64
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeVar

from botocore.config import Config

from cloud_adapters.net import aws_session
from cloud_adapters.storage.request_count import note_request
from cloud_adapters.storage.retry import Retry, seconds_left
from cloud_adapters.storage.s3 import errors as s3_errors
from federation.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreUnavailable,
)
from federation.protocols import ObjectInfo

# Metadata that the store adds; they are fields of ObjectInfo, not of its metadata.
PUT_ID = "crossfed-put-id"
CRC32C = "crossfed-crc32c"
SHA256 = "crossfed-sha256"

CONNECT_SECONDS = 5
READ_SECONDS = 60
HASTY_SECONDS = 5  # The same for both, where little time is left for an attempt.
NUM_CONNECTIONS = 32

# What the service says in every answer to an operation that went well.
_ALWAYS_THERE = {
    "complete_multipart_upload": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "get_object": ("ETag", "ContentLength"),
    "head_object": ("ETag", "ContentLength"),
    "list_objects_v2": ("IsTruncated",),
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
}

Answer = Mapping[str, Any]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSideEncryption:
    """How the service encrypts what it stores.

    Attributes:
        kind: ``bucket``: as the bucket is configured; ``AES256``: with keys of S3;
            ``aws:kms``: with a key of AWS KMS.
        kms_key: ARN or alias of that key; None for the account's own ``aws/s3``.
    """

    kind: Literal["bucket", "AES256", "aws:kms"] = "bucket"
    kms_key: str | None = None

    def __post_init__(self) -> None:
        """Check that a key comes with its kind.

        Raises:
            ValueError: There is a key, and the kind is another than ``aws:kms``.
        """
        if self.kms_key is not None and self.kind != "aws:kms":
            raise ValueError(f"a KMS key goes with 'aws:kms', not with {self.kind!r}")

    def parameters(self) -> Answer:
        """What to add to each request that makes an object."""
        if self.kind == "bucket":
            return {}
        if self.kind == "AES256":
            return {"ServerSideEncryption": "AES256"}
        # A bucket key spares one request to KMS per object.
        asked = {"ServerSideEncryption": "aws:kms", "BucketKeyEnabled": True}
        return asked if self.kms_key is None else {**asked, "SSEKMSKeyId": self.kms_key}


class Clients:
    """Clients of one service, whose waits are bounded and that never try again.

    A client's timeouts hold for all its requests. So there are two: one with the time
    that a healthy service may need, and one for attempts that begin late, which must
    not hang beyond the deadline of their call. The second is made when it is needed.
    """

    def __init__(
        self, *, endpoint_url: str | None, region: str | None, given: Any = None
    ) -> None:
        """Make the first client.

        Credentials come from the library's own chain: environment, profile, role. Both
        clients share them.

        Args:
            endpoint_url: URL of a service other than Amazon's.
            region: By default that of the profile.
            given: A client to use for every attempt instead, whose own retries are off.

        Raises:
            NotAuthenticated: The profile that the environment names is not there.
            StoreUnavailable: Endpoint or region are not of a valid form.
        """
        doing = (
            f"open {endpoint_url or 'S3'} in the region {region or 'of the profile'}"
        )
        self._endpoint_url = endpoint_url
        self._lock = threading.Lock()
        self.patient = self._hasty = given
        if given is not None:
            return
        try:
            self._session = aws_session.new_session()
            self._region = region or self._session.region_name or "us-east-1"
            self.patient = self._client(CONNECT_SECONDS, READ_SECONDS)
        except Exception as error:
            if isinstance(error, ValueError):
                raise StoreUnavailable(f"cannot {doing}: {error}") from error
            raise s3_errors.translate(error, doing) from error

    def client(self) -> Any:
        """The one for an attempt that begins now."""
        if seconds_left() >= CONNECT_SECONDS + READ_SECONDS:
            return self.patient
        with self._lock:
            if self._hasty is None:
                self._hasty = self._client(HASTY_SECONDS, HASTY_SECONDS)
            return self._hasty

    def _client(self, connect_seconds: float, read_seconds: float) -> Any:
        return self._session.client(
            "s3",
            endpoint_url=self._endpoint_url,
            region_name=self._region,
            config=_config(self._endpoint_url, connect_seconds, read_seconds),
        )

    def close(self) -> None:
        """End the connections of both."""
        self.patient.close()
        with self._lock:
            if self._hasty is not None:
                self._hasty.close()


def _config(
    endpoint_url: str | None, connect_seconds: float, read_seconds: float
) -> Config:
    return Config(
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        # Only Retry counts attempts.
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=NUM_CONNECTIONS,
        tcp_keepalive=True,
        signature_version="s3v4",
        # Checked here, with CRC32C, for services that know no other as well.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": "auto" if endpoint_url is None else "path",
            # TLS and CRC32C guard what is sent; a third hash would cost the most.
            "payload_signing_enabled": (endpoint_url or "").startswith("http://"),
        },
        user_agent_extra="crossfed",
    )


@dataclass(slots=True, kw_only=True)
class S3Calls:
    """One bucket and prefix, and how requests to it are made.

    Attributes:
        clients: Clients of boto3; used by many threads.
        bucket: Its name.
        prefix: Before every key: empty, or ends with ``/``.
        retry: How often to try.
        encryption: Encryption of new objects.
        owner: Account number that the bucket must belong to; None for any.
    """

    clients: Clients
    bucket: str
    prefix: str
    retry: Retry
    encryption: ServerSideEncryption
    owner: str | None = None
    _bucket_seen: bool = field(default=False, init=False)

    @property
    def client(self) -> Any:
        """The client that has time."""
        return self.clients.patient

    def where(self, key: str = "") -> str:
        """The URL of an object, for messages."""
        return f"s3://{self.bucket}/{self.prefix}{key}"

    def once(self, operation: str, doing: str, **parameters: Any) -> Answer:
        """Make one request.

        Args:
            operation: Method of the client.
            doing: What for, and where; for messages.
            **parameters: Parameters of the operation, the bucket aside.

        Raises:
            StoreError: It failed; ``s3_errors`` says which one when.
        """
        if self.owner is not None:
            parameters["ExpectedBucketOwner"] = self.owner
        request = getattr(self.clients.client(), operation)
        note_request()
        answer: Answer = self.understand(
            doing, lambda: request(Bucket=self.bucket, **parameters)
        )
        self._bucket_seen = True
        self._check_answer(operation, doing, answer)
        return answer

    def _check_answer(self, operation: str, doing: str, answer: Answer) -> None:
        """Take no empty answer for a short one: an end of all objects, for example."""
        try:
            check_said(doing, answer, _ALWAYS_THERE.get(operation, ()))
            if answer.get("IsTruncated"):
                check_said(doing, answer, ("NextContinuationToken",))
        except StoreError:
            if "Body" in answer:
                answer["Body"].close()
            raise

    def understand(self, doing: str, request: Callable[[], _Result]) -> _Result:
        """Do something with the client or its streams, and translate what it raises."""
        try:
            return request()
        except s3_errors.FAILURES as error:
            if s3_errors.code_of(error) == "NoSuchKey":
                self._bucket_seen = True
            raise s3_errors.translate(error, doing) from error

    def call(self, operation: str, doing: str, **parameters: Any) -> Answer:
        """Make a request, and make it again while that may help."""
        return self.retry.call(lambda _: self.once(operation, doing, **parameters))

    def head(self, key: str) -> ObjectInfo:
        """Ask for all that is known of an object.

        Raises:
            ObjectNotFound: There is no such object.
        """
        return info_of(key, self.retry.call(lambda _: self.head_once(key)))

    def head_once(self, key: str) -> Answer:
        """Ask once; an answer without a body is followed by a question with one."""
        doing = f"look at {self.where(key)}"
        try:
            return self.once(
                "head_object", doing, Key=self.prefix + key, ChecksumMode="ENABLED"
            )
        except StoreError as error:
            self._explain(key, doing, error)
            raise

    def _explain(self, key: str, doing: str, error: StoreError) -> None:
        """Raise what is behind a failed HEAD, which has a status and no words.

        An object that is not there is the common case and costs no second request
        once the bucket has been seen.
        """
        if error.temporary or not s3_errors.code_of(error.__cause__).isdecimal():
            return
        if isinstance(error, ObjectNotFound) and self._bucket_seen:
            return
        try:
            self.once("get_object", doing, Key=self.prefix + key, Range="bytes=0-0")
        except StoreForbidden as forbidden:
            self.check_absent(key, forbidden)
            raise

    def check_absent(self, key: str, forbidden: StoreForbidden) -> None:
        """Find out whether a forbidden object is just not there.

        Without the right to list the whole bucket, S3 says 403 of a key that is not
        taken; but who may list the key's own prefix can see whether it is.

        Raises:
            ObjectNotFound: The listing shows that there is none.
        """
        name = self.prefix + key
        try:
            answer = self.once(
                "list_objects_v2", f"list {self.where(key)}", Prefix=name, MaxKeys=1
            )
        except StoreError:
            return
        # Keys come in order: the key itself would be the first of its own prefix.
        if all(entry["Key"] != name for entry in answer.get("Contents", ())):
            raise ObjectNotFound(f"there is no {self.where(key)}") from forbidden


def check_said(doing: str, said: Answer, names: Iterable[str]) -> None:
    """Check that the service says what nothing can be done without.

    An ETag that is empty is none: as a version it would be that of every object.

    Raises:
        StoreUnavailable: It does not.
    """
    for name in names:
        if said.get(name) is None or said[name] in ("", '""'):
            raise s3_errors.UNCLEAR.told(doing, f"no {name} in its answer")


def info_of(key: str, answer: Answer) -> ObjectInfo:
    """What an answer to HEAD or GET says of the whole object."""
    metadata = dict(answer.get("Metadata", {}))
    metadata.pop(PUT_ID, None)
    crc32c = metadata.pop(CRC32C, None)
    return ObjectInfo(
        key=key,
        size=size_of(answer),
        version=version_of(answer),
        crc32c=_crc32c_of(answer) if crc32c is None else crc32c,
        sha256=metadata.pop(SHA256, None),
        metadata=metadata,
        updated=updated_of(answer),
    )


def size_of(answer: Answer) -> int:
    """Bytes of the whole object, also where the answer holds a range of it."""
    _, _, total = answer.get("ContentRange", "").partition("/")
    return int(total) if total.isdecimal() else int(answer["ContentLength"])


def version_of(answer: Answer) -> str:
    """The ETag, without the quotes that belong to its form in HTTP."""
    return str(answer["ETag"]).strip('"')


def if_match(version: str | None) -> Answer:
    """The condition that an object is of this version."""
    return {} if version is None else {"IfMatch": f'"{version}"'}


def updated_of(answer: Answer) -> float | None:
    """When the object was written, in seconds since 1970."""
    when = answer.get("LastModified")
    return when.timestamp() if isinstance(when, datetime) else None


def _crc32c_of(answer: Answer) -> str | None:
    """The service's own CRC32C; None unless it is one of the whole content."""
    encoded = answer.get("ChecksumCRC32C", "")
    if not encoded or "-" in encoded or answer.get("ChecksumType") == "COMPOSITE":
        return None
    try:
        return base64.b64decode(encoded, validate=True).hex()
    except ValueError:
        return None


def encode_crc32c(checksum: str) -> str:
    """The form that S3 wants: base64 of the four bytes, the highest first."""
    return base64.b64encode(bytes.fromhex(checksum)).decode()
