"""Sites that leave a run in its middle, and come back."""

from pathlib import Path
from typing import Any

import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from federation.errors import QuorumNotMet
from federation.events import (
    Event,
    GroupsCompared,
    RoundFinished,
    RoundStarted,
    SiteFailed,
    SitesLeftOut,
    StepTaken,
)
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

STAYS, LEAVES, OTHER = "site-0", "site-1", "site-2"
SITES = (STAYS, LEAVES, OTHER)
WITHOUT = (STAYS, OTHER)
ENGINES = ("inproc", "virtual")


def job_of(*away: int, quorum: int | None = 2, **tables: Any) -> JobSpec:
    """Five rounds; a site leaves in the first of ``away``, and is back after them."""
    faults = [{"site": LEAVES, "kind": "leave", "rounds": list(away)}] if away else []
    sites = tables.pop("sites", SITES)
    machines = [
        {"site": site, "examples_per_second": 100.0, "up_mbit": 1.0} for site in sites
    ]
    base = {
        "rounds": 5,
        "schedule": {"minimum_sites": quorum} if quorum else {},
        "simulation": {"faults": faults, "machines": machines},
    }
    return small_job(num_sites=len(sites), **base | tables)


def run(job: JobSpec, **arguments: Any) -> tuple[RunResult, list[Event]]:
    """Simulate and listen."""
    seen: list[Event] = []
    return simulate(job, listeners=[seen.append], **arguments), seen


def only(seen: list[Event], kind: type[Any]) -> list[Any]:
    """Events of one kind."""
    return [event for event in seen if isinstance(event, kind)]


def asked(seen: list[Event]) -> list[tuple[str, ...]]:
    """Whom each round asked."""
    return [event.asked for event in only(seen, RoundFinished)]


