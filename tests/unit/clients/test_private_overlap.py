"""Private steps that are taken before the model has come: charged with their round."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_jobs import blobs, small_job

from clients.data.datasets import as_dataset
from clients.methods.overlap import Overlap
from clients.models.model_pool import ModelPool
from clients.privacy.site_plans import PrivateSites
from clients.privacy.spending import BudgetedTrainer
from clients.training.private_steps import PrivateTraining
from clients.training.trainer import TorchTrainer
from deploy.wiring.parts import build_federation
from federation.clock import VirtualClock
from federation.errors import BudgetExceeded
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from federation.vectors import Arrays
from privacy.dp.mechanism import GaussianMechanism

SITE, RECORDS = SiteId("site-0"), 448
ROUNDS, STEPS, AHEAD, LR, CLIP, BATCH = 4, 4, 2, 0.5, 0.3, 16


def same(count: int) -> bytes:
    """Keys that do not depend on which thread asks first."""
    return bytes(count)


def job_of(**private: Any) -> JobSpec:
    table = {"unit": "record", "target_epsilon": 3.0, "delta": 1e-5, "clip_norm": CLIP}
    training = {"local_steps": STEPS, "overlap_steps": AHEAD, "batch_size": BATCH}
    return small_job(
        rounds=ROUNDS,
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": RECORDS},
            "partition": {"kind": "iid"},
        },
        training={**training, "optimizer": {"lr": LR}},
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        privacy={"differential_privacy": {**table, **private}},
    )


class Place:
    """One site's trainer with its ledger."""

    def __init__(self, **private: Any) -> None:
        self.sites = PrivateSites(
            build_federation(job_of(**private)),
            run_id=RunId("run"),
            folder=None,
            clock=VirtualClock(1.8e9),
        )
        plan = self.sites.plans[SITE]
        assert plan.training is not None
        training = replace(plan.training, random_bytes=same)
        self.sites.plans = {SITE: replace(plan, training=training)}
        trainer = self.sites.trainer(SITE)
        assert isinstance(trainer, BudgetedTrainer)
        self.trainer = trainer

    def fit(self, round_index: int, value: float, **given: Any) -> LocalWeights:
        start_d, integers_m = self.sites.federation.pool.initial_weights()
        self.trainer.pay(round_index=round_index, trains=True, evaluations=0)
        result = self.trainer.fit(
            start_d * np.float32(value), integers_m, round_index=round_index, **given
        )
        assert isinstance(result, LocalWeights)
        return result

    def inner(self) -> TorchTrainer:
        trainer = self.trainer._trainer
        assert isinstance(trainer, TorchTrainer)
        return trainer

    def charged(self) -> list[tuple[int, int]]:
        charges = self.sites._ledgers[SITE].charges()
        return [(charge.round_index, charge.event.steps) for charge in charges]


def test_steps_ahead_are_charged_with_their_round_and_once():
    """Whether they were taken ahead or not, what leaves and its price are the same."""
    found = []
    for ahead in (True, False):
        place = Place()
        first = place.fit(1, 1.0)
        if ahead:
            place.trainer.work_ahead(2, first.kept)
        assert (place.inner()._ahead._begun is not None) == ahead
        assert place.charged() == [(1, STEPS)], "a round that never comes costs nothing"
        second = place.fit(2, 0.5, kept=first.kept)
        assert place.charged() == [(1, STEPS), (2, STEPS)]
        assert second.num_steps == STEPS
        assert (second.num_examples, second.training) == (0, None)
        found.append(second.weights_d)
    np.testing.assert_array_equal(*found)


def test_a_round_adds_noise_as_often_as_it_was_charged_for(
    monkeypatch: pytest.MonkeyPatch,
):
    """Steps ahead have noise like all others."""
    released = []
    real = GaussianMechanism.release_

    def counted(self: GaussianMechanism, *arguments: Any) -> None:
        released.append(self.noise_multiplier)
        real(self, *arguments)

    monkeypatch.setattr(GaussianMechanism, "release_", counted)
    place = Place()
    first = place.fit(1, 1.0)
    place.trainer.work_ahead(2, first.kept)
    place.fit(2, 0.5, kept=first.kept)
    assert len(released) == 2 * STEPS
    assert min(released) > 0


def test_steps_ahead_of_a_round_that_begins_otherwise_do_not_matter():
    """They are dropped: what leaves is as if they had not been taken."""
    found = []
    for ahead in (True, False):
        place = Place()
        kept = place.fit(1, 1.0).kept
        other = {name: array * array.dtype.type(2) for name, array in kept.items()}
        if ahead:
            place.trainer.work_ahead(2, other)
        found.append(place.fit(2, 0.5, kept=kept).weights_d)
        assert place.charged() == [(1, STEPS), (2, STEPS)]
    np.testing.assert_array_equal(*found)


def test_steps_ahead_of_a_round_beyond_the_cap_stay_at_the_site():
    """It is refused before anything looks at them."""
    place = Place(noise_multiplier=0.8)
    kept: Arrays = {}
    with suppress(BudgetExceeded):
        for number in range(1, 100):
            kept = place.fit(number, 0.5, kept=kept).kept
            place.trainer.work_ahead(number + 1, kept)
    before = place.charged()
    assert ROUNDS < len(before) < 90
    number = len(before) + 1
    with pytest.raises(BudgetExceeded):
        place.trainer.pay(round_index=number, trains=True, evaluations=0)
    weights = place.sites.federation.pool.initial_weights()
    with pytest.raises(RuntimeError, match="was not charged"):
        place.trainer.fit(*weights, round_index=number, kept=kept)
    assert place.charged() == before


def test_one_record_moves_a_step_ahead_by_its_clip_at_most():
    """A step that samples all, with the same noise, and a record that pulls far."""
    both, held_out = blobs(num_train=RECORDS)
    inputs, labels = np.array(both.inputs), np.array(both.targets)
    inputs[-1] = 1e4
    job = job_of()
    every = replace(job.training, overlap_steps=1, batch_size=RECORDS)
    job, found = replace(job, training=every), []
    for count in (RECORDS, RECORDS - 1):
        pool = ModelPool(job)
        trainer = TorchTrainer(
            job,
            SITE,
            pool=pool,
            train=as_dataset((inputs[:count], labels[:count]), name="train"),
            held_out=as_dataset(held_out, name="held-out"),
            private=PrivateTraining(
                clip_norm=CLIP, noise_multiplier=1e-3, random_bytes=same
            ),
        )
        own = Overlap().arrays(*pool.initial_weights())
        found.append(trainer._first_steps(2, own, STEPS).weights_d)
    moved = float(np.linalg.norm(found[1] - found[0]))
    most = LR * CLIP / RECORDS
    assert 0.98 * most < moved < 1.01 * most
