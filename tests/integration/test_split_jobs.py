"""One contract and two jobs: sites are told to different jobs.

If all sites but one take steps of no length, the sum is that one's update. Sites and
messages are whole ones; the aggregator holds its key and writes what it likes.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import agents
from support.agents import AgentGrid, Consortium, consortium
from support.secure_runs import secure_job

from aggregator.secure_sum import SecureGather
from clients.models.model_pool import ModelPool
from clients.privacy.policy_spec import PolicySpec
from clients.privacy.site_policy import contract_policy
from cloud_adapters.local.inproc_grid import InProcessGrid
from federation import events
from federation.clock import SystemClock
from federation.errors import QuorumNotMet
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec
from federation.messages import RoundTask, TaskKind
from federation.protocols import RunState
from federation.rounds.round_record import RoundRecord
from privacy.secagg.agreement.policy import check_against_policy
from privacy.secagg.arithmetic.levels import LevelPlan
from privacy.secagg.errors import ContractRefused
from privacy.secagg.protocol.of_job import contract_of
from privacy.secagg.protocol.train import TrainBody, model_digest, task_digest

pytestmark = pytest.mark.slow

NAMES = tuple(f"site-{at}" for at in range(5))
VICTIM = NAMES[2]
PRIVATE = {
    "unit": "record",
    "clip_norm": 1.0,
    "target_epsilon": 50.0,
    "delta": 1e-3,
    "held_out": "public",
}


def real_job(setting: str) -> JobSpec:
    """A job of five sites: in P1, in P2, or with noise at every site."""
    threshold = 4 if setting == "P2" else 5
    job = secure_job(threshold=threshold, max_examples=100, aggregation=UNIFORM)
    if setting != "record":
        return job
    document = job_file.document(job)
    document["privacy"]["differential_privacy"] = PRIVATE
    document["training"]["batch_size"] = 4
    return job_file.parse(document)


UNIFORM = {"weights": "uniform"}


def idle(job: JobSpec) -> JobSpec:
    """The same job, with steps of no length."""
    training = job.training
    optimizer = replace(training.optimizer, lr=1e-30)
    return replace(job, training=replace(training, optimizer=optimizer))


class Splitter:
    """An aggregator that proposes a job of its own to each site."""

    def __init__(self, folder: Path, jobs: Mapping[str, JobSpec]) -> None:
        self.members: Consortium = consortium(*NAMES)
        policy = {**agents.OPEN_POLICY, "max_epsilon": 100.0, "max_delta": 0.1}
        self.grid = AgentGrid(
            {n: agents.agent(folder, n, self.members, policy=policy) for n in NAMES}
        )
        self.jobs = jobs
        self.promises: list[SitePrivacy] = []
        for name, job in jobs.items():
            answer = agents.propose(
                self.grid.agents[name], self.members, agents.proposal(job)
            )
            assert not answer.refused
            self.promises += [answer.privacy] if answer.privacy else []
        self.seen: list[events.Event] = []

    def sum(self, contract_job: JobSpec) -> np.ndarray:
        """Run a round under the contract of one job."""
        pool = ModelPool(contract_job)
        weights_d, integers_m = pool.initial_weights()
        contract = contract_of(
            contract_job,
            pool.layout,
            run_id=agents.RUN_ID,
            roster=self.members.roster,
            promises=self.promises,
        )
        state = RunState(
            round_index=0,
            weights_d=weights_d,
            integers_m=integers_m,
            optimizer={},
            rounds_completed=0,
            lost_in_a_row=0,
        )
        record = RoundRecord(
            job=contract_job,
            state=state,
            run_id=agents.RUN_ID,
            cohort=tuple(SiteId(name) for name in NAMES),
            layout=pool.layout,
            clock=SystemClock(),
            emit=self.seen.append,
        )
        names = [SiteId(name) for name in NAMES]
        handlers = {n: agents._Far(self.grid, n, is_absent=False) for n in names}
        with InProcessGrid(handlers, clock=SystemClock()) as grid:
            gather = SecureGather(
                contract_job,
                layout=pool.layout,
                grid=grid,
                identity=self.members.aggregator,
                contract=contract,
            )
            return gather.update(record, np.empty_like(weights_d))

    def complaints(self) -> dict[str, str]:
        """What was said of each site that failed."""
        failed = [e for e in self.seen if isinstance(e, events.SiteFailed)]
        return {e.site: e.message for e in failed}


def split(folder: Path, job: JobSpec) -> Splitter:
    """The real job to one site, steps of no length to the others."""
    return Splitter(folder, {n: job if n == VICTIM else idle(job) for n in NAMES})


@pytest.mark.parametrize("setting", ["P1", "P2", "record"])
def test_victim_alone_is_given_the_real_job(tmp_path: Path, setting: str):
    """Under the idle job's contract the victim refuses; under the real one all others.

    Either way there is no sum, and nobody's update was computed.
    """
    job = real_job(setting)
    attack = split(tmp_path, job)
    with attack.grid.connected():
        with pytest.raises(QuorumNotMet):
            attack.sum(idle(job))
        refused = attack.complaints()
        assert list(refused) == [VICTIM]
        assert "contract.job_digest" in refused[VICTIM]
        attack.seen.clear()
        with pytest.raises(QuorumNotMet):
            attack.sum(job)
        refused = attack.complaints()
        assert set(refused) == set(NAMES) - {VICTIM}
        assert all("contract.job_digest" in text for text in refused.values())


@pytest.mark.parametrize("setting", ["P1", "P2", "record"])
def test_one_job_for_all_gives_a_sum(tmp_path: Path, setting: str):
    """Or nothing above could fail."""
    job = real_job(setting)
    honest = Splitter(tmp_path, dict.fromkeys(NAMES, job))
    with honest.grid.connected():
        mean_d: Any = honest.sum(job)
    assert np.isfinite(mean_d).all()
    assert np.linalg.norm(mean_d) > 1e-3
    assert not honest.complaints()


# All that an aggregator may tell sites differently: it decides nothing.
FREE = {
    "storage",
    "simulation",
    "schedule.round_deadline_seconds",
    "schedule.grace",
    "schedule.memory_mib",
    "schedule.gpu_memory_mib",
}


def another(hint: Any, value: Any) -> Any:
    """A value of the same type that differs, whatever the checks of a job say."""
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
    if value is None:
        return None if dataclasses.is_dataclass(hint) else (another(hint, hint()))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return value[1:] if value else ("x",)
    assert isinstance(value, Mapping), f"no other {hint} is known"
    return {**value, "another": 1}


def changes(table: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job, also one added tomorrow, with the job in which it differs."""
    hints = typing.get_type_hints(type(table))
    for field in dataclasses.fields(table):
        key = f"{name}.{field.name}" if name else field.name
        value = getattr(table, field.name)
        if key in FREE:
            continue
        if dataclasses.is_dataclass(value):
            inner = changes(value, key)
            yield from ((k, replace(table, **{field.name: v})) for k, v in inner)
            continue
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for found, first in changes(value[0], f"{key}[0]"):
                yield found, replace(table, **{field.name: (first, *value[1:])})
        other = another(hints[field.name], value)
        if other != value:
            yield key, replace(table, **{field.name: other})


