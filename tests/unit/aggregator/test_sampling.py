"""Cohorts."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from aggregator.sampling import Candidate, cohorts_of
from federation.errors import JobError, UserCodeError
from federation.ids import SiteId
from federation.job.spec import (
    JobSpec,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
    SiteSpec,
    TrainingSpec,
)
from federation.members import EVERYBODY, Members
from federation.protocols import NEVER_ASKED, RunProgress, SiteHistory

NAMES = tuple(map(SiteId, "caebd"))


def _job(sites_per_round: int | None = None, seed: int = 7, **keys: Any) -> JobSpec:
    return JobSpec(
        name="job",
        rounds=3,
        seed=seed,
        model=ModelSpec(factory="module:function"),
        training=TrainingSpec(optimizer=OptimizerSpec(), local_steps=1),
        schedule=ScheduleSpec(sites_per_round=sites_per_round, **keys),
        sites=tuple(SiteSpec(name=name, region=f"r-{name}") for name in NAMES),
    )


def _state(
    round_index: int,
    history: Mapping[SiteId, SiteHistory] | None = None,
    members: Members = EVERYBODY,
) -> RunProgress:
    return RunProgress(
        round_index=round_index - 1,
        rounds_completed=0,
        lost_in_a_row=0,
        members=members,
        history=history or {},
    )


def _draw(job: JobSpec, round_index: int, **known: Any) -> tuple[SiteId, ...]:
    return cohorts_of(job)(_state(round_index, **known), 0.0)


Reply = Callable[[int, SiteId], SiteHistory | None]


def _played(job: JobSpec, rounds: int, reply: Reply) -> list[tuple[SiteId, ...]]:
    """Draw cohorts whose sites do as ``reply`` says; None if an answer is missing."""
    history: dict[SiteId, SiteHistory] = {}
    cohorts = []
    for index in range(1, rounds + 1):
        cohorts.append(_draw(job, index, history=history))
        for site in cohorts[-1]:
            before, found = history.get(site, NEVER_ASKED), reply(index, site)
            history[site] = replace(
                found or before,
                asked=before.asked + 1,
                counted=before.counted + (found is not None),
                last_round=index,
            )
    return cohorts


@pytest.mark.parametrize("sampling", ["uniform", "fair", "utility"])
def test_drawn_sites_keep_the_order_of_the_job(sampling: str):
    """Distinct sites, as many as asked for, not sorted by name."""
    for round_index in range(1, 50):
        cohort = _draw(_job(3, sampling=sampling), round_index)
        assert cohort == tuple(n for n in NAMES if n in cohort)
        assert len(set(cohort)) == 3


@pytest.mark.parametrize("sampling", ["uniform", "fair", "utility"])
def test_draw_depends_on_job_and_state_only(sampling: str):
    """The same twice, another in other rounds and with other seeds."""
    job = _job(2, sampling=sampling)
    rounds = [_draw(job, r) for r in range(1, 30)]
    assert rounds == [_draw(job, r) for r in range(1, 30)]
    assert rounds != [_draw(replace(job, seed=8), r) for r in range(1, 30)]
    assert len(set(rounds)) > 5


def test_draw_is_uniform():
    """Chi-squared over the ten pairs; 2000 rounds, fixed seed, alarm rate 0.1 %."""
    draw = cohorts_of(replace(_job(2), seed=11))
    counts = Counter(draw(_state(r), 0.0) for r in range(1, 2001))
    chi_squared = sum((n - 200) ** 2 / 200 for n in counts.values())
    assert len(counts) == 10
    assert chi_squared < 27.9


@pytest.mark.parametrize(
    ("share", "asked"), [(None, 2), (1.1, 3), (1.5, 3), (2.0, 4), (2.5, 5)]
)
def test_over_selection_asks_more_and_needs_as_many(share: float | None, asked: int):
    job = _job(2, over_selection=share)
    assert len(_draw(job, 1)) == job.cohort_size == asked
    assert job.minimum_sites == 2
    assert _job(10, over_selection=1.1).sites_per_round == 10


def test_over_selection_asks_for_no_more_sites_than_there_are():
    """The rest would be left out without a word."""
    with pytest.raises(JobError) as caught:
        small_job(num_sites=5, schedule={"sites_per_round": 2, "over_selection": 2.6})
    assert caught.value.key == "schedule.over_selection"
    assert "2.5 or less" in caught.value.reason


def test_fair_samples_count_every_site_as_often_as_the_others():
    cohorts = _played(_job(2, sampling="fair"), 25, lambda *_: SiteHistory())
    assert set(Counter(s for c in cohorts for s in c).values()) == {10}
    assert len(set(cohorts)) > 5  # Not the same pairs again and again.


def test_fair_samples_ask_an_absent_site_more_often_and_a_dead_one_not_for_ever():
    def reply(index: int, site: SiteId) -> SiteHistory | None:
        is_there = site not in {"a", "b"} or (site == "b" and index % 2)
        return SiteHistory() if is_there else None

    cohorts = _played(_job(2, sampling="fair"), 120, reply)
    counts = Counter(site for cohort in cohorts for site in cohort)
    others = [counts[site] for site in "ced"]
    assert max(others) - min(others) <= 1
    assert counts["a"] <= 2 * max(others) + 1
    assert max(others) < counts["b"] < counts["a"]


def test_utility_prefers_high_losses_and_not_slow_sites():
    job = _job(1, sampling="utility")
    history = {
        site: SiteHistory(9, 9, 90, loss=1.0, predictions=8, seconds=1.0)
        for site in NAMES
    }
    history[NAMES[0]] = replace(history[NAMES[0]], loss=3.0)
    history[NAMES[1]] = replace(history[NAMES[1]], loss=3.0, seconds=4.0)
    counts = Counter[SiteId]()
    for index in range(91, 1091):
        counts.update(_draw(job, index, history=history))
    high, slow, *usual = (counts[site] for site in NAMES)
    assert high > 2 * max(usual)
    assert slow < 0.5 * min(usual)


def test_no_site_is_forgotten_however_slow_it_was_or_whatever_others_claim():
    """Exploration asks those that were not asked for longest."""

    def reply(index: int, site: SiteId) -> SiteHistory | None:
        claimed = 1e300 if site == "c" else 1e-3
        seconds = 1e6 if site == "a" else 1.0
        return SiteHistory(loss=claimed, predictions=8, seconds=seconds)

    cohorts = _played(_job(3, sampling="utility"), 200, reply)
    for site in NAMES:
        rounds = [i for i, cohort in enumerate(cohorts) if site in cohort]
        gaps = np.diff([-1, *rounds, len(cohorts)])
        assert max(gaps) <= 6, site


def test_one_claimed_loss_moves_little():
    """It is cut off at the 95 % quantile of all."""
    many = tuple(SiteId(f"s{i}") for i in range(100))
    job = replace(
        _job(10, sampling="utility"), sites=tuple(SiteSpec(name=name) for name in many)
    )
    usual = SiteHistory(9, 9, 900, loss=1.0, predictions=8, seconds=1.0)
    history = dict.fromkeys(many, usual) | {many[0]: replace(usual, loss=1e300)}
    counts = Counter[SiteId]()
    for index in range(901, 1901):
        counts.update(_draw(job, index, history=history))
    assert counts[many[0]] < 1.5 * np.mean([counts[site] for site in many[1:]])


def test_sites_that_left_are_drawn_only_where_too_few_are_left():
    members = EVERYBODY.leave(NAMES[1], "spot")
    for sampling in ("fair", "utility"):
        job = _job(4, sampling=sampling)
        assert NAMES[1] not in _draw(job, 1, members=members)
        assert len(_draw(_job(5, sampling=sampling), 1, members=members)) == 5


def _own(function: Any, **keys: Any) -> tuple[SiteId, ...]:
    job = _job(2, sampling="mine:choose", **keys)
    known = {NAMES[2]: SiteHistory(3, 2, 5, loss=0.5, predictions=4, seconds=2.0)}
    return cohorts_of(job, lambda _: function)(_state(7, known), 1e9)


def test_users_function_sees_what_is_known_of_each_site():
    seen: list[Any] = []

    def choose(candidates: Sequence[Candidate], **about: Any) -> list[str]:
        seen.append((candidates, about))
        return ["d", "c"]

    assert _own(choose) == ("c", "d")
    ((candidates, about),) = seen
    assert [one.name for one in candidates] == [*NAMES]
    assert candidates[0].region == "r-c"
    assert candidates[2].history.loss == 0.5
    assert candidates[0].history == NEVER_ASKED
    assert (about["size"], about["round_index"], about["now"]) == (2, 7, 1e9)


@pytest.mark.parametrize("chosen", [["c", "c"], ["c", "x"], ["c"], ["c", "a", "e"]])
def test_users_choice_is_checked(chosen: list[str]):
    with pytest.raises(JobError, match=r"chose .* sites") as caught:
        _own(lambda *_args, **_about: chosen)
    assert caught.value.key == "schedule.sampling"


def test_users_error_is_the_cause():
    def choose(*_args: Any, **_about: Any) -> list[str]:
        return [str(math.sqrt(-1))]

    with pytest.raises(UserCodeError, match="mine:choose failed") as caught:
        _own(choose)
    assert isinstance(caught.value.__cause__, ValueError)
