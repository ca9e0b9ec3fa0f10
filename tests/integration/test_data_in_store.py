"""Jobs whose data is in an object store, against the same jobs with it in memory."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from cloud_adapters.keys.key_file import add_key
from deploy import exit_codes
from deploy.cli import commands as cli
from federation.errors import BucketNotFound, CorruptObject, JobError, KeyRefused
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

STEPS = {"local_steps": 3, "batch_size": 7, "optimizer": {"lr": 0.5}}
EPOCHS = {"local_epochs": 2, "batch_size": 7, "optimizer": {"lr": 0.5}}
BLOBS = "support.small_jobs:blobs"


def job(source: str, training: Mapping[str, Any] = STEPS, **data: Any) -> JobSpec:
    table = {"source": source, "partition": {"kind": "stratified"}, **data}
    return small_job(num_sites=2, rounds=3, seed=3, data=table, training=training)


def shards(url: str, *options: str) -> None:
    command = ["data", "shard", BLOBS, url, *options]
    assert cli.main([*command, "--shard-size", "0.02"]) == exit_codes.DONE


def check_same(one: RunResult, other: RunResult) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, array in one.weights.items():
        np.testing.assert_array_equal(array, other.weights[name])
    assert one.loss == other.loss


@pytest.mark.parametrize("training", [STEPS, EPOCHS])
@pytest.mark.parametrize("encoding", ["tar", "parquet"])
def test_same_bits_as_in_memory(
    tmp_path: Path, encoding: str, training: Mapping[str, Any]
):
    """Where data is changes no bit of a run."""
    url = f"file://{tmp_path}/blobs"
    shards(url, "--format", encoding)
    found = simulate(job(url, training), folder=None)
    check_same(found, simulate(job(BLOBS, training), folder=None))


@pytest.mark.parametrize("training", [STEPS, EPOCHS])
def test_resume_in_the_order_of_shards(tmp_path: Path, training: Mapping[str, Any]):
    """A run that continues in the middle of an epoch is the run that never stopped."""
    url = f"file://{tmp_path}/blobs"
    shards(url)
    options = {"order": "shards", "window": 2}
    ours = job(url, training, options=options)
    rounds: list[object] = []
    stopped = simulate(
        ours,
        folder=tmp_path / "run",
        listeners=[rounds.append],
        stop_requested=lambda: len(rounds) > 0,
    )
    assert stopped.rounds_now < 3
    resumed = simulate(ours, folder=tmp_path / "run", resume=True)
    whole = simulate(ours, folder=None)
    check_same(resumed, whole)
    other = simulate(job(BLOBS, training), folder=None)
    assert any(
        not np.array_equal(whole.weights[name], other.weights[name])
        for name in whole.weights
    )


@pytest.fixture(params=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, str]:
    """URL and endpoint of a new bucket, and a cache of its own."""
    monkeypatch.setenv("CROSSFED_CACHE_DIR", str(tmp_path / "cache"))
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        name = server.bucket()
    else:
        from support import gcs_stores  # noqa: PLC0415 (slow to import)

        server = request.getfixturevalue("gcs_server")
        name = gcs_stores.new_bucket(server)
    return f"{request.param}://{name}", server.url


def test_what_each_site_reads_is_told(bucket: tuple[str, str], tmp_path: Path):
    """By site and way; what the cache spares is told instead of read."""
    url, endpoint = bucket
    shards(f"{url}/blobs", "--endpoint", endpoint, "--region", "us-east-1")
    options = {"endpoint": endpoint, "region": "us-east-1"}
    own = {"source": f"{url}/blobs", "options": options}
    sites = [
        {"name": "a", "cloud": "aws", "region": "us-east-1", "data": own},
        {"name": "b", "cloud": "gcp", "region": "us-east-1", "data": own},
    ]
    ours = small_job(rounds=2, training=STEPS, sites=sites)
    first = {used.who: used for used in simulate(ours, folder=None).view.storage}
    near, far = ("a", "b") if url.startswith("s3") else ("b", "a")
    assert (first[near].way, first[far].way) == ("same region", "internet")
    assert {used.url for used in first.values()} == {f"{url}/blobs"}
    reads = {
        who: next(use for use in used.uses if use.operation == "read")
        for who, used in first.items()
    }
    # They share a cache: what one has fetched, the other need not.
    assert all(use.requests >= use.calls >= 1 for use in reads.values())
    assert sum(use.calls for use in reads.values()) > 2
    shards_bytes = sum(p.stat().st_size for p in (tmp_path / "cache").iterdir())
    assert sum(use.received_bytes for use in reads.values()) >= shards_bytes
    again = {used.who: used for used in simulate(ours, folder=None).view.storage}
    for used in again.values():
        (read,) = (use for use in used.uses if use.operation == "read")
        assert read.calls == 1  # The index: all else is in the cache.
        assert used.spared_calls > 1
        assert used.spared_bytes > 1000


def test_data_of_all_sites_is_of_all_sites(tmp_path: Path):
    """A simulation reads it once, wherever it is."""
    shards(f"file://{tmp_path}/blobs")
    (used,) = simulate(job(f"file://{tmp_path}/blobs"), folder=None).view.storage
    assert (used.who, used.way) == ("all sites", "this machine")


def test_missing_bucket(bucket: tuple[str, str]):
    """One error, with the URL."""
    url, endpoint = bucket
    options = {"endpoint": endpoint, "region": "us-east-1"}
    missing = job(f"{url}-none/blobs", options=options)
    with pytest.raises(BucketNotFound, match=re.escape(f"{url}-none")):
        simulate(missing, folder=None)


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Size, classes and balance, for people and for programs."""
    url = f"file://{tmp_path}/blobs"
    shards(url, "--name", "three clouds")
    capsys.readouterr()
    assert cli.main(["data", "info", url, "--verify"]) == exit_codes.DONE
    text = capsys.readouterr().out
    assert "60 examples (4)" in text
    assert "0: 20, 1: 20, 2: 20" in text
    assert "shard matches the index" in text
    assert cli.main(["data", "info", url, "--json"]) == exit_codes.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["dataset"] == "three clouds"
    assert found["train"]["classes"] == {"0": 20, "1": 20, "2": 20}
    assert found["train"]["shards"] == 6
    assert found["train"]["class_imbalance"] < 0.1
    assert not found["verified"]


