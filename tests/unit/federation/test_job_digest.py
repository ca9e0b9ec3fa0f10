"""Which keys of a job decide, and that every one of them changes the digest."""

import tomllib

import pytest

from federation.job import job_digest, job_file

JOB = """
name = "tiny"
rounds = 3
model.factory = "clients.models:logistic_regression"
model.options = { inputs = 30, classes = 2 }
data = { source = "clients.data:breast_cancer", partition = { kind = "stratified" } }
training = { local_steps = 5, optimizer = { lr = 0.1 } }
sites = [{ name = "a" }, { name = "b" }]
"""


def digest(*overrides: str) -> str:
    document = tomllib.loads(JOB)
    for text in overrides:
        name, _, value = text.partition("=")
        job_file.override(document, name, job_file._toml_value(value))
    return job_digest.digest(job_file.parse(document)).hex()


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "seed=1",
        "rounds=4",
        "training.optimizer.lr=1e-30",
        "training.local_steps=6",
        "training.batch_size=7",
        "training.max_tokens=128",
        "model.options.inputs=31",
        'model.personal=["head.*"]',
        "data.source=clients.data:digits",
        "data.partition.kind=iid",
        "evaluation.every=2",
        "communication.codec.name=bf16",
        "communication.down_codec.name=bf16",
        "communication.down_content=change",
        "aggregation.server_optimizer.lr=0.5",
        "schedule.minimum_sites=1",
        "privacy.secure_aggregation.two_sites_waiver=true",
        "sites.0.region=eu-west-1",
    ],
)
def test_a_key_that_decides_changes_the_digest(override: str):
    assert digest(override) != digest()


def test_a_kept_optimiser_changes_the_digest():
    momentum = "training.optimizer.momentum=0.9"
    assert digest(momentum, "training.optimizer.state=keep") != digest(momentum)


def test_a_run_of_an_earlier_release_has_the_digest_that_it_had():
    """A key that came later, at what was always done before, is not in it."""
    assert digest() == (
        "5d89ac62132efe6671d4c635e37bd94fdb023e4bb5aef2d533a66e5d31eddafe"
    )


@pytest.mark.parametrize(
    "override",
    [
        "storage.keep_checkpoints=9",
        "simulation.workers=2",
        "schedule.round_deadline_seconds=1.5",
    ],
)
def test_where_and_how_fast_does_not(override: str):
    assert digest(override) == digest()
