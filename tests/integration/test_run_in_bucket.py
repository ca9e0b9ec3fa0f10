"""Runs whose checkpoints are in a bucket."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import event_samples
from support.killed_runs import kill_in_round_2
from support.small_jobs import small_job
from support.without_report import simulate

from aggregator.checkpoint import CHUNK_BYTES
from cloud_adapters.storage.s3.store import S3Store
from deploy.wiring import run_store
from federation.errors import (
    JobError,
    RunConflict,
    RunNotFound,
    StoreUnavailable,
)
from federation.event_log import read_events, to_line
from federation.events import Event, RoundFinished, RunFinished, StoreUsed
from federation.job.spec import JobSpec
from federation.protocols import ObjectStore
from federation.rounds.cost import requests_of_run
from federation.rounds.server_optimizer import server_optimizer
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

Make = Callable[..., JobSpec]


@pytest.fixture
def tables(bucket: dict[str, str]) -> dict[str, Any]:
    """Of a job in a new bucket."""
    return {
        "num_sites": 2,
        "rounds": 4,
        "aggregation": {"server_optimizer": {"name": "adam", "lr": 0.1}},
        "storage": bucket,
    }


def keys(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


def check_same(one: RunResult, other: RunResult) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, array in one.weights.items():
        np.testing.assert_array_equal(array, other.weights[name])


def test_checkpoints_are_in_the_bucket_and_files_in_both(tables: Any, tmp_path: Path):
    """And the model is that of a run on this machine."""
    job = small_job(**tables)
    has_report = job.storage.url.startswith("s3")  # It takes two seconds to draw.
    done = simulate(job, folder=tmp_path / "run", report=has_report)
    files = {"events.jsonl", "job.toml", "model.safetensors", "result.json"}
    files |= {"report.html"} if has_report else set()
    assert {p.name for p in (tmp_path / "run").iterdir()} == files | {".lock"}
    store = run_store.open_bucket(job, done.run_id)
    found = keys(store)
    assert {key for key in found if "/" not in key} == files
    assert "checkpoints/round-000004.json" in found
    for name in files:
        assert store.read(name) == (tmp_path / "run" / name).read_bytes()
    store.close()
    local = simulate(small_job(**tables | {"storage": {}}), folder=tmp_path / "local")
    check_same(done, local)
    (here,) = local.summary()["storage"]
    assert (here["who"], here["way"]) == ("coordinator", "this machine")
    assert all(use["requests"] == 0 for use in here["uses"])


def test_parts_of_a_killed_run_go_with_the_next(tables: Any, tmp_path: Path):
    """Of the same job, whatever the run; the service of the tests dates them to 2010.

    Cloud Storage ends upload sessions by itself.
    """
    job = small_job(**tables)
    killed = run_store.open_plain(job, "20200101-000000-abcdef")
    if not isinstance(killed, S3Store):
        killed.close()
        pytest.skip("no parts are left")
    calls = killed._calls
    name = f"{calls.prefix}checkpoints/x"
    calls.client.create_multipart_upload(Bucket=calls.bucket, Key=name)
    asked = {"Bucket": calls.bucket, "Prefix": calls.prefix}
    assert "Uploads" in calls.client.list_multipart_uploads(**asked)
    assert simulate(job, folder=tmp_path / "run").status == "completed"
    assert "Uploads" not in calls.client.list_multipart_uploads(**asked)
    killed.close()


def test_what_the_bucket_was_used_for(tables: Any, tmp_path: Path):
    """Events and result tell calls and bytes; a checkpoint's are among them."""
    job = small_job(**tables)
    done = simulate(job, folder=tmp_path / "run")
    (storage,) = json.loads((tmp_path / "run" / "result.json").read_text())["storage"]
    assert storage["url"] == f"{job.storage.url}/small/{done.run_id}"
    assert (storage["who"], storage["way"]) == ("coordinator", "unknown")
    uses = {use["operation"]: use for use in storage["uses"]}
    saved = sum(checkpoint.bytes_written for checkpoint in done.view.checkpoints)
    assert uses["put"]["sent_bytes"] > saved > 0
    assert uses["put"]["requests"] >= uses["put"]["calls"] >= 4 * 3
    assert all(use["failed"] == 0 for name, use in uses.items() if name == "put")


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.parametrize("of_parts", [False, True], ids=["small", "in parts"])
def test_a_bucket_that_ignores_conditions_ends_the_run_before_any_training(
    tables: Any, tmp_path: Path, *, of_parts: bool
):
    """Two coordinators could complete one run there: neither begins."""
    from support.s3_server import App, client, serve  # noqa: PLC0415 (slow to import)

    def ignorant(app: App) -> App:
        def without_conditions(environ: dict[str, Any], start: Any) -> Any:
            if ("uploadId" in environ["QUERY_STRING"]) == of_parts:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            return app(environ, start)

        return without_conditions

    heard: list[Event] = []
    with serve(before=ignorant) as server:
        client(server.url).create_bucket(Bucket="careless")
        tables["storage"] |= {"url": "s3://careless/runs", "endpoint": server.url}
        job = small_job(**tables)
        with pytest.raises(StoreUnavailable, match="ignores conditions of writes"):
            simulate(job, folder=tmp_path / "run", listeners=[heard.append])
    assert not [event for event in heard if isinstance(event, RoundFinished)]
    (end,) = [event for event in heard if isinstance(event, RunFinished)] or [None]
    assert end is None or end.status == "failed"  # type: ignore[redundant-expr]