def test_damage_is_found_by_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With one line and without a traceback."""
    shards(f"file://{tmp_path}/blobs")
    damaged = next((tmp_path / "blobs" / "held_out").glob("*.tar"))
    damaged.write_bytes(damaged.read_bytes()[:-600])
    code = cli.main(["data", "info", f"file://{tmp_path}/blobs", "--verify"])
    assert code == exit_codes.FAILED
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert damaged.name in line
    assert str(tmp_path) in line


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("ftp://x/y", {}, "data.source: the scheme 'ftp'"),
        ("file://x", {"sede": 1}, r"data.options: there is no option 'sede'.*version"),
        ("file://x", {"order": "none"}, "data.options: order is 'none'"),
        ("file://x", {"window": "8"}, r"data.options.window: is '8': expected int"),
    ],
)
def test_wrong_options(source: str, options: Mapping[str, Any], reason: str):
    """The message names the key of the job."""
    with pytest.raises(JobError, match=reason):
        simulate(job(source, options=options), folder=None)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--shard-size", "0"),
        ("--workers", "0"),
        ("--option", "nothing"),
        ("--option", "none=1"),
    ],
)
def test_wrong_arguments(tmp_path: Path, wrong: tuple[str, str]):
    """Each is the user's mistake, and nothing is written."""
    command = ["data", "shard", BLOBS, f"file://{tmp_path}/x", *wrong]
    assert cli.main(command) == exit_codes.BAD_JOB
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("size", ["many", "-1", "inf", "nan"])
def test_a_cache_of_no_size(size: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The message names the variable."""
    monkeypatch.setenv("CROSSFED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CROSSFED_CACHE_GIB", size)
    with pytest.raises(JobError, match=f"CROSSFED_CACHE_GIB: is '{size}'"):
        simulate(job("s3://bucket/x", options={"region": "us-east-1"}), folder=None)
    assert not (tmp_path / "cache").exists()


def test_no_cache(
    bucket: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Nothing of the data is left on the disk."""
    url, endpoint = bucket
    monkeypatch.setenv("CROSSFED_CACHE_GIB", "0")
    shards(f"{url}/blobs", "--endpoint", endpoint, "--region", "us-east-1")
    options = {"endpoint": endpoint, "region": "us-east-1"}
    simulate(job(f"{url}/blobs", options=options), folder=None)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def key(tmp_path: Path) -> str:
    add_key(tmp_path / "keys.toml")
    return f"file:{tmp_path}/keys.toml"


@pytest.mark.parametrize("encoding", ["tar", "parquet"])
def test_encrypted_shards(
    tmp_path: Path, key: str, encoding: str, capsys: pytest.CaptureFixture[str]
):
    """The run is the same, and no object is in clear; in both orders."""
    url = f"file://{tmp_path}/blobs"
    lock = ("--encryption-key", key)
    shards(url, "--format", encoding, *lock)
    files = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    objects = [path for path in files if ".about" not in path.parts]
    assert len(objects) >= 5
    assert all(p.read_bytes().startswith(b"crossfed\x01") for p in objects)
    options: dict[str, Any] = {"encryption_key": key}
    expected = simulate(job(BLOBS), folder=None)
    check_same(simulate(job(url, options=options), folder=None), expected)
    options |= {"order": "shards", "window": 2}
    assert simulate(job(url, options=options), folder=None).status == "completed"
    capsys.readouterr()
    assert cli.main(["data", "info", url, "--verify", *lock]) == exit_codes.DONE
    assert key in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in objects}
    shards(url, "--format", encoding, *lock)  # All are there already.
    assert {path: path.stat().st_mtime_ns for path in objects} == times


