"""A run is what its newest events say."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from support import event_samples
from support.event_samples import TWO_SITES, Script

from federation.events import (
    Event,
    ModelEvaluated,
    ModelSelected,
    PrivacyPlanned,
    RoundFinished,
    RoundStarted,
    RunExtended,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesLeftOut,
    StepTaken,
    Warned,
)
from federation.messages import FailureKind, MetricSums
from federation.typed_json import decode, encode
from monitoring.runs.run_numbers import RunNumbers
from monitoring.terminal import outcome
from monitoring.views.result_json import result
from monitoring.views.round_view import (
    metrics_of,
    named_metric,
)
from monitoring.views.run_fold import FoldState, RunFold, fold
from monitoring.views.run_view import RunView


def test_quiet_run_is_complete():
    """Every round has its numbers, evaluation one round later included."""
    view = fold(event_samples.two_sites(3))
    assert (view.status, view.rounds_completed) == ("completed", 3)
    assert [row.index for row in view.rounds] == [1, 2, 3]
    assert all(row.loss and row.accuracy and row.training_loss for row in view.rounds)
    assert all((row.answered, row.failures) == (2, {}) for row in view.rounds)
    assert view.current is None


def _bytes_told(events: list[Event]) -> tuple[int, int]:
    """Bytes up and down of all events about sites, without RoundFinished."""
    alone = [e for e in events if isinstance(e, SiteAnswered | SiteFailed)]
    many = [e for e in events if isinstance(e, StepTaken | ModelEvaluated)]
    up = sum(e.bytes_up for e in alone) + sum(sum(e.bytes_up) for e in many)
    return up, sum(e.bytes_down for e in alone) + sum(sum(e.bytes_down) for e in many)


def test_traffic_of_a_secure_run_adds_up():
    """Sites, rounds with the last evaluation, and events all tell the same bytes."""
    events = event_samples.secure()
    view, (up, down) = fold(events), _bytes_told(events)
    found = result(view)
    assert up == view.bytes_up == sum(site["bytes_up"] for site in found["sites"])
    assert down == view.bytes_down == sum(s["bytes_down"] for s in found["sites"])
    evaluation = [e for e in events if isinstance(e, ModelEvaluated)][-1]
    last_up, last_down = _bytes_told([evaluation, *view.evaluation_steps])
    assert up - last_up == sum(row["bytes_up"] for row in found["rounds"])
    assert found["final_evaluation"] == {"bytes_up": last_up, "bytes_down": last_down}
    assert down - last_down == sum(row["bytes_down"] for row in found["rounds"])
    assert [step.step for step in view.evaluation_steps] == ["survivors", "reveal"]


def test_traffic_adds_up_at_any_moment():
    """Also while a round is under way."""
    run, told = RunFold(), []
    for event in event_samples.secure():
        run.add(event)
        told.append(event)
        view = run.view()
        up = sum(site.bytes_up for site in view.sites)
        down = sum(site.bytes_down for site in view.sites)
        assert _bytes_told(told) == (up, down) == (view.bytes_up, view.bytes_down)


def test_secure_sites_have_no_metrics_of_their_own():
    """What is known of all together is known of the rounds."""
    view = fold(event_samples.secure())
    assert view.is_secret
    assert all(row.training_loss and row.loss for row in view.rounds)
    assert all(
        (s.training_loss, s.loss, s.examples) == ((), (), None) for s in view.sites
    )
    assert [row.sites_evaluated for row in view.rounds] == [2, 3, 3, 3]


def test_answer_that_came_twice_is_no_failure_of_its_site():
    """Unlike a site that refuses to work twice, and so has not answered."""
    site, other = TWO_SITES
    script = Script(rounds=3, failures=((2, other, FailureKind.DUPLICATE),))
    whole = event_samples.run(script)
    refused = next(event for event in whole if isinstance(event, SiteFailed))
    events = list[Event]()
    for event in whole:
        events.append(event)
        if isinstance(event, SiteAnswered) and event.site == site:
            copy = replace(refused, round_index=event.round_index, site=site)
            events.append(copy)
            row = fold(events).current
            assert row is not None
            assert isinstance(row.newest[site], SiteAnswered)
    view = fold(events)
    assert view.failures == (refused,)
    assert [each.num_failures for each in view.sites] == [0, 1]


def test_answers_to_earlier_rounds_take_none_of_their_sites_time():
    """They were at work until the deadline, and that is counted there."""
    events = event_samples.two_sites(2)
    at = next(i for i, e in enumerate(events) if isinstance(e, SiteAnswered))
    answer = events[at]
    assert isinstance(answer, SiteAnswered)
    late = SiteFailed(
        at=answer.at,
        round_index=answer.round_index,
        site=answer.site,
        kind=FailureKind.LATE,
        message="answered round 0 in round 1",
        asked_seconds=0.0,
        answered_seconds=86.0,
        bytes_down=0,
        bytes_up=9,
    )
    before, after = fold(events), fold([*events[:at], late, *events[at:]])
    assert [s.seconds for s in after.sites] == [s.seconds for s in before.sites]


def test_a_run_that_waits_for_a_site_that_has_gone_says_for_whom():
    """Before it asks any, from the warning to the first question."""
    events = [
        replace(e, engine="deployed") if isinstance(e, RunStarted) else e
        for e in event_samples.two_sites(1)
    ]
    begun = next(e for e in events if isinstance(e, RoundStarted))
    gone, other = begun.cohort
    told = Warned(at=begun.at + 1.0, message="round 1 waits", awaited=(gone,))
    later = [
        replace(e, asked_seconds=61.0, answered_seconds=61.0)
        if isinstance(e, SiteAnswered)
        else e
        for e in events
    ]
    before = fold(later).participation
    where = events.index(begun) + 1
    after = fold([*later[:where], told, *later[where:]]).participation
    more = after.waited[gone] - before.waited.get(gone, 0.0)
    assert more == pytest.approx(60.0)
    assert after.waited.get(other) == before.waited.get(other)
    assert (after.share or 0.0) > (before.share or 0.0)


def test_sites_follow_the_rounds():
    """Series hold one point a round; the global model's begin with round 0."""
    aws, _ = fold(event_samples.two_sites(3)).sites
    assert TWO_SITES[0] == aws.site
    assert [index for index, _ in aws.training_loss] == [1, 2, 3]
    assert [index for index, _ in aws.loss] == [0, 1, 2, 3]
    assert (aws.answered, aws.examples, aws.share.cloud) == (3, 640, "aws")


