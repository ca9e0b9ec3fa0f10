"""Steps that are taken before the model has come."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch.nn import functional

from clients.data.batches import stepwise
from clients.data.datasets import as_dataset
from clients.methods import overlap
from clients.methods.overlap import AheadSteps, Overlap, WorkAhead
from clients.models.model_pool import ModelPool
from clients.training.timed_trainer import TimedTrainer
from clients.training.trainer import TorchTrainer
from federation.clock import VirtualClock
from federation.ids import SiteId
from federation.messages import MetricSums
from federation.protocols import LocalWeights, Trainer
from federation.rounds.cost import WorkSeconds
from federation.vectors import Layout, Role

SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
STEPS, AHEAD, BATCH, LR = 5, 2, 8, 0.5
FIRST = STEPS  # Steps of the run before the second round.
WHATEVER = MetricSums(count=1, loss_sum=0.0, metrics={})


def job_of(**training: Any):
    keys = {"overlap_steps": AHEAD, "local_steps": STEPS, "batch_size": BATCH}
    return small_job(training={"optimizer": {"lr": LR}, **keys, **training})


def trainer_of(**training: Any) -> tuple[TorchTrainer, ModelPool]:
    job = job_of(**training)
    pool = ModelPool(job)
    trainer = TorchTrainer(job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT)
    return trainer, pool


def fit(
    trainer: Trainer, weights_d: np.ndarray, integers_m: np.ndarray, **more: Any
) -> LocalWeights:
    result = trainer.fit(weights_d, integers_m, **more)
    assert isinstance(result, LocalWeights)
    return result


def two_rounds(*, ahead: bool, **training: Any) -> LocalWeights:
    """The second of two rounds; the model that follows the first is half of it."""
    trainer, pool = trainer_of(**training)
    start_d, integers_m = pool.initial_weights()
    first = fit(trainer, start_d, integers_m, round_index=1)
    if ahead:
        trainer.work_ahead(2, first.kept)
    global_d = first.weights_d * np.float32(0.5)
    return fit(trainer, global_d, integers_m, round_index=2, kept=first.kept)


def stepped(values_d: torch.Tensor, batches: list[np.ndarray]) -> torch.Tensor:
    """Plain steps of SGD on these examples."""
    model = torch.nn.Linear(4, 3)
    torch.nn.utils.vector_to_parameters(values_d.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for chosen in batches:
        inputs, labels = TRAIN.batch(chosen)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_steps_are_those_of_the_formula(mix: float):
    """Own steps, a mix with the global model, and the rest of the round."""
    _, pool = trainer_of()
    batches = list(
        stepwise(
            len(TRAIN),
            batch_size=BATCH,
            first_batch=0,
            num_batches=2 * STEPS,
            seed=0,
            site=SITE,
        )
    )
    start_d = torch.from_numpy(pool.initial_weights()[0])
    own_d = stepped(start_d, batches[:STEPS])
    global_d = own_d * 0.5
    ahead_d = stepped(own_d, batches[STEPS : STEPS + AHEAD])
    mixed_d = mix * ahead_d + (1 - mix) * global_d
    expected_d = stepped(mixed_d, batches[STEPS + AHEAD :])

    result = two_rounds(ahead=False, overlap_mix=mix)
    np.testing.assert_allclose(result.weights_d, expected_d.numpy(), atol=1e-6)
    assert result.num_steps == STEPS
    assert result.training is not None
    assert result.training.count == STEPS * BATCH


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_taken_ahead_or_not_the_bits_are_the_same(name: str):
    """With kept state of the optimiser, too."""
    optimizer = {"name": name, "lr": 0.1}
    if name == "adamw":
        optimizer["state"] = "keep"
    one = two_rounds(ahead=True, optimizer=optimizer)
    other = two_rounds(ahead=False, optimizer=optimizer)
    np.testing.assert_array_equal(one.weights_d, other.weights_d)
    assert one.kept.keys() == other.kept.keys()
    for key, array in one.kept.items():
        np.testing.assert_array_equal(array, other.kept[key])


def test_a_site_without_state_takes_every_step_from_the_model():
    """As in the first round, and after its state was lost."""
    trainer, pool = trainer_of()
    plain, _ = trainer_of(overlap_steps=0)
    weights = pool.initial_weights()
    np.testing.assert_array_equal(
        fit(trainer, *weights, round_index=3).weights_d,
        fit(plain, *weights, round_index=3).weights_d,
    )


def test_what_bfloat16_rounds_away_is_that_of_the_mixed_weights():
    """A model in 16 bits begins with the mix, and not with the global weights."""
    job = small_job(
        model={"factory": "support.users_module:Half"},
        training={
            "overlap_steps": AHEAD,
            "local_steps": STEPS,
            "batch_size": BATCH,
            "optimizer": {"lr": 1e-30},
        },
    )
    pool = ModelPool(job)
    trainer = TorchTrainer(job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT)
    weights_d, integers_m = pool.initial_weights()
    own = dict(Overlap().arrays(weights_d + 1, integers_m))
    found = fit(trainer, weights_d, integers_m, round_index=2, kept=own)
    np.testing.assert_allclose(found.weights_d, weights_d + 0.5, atol=1e-2)


def test_nothing_is_begun_after_the_last_round():
    """No one would use it."""
    trainer, pool = trainer_of()
    last = fit(trainer, *pool.initial_weights(), round_index=1)
    trainer.work_ahead(trainer.job.rounds + 1, last.kept)
    assert trainer._ahead._begun is None


def test_integers_continue_by_their_role():
    """The server's at every site, the largest, or the site's own."""
    roles = (Role.FROM_SERVER, Role.MAX, Role.MAX, Role.KEEP)
    tensors = [(f"i{n}", (), "int64", role) for n, role in enumerate(roles)]
    tensors.append(("weight", (1,), "float32", Role.PARAMETER))
    own_m, integers_m = np.array([7, 7, 7, 7]), np.array([5, 5, 9, 5])
    found_m = overlap.arrived(own_m, integers_m, Layout.build(tensors))
    assert found_m.tolist() == [5, 7, 9, 7]


@pytest.mark.parametrize(
    ("role", "calls"), [("from_server", STEPS - AHEAD), ("keep", 2 * STEPS)]
)
def test_a_counter_continues_by_its_role(role: str, calls: int):
    """After steps ahead, from the server's value or from the site's own."""
    job = small_job(
        model={
            "factory": "support.users_module:noting_network",
            "options": {"in_frozen": False},
            "integer_buffers": {"*": role},
        },
        training={"local_steps": STEPS, "overlap_steps": AHEAD, "batch_size": BATCH},
    )
    pool = ModelPool(job)
    trainer = TorchTrainer(job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT)
    weights_d, integers_m = pool.initial_weights()
    first = fit(trainer, weights_d, integers_m, round_index=1)
    second = fit(trainer, weights_d, integers_m, round_index=2, kept=first.kept)
    assert second.integers_m.tolist() == [calls]


def state_of(value: float) -> dict[str, np.ndarray]:
    own = np.full(3, value, np.float32), np.zeros(0, np.int64)
    return dict(Overlap().arrays(*own))


def steps_taken(calls: list[int], entered: threading.Event) -> WorkAhead:
    def steps(round_index: int, kept: Any, _first: int) -> AheadSteps:
        calls.append(round_index)
        entered.set()
        own = overlap.own_model(kept)
        assert own is not None
        return AheadSteps(
            weights_d=own[0] + round_index,
            integers_m=own[1],
            kept={},
            training=WHATEVER,
        )

    return WorkAhead(replace(job_of(), rounds=9), steps)


def weights_of(ahead: WorkAhead, number: int, value: float, first: int) -> list[float]:
    """A round's weights after its first steps; the model that arrives is 0."""
    model = np.zeros(3, np.float32), np.zeros(0, np.int64)
    layout = Layout.build([("weight", (3,), "float32", Role.PARAMETER)])
    found = ahead.beginning(
        number, model, state_of(value), layout=layout, first_step=first
    )
    assert found.num_steps == AHEAD
    return list(2 * found.weights_d)


