"""What changed goes down instead of the model, to sites that have the one before."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support import toy

from federation.events import RoundFinished, SiteFailed
from federation.job.spec import JobSpec
from federation.messages import RoundTask, SiteMessage, Task
from federation.protocols import RunState

C, A, B = toy.SITES
ROUNDS = 5


def job_of(codec: str = "identity", **tables: Any) -> JobSpec:
    """A job whose sites are sent changes."""
    communication = {"down_codec": {"name": codec}, "down_content": "change"}
    return toy.job({"rounds": ROUNDS, "communication": communication, **tables})


def watched(
    seen: list[RoundTask], fault: Callable[..., Sequence[SiteMessage]] = toy.no_fault
) -> Callable[..., Sequence[SiteMessage]]:
    """A fault that notes every task first."""

    def note(task: Task, answer: Callable[[], SiteMessage]) -> Sequence[SiteMessage]:
        assert isinstance(task, RoundTask)
        seen.append(task)
        return fault(task, answer)

    return note


def changed(seen: list[RoundTask]) -> dict[str, str]:
    """Of each site the rounds in which it was sent a change (c) or the model (m)."""
    kinds = dict.fromkeys(toy.SITES, "")
    for task in seen:
        kinds[task.site] += "c" if task.changed_to else "m"
    return kinds


def run(job: JobSpec, **more: Any) -> tuple[toy.Toy, RunState, dict[str, str]]:
    """A run, its last state and what each site was sent."""
    seen: list[RoundTask] = []
    fault = watched(seen, more.pop("fault", toy.no_fault))
    one = toy.Toy(job=job, fault=fault, **more)
    state = one.run()
    return one, state, changed(seen)


@pytest.mark.parametrize("codec", ["identity", "fp16", "bf16"])
def test_sites_hold_the_bits_of_the_aggregator(codec: str):
    """Each has checked the digest, or it would not have answered."""
    one, state, kinds = run(job_of(codec))
    assert set(kinds.values()) == {"m" + "c" * ROUNDS}  # The last is the evaluation.
    assert one.told(SiteFailed) == []
    whole = toy.Toy(job=toy.job({"rounds": ROUNDS})).run()
    tolerance = {"identity": 1e-6, "fp16": 2e-3, "bf16": 1e-2}[codec]
    np.testing.assert_allclose(state.weights_d, whole.weights_d, atol=tolerance)


def test_a_site_that_missed_a_round_gets_the_model():
    """Once; from then on what changed."""

    def fail(message: SiteMessage) -> SiteMessage:
        return toy.failure(message.site, round_index=message.round_index)

    job = job_of(schedule={"minimum_sites": 2})
    _, _, kinds = run(job, fault=toy.faults((A, 2, fail)))
    assert kinds == {A: "mcmccc", B: "mccccc", C: "mccccc"}


def test_after_a_lost_round_all_get_the_model():
    """It has not changed, and nobody needs to know who has it."""

    def fail(message: SiteMessage) -> SiteMessage:
        return toy.failure(message.site, round_index=message.round_index)

    job = job_of(schedule={"minimum_sites": 3, "max_lost_rounds": 2})
    one, _, kinds = run(job, fault=toy.faults((A, 3, fail)))
    statuses = [event.status for event in one.told(RoundFinished)]
    assert statuses == ["completed", "completed", "lost", "completed", "completed"]
    assert set(kinds.values()) == {"mccmcc"}


@pytest.mark.parametrize("codec", ["identity", "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(codec: str):
    """The model is sent whole, in float32: what sites would have made of changes."""
    job = job_of(codec, aggregation={"server_optimizer": {"name": "adam"}})
    _, whole, _ = run(job)
    first = toy.Toy(job=job)
    first.stop_requested = lambda: len(first.told(RoundFinished)) == 2
    first.run()
    seen: list[RoundTask] = []
    first.stop_requested, first.fault = lambda: False, watched(seen)
    state = first.run()
    assert set(changed(seen).values()) == {"mccc"}
    assert state.weights_d.tobytes() == whole.weights_d.tobytes()
