"""Parts of a model that a site trains for itself and never sends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch import nn

from aggregator.model_export import file_pieces, named_arrays
from clients.data.datasets import as_dataset
from clients.methods.guest import NotFinite
from clients.models import personal, weights
from clients.models.model_pool import ModelPool
from clients.models.starting_weights import initial_weights, pinned
from clients.models.trained import trained_model
from clients.training.private_steps import PrivateTraining
from clients.training.site import Site
from clients.training.site_state import SiteState
from clients.training.trainer import TorchTrainer
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import SystemClock
from federation.errors import JobError
from federation.ids import RunId, SiteId
from federation.messages import RoundTask, SiteEvaluation, SiteUpdate, TaskKind
from federation.protocols import LocalWeights, RunState
from federation.vectors import Role, Vector

SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
HEAD = ("3.*",)
MODEL = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [5]},
    "personal": list(HEAD),
}


class Normed(nn.Module):
    """A model with batch normalisation and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.fixed = nn.Linear(2, 2, bias=False).requires_grad_(requires_grad=False)


def job_of(**tables: Any):
    return small_job(model=MODEL, **tables)


def trainer_of(pool: ModelPool, job: Any, private: PrivateTraining | None = None):
    return TorchTrainer(
        job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT, private=private
    )


def test_roles_follow_from_the_patterns():
    """Statistics too; counters are kept, and what is frozen is the same everywhere."""
    layout = weights.layout_of(Normed(), {}, personal_patterns=["[nf]*"])
    assert {t.name: t.role for t in layout.tensors} == {
        "body.weight": Role.PARAMETER,
        "body.bias": Role.PARAMETER,
        "norm.weight": Role.PERSONAL,
        "norm.bias": Role.PERSONAL,
        "norm.running_mean": Role.PERSONAL,
        "norm.running_var": Role.PERSONAL,
        "norm.num_batches_tracked": Role.KEEP,
        "fixed.weight": Role.FROZEN,
    }
    assert (layout.size, layout.num_personal, layout.num_integers) == (6, 8, 1)


def test_tied_weights_stay_at_a_site_under_all_of_their_names():
    """They are one tensor, which travels or does not."""

    def found(*patterns: str) -> list[str]:
        model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
        model["head"].weight = model["embed"].weight
        model["body"] = nn.Linear(2, 2)
        layout = weights.layout_of(model, {}, personal_patterns=patterns)
        return [t.name for t in layout.tensors if t.role is Role.PERSONAL]

    assert found("embed.*") == ["embed.weight"]
    assert found("head.*", "embed.*") == ["embed.weight", "head.bias"]
    with pytest.raises(JobError, match=r"'head.weight' shares .* with 'embed.weight'"):
        found("head.*")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["norm.*", "head.*"], "model trains is called 'head"),
        (["fixed.*"], "model trains is called 'fixed"),
        (["*"], "would share nothing"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: list[str], message: str):
    """With the pattern, and the key of the job."""
    with pytest.raises(JobError, match=message) as caught:
        weights.layout_of(Normed(), {}, personal_patterns=patterns)
    assert caught.value.key == "model.personal"


def test_values_come_back_in_every_type():
    """Of a half-precision model as well, whose digits float32 holds."""
    module = Normed().to(torch.bfloat16)
    layout = weights.layout_of(module, {}, personal_patterns=["norm.*"])
    values_p = np.arange(8, dtype=np.float32)
    personal.load(module, layout, values_p)
    np.testing.assert_array_equal(values_p, personal.read(module, layout))
    assert list(personal.to_keep(module, layout)) == ["personal"]


def test_instances_hold_no_personal_part_of_another_site():
    """Sites of a process share them: without a state the part is as in a new model."""
    pool = ModelPool(job_of())
    start = pool.initial_weights()
    with pool.borrow() as model:
        first_p = personal.read(model.module, pool.layout)
        model.load(*start, {"personal": first_p + 1})
        np.testing.assert_array_equal(
            first_p + 1, personal.read(model.module, pool.layout)
        )
    with pool.borrow() as model:
        model.load(*start)
        np.testing.assert_array_equal(first_p, personal.read(model.module, pool.layout))


def task(pool: ModelPool, round_index: int, kind: TaskKind = TaskKind.TRAIN):
    weights_d, integers_m = pool.initial_weights()
    return RoundTask(
        run_id=RunId("run"),
        round_index=round_index,
        site=SITE,
        kind=kind,
        layout_digest=pool.layout.digest,
        weights_d=weights_d,
        integers_m=integers_m,
        evaluate=True,
        evaluate_after=False,
    )


