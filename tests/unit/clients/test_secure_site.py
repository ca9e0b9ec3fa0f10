"""A site under secure aggregation: what it refuses, and what it says then."""

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.noisy_jobs import noisy_job
from support.secure_runs import Run, Spoilt, run, secure_job

from clients.privacy.cohorts import DOCUMENT
from clients.privacy.ring_seal import RingSeal
from clients.training.forwarding import ForwardingTrainer
from clients.training.site import Site
from federation.errors import StoreUnavailable, UserCodeError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import LocalUpdate, LocalWeights
from federation.rounds.failures import failure
from privacy.dp.adaptive_clip import CLIP_RANGE
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.secagg.errors import ReplayedRound
from privacy.secagg.protocol.key_schedule import RunSecrets, Secret
from privacy.secagg.protocol.setup import SiteSetup
from privacy.secagg.protocol.train import read_train, write_train

SITE = SiteId("site-1")


class Recording:
    """A site and the tasks that it was given."""

    def __init__(self, site: Site) -> None:
        self.site, self.tasks = site, []

    def handle(self, task: Task) -> SiteMessage:
        if isinstance(task, RoundTask):
            weights_d = task.weights_d.copy()
            task = replace(task, weights_d=weights_d)
        self.tasks.append(task)
        return self.site.handle(task)


@pytest.fixture
def after_a_run() -> Recording:
    """A site that took part in a run of two rounds."""
    kept: list[Recording] = []

    def wrap(site: Site) -> Recording:
        kept.append(Recording(site))
        return kept[0]

    run(secure_job(rounds=2), wraps={SITE: wrap})
    return kept[0]


def refused(site: Site, task: Task, kind: FailureKind = FailureKind.INVALID) -> str:
    """What a site says of a task that it refuses."""
    answer = site.handle(task)
    assert isinstance(answer, SiteFailure)
    assert answer.kind is kind
    return answer.message


def test_own_model_is_not_evaluated_in_secret(after_a_run: Recording):
    """Its result would leave nowhere, and would be charged."""
    rounds = [t for t in after_a_run.tasks if isinstance(t, RoundTask)]
    asked = replace(rounds[0], evaluate_after=True)
    assert "not evaluate a site" in refused(after_a_run.site, asked)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_round_is_answered_once(after_a_run: Recording, place: int):
    """Two answers under one mask would differ by the difference of two updates."""
    rounds = [t for t in after_a_run.tasks if isinstance(t, RoundTask)]
    # A round of an older state is refused before its number is looked at.
    kind = FailureKind.DUPLICATE if place == len(rounds) - 1 else FailureKind.INVALID
    assert "round" in refused(after_a_run.site, rounds[place], kind)


@pytest.mark.parametrize("step", [SecureStep.SURVIVORS, SecureStep.REVEAL])
def test_step_of_a_round_that_is_over_is_refused(
    after_a_run: Recording, step: SecureStep
):
    """Its keys are gone."""
    (task, *_) = (t for t in after_a_run.tasks if getattr(t, "step", None) is step)
    assert refused(after_a_run.site, task) == "no round is in progress at this site"


def test_task_in_the_clear_is_refused(after_a_run: Recording):
    """A site that protects itself does so whatever it is asked."""
    rounds = [t for t in after_a_run.tasks if isinstance(t, RoundTask)]
    task = replace(rounds[-1], secure=b"", round_index=3)
    assert refused(after_a_run.site, task) == "answers only with secure aggregation"


def test_model_of_another_layout_is_refused(after_a_run: Recording):
    """Before a round is begun: the number is not used up."""
    rounds = [t for t in after_a_run.tasks if isinstance(t, RoundTask)]
    task = replace(rounds[-1], layout_digest="0" * 64)
    assert "different layout" in refused(after_a_run.site, task)


def by_capacity(num_sites: int = 3, **schedule: Any) -> JobSpec:
    """All must answer; a round has four steps."""
    return secure_job(
        num_sites,
        threshold=num_sites,
        rounds=2,
        training={"local_steps": 16},  # Of which the first round takes a quarter.
        evaluation={"every": 0},
        schedule={"allocation": "capacity", **schedule},
    )


