"""Statistics of a site's records are released and charged once, whatever dies."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import small_job
from torch.utils.data import DataLoader

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.privacy import standardise
from clients.privacy.ledger_memory import LifetimeBudget, RememberedLedger, lifetime
from clients.privacy.site_memory import InMemory, SiteMemory
from clients.privacy.standardise import DOCUMENT, Statistics, StatisticsMemory
from federation.clock import VirtualClock
from federation.errors import BudgetExceeded, CorruptObject, JobError, SiteError
from federation.job.privacy_job import StandardiseSpec
from federation.job.spec import JobSpec
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

EVENT = PrivacyEvent(noise_multiplier=4.0, sampling_rate=1.0, steps=1)
DELTA = 1e-5
SPEC = StandardiseSpec(low=(0.0,), high=(1.0,))
BUDGET = LifetimeBudget(dataset="records")


class Killed(Exception):
    pass


def job_of(unit: str = "record", **table: Any) -> JobSpec:
    private = {"unit": unit, "target_epsilon": 8.0, "delta": 1e-5}
    standardise = {"low": [-10.0], "high": [10.0]} | table
    return small_job(
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": {**private, "standardise": standardise}},
    )


def data_of(inputs: np.ndarray[Any, Any]) -> Dataset:
    return as_dataset(Examples(inputs=inputs), name="train")


def opened(
    memory: SiteMemory, run: str = "run-1", charges: int = 0, cap: float = 99.0
) -> RememberedLedger:
    """A ledger as it is opened again, after so many charges of statistics."""
    terms = Terms(
        run_id=run, site="one", job_digest="ab" * 32, delta=DELTA, epsilon_cap=cap
    )
    ledger = InMemoryLedger(terms, clock=VirtualClock(1e9))
    for _ in range(charges):
        ledger.charge(EVENT, round_index=standardise.ROUND)
    return RememberedLedger(ledger, memory, BUDGET)


def remembered(
    memory: SiteMemory, run: str = "run-1", lineage: str = "a"
) -> StatisticsMemory:
    return StatisticsMemory(memory=memory, lineage=lineage, spec=SPEC, run_id=run)


def releases(*values: float) -> Callable[[], Statistics]:
    """Another result at each call, as fresh noise gives."""
    left = iter(values)
    return lambda: Statistics(centre=(next(left),), spread=(1.0,))


def killed() -> Statistics:
    raise Killed


def total(memory: SiteMemory) -> float:
    found = lifetime(memory, BUDGET)
    return 0.0 if found is None else found.epsilon


def of(count: int) -> float:
    return accountant.epsilon([EVENT] * count, DELTA)


def test_resumed_run_takes_what_was_released():
    memory, make = InMemory(), releases(0.5)
    first = remembered(memory).take(opened(memory), EVENT, make)
    again = opened(memory, charges=1)
    assert remembered(memory).take(again, EVENT, make) == first
    assert len(again.charges()) == 1
    assert total(memory) == of(1)


def test_next_run_takes_it_too_and_all_runs_are_charged_once():
    """Its own epsilon holds it: what it trains depends on it."""
    memory, make = InMemory(), releases(0.5)
    first = remembered(memory).take(opened(memory), EVENT, make)
    ledger = opened(memory, "run-2")
    assert remembered(memory, "run-2").of_another_run()
    assert remembered(memory, "run-2").take(ledger, EVENT, make) == first
    assert ledger.epsilon("train") == of(1)
    assert total(memory) == of(1)
    again = opened(memory, "run-2", charges=1)
    assert remembered(memory, "run-2").take(again, EVENT, make) == first
    assert len(again.charges()) == 1
    again.charge(EVENT, round_index=1)
    assert total(memory) == of(2)


def test_other_data_or_other_options_are_another_release():
    memory = InMemory()
    takes = [
        remembered(memory),
        remembered(memory, "run-2", lineage="b"),
        replace(remembered(memory, "run-3"), spec=replace(SPEC, high=(2.0,))),
        replace(remembered(memory, "run-4"), spec=replace(SPEC, noise_multiplier=9.0)),
    ]
    make = releases(1.0, 2.0, 3.0, 4.0)
    found = [each.take(opened(memory, each.run_id), EVENT, make) for each in takes]
    assert [each.centre for each in found] == [(1.0,), (2.0,), (3.0,), (4.0,)]
    assert total(memory) == of(4)


class DyingLedger(RememberedLedger):
    """Dies as soon as a charge is durable."""

    def charge(self, *args: Any, **named: Any) -> float:
        super().charge(*args, **named)
        raise Killed


def test_killed_between_charge_and_release_goes_on_without_another_charge():
    """With the draw that was charged; nothing is drawn again."""
    memory = InMemory()
    ledger = opened(memory)
    ledger.__class__ = DyingLedger
    with pytest.raises(Killed):
        remembered(memory).take(ledger, EVENT, releases(0.5))
    again = opened(memory, charges=1)
    found = remembered(memory).take(again, EVENT, killed)
    assert found.centre == (0.5,)
    assert len(again.charges()) == 1
    assert total(memory) == of(1)


def test_killed_before_the_charge_is_charged():
    """For the draw that was remembered."""
    memory = InMemory()
    with pytest.raises(BudgetExceeded):
        remembered(memory).take(opened(memory, cap=0.1), EVENT, releases(0.5))
    ledger = opened(memory)
    found = remembered(memory).take(ledger, EVENT, killed)
    assert found.centre == (0.5,)
    assert len(ledger.charges()) == 1


def copy_of(memory: SiteMemory) -> InMemory:
    """A backup of what a memory knows of statistics."""
    backup, document = InMemory(), memory.read(DOCUMENT)
    backup.update(DOCUMENT, lambda _: document)
    return backup


@pytest.mark.parametrize("deaths", [0, 1])
def test_lost_memory_is_charged_again(deaths: int):
    """The old result is gone, and the ledger knows that there was one."""
    memory = InMemory()
    ledger = opened(memory, charges=1)
    for _ in range(deaths):
        with pytest.raises(Killed):
            remembered(memory).take(ledger, EVENT, killed)
    remembered(memory).take(ledger, EVENT, releases(0.5))
    assert len(ledger.charges()) == 2
    assert total(memory) == of(2)


def test_restored_memory_never_gets_two_draws_for_one_charge():
    """From before the draw: another draw, another charge. From after it: the draw that
    was charged, and from then on that one alone."""
    memory = InMemory()
    before = copy_of(memory)
    with pytest.raises(BudgetExceeded):
        remembered(memory).take(opened(memory, cap=0.1), EVENT, releases(0.5))
    drawn = copy_of(memory)
    first = remembered(memory).take(opened(memory), EVENT, killed)
    restored = opened(drawn, charges=1)
    assert remembered(drawn).take(restored, EVENT, killed) == first
    assert len(restored.charges()) == 1
    ledger = opened(before, charges=1)
    second = remembered(before).take(ledger, EVENT, releases(0.7))
    assert second.centre == (0.7,)
    assert len(ledger.charges()) == 2
    assert total(before) == of(2)


def test_beyond_the_budget_nothing_is_released():
    """What was drawn is no other run's: that one draws, and pays in full."""
    memory = InMemory()
    with pytest.raises(BudgetExceeded):
        remembered(memory).take(opened(memory, cap=0.5), EVENT, releases(0.5))
    assert total(memory) == 0
    other = remembered(memory, "run-2")
    assert not other.of_another_run()
    assert other.take(opened(memory, "run-2"), EVENT, releases(0.7)).centre == (0.7,)
    assert total(memory) == of(1)


