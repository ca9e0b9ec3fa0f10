"""The aggregator's half of secure aggregation over a grid that a test scripts."""

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import toy
from support.noisy_jobs import noisy_job
from support.scripted_grid import ScriptedGrid
from support.secure_runs import MASK, Answer, Spoilt, run, secure_job, silence, step_of

from aggregator.masked_round import MaskedRound
from aggregator.secure_exchange import SecureExchange
from federation import events
from federation.clock import VirtualClock
from federation.ids import SiteId, TaskId
from federation.messages import (
    FailureKind,
    LeaveReason,
    MaskedUpdate,
    Reply,
    SecureAnswer,
    SecureStep,
    SiteMessage,
    Task,
)
from federation.protocols import SiteHandler
from federation.rounds.round_record import RoundRecord
from privacy.secagg.protocol.train import read_train

SITE = "site-1"
SITES = tuple(f"site-{number}" for number in range(5))


@pytest.mark.slow
def test_round_is_tried_once():
    """No site is asked for a masked update of one round twice, whatever was lost."""
    asked: list[tuple[str, int]] = []
    inner = silence(MASK, [SITE, "site-0"])

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if step_of(task) == MASK:
            asked.append((task.site, task.round_index))
        return inner(task, answer)

    run(secure_job(), fault=fault)
    assert len(asked) == len(set(asked)) == 5 * 3


def test_setup_runs_once():
    """Its confirms go with a site's first task and with no later one."""
    tasks: list[Task] = []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        tasks.append(task)
        return (answer(),)

    run(secure_job(), fault=fault)
    steps = [t.step for t in tasks if getattr(t, "round_index", 0) == 0]
    assert steps.count(SecureStep.ADVERTISE) == steps.count(SecureStep.CONFIRM) == 5
    long = [t.round_index for t in tasks if len(getattr(t, "secure", b"")) > 1000]
    assert long == [1] * 5


@pytest.mark.slow
def test_site_that_missed_its_first_task_is_sent_the_confirms_again():
    """It could not begin its session without them."""
    sent: list[int] = []
    inner = silence(MASK, [SITE])

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if task.site == SITE and step_of(task) == MASK:
            sent.append(len(read_train(task.secure).confirms))
        return inner(task, answer)

    assert run(secure_job(), fault=fault).answered(2)[1] == SITE
    assert sent[0] == sent[1] > sent[2] == 0


class _Listing(ScriptedGrid):
    """Says who is sent something, and answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def play(self, tasks: Sequence[tuple[TaskId, Task]]) -> Iterable[Reply]:
        """Note the sites."""
        self.asked += [task.site for _, task in tasks]
        return ()


def test_site_that_left_in_an_earlier_step_is_not_sent_the_model():
    """Nor waited for: its task was written before it gave notice."""
    grid, gone = _Listing(), toy.SITES[1]
    job = toy.job({"privacy": {"secure_aggregation": {"enabled": True}}})
    record = RoundRecord(
        job=job,
        state=toy.initial_state(job),
        run_id=toy.RUN,
        cohort=toy.SITES,
        layout=toy.LAYOUT,
        clock=VirtualClock(),
        emit=lambda _event: None,
    )
    record.change_members(record.members.leave(gone, "spot"))
    exchange = SecureExchange(
        run_id=toy.RUN,
        grid=grid,
        deadline_seconds=1.0,
        run_setup_of=lambda _site: None,
    )

    def nobody(site: SiteId) -> MaskedRound:
        raise AssertionError(site)

    exchange.fold(record, [toy.task(site) for site in toy.SITES], nobody)
    assert grid.asked == [site for site in toy.SITES if site != gone]


@pytest.mark.parametrize("step", [SecureStep.SURVIVORS, SecureStep.REVEAL])
@pytest.mark.parametrize("body", [b"", b"no", b"\0" * 300])
def test_wrong_answer_to_a_step_is_refused_by_name(step: SecureStep, body: bytes):
    """And the step continues without it."""

    def wrap(site: Any) -> SiteHandler:
        return _Answering(site, step, body)

    found = run(secure_job(rounds=1), wraps={SITE: wrap})
    assert found.statuses() == ["completed"]
    assert [site for site, _ in found.failures(1)] == [SITE]


class _Answering:
    def __init__(self, site: Any, step: SecureStep, body: bytes) -> None:
        self.site, self.step, self.body = site, step, body

    def handle(self, task: Task) -> SiteMessage:
        message = self.site.handle(task)
        if isinstance(message, SecureAnswer) and message.step is self.step:
            return SecureAnswer(
                run_id=task.run_id,
                round_index=task.round_index,
                site=task.site,
                step=self.step,
                body=self.body,
            )
        return message


def test_answer_to_another_step_is_refused():
    """A consent in the place of shares, for example."""

    class Confused(_Answering):
        def handle(self, task: Task) -> SiteMessage:
            message = self.site.handle(task)
            if isinstance(message, SecureAnswer) and message.step is self.step:
                return SecureAnswer(
                    run_id=task.run_id,
                    round_index=task.round_index,
                    site=task.site,
                    step=SecureStep.SURVIVORS,
                    body=message.body,
                )
            return message

    wraps = {SITE: lambda site: Confused(site, SecureStep.REVEAL, b"")}
    found = run(secure_job(rounds=1), wraps=wraps)
    assert found.failures(1) == [(SITE, "reveal: sent the wrong kind of answer")]


@pytest.mark.parametrize("step", [MASK, "survivors", "reveal"])
def test_answer_that_comes_twice_counts_once(step: str):
    """The second is refused; the sum is not doubled."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        message = answer()
        twice = task.site == SITE and step_of(task) == step
        return (message, message) if twice else (message,)

    found = run(secure_job(rounds=1), fault=fault)
    assert found.statuses() == ["completed"]
    assert found.answered(1).count(SITE) == 1
    assert {site for site, _ in found.failures(1)} == {SITE}


