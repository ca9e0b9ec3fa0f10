"""Jobs for sites of different speed, in virtual time and in threads."""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy
from support.killed_runs import kill_at
from support.small_jobs import small_job
from support.without_report import simulate

from federation.errors import JobError
from federation.event_log import read_events
from federation.events import (
    CostPredicted,
    DataDistributed,
    Event,
    ModelEvaluated,
    RoundFinished,
    RunFinished,
    SiteAnswered,
    SiteFailed,
)
from federation.job.spec import JobSpec
from federation.messages import FailureKind
from monitoring.terminal.outcome import quality
from monitoring.terminal.progress import PlainProgress
from monitoring.views.run_fold import fold
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file

pytestmark = pytest.mark.slow

SITES = [f"site-{i}" for i in range(4)]
RATES = dict(zip(SITES, (25.0, 100.0, 100.0, 50.0), strict=True))
CAPACITY = {"schedule": {"allocation": "capacity"}}
BUFFERED = {"schedule": {"mode": "buffered", "buffer_size": 2}}


def job_of(*tables: dict[str, Any]) -> JobSpec:
    return small_job(**tables_of(*tables))


def tables_of(*tables: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "rounds": 12,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4, "classes": 3},
        },
        "training": {"local_steps": 3, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "simulation": {
            "machines": [
                {"site": site, "examples_per_second": rate}
                for site, rate in RATES.items()
            ]
        },
    }
    base["data"] = {"source": "support.small_jobs:blobs"}
    for each in tables:
        base = toy.merged(base, each)
    if "local_epochs" in base["training"]:
        del base["training"]["local_steps"]
    return {"num_sites": len(SITES), **base}


def told(job: JobSpec, **how: Any) -> list[Event]:
    events: list[Event] = []
    simulate(job, listeners=[events.append], **{"engine": "virtual", **how})
    return events