def left_out(seen: list[Event]) -> list[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """What events say of those without whom rounds continue."""
    found = only(seen, SitesLeftOut)
    return [(event.round_index, event.sites, event.standings) for event in found]


@pytest.mark.parametrize("engine", ENGINES)
def test_site_that_leaves_is_asked_again_when_it_is_back(engine: str):
    """Nobody waits for it, and it is asked nothing until then."""
    result, seen = run(job_of(2, 3), engine=engine)
    assert (result.status, result.rounds_completed) == ("completed", 5)
    assert asked(seen) == [SITES, SITES, WITHOUT, SITES, SITES]
    answered = [event.answered for event in only(seen, RoundFinished)]
    assert [*map(set, answered)] == [
        {*SITES},
        {*WITHOUT},
        {*WITHOUT},
        {*SITES},
        {*SITES},
    ]
    failed = [
        (e.round_index, e.site, e.kind, e.message) for e in only(seen, SiteFailed)
    ]
    assert failed == [(2, LEAVES, "leaving", "spot")]
    assert left_out(seen) == [(2, (LEAVES,), ("gone",)), (4, (), ())]
    last = only(seen, SitesLeftOut)[-1]
    assert (last.returned, last.times) == ((LEAVES,), (1,))


@pytest.mark.parametrize("engine", ENGINES)
def test_same_run_twice_has_the_same_model(engine: str):
    """To leave is no matter of time."""
    models = [run(job_of(2, 3), engine=engine)[0].weights for _ in range(2)]
    first, second = ([v.tobytes() for v in model.values()] for model in models)
    assert first == second


def test_site_that_leaves_for_good_is_missing_at_the_end():
    """It evaluates nothing either."""
    result, seen = run(job_of(2, 3, 4, 5, 6))
    assert result.status == "completed"
    assert asked(seen) == [SITES, SITES, WITHOUT, WITHOUT, WITHOUT]
    assert result.view.last_evaluated is not None
    assert set(result.view.last_evaluated.sites) == {*WITHOUT}
    assert result.view.left_out is not None
    assert result.view.left_out.sites == (LEAVES,)


def test_site_that_leaves_is_asked_where_its_answer_is_needed():
    """Rounds without quorum would soon end the run: it is waited for instead."""
    result, seen = run(job_of(2, 3, quorum=None))
    assert result.status == "completed"
    assert asked(seen) == [SITES] * 5
    lost = [e.round_index for e in only(seen, RoundFinished) if e.status == "lost"]
    assert lost == [2, 3]
    assert [e.round_index for e in only(seen, SiteFailed)] == [2, 3]
    # That it is asked in round 3 and leaves again is no news; that it is back is.
    assert left_out(seen) == [(2, (LEAVES,), ("gone",)), (4, (), ())]


def test_quorum_is_no_smaller_for_those_who_leave():
    """A site cannot lower it by its word."""
    with pytest.raises(QuorumNotMet, match="the quorum is 3 of 3 sites"):
        run(job_of(2, 3, 4, quorum=3))


@pytest.mark.parametrize("engine", ENGINES)
def test_under_secure_aggregation_it_is_a_dropout(engine: str):
    """Rounds continue above the threshold; it has keys again with a new setup."""
    everybody, secret = (*SITES, "site-3", "site-4"), {"enabled": True, "threshold": 4}
    job = job_of(
        *(2, 3),
        quorum=None,
        sites=everybody,
        privacy={"secure_aggregation": secret},
    )
    others = {*everybody} - {LEAVES}
    result, seen = run(job, engine=engine)
    assert (result.status, result.rounds_completed) == ("completed", 5)
    cohorts = [{*sites} for sites in asked(seen)]
    assert cohorts == [{*everybody}] * 2 + [others] + [{*everybody}] * 2
    answered = [set(event.answered) for event in only(seen, RoundFinished)]
    assert answered == [{*everybody}] + [others] * 2 + [{*everybody}] * 2
    failed = [(e.round_index, e.site, e.kind) for e in only(seen, SiteFailed)]
    assert failed == [(2, LEAVES, "leaving")]
    setups = [e.round_index for e in only(seen, StepTaken) if e.step == "confirm"]
    assert setups == [1, 4]


def test_where_all_must_answer_only_its_own_round_is_lost():
    """It has keys again before the next."""
    secret = {"enabled": True}
    job = job_of(2, quorum=None, privacy={"secure_aggregation": secret})
    result, seen = run(job)
    assert (result.status, result.rounds_completed) == ("completed", 4)
    lost = [e.round_index for e in only(seen, RoundFinished) if e.status == "lost"]
    assert lost == [2]


MANY = tuple(f"site-{number}" for number in range(15))
MEDIAN = {"combine": "median", "byzantine_sites": 1, "weights": "uniform"}


def of_groups(num_groups: int) -> tuple[RunResult, list[Event]]:
    """A run over sums of groups, which a site leaves and comes back to."""
    secret = {"enabled": True, "groups": num_groups}
    blobs = {"num_train": 300, "num_held_out": 60}
    job = job_of(
        *(2, 3),
        quorum=None,
        sites=MANY,
        aggregation=MEDIAN,
        privacy={"secure_aggregation": secret},
        data={"source": "support.small_jobs:blobs", "options": blobs},
    )
    return run(job)


def test_group_of_a_site_that_has_left_is_not_asked():
    """The others suffice; it gets new keys, and none of the others does."""
    result, seen = of_groups(5)
    assert (result.status, result.rounds_completed) == ("completed", 5)
    (group,) = {
        tuple(group)
        for event in only(seen, GroupsCompared)
        for group in event.groups
        if LEAVES in group
    }
    others = {*MANY} - {*group}
    assert len(group) == 3
    assert [{*sites} for sites in asked(seen)] == [
        {*MANY},
        {*MANY},
        others,
        {*MANY},
        {*MANY},
    ]
    remarks = [
        event.remarks[event.groups.index(group)] for event in only(seen, GroupsCompared)
    ]
    assert remarks[2] == "a site has left"
    assert (remarks[0], *remarks[3:]) == ("", "", "")
    setups = {
        e.round_index: {*e.sites} for e in only(seen, StepTaken) if e.step == "confirm"
    }
    assert setups == {1: {*MANY}, 4: {*group}}


def test_site_that_has_left_is_asked_where_the_rule_needs_its_group():
    """As where its answer is needed for a quorum."""
    result, seen = of_groups(3)
    assert result.status == "completed"
    assert [{*sites} for sites in asked(seen)] == [{*MANY}] * 5
    lost = [e.round_index for e in only(seen, RoundFinished) if e.status == "lost"]
    assert lost == [2, 3]


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("last", [2, 3, 4])
def test_resumed_run_knows_who_has_left(tmp_path: Path, last: int):
    """Bit by bit as if nobody had killed it."""
    whole, _ = run(job_of(2, 3), folder=tmp_path / "whole")

    def kill(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round_index == last:
            raise Killed

    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        simulate(job_of(2, 3), listeners=[kill], folder=folder)
    resumed, seen = run(job_of(2, 3), folder=folder, resume=True)
    rest = [SITES, SITES, WITHOUT, SITES, SITES][last - 1 :]
    assert asked(seen) == rest
    assert (left_out(seen)[0][1:] == ((LEAVES,), ("gone",))) == (last < 5)
    for name, values in whole.weights.items():
        assert values.tobytes() == resumed.weights[name].tobytes()


def test_resumed_secure_run_makes_keys_for_a_site_that_comes_back(tmp_path: Path):
    """The coordinator that it told of its leave is no more; no answer is lost."""
    everybody, secret = (*SITES, "site-3", "site-4"), {"enabled": True, "threshold": 4}
    job = job_of(
        *(2, 3), quorum=None, sites=everybody, privacy={"secure_aggregation": secret}
    )

    def kill(event: Event) -> None:
        if isinstance(event, RoundStarted) and event.round_index == 3:
            raise Killed

    with pytest.raises(Killed):
        simulate(job, listeners=[kill], folder=tmp_path)
    result, seen = run(job, folder=tmp_path, resume=True)
    assert result.status == "completed"
    answered = [set(event.answered) for event in only(seen, RoundFinished)]
    assert answered == [{*everybody} - {LEAVES}, {*everybody}, {*everybody}]
    assert not only(seen, SiteFailed)
