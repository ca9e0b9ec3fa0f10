"""What ``crossfed down`` finds, prices, deletes and leaves alone; no node runs here."""

import contextlib
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support.deployment import crossfed_here as crossfed
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.exit_codes import BAD_JOB, FAILED
from deploy.wiring import run_store
from federation.job import job_file
from federation.job.spec import JobSpec
from privacy.dp.ledger.ledger_files import LEDGER_NAME

pytestmark = pytest.mark.slow
RUNS = "deployments/fed/aggregator/runs"
RUN = "20261123-180643-2b0784"
PRIVATE = {
    "privacy": {
        "differential_privacy": {
            "unit": "record",
            "target_epsilon": 50.0,
            "clip_norm": 1.0,
        }
    },
    "aggregation": {"weights": "uniform"},
    "training": {"local_steps": 1, "batch_size": 4, "optimizer": {"lr": 0.5}},
    "evaluation": {"every": 0},
}


def deployment_of(job: JobSpec, folder: Path) -> Path:
    """A deployment file whose only run was simulated."""
    file = folder / "fed.toml"
    (folder / "job.toml").write_text(tomli_w.dumps(job_file.document(job)))
    site = job.sites[0].name
    file.write_text(f'name = "fed"\njob = "job.toml"\n[[sites]]\nname = "{site}"\n')
    simulate(job, folder=folder / RUNS / job.name / RUN)
    return file


def down(file: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        crossfed("down", str(file), "--json", *arguments).stdout
    )
    return found


def test_what_stays_has_a_price(tmp_path: Path, bucket: dict[str, str]):
    """A bucket by its bytes; a site that was removed from the file is listed, too."""
    job = small_job(num_sites=2, rounds=1, storage=bucket)
    file = deployment_of(job, tmp_path)
    removed = tmp_path / "deployments" / "fed" / "sites" / "old"
    removed.mkdir(parents=True)
    (removed / "identity.pem").write_bytes(bytes(1000))
    left = {each["what"]: each for each in down(file)["left"]}
    old = left["keys, ledgers and state of old, which is not in the file"]
    assert old["bytes"] == 1000
    with contextlib.closing(run_store.open_bucket(job)) as store:
        size = sum(info.size for info in store.list())
    assert size > 0
    found = left["runs in the bucket"]
    price = {"s3": 0.023, "gs": 0.020}[bucket["url"].partition(":")[0]]
    assert (found["bytes"], found["trouble"]) == (size, "")
    assert found["dollars_per_month"] == pytest.approx(size / 1e9 * price)


def test_keys_cost_by_the_month(tmp_path: Path):
    """Once, though two things are encrypted with one."""
    arn = "arn:aws:kms:us-east-1:123456789012:key/0a1b"
    job = small_job(num_sites=2, storage={"encryption": {"key": f"aws-kms:{arn}"}})
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job_file.document(job)))
    file = tmp_path / "fed.toml"
    gcp = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    file.write_text(
        'name = "fed"\njob = "job.toml"\n[[sites]]\nname = "site-0"\n[exchange]\n'
        f'kms_key = "{gcp}"\nencryption = {{ key = "aws-kms:{arn}" }}\n'
    )
    left = {e["place"]: e["dollars_per_month"] for e in down(file)["left"]}
    assert left == {arn: 1.0, gcp: 0.06}


def test_an_unreachable_bucket_hides_nothing_else(
    tmp_path: Path, bucket: dict[str, str]
):
    """Its cost is unknown, and not zero."""
    file = deployment_of(small_job(num_sites=2, rounds=1, storage=bucket), tmp_path)
    path = tmp_path / "job.toml"
    place = bucket["url"].split("/")[2]
    path.write_text(path.read_text().replace(place, "no-such-bucket"))
    left = {each["what"]: each for each in down(file)["left"]}
    gone = left["runs in the bucket"]
    assert (gone["bytes"], gone["dollars_per_month"]) == (None, None)
    assert "no-such-bucket" in gone["trouble"]
    assert left["runs and results"]["bytes"] > 0


def test_purge_deletes_runs_here_and_in_the_bucket(
    tmp_path: Path, bucket: dict[str, str]
):
    """Once the name was given; another name ends and deletes nothing."""
    job = small_job(num_sites=2, rounds=1, storage=bucket)
    file = deployment_of(job, tmp_path)
    place = tmp_path / RUNS / job.name / RUN
    for arguments in (["--purge"], ["--yes-purge", "other"]):
        told = crossfed("down", str(file), *arguments, code=BAD_JOB).stderr
        assert "fed" in told
        assert (place / "model.safetensors").exists()
    assert down(file, "--yes-purge", "fed")["deleted_bytes"] > 0
    assert not place.exists()
    with contextlib.closing(run_store.open_bucket(job)) as store:
        assert [info.key for info in store.list()] == []


def test_purge_leaves_what_ledgers_need(tmp_path: Path):
    """A run folder with ledgers as a whole; else the events, which hold anchors."""
    job = small_job(num_sites=2, rounds=1, **PRIVATE)
    file = deployment_of(job, tmp_path)
    place = tmp_path / RUNS / job.name / RUN
    before = sorted(path for path in place.rglob("*"))
    ledgers = [path for path in before if path.name == LEDGER_NAME]
    assert ledgers
    down(file, "--yes-purge", "fed")
    assert sorted(path for path in place.rglob("*")) == before
    for path in ledgers:  # As where the sites are other machines.
        path.unlink()
    done = crossfed("down", str(file), "--yes-purge", "fed")
    assert f"{place}: kept" in done.stderr
    assert {path.name for path in place.iterdir()} == {"events.jsonl", "job.toml"}


def test_purge_asks_for_the_name_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And deletes if it is right."""
    job = small_job(num_sites=2, rounds=1)
    file = deployment_of(job, tmp_path)
    place = tmp_path / RUNS / job.name / RUN
    main, other = pty.openpty()
    with os.fdopen(main, "wb", buffering=0) as person, os.fdopen(other) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        for answer, is_left in ((b"no\n", True), (b"fed\n", False)):
            person.write(answer)
            crossfed("down", str(file), "--purge", code=BAD_JOB if is_left else 0)
            assert place.exists() == is_left


def test_down_of_what_never_was_makes_nothing(tmp_path: Path):
    """Nor does an `up` that is refused."""
    job = small_job(num_sites=2, rounds=1)
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job_file.document(job)))
    file = tmp_path / "fed.toml"
    file.write_text('name = "fed"\njob = "job.toml"\n[[sites]]\nname = "mars"\n')
    before = sorted(tmp_path.iterdir())
    assert down(file) == {"ended": 0, "left": []}
    told = crossfed("up", str(file), code=BAD_JOB).stderr
    assert "'mars' is no site" in told
    assert sorted(tmp_path.iterdir()) == before


def test_an_aggregator_that_is_lost_is_named(tmp_path: Path):
    """Sites would trust no other, so that none is made."""
    job = small_job(num_sites=2, rounds=1)
    file = deployment_of(job, tmp_path)
    folder = tmp_path / "deployments" / "fed"
    site = folder / "sites" / job.sites[0].name
    site.mkdir(parents=True, mode=0o700)
    (site / "site.pem").write_text("")
    for path in (folder, folder / "sites"):
        path.chmod(0o700)
    told = crossfed("up", str(file), code=FAILED).stderr
    assert f"{folder / 'aggregator'} has no aggregator.toml" in told
    assert str(site / "site.pem") in told
    assert not (folder / "aggregator" / "ca.key").exists()
