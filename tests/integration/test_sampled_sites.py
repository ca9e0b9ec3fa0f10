"""Which sites take part in rounds, in virtual time: samples and over-selection."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy
from support.small_jobs import small_job
from support.without_report import simulate

from federation.errors import JobError, UserCodeError
from federation.events import (
    Event,
    RoundFinished,
    RoundStarted,
    RunFinished,
    SiteAnswered,
    SiteFailed,
)
from federation.job.spec import JobSpec
from federation.messages import FailureKind
from monitoring.views.run_fold import fold

pytestmark = pytest.mark.slow

SITES = [f"site-{i}" for i in range(6)]
# The last one is ten times slower than the others.
RATES = dict(zip(SITES, (100.0, 90.0, 80.0, 70.0, 60.0, 6.0), strict=True))


def job_of(*tables: dict[str, Any]) -> JobSpec:
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
    for each in tables:
        base = toy.merged(base, each)
    return small_job(num_sites=len(SITES), **base)


def sampled(sampling: str = "uniform", size: int = 2, **keys: Any) -> dict[str, Any]:
    return {"schedule": {"sites_per_round": size, "sampling": sampling, **keys}}


def told(job: JobSpec, **how: Any) -> list[Event]:
    events: list[Event] = []
    simulate(job, listeners=[events.append], **{"engine": "virtual", **how})
    return events


def of(kind: type[Any], events: Sequence[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def counts(events: Sequence[Event]) -> Counter[str]:
    return Counter(event.site for event in of(SiteAnswered, events))


@pytest.mark.parametrize("engine", ["virtual", "inproc"])
def test_fair_samples_count_every_site_as_often(engine: str):
    events = told(job_of(sampled("fair")), engine=engine)
    assert set(counts(events).values()) == {4}


def test_fair_samples_make_up_for_missed_rounds():
    """A site that was out for four rounds has as many as the others in the end."""
    out = {"site": "site-1", "kind": "crash", "rounds": [1, 2, 3, 4]}
    job = job_of(
        {"rounds": 40, "simulation": {"faults": [out]}},
        sampled("fair", minimum_sites=1),
    )
    found = counts(told(job))
    assert max(found.values()) - min(found.values()) <= 2


def test_utility_takes_less_time_and_forgets_nobody():
    uniform, found = (
        told(job_of({"rounds": 60}, sampled(name))) for name in ("uniform", "utility")
    )
    times = [of(RunFinished, each)[0].seconds for each in (uniform, found)]
    assert times[1] < 0.85 * times[0]
    asked = [e.cohort for e in of(RoundStarted, found)]
    assert any("site-5" in cohort for cohort in asked[-15:])
    assert min(counts(found).values()) >= 3


@pytest.mark.parametrize("sampling", ["fair", "utility"])
def test_resumed_run_asks_the_same_sites(sampling: str, tmp_path: Path):
    job, rounds = job_of(sampled(sampling)), 0

    def count(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundFinished)

    events: list[Event] = []
    whole = simulate(job, engine="virtual")
    for how in ({"stop_requested": lambda: rounds >= 5}, {"resume": True}):
        left = simulate(
            job,
            engine="virtual",
            folder=tmp_path / "run",
            listeners=[events.append, count],
            **how,
        )
    cohorts = [e.cohort for e in of(RoundStarted, events)]
    assert cohorts == [e.cohort for e in of(RoundStarted, told(job))]
    for name, values in whole.weights.items():
        np.testing.assert_array_equal(values, left.weights[name])


@pytest.mark.parametrize("engine", ["virtual", "inproc"])
def test_over_selection_ends_a_round_with_enough_answers(engine: str):
    events = told(job_of(sampled(size=3, over_selection=2.0)), engine=engine)
    rounds = of(RoundFinished, events)
    assert {len(e.asked) for e in rounds} == {6}
    assert {len(e.answered) for e in rounds} == {3}
    assert {e.status for e in rounds} == {"completed"}
    kinds = {e.kind for e in of(SiteFailed, events)}
    assert kinds <= {FailureKind.SURPLUS, FailureKind.BUSY}
    view = fold(events)
    assert {e.kind for e in view.failures} <= {FailureKind.BUSY}


def test_over_selection_waits_for_no_slow_site():
    waits, found = (
        told(job_of(sampled(size=4, **keys))) for keys in ({}, {"over_selection": 1.5})
    )
    seconds = [of(RunFinished, each)[0].seconds for each in (waits, found)]
    assert seconds[1] < 0.4 * seconds[0]
    assert "site-5" not in counts(found)


def test_round_with_too_few_answers_for_its_size_still_has_a_quorum():
    """Then all are waited for, and those that fail have failed."""
    out = [{"site": site, "kind": "crash"} for site in SITES[:3]]
    events = told(
        job_of(
            {"simulation": {"faults": out}},
            sampled(size=4, over_selection=1.5, minimum_sites=3),
        )
    )
    rounds = of(RoundFinished, events)
    assert {(len(e.answered), e.status) for e in rounds} == {(3, "completed")}


# The page's own example, and one with a mistake.
_PAGE = Path(__file__).parents[2] / "docs" / "howto" / "unequal-sites.md"
(EXAMPLE,) = re.findall(
    r"```python\n(PRICES.*?)```", _PAGE.read_text("utf-8"), re.DOTALL
)
BROKEN = """

