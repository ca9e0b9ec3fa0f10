"""The study of spot machines: the optimum is one, and no policy beats it or is late."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def study() -> SimpleNamespace:
    """The scripts as modules; they find each other beside themselves."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import spot_policy  # noqa: PLC0415 -- it is a script
        import spot_traces  # noqa: PLC0415 -- it is a script
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(policy=spot_policy, traces=spot_traces)


def small(study: SimpleNamespace, seed: int):
    """A trace that is short enough to try every sequence of places."""
    rng = np.random.default_rng(seed)
    zones, work, boot = 2, 2, 1 + seed % 2
    slots = 6
    shape = (zones, 2 + slots)
    trace = study.traces.Trace(
        kind="small",
        prices_zt=rng.uniform(0.1, 1.0, shape),
        available_zt=rng.random(shape) < 0.6,
        region_z=[0, 1],
        moving_z=np.array([0.0, rng.uniform(0.0, 0.1)]),
        on_demand=1.006,
        start=2,
        work=work,
        deadline=slots,
        boot=boot,
    )
    return replace(trace)


def cheapest_of_all(study: SimpleNamespace, trace: SimpleNamespace) -> float:
    """Try every place in every slot."""
    places = (study.traces.WAIT, *range(trace.zones + 1))
    best = np.inf
    for plan in itertools.product(places, repeat=trace.deadline):
        legal = all(
            not 0 <= place < trace.zones or trace.available_zt[place, trace.start + at]
            for at, place in enumerate(plan)
        )
        if not legal:
            continue
        follow = iter(plan)
        found = study.traces.replay(trace, lambda *_, follow=follow: next(follow))
        if not found.is_late:
            best = min(best, found.dollars)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_optimum_is_that_of_every_possible_sequence(study: SimpleNamespace, seed: int):
    """The recursion and the replay count dollars in the same way."""
    trace = small(study, seed)
    expected = cheapest_of_all(study, trace)
    assert study.traces.optimum(trace) == pytest.approx(expected)


def test_deadline_is_kept_when_every_spot_machine_is_lost_as_it_starts_to_work(
    study: SimpleNamespace,
):
    trace = study.traces.generate("calm", 123_456)
    available = trace.available_zt.copy()
    slots = np.arange(available.shape[1]) - trace.start
    available[:, (slots >= 0) & (slots % (trace.boot + 1) == trace.boot)] = False
    trace = replace(trace, available_zt=available)
    outcome = study.traces.replay(trace, study.policy.up_keep)
    assert not outcome.is_late
    assert outcome.on_demand_slots >= trace.work
