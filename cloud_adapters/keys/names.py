"""Open the key service of a job's key.

Clients of clouds are imported when a key of theirs is used, and not before.
"""

from pathlib import Path

from cloud_adapters.extras import naming_extras
from cloud_adapters.keys.key_file import KIND as FILE, KeyFile
from federation.errors import JobError
from federation.protocols import KeyService

_KEY = "storage.encryption.key"
_POSSIBLE = "use file:PATH, aws-kms:ARN or gcp-kms:NAME"


@naming_extras()
def open_keys(name: str, *, endpoint: str = "") -> KeyService:
    """Open the key service that a job names.

    Args:
        name: ``file:`` and the path of a key file; ``aws-kms:`` and the ARN of a key
            or an alias; ``gcp-kms:`` and the whole name of a key.
        endpoint: URL of a service other than the cloud's own.

    Raises:
        JobError: The name is malformed, or of an unknown kind.
        KeyRefused: A key file cannot be used; services are not asked yet.
        MissingExtra: The service's client is not installed.
    """
    kind, separator, place = name.partition(":")
    if not separator or not place:
        raise JobError(f"{name!r} does not name a key; {_POSSIBLE}", key=_KEY)
    if kind == FILE:
        return KeyFile(Path(place))
    try:
        if kind == "aws-kms":
            from cloud_adapters.keys.aws_kms import AwsKms  # noqa: PLC0415 -- slow

            return AwsKms(place, endpoint_url=endpoint or None)
        if kind == "gcp-kms":
            from cloud_adapters.keys.gcp_kms import GcpKms  # noqa: PLC0415 -- slow

            return GcpKms(place, endpoint=endpoint or None)
    except ValueError as error:
        raise JobError(f"{error}", key=_KEY) from error
    raise JobError(f"the kind {kind!r} of a key is unknown; {_POSSIBLE}", key=_KEY)
