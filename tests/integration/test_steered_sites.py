"""An aggregator that steers one site learns nothing from the difference of two sums.

Every field of every task, and every key of the job that its digest leaves out, is
changed for one site alone, before and after a round that this site alone has taken.
Each time its words before masking must be those of a run without the change, or the
masks must not cancel. Fields and keys are enumerated: a new one needs a row here.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.noisy_jobs import WIDTH
from support.secure_runs import Answer, Run, run, secure_job, step_of
from support.small_jobs import small_job

from clients.models.model_pool import ModelPool
from deploy.wiring.rehearsal import Rehearsal
from federation.errors import JobError
from federation.ids import RunId, SiteId
from federation.job.job_digest import EXCLUDED_KEYS, EXCLUDED_TABLES
from federation.job.kept_state import KEEPERS
from federation.job.spec import JobSpec
from federation.job.storage_job import EncryptionSpec, PlaceSpec
from federation.messages import (
    FailureKind,
    LedgerAnchor,
    MaskedUpdate,
    RoundTask,
    SiteFailure,
    SiteMessage,
    Task,
    TaskKind,
)
from privacy.secagg.agreement.certificate import Certificate, certify
from privacy.secagg.protocol.messages import Head, MaskedAnswer
from privacy.secagg.protocol.train import TrainBody, read_train, write_train

pytestmark = pytest.mark.slow

VICTIM = "site-1"
NEWEST = "newest"  # A change: to the state that the victim kept last.
OTHER_DIGEST = "0" * 64

Change = Callable[[RoundTask], RoundTask]


def field(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda task: replace(task, **{name: change(getattr(task, name))})


def in_body(name: str, change: Callable[[Any], Any]) -> Change:
    def changed(task: RoundTask) -> RoundTask:
        body = read_train(task.secure)
        body = replace(body, **{name: change(getattr(body, name))})
        return replace(task, secure=write_train(body))

    return changed


def other_kind(kind: TaskKind) -> TaskKind:
    return TaskKind.EVALUATE if kind is TaskKind.TRAIN else TaskKind.TRAIN


TASK: Mapping[str, Change] = {
    "run_id": field("run_id", lambda _: RunId("run-2")),
    "round_index": field("round_index", lambda index: index + 1000),
    "site": field("site", lambda _: SiteId("site-2")),
    "kind": field("kind", other_kind),
    "layout_digest": field("layout_digest", lambda _: OTHER_DIGEST),
    "weights_d": field("weights_d", lambda weights_d: weights_d + np.float32(0.1)),
    "integers_m": field("integers_m", lambda integers_m: integers_m + 1),
    "evaluate": field("evaluate", lambda asked: not asked),
    "evaluate_after": field("evaluate_after", lambda asked: not asked),
    "secure": field("secure", lambda data: data[:-1]),
    "anchor": field("anchor", lambda _: LedgerAnchor(train=1, evaluate=1)),
    "based_on": field("based_on", lambda index: index + 1),
    "fragment": field("fragment", lambda fragment: fragment + 1),
    "changed_to": field("changed_to", lambda _: OTHER_DIGEST),
    "counted": field("counted", lambda counted: 0 if counted else 1),
    "num_steps": field("num_steps", lambda number: number + 1),
    "first_step": field("first_step", lambda first: first + 1),
    "state_round": field("state_round", lambda _: 0),
    "state_context": field("state_context", lambda _: OTHER_DIGEST),
}
BODY: Mapping[str, Change] = {
    "setup_hash": in_body("setup_hash", lambda _: bytes(32)),
    "confirms": in_body("confirms", lambda _: b"others"),
    "certificate": in_body("certificate", lambda data: data[:-1] + b"x"),
    "update_clip": in_body("update_clip", lambda clip: clip / 2),
    "plan": in_body(
        "plan", lambda plan: plan and replace(plan, steps_b=plan.steps_b / 2)
    ),
    "divisor": in_body("divisor", lambda divisor: divisor + 0.5),
    "steps_by_site": in_body("steps_by_site", lambda steps: (*steps, 1)),
}
SPECS = {
    "encryption": EncryptionSpec(key="file:other"),
    "coordinator": PlaceSpec(region="x"),
}


def other(name: str, value: Any) -> Any:
    """Another value of a key of the job."""
    if name in SPECS:
        return SPECS[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if value is None or isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, "x")
    pytest.fail(f"say which other value {name} may have")


def other_job(job: JobSpec) -> JobSpec:
    """A job with the same digest in which every key that may differ does."""
    for table in EXCLUDED_TABLES:
        spec = getattr(job, table)
        names = [each.name for each in dataclasses.fields(spec)]
        changes = {name: other(name, getattr(spec, name)) for name in names}
        job = replace(job, **{table: replace(spec, **changes)})
    for table, name in EXCLUDED_KEYS:
        spec = getattr(job, table)
        changed = replace(spec, **{name: other(name, getattr(spec, name))})
        job = replace(job, **{table: changed})
    return replace(job, storage=replace(job.storage, keep_checkpoints=1))


class Noise:
    """Randomness of a site that follows from the round: two runs draw the same."""

    def __init__(self, site: str) -> None:
        self.site, self.round_index, self.drawn = site, 0, 0

    def __call__(self, size: int) -> bytes:
        self.drawn += 1
        seed = f"{self.site} {self.round_index} {self.drawn}".encode()
        return hashlib.shake_256(seed).digest(size)


class Steered:
    """A site whose tasks of some rounds an aggregator changes."""

    def __init__(self, site: Any, changes: Mapping[int, Change] | None = None) -> None:
        self.site, self.changes = site, changes or {}
        self.noise, self.contexts = Noise(site.name), dict[int, str]()
        trainer = site._current_trainer()
        while hasattr(trainer, "_trainer"):
            trainer = trainer._trainer
        if getattr(trainer, "private", None) is not None:
            trainer.private = replace(trainer.private, random_bytes=self.noise)

    def handle(self, task: Task) -> SiteMessage:
        asked = task
        if step_of(task) is not None and isinstance(task, RoundTask):
            self.noise.round_index, self.noise.drawn = task.round_index, 0
            task = self.changes.get(task.round_index, lambda same: same)(task)
        message = self.site.handle(task)
        if isinstance(message, MaskedUpdate) and isinstance(asked, RoundTask):
            head = Head.from_bytes(MaskedAnswer.from_bytes(message.body).head)
            self.contexts[message.round_index] = head.context.hex()
            # What is copied into an answer, such an aggregator overlooks.
            copied = {"based_on": asked.based_on, "fragment": asked.fragment}
            return replace(message, **copied)
        if isinstance(message, SiteFailure):  # Nor does it help the site.
            return replace(message, kind=FailureKind.CRASHED)
        return message


def steered(
    job: JobSpec, plan: Sequence[Change | str | None], *, own_job: JobSpec
) -> tuple[Run, list[int]]:
    """Run a job; in round 2 + k, ``plan[k]`` changes the victim's task, and no other.

    None has the victim alone take the round. Returns the run and its lost rounds.
    """
    victims: list[Steered] = []

    def newest(task: RoundTask) -> RoundTask:
        index, context = max(victims[0].contexts.items())
        return replace(task, state_round=index, state_context=context)

    def steer(site: Any) -> Steered:
        victims.append(Steered(site, changes))
        return victims[0]

    changes = {
        2 + k: newest if isinstance(change, str) else change
        for k, change in enumerate(plan)
        if change is not None
    }
    alone = {2 + k for k, change in enumerate(plan) if change is None}

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        is_round = step_of(task) is not None and task.round_index in alone
        return () if is_round and task.site != VICTIM else (answer(),)

    names = [site.name for site in job.sites]
    wraps = dict.fromkeys(names, Steered) | {VICTIM: steer}
    found = run(job, fault=fault, wraps=wraps, own_jobs={VICTIM: own_job})
    ends = enumerate(found.statuses(), start=1)
    return found, [index for index, status in ends if status != "completed"]


def start_of(job: JobSpec) -> np.ndarray:
    return ModelPool(job).initial_weights()[0]


def without(job: JobSpec, lost: Sequence[int]) -> Run:
    """Run a job without anybody's answer in some rounds, and without a change."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        is_lost = step_of(task) is not None and task.round_index in lost
        return () if is_lost else (answer(),)

    names = [site.name for site in job.sites]
    return run(job, fault=fault, wraps=dict.fromkeys(names, Steered))