def test_first_run_to_pay_decides_for_both():
    """Each has drawn and pays in full; neither uses what nobody has paid."""
    memory = InMemory()

    def make_meanwhile() -> Statistics:
        ledger = opened(memory, "run-2")
        remembered(memory, "run-2").take(ledger, EVENT, releases(0.7))
        return Statistics(centre=(0.5,), spread=(1.0,))

    found = remembered(memory).take(opened(memory), EVENT, make_meanwhile)
    assert found.centre == (0.7,)
    assert total(memory) == of(2)


def test_damaged_memory_is_refused():
    memory = InMemory()
    remembered(memory).take(opened(memory), EVENT, releases(0.5))

    def damage(document: dict[str, Any]) -> dict[str, Any]:
        ((name, entry),) = document.items()
        return {name: entry | {"result": {"centre": 1}}}

    memory.update(DOCUMENT, damage)
    with pytest.raises(CorruptObject, match="noised statistics"):
        remembered(memory).take(opened(memory, charges=1), EVENT, killed)


def test_records_are_standardised():
    rng = np.random.default_rng(5)
    inputs = rng.normal([3.0, -2.0], [2.0, 0.5], size=(5000, 2)).astype(np.float32)
    train = data_of(inputs)
    draws = Random(6)  # noqa: S311 -- noise that is always the same
    found = standardise.release(job_of(noise_multiplier=1.0), train, draws.randbytes)
    data = found.apply(train)
    after, _ = data.batch(np.arange(5000))
    assert after.dtype == torch.float32
    assert after.mean(0).numpy() == pytest.approx([0, 0], abs=0.05)
    assert after.std(0).numpy() == pytest.approx([1, 1], abs=0.1)
    part, _ = data.subset(np.array([7, 9])).batch(np.array([1]))
    assert torch.equal(part[0], after[9])