def test_a_site_continues_with_its_own_part_after_a_restart():
    """It is stored before the answer leaves, which does not contain it."""
    job, store = job_of(rounds=3), MemoryStore()
    pool = ModelPool(job)

    def site() -> Site:
        return Site(
            SITE,
            make_trainer=lambda: trainer_of(pool, job),
            state=SiteState(SITE, pool.layout, store),
            clock=SystemClock(),
        )

    stays = site()
    answers = [stays.handle(task(pool, round_index)) for round_index in (1, 2, 3)]
    again = site().handle(task(pool, 3))
    first, _, last = answers
    assert isinstance(first, SiteUpdate)
    assert isinstance(last, SiteUpdate)
    assert isinstance(again, SiteUpdate)
    assert first.delta_d.size == pool.layout.size == 25
    np.testing.assert_array_equal(last.delta_d, again.delta_d)
    # The shared values are the same: what the site has learned is in its own part.
    assert first.evaluation is not None
    assert again.evaluation == last.evaluation != first.evaluation
    only_evaluates = site().handle(task(pool, 4, TaskKind.EVALUATE))
    assert isinstance(only_evaluates, SiteEvaluation)
    assert only_evaluates.evaluation not in (first.evaluation, last.evaluation)


def test_a_private_step_noises_the_personal_part():
    """The next gradient depends on it, so it must have noise like the rest."""
    private = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0}
    job = job_of(
        training={"local_steps": 1, "batch_size": 20, "optimizer": {"lr": 20.0}},
        privacy={"differential_privacy": private},
        aggregation={"weights": "uniform"},
    )
    pool = ModelPool(job)
    how = PrivateTraining(clip_norm=1.0, noise_multiplier=1000.0)
    result = trainer_of(pool, job, how).fit(*pool.initial_weights(), round_index=1)
    assert isinstance(result, LocalWeights)
    own_p = result.kept["personal"]
    # Deviation lr * multiplier * clip norm / expected batch = 1000: without noise a
    # step moves no value by more than 20.
    assert 400 < float(np.std(own_p)) < 2000
    assert pool.num_trained == pool.layout.size + own_p.size


def test_a_personal_part_that_diverged_is_not_stored():
    """Every later round would begin with it."""
    pool = ModelPool(job_of())
    trainer = trainer_of(pool, job_of())
    bad_p = np.full(pool.layout.num_personal, np.nan, dtype=np.float32)
    with pytest.raises(NotFinite):
        trainer.fit(*pool.initial_weights(), round_index=1, kept={"personal": bad_p})


def test_no_site_tells_without_noise_that_its_training_diverged():
    """With noise for whole sites it answers; it keeps the part that it began with."""
    job = job_of(
        num_sites=4,
        evaluation={"every": 0},
        aggregation={"weights": "uniform"},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": {"unit": "site", "target_epsilon": 8.0},
        },
    )
    pool, (examples, _) = ModelPool(job), blobs()
    spoilt = replace(examples, inputs=np.full_like(examples.inputs, np.nan))
    train = as_dataset(spoilt, name="blobs")
    trainer = TorchTrainer(job, SITE, pool=pool, train=train, held_out=HELD_OUT)
    first_p = np.ones(pool.layout.num_personal, dtype=np.float32)
    for kept in ({"personal": first_p}, {}):
        result = trainer.fit(*pool.initial_weights(), round_index=1, kept=kept)
        assert isinstance(result, LocalWeights)
        assert np.isnan(result.weights_d).any()
        assert result.kept == kept


def exported(pool: ModelPool, path: Path) -> list[str]:
    """Write the model that a run begins with, plus one; return its names."""
    weights_d, integers_m = pool.initial_weights()
    state = RunState(
        round_index=1,
        rounds_completed=1,
        lost_in_a_row=0,
        weights_d=weights_d + 1,
        integers_m=integers_m,
        optimizer={},
    )
    arrays = named_arrays(pool.layout, state, pool.frozen_arrays())
    path.write_bytes(b"".join(file_pieces(pool.layout, arrays)))
    return list(arrays)


def test_the_shared_part_is_not_taken_for_a_whole_model(tmp_path: Path):
    """Though it holds a counter whose name fits; the message says what to do."""
    job = small_job(model={"factory": f"{__name__}:Normed", "personal": ["norm.*"]})
    names = exported(ModelPool(job), tmp_path / "model.safetensors")
    assert "norm.num_batches_tracked" in names
    with pytest.raises(JobError, match="export RUN --site NAME"):
        trained_model(job, tmp_path / "model.safetensors")


def test_an_exported_model_is_the_shared_part(tmp_path: Path):
    """A run can start from it, and from no file with personal parts."""
    pool, path = ModelPool(job_of()), tmp_path / "model.safetensors"

    def start() -> Vector:
        job = pinned(small_job(model={**MODEL, "weights": path.name}), tmp_path)
        return initial_weights(job, pool)[0]

    assert exported(pool, path) == ["1.weight", "1.bias"]
    np.testing.assert_array_equal(pool.initial_weights()[0] + 1, start())
    exported(ModelPool(small_job(model={**MODEL, "personal": []})), path)
    with pytest.raises(JobError, match=r"holds '3.weight', but personal parts are"):
        start()