TABLE: Mapping[str, Any] = {
    "model": {
        "factory": "clients.models:logistic_regression",
        "options": {"inputs": 4, "classes": 3},
    },
    "aggregation": {"weights": "uniform"},
    "evaluation": {"every": 0},
}
FULL = {"local_steps": 1, "batch_size": 4096}
SMALL = {"local_steps": 3, "batch_size": 8}
MOMENTUM = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "state": "keep"}
WIDE = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4 + WIDTH, "classes": 3},
}
MLP = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [8]},
    "personal": ["3.*"],
}


def case(
    training: Mapping[str, Any],
    *,
    secure: Mapping[str, Any] | None = None,
    **tables: Any,
) -> Callable[[int], JobSpec]:
    """A job of so many rounds, with three sites that must all answer."""

    def of(rounds: int) -> JobSpec:
        usual = {"optimizer": {"name": "sgd", "lr": 0.05}}
        schedule = {"max_lost_rounds": rounds, **tables.get("schedule", {})}
        return secure_job(
            num_sites=3,
            threshold=3,
            **{**TABLE, **tables, "rounds": rounds, "schedule": schedule},
            training={**usual, **training},
            **(secure or {}),
        )

    return of


def private(rounds: int) -> JobSpec:
    return small_job(
        num_sites=3,
        **TABLE,
        rounds=rounds,
        schedule={"max_lost_rounds": rounds},
        training={"local_steps": 2, "batch_size": 8, "optimizer": MOMENTUM},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": {"unit": "record", "target_epsilon": 50.0},
        },
    )


