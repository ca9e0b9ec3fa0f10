"""Adapters of which a site trains some ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from support.without_report import simulate
from torch import nn

from clients.data.datasets import as_dataset
from clients.methods.fixed_ranks import FixedRanks
from clients.models.model_pool import ModelPool
from clients.privacy.cohorts import Cohort, CohortRule
from clients.privacy.site_memory import InMemory
from clients.training.trainer import TorchTrainer
from clients.training.update import local_weights
from deploy.wiring.parts import build_federation
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from privacy.secagg.errors import CohortRefused

SITES = tuple(SiteId(f"site-{i}") for i in range(6))
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
SECURE = {"enabled": True, "clip_norm": 8.0, "max_examples": 100}


def job_of(ranks: Sequence[int | None], **tables: Any) -> JobSpec:
    """Adapters of rank 3 beside a layer of four inputs and three outputs."""
    options = tables.pop("options", {})
    training = {"local_steps": 3, "batch_size": 8, "optimizer": {"lr": 0.5}}
    rows = [
        {"name": site} if rank is None else {"name": site, "lora_rank": rank}
        for site, rank in zip(SITES, ranks, strict=False)
    ]
    return small_job(
        model={"factory": "support.task_models:adapted", "options": options},
        **{"training": training, "sites": rows, **tables},
    )


def trained(
    job: JobSpec, pool: ModelPool, site: SiteId, start_d: np.ndarray
) -> np.ndarray:
    trainer = TorchTrainer(job, site, pool=pool, train=TRAIN, held_out=HELD_OUT)
    found = trainer.fit(start_d, pool.initial_weights()[1], round_index=1)
    assert isinstance(found, LocalWeights)
    return found.weights_d


def test_only_the_first_ranks_change():
    """Also by weight decay, momentum and the clip norm of all gradients together."""
    adamw = {"name": "adamw", "lr": 0.1, "weight_decay": 0.5}
    training = {"local_steps": 3, "clip_grad_norm": 0.1, "optimizer": adamw}
    job = job_of([None, 1], options={"trains_a": True}, training=training)
    pool = ModelPool(job)
    start_d = np.random.default_rng(0).normal(size=pool.layout.size).astype(np.float32)
    for site, rank in ((SITES[0], 3), (SITES[1], 1)):
        change_d = trained(job, pool, site, start_d) - start_d
        views = {t.name: v for t, v in pool.layout.float_views(change_d)}
        a, b = views["lora_A.default.weight"], views["lora_B.default.weight"]
        assert np.all(a[:rank] != 0)
        assert np.all(b[:, :rank] != 0)
        assert not a[rank:].any()
        assert not b[:, rank:].any()


def test_norms_do_not_see_what_stays():
    """The gradient of a column that stays would take room of the others."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    fixed = FixedRanks({"lora_B.default.weight": layer.weight}, 1)
    fixed.gradient_()
    assert layer.weight.grad.tolist() == [[3.0, 0.0]]


def test_a_sharded_adapter_is_refused():
    class Sharded(nn.Parameter):
        def to_local(self) -> None:
            """What FSDP2's tensors have."""

    with pytest.raises(SiteError, match="cannot be sharded"):
        FixedRanks({"lora_B.x.weight": Sharded(torch.zeros(1, 2))}, 1)


@pytest.mark.parametrize("secure", [False, True])
def test_the_mean_is_that_of_the_sites_models(*, secure: bool):
    """To the last bits in the clear, and to the ring's in a secure sum."""
    privacy = {"secure_aggregation": SECURE} if secure else {}
    ranks = [None, None, None, 1, 1, 1]
    job = job_of(ranks, options={"rank": 40}, privacy=privacy)
    federation = build_federation(job)
    start = federation.pool.initial_weights()
    alone = [federation.trainer(site).fit(*start, round_index=1) for site in SITES]
    weights = [each.num_examples for each in alone]
    models = [local_weights(start[0], each).astype(np.float64) for each in alone]
    found = simulate(job)
    mean_d = np.average(models, axis=0, weights=weights)
    (b,) = (array for name, array in found.weights.items() if "lora_B" in name)
    np.testing.assert_allclose(b.reshape(-1), mean_d, atol=1e-6 if secure else 1e-7)
    sent = {r.site: r.bytes_up for r in found.view.rounds[-1].reports}
    # Of 40 columns of three values; a header is padded to 64 bytes.
    saved = 0 if secure else 39 * 3 * 4
    assert sent[SITES[0]] - sent[SITES[5]] in {saved, saved + 64}


def test_contributors_alone_count_if_the_job_says_so():
    """The last columns are the mean of the sites that train them."""
    job = job_of([None, None, 1], aggregation={"combine": "contributor_mean"})
    federation = build_federation(job)
    start = federation.pool.initial_weights()
    alone = [federation.trainer(site).fit(*start, round_index=1) for site in SITES[:2]]
    models = [local_weights(start[0], each).reshape(3, 3) for each in alone]
    weights = [each.num_examples for each in alone]
    (b,) = (a for name, a in simulate(job).weights.items() if "lora_B" in name)
    mean = np.average(models, axis=0, weights=weights)
    np.testing.assert_allclose(b[:, 1:], mean[:, 1:], atol=1e-7)
    assert np.abs(b[:, 0] - mean[:, 0]).max() > 1e-3


def test_sites_of_one_rank_are_a_group_in_all_sums():
    """A run in which all have the same rank would single out the others otherwise."""
    everyone: Cohort = frozenset(SITES)

    def rule(memory: InMemory, *parts: Cohort) -> CohortRule:
        return CohortRule(
            memory=memory,
            lineage="digits",
            smallest=3,
            accept_dropouts=False,
            is_private=False,
            parts=parts,
        )

    memory = InMemory()
    rule(memory, frozenset(SITES[:3])).check(everyone)
    with pytest.raises(CohortRefused, match=r"single out site-5.*"):
        rule(memory, frozenset(SITES[:5])).check(everyone)
