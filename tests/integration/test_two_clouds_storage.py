"""jobs/two-clouds-storage.toml: data and a run in both clouds, and three kills."""

import contextlib
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import forked, tcp_proxy
from support.tcp_proxy import Fault, FaultyProxy
from support.without_report import simulate

from cloud_adapters.urls import StoreOptions, open_store
from deploy.cli import commands as cli
from federation.event_log import read_events
from federation.job import job_file
from monitoring.views.run_fold import fold

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[2] / "jobs" / "two-clouds-storage.toml"
ROUNDS = 5
SHORT = (f"rounds={ROUNDS}", "training.local_steps=3")
RUNS = "experiments/two-clouds-storage/"
DATA = "shards/digits"
BLOB = "PUT .*/checkpoints/blobs/"
SHARD = re.compile(r"[0-9]{6}-[0-9a-f]{16}\.tar")
ALWAYS = 1000
WAIT_SECONDS = 120  # For a process on a busy machine.


@dataclass
class Clouds:
    """Both services with the buckets that the job names.

    Attributes:
        s3: Amazon's.
        gcs: Google's.
        line: Between the coordinator and its bucket.
        environment: What a machine is given.
    """

    s3: Any
    gcs: Any
    line: FaultyProxy
    environment: Mapping[str, str]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Where the services are; all else is as the job says it."""
        return (
            *SHORT,
            f"storage.endpoint={self.line.url}",
            f"sites.0.data.options.endpoint={self.s3.url}",
            f"sites.1.data.options.endpoint={self.gcs.url}",
        )

    def run_objects(self) -> dict[str, bytes]:
        """What is in the bucket of runs, past our own code."""
        client = self.s3.client()
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket="federation-runs"
        )
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return {
            key: client.get_object(Bucket="federation-runs", Key=key)["Body"].read()
            for key in keys
        }


@pytest.fixture
def clouds(
    s3_server: Any, gcs_server: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Clouds]:
    """Each hospital's data in its own cloud."""
    environment = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for cloud in ("s3", "gcs"):  # Once, and not in each of four processes.
        forked.shared().imports(f"cloud_adapters.storage.{cloud}.store")
    for name in ("hospital-a", "federation-runs"):
        s3_server.client().create_bucket(Bucket=name)
    gcs_server.add_bucket("hospital-b")
    shard(0, f"s3://hospital-a/{DATA}", s3_server.url)
    shard(1, f"gs://hospital-b/{DATA}", gcs_server.url)
    with tcp_proxy.proxy(s3_server.url) as line:
        yield Clouds(s3_server, gcs_server, line, environment)


def shard(hospital: int, url: str, endpoint: str) -> None:
    service = ("--endpoint", endpoint, "--region", "eu-west-3")
    source = ("support.hospitals:digits", url, "--option", f"hospital={hospital}")
    assert cli.main(["data", "shard", *source, *service, "--shard-size", "0.3"]) == 0


