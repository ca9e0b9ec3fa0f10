"""Whole simulations in which sites misbehave."""

import threading
from typing import Any

import pytest
from support.toy import merged
from support.without_report import simulate

from cloud_adapters.local import inproc_grid
from federation.errors import QuorumNotMet
from federation.events import Event, RoundFinished, SiteFailed
from federation.job import job_file
from federation.job.spec import FaultSpec, JobSpec
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

SITES = ("aws", "bad", "gcp")
BAD_ROUND = 2


def digits(*faults: dict[str, Any], **changes: Any) -> JobSpec:
    """Three sites and a linear model of handwritten digits."""
    base = {
        "name": "faulty",
        "rounds": 3,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 64, "classes": 10},
        },
        "data": {"source": "clients.data:digits"},
        "training": {"local_steps": 2, "optimizer": {"lr": 0.1}, "device": "cpu"},
        "schedule": {"minimum_sites": 2, "max_lost_rounds": 2},
        "simulation": {"faults": list(faults)},
        "sites": [{"name": site} for site in SITES],
    }
    return job_file.parse(merged(base, changes))


def bad(kind: str, **fields: Any) -> dict[str, Any]:
    """A fault of the bad site in the bad round."""
    return {"site": "bad", "kind": kind, "rounds": [BAD_ROUND]} | fields


def run(job: JobSpec, **arguments: Any) -> tuple[RunResult, list[Event]]:
    """Simulate and listen."""
    events: list[Event] = []
    return simulate(job, listeners=[events.append], **arguments), events


