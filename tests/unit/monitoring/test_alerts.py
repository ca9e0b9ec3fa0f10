"""Each cause of an alert, and that nothing else is one."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from support import event_samples
from support.event_samples import START, Script

from deploy.aggregator_host import alert_delivery
from federation.events import (
    Event,
    ModelEvaluated,
    PrivacyPlanned,
    RoundStarted,
    RunFinished,
    SiteAnswered,
)
from federation.messages import FailureKind, MetricSums
from monitoring.runs import run_numbers
from monitoring.runs.run_numbers import RunNumbers
from monitoring.web import alerts
from monitoring.web.alerts import HostFacts

SITES = ("a", "b", "c")
DAY = 86_400.0


def _run(events: Iterable[Event]) -> RunNumbers:
    found = RunNumbers()
    for event in events:
        found.add(event)
    return found


def _keys(run: RunNumbers, now: float) -> set[str]:
    return {alert.key for alert in alerts.of_run("r", run, now)}


def _going(**script: object) -> list[Event]:
    """The events of a run up to its last one."""
    events = event_samples.run(Script(sites=SITES, **script))  # type: ignore[arg-type]
    return events[:-1]


def test_run_that_goes_well_alarms_nobody() -> None:
    events = event_samples.run(Script(sites=SITES, rounds=8))
    run = RunNumbers()
    for event in events:
        run.add(event)
        assert _keys(run, event.at) == set()
    assert _keys(run, events[-1].at + DAY) == set()


def test_round_that_goes_on_for_long() -> None:
    """Measured by the rounds before it, and not between rounds."""
    events = _going(rounds=8)
    last = max(at for at, e in enumerate(events) if isinstance(e, RoundStarted))
    began, index = events[last].at, events[last].round_index  # type: ignore[union-attr]
    run = _run(events[: last + 1])
    slowest = max(alerts.MIN_STALL_SECONDS, 3 * max(run.recent_seconds))
    assert _keys(run, began + slowest - 1) == set()
    assert _keys(run, began + slowest + 1) == {f"r/stalled/{index}"}
    between = _run(events)
    assert between.is_between_rounds
    assert _keys(between, began + DAY) == set()


@pytest.mark.parametrize(
    "kind", [FailureKind.DEADLINE, FailureKind.BUDGET, FailureKind.SURPLUS]
)
def test_site_that_misses_rounds_in_a_row(kind: FailureKind) -> None:
    """One whose budget is spent, or whose answer nobody needs, has not failed."""
    failures = tuple((index, "b", kind) for index in (2, 4, 5, 6))
    events = _going(rounds=7, failures=failures)
    run = RunNumbers()
    seen = set()
    for event in events:
        run.add(event)
        seen |= _keys(run, event.at)
    is_failure = kind is FailureKind.DEADLINE
    assert seen == ({"r/silent/b"} if is_failure else set())
    assert _keys(run, events[-1].at) == set()  # It is back in the last round.


def test_causes_that_come_in_crowds_are_marked() -> None:
    """Of a run, its silent sites; of a host, its runs and certificates."""
    late = [(n, site, FailureKind.DEADLINE) for n in (2, 3, 4) for site in "bc"]
    events = _going(rounds=4, failures=tuple(late))
    silent = [*alerts.of_run("r", _run(events), events[-1].at)]
    assert [(one.crowd, one.member) for one in silent] == [
        ("r/silent", "b"),
        ("r/silent", "c"),
    ]
    failed = [*alerts.of_run("r", RunNumbers(job="j"), START, status="failed")]
    ends = HostFacts(free_bytes=1, reserve_bytes=0, expires={"a": 1.0}, knocks={})
    for one in (*failed, *alerts.of_host(ends, 0.0)):
        assert one.crowd
        assert one.member in {"r", "a"}


def test_sites_that_share_their_numbers_miss_rounds_on_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many sites, some are late in each round."""
    monkeypatch.setattr(run_numbers, "MAX_SITES", 1)
    late = [(index, site, FailureKind.DEADLINE) for index in (2, 3) for site in "bc"]
    events = _going(rounds=4, failures=(*late, (4, "c", FailureKind.DEADLINE)))
    assert _keys(_run(events), events[-1].at) == {"r/silent/c"}


@pytest.mark.parametrize(("share", "key"), [(0.79, None), (0.81, "0.8"), (1.0, "1.0")])
def test_budget(share: float, key: str | None) -> None:
    """Of a budget that will not last; see the next test for those that do."""
    run = _run(_going(epsilon_cap=8.0, rounds=20, stop_after=8, budget_rounds=10))
    run.values["epsilon"], run.rounds_affordable = share * 8.0, 2.0
    expected = set() if key is None else {f"r/epsilon/{key}"}
    assert _keys(run, START) == expected


@pytest.mark.parametrize(("budget_rounds", "expected"), [(60, False), (40, True)])
def test_budget_that_lasts_by_plan(budget_rounds: int, *, expected: bool) -> None:
    """Epsilon that grows with rounds or with their root, up to the cap in the last."""
    for power in (1.0, 0.5):
        run, seen, answered = RunNumbers(), set[str](), dict[str, int]()
        for event in _going(epsilon_cap=8.0, rounds=60):
            changed = event
            if isinstance(event, SiteAnswered) and event.spent is not None:
                answered[event.site] = answered.get(event.site, 0) + 1
                share = min(1.0, answered[event.site] / budget_rounds)
                spent = replace(event.spent, epsilon=8.0 * share**power)
                changed = replace(event, spent=spent)
            run.add(changed)
            seen |= _keys(run, event.at)
        assert run.values["epsilon"] == 8.0
        assert any("/epsilon/" in key for key in seen) is expected, power


