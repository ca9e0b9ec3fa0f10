"""Look up an object in Google Cloud Storage."""

from collections.abc import Mapping
from typing import Any

from cloud_adapters.storage.gcs import errors as gcs_errors
from cloud_adapters.storage.gcs.http import Ask, GcsHttp, json_of, quoted
from federation.errors import ObjectNotFound, StoreError, StoreForbidden

Resource = Mapping[str, Any]


def object_path(bucket: str, name: str) -> str:
    """Path of an object below the endpoint."""
    return f"/storage/v1/b/{bucket}/o/{quoted(name)}"


def number_in(resource: Resource, name: str, doing: str) -> int:
    """Read a required number: a size, or a generation.

    Raises:
        StoreUnavailable: The service does not say it.
    """
    text = str(resource.get(name, ""))
    if not (text.isascii() and text.isdecimal()):
        raise gcs_errors.UNCLEAR.told(doing, f"no {name} in its answer")
    return int(text)


def lookup(
    http: GcsHttp, bucket: str, name: str, *, doing: str, generation: str | None = None
) -> Resource:
    """Return what the service knows of an object; one attempt.

    Raises:
        ObjectNotFound: There is no such object.
        ObjectChanged: It is not of ``generation``.
        StoreError: See ``gcs_errors``.
    """
    params = {} if generation is None else {"ifGenerationMatch": generation}
    url = object_path(bucket, name)
    ask = Ask(doing=doing, method="GET", url=url, params=params)
    try:
        return json_of(http.send(ask), doing)
    except StoreForbidden as error:
        raise told_apart(http, bucket, name, doing=doing, error=error) from error


def told_apart(
    http: GcsHttp, bucket: str, name: str, *, doing: str, error: StoreForbidden
) -> StoreError:
    """Say whether a refused object is only missing.

    Without permission to list the whole bucket, the answer for a missing object is 403.
    With permission to list a prefix, a listing shows whether it is missing.

    Args:
        http: The way to the service.
        bucket: Bucket of the object.
        name: Name of the object.
        doing: For messages.
        error: The refusal.

    Returns:
        ``ObjectNotFound`` if there is no such object; otherwise ``error``.
    """
    ask = Ask(
        doing=doing,
        method="GET",
        url=f"/storage/v1/b/{bucket}/o",
        # The first name with this beginning is this name, if it is there.
        params={"prefix": name, "maxResults": "1", "fields": "items(name)"},
    )
    try:
        found = json_of(http.send(ask), doing).get("items", ())
    except StoreError:
        return error
    if found and found[0]["name"] == name:
        return error
    return ObjectNotFound(f"cannot {doing}: there is no such object")
