"""Whole runs under secure aggregation: the sum is right, or there is none.

What each message is and what each check refuses is in the unit tests of
``privacy.secagg``; here they meet the round loop, the grid and the sites.
"""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.secure_runs import (
    MASK,
    Overheard,
    Run,
    Spoilt,
    in_the_clear,
    retrained,
    run,
    secure_job,
    silence,
)
from support.without_report import simulate

from clients.privacy.ring_seal import RingSeal
from clients.training.site import Site
from cloud_adapters.local.faults import FaultInjector
from federation import events
from federation.clock import SystemClock
from federation.job import job_file
from federation.job.spec import FaultSpec, JobSpec
from federation.messages import (
    MaskedUpdate,
    MetricSums,
    SecureAnswer,
    SecureStep,
    SiteMessage,
    SiteUpdate,
    Task,
)
from monitoring.runs.run_result import RunResult
from privacy.counts import coarse
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.protocol.messages import Decline

# One worker makes each run that several tests compare with once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("secure_aggregation")]

JOBS = Path(__file__).parents[2] / "jobs"
SITE = "site-2"
STEPS = [MASK, SecureStep.SURVIVORS.value, SecureStep.REVEAL.value]


def quickstart(rounds: int, **secure: Any) -> JobSpec:
    """``jobs/quickstart.toml``, of fewer rounds; keys of its table may be changed."""
    document = tomllib.loads((JOBS / "quickstart.toml").read_text())
    document["rounds"] = rounds
    document["privacy"]["secure_aggregation"].update(secure)
    return job_file.parse(document)


@dataclass
class Outcome:
    """A simulated run and its events."""

    result: RunResult
    seen: list[events.Event]

    @property
    def weights_d(self) -> np.ndarray:
        arrays = self.result.weights.values()
        return np.concatenate([a.ravel() for a in arrays]).astype(float)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


@cache
def quick_run(rounds: int, bits: int | None = None) -> Outcome:
    """A run of the quickstart job; in the clear if no ring is named."""
    seen: list[events.Event] = []
    changes = {"enabled": False} if bits is None else {"ring_bits": bits}
    job = quickstart(rounds, **changes)
    return Outcome(simulate(job, listeners=[seen.append]), seen)


@pytest.mark.parametrize("bits", [32, 16])
def test_one_round_is_off_by_the_quantisation_at_most(bits: int):
    """A bound for every coordinate, by the arithmetic of one round.

    A step of the ring is 1 / scale. Stochastic rounding moves a weighted value by less
    than a step, so the mean of N sites by less than N steps / (sum of weights). Scaling
    a value in float32 adds 2^-21 of it, and storing the new weight half an ulp on each
    side. The server's first step multiplies all that by lr * (1 + momentum). Nothing is
    clipped, else no such bound would hold.
    """
    secure, plain, job = quick_run(1, bits), quick_run(1), quickstart(1)
    table = job.privacy.secure_aggregation
    updates = plain_updates()
    assert max(float(np.linalg.norm(u.delta_d)) for u in updates) < table.clip_norm
    ring = RingSpec(bits=bits, num_sites=len(updates), clip_norm=table.clip_norm)
    weights = sum(u.num_examples for u in updates) / coarse(table.max_examples)
    bound = len(updates) / ring.scale / weights
    bound += 2.0**-21 * max(float(np.abs(u.delta_d).max()) for u in updates)
    server = job.aggregation.server_optimizer
    bound *= server.lr * (1 + server.momentum)
    bound += 2.0**-23 * np.abs(plain.weights_d).max()
    error = np.abs(secure.weights_d - plain.weights_d).max()
    assert 0 < error <= bound


@cache
def plain_updates() -> list[SiteUpdate]:
    """What the sites of the quickstart job send in their first round in the clear."""
    job = quickstart(1)
    ears: list[Overheard] = []

    def wrap(site: Any) -> Overheard:
        ears.append(Overheard(site))
        return ears[-1]

    names = [site.name for site in job.sites]
    run(in_the_clear(job), wraps=dict.fromkeys(names, wrap))
    heard = [message for ear in ears for message in ear.heard]
    return [m for m in heard if isinstance(m, SiteUpdate) and m.round_index == 1]