class Machine:
    """One that can run the job, and has nothing else at first."""

    def __init__(self, clouds: Clouds, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._clouds = clouds

    def start(self, *more: str) -> forked.Forked:
        """Begin a run, or with ``--resume`` continue with one."""
        sets = [part for text in self._clouds.overrides for part in ("--set", text)]
        cache = {"CROSSFED_CACHE_DIR": str(self.folder / "cache")}
        return forked.shared().start(
            *("simulate", str(JOB), "--no-report", *sets, *more),
            folder=self.folder,
            environment={**os.environ, **self._clouds.environment, **cache},
            out=self.folder / "stdout",
            err=self.folder / "stderr",
        )

    def finished(self, *more: str) -> int:
        """Run to the end, and return the exit code."""
        process = self.start(*more)
        try:
            return process.wait(timeout=WAIT_SECONDS)
        finally:
            process.kill()
            process.wait()

    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def run_folder(self) -> Path:
        (run,) = (self.folder / "runs" / "two-clouds-storage").iterdir()
        return run

    def killed_at(
        self, request: str, fault: Fault, *more: str, after: int = 0, seen: int = 1
    ) -> None:
        """Run until a request has failed ``seen`` times, and SIGKILL the coordinator.

        Args:
            request: Pattern of its first line; it fails from here on.
            fault: In which way.
            more: Arguments of the command.
            after: How many such requests go through before.
            seen: How many have failed.
        """
        line = self._clouds.line
        line.clear()
        line.fail(request, fault, times=ALWAYS, after=after)
        process = self.start(*more)
        try:
            end = time.monotonic() + WAIT_SECONDS
            while line.count(request) < after + seen:
                assert process.poll() is None, self.said()
                assert time.monotonic() < end, self.said()
                time.sleep(0.005)
        finally:
            process.kill()
            code = process.wait()
            line.clear()
        assert code == -signal.SIGKILL


def check_whole(objects: Mapping[str, bytes], newest: int) -> None:
    """Check that every object is what its name says, and what the newest round is."""
    rounds = []
    for key, content in objects.items():
        found = re.search(r"sha256-([0-9a-f]{64})", key)
        if found:
            assert hashlib.sha256(content).hexdigest() == found[1], key
        elif key.endswith(".jsonl"):
            assert content.endswith(b"\n"), key
            assert all(map(json.loads, content.splitlines())), key
        elif manifest := re.search(r"/checkpoints/round-(\d+)\.json$", key):
            rounds.append(int(manifest[1]))
            place = key.rpartition("/")[0]
            for blob in json.loads(content)["blobs"].values():
                assert f"{place}/{blob['key']}" in objects
    assert max(rounds) == newest


def check_reads(clouds: Clouds, s3_before: int, gcs_before: int) -> None:
    """Check that each hospital's bucket was read, and only for its own shards."""
    in_s3 = [line.split(" ", 1) for line in clouds.s3.requests[s3_before:]]
    of_a = [(m, path) for m, path in in_s3 if path.startswith("/hospital-a")]
    of_runs = [path for _, path in in_s3 if path.startswith("/federation-runs")]
    of_b = [(r.method, r.path) for r in clouds.gcs.requests[gcs_before:]]
    assert len(of_a) + len(of_runs) == len(in_s3)
    assert all("/b/hospital-b/" in path for _, path in of_b)
    assert {method for method, _ in of_a + of_b} <= {"GET", "HEAD"}
    a, b = (shards_in(path for _, path in asked) for asked in (of_a, of_b))
    assert a == stored(f"s3://hospital-a/{DATA}", clouds.s3.url)
    assert b == stored(f"gs://hospital-b/{DATA}", clouds.gcs.url)
    assert len(a) > 3
    assert not a & b
    assert not shards_in(of_runs)


def shards_in(paths: Iterable[str]) -> set[str]:
    return {name for path in paths for name in SHARD.findall(path)}


def stored(url: str, endpoint: str) -> set[str]:
    options = StoreOptions(endpoint=endpoint, region="eu-west-3")
    with contextlib.closing(open_store(url, options=options)) as store:
        return shards_in(info.key for info in store.list())


@pytest.mark.long
def test_killed_three_times_and_moved_twice(clouds: Clouds, tmp_path: Path):
    """To the model of a run in memory that nobody disturbs."""
    s3_before, gcs_before = len(clouds.s3.requests), len(clouds.gcs.requests)
    first, second, third = (Machine(clouds, tmp_path / name) for name in "123")

    # Half of a manifest has arrived, again and again: the round has no checkpoint.
    first.killed_at("PUT .*/round-000002.json", Fault(reset_up=100))
    check_whole(clouds.run_objects(), newest=1)

    # A manifest is there, and the coordinator does not know it.
    lost = Fault(reset_down=-1)
    second.killed_at("PUT .*/round-000003.json", lost, "--resume", seen=2)
    check_whole(clouds.run_objects(), newest=3)

    # Half of the second round's weights or state that this process writes.
    cut = Fault(reset_up=1000)
    second.killed_at(BLOB, cut, "--resume", after=2)
    check_whole(clouds.run_objects(), newest=4)

    assert third.finished("--resume") == 0, third.said()
    objects = clouds.run_objects()
    check_whole(objects, newest=ROUNDS)
    check_reads(clouds, s3_before, gcs_before)

    run = third.run_folder()
    assert second.run_folder().name == run.name == first.run_folder().name
    view = fold(read_events(run / "events.jsonl"))
    assert view.status == "completed"
    assert [row.index for row in view.rounds] == list(range(1, ROUNDS + 1))
    model = run / "model.safetensors"
    assert objects[f"{RUNS}{run.name}/{model.name}"] == model.read_bytes()
    check_same(load_file(model), undisturbed())


def undisturbed() -> Mapping[str, Any]:
    """The model of the job without any cloud."""
    sites = [f"sites.{i}.data.source=support.hospitals:digits" for i in (0, 1)]
    sites += [f"sites.{i}.data.options={{hospital={i}}}" for i in (0, 1)]
    job = job_file.load(JOB, [*SHORT, *sites, "storage.url=memory://"])
    return simulate(job).weights


def check_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
