"""Stores that ignore conditions of writes are found before a run relies on them."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support import s3_server as servers

from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.probe import NUM_RACERS, PREFIX, check_conditions_kept
from federation.errors import (
    BucketNotFound,
    ObjectChanged,
    StoreForbidden,
    StoreUnavailable,
)
from federation.protocols import ObjectInfo, ObjectStore

Ignores = Callable[[servers.App], servers.App]


class Ignoring(MemoryStore):
    """Takes conditions, and ignores some of them."""

    def __init__(self, *ignored: str) -> None:
        super().__init__()
        self.ignored = ignored

    def put(self, key: str, data: Any, **options: Any) -> ObjectInfo:
        for name in self.ignored:
            options.pop(name, None)
        return super().put(key, data, **options)


class Liar(MemoryStore):
    """Refuses a write, and makes it all the same."""

    def put(self, key: str, data: Any, **options: Any) -> ObjectInfo:
        pieces = list(data)
        try:
            return super().put(key, pieces, **options)
        except ObjectChanged:
            super().put(key, pieces)
            raise


class Racy(MemoryStore):
    """Looks first and writes afterwards, so that all who look at once win."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(NUM_RACERS)

    def put(self, key: str, data: Any, **options: Any) -> ObjectInfo:
        if threading.current_thread() is not threading.main_thread():
            self.together.wait(timeout=30)
            options.pop("if_absent", None)
        return super().put(key, data, **options)


class Stubborn(MemoryStore):
    """Refuses every change."""

    def put(self, key: str, data: Any, **options: Any) -> ObjectInfo:
        if "if_version" in options and options["if_version"] is not None:
            raise ObjectChanged(key)
        return super().put(key, data, **options)


class Keeping(MemoryStore):
    """Deletes nothing."""

    def delete(self, key: str) -> None:
        """Say that it went well."""


@pytest.fixture(params=["memory", "s3", "gcs"])
def good(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    store: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    return store


def test_a_good_store_passes_and_is_left_as_it_was(good: ObjectStore):
    """Twice, since a run may be resumed; nothing stays behind."""
    good.put("other", [b"x"])
    check_conditions_kept(good)
    check_conditions_kept(good)
    assert [info.key for info in good.list()] == ["other"]


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (Ignoring("if_absent"), "a small object was created a second time"),
        (Ignoring("if_version"), "a small object was changed under an outdated"),
        (Ignoring("if_absent", "if_version"), "created a second time"),
        (Liar(), "changed by a write that was refused"),
        (Racy(), "created by 4 of 4 at once"),
        (Stubborn(), "refuses conditional writes that it must accept"),
    ],
)
def test_ignored_conditions_are_told(store: ObjectStore, told: str):
    """With the store's name, what it did and what to use instead."""
    with pytest.raises(StoreUnavailable, match=rf"memory://.*{told}.*docs/howto/s3.md"):
        check_conditions_kept(store)
    assert list(store.list()) == []


def test_what_cannot_be_deleted_is_told():
    """A run removes old checkpoints, and would fill the store."""
    with pytest.raises(StoreUnavailable, match="although it was deleted"):
        check_conditions_kept(Keeping())


def test_old_leftovers_of_probes_go():
    """Not those of a probe that may be under way."""

    times = {f"{PREFIX}old": 1_000.0, f"{PREFIX}new": 9_000.0}

    class Dated(MemoryStore):
        def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[Any]:
            for info in super().list(prefix, start_after=start_after):
                yield replace(info, updated=times.get(info.key, 10_000.0))

        def stat(self, key: str) -> ObjectInfo:
            return replace(super().stat(key), updated=10_000.0)

    store = Dated()
    for key in times:
        store.put(key, [b""])
    check_conditions_kept(store)
    assert [info.key for info in store.list()] == [f"{PREFIX}new"]


def ignoring(*headers: str, parts: bool) -> Ignores:
    """Put before a server what removes conditions from writes of one kind."""

    def before(app: servers.App) -> servers.App:
        def serve(environ: dict[str, Any], start: Any) -> Any:
            if ("uploadId" in environ["QUERY_STRING"]) == parts:
                for header in headers:
                    environ.pop(header, None)
            return app(environ, start)

        return serve

    return before


NONE_MATCH, MATCH = "HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "told"),
    [
        (ignoring(NONE_MATCH, parts=False), r"small object .*created a second"),
        (ignoring(MATCH, parts=False), r"small object .*changed under"),
        (ignoring(NONE_MATCH, parts=True), r"object in parts .*created a second"),
        (ignoring(MATCH, parts=True), r"object in parts .*changed under"),
    ],
    ids=["create", "change", "create parts", "change parts"],
)
def test_services_that_ignore_a_header(before: Ignores, told: str):
    """Each of four places where a service that speaks S3 may forget to look."""
    with servers.serve(before=before) as server:
        store = server.store("run")
        with pytest.raises(StoreUnavailable, match=told):
            check_conditions_kept(store)
        assert list(store.list()) == []
        store.close()


def test_cloud_storage_that_ignores_generations(gcs_server: Any):
    """As emulators do."""
    from support import fake_gcs, gcs_stores  # noqa: PLC0415 (slow to import)

    class Ignorant(fake_gcs.FakeGcs):
        def _check_conditions(self, *_: Any, **__: Any) -> None:
            """Look at nothing."""

    with Ignorant() as server:
        store = gcs_stores.store(server)
        with pytest.raises(StoreUnavailable, match="created a second time"):
            check_conditions_kept(store)
        store.close()


def test_missing_bucket_is_told(s3_server: Any, gcs_server: Any):
    """As what it is."""
    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    missing = (
        s3_server.store(bucket="no-such-bucket"),
        gcs_stores.store(gcs_server, bucket="no-such-bucket"),
    )
    for store in missing:
        with pytest.raises(BucketNotFound, match="no-such-bucket"):
            check_conditions_kept(store)


def test_refused_rights_pass_through():
    """They are no sign of ignored conditions."""

    class Forbidding(MemoryStore):
        def delete(self, key: str) -> None:
            raise StoreForbidden(f"cannot delete {key}")

    with pytest.raises(StoreForbidden, match="delete"):
        check_conditions_kept(Forbidding())