def with_steps(task: RoundTask, *steps: int) -> RoundTask:
    body = replace(read_train(task.secure), steps_by_site=steps)
    return replace(task, secure=write_train(body))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda task: replace(task, num_steps=5), "5 local steps, .* shown 4"),
        (lambda task: with_steps(task, 4, 5, 4), "4 local steps, .* shown 5"),
        (lambda task: with_steps(task, 4, 4), "steps of 2 sites, of 3"),
        (with_steps, "steps of 0 sites, of 3"),
        (lambda task: replace(task, num_steps=65), "65 local steps"),
        (lambda task: with_steps(task, 1, 4, 7), "for a different run"),
    ],
)
def test_all_sites_of_a_sum_see_the_same_steps_and_take_them(
    change: Callable[[RoundTask], Task], text: str
):
    """Else one is refused before it trains; or its masks do not come off the sum."""
    found = run(by_capacity(), wraps={SITE: lambda site: Spoilt(site, change)})
    assert found.statuses() == ["lost", "completed"]
    ((site, message),) = found.failures(1)
    assert site == SITE
    assert re.search(text, message)


def test_sites_that_see_other_steps_than_the_rest_are_not_in_its_sum():
    """Two of four: their own entries are right, and their masks cancel among them."""
    two = {
        name: lambda site: Spoilt(site, lambda task: with_steps(task, 4, 4, 9, 9))
        for name in ("site-0", "site-1")
    }
    found = run(by_capacity(4), wraps=two)
    assert found.statuses() == ["lost", "completed"]
    assert {site for site, _ in found.failures(1)} == {*two}


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"local_steps": 4}},
        {
            "training": {"local_steps": 4},
            "schedule": {"local_work": "auto", "max_local_steps": 8},
        },
    ],
    ids=["fixed", "auto"],
)
def test_sites_of_a_job_that_does_not_say_so_take_the_same_steps(
    changes: dict[str, Any],
):
    """Even if all are shown the same: such sites do not scale their updates."""
    job = secure_job(3, threshold=3, rounds=2, **changes)
    names = [site.name for site in job.sites]
    spoilt = [
        lambda site: Spoilt(site, lambda task: with_steps(task, 4, 4, 4)) for _ in names
    ]
    found = run(job, wraps=dict(zip(names, spoilt, strict=True)))
    assert found.statuses() == ["lost", "completed"]
    assert {text.split(", ")[-1] for _, text in found.failures(1)} == {
        "which all take the same"
    }


def test_step_that_is_not_one_is_refused(after_a_run: Recording):
    """Nobody asks a site to decline."""
    task = next(t for t in after_a_run.tasks if isinstance(t, SecureTask))
    text = refused(after_a_run.site, replace(task, step=SecureStep.DECLINE))
    assert text == "decline is not a step that can be requested"


def restarted(site: Site) -> Site:
    """The same site in a new process."""
    return Site(
        SITE,
        make_trainer=site.make_trainer,
        state=site.state,
        clock=site.clock,
        seal=RingSeal(SITE, site._seal._protection),  # type: ignore[attr-defined]
        tells_all=False,
    )


def test_restarted_site_says_so(after_a_run: Recording):
    """It has no keys of the run and can only be set up anew."""
    site = restarted(after_a_run.site)
    rounds = (SecureStep.SURVIVORS, SecureStep.REVEAL)
    for task in after_a_run.tasks:
        if isinstance(task, RoundTask) or task.step in rounds:
            answer = site.handle(task)
            assert answer.kind is FailureKind.NOT_SET_UP
            assert answer.message.startswith("has no keys for this run")
        elif task.step is SecureStep.CONFIRM:
            assert "received an offer" in refused(site, task)


def roots_of(site: Site) -> list[Secret]:
    """What a site's session derives keys from."""
    roots = site._seal._session.secrets.roots.values()  # type: ignore[attr-defined]
    held = [root for pair in roots for root in gc.get_referents(pair)]
    return [root for root in held if isinstance(root, Secret)]


def test_new_setup_that_is_not_complete_leaves_the_old_one(after_a_run: Recording):
    """Somebody may be missing from it: the others continue with the keys they have."""
    site, offer = after_a_run.site, after_a_run.tasks[0]
    secrets = roots_of(site)
    assert len(secrets) == 2 * 4
    assert site.handle(offer).step is SecureStep.ADVERTISE
    assert not any(secret.erased for secret in secrets)