def test_encrypted_shards_and_wrong_keys(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
):
    """None, another, and writing with either: each is told, and nothing changes."""
    url = f"file://{tmp_path}/blobs"
    shards(url, "--encryption-key", key)
    add_key(tmp_path / "other.toml")
    before = {p: p.read_bytes() for p in (tmp_path / "blobs").rglob("*") if p.is_file()}
    with pytest.raises(CorruptObject, match="is encrypted: give its key"):
        simulate(job(url), folder=None)
    other = f"file:{tmp_path}/other.toml"
    with pytest.raises(KeyRefused, match=r"not in .*other\.toml"):
        simulate(job(url, options={"encryption_key": other}), folder=None)
    with pytest.raises(JobError, match=r"options\.encryption_key: .x. does not name"):
        simulate(job(url, options={"encryption_key": "x"}), folder=None)
    capsys.readouterr()
    for more, words in (
        ([], "holds an encrypted dataset"),
        (["--replace"], "holds an encrypted dataset"),
        (["--encryption-key", other], "other.toml"),
        (["--encryption-key", other, "--replace"], "other.toml"),
    ):
        assert cli.main(["data", "shard", BLOBS, url, *more]) == exit_codes.FAILED
        assert words in capsys.readouterr().err
    after = {p: p.read_bytes() for p in (tmp_path / "blobs").rglob("*") if p.is_file()}
    assert after == before


def test_a_dataset_in_clear_is_not_encrypted_over(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
):
    """It has to go first, or the new one elsewhere."""
    url = f"file://{tmp_path}/blobs"
    shards(url)
    capsys.readouterr()
    command = ["data", "shard", BLOBS, url, "--encryption-key", key, "--replace"]
    assert cli.main(command) == exit_codes.FAILED
    assert "is not encrypted" in capsys.readouterr().err
    assert cli.main(["data", "info", url, "--verify"]) == exit_codes.DONE


def test_the_clouds_own_encryption(
    bucket: tuple[str, str],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
):
    """A key of the bucket's cloud passes through; one of the other is refused."""
    url, endpoint = bucket
    arn = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    name = "projects/p-1/locations/l/keyRings/r/cryptoKeys/k"
    ours, theirs = (arn, name) if url.startswith("s3") else (name, arn)
    service = ("--endpoint", endpoint, "--region", "us-east-1")
    command = ["data", "shard", BLOBS, f"{url}/blobs", *service]
    assert cli.main([*command, "--kms-key", theirs]) == exit_codes.BAD_JOB
    assert "kms_key" in capsys.readouterr().err
    assert cli.main([*command, "--kms-key", ours]) == exit_codes.DONE
    if url.startswith("s3"):
        client = request.getfixturevalue("s3_server").client()
        name = url.removeprefix("s3://")
        answer = client.head_object(Bucket=name, Key="blobs/index.json")
        assert (answer["ServerSideEncryption"], answer["SSEKMSKeyId"]) == (
            "aws:kms",
            arn,
        )
    else:
        asked = request.getfixturevalue("gcs_server").requests
        assert any(each.query.get("kmsKeyName") == name for each in asked)
