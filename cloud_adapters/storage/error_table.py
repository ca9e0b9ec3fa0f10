"""The answers of any service as this product's errors, with their messages.

Each service has tables of its own, from what it says to one of these rows or to a row
of its own: ``s3_errors``, ``gcs_errors``, and those of the key services.
"""

from dataclasses import dataclass

from federation.errors import (
    BucketNotFound,
    CorruptObject,
    ObjectChanged,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)

MAX_WAIT_SECONDS = 60.0  # More than that, a person should hear of it.


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of an answer or an exception.

    Attributes:
        error: What to raise.
        advice: What a person can do.
        is_temporary: Whether the same request may succeed a moment later.
    """

    error: type[StoreError]
    advice: str
    is_temporary: bool = False

    def told(self, doing: str, said: str, *, asked_to_wait: str = "") -> StoreError:
        """Make the error.

        Args:
            doing: What was being done, and where: ``read s3://bucket/key``.
            said: What the service says, as far as it is safe to repeat.
            asked_to_wait: The answer's Retry-After, of which only seconds count.
        """
        seconds = float(asked_to_wait) if asked_to_wait.isdecimal() else 0.0
        return self.error(
            f"cannot {doing}: {self.advice} ({said})",
            temporary=self.is_temporary,
            wait_seconds=min(seconds, MAX_WAIT_SECONDS),
        )


GONE = Meaning(ObjectNotFound, "there is no such object")
NO_BUCKET = Meaning(
    BucketNotFound,
    "the bucket does not exist: correct its name in the URL, or create it",
)
CHANGED = Meaning(ObjectChanged, "the object does not have the requested version")
CONFLICT = Meaning(
    StoreUnavailable,
    "others are writing the same object; try again later",
    is_temporary=True,
)
CORRUPT = Meaning(
    CorruptObject,
    "the bytes changed in transit: if it happens again, look for a proxy or a network "
    "device that modifies traffic",
    is_temporary=True,
)
BUSY = Meaning(
    StoreUnavailable,
    "the service has an internal error: try again later, and see its status page",
    is_temporary=True,
)
UNREACHABLE = Meaning(
    StoreUnavailable,
    "the connection failed or broke: check network, endpoint, proxy and firewall",
    is_temporary=True,
)
QUOTA = Meaning(
    StoreUnavailable, "a quota is used up: free space or ask for a higher one"
)
REFUSED = Meaning(
    StoreUnavailable, "the service rejects the request: correct what it names"
)


def of_status(status: int) -> Meaning:
    """The meaning of an HTTP status that is in no table."""
    return BUSY if status >= 500 else REFUSED  # noqa: PLR2004 (an HTTP status)
