"""Which jobs a site's ranks train, and what of the agent's environment they get."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_jobs import blobs, small_job

from clients.data.datasets import as_dataset
from deploy.site_host import ranks as site_ranks
from deploy.site_host.config import (
    AggregatorSpec,
    ComputeSpec,
    LocalDataSpec,
    SiteFile,
)
from federation.errors import JobError, SiteError
from federation.job.spec import JobSpec

DATA = tuple(as_dataset(part, name="blobs") for part in blobs())
WHOLE = {
    "PATH": "/bin",
    "PYTHONPATH": "/here",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "GOOGLE_APPLICATION_CREDENTIALS": "key.json",
    "CROSSFED_CACHE_GIB": "1",
    "WAREHOUSE_TOKEN": "secret",
}
PLAIN = {"PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CROSSFED_CACHE_GIB"}
CLOUD = {"AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"}


def site_file(
    source: str = "", ranks: int = 2, *, compile_: bool = False, **options: Any
) -> SiteFile:
    environment = options.pop("environment", ())
    sharding = options.pop("sharding", "none")
    return SiteFile(
        name="site-0",
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=LocalDataSpec(source=source, options=options),
        compute=ComputeSpec(
            ranks=ranks, sharding=sharding, compile=compile_, environment=environment
        ),
    )


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (site_file("warehouse:patients"), PLAIN),
        (site_file("file:///data"), PLAIN),
        (site_file("s3://bucket/data"), PLAIN | CLOUD),
        (site_file("file:///data", encryption_key="aws-kms:arn"), PLAIN | CLOUD),
        (
            site_file("warehouse:patients", environment=("WAREHOUSE_TOKEN",)),
            PLAIN | {"WAREHOUSE_TOKEN"},
        ),
    ],
)
def test_credentials_go_where_data_needs_them(file: SiteFile, expected: set[str]):
    """And what the operator names, goes too."""
    assert expected == set(site_ranks.environment(file, WHOLE))


def private_job() -> JobSpec:
    return small_job(
        training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 8.0,
                "clip_norm": 1.0,
            }
        },
    )


def test_private_steps_with_parts_of_a_model_are_refused():
    """The message says why, and what the operator can do; other steps are taken."""
    file = site_file(sharding="full")
    with pytest.raises(JobError, match=r"set compute.sharding = ") as caught:
        site_ranks.check_job(private_job(), file, DATA)
    assert caught.value.key == "privacy.differential_privacy.unit"
    if hasattr(torch.cpu.Stream, "record_event"):  # As ``check_devices`` asks.
        site_ranks.check_job(small_job(), file, DATA)


def test_compiled_code_runs_in_a_rank():
    """Also in the only one; private steps are not compiled and stay in the agent."""
    job, one = small_job(), site_file(ranks=1, compile_=True)
    assert site_ranks.uses_ranks(job, one)
    assert not site_ranks.uses_ranks(private_job(), one)
    assert not site_ranks.uses_ranks(job, site_file(ranks=1))
    assert site_ranks.uses_ranks(private_job(), site_file(compile_=True))


def test_a_joint_step_is_refused():
    """The message says what the operator can do; private steps of a site are taken."""
    job = private_job()
    site_ranks.check_job(job, site_file(), DATA)
    private = replace(job.privacy.differential_privacy, unit="joint")
    joint = replace(job, privacy=replace(job.privacy, differential_privacy=private))
    with pytest.raises(JobError, match=r"compute\.ranks = 1") as caught:
        site_ranks.check_job(joint, site_file(), DATA)
    assert caught.value.key == "privacy.differential_privacy.unit"
    site_ranks.check_job(joint, site_file(ranks=1), DATA)


def test_one_device_is_refused():
    """Each rank has a GPU of its own."""
    job = small_job(
        training={"local_steps": 1, "device": "cuda:0", "optimizer": {"lr": 0.5}}
    )
    with pytest.raises(JobError, match="is a single device") as caught:
        site_ranks.check_job(job, site_file(), DATA)
    assert caught.value.key == "training.device"


@pytest.mark.parametrize("file", [site_file(), site_file(ranks=1, compile_=True)])
def test_a_kept_optimiser_is_refused(file: SiteFile):
    """Its state would be in several processes, or in one that may die."""
    optimizer = {"lr": 0.5, "momentum": 0.9, "state": "keep"}
    job = small_job(training={"local_steps": 1, "optimizer": optimizer})
    with pytest.raises(JobError, match="ranks do not support") as caught:
        site_ranks.check_job(job, file, DATA)
    assert caught.value.key == "training.optimizer.state"
    site_ranks.check_job(job, site_file(ranks=1), DATA)


def test_a_users_loop_is_refused():
    """It runs in one process."""
    job = small_job(training={"task": "trainer", "local_steps": 1})
    with pytest.raises(JobError, match="ranks do not support") as caught:
        site_ranks.check_job(job, site_file(), DATA)
    assert caught.value.key == "training.task"


def test_personal_parts_are_refused():
    """They would be in several processes."""
    model = {"factory": "toy:net", "personal": ["head.*"]}
    with pytest.raises(JobError, match="ranks do not support") as caught:
        site_ranks.check_job(small_job(model=model), site_file(), DATA)
    assert caught.value.key == "model.personal"


def test_more_ranks_than_examples_are_refused():
    """At the handshake, and not in the first round."""
    with pytest.raises(SiteError, match=r"fewer training examples .*61 ranks"):
        site_ranks.check_job(small_job(), site_file(ranks=61), DATA)


def test_the_agent_needs_no_gpu_of_its_own():
    """Where ranks train, its model is on the CPU."""
    job = small_job()
    assert site_ranks.agents_job(job, site_file(ranks=1)) == job
    assert site_ranks.agents_job(job, site_file()).training.device == "cpu"


def test_an_agent_does_not_start_without_its_gpus():
    """The unit then fails, and the machine says why on its console."""
    there = torch.cuda.device_count()
    site_ranks.check_gpus(replace(site_file(), compute=ComputeSpec(gpus=there)))
    file = replace(site_file(), compute=ComputeSpec(gpus=there + 1))
    with pytest.raises(JobError, match=f"needs {there + 1} GPUs and sees") as caught:
        site_ranks.check_gpus(file)
    assert caught.value.key == "compute.gpus"