@pytest.mark.parametrize("bits", [32, 16])
def test_error_of_rounds_adds_up_and_does_not_grow(bits: int):
    """Where training is convex it brings two models no further apart.

    Then R rounds are off by R times the bound of one round, which is N / (scale * sum
    of weights) for every coordinate, besides float32. The weights sum to 1 at least.
    """
    job = secure_job(2, threshold=2, rounds=4, ring_bits=bits)
    secure, plain = run(job).state.weights_d, run(in_the_clear(job)).state.weights_d
    scale = RingSpec(bits=bits, num_sites=2, clip_norm=10.0).scale
    bound = 4 * np.sqrt(plain.size) * (2 / scale + 2.0**-22 * np.abs(plain).max())
    assert 0 < np.linalg.norm(secure - plain) <= bound


def test_sums_of_what_sites_report_are_exact():
    """Counts to the last one, losses to a micronat per site."""
    (secure,), (plain,) = (
        run.of(events.RoundFinished) for run in (quick_run(1, 32), quick_run(1))
    )
    assert secure.training.count == plain.training.count
    assert secure.training.metrics == plain.training.metrics
    assert secure.training.loss_sum == pytest.approx(plain.training.loss_sum, abs=2e-6)


def test_site_may_drop_out_of_every_other_round():
    """``jobs/secure.toml``: the four that are left open their sum."""
    document = tomllib.loads((JOBS / "secure.toml").read_text()) | {"rounds": 3}
    seen: list[events.Event] = []
    simulate(job_file.parse(document), listeners=[seen.append])
    ends = [e for e in seen if isinstance(e, events.RoundFinished)]
    assert [e.status for e in ends] == ["completed"] * 3
    assert [len(e.answered) for e in ends] == [5, 4, 5]


@cache
def clear_run(*silent: str) -> Run:
    """``secure_job()`` in the clear, where some sites are silent in the first round."""
    return run(in_the_clear(secure_job()), fault=silence(MASK, silent))