def told(events: list[Event], kind: type[Any]) -> list[Any]:
    """Events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def weights(result: RunResult) -> bytes:
    """The final model, to compare."""
    return b"".join(array.tobytes() for array in result.weights.values())


# What each fault looks like from the server, and whether its site counts.
REFUSED = {
    "crash": (["crashed"], "rehearsed crash"),
    "silent": (["unreachable"], "never answered"),
    "lost": (["unreachable"], "never answered"),
    "nan": (["not_finite"], "sent NaN or infinite values"),
    "inf": (["not_finite"], "sent NaN or infinite values"),
    "wrong_length": (["invalid"], "sent 649 values; the model has 650"),
    "wrong_round": (["late", "deadline"], "answered round 1 in round 2"),
}
COUNTED = {"duplicate": ["duplicate"], "garbage": [], "restart": []}


def test_every_fault_has_a_test():
    """Whoever adds a kind says what becomes of it."""
    kinds = FaultSpec.__dataclass_fields__["kind"].metadata["choices"]
    assert {*REFUSED, *COUNTED, "hang", "leave"} == set(kinds)


@pytest.mark.parametrize("kind", REFUSED)
def test_run_goes_on_without_the_bad_site(kind: str):
    """Events and result name the site and what was wrong."""
    expected, text = REFUSED[kind]
    result, events = run(digits(bad(kind)))
    assert (result.status, result.rounds_completed) == ("completed", 3)
    failed = told(events, SiteFailed)
    assert [(f.round_index, f.site, f.kind) for f in failed] == [
        (BAD_ROUND, "bad", kind) for kind in expected
    ]
    assert text in failed[0].message
    rounds = [r.answered for r in told(events, RoundFinished)]
    assert rounds == [SITES, ("aws", "gcp"), SITES]
    summary = result.summary()
    assert summary["rounds"][BAD_ROUND - 1]["failed"] == dict.fromkeys(expected, 1)
    failures = {row["site"]: row["failures"] for row in summary["sites"]}
    # A late answer is listed beside its missed deadline, and no second failure.
    assert failures == {"aws": 0, "bad": 1, "gcp": 0}


@pytest.mark.parametrize("kind", COUNTED)
def test_site_that_answers_all_the_same_counts(kind: str):
    """Its first answer is as good as any."""
    result, events = run(digits(bad(kind)))
    assert result.rounds_completed == 3
    assert [f.kind for f in told(events, SiteFailed)] == COUNTED[kind]
    assert [r.answered for r in told(events, RoundFinished)] == [SITES] * 3


@pytest.mark.parametrize("kind", ["duplicate", "restart"])
def test_nothing_changes(kind: str):
    """Not one bit of the model; a site in the clear is told everything anew."""
    assert weights(run(digits(bad(kind)))[0]) == weights(run(digits())[0])


def test_hanging_site_misses_its_deadline_and_is_busy():
    """Nobody waits for it twice, and it may come back."""
    job = digits(bad("hang", seconds=90.0), schedule={"round_deadline_seconds": 3.0})
    result, events = run(job)
    assert (result.status, result.rounds_completed) == ("completed", 3)
    failed = [(f.round_index, f.site, f.kind) for f in told(events, SiteFailed)]
    busy = [(3, "bad", "busy"), (4, "bad", "busy")]  # 4: the final evaluation
    assert failed == [(BAD_ROUND, "bad", "deadline"), *busy]
    seconds = {r.round_index: r.seconds for r in told(events, RoundFinished)}
    assert 3.0 <= seconds[BAD_ROUND] < 30
    assert seconds[3] < 30


def test_a_busy_site_that_a_round_needs_is_waited_for():
    """Or all rounds that follow would be lost as well, within a second."""
    hang = {"site": "bad", "kind": "hang", "seconds": 4.0, "rounds": [1]}
    needed = {"round_deadline_seconds": 3.0, "minimum_sites": 3}
    result, events = run(digits(hang, schedule=needed))
    assert (result.status, result.rounds_completed) == ("completed", 2)
    rounds = told(events, RoundFinished)
    assert [r.status for r in rounds] == ["lost", "completed", "completed"]
    assert [{*r.answered} for r in rounds[1:]] == [{*SITES}] * 2
    kinds = [f.kind for f in told(events, SiteFailed)]
    assert kinds in (["deadline"], ["deadline", "late"])


def test_groups_do_not_wait_for_a_site_whose_group_is_lost():
    """Others suffice, in each round that follows."""
    names = [f"site-{number}" for number in range(9)]
    hang = {"site": names[0], "kind": "hang", "seconds": 90.0, "rounds": [1]}
    secure = {"enabled": True, "groups": 3, "clip_norm": 10.0}
    job = digits(
        hang,
        sites=[{"name": name} for name in names],
        schedule={"round_deadline_seconds": 6.0, "minimum_sites": 9},
        aggregation={"combine": "median", "weights": "uniform"},
        privacy={"secure_aggregation": secure},
    )
    result, events = run(job)
    assert result.rounds_completed == 3
    seconds = [r.seconds for r in told(events, RoundFinished)]
    assert max(seconds[1:]) < 6.0 <= seconds[0]


def test_sites_take_no_more_steps_when_a_run_is_over(monkeypatch: pytest.MonkeyPatch):
    """A process that ends while a thread is inside torch may be aborted by it."""
    monkeypatch.setattr(inproc_grid, "CLOSING_SECONDS", 90.0)
    schedule = {"round_deadline_seconds": 0.5, "minimum_sites": 3, "max_lost_rounds": 1}
    job = digits(schedule=schedule, training={"local_steps": 500_000})
    before = set(threading.enumerate())
    with pytest.raises(QuorumNotMet, match=r"raise schedule.round_deadline_seconds"):
        run(job)
    left = set(threading.enumerate()) - before
    still = [thread.name for thread in left]
    for thread in left:
        thread.join()
    assert not still


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "multi_krum"])
def test_robust_rule_withstands_garbage(rule: str):
    """The model is as good as without the bad site; with a mean it is not."""
    sites = [{"name": name} for name in (*SITES, "x", "y")]
    garbage = bad("garbage", rounds=[], scale=1000.0)
    byzantine = 0 if rule == "median" else 1
    robust = {"combine": rule, "weights": "uniform", "byzantine_sites": byzantine}
    schedule = {"minimum_sites": 5}
    job = digits(garbage, sites=sites, schedule=schedule, aggregation=robust)
    sound, spoilt = (
        run(digits(*faults, sites=sites, schedule=schedule))[0]
        for faults in ((), (garbage,))
    )
    result, _ = run(job)
    assert result.loss is not None
    assert sound.loss is not None
    assert spoilt.loss is not None
    assert result.loss < 1.2 * sound.loss < spoilt.loss