def broken(candidates, **_):
    return [one.price for one in candidates]
"""


def own(tmp_path: Path, name: str) -> JobSpec:
    (tmp_path / "work.py").write_text(EXAMPLE + BROKEN)
    regions = ["us-east-1"] * 3 + ["eu-west-1"] * 3
    sites = [{"name": s, "region": r} for s, r in zip(SITES, regions, strict=True)]
    return job_of({"sites": sites}, sampled(f"{tmp_path / 'work.py'}:{name}"))


def test_users_function_chooses_the_cheapest(tmp_path: Path):
    found = counts(told(own(tmp_path, "cheapest")))
    assert found == dict.fromkeys(SITES[3:], 8)  # Virtual time begins at midnight.


def test_users_own_line_is_the_cause(tmp_path: Path):
    with pytest.raises(UserCodeError, match="AttributeError") as caught:
        told(own(tmp_path, "broken"))
    last = caught.value.__cause__
    assert last is not None
    trace = last.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    assert trace.tb_frame.f_code.co_filename.endswith("work.py")


def test_function_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(JobError, match="missing") as caught:
        told(own(tmp_path, "missing"))
    assert caught.value.key == "schedule.sampling"


def test_private_samples_know_neither_losses_nor_times(tmp_path: Path):
    """They are those that fair sampling takes of what is left: counts."""
    (tmp_path / "work.py").write_text(
        "SEEN = []\n\n\n"
        "def choose(candidates, *, size, **_):\n"
        "    known = [c.history for c in candidates]\n"
        "    assert all(h.loss is None and h.seconds is None for h in known)\n"
        "    assert any(h.counted for h in known) == any(h.asked for h in known)\n"
        "    return [c.name for c in candidates][:size]\n"
    )
    private = {
        "rounds": 3,
        "aggregation": {"weights": "uniform"},
        "simulation": {"vouch_for_sources": True},
        "evaluation": {"every": 0},
        "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 50.0}},
    }
    job = job_of(private, sampled(f"{tmp_path / 'work.py'}:choose"))
    assert counts(told(job)) == {"site-0": 3, "site-1": 3}
    with pytest.raises(JobError, match=r"losses and times") as caught:
        job_of(private, sampled("utility"))
    assert caught.value.key == "schedule.sampling"


@pytest.mark.parametrize("keys", [{"sampling": "fair"}, {"over_selection": 1.5}])
def test_secure_sums_refuse_them_with_the_reason(keys: dict[str, Any]):
    secure = {"privacy": {"secure_aggregation": {"enabled": True}}}
    with pytest.raises(JobError, match=r"differ by few sites"):
        job_of(secure, sampled(**keys))