def test_a_killed_run_goes_on_elsewhere(tables: Any, tmp_path: Path):
    """A machine that has nothing of the run resumes it to the same model."""
    kill_in_round_2(tables, tmp_path / "here")
    job = small_job(**tables)
    elsewhere = run_store.newest_folder(job, tmp_path / "elsewhere")
    assert elsewhere.parent == tmp_path / "elsewhere" / "small"
    resumed = simulate(job, folder=elsewhere, resume=True)
    assert (resumed.rounds_now, resumed.rounds_completed) == (2, 4)
    whole = simulate(small_job(**tables | {"storage": {}}))
    check_same(resumed, whole)
    assert [row.index for row in resumed.view.rounds] == [1, 2, 3, 4]
    # Where it began, the copy that is ahead is taken over: nothing is left to do.
    here = simulate(job, folder=tmp_path / "here", resume=True)
    assert (here.run_id, here.rounds_now) == (resumed.run_id, 0)
    check_same(here, whole)


def test_nothing_to_resume(tables: Any, tmp_path: Path):
    """An empty bucket is no error of the store."""
    job = small_job(**tables)
    with pytest.raises(RunNotFound, match="of the job 'small' in"):
        run_store.newest_folder(job, tmp_path)
    with pytest.raises(RunNotFound, match="to resume"):
        simulate(job, folder=tmp_path / "run", resume=True)


def test_a_bucket_that_is_not_there(tables: Any, tmp_path: Path):
    """It shows before any training, and names the bucket."""
    tables["storage"]["url"] = tables["storage"]["url"].replace("bucket-", "no-such-")
    rounds = []
    with pytest.raises(StoreUnavailable, match="no-such-"):
        simulate(small_job(**tables), folder=tmp_path, listeners=[rounds.append])
    assert not any(type(event).__name__ == "RoundStarted" for event in rounds)