def test_newest_record_of_a_round_counts():
    """A resumed run has each round once, from the coordinator that was last."""
    events = event_samples.resumed()
    view = fold(events)
    again = events[[type(e).__name__ for e in events].index("CheckpointSkipped") :]
    assert fold(again).rounds[-7:] == view.rounds[3:]
    assert list(range(1, 11)) == [row.index for row in view.rounds]
    assert (view.coordinators, len(view.skipped)) == (2, 1)
    assert len(view.rounds[4].reports) == 2
    assert len(view.checkpoints) == 10


def _extended() -> list[Event]:
    """The model after round 3 is evaluated at the end, and again by round 4."""
    first = event_samples.run(Script(rounds=3, seed=1))
    at = first[-1].at + 60
    longer = event_samples.run(Script(rounds=12, first_round=4, start=at, seed=2))
    again = next(
        replace(event, at=at + 1, round_index=3, bytes_up=(0, 0), bytes_down=(0, 0))
        for event in first
        if isinstance(event, ModelEvaluated)
    )
    began = [isinstance(event, RoundStarted) for event in longer].index(True)
    extension = RunExtended(
        at=at,
        last_round=3,
        first_round=4,
        rounds_before=3,
        rounds=12,
        job_before="",
        job="",
    )
    return [*first, extension, *longer[:began], again, *longer[began:]]


@pytest.mark.parametrize("make", [event_samples.resumed, _extended])
@pytest.mark.parametrize("is_settled", [False, True])
def test_totals_are_the_bytes_that_were_sent(
    make: Callable[[], list[Event]], *, is_settled: bool
) -> None:
    """Also in rounds that ran again, and before an extension; in metrics likewise."""
    events = make()
    whole, numbers = RunFold(), RunNumbers()
    whole.expect([e.first_round for e in events if isinstance(e, RunStarted)])
    for event in events:
        whole.add(event)
        numbers.add(event)
        if is_settled:
            whole.settle(0)
    view, (up, down) = whole.view(), _bytes_told(events)
    assert (view.past is not None) is is_settled
    assert (view.bytes_up, view.bytes_down) == (up, down)
    assert (numbers.bytes["up"], numbers.bytes["down"]) == (up, down)
    assert sum(site.bytes_up for site in view.sites) == up
    assert sum(site.bytes_down for site in view.sites) == down
    assert view.superseded.bytes_down > 0
    (line,) = [each for each in outcome.lines(view) if " again " in each]
    assert f"{view.superseded.bytes_down:,} down" in line
    state, kept = whole.kept()
    other = RunFold()
    for event in kept:
        other.add(event)
    other.restore(decode(encode(state), FoldState, where="state"))
    assert other.view().bytes_up == up


def test_sites_that_had_left_before_a_restart_are_not_missing():
    """A coordinator that resumes says anew without whom it continues."""
    events = event_samples.resumed()
    restart = [i for i, e in enumerate(events) if isinstance(e, RunStarted)][-1]
    left = SitesLeftOut(
        at=events[0].at, round_index=1, sites=("site-1",), reasons=("spot",)
    )
    before = fold([*events[:restart], left])
    assert before.left_out == left
    assert fold([*events[:restart], left, *events[restart:]]).left_out is None


