"""The life of a secure run: sites that restart, setups that fail, keys that go."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.secure_runs import (
    MASK,
    Answer,
    run,
    secure_job,
    silence,
    step_of,
)
from support.without_report import simulate

from clients.training.site import Site
from federation import events
from federation.errors import QuorumNotMet
from federation.job.spec import FaultSpec, JobSpec
from federation.messages import (
    FailureKind,
    SecureStep,
    SiteFailure,
    SiteMessage,
    Task,
)
from privacy.secagg.agreement.certificate import Certificate
from privacy.secagg.protocol.train import read_train

pytestmark = pytest.mark.slow

SITE = "site-2"
NEEDS_SETUP = (
    "has no keys for this run, because it was restarted, and needs a new setup"
)


def with_restarts(job: JobSpec, *rounds: int, site: str = SITE) -> JobSpec:
    """A job one of whose sites restarts just before it is asked."""
    fault = FaultSpec(site=site, kind="restart", rounds=rounds)
    return replace(job, simulation=replace(job.simulation, faults=(fault,)))


class Restarting:
    """A site that restarts before the training tasks of some rounds."""

    def __init__(self, site: Site, rounds: Sequence[int]) -> None:
        self.site, self.rounds = site, rounds

    def handle(self, task: Task) -> SiteMessage:
        if step_of(task) == MASK and task.round_index in self.rounds:
            self.site.close()
        return self.site.handle(task)


class Spender:
    """A site that has no privacy budget left for training from some round on."""

    def __init__(self, site: Site, first_round: int) -> None:
        self.site, self.first_round = site, first_round

    def handle(self, task: Task) -> SiteMessage:
        answer = self.site.handle(task)  # Refused or not, the number is used up.
        if step_of(task) != MASK or task.round_index < self.first_round:
            return answer
        return SiteFailure(
            run_id=task.run_id,
            round_index=task.round_index,
            site=task.site,
            kind=FailureKind.BUDGET,
            message="epsilon 8.1 is beyond the cap of 8",
        )


def restarting(*rounds: int) -> dict[str, Callable[[Any], Restarting]]:
    """For the ``wraps`` of ``run``."""
    return {SITE: lambda site: Restarting(site, rounds)}


class Ear:
    """A fault that only listens: tasks, and setups by round."""

    def __init__(self, inner: Any = lambda _task, answer: (answer(),)) -> None:
        self.tasks: list[Task] = []
        self._inner = inner

    def __call__(self, task: Task, answer: Answer) -> Sequence[SiteMessage]:
        self.tasks.append(task)
        return self._inner(task, answer)

    def setups(self) -> list[int]:
        """Before which round's task each setup was offered, to the first site."""
        asked, found = 0, []
        for task in (t for t in self.tasks if t.site == "site-0"):
            if getattr(task, "step", None) is SecureStep.ADVERTISE:
                found.append(asked + 1)
            elif step_of(task) == MASK:
                asked = task.round_index
        return found

    def setup_hashes(self) -> dict[int, bytes]:
        """h_U of each round."""
        masks = [t for t in self.tasks if step_of(t) == MASK]
        return {t.round_index: read_train(t.secure).setup_hash for t in masks}

    def certificates(self) -> dict[int, Certificate]:
        """What came with each round's task."""
        masks = [t for t in self.tasks if step_of(t) == MASK]
        return {
            t.round_index: Certificate.from_bytes(read_train(t.secure).certificate)
            for t in masks
        }


def ends(seen: Sequence[events.Event]) -> list[events.RoundFinished]:
    return [event for event in seen if isinstance(event, events.RoundFinished)]


def test_restart_costs_a_round_where_all_must_answer():
    """P1: its round is lost, the next begins with a new setup of all."""
    ear = Ear()
    secure = run(secure_job(3, threshold=3, rounds=5), wraps=restarting(3), fault=ear)
    assert secure.statuses() == ["completed"] * 2 + ["lost"] + ["completed"] * 2
    assert secure.failures(3) == [(SITE, NEEDS_SETUP)]
    assert ear.setups() == [1, 4]
    hashes = ear.setup_hashes()
    assert hashes[1] == hashes[2] == hashes[3] != hashes[4] == hashes[5]