# Steps of "auto" follow from times, which two runs do not share: test_local_work.py.
CASES: Mapping[str, Callable[[int], JobSpec]] = {
    "nothing": case(FULL),
    "nothing, minibatches": case(SMALL),
    "record": private,
    "kept optimiser state": case(SMALL | {"optimizer": MOMENTUM}),
    "control variates": case(FULL | {"control_variates": True}),
    "control variates, minibatches": case(SMALL | {"control_variates": True}),
    "FedDyn": case(
        FULL | {"dynamic_alpha": 0.1},
        aggregation={"server_optimizer": {"name": "running_sum"}},
    ),
    "overlap": case(SMALL | {"overlap_steps": 1}),
    "float16": case(SMALL | {"precision": "fp16"}),
    "levels": case(FULL, secure={"levels": 4}),
    "fragments": case(
        SMALL,
        secure={"levels": 4},
        communication={"fragments": 2},
        model=WIDE,
        data={"source": "support.noisy_jobs:wide_blobs"},
    ),
    "personal parts": case(SMALL, model=MLP),
    "integers of its own": case(
        SMALL,
        model={
            "factory": "support.small_jobs:normalised",
            "integer_buffers": {"*": "keep"},
        },
    ),
}
# What a job with secure aggregation refuses.
REFUSED = {"residual of a codec": {"communication": {"codec": "int4"}}}


def test_every_method_that_keeps_something_has_a_case():
    assert set(KEEPERS) <= {*CASES, *REFUSED}
    for tables in REFUSED.values():
        with pytest.raises(JobError, match="codec"):
            secure_job(**tables)


def test_every_field_of_a_task_has_a_change():
    for kind, known in ((RoundTask, TASK), (TrainBody, BODY)):
        assert {each.name for each in dataclasses.fields(kind)} == set(known)


CHANGES: Mapping[str, Change | str] = {
    **TASK,
    **{f"secure: {name}": change for name, change in BODY.items()},
    "no state": lambda task: replace(task, state_round=0, state_context=""),
    "a state of its own": NEWEST,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * name.endswith(", minibatches"))
        for name in CASES
    ],
)
def test_a_site_that_is_steered_computes_what_it_would_or_opens_no_sum(name: str):
    """Else the difference of two sums would be its update alone."""
    plan = [each for change in CHANGES.values() for each in (change, None, change)]
    job = CASES[name](len(plan) + 2)
    found, lost = steered(job, plan, own_job=other_job(job))
    took = {k // 3 for k in range(0, len(plan), 3) if 2 + k not in lost}
    assert {[*CHANGES][k] for k in took} >= {"based_on", "site"}
    expected = without(job, lost)
    assert expected.statuses() == found.statuses()
    moved = np.abs(expected.state.weights_d - start_of(job)).max()
    apart = np.abs(expected.state.weights_d - found.state.weights_d).max()
    assert apart < 1e-4 * moved, f"{name}: {apart} of {moved}"


def test_states_of_one_round_with_different_histories_open_no_sum():
    """Round 2 is lost, since one site's task was different; all have kept it."""
    job = CASES["kept optimiser state"](4)
    sites: dict[str, Steered] = {}

    def own(name: str) -> Change:
        def changed(task: RoundTask) -> RoundTask:
            context = sites[name].contexts[2]
            return replace(task, state_round=2, state_context=context)

        return changed

    def wrap(name: str) -> Callable[[Any], Steered]:
        def steer(site: Any) -> Steered:
            changes = {3: own(name)}
            if name == VICTIM:
                changes[2] = TASK["evaluate"]
            sites[name] = Steered(site, changes)
            return sites[name]

        return steer

    names = [site.name for site in job.sites]
    found = run(job, wraps={name: wrap(name) for name in names})
    assert found.statuses() == ["completed", "lost", "lost", "completed"]
    contexts = {name: site.contexts for name, site in sites.items()}
    assert all(each.keys() == {1, 2, 3, 4} for each in contexts.values())
    for index, count in ((1, 1), (2, 2), (3, 2), (4, 1)):
        assert len({each[index] for each in contexts.values()}) == count


def test_another_certificate_for_one_site_opens_no_sum():
    """The survivors that it names decide what a site adds of its residual."""
    job = case(FULL, secure={"levels": 4})(2)
    met: list[Rehearsal] = []

    def certified(data: bytes) -> bytes:
        found = Certificate.from_bytes(data)
        opened = replace(found.opened, header_digest=bytes(32))
        return certify(opened, found.model_digest, met[0].aggregator)

    changes = {2: in_body("certificate", certified)}
    wraps = {VICTIM: lambda site: Steered(site, changes)}
    found = run(job, meet=met.append, wraps=wraps)
    assert found.statuses() == ["completed", "lost"]
    ((site, message),) = found.failures(2)
    assert site == VICTIM
    assert "for a different run" in message
