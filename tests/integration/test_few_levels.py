"""Runs whose updates leave in few levels, and whose sites follow the opened sum.

Everything is the product's own: sites, state, masks, rounds. What every site kept after
every round is read from its store afterwards, so that nothing can be counted twice or
lost without a test seeing it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from support.lying_sites import Lies
from support.secure_runs import MASK, Answer, Run, Spoilt, run, secure_job, step_of
from support.without_report import simulate

from clients.privacy.residual import Residual, stored
from cloud_adapters.storage.memory import MemoryStore
from deploy.tools import transcript_reader
from federation import events
from federation.compression.change import digest
from federation.compression.rotation import padded
from federation.errors import FederationError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.messages import FailureKind, RoundTask, SiteFailure, SiteMessage, Task
from privacy.secagg.agreement.certificate import Certificate
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import rotation_of
from privacy.secagg.arithmetic.levels import LevelPlan, largest_step, return_
from privacy.secagg.protocol.train import TrainBody, read_train, write_train

pytestmark = pytest.mark.slow

every_optimizer = pytest.mark.parametrize(
    "optimizer", ["average", "momentum", "nesterov", "adagrad", "adam", "yogi"]
)
RUN_ID = RunId("run-1")
SITE = SiteId("site-1")
SUMS: dict[str, Any] = {"communication": {"down_content": "sum"}}
UNIFORM: dict[str, Any] = {"aggregation": {"weights": "uniform"}}
ROUNDS = 4  # As many states as a site keeps.


def level_job(num_sites: int = 4, **changes: Any) -> JobSpec:
    values: dict[str, Any] = {"threshold": num_sites, "levels": 4, "rounds": ROUNDS}
    values |= {
        "clip_norm": 1.0,
        "training": {"local_steps": 3, "optimizer": {"lr": 0.1}},
    }
    given = {name: value for name, value in (values | changes).items() if value}
    return secure_job(num_sites, **given)


# --- Bits ----------------------------------------------------------------------

PROGRAM = """
import hashlib
import numpy as np
from federation.job.spec import ServerOptimizerSpec
from federation.rounds.server_optimizer import server_optimizer, take_step
from federation.vectors import Layout, Role
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import rotation_of
from privacy.secagg.arithmetic.levels import LevelPlan, open_levels

size, found = 3 * 17 * 4096 - 11, hashlib.sha256()
layout = Layout.build([("weight", (size,), "float32", Role.PARAMETER)])
rng = np.random.default_rng(1)
for levels, sites in ((4, 4), (256, 16), (256, 64)):
    digits = Digits(levels=levels, num_sites=sites)
    words = np.empty(digits.num_words(size), np.uint64)
    for group in digits.groups(size):
        drawn = rng.integers(0, digits.base, group.end - group.begin)
        digits.pack(drawn.astype(np.float32), words[group.first : group.last])
    steps = rng.random(3 * 17).astype(np.float32) + np.float32(1e-3)
    opened = open_levels(
        words,
        plan=LevelPlan(levels=levels, steps_b=steps),
        digits=digits,
        rotation=rotation_of("run-1"),
        size=size,
        num_updates=sites,
        divisor=2.7,
    )
    for name in ("average", "momentum", "nesterov", "adagrad", "adam", "yogi"):
        optimizer = server_optimizer(ServerOptimizerSpec(name=name, lr=0.7))
        model = rng.standard_normal(size).astype(np.float32)
        moments = optimizer.init(size)
        for _ in range(2):
            model = take_step(
                optimizer,
                layout,
                weights_d=model,
                moments=moments,
                delta_f=opened.mean_d.copy(),
            )
        found.update(model.tobytes())