def test_noise_alone_makes_no_loss_rise() -> None:
    """Its lowest value is far too low, and often 0; a real rise still counts."""
    planned = next(
        event for event in event_samples.private() if isinstance(event, PrivacyPlanned)
    )
    site = replace(planned.sites[0], site="a", held_out_noise=30.0)
    run = _run([*_going(rounds=1)[:1], replace(planned, sites=(site,))])

    def evaluated(loss: float) -> set[str]:
        sums = MetricSums(count=1000, loss_sum=1000 * loss, metrics={"correct": 900})
        run.add(replace(_evaluated(1.0), pooled=sums, sites=("a",)))
        return _keys(run, START)

    for loss in (0.6, 0.0, *[0.9] * 6):
        assert evaluated(loss) == set(), loss
    for _ in range(3):
        found = evaluated(9.0)
    assert found == {"r/loss/rising"}
    (alert,) = alerts.of_run("r", run, START)
    assert "~9.000 +-" in alert.text
    assert "best was ~0.000 +-" in alert.text


def _evaluated(loss: float) -> ModelEvaluated:
    return ModelEvaluated(
        at=START,
        round_index=1,
        pooled=MetricSums(count=10, loss_sum=10 * loss, metrics={}),
        sites=SITES,
        by_site=(),
        bytes_down=(),
        bytes_up=(),
    )


def test_loss_that_rises_or_is_no_number() -> None:
    """One bad evaluation is noise; three in a row are not."""
    run = _run([*_going(rounds=2), _evaluated(1.0)])
    run.best_loss = 1.0
    seen = []
    for loss in (1.6, 1.4, 1.6, 1.6, 1.6, 1.0, math.nan, 1.0):
        run.add(_evaluated(loss))
        seen.append(_keys(run, START))
    rising, nan = {"r/loss/rising"}, {"r/loss/nan"}
    assert seen == [set()] * 4 + [rising, set(), nan, set()]


@pytest.mark.parametrize("has_round", [False, True])
def test_failed_run(*, has_round: bool) -> None:
    run = _run(_going() if has_round else [])
    why = "site 'b' refused: its budget is spent"
    (alert,) = alerts.of_run("r", run, START, status="failed", reason=why)
    assert alert.key == "r/failed"
    assert f"has failed: {why}. " in alert.text
    assert ("--resume" in alert.text) is has_round
    assert ("completed no round" in alert.text) is not has_round
    refused = "revoked: 'b'; invite it again, and start a new run"
    (alert,) = alerts.of_run("r", run, START, status="failed", reason=refused)
    assert "--resume" not in alert.text
    (alert,) = alerts.of_run("r", run, START, status="failed")
    assert "crossfed logs r" in alert.text


def test_failed_run_whose_outcome_is_not_known_yet_has_its_reason() -> None:
    """The coordinator's last event comes before the service's word."""
    run = _run(_going())
    message = "revoked: 'b'; invite it again, and start a new run"
    run.add(
        RunFinished(
            at=START,
            status="failed",
            rounds_completed=1,
            last_round=1,
            message=message,
            seconds=1.0,
        )
    )
    (alert,) = alerts.of_run("r", run, START)
    assert message in alert.text
    assert "--resume" not in alert.text


def test_long_reason_keeps_what_to_do_after_it() -> None:
    """A hundred sites may refuse, a line for each."""
    reason = "the run cannot start:\n" + "  site 'b' does not take part\n" * 100
    (alert,) = alerts.of_run(
        "r", RunNumbers(job="j"), START, status="failed", reason=reason
    )
    assert len(alert.text) < alert_delivery.MAX_CHARS
    assert "\n" not in alert.text
    assert alert.text.endswith("crossfed run JOB.")


def test_run_that_ended_for_its_budget_tells_so() -> None:
    """No run reaches its cap: the round that would is refused."""
    run = _run(_going(epsilon_cap=8.0, rounds=20, stop_after=8, budget_rounds=10))
    run.values["epsilon"], run.rounds_affordable = 7.9, 0.4
    (alert,) = alerts.of_run("r", run, START, status="exhausted")
    assert alert.key == "r/epsilon/1.0"


def test_small_quota_is_not_rounded_to_nothing() -> None:
    (alert,) = alerts.of_quotas("ann", {"gigabytes": (0.00065, 0.0008)})
    assert "0.00065 of" in alert.text


def test_cap_that_was_raised_is_another_cause() -> None:
    """So that its 80 % are told, too, within the hour after those of the first."""
    keys = {
        alert.key
        for cap in (4.0, 5.0)
        for alert in alerts.of_caps("fed", {"max_hours": (0.9 * cap, cap)})
    }
    assert len(keys) == 2


def test_host() -> None:
    """Little room, certificates that end, and keys in foreign hands."""
    well = HostFacts(
        free_bytes=1 << 40, reserve_bytes=1 << 28, expires={"a": 4 * DAY}, knocks={}
    )
    assert not list(alerts.of_host(well, 0.0))
    ill = HostFacts(
        free_bytes=1 << 28,
        reserve_bytes=1 << 28,
        expires={"site a": 2 * DAY, "site b": 9 * DAY},
        knocks={"10.0.0.1 (CN=site-n)": 4},
    )
    found = {alert.key: alert.text for alert in alerts.of_host(ill, 0.0)}
    assert len(found) == 3
    assert "256 MiB free" in found["host/disk"]
    assert "4 times" in found["host/revoked/10.0.0.1 (CN=site-n)"]
    assert len([key for key in found if key.startswith("host/certificate/site a")]) == 1
    (once,) = alerts.of_host(replace(well, knocks={"10.0.0.1": 1}), 0.0)
    assert "1 time." in once.text