def test_no_key_of_the_job_may_differ():
    """Key by key: no site accepts the contract of a job that differs in one of them."""
    job = real_job("P2")
    layout, roster = ModelPool(job).layout, consortium(*NAMES).roster
    contract = contract_of(
        job, layout, run_id=agents.RUN_ID, roster=roster, promises=()
    )
    policy = contract_policy(
        job,
        layout,
        run_id=agents.RUN_ID,
        policy=PolicySpec(**{**agents.OPEN_POLICY, "functions": ()}),
        roster=roster,
        noise_share=None,
    )
    check_against_policy(contract, policy)
    tried = set()
    for key, changed in changes(job):
        other = replace(contract, job_digest=job_digest.digest(changed))
        with pytest.raises(ContractRefused, match="different jobs") as caught:
            check_against_policy(other, policy)
        assert caught.value.key == "job_digest", key
        tried.add(key)
    # Of those that matter most, in case the walk above finds too little.
    assert tried >= {
        "seed",
        "rounds",
        "training.optimizer.lr",
        "training.local_steps",
        "training.batch_size",
        "training.learning_rate.name",
        "model.options",
        "data.source",
        "evaluation.every",
        "aggregation.server_optimizer.lr",
        "privacy.differential_privacy.noise_multiplier",
        "privacy.secure_aggregation.clip_norm",
        "sites[0].name",
    }