print(found.hexdigest())
"""
SETTINGS = (
    {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Prescott"},
    {"OPENBLAS_NUM_THREADS": "2", "OPENBLAS_CORETYPE": "Haswell"},
)


def test_bits_of_a_model_do_not_depend_on_blas():
    """Kernels of other processors, other threads: the same digest, for every step."""
    found = set()
    for chosen in SETTINGS:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment | chosen,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1


def held_models(found: Run) -> dict[str, str]:
    """Digest of the model that each site holds."""
    return {name: digest(site._held._held_d) for name, site in found.sites.items()}


class Sent:
    """What travels down, and who was sent what."""

    def __init__(self) -> None:
        self.wholes: list[tuple[int, str]] = []
        self.sums: list[tuple[int, str]] = []

    def __call__(self, task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if isinstance(task, RoundTask):
            kind = self.sums if task.changed_to else self.wholes
            kind.append((task.round_index, task.site))
        return (answer(),)


@every_optimizer
def test_sites_that_follow_sums_have_the_servers_model(optimizer: str):
    """Bit for bit that of the aggregator, and of a run that sends models."""
    server = {"name": optimizer, "lr": 0.7 if optimizer != "average" else 1.0}
    aggregation = {"aggregation": {"server_optimizer": server}}
    sent = Sent()
    followed = run(level_job(**aggregation, **SUMS), fault=sent)
    plain = run(level_job(**aggregation))
    assert followed.statuses() == ["completed"] * ROUNDS
    assert plain.state.weights_d.tobytes() == followed.state.weights_d.tobytes()
    models = held_models(followed)
    assert set(models.values()) == {digest(followed.state.weights_d)}
    assert {index for index, _ in sent.wholes} == {1}
    assert len(sent.sums) == 4 * ROUNDS  # Of later rounds, and of the evaluation.


@pytest.mark.parametrize("optimizer", ["average", "momentum", "adam"])
def test_restarted_site_gets_the_whole_model_and_follows_again(optimizer: str):
    """With the state of the optimiser, or the next step would be another one."""
    job = level_job(
        threshold=3,
        rounds=6,
        aggregation={"server_optimizer": {"name": optimizer}},
        **SUMS,
    )
    sent, restarts = Sent(), Restarts()
    found = run(job, fault=sent, wraps={SITE: restarts.wrap})
    assert found.statuses() == ["completed"] * 6
    assert SITE not in found.answered(3)
    assert SITE in found.answered(4)
    assert (4, SITE) in sent.wholes
    assert [index for index, site in sent.sums if site == SITE] == [2, 3, 5, 6, 7]
    models = {
        name: digest(restarts.site._held._held_d if name == SITE else one._held._held_d)
        for name, one in found.sites.items()
    }
    assert set(models.values()) == {digest(found.state.weights_d)}


class Redelivered:
    """A site that receives every task of a round twice, and answers both."""

    def __init__(self, site: Any) -> None:
        self.site = site
        self.second: dict[int, SiteMessage] = {}

    def handle(self, task: Task) -> SiteMessage:
        first: SiteMessage = self.site.handle(task)
        if isinstance(task, RoundTask):
            self.second[task.round_index] = self.site.handle(task)
        return first


def test_redelivered_task_is_refused_as_answered():
    """Not as one for which the site has no keys: that costs a new setup."""
    twice: list[Redelivered] = []

    def wrap(site: Any) -> Redelivered:
        twice.append(Redelivered(site))
        return twice[0]

    sent = Sent()
    found = run(level_job(**SUMS), fault=sent, wraps={SITE: wrap})
    assert found.statuses() == ["completed"] * ROUNDS
    kinds = {
        index: (answer.kind, "already answered" in answer.message)
        for index, answer in twice[0].second.items()
        if isinstance(answer, SiteFailure)
    }
    refused = (FailureKind.DUPLICATE, True)
    assert kinds == dict.fromkeys(range(1, ROUNDS + 2), refused)
    assert {index for index, _ in sent.wholes} == {1}


class Restarts:
    """A site that loses its memory just before the task of round 3."""

    def __init__(self) -> None:
        self.site: Any = None
        self._done = False

    def wrap(self, site: Any) -> "Restarts":
        self.site = site
        return self

    def handle(self, task: Task) -> SiteMessage:
        if isinstance(task, RoundTask) and task.round_index == 3 and not self._done:
            self._done = True
            self.site = _fresh(self.site)
        message: SiteMessage = self.site.handle(task)
        return message


def _fresh(site: Any) -> Any:
    """The same site in a new process: its store and its memory of rounds remain."""
    links, optimizer = site._held._links, site._held._optimizer
    return type(site)(
        site.name,
        make_trainer=site.make_trainer,
        state=site.state,
        clock=site.clock,
        seal=type(site._seal)(site.name, site._seal._protection),
        links=links,
        optimizer=optimizer,
        tells_all=False,
    )


# --- What each round left --------------------------------------------------------


@dataclass
class Books:
    """What a run's sites computed, sent and kept; each site's tasks are noted."""

    job: JobSpec
    drops: Mapping[int, tuple[str, str]]
    store: MemoryStore = field(default_factory=MemoryStore)
    shown: dict[tuple[str, int], int] = field(default_factory=dict)
    named: dict[tuple[str, int], int] = field(default_factory=dict)
    models: dict[int, np.ndarray] = field(default_factory=dict)
    updates: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    run: Run | None = None

    def play(self) -> "Books":
        names = [site.name for site in self.job.sites]
        wraps = dict.fromkeys(names, self._noting)
        self.run = run(self.job, wraps=wraps, fault=self._fault, store=self.store)
        return self

    def _noting(self, site: Any) -> Any:
        trainer, books = site._current_trainer(), self

        class Noting:
            def __getattr__(self, name: str) -> Any:
                return getattr(trainer, name)

            def fit(
                self, weights_d: Any, *args: Any, round_index: int, **k: Any
            ) -> Any:
                result = trainer.fit(weights_d, *args, round_index=round_index, **k)
                change_d = result.weights_d - weights_d
                books.updates[site.name, round_index] = change_d
                return result

        site._trainer = Noting()
        return site

    def _fault(self, task: Task, answer: Answer) -> Sequence[SiteMessage]:
        site, kind = self.drops.get(task.round_index, ("", ""))
        is_round = isinstance(task, RoundTask)
        if task.site == site and kind == "unasked" and step_of(task) == MASK:
            return ()
        if is_round:
            assert isinstance(task, RoundTask)
            body = read_train(task.secure)
            certified = Certificate.from_bytes(body.certificate).opened.round_index
            self.shown[task.site, task.round_index] = certified
            self.named[task.site, task.round_index] = task.state_round
            self.models[task.round_index] = task.weights_d.copy()
        message = answer()
        if task.site == site and (kind, step_of(task)) in {
            ("answer lost", MASK),
            ("no consent", "survivors"),
            ("no shares", "reveal"),
        }:
            return ()
        return (message,)

    def contract(self) -> Contract:
        assert self.run is not None
        site = self.run.sites[SITE]
        return site._seal._session.contract  # type: ignore[no-any-return]

    def residuals(self, site: str) -> dict[int, Residual]:
        """By round, what a site stored after it."""
        assert self.run is not None
        state, found = self.run.sites[site].state, {}
        for index in range(1, self.job.rounds + 1):
            kept = state.before(RUN_ID, index + 1)
            one = stored(kept, self.contract())
            if one is not None and one.round_index == index:
                found[index] = one
        return found

    def sent(self, one: Residual) -> np.ndarray:
        """What a site's words of a round stand for."""
        value_d = np.zeros_like(one.left_d)
        levels = one.plan.levels
        digits = Digits(levels=levels, num_sites=self.contract().num_sites)
        return_(value_d, one.words_w, plan=one.plan, digits=digits)
        return value_d

    def rotated(self, update_d: np.ndarray) -> np.ndarray:
        whole = np.zeros(padded(update_d.size), np.float32)
        whole[: update_d.size] = update_d
        rotation = rotation_of(RUN_ID)
        return rotation.forward(whole.copy(), out=whole)

    def completed(self) -> dict[int, tuple[str, ...]]:
        assert self.run is not None
        return {
            event.round_index: event.answered
            for event in self.run.seen
            if isinstance(event, events.RoundFinished) and event.status == "completed"
        }

    def was_told_that_it_is_out(self, site: str, index: int, at: int) -> bool:
        """By the certificate of the round, in the task of another round."""
        summed = self.completed().get(index)
        is_shown = self.shown.get((site, at)) == index
        return summed is not None and site not in summed and is_shown

    def check(self) -> None:
        """Each update is in one sum, or comes back, or its fate is unknown."""
        sums: dict[int, np.ndarray] = {}
        for spec in self.job.sites:
            found = self.residuals(spec.name)
            for index, one in found.items():
                before = found.get(self.named[spec.name, index])
                carried = np.zeros_like(one.left_d)
                if before is not None:
                    carried = before.left_d.copy()
                    last = before.round_index
                    if self.was_told_that_it_is_out(spec.name, last, index):
                        carried += self.sent(before)
                expected = self.rotated(self.updates[spec.name, index]) + carried
                rounded = self.sent(one) + one.left_d
                np.testing.assert_allclose(expected, rounded, atol=1e-6)
                if spec.name in self.completed().get(index, ()):
                    part = sums.setdefault(index, np.zeros_like(one.left_d))
                    part += self.sent(one)
        self._check_models(sums)

    def _check_models(self, sums: Mapping[int, np.ndarray]) -> None:
        assert self.run is not None
        self.models[self.job.rounds + 1] = self.run.state.weights_d
        for index, model_d in self.models.items():
            later = [i for i in self.models if i > index]
            if not later:
                continue
            change_d = self.models[min(later)] - model_d
            summed = self.completed().get(index, ())
            expected = np.zeros(padded(model_d.size), np.float32)
            if summed:
                expected = sums[index] / len(summed)
            rotation = rotation_of(RUN_ID)
            whole_d = rotation.backward(expected, np.ones(1), exact=False)
            np.testing.assert_allclose(whole_d[: model_d.size], change_d, atol=1e-6)