def of(kind: type[Any], events: Sequence[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_twice_as_many_models_take_half_the_time_of_rounds_that_wait():
    waits = told(job_of())
    goes_on = told(job_of({"rounds": 24}, BUFFERED))
    assert len(of(SiteAnswered, waits)) == len(of(SiteAnswered, goes_on)) == 48
    (slow,), (fast,) = of(RunFinished, waits), of(RunFinished, goes_on)
    assert fast.seconds < 0.5 * slow.seconds
    counts = Counter(event.site for event in of(SiteAnswered, goes_on))
    assert counts["site-1"] > 2 * counts["site-0"] > 0


@pytest.mark.parametrize("engine", ["virtual", "inproc"])
def test_the_first_of_two_replicas_counts_and_the_other_is_withdrawn(engine: str):
    pair = {"schedule": {"replicas": [["site-0", "site-1"]]}}
    out = {"simulation": {"faults": [{"site": "site-1", "kind": "crash"}]}}
    out["simulation"]["faults"][0]["rounds"] = [2]
    events = told(job_of(pair, out), engine=engine)
    (data,) = of(DataDistributed, events)
    held = {share.site: share for share in data.shares}
    assert replace(held["site-1"], site="site-0") == held["site-0"]
    each = sum(one.train_examples for site, one in held.items() if site != "site-0")
    rounds = of(RoundFinished, events)
    assert {(e.status, len(e.asked), len(e.answered)) for e in rounds} == {
        ("completed", 4, 3)
    }
    for index in range(1, 13):
        answers = [a for a in of(SiteAnswered, events) if a.round_index == index]
        assert sum(answer.num_examples for answer in answers) == each, index
    assert "site-0" in rounds[1].answered
    view, stream = fold(events), io.StringIO()
    assert not any(row.num_unheard for row in view.rounds)
    assert "all sites" in dict(quality(view))["loss"]
    show = PlainProgress(stream)
    for event in events:
        show(event)
    assert " 3/4 sites (all data) " in stream.getvalue()
    assert "of 4" not in stream.getvalue()
    *_, final = of(ModelEvaluated, events)
    assert final.pooled.count == sum(
        one.held_out_examples for site, one in held.items() if site != "site-0"
    )
    assert {e.kind for e in of(SiteFailed, events)} <= {
        *(FailureKind.SURPLUS, FailureKind.CRASHED, FailureKind.BUSY)
    }
    if engine == "virtual":
        (alone,) = of(RunFinished, told(job_of()))
        (whole,) = of(RunFinished, events)
        assert whole.seconds < 0.7 * alone.seconds
        said = " ".join(fold(events).participation.words())
        assert "12 tasks were not needed" in said


EPOCHS = {
    "rounds": 8,
    "model": {"options": {"inputs": 64, "classes": 10}},
    "data": {"source": "clients.data:digits"},
    "training": {"local_epochs": 1, "batch_size": 32},
    "evaluation": {"every": 0},
}
MOVES = toy.merged(EPOCHS, {"data": {"placement": "dynamic"}})


def test_data_moves_to_fast_sites_and_each_record_is_at_one():
    stays, moves = told(job_of(EPOCHS)), told(job_of(MOVES))
    (before,), (after,) = of(RunFinished, stays), of(RunFinished, moves)
    assert after.seconds < 0.5 * before.seconds
    (held,) = of(DataDistributed, moves)
    total = sum(share.train_examples for share in held.shares)
    for index in range(1, 9):
        has = {
            answer.site: answer.num_examples
            for answer in of(SiteAnswered, moves)
            if answer.round_index == index
        }
        assert sum(has.values()) == total, index
        shares = [has[site] / RATES[site] for site in SITES]
        assert index == 1 or max(shares) < 1.05 * min(shares), index
    seen = [event for event in told(job_of(MOVES)) if isinstance(event, SiteAnswered)]
    assert seen == of(SiteAnswered, moves)


def test_data_moves_away_from_a_site_that_is_late():
    late = {"site": "site-1", "kind": "hang", "seconds": 20.0, "rounds": [3]}
    wait = {"schedule": {"minimum_sites": 3, "grace": 0.5}}
    events = told(job_of(MOVES, wait, {"simulation": {"faults": [late]}}))
    has = {
        (answer.round_index, answer.site): answer.num_examples
        for answer in of(SiteAnswered, events)
    }
    assert (3, "site-1") not in has
    later = [has[index, "site-1"] for index in range(4, 9) if (index, "site-1") in has]
    assert min(later) < has[2, "site-1"]


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ({"data": {"partition": {"kind": "dirichlet"}}}, r"partition\.kind.*iid"),
        ({"sites": [{"name": "a", "data": {"source": "a:b"}}]}, "never leave"),
    ],
)
def test_data_that_belongs_to_a_site_does_not_move(tables: dict[str, Any], match: str):
    with pytest.raises(JobError, match=match):
        job_of(MOVES, tables, {"simulation": {"machines": []}})


def test_data_moves_only_where_time_is_measured():
    with pytest.raises(JobError, match="virtual time") as caught:
        simulate(job_of(MOVES))
    assert caught.value.key == "data.placement"


def test_buffer_of_all_sites_is_a_round():
    """Each update counts as in a round of all sites, whatever the buffer's size."""
    alike = {
        "simulation": {
            "machines": [{"site": site, "examples_per_second": 50.0} for site in SITES]
        }
    }
    whole = {"schedule": {"mode": "buffered", "buffer_size": len(SITES)}}
    rounds, buffers = (
        simulate(job_of(alike, *more), engine="virtual").weights
        for more in ((), (whole,))
    )
    for name, values in rounds.items():
        np.testing.assert_array_equal(values, buffers[name])


def test_buffer_of_one_takes_its_part_of_the_step():
    """The first model of four sites that are alike goes a quarter of the way."""
    one_step = {"rounds": 1, "training": {"local_steps": 1}}
    small = {"schedule": {"mode": "buffered", "buffer_size": 1}}
    norms = [
        of(RoundFinished, told(job_of(one_step, *more)))[0].update_norm
        for more in ((), (small,))
    ]
    assert 0 < norms[1] < 0.5 * norms[0]