def test_contract_of_another_run_is_refused():
    """Its rounds would be remembered under a name under which nothing was answered."""
    job = real_job("P1")
    layout, roster = ModelPool(job).layout, consortium(*NAMES).roster
    contract = contract_of(
        job, layout, run_id=agents.RUN_ID, roster=roster, promises=()
    )
    policy = contract_policy(
        job,
        layout,
        run_id=RunId("20260102-030405-000000"),
        policy=PolicySpec(**{**agents.OPEN_POLICY, "functions": ()}),
        roster=roster,
        noise_share=None,
    )
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, policy)
    assert caught.value.key == "run_id"


# What a task says, and why nobody gains by telling sites different things.
TASK = {
    "run_id": "the contract of the session says it, and the policy compares it",
    "round_index": "context",
    "site": "an agent answers for itself alone",
    "kind": "task digest",
    "layout_digest": "compared with the site's own model",
    "weights_d": "model digest",
    "integers_m": "model digest",
    "evaluate": "task digest",
    "evaluate_after": "task digest",
    "secure": "see BODY",
    "anchor": "compared with the site's own ledger; nothing is computed from it",
    "based_on": "copied into the answer; with 0 the model is compared with the job's",
    "fragment": "copied into the answer; nothing is computed from it",
    "changed_to": "compared with the model that the site finds; model digest",
    "counted": "task digest",
    "num_steps": "task digest",
    "first_step": "task digest, with the number; without one, the task has no steps",
    "state_round": "task digest; compared with what the site has kept",
    "state_context": "task digest; compared with what the site has kept",
}
BODY = {
    "setup_hash": "context",
    "confirms": "all must carry the setup's hash",
    "certificate": "compared and kept; task digest, if the task names a state",
    "update_clip": "task digest",
    "plan": "task digest; compared with the contract",
    "divisor": "compared with the contract; model digest of what follows",
    "steps_by_site": "task digest; compared with the task's own steps",
}


def test_every_word_of_a_task_is_bound_or_compared():
    """A field that is added must be given a place here, and in the digests."""
    for kind, known in ((RoundTask, TASK), (TrainBody, BODY)):
        assert {field.name for field in dataclasses.fields(kind)} == set(known)
    task = RoundTask(
        run_id=agents.RUN_ID,
        round_index=1,
        site=SiteId("a"),
        kind=TaskKind.TRAIN,
        layout_digest="",
        weights_d=np.arange(4, dtype=np.float32),
        integers_m=np.arange(2),
        evaluate=False,
        evaluate_after=False,
    )
    changed = {"kind": TaskKind.EVALUATE, "evaluate": True, "evaluate_after": True}
    changed |= {"counted": 1, "state_round": 1, "state_context": "0" * 64}
    body = TrainBody(setup_hash=b"", confirms=b"", certificate=b"one", update_clip=1.0)
    digests = {task_digest(task, body), task_digest(task, replace(body, update_clip=2))}
    digests |= {task_digest(replace(task, **{k: v}), body) for k, v in changed.items()}
    named = replace(task, state_round=1)
    digests |= {task_digest(named, replace(body, certificate=b"another"))}
    for first, number in ((0, 4), (4, 4), (0, 8)):
        steps = replace(task, first_step=first, num_steps=number)
        digests |= {task_digest(steps, body)}
    shown = replace(body, steps_by_site=(4, 8, 2))
    digests |= {
        task_digest(replace(task, num_steps=8), shown),
        task_digest(replace(task, num_steps=8, first_step=4), shown),
        task_digest(task, replace(shown, steps_by_site=(8, 4, 2))),
        task_digest(task, replace(shown, steps_by_site=(48, 2))),
    }
    plan = LevelPlan(levels=4, steps_b=np.ones(1, np.float32))
    for other in (
        plan,
        replace(plan, levels=8),
        replace(plan, steps_b=plan.steps_b * 2),
    ):
        digests |= {task_digest(task, replace(body, plan=other))}
    assert len(digests) == 19
    weights_d, integers_m = task.weights_d, task.integers_m
    joined = np.concatenate([weights_d, integers_m[:1].view(np.float32)])
    models = {
        model_digest(weights_d, integers_m),
        model_digest(weights_d + 1, integers_m),
        model_digest(weights_d, integers_m + 1),
        model_digest(joined, integers_m[1:]),
    }
    assert len(models) == 4