KINDS = ("unasked", "answer lost", "no consent", "no shares")
drops = st.dictionaries(
    st.integers(1, ROUNDS),
    st.tuples(st.sampled_from([f"site-{i}" for i in range(4)]), st.sampled_from(KINDS)),
)


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],  # A run takes seconds: nothing is shrunk.
    suppress_health_check=[HealthCheck.too_slow],
)
@given(drops=drops)
def test_whoever_drops_out_nothing_is_counted_twice(
    drops: Mapping[int, tuple[str, str]],
):
    """Three of four are enough: a site that is left out gets its update back."""
    job = level_job(threshold=3, evaluation={"every": 0}, **UNIFORM)
    books = Books(job, drops).play()
    assert books.run is not None
    assert books.run.statuses() == ["completed"] * ROUNDS
    books.check()


@pytest.mark.parametrize("levels", [3, 256])
def test_site_that_is_left_out_twice_gets_both_back(levels: int):
    """Whatever the levels are."""
    drops = {2: ("site-1", "answer lost"), 3: ("site-1", "answer lost")}
    job = level_job(threshold=3, levels=levels, evaluation={"every": 0}, **UNIFORM)
    books = Books(job, drops).play()
    books.check()
    assert books.was_told_that_it_is_out("site-1", 2, 3)
    assert books.was_told_that_it_is_out("site-1", 3, 4)


