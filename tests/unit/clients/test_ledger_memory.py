"""What a site's memory knows of all its ledgers, and what it allows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clients.privacy.ledger_memory import (
    DOCUMENT,
    LifetimeBudget,
    RememberedLedger,
    adopt,
    check_plan,
    dataset_of,
    keep_anchor,
    known_anchor,
    lifetime,
)
from clients.privacy.site_memory import FileMemory, InMemory, SiteMemory
from federation.clock import VirtualClock
from federation.errors import (
    BudgetExceeded,
    CorruptObject,
    JobError,
    StoreUnavailable,
)
from federation.ids import RunId
from federation.messages import LedgerAnchor
from privacy.dp import accountant
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger, InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

STEP = PrivacyEvent(noise_multiplier=4.0, sampling_rate=1.0, steps=1)
NAME = "records"
DELTA = 1e-5


def terms(run: str = "run-1", **changes: Any) -> Terms:
    usual = {
        "site": "one",
        "job_digest": "ab" * 32,
        "delta": DELTA,
        "epsilon_cap": 99.0,
    }
    return Terms(run_id=run, **{**usual, **changes})


def opened(
    memory: SiteMemory,
    run: str = "run-1",
    *,
    limit: float | None = None,
    planned: int = 0,
    delta: float | None = None,
    **changes: Any,
) -> RememberedLedger:
    ledger = InMemoryLedger(terms(run, **changes), clock=VirtualClock(1e9))
    budget = LifetimeBudget(dataset=NAME, epsilon=limit, delta=delta)
    plan = [STEP] * planned
    return RememberedLedger(ledger, memory, budget, plan)


def of_steps(count: int, delta: float = DELTA) -> float:
    return accountant.epsilon([STEP] * count, delta)


def spent(memory: SiteMemory, delta: float | None = None) -> float:
    found = lifetime(memory, LifetimeBudget(dataset=NAME, delta=delta))
    return 0.0 if found is None else found.epsilon


def elsewhere(memory: SiteMemory, steps: int) -> None:
    """As if another process had charged so many steps."""
    ledger = opened(memory, "elsewhere")
    for index in range(steps):
        ledger.charge(STEP, round_index=index)


def test_all_runs_and_purposes_are_composed():
    """A record may be on the other side in another run."""
    memory = InMemory()
    for run in ("run-1", "run-2"):
        ledger = opened(memory, run)
        ledger.charge_all([(STEP, "train"), (STEP, "evaluate")], round_index=1)
    assert spent(memory) == pytest.approx(of_steps(4), rel=1e-12)
    assert known_anchor(memory, RunId("run-2")) == LedgerAnchor(train=1, evaluate=1)
    assert dataset_of(memory, "run-2") == NAME


def test_run_without_a_charge_leaves_no_trace():
    """Proposals alone do not make the memory grow."""
    memory = InMemory()
    opened(memory, limit=1.0)
    assert memory.read(DOCUMENT) == {}


def test_smallest_delta_of_the_runs_counts():
    """Unless the operator names one."""
    memory = InMemory()
    opened(memory, "run-1", delta=None).charge(STEP, round_index=1)
    other = InMemoryLedger(terms("run-2", delta=1e-7), clock=VirtualClock(1e9))
    budget = LifetimeBudget(dataset=NAME)
    RememberedLedger(other, memory, budget).charge(STEP, round_index=1)
    assert spent(memory) == pytest.approx(of_steps(2, 1e-7), rel=1e-12)
    assert spent(memory, 1e-3) == pytest.approx(of_steps(2, 1e-3), rel=1e-12)


def test_plan_that_does_not_fit_is_refused():
    """With what was spent, what it would come to, and the key of the limit."""
    memory = InMemory()
    elsewhere(memory, 3)
    limit = of_steps(5)
    opened(memory, limit=limit, planned=2)
    with pytest.raises(JobError, match=r"is allowed \(policy\.total_epsilon\)"):
        opened(memory, limit=limit, planned=3)


def test_budget_is_judged_at_the_smallest_delta_of_all_runs():
    """At its own, which is larger, a run would fit."""
    memory, small = InMemory(), 1e-9
    first = InMemoryLedger(terms(delta=small), clock=VirtualClock(1e9))
    remembered = RememberedLedger(first, memory, LifetimeBudget(dataset=NAME))
    remembered.charge(STEP, round_index=1)
    assert of_steps(3) < of_steps(2, small)
    limit = (of_steps(3) + of_steps(2, small)) / 2
    with pytest.raises(JobError, match="at delta 1e-09"):
        opened(memory, "run-2", limit=limit, planned=2)
    ledger = opened(memory, "run-2", limit=limit)
    with pytest.raises(BudgetExceeded, match="at delta 1e-09"):
        ledger.charge(STEP, round_index=1)


def test_charges_beyond_the_plan_are_held_to_the_limit():
    """Down to the last that fits."""
    memory = InMemory()
    ledger = opened(memory, limit=of_steps(4), planned=2)
    for index in range(1, 5):
        ledger.charge(STEP, round_index=index)
    with pytest.raises(BudgetExceeded, match=r"policy\.total_epsilon"):
        ledger.charge(STEP, round_index=5)
    assert len(ledger.charges()) == 4
    assert spent(memory) == pytest.approx(of_steps(4), rel=1e-12)


def test_plan_is_no_excuse_once_others_have_charged():
    """The plan fitted when the run was opened, and does not any more."""
    memory = InMemory()
    ledger = opened(memory, limit=of_steps(5), planned=5)
    elsewhere(memory, 2)
    for index in range(1, 4):
        ledger.charge(STEP, round_index=index)
    with pytest.raises(BudgetExceeded):
        ledger.charge(STEP, round_index=4)
    assert spent(memory) == pytest.approx(of_steps(5), rel=1e-12)


def test_relations_do_not_add_up():
    """Whoever comes second is refused, whichever it is."""
    memory = InMemory()
    opened(memory).charge(STEP, round_index=1)
    with pytest.raises(JobError, match="cannot be added into"):
        opened(memory, "run-2", relation=accountant.SITE_RELATION)


def test_memory_follows_a_ledger_that_is_ahead(tmp_path: Path):
    """Killed between the two: the ledger has the charge, and the memory has not."""
    memory = FileMemory(tmp_path / "memory")
    ledger = FileLedger(tmp_path / "run", terms(), clock=VirtualClock(1e9))
    ledger.charge(STEP, round_index=1)
    assert spent(memory) == 0
    RememberedLedger(ledger, memory, LifetimeBudget(dataset=NAME)).close()
    assert spent(memory) == of_steps(1)
    assert known_anchor(memory, RunId("run-1")) == LedgerAnchor(train=1)


def test_memory_counts_the_line_of_a_charge_that_failed(tmp_path: Path):
    """The disk took the line and not the head; the next charge finds both."""
    memory, folder = FileMemory(tmp_path / "memory"), tmp_path / "run"
    ledger = RememberedLedger(
        FileLedger(folder, terms(), clock=VirtualClock(1e9)),
        memory,
        LifetimeBudget(dataset=NAME),
    )
    away = folder.rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable):
        ledger.charge(STEP, round_index=1)
    away.rename(folder)
    ledger.charge(STEP, round_index=2)
    ledger.close()
    assert len(ledger.charges()) == 2
    assert spent(memory) == pytest.approx(of_steps(2), rel=1e-12)


def test_ledger_is_counted_once():
    """Also if it is found again, or found shorter than it was."""
    memory = InMemory()
    ledger = opened(memory)
    for index in range(3):
        ledger.charge(STEP, round_index=index)
    adopt(memory, NAME, terms(), ledger.charges())
    adopt(memory, "another name", terms(), ledger.charges()[:1])
    assert spent(memory) == pytest.approx(of_steps(3), rel=1e-12)
    assert dataset_of(memory, "run-1") == NAME
    # A ledger that was put back does not give its budget back.
    opened(memory).charge(STEP, round_index=1)
    assert spent(memory) == pytest.approx(of_steps(3), rel=1e-12)


def test_release_of_another_run_is_counted_once_over_all_runs():
    """Also when the run goes on, and when its ledger is found again."""
    memory = InMemory()
    opened(memory, "run-1").charge(STEP, round_index=1)
    kept = InMemoryLedger(terms("run-2"), clock=VirtualClock(1e9))
    budget = LifetimeBudget(dataset=NAME)
    ledger = RememberedLedger(kept, memory, budget)
    ledger.repeat(STEP, round_index=1)  # What run-1 has released.
    assert (len(ledger.charges()), spent(memory)) == (1, of_steps(1))
    adopt(memory, NAME, terms("run-2"), ledger.charges())
    assert spent(memory) == of_steps(1)
    again = RememberedLedger(kept, memory, budget)
    assert spent(memory) == of_steps(1)
    again.charge(STEP, round_index=2)
    assert spent(memory) == pytest.approx(of_steps(2), rel=1e-12)
    adopt(memory, NAME, terms("run-2"), [*again.charges(), *again.charges()])
    found = memory.read(DOCUMENT)["datasets"][NAME]["runs"]["run-2"]
    assert found["repeated"] == [[4.0, 1.0, 0.0, 1]]


def test_plan_counts_beside_what_the_run_has_charged_already():
    """It may have repeated more rounds than its plan still holds."""
    memory = InMemory()
    ledger = opened(memory)
    for index in range(4):
        ledger.charge(STEP, round_index=index)
    limit = (of_steps(3) + of_steps(4)) / 2
    with pytest.raises(JobError, match="would take it to"):
        opened(memory, limit=limit, planned=2)
    budget = LifetimeBudget(dataset=NAME, epsilon=limit)
    with pytest.raises(JobError, match="would take it to"):
        check_plan(memory, budget, terms(), [STEP] * 2)


def test_anchor_that_a_ledger_is_behind_is_kept_for_its_recovery():
    memory, anchor = InMemory(), LedgerAnchor(train=2)
    with pytest.raises(LedgerBehind):
        opened(memory).check_anchor(anchor)
    assert known_anchor(memory, RunId("run-1")) == anchor


def test_anchor_never_falls():
    """Of each kind the largest is kept."""
    memory, run = InMemory(), RunId("run-1")
    keep_anchor(memory, run, LedgerAnchor(train=3, evaluate=1))
    keep_anchor(memory, run, LedgerAnchor(train=1, evaluate=2))
    assert known_anchor(memory, run) == LedgerAnchor(train=3, evaluate=2)


@pytest.mark.parametrize(
    "body",
    [
        {"runs": {"run-1": {"train": -1, "evaluate": 0}}},
        {"runs": {"run-1": {"train": 1}}},
    ],
)
def test_damaged_anchor_is_refused(body: Mapping[str, Any]):
    """It is no reason to begin anew."""
    memory = InMemory()
    memory.update(DOCUMENT, lambda _: dict(body))
    with pytest.raises(CorruptObject, match="memory of its ledger"):
        known_anchor(memory, RunId("run-1"))


def test_damaged_events_are_refused():
    """What was spent is not known then."""
    memory = InMemory()
    runs = {"run-1": {"delta": DELTA, "events": [[0.0, 1.0, 0.0, 1]]}}
    entry = {"relation": accountant.NEIGHBOURING_RELATION, "runs": runs}
    memory.update(DOCUMENT, lambda _: {"datasets": {NAME: entry}})
    with pytest.raises(CorruptObject, match="have spent is damaged"):
        spent(memory)