def test_restart_costs_no_round_where_one_may_be_missing():
    """P2: it drops out of its round and is back in the next."""
    ear = Ear()
    secure = run(secure_job(rounds=5), wraps=restarting(3), fault=ear)
    assert secure.statuses() == ["completed"] * 5
    assert [SITE in secure.answered(r) for r in range(1, 6)] == [
        *(True, True, False, True, True)
    ]
    assert ends(secure.seen)[2].failed == (("not_set_up", 1),)
    assert ear.setups() == [1, 4]


@pytest.mark.parametrize("threshold", [3, 4])
def test_restart_is_a_fault_to_rehearse(threshold: int):
    """As a job asks for it, with what a simulation keeps in memory of rounds."""
    seen: list[events.Event] = []
    job = with_restarts(secure_job(threshold=4, rounds=4), 2, 3)
    if threshold == 3:
        job = with_restarts(secure_job(3, threshold=3, rounds=4), 2)
    result = simulate(job, listeners=[seen.append])
    assert result.status == "completed"
    failed = [e for e in seen if isinstance(e, events.SiteFailed)]
    assert {e.kind for e in failed} == {"not_set_up"}
    assert len(failed) == (1 if threshold == 3 else 2)
    assert result.rounds_completed == (3 if threshold == 3 else 4)


def test_restart_is_no_matter_in_the_clear():
    """A plain site is told everything with each task."""
    plain = secure_job(rounds=3)
    off = replace(plain.privacy.secure_aggregation, enabled=False, threshold=None)
    plain = replace(plain, privacy=replace(plain.privacy, secure_aggregation=off))
    result = simulate(with_restarts(plain, 2))
    assert result.rounds_completed == 3


def test_restart_between_the_steps_of_a_round():
    """Its update is in the sum; that it was needed for no more is on record."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if step_of(task) == "survivors" and (task.site, task.round_index) == (SITE, 2):
            sites[SITE].close()
        return (answer(),)

    sites: dict[str, Site] = {}
    wraps = {SITE: lambda site: sites.setdefault(SITE, site)}
    ear = Ear(fault)
    secure = run(secure_job(rounds=4), wraps=wraps, fault=ear)
    assert secure.statuses() == ["completed"] * 4
    assert SITE in secure.answered(2)
    assert secure.failures(2) == [(SITE, f"survivors: {NEEDS_SETUP}")]
    assert ends(secure.seen)[1].failed == (("not_set_up", 1),)
    assert ear.setups() == [1, 3]


def down_after(round_index: int) -> Any:
    """A site that restarts in a round, and whose setups are silent from then on."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if task.site != SITE:
            return (answer(),)
        setup = getattr(task, "step", None) is SecureStep.ADVERTISE
        if setup and seen_round[0] >= round_index:
            return ()
        seen_round[0] = max(seen_round[0], task.round_index)
        return (answer(),)

    seen_round = [0]
    return fault


def test_those_with_keys_go_on_without_a_site_that_is_gone():
    """P2: a setup in which somebody is missing takes nobody's keys away."""
    ear = Ear(down_after(2))
    secure = run(secure_job(rounds=5), wraps=restarting(2), fault=ear)
    assert secure.statuses() == ["completed"] * 5
    assert [SITE in secure.answered(r) for r in range(1, 6)] == [True] + [False] * 4
    # Once a round, as often as the site says that it is there and has no keys.
    assert ear.setups() == [1, 3, 4, 5, 6]
    assert len(set(ear.setup_hashes().values())) == 1
    assert any("the previous setup" in text for text in secure.warnings())


@pytest.mark.parametrize("step", [SecureStep.ADVERTISE, SecureStep.CONFIRM])
def test_the_first_setup_is_made_without_a_site_that_was_silent_twice(
    step: SecureStep,
):
    """P2: it is in the next one, once it has answered a task."""
    ear = Ear(silence(step.value, [SITE], times=2))
    secure = run(secure_job(rounds=5), fault=ear)
    assert secure.statuses() == ["lost", "lost"] + ["completed"] * 3
    assert [SITE in secure.answered(r) for r in (3, 4, 5)] == [False, True, True]
    assert secure.failures(3) == [(SITE, NEEDS_SETUP)]