def test_site_that_is_out_and_then_fails_begins_with_none_like_all_others():
    """It has kept nothing of the newest round, and the others not what it has."""
    books = Books(
        level_job(threshold=3, evaluation={"every": 0}, **UNIFORM),
        {2: ("site-1", "answer lost")},
    )
    noting = books._noting

    def failing(site: Any) -> Any:
        noted = noting(site)
        trainer = noted._trainer

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(trainer, name)

            def fit(self, *args: Any, round_index: int, **named: Any) -> Any:
                if round_index == 3:
                    raise OSError("no space")
                return trainer.fit(*args, round_index=round_index, **named)

        if site.name == SITE:
            noted._trainer = Failing()
        return noted

    books._noting = failing  # type: ignore[method-assign]
    books.play()
    assert set(books.residuals(SITE)) == {1, 2, 4}
    assert books.shown[SITE, 3] == 2
    assert books.shown[SITE, 4] == 3
    assert [books.named[f"site-{i}", 4] for i in range(4)] == [0] * 4
    books.check()


@pytest.mark.parametrize("kind", ["unasked", "answer lost"])
def test_update_of_a_lost_round_is_spent(kind: str):
    """Where all must answer, nobody signs who is in a sum that was never opened."""
    job = level_job(evaluation={"every": 0}, **UNIFORM)
    books = Books(job, {2: ("site-1", kind)}).play()
    assert books.run is not None
    assert books.run.statuses() == ["completed", "lost", "completed", "completed"]
    books.check()
    assert set(books.residuals("site-2")) == {1, 2, 3, 4}


def test_states_of_two_rounds_differ():
    """Or the books above would balance whatever was written in them."""
    books = Books(level_job(evaluation={"every": 0}, **UNIFORM), {}).play()
    first, *_, last = books.residuals(SITE).values()
    assert np.abs(first.left_d).max() > 0
    assert first.left_d.tobytes() != last.left_d.tobytes()
    assert (first.plan.levels, last.plan.levels) == (16384, 4)


# --- Residuals on disk -------------------------------------------------------------


def states(store: MemoryStore, site: str = SITE) -> list[str]:
    return [one.key for one in store.list(f"sites/{site}/state-")]