def test_a_wrong_book_is_the_fault_of_the_aggregator(after_a_run: Recording):
    """One that is none, and one of an earlier setup: the site says whose."""
    site, offer = after_a_run.site, after_a_run.tasks[0]
    book = next(
        task
        for task in after_a_run.tasks
        if isinstance(task, SecureTask) and task.step is SecureStep.CONFIRM
    )
    for body, said in ((b"none", ""), (book.body, "different advert for")):
        site.handle(offer)
        answer = site.handle(replace(book, body=body))
        assert isinstance(answer, SiteFailure)
        assert answer.kind is FailureKind.AGGREGATOR
        assert answer.message.startswith("refuses the aggregator's book of keys")
        assert said in answer.message


def test_closed_site_has_no_key(after_a_run: Recording):
    """Neither of the session nor of a setup that had begun."""
    site, offer = after_a_run.site, after_a_run.tasks[0]
    secrets = roots_of(site)
    site.handle(offer)
    setup = site._seal._setup  # type: ignore[attr-defined]
    site.close()
    assert all(secret.erased for secret in secrets)
    assert (site._seal._session, site._seal._setup, setup._keys) == (None, None, None)  # type: ignore[attr-defined]
    site.close()


def test_restarted_site_remembers_its_rounds(after_a_run: Recording):
    """A new setup with the same contract does not make an answered round open."""
    site = restarted(after_a_run.site)
    memory = site._seal._protection.memory  # type: ignore[attr-defined]
    with pytest.raises(ReplayedRound, match="round 2"):
        memory.advance(RunId("run-1"), 2)


def _clipped_to(change: Callable[[float], float], job: JobSpec) -> Run:
    """A run whose second site is asked for another clip norm, in the first round."""

    def lie(task: RoundTask) -> RoundTask:
        body = read_train(task.secure)
        body = replace(body, update_clip=change(body.update_clip))
        return replace(task, secure=write_train(body))

    return run(job, wraps={SITE: lambda site: Spoilt(site, task=lie)})


def test_another_clip_norm_than_the_contracts_is_refused():
    """Where it does not adapt; the noise is made for that one."""
    found = _clipped_to(lambda clip: clip * 1.01, secure_job(rounds=1, clip_norm=2.0))
    ((site, message),) = found.failures(1)
    assert site == SITE
    assert "asked to clip to 2.02, and the contract says 2.0" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "is_answered"),
    [(CLIP_RANGE, True), (CLIP_RANGE * 1.01, False), (0.99 / CLIP_RANGE, False)],
)
def test_clip_norm_that_adapts_has_its_limits(factor: float, is_answered: bool):  # noqa: FBT001
    """Whether an update is beyond float32 when it is scaled is not to be told."""
    job = noisy_job(
        "site",
        threshold=3,
        private={"adaptive_clip": True, "accept_low_signal": True},
        model={"options": {"inputs": 4, "classes": 3}},
        data={"source": "support.small_jobs:blobs"},
        rounds=1,
    )
    found = _clipped_to(lambda clip: clip * factor, job)
    said = [message for _, message in found.failures(1) if "to clip" in message]
    assert (said == []) == is_answered
    if not is_answered:
        assert "than a factor of 1048576" in said[0]


@pytest.mark.slow
def test_one_site_that_clips_otherwise_opens_no_sum():
    """The clip norm is in the round's context, which is signed and in every key."""
    job = noisy_job(
        "site",
        private={"adaptive_clip": True, "accept_low_signal": True},
        rounds=2,
    )
    found = _clipped_to(lambda clip: clip / 2, job)
    assert found.statuses() == ["lost", "completed"]
    ((site, message),) = found.failures(1)
    assert site == SITE
    assert "run, setup, round or" in message