def test_site_that_sends_the_answer_of_another_does_not_count():
    """Nobody speaks for another site, even with its help."""
    owner: list[Any] = []
    masked: list[SiteMessage] = []
    lock = threading.Lock()

    class Shares:
        """Both answer with what the first of the two was asked for first."""

        def __init__(self, site: Any) -> None:
            self.site = site

        def handle(self, task: Task) -> SiteMessage:
            if step_of(task) != MASK:
                return self.site.handle(task)
            with lock:
                if not masked:
                    masked.append(owner[0].handle(replace(task, site="site-0")))
            return replace(masked[0], site=task.site)

    def own(site: Any) -> Shares:
        owner.append(site)
        return Shares(site)

    found = run(secure_job(rounds=1), wraps={"site-0": own, SITE: Shares})
    said = "sent an answer that 'site-0' signed"
    assert found.failures(1) == [(SITE, said)]
    assert SITE not in found.answered(1)


@pytest.mark.slow
def test_sum_is_scaled_back_to_the_clip_norm_of_its_round():
    """Updates are masked in units of the first one, and a twentieth of that."""
    job = noisy_job(
        "site",
        num_sites=8,
        private={
            "adaptive_clip": True,
            "accept_low_signal": True,
            "clip_norm": 1e3,
            "clip_rate": 6.0,
            "target_epsilon": 300.0,
        },
        rounds=2,
    )
    seen = [e for e in run(job).seen if isinstance(e, events.RoundFinished)]
    first, second = ((e.update_norm, e.update_clip) for e in seen)
    assert first[1] == 1e3
    assert second[1] < 100
    # Nearly all of both is noise, which is in proportion to the clip norm.
    assert second[0] / second[1] == pytest.approx(first[0] / first[1], rel=0.3)


def test_lost_evaluation_leaves_a_model_without_metrics():
    """Sites that train and then do not evaluate cost the metrics alone."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        last = getattr(task, "kind", None) == "evaluate"
        return () if last and task.site in {SITE, "site-0"} else (answer(),)

    found = run(secure_job(rounds=1), fault=fault)
    assert found.statuses() == ["completed"]
    assert any("evaluated the final model" in text for text in found.warnings())


@pytest.mark.slow
def test_metrics_are_taken_only_from_rounds_that_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
):
    """What sites put into a sum unasked is refused: see ``honest_sums``."""
    asked: list[bool] = []
    opened = MaskedRound.open

    def noted(self: MaskedRound, job: Any, **terms: Any) -> Any:
        asked.append(terms["evaluation"])
        return opened(self, job, **terms)

    monkeypatch.setattr(MaskedRound, "open", noted)
    run(secure_job(rounds=3, evaluation={"every": 2}))
    # The last one is that of the final model.
    assert asked == [True, False, True, True]


def test_failure_of_a_masked_update_says_its_kind():
    """A site's own refusal is told apart from a crash."""

    def stale(task: Any) -> Task:
        return replace(task, secure=b"not the protocol")

    wraps = {SITE: lambda site: Spoilt(site, task=stale)}
    seen = run(secure_job(rounds=1), wraps=wraps).seen
    (failed,) = (e for e in seen if isinstance(e, events.SiteFailed))
    assert (failed.site, failed.kind) == (SITE, FailureKind.INVALID)


@pytest.mark.slow
def test_a_round_that_needs_a_site_that_has_left_begins_when_it_is_back():
    """With new keys; before, each round would be lost to the site's good-bye."""
    clock, left = VirtualClock(), []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        message = answer()
        if isinstance(message, MaskedUpdate) and task.site == SITE and not left:
            left.append(clock.monotonic())
            return (replace(message, leaving=LeaveReason.SPOT),)
        is_there = not left or task.round_index == 1 or clock.monotonic() > left[0] + 30
        return (message,) if task.site != SITE or is_there else ()

    def returned(sites: Collection[SiteId], _: int) -> Collection[SiteId]:
        return sites if clock.monotonic() > left[0] + 30.0 else ()

    job = secure_job(threshold=5, rounds=3)
    found = run(job, fault=fault, clock=clock, returned=returned)
    assert found.statuses() == ["completed"] * 3
    assert all({*found.answered(index)} == {*SITES} for index in (1, 2, 3))
    setups = [
        event.round_index
        for event in found.seen
        if isinstance(event, events.StepTaken) and event.step == "confirm"
    ]
    assert setups == [1, 2]


@pytest.mark.parametrize(("leavers", "times"), [((SITE,), 0), (SITES, 1)])
def test_site_that_leaves_is_not_waited_for(leavers: tuple[str, ...], times: int):
    """Its update counts; its consent is asked for where the others are too few."""
    consents: list[str] = []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        message = answer()
        if step_of(task) == "survivors" and task.round_index == 1:
            consents.append(task.site)
        if isinstance(message, MaskedUpdate) and task.site in leavers:
            return (replace(message, leaving=LeaveReason.SIGTERM),)
        return (message,)

    found = run(secure_job(rounds=1), fault=fault)
    assert found.statuses() == ["completed"]
    assert set(found.answered(1)) == {*SITES}
    assert consents.count(SITE) == times