def spoiling(spoil: Callable[[MemoryStore, str], None], store: MemoryStore) -> Any:
    """Change the state of a site before it is asked for round 3."""
    done: list[str] = []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if step_of(task) == MASK and (task.site, task.round_index) == (SITE, 3):
            for key in states(store) if not done else ():
                spoil(store, key)
                done.append(key)
        return (answer(),)

    return fault


def flip(store: MemoryStore, key: str) -> None:
    data = bytearray(store.read(key))
    data[-5] ^= 1
    store.delete(key)
    store.put(key, [bytes(data)])


def test_damaged_residual_is_refused(caplog: pytest.LogCaptureFixture):
    """In one line, at the site, that says what to do; the others continue."""
    store = MemoryStore()
    job = level_job(threshold=3)
    found = run(job, store=store, fault=spoiling(flip, store))
    assert SITE not in found.answered(3)
    assert {site for site, _ in found.failures(3)} == {SITE}
    assert "not match its digest" in caplog.text
    assert "to start afresh" in caplog.text


def test_deleted_residual_has_all_sites_begin_anew(caplog: pytest.LogCaptureFixture):
    """The site says so, and is back in the next round; what was left out is lost."""
    store = MemoryStore()
    found = run(
        level_job(threshold=3),
        store=store,
        fault=spoiling(lambda store, key: store.delete(key), store),
    )
    assert SITE not in found.answered(3)
    assert "the state of round 2" in caplog.text
    assert SITE in found.answered(4)
    assert any("begin with none" in said for said in found.warnings())


def test_levels_may_not_change_on_resume():
    """The residual, and the contract, are of the job."""
    store, stop = MemoryStore(), Stop(after=2)
    run(level_job(), store=store, fault=stop, stop_requested=stop.is_due)
    with pytest.raises(FederationError, match=r"privacy\.secure_aggregation\.levels"):
        run(level_job(levels=8), store=store)
    done = run(level_job(), store=store)
    assert done.state.round_index >= ROUNDS


@dataclass
class Stop:
    """Stops a run after some rounds."""

    after: int
    seen: int = 0

    def __call__(self, task: Task, answer: Answer) -> Sequence[SiteMessage]:
        self.seen = max(self.seen, task.round_index)
        return (answer(),)

    def is_due(self) -> bool:
        return self.seen >= self.after


# --- A malicious aggregator ----------------------------------------------------------


def with_body(change: Callable[[TrainBody], TrainBody]) -> Callable[[Any], Task]:
    def spoil(task: RoundTask) -> RoundTask:
        return replace(task, secure=write_train(change(read_train(task.secure))))

    return spoil


def raw(change: Callable[[bytes], bytes]) -> Callable[[Any], Task]:
    def spoil(task: RoundTask) -> RoundTask:
        return replace(task, secure=change(task.secure))

    return spoil


def with_steps(factor: float) -> Callable[[TrainBody], TrainBody]:
    def change(body: TrainBody) -> TrainBody:
        assert body.plan is not None
        steps_b = body.plan.steps_b * np.float32(factor)
        plan = LevelPlan(levels=body.plan.levels, steps_b=steps_b)
        return replace(body, plan=plan)

    return change


def with_levels(levels: int) -> Callable[[TrainBody], TrainBody]:
    def change(body: TrainBody) -> TrainBody:
        assert body.plan is not None
        return replace(body, plan=LevelPlan(levels=levels, steps_b=body.plan.steps_b))

    return change


def steps_of(data: bytes, value: float) -> bytes:
    """The bytes of a task whose only step is another number; divisor is 8 bytes."""
    end = len(data) - 8
    return data[: end - 4] + np.array([value], "<f4").tobytes() + data[end:]


def flipped_words(task: RoundTask) -> RoundTask:
    words_w = task.weights_d.copy()
    words_w[0] ^= np.uint64(1)
    return replace(task, weights_d=words_w)