def assert_same(secure: Run, other: Run) -> None:
    """Same weights but for rounding: each step of the ring is 5e-8 at most here."""
    np.testing.assert_allclose(secure.state.weights_d, other.state.weights_d, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_dropout_leaves_the_mean_of_those_who_answered(step: str):
    """Whoever vanishes after R1 is in the sum; whoever vanishes in it is not."""
    job = secure_job()
    secure = run(job, fault=silence(step, [SITE]))
    assert secure.statuses() == ["completed"] * 3
    assert len(secure.answered(1)) == (4 if step == MASK else 5)
    assert_same(secure, clear_run(SITE) if step == MASK else clear_run())


def test_slow_site_takes_part_in_every_step():
    """It hangs, answers within the deadline, and is asked for consent and shares."""
    job = secure_job()
    hang = FaultSpec(site=SITE, kind="hang", seconds=0.2, rounds=(1,))
    fault = FaultInjector([hang], clock=SystemClock(), seed=0)
    secure = run(job, fault=fault)
    assert secure.failures(1) == []
    assert len(secure.answered(1)) == 5
    taken = [e for e in secure.seen if isinstance(e, events.StepTaken)]
    steps = {e.step: e.sites for e in taken if e.round_index == 1}
    assert SITE in steps[SecureStep.SURVIVORS.value]
    assert SITE in steps[SecureStep.REVEAL.value]
    assert_same(secure, clear_run())


@pytest.mark.parametrize(
    ("step", "names"),
    [(step, ["site-0", SITE]) for step in STEPS]
    + [(step.value, [SITE]) for step in (SecureStep.ADVERTISE, SecureStep.CONFIRM)],
)
def test_too_many_dropouts_lose_the_round_alone(step: str, names: list[str]):
    """The next one continues; the setup needs everybody, and is tried again."""
    job = secure_job()
    secure = run(job, fault=silence(step, names))
    assert secure.statuses() == ["lost", "completed", "completed"]
    assert {site for site, _ in secure.failures(1)} >= set(names)
    assert any("round 1 has no sum" in text for text in secure.warnings())
    assert_same(secure, clear_run("site-0", SITE))


def test_all_must_answer_where_the_threshold_is_all():
    """P1: one site less and the masks stay on."""
    job = secure_job(3, threshold=3)
    secure = run(job, fault=silence(MASK, [SITE]))
    assert secure.statuses() == ["lost", "completed", "completed"]


def with_value(value: float) -> Callable[[Any], Any]:
    def change(result: Any) -> Any:
        result.weights_d[3] = value
        return result

    return change


def with_examples(result: Any) -> Any:
    return replace(result, num_examples=1 << 20)


def with_loss(result: Any) -> Any:
    return replace(
        result,
        training=MetricSums(count=1, loss_sum=float("nan"), metrics={"correct": 0}),
    )


@pytest.mark.parametrize(
    "change",
    [with_value(np.nan), with_value(np.inf), with_examples, with_loss],
    ids=["NaN", "infinity", "examples", "loss"],
)
def test_update_that_does_not_fit_is_declined(change: Callable[[Any], Any]):
    """Signed, without a word on the reason, and counted as a dropout."""
    ears: list[Overheard] = []

    def wrap(site: Site) -> Overheard:
        ears.append(Overheard(retrained(change)(site)))
        return ears[0]

    job = secure_job()
    secure = run(job, wraps={SITE: wrap})
    assert secure.failures(1) == [(SITE, "declined to answer")]
    (decline,) = (m for m in ears[0].heard if getattr(m, "step", "") == "decline")
    assert Decline.from_bytes(decline.body).number == 3
    assert_same(secure, clear_run(SITE))


def test_decline_that_is_not_signed_is_refused():
    """Else whoever is in between could have a site left out in its name."""

    def forge(update: MaskedUpdate) -> SecureAnswer:
        return SecureAnswer(
            run_id=update.run_id,
            round_index=update.round_index,
            site=update.site,
            step=SecureStep.DECLINE,
            body=b"no",
        )

    secure = run(secure_job(), wraps={SITE: lambda s: Spoilt(s, answer=forge)})
    ((site, text),) = secure.failures(1)
    assert site == SITE
    assert text != "declined to answer"


def other_model(task: Any) -> Task:
    return replace(task, weights_d=task.weights_d + np.float32(1e-3))


@pytest.mark.parametrize("threshold", [4, 5])
def test_site_that_was_given_another_model_is_not_in_the_sum(threshold: int):
    """It refuses: that is not the model which the aggregator has signed."""
    job = secure_job(threshold=threshold)
    secure = run(job, wraps={SITE: lambda s: Spoilt(s, task=other_model)})
    ((site, text),) = secure.failures(1)
    assert site == SITE
    assert "is not the one" in text
    assert "certificate of round 0" in text
    lost = silence(MASK, [SITE])
    assert_same(secure, run(in_the_clear(job), fault=lost))
    first = "completed" if threshold == 4 else "lost"
    assert secure.statuses() == [first, "completed", "completed"]


def flipped(name: str) -> Callable[[MaskedUpdate], SiteMessage]:
    def change(update: MaskedUpdate) -> MaskedUpdate:
        value = getattr(update, name)
        if isinstance(value, bytes):
            at = len(value) // 2
            return replace(
                update,
                **{name: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]},
            )
        value = value.copy()
        value[value.size // 2] ^= 1
        return replace(update, **{name: value})

    return change


def cut(name: str) -> Callable[[MaskedUpdate], SiteMessage]:
    return lambda update: replace(update, **{name: getattr(update, name)[:-4]})


def in_clear(update: MaskedUpdate) -> SiteUpdate:
    sums = MetricSums(count=1, loss_sum=1.0, metrics={"correct": 1})
    return SiteUpdate(
        run_id=update.run_id,
        round_index=update.round_index,
        site=update.site,
        layout_digest=update.layout_digest,
        delta_d=np.ones(update.words.size // 4, np.float32),
        integers_m=np.empty(0, np.int64),
        num_examples=1,
        num_steps=1,
        training=sums,
        evaluation=None,
        evaluation_after=None,
        phases=(),
    )


SPOILT = {
    "words flipped": (flipped("words"), "differs from the one that it signed"),
    "header flipped": (flipped("header_h"), "differs from the one that it signed"),
    "body flipped": (flipped("body"), ""),
    "words cut": (cut("words"), "bytes of masked words"),
    "header cut": (cut("header_h"), "words instead of"),
    "body cut": (cut("body"), ""),
    "in the clear": (in_clear, "sent an unmasked answer, but"),
    "other layout": (
        lambda update: replace(update, layout_digest="0" * 64),
        "different layout",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_update_is_refused_by_name(case: str):
    """The sum of the others is opened where the threshold allows."""
    change, text = SPOILT[case]
    job = secure_job()
    secure = run(job, wraps={SITE: lambda s: Spoilt(s, answer=change)})
    ((site, said),) = secure.failures(1)
    assert site == SITE
    assert any(part in said for part in text.split("|"))
    assert_same(secure, clear_run(SITE))


def test_answer_of_another_site_is_refused():
    """A site that repeats what another one signed is not that one."""
    stolen: dict[int, MaskedUpdate] = {}

    def keep(update: MaskedUpdate) -> MaskedUpdate:
        stolen[update.round_index] = update
        return update

    def repeat(update: MaskedUpdate) -> MaskedUpdate:
        return replace(stolen[update.round_index], site=update.site)

    job = replace(secure_job(), simulation=replace(secure_job().simulation, workers=1))
    secure = run(
        job,
        wraps={
            "site-0": lambda s: Spoilt(s, answer=keep),
            SITE: lambda s: Spoilt(s, answer=repeat),
        },
    )
    assert secure.failures(1) == [(SITE, "sent an answer that 'site-0' signed")]
    assert_same(secure, clear_run(SITE))


def test_signed_garbage_loses_the_round_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
):
    """The sum is out of what sites can make: an alarm, no model, and the next round."""
    work = RingSeal._work

    def garbage(self: RingSeal, *args: Any) -> Any:
        words, header_h = work(self, *args)
        if self._name == SITE and not spoilt:
            spoilt.append(True)
            words.view(np.uint32)[:] += np.uint32(1 << 31)
        return words, header_h

    spoilt: list[bool] = []
    monkeypatch.setattr(RingSeal, "_work", garbage)
    secure = run(secure_job())
    assert secure.statuses() == ["lost", "completed", "completed"]
    assert any("a site lied" in text for text in secure.warnings())


# Runs that are interrupted.


def at(name: str, round_index: int, count: int = 1) -> Callable[[events.Event], None]:
    """A person who presses Ctrl-C at an event of a round."""
    left = [count]

    def listener(event: events.Event) -> None:
        of_round = getattr(event, "round_index", None)
        if type(event).__name__ == name and of_round == round_index:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    return listener


@pytest.mark.parametrize(
    "listener",
    [at("SiteAnswered", 2, 5), at("RoundFinished", 2)],
    ids=["updates are folded", "round has ended"],
)
def test_round_in_flight_is_lost_and_the_run_goes_on(
    listener: Callable[[events.Event], None], tmp_path: Path
):
    """Every site remembers on disk that it has answered, and answers once."""
    job, folder = secure_job(rounds=4), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate(job, folder=folder, listeners=[listener])
    seen: list[events.Event] = []
    result = simulate(job, folder=folder, resume=True, listeners=[seen.append])
    ends = [e for e in seen if isinstance(e, events.RoundFinished)]
    assert [e.status for e in ends] == ["lost", "completed", "completed"]
    failed = [e for e in seen if isinstance(e, events.SiteFailed)]
    assert {e.round_index for e in failed} == {2}
    assert all("round 2" in e.message for e in failed)
    assert len({e.site for e in failed}) == 5
    assert (result.status, result.rounds_completed) == ("completed", 3)


def test_run_that_was_asked_to_stop_loses_nothing(tmp_path: Path):
    """It stops between rounds, where no answer is under way."""
    job, asked = secure_job(rounds=4), [False, False, True]
    stop = iter(asked)
    folder = tmp_path / "run"
    first = simulate(job, folder=folder, stop_requested=lambda: next(stop))
    assert (first.status, first.rounds_completed) == ("stopped", 2)
    last = simulate(job, folder=folder, resume=True)
    assert (last.status, last.rounds_completed) == ("completed", 4)


# What leaves a site, and what stays in it.


def test_training_that_fails_leaves_no_key():
    """A site that crashes in its round says its error's kind, and erases."""
    held: list[bytearray] = []

    def wrap(site: Site) -> Site:
        def crash(_: Any) -> Any:
            masks = site._seal._session._round.masks  # type: ignore[attr-defined]
            held.extend(stream.key for stream in (*masks.vector, *masks.header))
            raise ZeroDivisionError("of 41 examples")

        return retrained(crash)(site)

    secure = run(secure_job(), wraps={SITE: wrap})
    assert secure.failures(1) == [(SITE, "ZeroDivisionError")]
    assert held
    assert not any(any(buffer) for buffer in held)
    assert secure.sites[SITE]._seal._session._round is None


def test_events_tell_nothing_of_a_single_site():
    """What the aggregator writes down is of all sites together."""
    seen = run(secure_job()).seen
    for event in seen:
        if isinstance(event, events.SiteAnswered):
            assert (event.num_examples, event.num_steps, event.weight) == (None,) * 3
            assert (event.training, event.evaluation, event.phases) == (None, None, ())
        if isinstance(event, events.ModelEvaluated):
            assert event.by_site == ()
            assert len(event.sites) == 5
    assert any("pooled" in asdict(event) for event in seen)


@pytest.mark.parametrize("levels", [None, 4])
def test_a_clipped_update_is_noted_by_its_site_and_its_norm_by_nobody_else(
    levels: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The run warns from the opened sum; what one site's log says is in no file."""
    keys = {} if levels is None else {"levels": levels}
    data = {
        "source": "support.small_jobs:blobs",
        "options": {"num_train": 600},
        "partition": {"kind": "iid"},
    }
    training = {"local_steps": 1, "batch_size": 200, "optimizer": {"lr": 1.0}}
    job = secure_job(
        3, threshold=3, clip_norm=1e-3, data=data, training=training, **keys
    )
    done = simulate(job, folder=tmp_path / "run")
    notes = [
        r.getMessage() for r in caplog.records if "scales it down" in r.msg % r.args
    ]
    assert sorted(text.split(":")[0] for text in notes) == [
        f"site site-{i}" for i in range(3)
    ]
    norms = [text.split("norm of ")[1].split(",")[0] for text in notes]
    assert all(float(norm) > 1e-3 for norm in norms)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    kept = b"".join(file.read_bytes() for file in files)
    warned = [e.message for e in done.view.warnings if "most are probably" in e.message]
    assert len(warned) == 1
    assert not any(f"norm of {norm}".encode() in kept for norm in norms)


def test_updates_within_the_clip_norm_are_not_noted(caplog: pytest.LogCaptureFixture):
    done = simulate(secure_job(3, threshold=3, clip_norm=100.0))
    assert not [e for e in done.view.warnings if "scales" in e.message]
    assert not [r for r in caplog.records if "scales" in r.getMessage()]
