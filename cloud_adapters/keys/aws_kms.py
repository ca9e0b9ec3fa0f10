"""Keys that never leave AWS KMS.

The context of a data key is KMS's encryption context: it is authenticated, and
CloudTrail shows it unencrypted with each use of the key. The role needs
kms:GenerateDataKey to write, kms:Decrypt to read and kms:Encrypt to rewrap.

Source: AWS KMS API reference, GenerateDataKey, Encrypt and Decrypt.
"""

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from botocore.config import Config
from botocore.exceptions import ClientError

from cloud_adapters.keys.context import check_data_key, mark, unmark
from cloud_adapters.net import aws_session
from cloud_adapters.storage.error_table import Meaning
from cloud_adapters.storage.retry import Retry
from cloud_adapters.storage.s3 import errors as s3_errors
from federation.errors import (
    CorruptObject,
    KeyRefused,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
)
from federation.protocols import DataKey

KIND = "aws-kms"

_ARN = re.compile(
    r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):\d{12}:(key|alias)/[\w/-]+"
)

_DISABLED = Meaning(
    KeyRefused,
    "the key is disabled, about to be deleted or not yet ready: enable it (aws kms "
    "enable-key) and resume",
)
_BUSY = Meaning(
    StoreUnavailable,
    "the service has an internal error: try again later, and see its status page",
    is_temporary=True,
)
CODES: Mapping[str, Meaning] = {
    "AccessDeniedException": Meaning(
        StoreForbidden,
        "these credentials may not use the key: the role's policy or the key's must "
        "allow kms:GenerateDataKey, kms:Decrypt and kms:Encrypt",
    ),
    "DependencyTimeoutException": _BUSY,
    "DisabledException": _DISABLED,
    "IncorrectKeyException": Meaning(
        KeyRefused,
        "the object was written with a different key: set that one in "
        "storage.encryption.key",
    ),
    "InvalidCiphertextException": Meaning(
        CorruptObject, "its wrapped key was modified, or belongs to another object"
    ),
    "InvalidArnException": Meaning(
        KeyRefused, "it is not the ARN of a key: correct storage.encryption.key"
    ),
    "InvalidKeyUsageException": Meaning(
        KeyRefused, "the key cannot encrypt: use a symmetric one (SYMMETRIC_DEFAULT)"
    ),
    "KeyUnavailableException": _BUSY,
    "KMSInternalException": _BUSY,
    "KMSInvalidStateException": _DISABLED,
    "LimitExceededException": Meaning(
        StoreThrottled, "the account's quota of requests is used up", is_temporary=True
    ),
    "NotFoundException": Meaning(
        KeyRefused,
        "there is no such key in this region and account: correct "
        "storage.encryption.key",
    ),
}


class AwsKms:
    """A ``federation.protocols.KeyService`` over a key of AWS KMS."""

    def __init__(
        self,
        arn: str,
        *,
        endpoint_url: str | None = None,
        client: Any = None,
        retry: Retry | None = None,
    ) -> None:
        """Use a key; nothing is asked yet.

        Args:
            arn: ARN of a key or an alias.
            endpoint_url: Instead of the region's own.
            client: Client of boto3, instead of one with the environment's credentials.
            retry: How often to try.

        Raises:
            ValueError: ``arn`` is none of a key.
        """
        found = _ARN.fullmatch(arn)
        if found is None:
            raise ValueError(
                f"{arn!r} is not the ARN of a KMS key "
                "(arn:aws:kms:REGION:ACCOUNT:key/ID)"
            )
        self._arn = arn
        self._region = found["region"]
        self._endpoint_url = endpoint_url
        self._client = client
        self._retry = retry or Retry()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Which key."""
        return f"{KIND}:{self._arn}"

    def generate(self, context: Mapping[str, str]) -> DataKey:
        """Make a new key for an object; see ``KeyService.generate``."""
        answer = self._call(
            "generate_data_key",
            "make a data key",
            KeySpec="AES_256",
            EncryptionContext=dict(context),
        )
        plaintext = self._checked(answer["Plaintext"])
        return DataKey(plaintext=plaintext, wrapped=_wrapped(answer))

    def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
        """Lock a key; see ``KeyService.wrap``."""
        answer = self._call(
            "encrypt",
            "wrap a data key",
            Plaintext=check_data_key(plaintext),
            EncryptionContext=dict(context),
        )
        return _wrapped(answer)

    def unwrap(self, wrapped: bytes, context: Mapping[str, str]) -> bytes:
        """Unlock a key; see ``KeyService.unwrap``."""
        arn, separator, blob = unmark(KIND, wrapped, self.name).partition(b"\0")
        used = arn.decode("ascii", "replace")
        if not separator or not blob or _ARN.fullmatch(used) is None:
            raise CorruptObject(f"this is not a key wrapped by {self.name}")
        if ":key/" in self._arn and _identity(used) != _identity(self._arn):
            raise KeyRefused(
                f"the object was encrypted with the key {used}, but the job has "
                f"{self._arn} in storage.encryption.key"
            )
        # The job's key, not the object's: who can write objects must not choose it.
        answer = self._call(
            "decrypt",
            "unwrap a data key",
            CiphertextBlob=blob,
            EncryptionContext=dict(context),
        )
        return self._checked(answer["Plaintext"])

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _checked(self, plaintext: bytes) -> bytes:
        try:
            return check_data_key(plaintext)
        except ValueError as error:
            raise CorruptObject(f"{self.name} gave no data key: {error}") from error

    def _call(self, operation: str, verb: str, **parameters: Any) -> Mapping[str, Any]:
        doing = f"{verb} with {self.name}"

        def once(_attempt: int) -> Mapping[str, Any]:
            try:
                request: Callable[..., Mapping[str, Any]] = getattr(
                    self._connected(), operation
                )
                return request(KeyId=self._arn, **parameters)
            except s3_errors.FAILURES as error:
                raise translate(error, doing) from error

        return self._retry.call(once)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = aws_session.new_session().client(
                    "kms",
                    region_name=self._region,
                    endpoint_url=self._endpoint_url,
                    config=Config(
                        # A key service answers quickly, so that no attempt hangs
                        # long beyond the deadline of its call.
                        connect_timeout=5,
                        read_timeout=5,
                        # Only Retry counts attempts.
                        retries={"mode": "standard", "total_max_attempts": 1},
                        user_agent_extra="crossfed",
                    ),
                )
            return self._client


def _wrapped(answer: Mapping[str, Any]) -> bytes:
    """Add the wrapping key, which the service's answer lacks."""
    return mark(KIND, answer["KeyId"].encode() + b"\0" + answer["CiphertextBlob"])


def _identity(arn: str) -> tuple[str, ...]:
    """Account and key, which replicas in other regions share."""
    return tuple(arn.split(":")[4:])


def translate(error: Exception, doing: str) -> StoreError:
    """Turn a failure of the library or the service into an error of ours."""
    code = s3_errors.code_of(error)
    meaning = CODES.get(code) or s3_errors.meaning_of(error)
    if not issubclass(meaning.error, StoreUnavailable | CorruptObject):
        # Nothing that KMS says is about an object: none is missing because of it.
        meaning = Meaning(KeyRefused, "the service rejects the request")
    said = type(error).__name__
    if isinstance(error, ClientError):
        words = error.response.get("Error", {}).get("Message", "no message")
        said = f"{code}: {words}"
    return meaning.told(doing, said)
