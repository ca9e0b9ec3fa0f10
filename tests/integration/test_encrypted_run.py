"""Runs whose checkpoints are encrypted: killed, resumed, and with other keys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buckets import storage_table
from support.killed_runs import kill_in_round_2
from support.small_jobs import small_job
from support.without_report import simulate

from cloud_adapters.keys.key_file import add_key
from cloud_adapters.urls import open_store
from deploy import exit_codes
from deploy.cli import commands as cli
from deploy.wiring import run_store
from federation.errors import CorruptObject, JobError, KeyRefused
from federation.events import CheckpointSaved, Event
from federation.job.spec import JobSpec

pytestmark = pytest.mark.slow


def tables(key: Path | None, **storage: Any) -> dict[str, Any]:
    if key is not None:
        storage["encryption"] = {"key": f"file:{key}"}
    return {
        "num_sites": 2,
        "rounds": 4,
        "aggregation": {"server_optimizer": {"name": "adam", "lr": 0.1}},
        "storage": storage,
    }


@pytest.fixture
def key(tmp_path: Path) -> Path:
    add_key(tmp_path / "keys.toml")
    return tmp_path / "keys.toml"


def stop_after_round_2(job: dict[str, Any], folder: Path) -> None:
    saved: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            saved.append(event.round_index)

    done = simulate(
        small_job(**job),
        folder=folder,
        listeners=[listen],
        stop_requested=lambda: 2 in saved,
    )
    assert done.rounds_completed == 2


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run, with its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def small(job: dict[str, Any]) -> JobSpec:
    return small_job(**job)


def test_killed_run_resumes_to_the_same_model(key: Path, tmp_path: Path):
    """With no checkpoint in clear, and with an older key that has been replaced."""
    folder = tmp_path / "run"
    kill_in_round_2(tables(key), folder)
    checkpoints = contents(folder / "checkpoints")
    assert len(checkpoints) >= 4
    assert all(content.startswith(b"crossfed\x01") for content in checkpoints.values())
    add_key(key)
    done = simulate(small(tables(key)), folder=folder, resume=True)
    assert (done.status, done.rounds_now) == ("completed", 2)
    plain = simulate(small(tables(None)), folder=tmp_path / "plain")
    for name, array in plain.weights.items():
        np.testing.assert_array_equal(array, done.weights[name])


def test_other_keys_are_refused_and_nothing_is_written(key: Path, tmp_path: Path):
    """A key file of another run, none, and no encryption at all."""
    folder = tmp_path / "run"
    stop_after_round_2(tables(key), folder)
    add_key(tmp_path / "other.toml")
    before = contents(folder)
    for other, error, words in (
        (tmp_path / "other.toml", KeyRefused, r"other\.toml.*use the key file"),
        (tmp_path / "none.toml", KeyRefused, "crossfed keys storage"),
        (None, CorruptObject, "none of the run's . checkpoints"),
    ):
        with pytest.raises(error, match=words):
            simulate(small(tables(other)), folder=folder, resume=True)
        assert contents(folder) == before
    done = simulate(small(tables(key)), folder=folder, resume=True)
    assert done.status == "completed"


def test_plain_run_does_not_go_on_encrypted(key: Path, tmp_path: Path):
    """The message says why."""
    folder = tmp_path / "run"
    stop_after_round_2(tables(None), folder)
    before = contents(folder)
    with pytest.raises(CorruptObject, match="is not encrypted"):
        simulate(small(tables(key)), folder=folder, resume=True)
    assert contents(folder) == before


def test_damaged_checkpoint_is_skipped(key: Path, tmp_path: Path):
    """As one in clear: the run goes back to the one before it."""
    folder = tmp_path / "run"
    stop_after_round_2(tables(key), folder)
    newest = folder / "checkpoints/round-000002.json"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    done = simulate(small(tables(key)), folder=folder, resume=True)
    assert (done.status, done.rounds_now) == ("completed", 3)
    plain = simulate(small(tables(None)), folder=tmp_path / "plain")
    for name, array in plain.weights.items():
        np.testing.assert_array_equal(array, done.weights[name])


def test_checkpoints_of_two_runs_cannot_be_exchanged(key: Path, tmp_path: Path):
    """Though key and names are the same."""
    stop_after_round_2(tables(key), tmp_path / "one")
    stop_after_round_2(tables(key), tmp_path / "two")
    (tmp_path / "one/checkpoints").rename(tmp_path / "aside")
    (tmp_path / "two/checkpoints").rename(tmp_path / "one/checkpoints")
    with pytest.raises(CorruptObject, match="belongs to another object"):
        simulate(small(tables(key)), folder=tmp_path / "one", resume=True)


def test_run_in_a_bucket(key: Path, tmp_path: Path, bucket: dict[str, str]):
    """Everything there is encrypted, and another machine continues with the key."""
    job = tables(key, **bucket)
    kill_in_round_2(job, tmp_path / "here")
    add_key(tmp_path / "other.toml")
    wrong = job | {
        "storage": job["storage"]
        | {"encryption": {"key": f"file:{tmp_path}/other.toml"}}
    }
    with pytest.raises(KeyRefused, match=r"other\.toml"):
        run_store.newest_folder(small(wrong), tmp_path / "there")
    folder = run_store.newest_folder(small(job), tmp_path / "there")
    with pytest.raises(KeyRefused, match=r"other\.toml"):
        simulate(small(wrong), folder=folder, resume=True)
    assert not folder.exists() or contents(folder).keys() <= {".lock"}
    done = simulate(small(job), folder=folder, resume=True)
    assert (done.status, done.rounds_now) == ("completed", 2)
    service = run_store.store_options(small(job))
    plain = open_store(bucket["url"], options=service)
    found = {info.key: plain.read(info.key) for info in plain.list()}
    plain.close()
    assert f"small/{done.run_id}/model.safetensors" in found
    assert all(content.startswith(b"crossfed\x01") for content in found.values())
    store = run_store.open_bucket(small(job), done.run_id)
    assert store.read("events.jsonl") == (folder / "events.jsonl").read_bytes()
    store.close()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("keys.toml", "not name a key"),
        ("file:", "not name a key"),
        ("vault:x", "'vault' of a key is"),
        ("aws-kms:alias/x", "ARN"),
        ("gcp-kms:x", "name of a Cloud KMS key"),
    ],
)
def test_job_must_name_a_key(key: str, words: str, tmp_path: Path):
    """Before anything is written."""
    job = small_job(storage={"encryption": {"key": key}})
    with pytest.raises(JobError, match=words) as caught:
        simulate(job, folder=tmp_path / "run")
    assert caught.value.key == "storage.encryption.key"
    assert not (tmp_path / "run").exists()


def test_checkpoints_by_url(
    key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With the key beside, since nobody sees the job."""
    folder = tmp_path / "small" / "run-1"
    stop_after_round_2(tables(key), folder)
    started = json.loads((folder / "events.jsonl").read_text().splitlines()[0])
    place = tmp_path / "small" / started["run_id"]
    folder.rename(place)
    command = ["checkpoints", f"file://{place}", "--verify"]
    assert cli.main([*command, "--encryption-key", f"file:{key}"]) == exit_codes.DONE
    assert "verified" in capsys.readouterr().out
    add_key(tmp_path / "other.toml")
    wrong = f"file:{tmp_path}/other.toml"
    assert cli.main([*command, "--encryption-key", wrong]) == exit_codes.FAILED
    assert "other.toml" in capsys.readouterr().err


