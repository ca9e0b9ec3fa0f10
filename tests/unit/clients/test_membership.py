"""Membership inference by loss, against the objectives themselves."""

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.audit.membership_scores import membership_scores, scores_of_persons
from clients.models.model_pool import ModelPool
from clients.models.objectives import OBJECTIVES
from deploy.wiring.parts import deal_data
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec

GPT = {
    "factory": "clients.models:gpt",
    "options": {"vocabulary": 256, "context": 8, "layers": 1, "heads": 1, "width": 8},
}
TEXT = {
    "source": "clients.data:text_folder",
    "options": {"context": 8, "path": "docs/howto", "pattern": "*.md"},
}


@pytest.mark.parametrize(
    "job",
    [
        small_job(),
        small_job(
            model=GPT, data=TEXT, training={"task": "causal_lm", "local_steps": 1}
        ),
    ],
    ids=["classification", "causal_lm"],
)
def test_scores_are_losses_of_single_records(
    job: JobSpec, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Each as the objective has it for a batch of this record alone."""
    monkeypatch.chdir(request.config.rootpath)
    pool, task = ModelPool(job), job.training.task
    weights_d, integers_m = pool.initial_weights()
    weights_d += np.linspace(0, 0.1, weights_d.size, dtype=np.float32)
    data, _ = deal_data(job)[SiteId("site-0")]
    chosen = np.array([3, 0, 7, 4, 9])
    found = membership_scores(
        pool, weights_d, integers_m, data, chosen=chosen, task=task, batch_size=2
    )
    with pool.borrow() as model:
        model.load(weights_d, integers_m)
        batches = [data.batch(chosen[i : i + 1]) for i in range(len(chosen))]
        losses = [OBJECTIVES[task](model.module.eval(), *batch) for batch in batches]
    expected = [-float(loss.total.detach()) / loss.count for loss in losses]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_score_of_a_person_is_the_mean_of_its_records():
    """In the order of the names, wherever the records are."""
    found = scores_of_persons(np.array([1.0, 5, 2, 0]), np.array(["b", "a", "b", "b"]))
    assert found.tolist() == [5.0, 1.0]


def test_loss_that_is_no_number_is_the_largest():
    """Such a record looks like none that was trained on."""
    job = small_job()
    pool = ModelPool(job)
    weights_d, integers_m = pool.initial_weights()
    weights_d[:] = np.nan
    data, _ = deal_data(job)[SiteId("site-0")]
    found = membership_scores(
        pool,
        weights_d,
        integers_m,
        data,
        chosen=np.arange(2),
        task="classification",
        batch_size=2,
    )
    assert np.isfinite(found).all()
    assert found.max() < -1e38


def test_classification_without_targets_is_refused():
    """As in training."""
    job = small_job(
        model=GPT, data=TEXT, training={"task": "causal_lm", "local_steps": 1}
    )
    pool = ModelPool(job)
    data, _ = deal_data(job)[SiteId("site-0")]
    with pytest.raises(SiteError, match="needs targets"):
        membership_scores(
            pool,
            *pool.initial_weights(),
            data,
            chosen=np.arange(2),
            task="classification",
            batch_size=2,
        )
