"""Sites whose updates are summed with whoever is ready; the aggregator is a test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from support import toy
from support.small_jobs import small_job

from aggregator.masked_round import MaskedRound
from clients.models.starting_weights import initial_weights
from clients.privacy.site_plans import PrivateSites
from clients.training.site import Site
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import parts as wiring
from deploy.wiring.rehearsal import Rehearsal, rehearse
from federation.clock import SystemClock
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    MaskedUpdate,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteFailure,
    SiteMessage,
    TaskKind,
)
from federation.vectors import Vector
from privacy.secagg.agreement.certificate import before_rounds, certify
from privacy.secagg.agreement.free_cohort import (
    FinishedUpdate,
    FreeCohort,
    write_free_offer,
)
from privacy.secagg.agreement.groups import group_contract
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.setup import AggregatorSetup, SetupRecord

RUN = RunId("run-1")


def free_job(num_sites: int = 4, size: int = 2, **tables: Any) -> JobSpec:
    """A job whose sums are of so many sites, whoever is ready."""
    usual: dict[str, Any] = {
        "rounds": 6,
        "training": {"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 1},
        "schedule": {"mode": "buffered", "buffer_size": size, "max_staleness": 2},
        "privacy": {
            "secure_aggregation": {"enabled": True},
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 8.0,
                "clip_norm": 1.0,
            },
        },
    }
    return small_job(num_sites=num_sites, **toy.merged(usual, tables))


@dataclass
class Parties:
    """All sites of a job, and what an aggregator does with them.

    Attributes:
        job: As ``free_job`` makes it.
        models: For each round its model, if that is not the first one.
    """

    job: JobSpec = field(default_factory=free_job)
    models: dict[int, Vector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        federation = wiring.build_federation(self.job)
        federation.pool.reserve(1)
        clock = SystemClock()
        private = PrivateSites(federation, run_id=RUN, folder=None, clock=clock)
        self.layout = federation.pool.layout
        self.rehearsal: Rehearsal = rehearse(federation, RUN, private)
        self.first_d, self.integers_m = initial_weights(self.job, federation.pool)
        self.sites: Mapping[str, Site] = {
            name: federation.site(
                name,
                make_trainer=partial(private.trainer, name),
                store=MemoryStore(),
                clock=clock,
                seal=self.rehearsal.seal(name, None),
            )
            for name in (SiteId(site.name) for site in self.job.sites)
        }

    def task(self, site: str, index: int, based_on: int | None = None) -> RoundTask:
        """A task to train on the newest model, without keys."""
        based_on = index - 1 if based_on is None else based_on
        weights_d = self.models.get(based_on, self.first_d).copy()
        weights_d.flags.writeable = False
        return RoundTask(
            run_id=RUN,
            round_index=index,
            site=SiteId(site),
            kind=TaskKind.TRAIN,
            layout_digest=self.layout.digest,
            weights_d=weights_d,
            integers_m=self.integers_m,
            evaluate=True,
            evaluate_after=False,
            based_on=based_on,
        )

    def train(
        self, site: str, index: int = 1, based_on: int | None = None
    ) -> FinishedUpdate:
        """Have a site train; what it keeps then."""
        task = self.task(site, index, based_on)
        answer = self.sites[site].handle(task)
        assert isinstance(answer, SecureAnswer), answer
        assert (answer.step, answer.body) == (SecureStep.READY, b"")
        return self.update(task)

    def update(self, task: RoundTask) -> FinishedUpdate:
        """What a site keeps after a task."""
        return FinishedUpdate(
            site=task.site,
            round_index=task.round_index,
            based_on=task.based_on,
            model_digest=train.model_digest(task.weights_d, task.integers_m),
        )

    def setup(self, cohort: FreeCohort, **changes: Any) -> AggregatorSetup:
        """The aggregator's half of a cohort's setup; ``changes`` are its contract's."""
        whole = self.rehearsal.contract
        contract = group_contract(whole, cohort.sites, cohort.digest)
        contract = replace(contract, **changes)
        return AggregatorSetup(identity=self.rehearsal.aggregator, contract=contract)

    def step(self, site: str, step: SecureStep, body: bytes) -> SiteMessage:
        """Have a site take a step."""
        name = SiteId(site)
        about = {"run_id": RUN, "round_index": 0, "site": name, "step": step}
        return self.sites[site].handle(SecureTask(**about, body=body))  # type: ignore[arg-type]

    def offered(self, site: str, cohort: FreeCohort, **changes: Any) -> SiteMessage:
        """A site's answer to the offer of a cohort's contract."""
        offer = self.setup(cohort, **changes).offer()
        body = write_free_offer(cohort, offer)
        return self.step(site, SecureStep.ADVERTISE, body)

    def keys(self, cohort: FreeCohort) -> SetupRecord:
        """Have the sites of a cohort make keys."""
        half = self.setup(cohort)
        body = write_free_offer(cohort, half.offer())
        for site in cohort.sites:
            answer = self.step(site, SecureStep.ADVERTISE, body)
            assert isinstance(answer, SecureAnswer), answer
            half.on_advert(answer.body)
        for site in cohort.sites:
            answer = self.step(site, SecureStep.CONFIRM, half.book())
            assert isinstance(answer, SecureAnswer), answer
            half.on_confirm(answer.body)
        return half.result()

    def sealing(self, update: FinishedUpdate, keys: SetupRecord) -> RoundTask:
        """The task to seal an update."""
        body = train.TrainBody(
            setup_hash=keys.setup_hash,
            confirms=keys.confirms,
            certificate=b"",
            update_clip=self.rehearsal.contract.clip_norm,
        )
        task = self.task(update.site, update.round_index, update.based_on)
        return replace(
            task,
            evaluate=False,
            weights_d=np.empty(0, np.float32),
            integers_m=np.empty(0, np.int64),
            secure=train.write_train(body),
        )

    def sealed(self, update: FinishedUpdate, keys: SetupRecord) -> SiteMessage:
        """A site's answer to it."""
        return self.sites[update.site].handle(self.sealing(update, keys))

    def evaluating(self, site: str, index: int, keys: SetupRecord) -> RoundTask:
        """The task to evaluate the first model under keys that were made for it."""
        task = replace(self.task(site, index, 1), kind=TaskKind.EVALUATE)
        model = train.model_digest(task.weights_d, task.integers_m)
        start = before_rounds(keys.setup_hash)
        body = train.TrainBody(
            setup_hash=keys.setup_hash,
            confirms=keys.confirms,
            certificate=certify(start, model, self.rehearsal.aggregator),
            update_clip=self.rehearsal.contract.clip_norm,
        )
        return replace(task, secure=train.write_train(body))

    def opened(
        self, cohort: FreeCohort, keys: SetupRecord, masked: Sequence[SiteMessage]
    ) -> tuple[Vector, Mapping[str, float]]:
        """Open the sum of all: their mean update, and the sums of their results."""
        task = self.sealing(cohort.updates[0], keys)
        facts = RoundFacts(
            round_index=cohort.round_index,
            cohort=keys.cohort,
            model_digest=cohort.digest,
            task_digest=train.task_digest(task, train.read_train(task.secure)),
        )
        total = MaskedSum(self.layout.size, keys.contract.ring())
        current = MaskedRound(keys, facts, total=total)
        for each in masked:
            assert isinstance(each, MaskedUpdate), each
            current.fold(each)
        current.protocol.close_masked()
        opened = current.open(
            self.job, evaluation=cohort.is_fresh, update_clip=keys.contract.clip_norm
        )
        assert opened.mean_d is not None
        return opened.mean_d, opened.totals

    def kept(self, site: str) -> Any:
        """What a site keeps, in its own memory; None if it keeps nothing."""
        seal: Any = self.sites[site]._seal
        return seal._kept

    def charges(self, site: str) -> int:
        """How many charges the ledger of a site holds."""
        spent: Any = self.sites[site]._current_trainer().spent()
        return int(spent.anchor.train)


def cohort_of(index: int, *updates: FinishedUpdate) -> FreeCohort:
    """A cohort for the model of a round."""
    return FreeCohort(round_index=index, updates=updates)


def refusal(answer: SiteMessage) -> str:
    """What a site says of what it refuses."""
    assert isinstance(answer, SiteFailure), answer
    return f"{answer.kind.value}: {answer.message}"