WRONG: dict[str, tuple[Callable[[Any], Task], str]] = {
    "no plan": (
        with_body(lambda body: replace(body, plan=None)),
        "no levels to round to",
    ),
    "other levels": (
        with_body(with_levels(8)),
        "round to 8 levels, and the contract says 4",
    ),
    "huge steps": (with_body(with_steps(1e6)), "and honest sums give at most"),
    "infinite step": (raw(lambda data: steps_of(data, np.inf)), "positive, finite"),
    "negative step": (raw(lambda data: steps_of(data, -1.0)), "positive, finite"),
    "step is no number": (raw(lambda data: steps_of(data, np.nan)), "positive, finite"),
    "divisor of no weights": (
        with_body(lambda body: replace(body, divisor=99.0)),
        "weights of 4 updates sum to 99.0",
    ),
    "divisor is 0": (
        with_body(lambda body: replace(body, divisor=0.0)),
        "weights of 4 updates sum to 0.0",
    ),
    "other divisor": (
        with_body(lambda body: replace(body, divisor=body.divisor / 2)),
        "found a different model than the aggregator did from the same sum",
    ),
    "other words": (flipped_words, "sum of round 2 that is not the certified one"),
    "words cut": (
        lambda task: replace(task, weights_d=task.weights_d[:-1]),
        "sum of round 2 that is not the certified one",
    ),
    "floats for words": (
        lambda task: replace(task, weights_d=np.zeros(15, np.float32)),
        "sum of round 2 that is not the certified one",
    ),
    "words for a model": (
        lambda task: replace(task, changed_to=""),
        "was sent a model of type uint64",
    ),
    "digest of another model": (
        lambda task: replace(task, changed_to="0" * 64),
        "found a different model than the aggregator did from the same sum",
    ),
    "model cut": (
        lambda task: replace(task, changed_to="", weights_d=np.zeros(9, np.float32)),
        "was sent 9 values for a model of 15",
    ),
    "another whole model": (
        lambda task: replace(task, changed_to="", weights_d=np.zeros(15, np.float32)),
        "not the one that the certificate of round 2 names",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_task_is_refused(case: str, caplog: pytest.LogCaptureFixture):
    """In one line; the others continue, and the site is back in the next round."""
    change, said = WRONG[case]
    wraps = {SITE: lambda site: Spoilt(site, task=change, round_index=3)}
    found = run(level_job(threshold=3, **SUMS), wraps=wraps)
    assert SITE not in found.answered(3)
    assert SITE in found.answered(4)
    ((_, message),) = {one for one in found.failures(3) if one[0] == SITE}
    assert said in message or said in caplog.text
    assert "\n" not in message
    assert {digest(found.state.weights_d)} == set(held_models(found).values())


def test_replayed_sum_is_refused(caplog: pytest.LogCaptureFixture):
    """That of round 1, signed as it was, once more in round 3."""
    kept: list[RoundTask] = []

    def replay(task: RoundTask) -> RoundTask:
        body, old = read_train(task.secure), read_train(kept[0].secure)
        stale = replace(body, certificate=old.certificate, divisor=old.divisor)
        words = {"weights_d": kept[0].weights_d, "changed_to": kept[0].changed_to}
        return replace(task, secure=write_train(stale), **words)

    def note(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if isinstance(task, RoundTask) and (task.site, task.round_index) == (SITE, 2):
            kept.append(replace(task, weights_d=task.weights_d.copy()))
        return (answer(),)

    wraps = {SITE: lambda site: Spoilt(site, task=replay, round_index=3)}
    found = run(level_job(threshold=3, rounds=5, **SUMS), wraps=wraps, fault=note)
    assert SITE not in found.answered(3)
    assert SITE in found.answered(5)
    assert "no keys for this" in caplog.text
    assert {digest(found.state.weights_d)} == set(held_models(found).values())


@pytest.mark.parametrize("factor", [0.5, 1.0000001])
def test_steps_of_its_own_for_one_site_open_nothing(factor: float):
    """Steps are in every mask key: what remains are masks, which are no sum."""
    change = with_body(with_steps(factor))
    wraps = {SITE: lambda site: Spoilt(site, task=change, round_index=3)}
    found = run(level_job(), wraps=wraps)
    assert found.statuses() == ["completed", "completed", "lost", "completed"]
    assert any("round 3 has no sum" in line for line in found.warnings())


@pytest.mark.parametrize("down", ["model", "sum"])
def test_whole_model_for_one_site_alone_changes_nothing(down: str):
    """Its update is in the same sum, of the same model, under the same masks."""
    whole: dict[int, np.ndarray] = {}

    def send_whole(task: RoundTask) -> RoundTask:
        body = replace(read_train(task.secure), divisor=0.0)
        model = {"weights_d": whole[3], "changed_to": ""}
        return replace(task, secure=write_train(body), **model)

    job = level_job(communication={"down_content": down})
    plain = run(
        replace(job, communication=level_job().communication), fault=keep(whole)
    )
    wraps = {SITE: lambda site: Spoilt(site, task=send_whole, round_index=3)}
    found = run(job, wraps=wraps)
    assert found.statuses() == ["completed"] * ROUNDS
    assert plain.state.weights_d.tobytes() == found.state.weights_d.tobytes()


def keep(models: dict[int, np.ndarray]) -> Any:
    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if isinstance(task, RoundTask):
            models[task.round_index] = task.weights_d.copy()
        return (answer(),)

    return fault


# --- A malicious site ----------------------------------------------------------------


def add_to(place: int, amount: int) -> Callable[[np.ndarray], None]:
    def lie(words_w: np.ndarray) -> None:
        words_w[place : place + 1 or None] += np.uint64(amount)

    return lie


LIES: dict[str, tuple[Lies, str]] = {
    "word beyond its digits": (
        Lies(vector=add_to(0, 13**17 + 5)),
        "is beyond 17 digits of base 13",
    ),
    "digit without a value": (
        Lies(vector=add_to(-1, 13**16)),
        "digits without a value are not 0",
    ),
    "squares below 0": (
        Lies(header={"energy": -(1 << 50)}),
        "squares of 4 updates sum to -",
    ),
    "squares beyond all": (
        Lies(header={"energy": 100 << 32}),
        "squares of 4 updates sum to",
    ),
    "more clipped than there are": (
        Lies(header={"clipped": 4 * 4096 + 1}),
        "values were clipped",
    ),
    "fewer clipped than none": (
        Lies(header={"clipped": -(1 << 20)}),
        "clipped",
    ),
}


@pytest.mark.parametrize("case", LIES)
def test_lie_of_a_site_loses_the_round(case: str):
    """And the record says that someone lied."""
    lies, said = LIES[case]
    found = run(level_job(), wraps={SITE: lies.told_by})
    assert found.statuses() == ["completed", "lost", "completed", "completed"]
    (warning,) = [line for line in found.warnings() if "has no sum" in line]
    assert said in warning
    assert "a site lied" in warning


def test_steps_stay_within_bounds_however_long_a_site_lies():
    """Squares that an honest site could have: the run goes on, and nothing grows."""
    seen: list[float] = []

    def note(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if isinstance(task, RoundTask) and step_of(task) == MASK:
            plan = read_train(task.secure).plan
            assert plan is not None
            seen.append(float(plan.steps_b.max()))
        return (answer(),)

    def lying(site: Any) -> Any:
        for index in range(1, 9):
            Lies(header={"energy": 40 << 32}, round_index=index).told_by(site)
        return site

    found = run(level_job(rounds=8), wraps={SITE: lying}, fault=note)
    assert found.statuses() == ["completed"] * 8
    assert max(seen) <= largest_step(4, clip_norm=1.0)
    assert max(seen) > 0.01


# --- Privacy -------------------------------------------------------------------


def test_epsilon_of_records_is_that_without_levels():
    """Everything after the noise of a step is post-processing."""
    private = {"unit": "record", "target_epsilon": 40.0, "held_out": "public"}

    def played(**levels: Any) -> list[Any]:
        training = {"local_steps": 3, "batch_size": 4, "optimizer": {"lr": 0.1}}
        job = level_job(rounds=6, training=training, **UNIFORM, **levels)
        privacy = replace(
            job.privacy,
            differential_privacy=replace(
                job.privacy.differential_privacy,
                **private,  # type: ignore[arg-type]
            ),
        )
        found = run(replace(job, privacy=privacy))
        assert found.statuses() == ["completed"] * 6
        return [e.epsilon for e in found.seen if isinstance(e, events.RoundFinished)]

    few, many = played(), played(levels=None)
    assert few == many
    assert all(value is not None and value > 0 for value in few)


def test_transcript_shows_levels_and_sums(tmp_path: Path):
    """What travels down in place of a model, and with which steps it was made."""
    simulate(level_job(**SUMS), transcript=tmp_path / "seen")
    tasks = [
        {part["name"]: part for part in row["sections"]}
        for row in transcript_reader.read(tmp_path / "seen")
        if row["kind"] == "task" and row["round"] == 3
    ]
    assert len(tasks) == 4
    for task in tasks:
        assert task["weights_d"]["holds"].startswith("the last opened sum")
        assert task["secure"]["fields"]["plan.levels"] == 4
        assert len(task["secure"]["fields"]["plan.steps_b"]) == 2 * 4
        assert task["secure"]["fields"]["divisor"] > 0
