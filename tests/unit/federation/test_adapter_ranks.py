"""Sites that train fewer ranks of the adapters: what is refused, and what is sent."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support import toy

from federation.compression.apart import Apart, SomePlaces, fitted
from federation.errors import JobError
from federation.job import job_digest
from federation.job.adapter_ranks import (
    check_adapters,
    contributors,
    fewest_contributors,
    links_of,
    rank_axis,
    ranks_of,
    sent_places,
)
from federation.job.spec import JobSpec
from federation.vectors import Layout, Role

SECURE = {"enabled": True}
NAMES = "abcdefghi"
LAYOUT = Layout.build(
    [
        ("q.base_layer.weight", (3, 4), "float32", Role.FROZEN),
        ("q.lora_A.default.weight", (2, 4), "float32", Role.PARAMETER),
        ("q.lora_B.default.weight", (3, 2), "float32", Role.PARAMETER),
        ("k.weight", (2, 2), "float32", Role.SERVER),
        ("head.weight", (2, 2), "float32", Role.PARAMETER),
    ]
)


def job_of(ranks: Sequence[int | None], **tables: Any) -> JobSpec:
    """A job of sites with these ranks."""
    rows = [
        {"name": name} if rank is None else {"name": name, "lora_rank": rank}
        for name, rank in zip(NAMES, ranks, strict=False)
    ]
    return toy.job({"sites": rows, **tables})


def test_factors_of_peft_are_found_by_name():
    names = {
        "m.layers.0.q.lora_A.default.weight": 0,
        "m.layers.0.q.lora_B.default.weight": 1,
        "m.embed.lora_embedding_B.default": 1,
        "m.layers.0.q.base_layer.weight": None,
        "m.layers.0.q.lora_B.default.bias": None,
        "m.lora_Bias.weight": None,
    }
    assert {name: rank_axis(name) for name in names} == names


def test_a_site_sends_the_first_ranks_and_all_else_that_it_trains():
    places = sent_places(LAYOUT, 1)
    a, b, server, head = np.split(places, [8, 14, 18])
    assert a.tolist() == [True] * 4 + [False] * 4
    assert b.tolist() == [True, False] * 3
    assert not server.any()
    assert head.all()


@pytest.mark.parametrize("name", ["identity", "fp16", "int8"])
def test_words_hold_the_places_alone(name: str):
    """Also with a residual, in a codec of few bits; other places are 0."""
    sites = [{"name": "a"}, {"name": "b", "lora_rank": 1}]
    job = toy.job({"sites": sites, "communication": {"codec": {"name": name}}})
    layout = Layout.build(
        [
            (t.name, t.shape, t.dtype, t.role)
            for t in LAYOUT.tensors
            if t.role is Role.PARAMETER
        ]
    )
    codec = links_of(job, layout, ranks_of(job)[toy.SITES[2]]).up
    assert isinstance(codec, SomePlaces)
    assert not isinstance(links_of(job, layout, None).up, SomePlaces)
    sent_d = sent_places(layout, 1)
    vector_d = np.where(sent_d, np.linspace(-1, 1, layout.size), 9).astype(np.float32)
    residual_d = np.zeros(layout.size, np.float32) if name == "int8" else None
    words = codec.encode(vector_d, residual_d=residual_d, seed=1)
    assert words.size == codec.num_words(layout.size)
    assert words.size < codec.codec.num_words(layout.size)
    assert codec.fault(words, layout.size) == ""
    assert "words of" in codec.fault(words[:-1], layout.size)
    found_d = codec.values(words, size=layout.size, seed=1)[:]
    assert not found_d[~sent_d].any()
    np.testing.assert_allclose(found_d[sent_d], vector_d[sent_d], atol=5e-3)
    if residual_d is not None:
        np.testing.assert_allclose(
            (found_d + residual_d)[sent_d], vector_d[sent_d], atol=1e-6
        )
    with pytest.raises(ValueError, match="places of 18 values, not of 17"):
        codec.fault(words, layout.size - 1)
    with pytest.raises(ValueError, match="number of values"):
        codec.values(words)


def test_running_statistics_in_few_bits_are_sent_whole():
    """They are sent apart from the words of such a codec, which then has zeros."""
    links = toy.job({"communication": {"codec": {"name": "int8"}}}).communication.links
    found = fitted(links, toy.LAYOUT, np.ones(toy.LAYOUT.size, np.bool_))
    assert isinstance(found.up, Apart)


def test_a_secure_sum_has_three_sites_of_each_rank():
    """More where some may drop out; with differential privacy, two in each part."""
    with pytest.raises(JobError, match="1 of 3 sites have the same") as caught:
        job_of([None, None, 2], privacy={"secure_aggregation": SECURE})
    assert caught.value.key == "sites[2].lora_rank"
    alike = [None, None, None, 2, 2, 2]
    job = job_of(alike, privacy={"secure_aggregation": SECURE})
    assert contributors(job) == (frozenset("abc"),)
    assert fewest_contributors(job) == 3
    few = {**SECURE, "threshold": 5}
    with pytest.raises(JobError, match="rank to at least 4 sites"):
        job_of(alike, privacy={"secure_aggregation": few})
    joint = {"unit": "joint", "target_epsilon": 4.0, "clip_norm": 1.0}
    private: dict[str, Any] = {
        "training": {"local_steps": 1, "optimizer": {"lr": 0.1}},
        "aggregation": {"weights": "uniform"},
        "privacy": {"secure_aggregation": SECURE, "differential_privacy": joint},
    }
    assert fewest_contributors(job_of([None, None, 2, 1], **private)) == 2
    with pytest.raises(JobError, match="of a single site"):
        job_of([None, 2, 2, 2], **private)


@pytest.mark.parametrize(
    ("ranks", "key", "text"),
    [
        ([None, 2], "sites[1].lora_rank", "adapters have rank 2: choose a smaller"),
        ([1, 1], "model.options.lora.rank", "no site trains all 2 ranks"),
    ],
)
def test_ranks_must_fit_the_adapters(ranks: list[int | None], key: str, text: str):
    with pytest.raises(JobError, match=text) as caught:
        check_adapters(job_of(ranks), LAYOUT)
    assert caught.value.key == key


def test_a_model_without_adapters_has_no_ranks():
    with pytest.raises(JobError, match=": the model has no"):
        check_adapters(job_of([None, 2]), toy.LAYOUT)
    check_adapters(job_of([None, None]), toy.LAYOUT)


def test_ranks_are_in_the_digest_of_the_job():
    """Jobs without them keep theirs."""
    digests = {
        job_digest.digest(job_of(r)) for r in ([None, None], [None, 1], [None, 2])
    }
    assert len(digests) == 3
    assert "lora_rank" not in job_digest.deciding(toy.job())["sites"][0]