def test_two_runs_have_the_same_events():
    job = job_of(BUFFERED)
    one, other = (
        [event for event in told(job) if isinstance(event, SiteAnswered)]
        for _ in range(2)
    )
    assert one == other


def test_staleness_is_told_and_lowers_the_weight():
    answers = of(SiteAnswered, told(job_of({"rounds": 24}, BUFFERED)))
    whole = {a.site: a.weight for a in answers if not a.staleness}
    stale = [a for a in answers if a.staleness]
    assert {a.site for a in stale} >= {"site-0"}
    for answer in stale:
        expected = whole.get(answer.site)
        if expected is not None:
            assert answer.weight == pytest.approx(
                expected / (1 + answer.staleness) ** 0.5
            )


def test_only_sites_that_have_the_newest_model_say_how_good_it_is():
    events = told(job_of({"rounds": 24}, BUFFERED))
    for index, event in enumerate(events):
        if isinstance(event, RoundFinished):
            fresh = {
                one.site
                for one in of(SiteAnswered, events)
                if one.round_index == event.round_index and not one.staleness
            }
            said = [e for e in events[index - 1 : index] if type(e) is ModelEvaluated]
            assert {site for e in said for site in e.sites} == (
                fresh if said else set()
            )
            assert bool(said) == bool(fresh)


def test_site_that_is_frozen_for_a_minute_costs_the_others_nothing():
    frozen = {"site": "site-3", "kind": "hang", "seconds": 60.0, "rounds": [1]}
    events = told(
        job_of({"rounds": 24}, BUFFERED, {"simulation": {"faults": [frozen]}})
    )
    (end,) = of(RunFinished, events)
    (whole,) = of(RunFinished, told(job_of({"rounds": 24}, BUFFERED)))
    # The other three have 9 of 11 parts of the speed.
    assert end.seconds < 1.3 * whole.seconds + 60
    last = max(one.at for one in of(SiteAnswered, events))
    assert last < 1.3 * whole.seconds
    assert {e.kind for e in of(SiteFailed, events)} == {"surplus"}


def test_stopped_run_counts_no_update_twice(tmp_path: Path):
    job, rounds = job_of(BUFFERED), 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    folder = tmp_path / "run"
    first = told_by(job, folder, count, stop=lambda: rounds >= 5)
    second = told_by(job, folder, count, resume=True)
    answers = of(SiteAnswered, [*first, *second])
    assert len(answers) == 24
    began = [(a.site, a.round_index - a.staleness) for a in answers]
    assert len(set(began)) == len(began)
    assert [e.round_index for e in of(RoundFinished, [*first, *second])] == [
        *range(1, 13)
    ]


@pytest.mark.parametrize(
    ("moment", "saved"),
    [(("SiteAnswered", 5), 4), (("RoundFinished", 5), 4), (("CheckpointSaved", 5), 5)],
)
def test_run_killed_in_a_buffer_loses_no_counted_update_and_counts_none_twice(
    moment: tuple[str, int], saved: int, tmp_path: Path
):
    """It goes on as one that was stopped after its last checkpoint, bit for bit."""
    killed, stopped, rounds = tmp_path / "killed", tmp_path / "stopped", 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    kill_at(tables_of(BUFFERED), killed, *moment, engine="virtual")
    told_by(job_of(BUFFERED), stopped, count, stop=lambda: rounds >= saved)
    for folder in (killed, stopped):
        told_by(job_of(BUFFERED), folder, count, resume=True)
    assert (killed / "model.safetensors").read_bytes() == (
        stopped / "model.safetensors"
    ).read_bytes()
    view = fold(read_events(killed / "events.jsonl"))
    assert len(view.rounds) == view.rounds_completed == 12
    assert sum(view.participation.counts.values()) == 24
    # Those of a buffer that was not saved are trained again.
    answers = of(SiteAnswered, read_events(killed / "events.jsonl"))
    in_models = answers[: 2 * saved] + answers[-2 * (12 - saved) :]
    began = [(a.site, a.round_index - a.staleness) for a in in_models]
    assert len(set(began)) == len(began) == 24


