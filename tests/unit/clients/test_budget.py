"""A private trainer pays for a round before any of it, for all of it or for nothing."""

# ruff: noqa: ARG002 -- arguments of the seam

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.toy import LAYOUT

from clients.privacy.spending import BudgetedTrainer, Releases
from clients.training.site import Site
from clients.training.site_state import SiteState
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.ids import RunId, SiteId
from federation.messages import (
    NO_ANCHOR,
    FailureKind,
    LedgerAnchor,
    MetricSums,
    RoundTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import LocalWeights
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Vector
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import PrivacyEvent
from privacy.dp.held_out import HeldOutMechanism
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

NAME = SiteId("a")
STEP = PrivacyEvent(noise_multiplier=2.0, sampling_rate=1.0, steps=1)
HELD_OUT = HeldOutMechanism(noise_multiplier=2.0, predictions=1, num_records=50)
TERMS = Terms(
    run_id="run-1", site=NAME, job_digest="00" * 32, delta=1e-5, epsilon_cap=4
)


@dataclass
class Watched:
    """Trains nothing; notes what the ledger holds when it is asked to work."""

    ledger: InMemoryLedger
    at_work: list[tuple[str, int, int]] = field(default_factory=list)

    def layout(self) -> Layout:
        return LAYOUT

    def pay(
        self,
        *,
        round_index: int,
        trains: bool,
        evaluations: int,
        anchor: LedgerAnchor = NO_ANCHOR,
    ) -> None:
        raise AssertionError("what is private is paid for outside")

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> LocalWeights:
        self._note(f"train {round_index}")
        return LocalWeights(
            weights_d=weights_d + 1,
            integers_m=integers_m.copy(),
            num_examples=50,
            num_steps=1,
            training=MetricSums(count=50, loss_sum=1.0, metrics={"correct": 50}),
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
        max_loss: float | None = None,
    ) -> MetricSums:
        self._note("evaluate in the clear" if max_loss is None else "evaluate")
        return MetricSums(count=50, loss_sum=1.0, metrics={"correct": 50})

    def spent(self) -> None:
        return None

    def _note(self, what: str) -> None:
        purposes = [charge.purpose for charge in self.ledger.charges()]
        self.at_work.append((what, purposes.count("train"), purposes.count("evaluate")))


@dataclass
class Place:
    """A site with a budget, and what is seen of it."""

    ledger: InMemoryLedger
    inner: Watched
    trainer: BudgetedTrainer
    site: Site


@pytest.fixture
def place() -> Place:
    return make()


def make(
    *, held_out: HeldOutMechanism | None = HELD_OUT, evaluates: bool = True
) -> Place:
    ledger = InMemoryLedger(TERMS, clock=VirtualClock(0.0))
    inner = Watched(ledger)
    releases = Releases(
        round_event=STEP, held_out=held_out, evaluates=evaluates, max_loss=8.0
    )
    trainer = BudgetedTrainer(inner, ledger, releases)
    site = Site(
        NAME,
        make_trainer=lambda: trainer,
        state=SiteState(NAME, LAYOUT, MemoryStore()),
        clock=VirtualClock(0.0),
    )
    return Place(ledger, inner, trainer, site)


def task(round_index: int, kind: TaskKind = TaskKind.TRAIN) -> RoundTask:
    return RoundTask(
        run_id=RunId("run-1"),
        round_index=round_index,
        site=NAME,
        kind=kind,
        layout_digest=LAYOUT.digest,
        weights_d=np.zeros(LAYOUT.size, np.float32),
        integers_m=np.zeros(LAYOUT.num_integers, np.int64),
        evaluate=True,
        evaluate_after=False,
    )


def charged(ledger: InMemoryLedger) -> list[tuple[int, str]]:
    return [(charge.round_index, charge.purpose) for charge in ledger.charges()]


def test_all_of_a_round_is_charged_before_any_of_it(place: Place):
    """When the first record is read, both charges are in the ledger."""
    assert isinstance(place.site.handle(task(1)), SiteUpdate)
    assert place.inner.at_work == [("evaluate", 1, 1), ("train 1", 1, 1)]
    assert isinstance(place.site.handle(task(2)), SiteUpdate)
    assert place.inner.at_work[2:] == [("evaluate", 2, 2), ("train 2", 2, 2)]


def test_a_refused_round_charges_nothing(place: Place):
    """Not even its evaluation, which alone would still be within the budget."""
    while place.ledger.epsilon("train", STEP) <= TERMS.epsilon_cap:
        place.ledger.charge(STEP, round_index=1)
    before = charged(place.ledger)
    answer = place.site.handle(task(9))
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.BUDGET
    assert charged(place.ledger) == before
    assert place.inner.at_work == []
    # The held-out records have a budget of their own, and it is still there.
    answer = place.site.handle(task(10, TaskKind.EVALUATE))
    assert isinstance(answer, SiteEvaluation)
    assert charged(place.ledger)[len(before) :] == [(10, "evaluate")]


def test_a_round_refused_for_its_evaluation_charges_no_training(place: Place):
    """And nothing is trained."""
    event = HELD_OUT.event()
    while place.ledger.epsilon("evaluate", event) <= TERMS.epsilon_cap:
        place.ledger.charge(event, round_index=1, purpose="evaluate")
    before = charged(place.ledger)
    answer = place.site.handle(task(2))
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.BUDGET
    assert (charged(place.ledger), place.inner.at_work) == (before, [])


def test_each_release_is_charged(place: Place):
    """An evaluation before and one after training are two, and have their round."""
    both = replace(task(4), evaluate_after=True)
    assert isinstance(place.site.handle(both), SiteUpdate)
    assert charged(place.ledger) == [(4, "train"), (4, "evaluate"), (4, "evaluate")]


def test_nothing_is_done_that_was_not_paid_for(place: Place):
    """Work that was paid for once is done once; the next payment begins anew."""
    weights_d = np.zeros(LAYOUT.size, np.float32)
    integers_m = np.zeros(LAYOUT.num_integers, np.int64)
    trainer = place.trainer
    with pytest.raises(RuntimeError, match="round 1 was not charged"):
        trainer.fit(weights_d, integers_m, round_index=1)
    with pytest.raises(RuntimeError, match="not charged"):
        trainer.evaluate(weights_d, integers_m, round_index=1)
    trainer.pay(round_index=1, trains=True, evaluations=1)
    trainer.fit(weights_d, integers_m, round_index=1)
    with pytest.raises(RuntimeError, match="not charged"):
        trainer.fit(weights_d, integers_m, round_index=1)
    trainer.pay(round_index=2, trains=False, evaluations=1)
    with pytest.raises(RuntimeError, match="not charged"):
        trainer.fit(weights_d, integers_m, round_index=2)
    trainer.evaluate(weights_d, integers_m, round_index=2)
    with pytest.raises(RuntimeError, match="not charged"):
        trainer.evaluate(weights_d, integers_m, round_index=2)
    assert [what for what, *_ in place.inner.at_work] == ["train 1", "evaluate"]


def test_a_payment_that_is_refused_pays_for_nothing(place: Place):
    """Nor does an earlier one, and nothing is charged by a ledger that is behind."""
    trainer, asked, behind = place.trainer, task(1), LedgerAnchor(train=2)
    for refused in ({"round_index": 1, "anchor": behind}, {"round_index": -1}):
        trainer.pay(round_index=1, trains=True, evaluations=1)
        before = charged(place.ledger)
        with pytest.raises((LedgerBehind, ValueError)):
            trainer.pay(trains=True, evaluations=1, **refused)  # type: ignore[arg-type]
        assert charged(place.ledger) == before
        with pytest.raises(RuntimeError, match="not charged"):
            trainer.fit(asked.weights_d, asked.integers_m, round_index=1)
        with pytest.raises(RuntimeError, match="not charged"):
            trainer.evaluate(asked.weights_d, asked.integers_m, round_index=1)
        place.ledger = place.trainer._ledger = InMemoryLedger(
            TERMS, clock=VirtualClock(0.0)
        )


def test_a_round_that_was_paid_for_is_no_other_round(place: Place):
    """The charge names the round that is trained."""
    place.trainer.pay(round_index=3, trains=True, evaluations=0)
    with pytest.raises(RuntimeError, match="round 4 was not charged"):
        place.trainer.fit(
            np.zeros(LAYOUT.size, np.float32),
            np.zeros(LAYOUT.num_integers, np.int64),
            round_index=4,
        )
    assert place.inner.at_work == []


def test_an_evaluation_that_was_paid_for_is_of_no_other_round(place: Place):
    """The charge names the round that is evaluated."""
    place.trainer.pay(round_index=3, trains=False, evaluations=1)
    later = task(4)
    with pytest.raises(RuntimeError, match="evaluation of round 4 was not charged"):
        place.trainer.evaluate(later.weights_d, later.integers_m, round_index=4)
    assert place.inner.at_work == []


@pytest.mark.parametrize("kind", TaskKind)
def test_a_job_without_evaluations_has_none(kind: TaskKind):
    """Whoever asks: nothing is done, and nothing is charged."""
    place = make(held_out=None, evaluates=False)
    answer = place.site.handle(task(1, kind))
    assert isinstance(answer, SiteFailure)
    assert "job has no evaluations" in answer.message
    assert (place.inner.at_work, charged(place.ledger)) == ([], [])
    place.trainer.pay(round_index=2, trains=True, evaluations=0)
    with pytest.raises(RuntimeError, match="not charged"):
        place.trainer.evaluate(task(2).weights_d, task(2).integers_m, round_index=2)


def test_public_results_cost_nothing():
    """The job declared the held-out data public: they leave as they are."""
    place = make(held_out=None)
    answer = place.site.handle(task(1))
    assert isinstance(answer, SiteUpdate)
    assert answer.evaluation == MetricSums(
        count=50, loss_sum=1.0, metrics={"correct": 50}
    )
    assert charged(place.ledger) == [(1, "train")]
    assert answer.spent is not None
    assert answer.spent.held_out_epsilon is None