def test_standardised_records_keep_the_workers_of_a_loader():
    rows = [(torch.ones(2), 0)] * 4
    train = as_dataset(DataLoader(rows, num_workers=2), name="train")
    data = Statistics(centre=(0.0, 0.0), spread=(1.0, 1.0)).apply(train)
    part: Any = data.subset(np.array([1, 2]))
    assert part.workers.settings["num_workers"] == 2


def test_channels_of_images_are_features():
    images = np.zeros((40, 3, 2, 2), np.float32)
    images[:, 1] = 4.0
    job = job_of(low=[-8.0, 0.0, -8.0], high=[8.0, 8.0, 8.0], noise_multiplier=0.05)
    found = standardise.release(job, data_of(images))
    assert found.centre == pytest.approx([0, 4, 0], abs=0.3)
    after, _ = found.apply(data_of(images)).batch(np.arange(3))
    assert after.shape == (3, 3, 2, 2)


def test_a_person_counts_once_with_any_number_of_records():
    """With the mean of what the records would add, in pieces or not."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 9, size=400)
    sizes[7] = 5000  # More than are read at a time.
    persons = rng.permutation(np.repeat(np.arange(400), sizes))
    inputs = (persons % 2 * 4.0 + rng.normal(size=len(persons))).astype(np.float32)
    train = as_dataset(Examples(inputs=inputs[:, None], persons=persons), name="train")
    job = job_of("person", noise_multiplier=0.05)
    of_records = job_of(noise_multiplier=0.05)
    assert standardise.events(job, train) == standardise.events(
        of_records, data_of(inputs[:400, None])
    )
    draws = Random(6)  # noqa: S311 -- noise that is always the same
    found = standardise.release(job, train, draws.randbytes)
    means = [inputs[persons == each].mean() for each in range(400)]
    squares = [(inputs[persons == each] ** 2).mean() for each in range(400)]
    assert found.centre[0] == pytest.approx(np.mean(means), abs=0.01)
    assert found.spread[0] ** 2 == pytest.approx(
        np.mean(squares) - np.mean(means) ** 2, abs=0.1
    )


def test_statistics_of_records_hide_no_person():
    """So a run that protects persons releases others, and pays for them."""
    memory = InMemory()
    first = remembered(memory).take(opened(memory), EVENT, releases(0.5))
    of_persons = replace(remembered(memory, "run-2"), of_persons=True)
    assert not of_persons.of_another_run()
    assert of_persons.take(opened(memory, "run-2"), EVENT, releases(0.7)) != first


def test_cost_is_one_release_of_all_records():
    train = data_of(np.zeros((300, 4), np.float32))
    (event,) = standardise.events(job_of(), train)
    assert event.steps == 1
    assert event.sampling_rate == 1.0
    assert event.noise_multiplier == pytest.approx(10, rel=2e-3)
    assert standardise.events(small_job(), train) == ()


def test_what_has_no_features_is_refused():
    for inputs in (np.zeros((9, 4), np.int64), np.zeros(9, np.float32)):
        with pytest.raises(SiteError, match="no features to standardise"):
            standardise.events(job_of(), data_of(inputs))
    train = data_of(np.zeros((9, 4), np.float32))
    with pytest.raises(JobError, match="bounds for 3 features, but records have 4"):
        standardise.events(job_of(low=[0, 0, 0], high=[1, 1, 1]), train)
    other = Statistics(centre=(0.0,), spread=(1.0,))
    with pytest.raises(SiteError, match="the records have 4 features"):
        other.apply(train)