def told_by(
    job: JobSpec, folder: Path, count: Any, *, stop: Any = None, resume: bool = False
) -> list[Event]:
    events: list[Event] = []
    simulate(
        job,
        engine="virtual",
        folder=folder,
        resume=resume,
        listeners=[events.append, count],
        **({} if stop is None else {"stop_requested": stop}),
    )
    return events


def test_threads_of_one_process_can_do_it_too():
    events = told(job_of(BUFFERED), engine="inproc")
    assert of(RunFinished, events)[0].status == "completed"
    assert len(of(SiteAnswered, events)) == 24


@pytest.mark.parametrize(
    "quorum",
    [
        {"schedule": {"minimum_sites": 3}},
        {
            "privacy": {"secure_aggregation": {"enabled": True, "threshold": 3}},
            "aggregation": {"weights": "uniform"},
        },
    ],
    ids=["in the clear", "in secret"],
)
def test_round_waits_for_a_late_site_only_as_long_as_the_grace(quorum: dict[str, Any]):
    hang = {"site": "site-3", "kind": "hang", "seconds": 300.0, "rounds": [3]}
    faults = {"rounds": 4, "simulation": {"faults": [hang]}}
    graceful = {"schedule": {"grace": 0.5}}
    waits, goes_on = (told(job_of(quorum, faults, *more)) for more in ((), (graceful,)))
    seconds = {
        round_.round_index: round_.seconds for round_ in of(RoundFinished, goes_on)
    }
    assert {e.status for e in of(RoundFinished, goes_on)} == {"completed"}
    assert seconds[3] == pytest.approx(seconds[2] + 1.0, rel=0.1)  # The least grace.
    assert max(e.seconds for e in of(RoundFinished, waits)) > 299
    late = [e for e in of(SiteFailed, goes_on) if e.round_index == 3]
    assert [(e.site, e.kind) for e in late] == [("site-3", "deadline")]


def regular(*tables: dict[str, Any], quorum: int = 2) -> JobSpec:
    """Sites that need 9.6, 9.6, 4.8 and 2.4 s for a round, as in 1:1:2:4."""
    rates = dict(zip(SITES, (20.0, 20.0, 40.0, 80.0), strict=True))
    base: dict[str, Any] = {
        "rounds": 30,
        "evaluation": {"every": 0},
        "training": {"local_steps": 24},
        "schedule": {"minimum_sites": quorum, "grace": "learnt"},
        "simulation": {
            "machines": [
                {"site": site, "examples_per_second": rate}
                for site, rate in rates.items()
            ]
        },
    }
    return job_of(base, *tables)


def times_of(events: Sequence[Event]) -> list[float]:
    return [round(event.seconds, 1) for event in of(RoundFinished, events)]


def rounds_of(site: str, events: Sequence[Event]) -> list[int]:
    return [e.round_index for e in of(SiteAnswered, events) if e.site == site]


def test_learnt_deadlines_leave_no_site_out_that_is_slow_in_every_round():
    part = told(regular({"schedule": {"grace": 0.25}}))
    assert {len(rounds_of(site, part)) for site in SITES[:2]} == {0}
    learnt = told(regular())
    assert {len(rounds_of(site, learnt)) for site in SITES} == {30}
    assert set(times_of(learnt)) == {9.6}