def test_every_prefix_has_a_view():
    """No moment of a run is without a picture."""
    run = RunFold()
    for event in event_samples.resumed():
        run.add(event)
        if run.has_started:
            assert isinstance(run.view(), RunView)
            json.dumps(result(run.view()), allow_nan=False)


def test_nothing_started_is_an_error():
    """There is no view of no run."""
    with pytest.raises(ValueError, match="no run has started"):
        fold([])


def test_result_is_json():
    """``result.json`` has the keys of the architecture page and no NaN."""
    found = result(fold(event_samples.troubled()))
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert list(found) == [
        "status",
        "run_id",
        "job",
        "rounds_completed",
        "engines",
        "extended",
        "selected",
        "final",
        "epsilon",
        "delta",
        "epsilon_charged",
        "privacy",
        "rounds",
        "final_evaluation",
        "superseded",
        "sites",
        "storage",
        "seconds",
        "waiting_share",
        "fairness",
        "bytes_up",
        "bytes_down",
        "virtual_dollars",
        "predicted",
    ]
    assert {"round", "sites_evaluated", "loss", "accuracy"} == set(found["final"])
    assert (len(found["rounds"]), len(found["sites"])) == (10, 2)


def test_result_tells_of_noise_in_the_sum():
    """Against whom it holds, how much signal is left, what each round clipped to."""
    found = result(fold(event_samples.whole_sites(2)))
    assert found["privacy"]["unit"] == "site"
    assert found["privacy"]["holds_against"] == event_samples.HOLDS_AGAINST["site"]
    assert found["privacy"]["signal_to_noise"] == 1.394
    assert [row["update_clip"] for row in found["rounds"]] == [0.45, 0.405]
    record = result(fold(event_samples.private(1)))
    assert record["privacy"]["signal_to_noise"] is None
    assert record["rounds"][0]["update_clip"] is None


def test_spending_of_a_private_run():
    """Epsilon by round and by site, held-out records apart, the largest in total."""
    view = fold(event_samples.private(3))
    aws, gcp = view.sites
    assert [index for index, _ in aws.epsilon] == [1, 2, 3]
    assert [row.epsilon for row in view.rounds] == [value for _, value in aws.epsilon]
    assert aws.spent.epsilon > gcp.spent.epsilon
    assert aws.promise.epsilon_cap == event_samples.EPSILON_CAP
    assert view.total_spent.epsilon == aws.spent.epsilon
    # The last evaluation is charged to the held-out records after round 3.
    assert aws.held_out_epsilon[-1] == (3, aws.spent.held_out_epsilon)
    assert aws.held_out_epsilon[-1][1] > aws.held_out_epsilon[-2][1]


def test_result_of_a_private_run():
    """``result.json`` says what epsilon means, in total, by round and by site."""
    view = fold(event_samples.private(2))
    found = result(view)
    assert found == json.loads(json.dumps(found, allow_nan=False))
    total = view.total_spent
    assert (found["epsilon"], found["delta"]) == (total.epsilon, event_samples.DELTA)
    assert found["privacy"]["unit"] == "record"
    assert found["privacy"]["relation"] == "add or remove one record"
    assert found["privacy"]["epsilon_cap"] == event_samples.EPSILON_CAP
    assert found["privacy"]["held_out"] == "noise"
    assert found["privacy"]["held_out_epsilon"] == total.held_out_epsilon
    assert len(found["privacy"]["sites"]) == 2
    assert [row["epsilon"] for row in found["rounds"]][-1] == total.epsilon
    assert found["sites"][0]["epsilon"] == total.epsilon
    assert found["sites"][0]["delta"] == event_samples.DELTA
    public = result(fold(event_samples.private(2, public=True)))
    assert public["privacy"]["held_out"] == "public"
    assert public["privacy"]["held_out_epsilon"] is None


def test_run_without_privacy_has_no_epsilon():
    """Not zero, and not what a site says unasked."""
    told = event_samples.private(2)
    for events in (
        event_samples.two_sites(2),
        [event for event in told if not isinstance(event, PrivacyPlanned)],
    ):
        found = result(fold(events))
        assert (found["epsilon"], found["delta"], found["privacy"]) == (None,) * 3
        assert all(row["epsilon"] is None for row in found["rounds"])
        assert all(site["epsilon"] is None for site in found["sites"])


def test_spending_of_a_round_that_runs_again_is_not_forgotten():
    """The ledger was charged, whatever became of the round."""
    told = event_samples.private(4)
    again = event_samples.private(4, first_round=4, budget_rounds=None, stop_after=4)
    # The second coordinator is killed before any site has answered.
    begun = next(i for i, e in enumerate(again) if isinstance(e, RoundStarted))
    view = fold([*told, *again[: begun + 1]])
    assert len(view.rounds) == 3
    assert view.total_spent == fold(told).total_spent