class Poor:
    """A site that has spent its training records' budget when round 2 begins."""

    def __init__(self, site: Site) -> None:
        self.site, self.is_poor = site, False

    def handle(self, task: Task) -> SiteMessage:
        if isinstance(task, RoundTask) and task.round_index == 2 and not self.is_poor:
            self.is_poor = True
            event = self.site._current_trainer()._releases.round_event  # type: ignore[attr-defined]
            ledger = self.ledger()
            while ledger.epsilon("train", event) <= ledger.terms.epsilon_cap:
                ledger.charge(event, round_index=1)
        return self.site.handle(task)

    def ledger(self) -> InMemoryLedger:
        return self.site._current_trainer()._ledger  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_round_that_is_refused_charges_no_evaluation():
    """Training is beyond the budget, so held-out records are not looked at either."""
    job = noisy_job("record", rounds=2, evaluation={"every": 1})
    kept: list[Poor] = []

    def wrap(site: Site) -> Poor:
        kept.append(Poor(site))
        return kept[0]

    found = run(job, wraps={SITE: wrap})
    (poor,) = kept
    purposes = [(c.round_index, c.purpose) for c in poor.ledger().charges()]
    assert purposes[:2] == [(1, "train"), (1, "evaluate")]
    assert not [purpose for number, purpose in purposes if number == 2]
    assert [site for site, _ in found.failures(2)] == [SITE]


def strict(site: Site) -> None:
    """Have the operator accept no longer that sums single out one or two sites."""
    seal: Any = site._seal
    rule = replace(seal._protection.cohorts, smallest=3, accept_dropouts=False)
    seal._protection = replace(seal._protection, cohorts=rule)


def test_setup_that_is_given_up_leaves_no_key(after_a_run: Recording):
    """The next one takes its place, or its contract is refused."""
    site, offer = after_a_run.site, after_a_run.tasks[0]
    setups = []
    for _ in range(2):
        site.handle(offer)
        setups.append(site._seal._setup)  # type: ignore[attr-defined]
        assert setups[-1]._keys is not None
    strict(site)
    answer = site.handle(offer)
    assert isinstance(answer, SiteFailure)
    assert "accept_dropouts" in answer.message
    setups.append(site._seal._setup)  # type: ignore[attr-defined]
    assert [setup._keys for setup in setups] == [None, None, None]


class Watched:
    """A site that a test looks into before it is given a task."""

    def __init__(self, site: Site, look: Callable[[Site, Task], Task | None]) -> None:
        self.site, self.look = site, look

    def handle(self, task: Task) -> SiteMessage:
        asked = self.look(self.site, task)
        if asked is None:
            return failure(task, FailureKind.UNREACHABLE, "is not asked")
        return self.site.handle(asked)


def test_roots_of_a_cohort_that_is_refused_are_erased(monkeypatch: pytest.MonkeyPatch):
    """By the rule of this run, when all have confirmed their keys."""
    held: list[RunSecrets] = []
    confirmed = SiteSetup.on_confirms

    def keep(setup: SiteSetup, data: bytes) -> RunSecrets:
        held.append(confirmed(setup, data))
        return held[-1]

    monkeypatch.setattr(SiteSetup, "on_confirms", keep)

    def look(site: Site, task: Task) -> Task:
        if isinstance(task, RoundTask):
            strict(site)
            rule = site._seal._protection.cohorts  # type: ignore[attr-defined]
            four = {"cohorts": [[f"site-{n}" for n in range(4)]]}
            rule.memory.update(DOCUMENT, lambda _: {rule.lineage: four})
        return task

    run(secure_job(rounds=1), wraps={SITE: lambda site: Watched(site, look)})
    refused_ = [s for s in held if all(p._mask.erased for p in s.roots.values())]
    assert len(held) == 5
    assert len(refused_) == 1


def test_new_setup_and_a_round_that_never_ended_leave_no_old_key():
    """Site 4 restarts, so all set up anew; site 1 never hears of survivors before."""
    keys: list[Any] = []
    roots: list[Secret] = []

    def look(site: Site, task: Task) -> Task | None:
        seal: Any = site._seal
        if getattr(task, "step", None) is SecureStep.SURVIVORS and not keys:
            keys.extend(seal._session._round.shared.receive.values())
            return None
        if getattr(task, "step", None) is SecureStep.CONFIRM and keys and not roots:
            assert all(key.erased for key in keys)  # By the offer before.
            roots.extend(roots_of(site))
            assert not any(root.erased for root in roots)
        return task

    def forget(site: Site, task: Task) -> Task:
        if isinstance(task, RoundTask) and task.round_index == 2 and not forgotten:
            forgotten.append(task)
            held = site._seal._protection  # type: ignore[attr-defined]
            site._seal = RingSeal(SiteId("site-4"), held)
        return task

    forgotten: list[Task] = []
    wraps = {
        SITE: lambda site: Watched(site, look),
        SiteId("site-4"): lambda site: Watched(site, forget),
    }
    found = run(secure_job(rounds=3), wraps=wraps)
    assert found.statuses()[-1] == "completed"
    assert len(roots) == 2 * 4
    assert all(root.erased for root in roots)