@pytest.fixture(params=["folder", "s3", "gs"])
def storage(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The table ``storage`` of a job: of one in its folder, or in a bucket."""
    return {} if request.param == "folder" else storage_table(request, monkeypatch)


def test_run_goes_over_to_another_key(
    key: Path, tmp_path: Path, storage: dict[str, str]
):
    """Its job names the new key, and it is resumed."""
    add_key(tmp_path / "other.toml")
    folder = tmp_path / "run"
    stop_after_round_2(tables(key, **storage), folder)
    to = f"file:{tmp_path}/other.toml"
    assert cli.main(["storage", "rewrap", str(folder), "--to", to]) == exit_codes.DONE
    assert f"{tmp_path}/other.toml" in (folder / "job.toml").read_text()
    with pytest.raises(KeyRefused):
        simulate(small(tables(key, **storage)), folder=folder, resume=True)
    assert cli.main(["checkpoints", str(folder), "--verify"]) == exit_codes.DONE
    job = small(tables(tmp_path / "other.toml", **storage))
    done = simulate(job, folder=folder, resume=True)
    assert (done.status, done.rounds_now) == ("completed", 2)
    # An export is in clear unless a key is named.
    for more, begins in (([], b"---"), (["--encryption-key", to], b"crossfed")):
        place = tmp_path / f"export-{len(more)}"
        command = ["export", str(folder), "--to", f"file://{place}", *more]
        assert cli.main(command) == exit_codes.DONE
        assert (place / "README.md").read_bytes().startswith(begins)
    out = ["--encryption-key", to, "--out", str(place / "clear")]
    assert cli.main(["storage", "decrypt", f"file://{place}", *out]) == exit_codes.DONE
    model = (folder / "model.safetensors").read_bytes()
    assert (place / "clear" / "model.safetensors").read_bytes() == model


def test_export_and_checkpoints_at_an_endpoint(
    tmp_path: Path, bucket: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    """What a run's job says of its service, a URL cannot; the command does."""
    folder = tmp_path / "run"
    done = simulate(small(tables(None, **bucket)), folder=folder)
    service = ["--endpoint", bucket["endpoint"], "--region", bucket["region"]]
    place = f"{bucket['url']}/small/{done.run_id}"
    assert cli.main(["checkpoints", place, "--verify", *service]) == exit_codes.DONE
    assert "verified" in capsys.readouterr().out
    target = bucket["url"].replace("our/runs", "export")
    command = ["export", str(folder), "--to", target, *service]
    assert cli.main(command) == exit_codes.DONE
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{target}\n")
    assert "not encrypted" in printed.err