STALLS = {"kind": "hang", "seconds": 60.0, "every": 15}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"privacy": {"secure_aggregation": {"enabled": True, "threshold": 3}}},
        {
            "privacy": {
                "differential_privacy": {"unit": "record", "target_epsilon": 50.0}
            },
            "simulation": {"vouch_for_sources": True},
        },
    ],
    ids=["in the clear", "in secret", "private"],
)
@pytest.mark.parametrize("site", ["site-0", "site-3"])
def test_stall_of_a_site_costs_others_half_of_its_usual_time(
    site: str, tables: dict[str, Any]
):
    stall = {"simulation": {"faults": [{"site": site, **STALLS}]}}
    quorum = {"aggregation": {"weights": "uniform"}}
    events = told(regular(stall, tables, quorum, quorum=3))
    most = 9.6 * 1.5 if site == "site-0" else 9.6 + 1.0
    assert max(times_of(events)) == pytest.approx(most, rel=0.02)
    for other in set(SITES) - {site}:
        assert len(rounds_of(other, events)) == 30
    found = rounds_of(site, events)
    first = next(index for index in found if index > 15)
    assert found == [*range(1, 15), *range(first, 30)], "it counts again for good"
    assert first <= 23
    late = [e for e in of(SiteFailed, events) if e.kind == "deadline"]
    assert {e.site for e in late} == {site}
    assert max(fold(events).participation.waited, key=lambda s: s == site) == site
    again = told(regular(stall, tables, quorum, quorum=3))
    assert times_of(again) == times_of(events)


def test_resumed_run_has_not_forgotten_its_deadlines(tmp_path: Path):
    stall = {"site": "site-0", "kind": "hang", "seconds": 60.0, "rounds": [6]}
    job = regular({"rounds": 8, "simulation": {"faults": [stall]}})
    done = 0

    def count(event: Event) -> None:
        nonlocal done
        done += isinstance(event, RoundFinished)

    told_by(job, tmp_path / "run", count, stop=lambda: done >= 5)
    events = told_by(job, tmp_path / "run", count, resume=True)
    assert times_of(events)[0] == pytest.approx(14.4)


@pytest.mark.parametrize("more", [{}, CAPACITY], ids=["static", "capacity"])
def test_site_that_stays_slower_counts_again_after_two_late_answers(
    more: dict[str, Any],
):
    slow = {"site": "site-0", "kind": "hang", "seconds": 28.8}
    slow["rounds"] = [*range(10, 31)]
    events = told(regular({"simulation": {"faults": [slow]}}, more, quorum=3))
    found = rounds_of("site-0", events)
    first = next(index for index in found if index >= 10)
    assert first <= 22
    assert found == [*range(1, 10), *range(first, 31)]


@pytest.mark.parametrize(
    "schedule",
    [
        {"sites_per_round": 3, "minimum_sites": 2},
        {"sites_per_round": 2, "over_selection": 1.5, "minimum_sites": 1},
        {"sites_per_round": 3, "sampling": "fair", "minimum_sites": 2},
        {"replicas": [["site-0", "site-1"]]},
    ],
)
def test_learnt_deadlines_go_with_what_a_grace_goes_with(schedule: dict[str, Any]):
    job = regular({"schedule": schedule})
    events = told(job)
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    assert not [e for e in of(SiteFailed, events) if e.kind == "deadline"]
    assert times_of(told(job)) == times_of(events)


def test_deadlines_are_learnt_only_where_time_is_measured():
    with pytest.raises(JobError, match="virtual time") as caught:
        simulate(regular())
    assert caught.value.key == "schedule.grace"


def test_bytes_of_a_task_that_was_given_up_count_whether_or_not_it_is_answered():
    tables = {
        "rounds": 12,
        "evaluation": {"every": 0},
        "schedule": {"minimum_sites": 3, "grace": 0.5},
        "simulation": {
            "faults": [{"site": "site-3", "kind": "hang", "seconds": 4, "rounds": [3]}]
        },
    }
    events = told(job_of(tables))
    assert {e.kind for e in of(SiteFailed, events)} == {"deadline", "late"}
    sizes = {e.bytes_down for e in of(SiteAnswered, events)}
    assert len(sizes) == 1
    down = sum(e.bytes_down for e in of(RoundFinished, events))
    assert down == 12 * len(SITES) * sizes.pop()


EIGHT = {"training": {"local_steps": 8}, "evaluation": {"every": 0}}


