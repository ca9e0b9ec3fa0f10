"""Parts of uploads to S3 whose process was killed: they show nowhere, and cost storage.

Removed when a run is started or resumed, below the job's own prefix and nowhere
else. The age of an upload depends only on the service's clock.
"""

import logging
from datetime import datetime
from email.utils import parsedate_to_datetime

from cloud_adapters.storage.s3.calls import Answer, S3Calls
from federation.errors import ObjectNotFound, StoreError

_LOG = logging.getLogger(__name__)


def remove(calls: S3Calls, *, older_seconds: float) -> int:
    """Remove the parts of uploads that were started long ago, and return how many.

    A service that does not list uploads, or not to these credentials, ends no run:
    the log says so, and the bucket's lifecycle rule does the same.

    Args:
        calls: To the bucket; what is not below its prefix stays.
        older_seconds: Uploads that were started later stay: they may be in progress.

    Raises:
        ValueError: The prefix is empty: uploads of others would go.
    """
    if not calls.prefix:
        raise ValueError("uploads are removed below a prefix, not in a whole bucket")
    try:
        return _remove(calls, older_seconds)
    except StoreError as error:
        _LOG.info("parts of killed uploads stay below %s: %s", calls.where(), error)
        return 0


def _remove(calls: S3Calls, older_seconds: float) -> int:
    doing, removed = f"list unfinished uploads below {calls.where()}", 0
    asked: Answer = {}
    while True:
        answer = calls.call(
            "list_multipart_uploads", doing, Prefix=calls.prefix, **asked
        )
        now = _now(answer)
        for upload in answer.get("Uploads", ()):
            begun = upload.get("Initiated")
            if now is None or not isinstance(begun, datetime):
                continue
            if (now - begun).total_seconds() <= older_seconds:
                continue
            removed += _abort(calls, str(upload["Key"]), str(upload["UploadId"]))
        if not answer.get("IsTruncated"):
            return removed
        asked = {
            "KeyMarker": answer["NextKeyMarker"],
            "UploadIdMarker": answer["NextUploadIdMarker"],
        }


def _abort(calls: S3Calls, name: str, upload_id: str) -> int:
    if not name.startswith(calls.prefix):  # A service that ignores the prefix.
        return 0
    doing = f"remove an unfinished upload of s3://{calls.bucket}/{name}"
    try:
        calls.call("abort_multipart_upload", doing, Key=name, UploadId=upload_id)
    except ObjectNotFound:  # Someone else was quicker.
        return 0
    return 1


def _now(answer: Answer) -> datetime | None:
    """The service's time; None if it does not say it."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(said)
    except ValueError:
        return None
