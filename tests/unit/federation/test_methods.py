"""Methods that are described as data, and what each of them excludes."""

import functools
from typing import Any

import pytest
from support import toy
from support.small_jobs import blobs

from clients.data.datasets import as_dataset
from clients.methods.registry import COUNTED
from deploy.site_host import ranks as site_ranks
from deploy.site_host.config import (
    AggregatorSpec,
    ComputeSpec,
    LocalDataSpec,
    SiteFile,
)
from federation.errors import JobError
from federation.job import job_digest, job_file
from federation.job.adapters import check_exact
from federation.job.method_checks import IN_A_JOB
from federation.job.personal_checks import CLUSTERS
from federation.methods.method import Method, Thing
from federation.methods.registry import METHODS

# What switches each method on.
ON: dict[str, dict[str, Any]] = {
    "control variates": {"training": {"control_variates": True}},
    "FedDyn": {
        "training": {"dynamic_alpha": 0.1},
        "aggregation": {"server_optimizer": {"name": "running_sum"}},
    },
}
SECURE = {"enabled": True, "two_sites_waiver": True}
PRIVATE = {"unit": "site", "clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}
# What asks for each thing that follows from the job alone.
ASKS: dict[str, dict[str, Any]] = ON | {
    Thing.EPOCHS: {"training": {"local_epochs": 1}},
    Thing.CHOSEN_STEPS: {"schedule": {"local_work": "auto", "max_local_steps": 9}},
    Thing.OTHER_OPTIMIZERS: {"training": {"optimizer": {"momentum": 0.9}}},
    Thing.CLIPPED_STEPS: {"training": {"clip_grad_norm": 1.0}},
    Thing.PROXIMAL: {"training": {"proximal_mu": 0.1}},
    Thing.NORMALIZED: {"training": {"local_epochs": 1, "normalized_steps": 2}},
    Thing.OVERLAP: {"training": {"overlap_steps": 1}},
    Thing.FLOAT16: {"training": {"precision": "fp16"}},
    Thing.TRAINER: {"training": {"task": "trainer"}},
    Thing.FLOWER_APPS: {
        "sites": [{"name": "c"}, {"name": "a"}, {"name": "b", "flower_app": {}}]
    },
    Thing.CLUSTERS: {
        "training": {"task": CLUSTERS},
        "model": {"personal": ["choice.*"]},
    },
    Thing.FEWER_RANKS: {
        "model": {"options": {"lora": {"rank": 4, "method": "ffa"}}},
        "sites": [{"name": "c", "lora_rank": 2}, {"name": "a"}, {"name": "b"}],
    },
    Thing.RELAYS: {"relays": [{"name": "r", "sites": ["a"]}]},
    Thing.PARTIAL_ROUNDS: {"schedule": {"minimum_sites": 1}},
    Thing.OTHER_COMBINE: {"aggregation": {"combine": "median", "weights": "uniform"}},
    Thing.DYNAMIC_WEIGHTS: {"aggregation": {"weights": "dynamic"}},
    Thing.PLAIN_MEAN: {"aggregation": {"server_optimizer": {"name": "average"}}},
    Thing.RUNNING_SUM: {"aggregation": {"server_optimizer": {"name": "running_sum"}}},
    Thing.SERVER_STEP: {"aggregation": {"server_optimizer": {"name": "adam"}}},
    Thing.CODECS: {"communication": {"codec": {"name": "int8"}}},
    Thing.LEVELS: {
        "privacy": {"secure_aggregation": SECURE | {"levels": 4}},
        "aggregation": {"weights": "uniform"},
    },
    Thing.RING_16: {"privacy": {"secure_aggregation": SECURE | {"ring_bits": 16}}},
    Thing.CLIP_ELEMENTS: {
        "privacy": {
            "secure_aggregation": SECURE | {"element_bound": 0.1, "clip_elements": True}
        }
    },
    Thing.PRIVACY: {
        "privacy": {"differential_privacy": PRIVATE},
        "aggregation": {"weights": "uniform"},
    },
}
# Where a method's arithmetic would silently not happen, or its promise not hold.
NEVER_BY_DEFAULT = {
    Thing.PRIVACY,
    Thing.TRAINER,
    Thing.FLOWER_APPS,
    Thing.RANKS,
    Thing.EXACT_ADAPTERS,
}

each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


def document(*changes: dict[str, Any]) -> dict[str, Any]:
    found = functools.reduce(toy.merged, changes, toy.document())
    training = found["training"]
    if "local_epochs" in training:
        training = {k: v for k, v in training.items() if k != "local_steps"}
    return found | {"training": training}


@each_method
def test_excluded_things_are_refused_and_others_are_not(method: Method):
    assert not method.is_on(job_file.parse(document()))
    assert method.is_on(job_file.parse(document(ON[method.name])))
    for thing, is_in in IN_A_JOB.items():
        other = {each.name: each.excludes for each in METHODS}.get(thing, {})
        if thing == method.name or method.name in other:
            continue  # The other one says why.
        both = document(ON[method.name], ASKS[thing])
        if thing not in method.excludes:
            job = job_file.parse(both)
            assert is_in(job), thing
            continue
        with pytest.raises(JobError) as caught:
            job_file.parse(both)
        assert method.excludes[thing] in str(caught.value), thing
        assert method.dotted_key in str(caught.value), thing


@each_method
def test_places_that_do_not_know_a_method_refuse_it(method: Method):
    assert method.excludes.keys() >= NEVER_BY_DEFAULT
    job = job_file.parse(document(ON[method.name]))
    ranked = SiteFile(
        name="a",
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=LocalDataSpec(source="warehouse:patients"),
        compute=ComputeSpec(ranks=2),
    )
    data = tuple(as_dataset(part, name="blobs") for part in blobs())
    with pytest.raises(JobError, match=r"compute\.ranks = 1") as caught:
        site_ranks.check_job(job, ranked, data)
    assert caught.value.key == method.dotted_key
    with pytest.raises(JobError) as caught:
        check_exact(job)
    assert method.excludes[Thing.EXACT_ADAPTERS] in str(caught.value)


@each_method
def test_job_without_a_method_has_the_digest_of_before(method: Method):
    deciding = job_digest.deciding(job_file.parse(document()))
    table = functools.reduce(dict.get, method.key[:-1], deciding)
    assert method.key[-1] not in (table or {})


def test_part_of_a_method_is_refused_without_it():
    for method in METHODS:
        for thing in method.only_with_it:
            with pytest.raises(JobError, match=f"{thing} is a part of") as caught:
                job_file.parse(document(ASKS[thing]))
            assert caught.value.key == method.dotted_key


def test_descriptions_agree_with_one_another():
    names = {method.name for method in METHODS}
    assert len(names) == len(METHODS)
    in_rooms_of_their_own = {Thing.RANKS, Thing.EXACT_ADAPTERS}
    assert IN_A_JOB.keys() | in_rooms_of_their_own == names | set(Thing)
    for method in METHODS:
        assert method.excludes.keys() <= names | set(Thing), method.name
        if method.follows_counted:
            assert method.keeps, method.name
            assert {Thing.RELAYS, Thing.PARTIAL_ROUNDS} <= method.excludes.keys()
    assert {m.name for m in METHODS if m.follows_counted} == {k.name for k in COUNTED}