def test_those_without_a_silent_site_continue_while_it_stays_away():
    """P2: also if another one restarts, and all need new keys."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        return () if task.site == SITE else (answer(),)

    wraps = {"site-0": lambda site: Restarting(site, [4])}
    secure = run(secure_job(7, threshold=5, rounds=6), fault=fault, wraps=wraps)
    assert secure.statuses() == ["lost", "lost"] + ["completed"] * 4
    assert ["site-0" in secure.answered(r) for r in range(3, 7)] == [
        *(True, False, True, True)
    ]


def test_run_ends_where_a_site_that_is_needed_stays_away():
    """P1: a setup is tried before each round, until too many are lost."""
    ear = Ear(down_after(2))
    job = secure_job(3, threshold=3, rounds=9)
    with pytest.raises(QuorumNotMet, match="3 rounds in a row"):
        run(job, wraps=restarting(2), fault=ear)
    assert ear.setups() == [1, 3, 3]
    tasks = [t.round_index for t in ear.tasks if step_of(t) == MASK]
    assert set(tasks) == {1, 2}


@pytest.mark.parametrize("threshold", [3, 4])
def test_site_that_restarts_again_and_again(threshold: int):
    """P1 loses its rounds, P2 continues without it; round numbers are used once."""
    job = secure_job(threshold, threshold=threshold, rounds=6)
    if threshold == 4:
        job = secure_job(rounds=6)
    secure = run(job, wraps=restarting(2, 4, 6))
    lost = "completed" if threshold == 4 else "lost"
    assert secure.statuses() == ["completed", lost] * 3
    answered = [SITE in secure.answered(r) for r in range(1, 7)]
    assert answered == [True, False] * 3


def test_setup_that_fails_is_tried_again_in_the_next_round():
    """Nobody can be left out of it: the book holds exactly the roster."""
    ear = Ear(silence(SecureStep.ADVERTISE.value, [SITE], times=2))
    secure = run(secure_job(rounds=4), fault=ear)
    assert secure.statuses() == ["lost", "lost", "completed", "completed"]
    assert secure.failures(1) == [(SITE, "advertise: never answered")]
    assert ends(secure.seen)[0].failed == (("unreachable", 1),)


def test_certificates_name_the_rounds_that_led_to_a_model():
    """Round 2 is lost: round 3 comes with the certificate of round 1 again."""
    lost = silence(MASK, [SITE], times=1)

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        return lost(task, answer) if task.round_index == 2 else (answer(),)

    ear = Ear(fault)
    secure = run(secure_job(3, threshold=3, rounds=4), fault=ear)
    assert secure.statuses() == ["completed", "lost", "completed", "completed"]
    found = {r: c.opened.round_index for r, c in ear.certificates().items()}
    assert found == {1: 0, 2: 1, 3: 1, 4: 3}
    assert ear.certificates()[4].opened.survivors == (1, 2, 3)
    assert ear.certificates()[2] == ear.certificates()[3]


def test_certified_sum_is_that_of_the_masked_words():
    """P1: who holds what was sent up can add it and finds the digest."""
    heard: list[Any] = []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        message = answer()
        if step_of(task) == MASK and task.round_index == 1:
            heard.append(message)
        return (message,)

    ear = Ear(fault)
    run(secure_job(3, threshold=3, rounds=2), fault=ear)
    words = sum(m.words.view("<u4").astype(np.uint32) for m in heard)
    headers = sum(m.header_h for m in heard)
    opened = ear.certificates()[2].opened
    assert opened.sum_digest == hashlib.sha256(words.tobytes()).digest()
    assert opened.header_digest == hashlib.sha256(headers.tobytes()).digest()


@pytest.mark.parametrize("first_round", [2, 3])
@pytest.mark.parametrize("num_sites", [3, 4])
def test_last_model_that_a_budget_allows_is_evaluated(num_sites: int, first_round: int):
    """The refused round has used its number up; the contract has one for this."""
    job = secure_job(num_sites, threshold=3, rounds=3)
    spenders = [f"site-{number}" for number in range(2)]
    ear = Ear()
    secure = run(
        job,
        fault=ear,
        wraps={name: lambda site: Spender(site, first_round) for name in spenders},
    )
    finished = secure.seen[-1]
    assert isinstance(finished, events.RunFinished)
    assert finished.status == "exhausted"
    evaluated = [e for e in secure.seen if isinstance(e, events.ModelEvaluated)]
    assert evaluated[-1].round_index == first_round - 1
    assert len(evaluated[-1].sites) == len(job.sites)
    asked = [t.round_index for t in ear.tasks if t.site == SITE and step_of(t) != MASK]
    assert max(asked) == first_round + 1