def test_faster_sites_take_more_steps_and_all_end_together():
    waits = told(job_of(EIGHT))
    events = told(job_of(EIGHT, CAPACITY))
    later = [a for a in of(SiteAnswered, events) if a.round_index > 4]
    # 32 steps a round at speeds 1, 4, 4 and 2; the first takes 8, the next three 40.
    counts = [a.num_steps for a in of(SiteAnswered, events) if a.round_index < 5]
    assert (counts[:4], sum(counts)) == ([2] * 4, 4 * 32)
    assert {a.site: a.num_steps for a in later} == {
        "site-0": 3,
        "site-1": 12,
        "site-2": 11,
        "site-3": 6,
    }
    rounds = [e.seconds for e in of(RoundFinished, events)][4:]
    static = [e.seconds for e in of(RoundFinished, waits)][1:]
    fastest = 32 * 8 / sum(RATES.values())
    assert max(rounds) < 1.15 * fastest < 0.5 * min(static)


def test_no_round_but_the_first_waits_for_evaluation():
    """It evaluates the first model; the later ones share out their work without."""
    more = {
        "evaluation": {"every": 100},
        "training": {"local_steps": 40},
        "data": {"source": "clients.data:digits"},  # 90 held out at each of four sites.
        "model": {"options": {"inputs": 64, "classes": 10}},
    }
    rounds = of(RoundFinished, told(job_of(CAPACITY, more)))
    later = [e.seconds for e in rounds][1:]
    # 160 steps of 8 records a round; a fourth more in the first three of these.
    usual = 160 * 8 / sum(RATES.values())
    assert max(later[3:]) < 1.05 * usual
    assert max(later[:3]) < 1.05 * 1.25 * usual


def test_resumed_run_gives_the_same_steps(tmp_path: Path):
    job, rounds = job_of(EIGHT, CAPACITY), 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    whole = told(job)
    first = told_by(job, tmp_path / "run", count, stop=lambda: rounds >= 5)
    second = told_by(job, tmp_path / "run", count, resume=True)

    def steps(events: Sequence[Event]) -> list[tuple[int, str, int]]:
        return [(a.round_index, a.site, a.num_steps) for a in of(SiteAnswered, events)]

    assert steps([*first, *second]) == steps(whole)
    losses = [
        [e.training.loss_sum for e in of(RoundFinished, events)]
        for events in (whole, [*first, *second])
    ]
    assert losses[0] == losses[1]


def test_fast_site_does_not_pull_the_model_to_itself():
    """With equal data it ends where equal work ends."""
    at_the_end = {"rounds": 30, "training": {"local_steps": 8}}
    ends = [told(job_of(at_the_end, *more)) for more in ((), (CAPACITY,))]
    static, capacity = (
        [e.pooled.loss_sum for e in of(ModelEvaluated, events)] for events in ends
    )
    assert capacity[-1] == pytest.approx(static[-1], rel=0.02)


FOUR_TIMES = {
    "simulation": {
        "machines": [
            {"site": site, "examples_per_second": rate}
            for site, rate in zip(SITES, (25.0, 25.0, 50.0, 100.0), strict=True)
        ]
    }
}


def in_secret(threshold: int = 4, **more: Any) -> dict[str, Any]:
    secure = {"enabled": True, "threshold": threshold, **more}
    return {
        "privacy": {"secure_aggregation": secure},
        "aggregation": {"weights": "uniform"},
    }


