"""URLs that let others read or write one object of Cloud Storage for a while.

Apart, because Google's client is slow to import and nothing else here needs it.
"""

from datetime import timedelta

from google.auth.credentials import Signing
from google.cloud import storage

from cloud_adapters.storage.gcs.http import GcsHttp, translated
from federation.errors import NotAuthenticated

MAX_SECONDS = 7 * 24 * 3600  # of the service


def signed_url(
    http: GcsHttp, bucket: str, name: str, *, method: str, expires_seconds: float
) -> str:
    """Make a URL; see ``federation.protocols.SignsUrls.signed_url``.

    Source: https://cloud.google.com/storage/docs/access-control/signed-urls, V4.

    Raises:
        NotAuthenticated: These credentials cannot sign.
        ValueError: Another method, or it would live longer than seven days.
    """
    if method not in {"GET", "PUT"}:
        raise ValueError(f"a URL can be signed for GET or PUT, not {method!r}")
    if not 1 <= expires_seconds <= MAX_SECONDS:
        raise ValueError(
            f"a signed URL can be valid for 1 s to 7 days, not {expires_seconds} s"
        )
    doing = f"sign a URL for gs://{bucket}/{name}"
    credentials = http.credentials(doing)
    if not isinstance(credentials, Signing):
        raise NotAuthenticated(
            f"cannot {doing}: credentials of type {type(credentials).__name__} hold no "
            "key to sign with; impersonate a service account (gcloud auth "
            "application-default login --impersonate-service-account=...)"
        )
    client = storage.Client(
        project="none",  # The library wants one; signing does not.
        credentials=credentials,
        client_options={"api_endpoint": http.endpoint},
    )
    lifetime = timedelta(seconds=int(expires_seconds))
    with translated(doing):
        url: str = (
            client.bucket(bucket)
            .blob(name)
            .generate_signed_url(version="v4", expiration=lifetime, method=method)
        )
    return url
