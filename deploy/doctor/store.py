"""Whether a store can hold runs; the probe's objects are removed.

What no look at a configuration shows: whether the bucket exists, what these credentials
may do there, and whether the service keeps to the conditions of writes that
checkpoints rely on. Objects are made below ``doctor/`` and ``probe/`` and removed.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cloud_adapters.storage.probe import check_conditions_kept
from cloud_adapters.storage.retry import Retry
from cloud_adapters.urls import StoreOptions, open_store, parse_url
from deploy.doctor.checks import Check, ok, problem
from federation.errors import (
    BucketNotFound,
    CorruptObject,
    FederationError,
    NotAuthenticated,
    ObjectNotFound,
    StoreForbidden,
    StoreUnavailable,
)
from federation.protocols import ObjectStore

FOLDER = "doctor"
PROBE_BYTES = 64 * 1024
# A person waits: report an outage instead of waiting for its end.
PATIENCE_SECONDS = 10.0

# What each deed needs, as the service calls it.
_RIGHTS: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "write": "s3:PutObject",
        "read": "s3:GetObject",
        "list": "s3:ListBucket",
        "conditions": "s3:PutObject, s3:GetObject, s3:DeleteObject and "
        "s3:AbortMultipartUpload",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "write": "storage.objects.create",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "conditions": "storage.objects.create, .get and .delete",
        "delete": "storage.objects.delete",
    },
    "file": dict.fromkeys(
        ("write", "read", "list", "conditions", "delete"),
        "read and write permission on the folder for this user",
    ),
    "memory": {},
}
_PAGES = {"s3": "docs/howto/s3.md", "gs": "docs/howto/gcs.md"}


@dataclass(frozen=True, slots=True)
class _Trial:
    """A store under test.

    Attributes:
        store: It.
        scheme: Scheme of its URL.
        key: Key of the object that is written.
        content: Content of that object.
    """

    store: ObjectStore
    scheme: str
    key: str
    content: bytes

    def deeds(self) -> Iterator[tuple[str, Callable[[], object], str]]:
        """The steps in order, each with the text for its success."""
        yield "write", self._write, "wrote an object"
        yield "read", self._read, "read it back, in full and in part"
        yield "list", self._list, "listed it"
        yield (
            "conditions",
            lambda: check_conditions_kept(self.store),
            "conditional writes work, for small objects and for multipart ones",
        )
        yield "delete", self.delete, "deleted it"

    def _write(self) -> None:
        self.store.put(self.key, [self.content], if_absent=True)

    def _read(self) -> None:
        half = len(self.content) // 2
        whole = self.store.read(self.key)
        part = self.store.read(self.key, start=half, length=half)
        if whole != self.content or part != self.content[half:]:
            raise CorruptObject(
                f"{self.store.url} returned different bytes than were written"
            )

    def _list(self) -> None:
        if self.key not in {info.key for info in self.store.list(f"{FOLDER}/")}:
            raise StoreUnavailable(
                f"{self.store.url} does not list an object that was just written"
            )

    def delete(self) -> None:
        """Remove the object, and check that it is gone."""
        self.store.delete(self.key)
        try:
            self.store.stat(self.key)
        except ObjectNotFound:
            return
        raise StoreUnavailable(
            f"{self.store.url} still has an object that was deleted: look for a "
            "retention rule or a hold"
        )


def checks(url: str, options: StoreOptions) -> Iterator[Check]:
    """Test a store until the first failure.

    Args:
        url: URL of the store, as in a job.
        options: What the URL does not say.
    """
    options = replace(options, retry=Retry(deadline_seconds=PATIENCE_SECONDS))
    try:
        store = open_store(url, options=options)
    except FederationError as error:
        yield problem("store", f"{url}: {error}", "correct --store or its options")
        return
    trial = _Trial(
        store,
        parse_url(url).scheme,
        f"{FOLDER}/{secrets.token_hex(16)}",
        os.urandom(PROBE_BYTES),
    )
    with contextlib.closing(store):
        yield from _tried(trial)


def _tried(trial: _Trial) -> Iterator[Check]:
    is_left = False
    for name, act, well in trial.deeds():
        try:
            act()
        except FederationError as error:
            yield _failed(trial, name, error)
            break
        is_left = name != "delete"
        yield ok(f"store {name}", f"{trial.store.url}: {well}")
    if is_left:
        with contextlib.suppress(FederationError):  # Its own line would be the second.
            trial.delete()


def _failed(trial: _Trial, name: str, error: FederationError) -> Check:
    found = f"{trial.store.url}: {error}"
    return problem(f"store {name}", found, _advice(trial.scheme, name, error))


def _advice(scheme: str, name: str, error: FederationError) -> str:
    page = f" ({_PAGES[scheme]})" if scheme in _PAGES else ""
    if isinstance(error, BucketNotFound):
        return f"create the bucket, or correct --store, --region or --endpoint{page}"
    if isinstance(error, NotAuthenticated):
        return f"sign in, or give this machine an identity{page}"
    if isinstance(error, StoreForbidden):
        right = _RIGHTS[scheme].get(name, "the permissions it needs")
        return f"grant these credentials {right}{page}"
    return f"fix what the message names, then check again{page}"
