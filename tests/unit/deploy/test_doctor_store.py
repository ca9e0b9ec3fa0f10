"""Stores that are tried before a run relies on them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import s3_server as servers

from cloud_adapters.urls import StoreOptions
from deploy.cli import commands as cli
from deploy.doctor import store as doctor_store
from deploy.doctor.checks import Check
from deploy.exit_codes import DONE, FAILED

DEEDS = ["store write", "store read", "store list", "store conditions", "store delete"]


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")


def looked_at(url: str, endpoint: str) -> list[Check]:
    return list(doctor_store.checks(url, StoreOptions(endpoint=endpoint)))


@pytest.fixture(params=["s3", "gs", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """URL and endpoint of a store that is there."""
    if request.param == "file":
        return f"file://{tmp_path}/store", ""
    name = {"s3": "s3_server", "gs": "gcs_server"}[request.param]
    server = request.getfixturevalue(name)
    if request.param == "s3":
        return f"s3://{server.bucket()}/runs", server.url
    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    return f"gs://{gcs_stores.new_bucket(server)}/runs", server.url


def test_a_good_store(place: tuple[str, str]):
    """Every deed is done, and nothing is left."""
    found = looked_at(*place)
    assert [(each.name, each.status) for each in found] == [(d, "ok") for d in DEEDS]
    again = looked_at(*place)
    assert len(again) == len(DEEDS)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_bucket_that_does_not_exist(request: pytest.FixtureRequest, kind: str):
    """Is a problem, which says so and what to do."""
    server = request.getfixturevalue({"s3": "s3_server", "gs": "gcs_server"}[kind])
    (found,) = looked_at(f"{kind}://no-such-bucket/runs", server.url)
    assert (found.name, found.status) == ("store write", "problem")
    assert "no-such-bucket" in found.found
    assert "bucket does not exist" in found.found
    assert "create the bucket" in found.advice


@pytest.mark.parametrize(
    ("missing", "deed", "right"),
    [
        ("create", "store write", "storage.objects.create"),
        ("get", "store read", "storage.objects.get"),
        ("list", "store list", "storage.objects.list"),
        ("delete", "store conditions", ".delete"),
    ],
)
def test_the_missing_right_is_named(
    gcs_server: Any,
    missing: str,
    deed: str,
    right: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """As the service calls it; what comes after it is not tried."""
    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    name = gcs_stores.new_bucket(gcs_server)
    monkeypatch.setattr(
        gcs_server, "allows", lambda may, *_: may != f"storage.objects.{missing}"
    )
    *well, last = looked_at(f"gs://{name}/runs", gcs_server.url)
    assert all(each.status == "ok" for each in well)
    assert (last.name, last.status) == (deed, "problem")
    assert right in last.advice
    assert "grant" in last.advice


@pytest.fixture
def careless() -> Iterator[servers.S3Server]:
    """A service that ignores every condition."""

    def ignorant(app: servers.App) -> servers.App:
        def serve(environ: dict[str, Any], start: Any) -> Any:
            for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
                environ.pop(name, None)
            return app(environ, start)

        return serve

    with servers.serve(before=ignorant) as server:
        yield server


def test_a_store_that_ignores_conditions(careless: servers.S3Server):
    """Is a problem, and what was written is removed."""
    bucket = careless.bucket()
    found = {each.name: each for each in looked_at(f"s3://{bucket}/a", careless.url)}
    assert found["store conditions"].status == "problem"
    assert "ignores conditions of writes" in found["store conditions"].found
    # Servers of one process share their buckets, so look at this test's place alone.
    left = careless.client().list_objects_v2(Bucket=bucket, Prefix="a/")
    assert "Contents" not in left


def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    """Is told within seconds: a person waits, and a test a shorter time."""
    assert doctor_store.PATIENCE_SECONDS == 10.0
    monkeypatch.setattr(doctor_store, "PATIENCE_SECONDS", 1.0)
    (found,) = looked_at("s3://bucket/runs", "http://127.0.0.1:1")
    assert found.status == "problem"
    assert "check network" in found.found


def test_the_command_fails_with_the_store(
    s3_server: Any, capsys: pytest.CaptureFixture[str]
):
    """``crossfed doctor --store URL --endpoint URL`` has the exit code of a failure."""
    place = ["--endpoint", s3_server.url, "--region", "us-east-1", "--json"]
    good = ["doctor", "--store", f"s3://{s3_server.bucket()}/runs", *place]
    assert cli.main(good) == DONE
    told = json.loads(capsys.readouterr().out)
    assert set(DEEDS) <= {check["name"] for check in told["checks"]}
    assert cli.main(["doctor", "--store", "s3://no-such-bucket", *place]) == FAILED
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == 1