def test_offer_of_a_setup_erases_an_unfinished_round():
    """The site was declared missing, and hears no other word of it."""
    offers: list[Task] = []
    sites: list[Site] = []

    def look(site: Site, task: Task) -> Task | None:
        step = getattr(task, "step", None)
        if step is SecureStep.ADVERTISE:
            offers.append(task)
            sites.append(site)
        return None if step is SecureStep.SURVIVORS else task

    run(secure_job(rounds=1), wraps={SITE: lambda site: Watched(site, look)})
    (site,), (offer,) = sites, offers
    keys = site._seal._session._round.shared.receive.values()  # type: ignore[attr-defined]
    assert not any(key.erased for key in keys)
    site.handle(offer)
    assert all(key.erased for key in keys)


def test_round_that_an_error_ends_leaves_no_key():
    """Of any kind: what is masked already is never sent."""
    kept: list[Site] = []

    class Broken(ForwardingTrainer):
        def fit(self, *_: Any, **__: Any) -> LocalWeights | LocalUpdate:
            raise StoreUnavailable("the home is away")

    def wrap(site: Site) -> Site:
        make = site.make_trainer
        site.make_trainer = lambda: Broken(make())
        kept.append(site)
        return site

    job = secure_job(rounds=1, evaluation={"every": 0})  # Nothing comes after it.
    found = run(job, wraps={SITE: wrap})
    assert [site for site, _ in found.failures(1)] == [SITE]
    assert kept[0]._seal._session._round is None  # type: ignore[attr-defined]


class Strict:
    """A site whose operator no longer accepts sums that lack a site."""

    def __init__(self, site: Site) -> None:
        self.site, self.keys = site, []
        self.refusal: SiteMessage | None = None

    def handle(self, task: Task) -> SiteMessage:
        if getattr(task, "step", None) is not SecureStep.SURVIVORS or self.refusal:
            return self.site.handle(task)
        seal: Any = self.site._seal
        strict(self.site)
        self.keys = [*seal._session._round.shared.receive.values()]
        self.refusal = self.site.handle(task)
        self.after = self.site.handle(replace(task, step=SecureStep.REVEAL))
        return self.refusal


def test_refused_consent_leaves_no_key_of_the_round():
    """It was signed, and never sent: what opens the sum must not stay."""
    kept: list[Strict] = []

    def wrap(site: Site) -> Strict:
        kept.append(Strict(site))
        return kept[0]

    job = secure_job(7, rounds=1, threshold=5)
    run(job, wraps={SITE: wrap, SiteId("site-4"): failing})
    (site,) = kept
    assert isinstance(site.refusal, SiteFailure)
    assert "single out" in site.refusal.message
    assert len(site.keys) == 6
    assert all(key.erased for key in site.keys)
    assert isinstance(site.after, SiteFailure)
    assert site.after.message == "no round is in progress at this site"


class Failing(ForwardingTrainer):
    """A trainer whose training fails, as on a record that it cannot read."""

    def fit(self, *_: Any, **__: Any) -> LocalWeights | LocalUpdate:
        raise UserCodeError("mine:net", IndexError("record 7"))


def failing(site: Site) -> Site:
    """A site whose training fails."""
    make = site.make_trainer
    site.make_trainer = lambda: Failing(make())
    return site


@pytest.mark.slow
def test_a_site_whose_training_fails_is_told_from_no_other_where_noise_is_added():
    """Its update is only noise; without noise in the sum it declines."""
    model = {"options": {"inputs": 4, "classes": 3}}
    small = {"model": model, "data": {"source": "support.small_jobs:blobs"}}
    noisy = noisy_job("site", private={"accept_low_signal": True}, rounds=1, **small)
    found = run(noisy, wraps={SITE: failing})
    assert (found.statuses(), found.failures(1)) == (["completed"], [])
    assert SITE in found.answered(1)
    open_ = run(secure_job(rounds=1), wraps={SITE: failing})
    assert [site for site, _ in open_.failures(1)] == [SITE]