def test_the_newer_run_is_resumed(tables: Any, tmp_path: Path):
    """On this machine or in the bucket; runs of other jobs do not count."""
    job = small_job(**tables)
    store = run_store.open_bucket(job)
    for name in ("20260101-000000-aaaaaa", "20260301-000000-aaaaaa"):
        store.put(f"{name}/events.jsonl", [b"x"])
    store.put("20260401-000000-aaaaaa/checkpoints/blob", [b"x"])
    store.close()
    assert run_store.newest_folder(job, tmp_path).name == "20260301-000000-aaaaaa"
    events = event_samples.two_sites(2)
    finished = "".join(f"{to_line(event)}\n" for event in events)
    deployed = to_line(replace(events[0], engine="deployed"))  # type: ignore[call-arg]
    with contextlib.closing(run_store.open_bucket(job)) as again:
        again.put("20260301-000000-aaaaaa/events.jsonl", [finished.encode()])
        again.put("20260301-000000-bbbbbb/events.jsonl", [deployed.encode()])
    assert run_store.newest_folder(job, tmp_path).name == "20260101-000000-aaaaaa"
    newer = tmp_path / "small" / "20260302-000000-aaaaaa"
    newer.mkdir(parents=True)
    (newer / "events.jsonl").touch()
    assert run_store.newest_folder(job, tmp_path) == newer


def test_budgets_stay_where_they_were_spent(tables: Any, tmp_path: Path):
    """A run with a ledger is not resumed where the ledger is not."""
    private = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0}
    tables["aggregation"]["weights"] = "uniform"
    job = small_job(**tables, privacy={"differential_privacy": private})
    store = run_store.open_bucket(job, "20260301-000000-aaaaaa")
    store.put("events.jsonl", [b"x"])
    store.close()
    with pytest.raises(RunNotFound, match="spent its privacy budget"):
        simulate(job, folder=tmp_path / "run", resume=True)


def test_two_processes_in_one_folder(tables: Any, tmp_path: Path):
    """Fetching is left alone while another process works on the run."""
    from monitoring.runs.run_folder import RunFolder  # noqa: PLC0415

    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(RunConflict):
        simulate(small_job(**tables), folder=run.path, resume=True)


def test_wrong_urls_are_refused_at_once(tmp_path: Path):
    """Before data and model are built."""
    job = small_job(storage={"url": "s3://"})
    with pytest.raises(JobError, match=r"storage\.url"):
        simulate(job, folder=tmp_path)


def test_a_failed_run_tells_what_it_used(tables: Any, tmp_path: Path):
    """Also what came after its last checkpoint."""

    def fail(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round_index == 2:
            raise StoreUnavailable("the disk is full")

    with pytest.raises(StoreUnavailable):
        simulate(small_job(**tables), folder=tmp_path / "run", listeners=[fail])
    *_, used, finished = read_events(tmp_path / "run" / "events.jsonl")
    assert isinstance(used, StoreUsed)
    assert isinstance(finished, RunFinished)
    assert finished.status == "failed"


@pytest.mark.parametrize(
    ("bucket", "name", "rounds"),
    [
        ("s3", "adam", 2),
        ("s3", "adam", 6),
        ("s3", "average", 5),
        ("gs", "adam", 2),  # What a run asks for does not depend on the service.
    ],
    indirect=["bucket"],
)
def test_requests_of_a_run_are_predicted(
    bucket: dict[str, str], tmp_path: Path, name: str, rounds: int
):
    """As the service counts them: `plan` multiplies them with their price."""
    chosen = {"server_optimizer": {"name": name, "lr": 0.1 if name == "adam" else 1.0}}
    job = small_job(num_sites=2, rounds=rounds, aggregation=chosen, storage=bucket)
    done = simulate(job, folder=tmp_path / "run")
    (used,) = done.summary()["storage"]
    asked = {use["operation"]: use["requests"] for use in used["uses"]}
    optimizer = server_optimizer(job.aggregation.server_optimizer)
    found = requests_of_run(
        4 * sum(array.size for array in done.weights.values()),
        rounds=rounds,
        keep=job.storage.keep_checkpoints,
        vectors=len(optimizer.init(1)),
        chunk_bytes=CHUNK_BYTES,
    )
    assert found.writes == asked["put"] + asked["list"]
    assert found.reads == asked.get("stat", 0) + asked.get("read", 0)