@pytest.mark.parametrize("threshold", [4, 3])
@pytest.mark.long
def test_sums_of_unequal_sites_take_less_time_for_the_same_loss(threshold: int):
    at_the_end = {"rounds": 30, "training": {"local_steps": 16}}
    tables = (at_the_end, FOUR_TIMES, in_secret(threshold))
    waits, events = (told(job_of(*tables, *more)) for more in ((), (CAPACITY,)))
    static, found = (
        [e.seconds for e in of(RoundFinished, each)][4:] for each in (waits, events)
    )
    assert max(found) < 0.6 * min(static)
    assert max(found) < 1.15 * min(found)  # It does not swing.
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    losses = [of(ModelEvaluated, each)[-1].pooled.loss_sum for each in (waits, events)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_sums_tell_no_more_of_a_site_than_when_it_answers():
    events = told(job_of(EIGHT, FOUR_TIMES, in_secret(), CAPACITY))
    answers = of(SiteAnswered, events)
    assert len(answers) == 48
    (predicted,) = of(CostPredicted, events)
    found = sum(e.bytes_down for e in of(RoundFinished, events))
    assert predicted.bytes_down == (found, found), "steps of all sites travel too"
    assert all(
        each is None or each == ()
        for a in answers
        for each in (a.num_steps, a.num_examples, a.weight, a.training, a.phases)
    )


def test_clip_norm_is_that_of_the_scaled_update():
    """A site of one step is scaled to eight: clipped before, it would exceed it."""
    small = in_secret(clip_norm=1e-3)
    events = told(job_of(EIGHT, FOUR_TIMES, small, CAPACITY))
    rounds = of(RoundFinished, events)
    assert {e.status for e in rounds} == {"completed"}
    assert 0.75e-3 < max(e.update_norm for e in rounds) <= 1.001e-3


PRIVATE: dict[str, Any] = {
    "simulation": {"vouch_for_sources": True},
    "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 50.0}},
    "aggregation": {"weights": "uniform"},
}


@pytest.mark.parametrize("tables", [(), (in_secret(threshold=3),)], ids=str)
def test_private_sites_are_charged_for_the_steps_that_they_take(
    tables: tuple[dict[str, Any], ...], tmp_path: Path
):
    """Noise is planned for the most steps, so that no site reaches its target."""
    most = {"schedule": {"max_local_steps": 12}}
    job = job_of(EIGHT, FOUR_TIMES, PRIVATE, CAPACITY, most, *tables)
    events = told(job, folder=tmp_path / "run", report=False)
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    taken = {}
    for site in SITES:
        contents = read_file(tmp_path / "run" / "sites" / site / LEDGER_NAME)
        assert [c.round_index for c in contents.charges] == [*range(1, 13)]
        taken[site] = [c.event.steps for c in contents.charges]
        assert contents.charges[-1].epsilon_after <= 50.0
    assert taken["site-3"][-1] == 12 > taken["site-0"][-1]
    if not tables:
        for answer in of(SiteAnswered, events):
            assert answer.num_steps == taken[answer.site][answer.round_index - 1]


@pytest.mark.parametrize(
    ("secret", "moment"),
    [
        (False, ("SiteAnswered", 5)),
        (True, ("CheckpointSaved", 5)),
        pytest.param(False, ("CheckpointSaved", 5), marks=pytest.mark.long),
        pytest.param(True, ("SiteAnswered", 5), marks=pytest.mark.long),
    ],
)
def test_killed_private_run_pays_for_one_more_round_at_most(
    secret: bool,  # noqa: FBT001
    moment: tuple[str, int],
    tmp_path: Path,
):
    """Each round that is charged has the steps that were chosen for it."""
    most = {"schedule": {"max_local_steps": 12}}
    more = (in_secret(threshold=3),) if secret else ()
    tables = tables_of(EIGHT, FOUR_TIMES, PRIVATE, CAPACITY, most, *more)
    kill_at(tables, tmp_path / "run", *moment, engine="virtual")
    events = told(small_job(**tables), folder=tmp_path / "run", resume=True)
    assert of(RunFinished, events)[0].status == "completed"
    for site in SITES:
        charges = read_file(tmp_path / "run" / "sites" / site / LEDGER_NAME).charges
        times = Counter(charge.round_index for charge in charges)
        assert {*times} == {*range(1, 13)}
        assert sum(times.values()) <= 13
        assert charges[-1].epsilon_after <= 50.0
        for answer in of(SiteAnswered, events) if not secret else ():
            if answer.site == site:
                (*_, charge) = (
                    c for c in charges if c.round_index == answer.round_index
                )
                assert charge.event.steps == answer.num_steps


ONE_FAST = {
    "schedule": {"mode": "buffered", "buffer_size": 1},
    "privacy": {"differential_privacy": {"reserve_rounds": 0}},
    "simulation": {
        "machines": [
            {"site": site, "examples_per_second": 1000.0 if site == "site-1" else 20.0}
            for site in SITES
        ]
    },
}


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize("more", [BUFFERED, ONE_FAST], ids=["two", "one"])
def test_each_task_of_a_buffer_is_charged_once_and_the_target_holds(
    more: dict[str, Any], kills: int, tmp_path: Path
):
    """A kill costs a site the task that it had open; without one, all have room."""
    run = tmp_path / "run"
    if kills:
        kill_at(tables_of(PRIVATE, more), run, "SiteAnswered", 5, engine="virtual")
    told(job_of(PRIVATE, more), folder=run, resume=bool(kills))
    events = list(read_events(run / "events.jsonl"))
    assert of(RunFinished, events)[-1].status == "completed"
    most = 0
    for site in SITES:
        (*charges,) = (
            charge
            for charge in read_file(run / "sites" / site / LEDGER_NAME).charges
            if charge.purpose == "train"
        )
        answers = [a for a in of(SiteAnswered, events) if a.site == site]
        begun = {a.round_index - a.staleness for a in answers}
        # A last task is withdrawn, and the evaluation after it, as one that is open.
        begun_last = any(
            f.site == site and f.round_index == 12 and f.kind == FailureKind.SURPLUS
            for f in of(SiteFailed, events)
        )
        times = Counter(charge.round_index for charge in charges)
        assert begun <= {*times} <= {*range(1, 13)}
        assert 0 <= len(charges) - len(begun) - begun_last <= kills
        assert charges[-1].epsilon_after <= 50.0
        most = max(most, len(charges))
    assert most <= 12
    if more is ONE_FAST:
        refused = [e for e in of(SiteFailed, events) if e.site == "site-1"]
        assert (most, len(refused) > 0) == (12, bool(kills))


def test_resumed_run_of_sums_goes_on_as_fast(tmp_path: Path):
    job, rounds = job_of(EIGHT, FOUR_TIMES, in_secret(), CAPACITY), 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    whole = [e.seconds for e in of(RoundFinished, told(job))]
    first = told_by(job, tmp_path / "run", count, stop=lambda: rounds >= 5)
    second = told_by(job, tmp_path / "run", count, resume=True)
    found = of(RoundFinished, [*first, *second])
    assert [e.round_index for e in found] == [*range(1, 13)]
    assert [e.seconds for e in found] == pytest.approx(whole, rel=0.05)
    assert len(of(SiteAnswered, [*first, *second])) == 48


@pytest.mark.parametrize(
    "kind", ["crash", pytest.param("silent", marks=pytest.mark.long)]
)
def test_most_of_the_possible_steps_count_although_a_site_fails(kind: str):
    """One of four sites of 1:1:2:4 in a fifth of its rounds; goodput of 88 %."""
    rates = dict(zip(SITES, (20.0, 20.0, 40.0, 80.0), strict=True))
    tables = {
        "rounds": 40,
        "evaluation": {"every": 0},
        "training": {"local_steps": 24},
        "schedule": {"allocation": "capacity", "minimum_sites": 3, "grace": 0.25},
        "simulation": {
            "machines": [
                {"site": site, "examples_per_second": rate}
                for site, rate in rates.items()
            ],
            "faults": [{"site": "site-2", "kind": kind, "probability": 0.2}],
        },
    }
    events = told(job_of(tables))
    assert 4 <= len(of(SiteFailed, events)) <= 14
    counted = sum(event.num_steps for event in of(SiteAnswered, events))
    (end,) = of(RunFinished, events)
    possible = end.seconds * sum(rates.values()) / 8  # Records of a step.
    assert counted >= 0.88 * possible