def test_exhausted_run_keeps_its_last_model():
    """The round beyond the budget has no result and no epsilon."""
    view = fold(event_samples.exhausted())
    assert (view.status, view.rounds_completed) == ("exhausted", 6)
    assert (view.rounds[-1].status, view.rounds[-1].epsilon) == ("lost", None)
    assert view.last_evaluated.round_index == 6
    assert view.total_spent.epsilon <= event_samples.EPSILON_CAP


def test_spending_that_cannot_be_told_apart_is_nobodys():
    """An evaluation that lacks a site's word for what it spent charges no one."""
    events = event_samples.private(1)
    *_, last = (event for event in events if isinstance(event, ModelEvaluated))
    place = events.index(last)
    without = [*events[:place], replace(last, spent=()), *events[place + 1 :]]
    short = [*events[:place], replace(last, spent=last.spent[:1]), *events[place + 1 :]]
    assert fold(short).spent == fold(without).spent != fold(events).spent


@pytest.mark.parametrize("name", ["accuracy", "auc_of_men", "calibration_by_age"])
def test_metrics_of_an_own_objective_are_found_by_name(name: str):
    """Also those whose name a built-in task has, or begins a name with."""
    sums = MetricSums(count=4, loss_sum=2.0, metrics={name: 3.0})
    assert named_metric(sums, name) == metrics_of(sums)[name] == 0.75


def test_a_best_model_whose_evaluation_was_lost_has_no_results():
    """After a power cut, the checkpoint knows a best round that no event has."""
    *events, end = event_samples.two_sites(2)
    selected = ModelSelected(
        at=end.at,
        round_index=1,
        model="best",
        models=1,
        metric="loss",
        best_round=1,
        best_score=0.5,
        stopped_early=False,
    )
    left = [
        event
        for event in events
        if not (isinstance(event, ModelEvaluated) and event.round_index == 1)
    ]
    view = fold([*left, selected, end])
    assert view.last_evaluated is None
    assert result(view)["final"]["loss"] is None
    assert fold([*events, selected, end]).last_evaluated.round_index == 1


def test_an_average_has_no_results_of_another_model():
    """Its own evaluation failed; that of the round before is of another model."""
    *events, end = event_samples.two_sites(2)
    selected = ModelSelected(
        at=end.at,
        round_index=2,
        model="swa",
        models=2,
        metric="",
        best_round=None,
        best_score=None,
        stopped_early=False,
    )
    left = [
        event
        for event in events
        if not (isinstance(event, ModelEvaluated) and event.round_index == 2)
    ]
    assert fold([*left, selected, end]).last_evaluated is None
    assert fold([*events, selected, end]).last_evaluated.round_index == 2


def test_a_skipped_number_has_the_results_of_the_model_before_it():
    """With secure aggregation, an evaluation uses up the first one of an extension."""
    *events, end = event_samples.two_sites(2)
    extended = RunExtended(
        at=end.at,
        last_round=2,
        first_round=4,
        rounds_before=2,
        rounds=6,
        job_before="",
        job="",
    )
    selected = ModelSelected(
        at=end.at,
        round_index=3,
        model="best",
        models=1,
        metric="loss",
        best_round=3,
        best_score=0.5,
        stopped_early=False,
    )
    view = fold([*events, extended, selected, end])
    assert view.last_evaluated.round_index == 2
    assert outcome.chosen(view.selected) == "best by loss: that of round 2"
    assert (view.selected.best_round, result(view)["selected"]["round"]) == (2, 2)


def test_a_missed_round_is_one_failure_also_if_its_answer_comes_late():
    """The late answer is listed, and counted as neither a task nor an evaluation's."""
    site = TWO_SITES[1]
    events = event_samples.run(
        Script(rounds=3, failures=((2, site, FailureKind.DEADLINE),))
    )
    at = next(i for i, e in enumerate(events) if isinstance(e, SiteFailed))
    missed = events[at]
    last = max(e.round_index for e in events if isinstance(e, RoundFinished))
    late = replace(
        missed, kind=FailureKind.LATE, round_index=last + 1, bytes_down=0, bytes_up=900
    )
    end = next(i for i, e in enumerate(events) if isinstance(e, RunFinished))
    before, view = fold(events), fold([*events[:end], late, *events[end:]])
    assert view.failures == (missed, late)
    assert view.totals.num_failures == 1
    assert [each.num_failures for each in view.sites] == [0, 1]
    assert view.evaluation_bytes == before.evaluation_bytes
    assert view.bytes_up == before.bytes_up + 900