def test_work_is_begun_before_it_is_taken():
    """In a thread of its own, once."""
    calls: list[int] = []
    entered = threading.Event()
    ahead = steps_taken(calls, entered)
    ahead.begin(2, state_of(1.0), FIRST)
    assert entered.wait(10)
    assert weights_of(ahead, 2, 1.0, FIRST) == [3.0, 3.0, 3.0]
    assert calls == [2]


@pytest.mark.parametrize(
    ("number", "value", "first"),
    [(3, 1.0, FIRST), (2, 5.0, FIRST), (2, 1.0, FIRST + 1)],
)
def test_work_of_another_round_or_state_is_not_used(
    number: int, value: float, first: int
):
    """A round was lost, or a resumed coordinator went back to an older one."""
    calls: list[int] = []
    ahead = steps_taken(calls, threading.Event())
    ahead.begin(2, state_of(1.0), FIRST)
    assert weights_of(ahead, number, value, first)[0] == number + value
    assert calls == [2, number]


def test_an_error_of_the_steps_ahead_is_the_round_s():
    """It is raised where the round can answer for it."""

    def fails(_round: int, _kept: Any, _first: int) -> AheadSteps:
        raise FloatingPointError("in the model")

    ahead = WorkAhead(replace(job_of(), rounds=9), fails)
    ahead.begin(2, state_of(1.0), FIRST)
    with pytest.raises(FloatingPointError, match="in the model"):
        weights_of(ahead, 2, 1.0, FIRST)


def test_an_error_of_steps_that_are_not_used_is_not_the_round_s():
    """They began with a state that a resumed coordinator went back from."""
    own = {"calls": 0}

    def fails_once(round_index: int, kept: Any, _first: int) -> AheadSteps:
        own["calls"] += 1
        if own["calls"] == 1:
            raise FloatingPointError("in the model")
        found = overlap.own_model(kept)
        assert found is not None
        return AheadSteps(
            weights_d=found[0],
            integers_m=found[1],
            kept={},
            training=WHATEVER,
        )

    ahead = WorkAhead(replace(job_of(), rounds=9), fails_once)
    ahead.begin(2, state_of(1.0), FIRST)
    assert ahead._begun is not None
    assert ahead._begun[2].exception(10) is not None
    assert weights_of(ahead, 3, 1.0, FIRST)[0] == 1.0


@pytest.mark.parametrize(("waited", "took"), [(0.0, 10.0), (3.0, 7.0), (60.0, 6.0)])
def test_virtual_time_counts_steps_ahead_as_waiting(waited: float, took: float):
    """At most the steps that may be taken ahead, and at most the time there was."""
    trainer, pool = trainer_of()
    clock = VirtualClock()
    timed = TimedTrainer(
        trainer=trainer,
        clock=clock,
        work=WorkSeconds(train=10.0, evaluate=1.0, ahead=4.0),
    )
    weights = pool.initial_weights()
    first = fit(timed, *weights, round_index=1)
    assert clock.monotonic() == 10.0
    clock.sleep(waited)
    timed.evaluate(*weights, round_index=2)  # Its own work, and no time to wait.
    begun = clock.monotonic()
    fit(timed, *weights, round_index=2, kept=first.kept)
    assert clock.monotonic() - begun == took
