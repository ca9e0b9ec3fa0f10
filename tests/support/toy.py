"""A federation without models: every site pulls the weights towards its own optimum.

Everything around the trainer is the product's own: sites, grid, rules, checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import combine_rule
from aggregator.methods import registry
from aggregator.sampling import cohorts_of
from aggregator.weighting import weight_of
from clients.training.local_federation import state_of
from clients.training.site import Site
from cloud_adapters.local.inproc_grid import Fault, InProcessGrid, no_fault
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.compression.apart import fitted
from federation.compression.change import first_residual
from federation.events import Event
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import (
    NO_ANCHOR,
    FailureKind,
    LedgerAnchor,
    MaskedUpdate,
    MetricSums,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import (
    Clock,
    Grid,
    LocalWeights,
    RunState,
    ServerOptimizer,
    SiteHandler,
)
from federation.rounds.coordinator import ServerParts, run_federation
from federation.rounds.gather import PlainGather
from federation.rounds.server_optimizer import server_optimizer
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Role, Vector

RUN = RunId("run-1")
SITES = tuple(SiteId(name) for name in ("c", "a", "b"))
LAYOUT = Layout.build(
    [
        ("weight", (2, 3), "float32", Role.PARAMETER),
        ("running_mean", (2,), "float32", Role.BUFFER),
        ("num_batches_tracked", (), "int64", Role.MAX),
        ("version", (), "int64", Role.FROM_SERVER),
    ]
)
BATCHES_TRACKED, VERSION = 0, 1  # Places in the integer vector.


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, of which the second wins."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merged(old, value) if both else value
    return result


def document(
    changes: Mapping[str, Any] | None = None, *, sites: Sequence[str] = SITES
) -> dict[str, Any]:
    """A job as the nested mappings of its file."""
    base = {
        "name": "toy",
        "rounds": 3,
        "seed": 7,
        "model": {"factory": "toy:model"},
        "data": {"source": "toy:data"},
        "training": {"local_steps": 2},
        "sites": [{"name": site} for site in sites],
    }
    return merged(base, changes or {})


def job(
    changes: Mapping[str, Any] | None = None, *, sites: Sequence[str] = SITES
) -> JobSpec:
    """A checked job."""
    return job_file.parse(document(changes, sites=sites))


class QuadraticTrainer:
    """Takes steps towards a site's optimum, and tells how far away it is."""

    def __init__(self, site: SiteId, job: JobSpec, *, layout: Layout = LAYOUT) -> None:
        """Draw the site's optimum from its name."""
        rng = np.random.default_rng([job.seed, *site.encode()])
        self._layout = layout
        self._entropy = [job.seed, *site.encode()]
        self._num_steps = job.training.local_steps or 1
        self._num_examples = int(rng.integers(10, 100))
        self.optimum_d = rng.standard_normal(layout.size, dtype=np.float32)

    def layout(self) -> Layout:
        """Layout of the toy model."""
        return self._layout

    def pay(
        self,
        *,
        round_index: int,
        trains: bool,
        evaluations: int,
        anchor: LedgerAnchor = NO_ANCHOR,
    ) -> None:
        """Keep no privacy ledger."""

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- of the seam
    ) -> LocalWeights:
        """Halve the distance in every step, with noise that differs by round."""
        rng = np.random.default_rng([*self._entropy, round_index])
        trained_d = weights_d.copy()
        for _ in range(self._num_steps):
            noise_d = rng.standard_normal(trained_d.size, dtype=np.float32)
            trained_d += (self.optimum_d - trained_d) / 2 + noise_d / 100
        counted_m = integers_m.copy()
        counted_m[BATCHES_TRACKED] += self._num_steps * self._num_examples
        counted_m[VERSION] = -1
        return LocalWeights(
            weights_d=trained_d,
            integers_m=counted_m,
            num_examples=self._num_examples,
            num_steps=self._num_steps,
            training=self.evaluate(trained_d, counted_m, round_index=round_index),
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,  # noqa: ARG002 -- of the seam
        *,
        round_index: int,  # noqa: ARG002 -- of the seam
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- of the seam
    ) -> MetricSums:
        """Squared distance to the optimum."""
        distance = float(np.square(weights_d - self.optimum_d).sum())
        return MetricSums(count=10, loss_sum=10 * distance, metrics={"correct": 5})

    def spent(self) -> None:
        """Keep no privacy ledger."""


def site(name: SiteId, job: JobSpec, *, clock: Clock) -> Site:
    """The product's own site around the toy trainer."""
    return Site(
        name,
        make_trainer=lambda: QuadraticTrainer(name, job),
        state=state_of(job, LAYOUT, name, MemoryStore()),
        clock=clock,
        links=fitted(job.communication.links, LAYOUT),
    )


def optimizer_of(job: JobSpec) -> ServerOptimizer:
    """The server optimiser of a job."""
    spec, period = job.aggregation.server_optimizer, job.models_per_round
    return server_optimizer(spec, period=period)


def initial_state(job: JobSpec) -> RunState:
    """The state before the first round."""
    return RunState(
        round_index=0,
        weights_d=np.zeros(LAYOUT.size, dtype=np.float32),
        integers_m=np.array([0, 42], dtype=np.int64),
        optimizer={
            **optimizer_of(job).init(LAYOUT.size),
            **first_residual(job.communication.links, LAYOUT.size),
        },
        rounds_completed=0,
        lost_in_a_row=0,
    )


def no_metric(_sums: MetricSums, _name: str) -> None:
    """Find no metric in results."""


@dataclass(kw_only=True)
class Toy:
    """One run: a coordinator, or several one after another on one store.

    Attributes:
        clock: Time; nothing waits.
        store: Where the checkpoints lie.
        events: What the coordinators have told.
        fault: Spoils answers.
        stop_requested: As in ``ServerParts``.
        workers: Threads of the grid.
    """

    job: JobSpec
    clock: Clock = field(default_factory=VirtualClock)
    store: MemoryStore = field(default_factory=MemoryStore)
    events: list[Event] = field(default_factory=list)
    fault: Fault = no_fault
    stop_requested: Callable[[], bool] = lambda: False
    workers: int = 1

    def handlers(self) -> dict[SiteId, SiteHandler]:
        """The sites."""
        names = [SiteId(spec.name) for spec in self.job.sites]
        return {name: site(name, self.job, clock=self.clock) for name in names}

    def checkpoints(self) -> RunCheckpoints:
        """The run's checkpoints, as a coordinator that has just come sees them."""
        return RunCheckpoints(
            store=self.store,
            prefix="checkpoints/",
            run_id=RUN,
            job=job_file.document(self.job),
            layout=LAYOUT,
            keep=self.job.storage.keep_checkpoints,
            emit=self.events.append,
            clock=self.clock,
        )

    def parts(self, grid: Grid, **changes: Any) -> ServerParts:
        """What the round loop works with."""
        aggregation = self.job.aggregation
        usual: dict[str, Any] = {
            "run_id": RUN,
            "engine": "toy",
            "layout": LAYOUT,
            "initial_state": lambda: initial_state(self.job),
            "checkpoints": self.checkpoints(),
            "draw_cohort": cohorts_of(self.job),
            "optimizer": optimizer_of(self.job),
            "guests": registry.begin(self.job, changes.pop("metric_of", no_metric)),
            "clock": self.clock,
            "emit": self.events.append,
            "stop_requested": self.stop_requested,
        }
        in_the_clear = {
            "weight_of": weight_of(aggregation.weights),
            "combine": combine_rule(aggregation),
        }
        chosen = {name: changes.pop(name, it) for name, it in in_the_clear.items()}
        gather = PlainGather(self.job, grid=grid, **chosen)
        return ServerParts(**(usual | {"gather": gather} | changes))

    def run(self, **changes: Any) -> RunState:
        """Run the job, or continue with it, as one coordinator."""
        with InProcessGrid(
            self.handlers(), clock=self.clock, workers=self.workers, fault=self.fault
        ) as grid:
            return run_federation(self.job, self.parts(grid, **changes))

    def told(self, kind: type[Any]) -> list[Any]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def _based(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a message, based on the model of the round before."""
    return {"based_on": max(0, fields["round_index"] - 1)} | fields


def task(site: SiteId = SITES[0], **changes: Any) -> RoundTask:
    """A task for the toy model."""
    usual: dict[str, Any] = {
        "run_id": RUN,
        "round_index": 1,
        "site": site,
        "kind": TaskKind.TRAIN,
        "layout_digest": LAYOUT.digest,
        "weights_d": np.zeros(LAYOUT.size, dtype=np.float32),
        "integers_m": np.zeros(LAYOUT.num_integers, dtype=np.int64),
        "evaluate": False,
        "evaluate_after": False,
    }
    return RoundTask(**_based(usual | changes))


def update(site: SiteId = SITES[0], **changes: Any) -> SiteUpdate:
    """A sound answer to ``task``."""
    usual: dict[str, Any] = {
        "run_id": RUN,
        "round_index": 1,
        "site": site,
        "layout_digest": LAYOUT.digest,
        "delta_d": np.ones(LAYOUT.size, dtype=np.float32),
        "integers_m": np.zeros(LAYOUT.num_integers, dtype=np.int64),
        "num_examples": 10,
        "num_steps": 1,
        "training": MetricSums(count=10, loss_sum=1.0, metrics={"correct": 5}),
        "evaluation": None,
        "evaluation_after": None,
        "phases": (),
    }
    return SiteUpdate(**_based(usual | changes))


def masked(site: SiteId = SITES[0], **changes: Any) -> MaskedUpdate:
    """A masked answer to ``task``, in words of 24 bits."""
    usual: dict[str, Any] = {
        "run_id": RUN,
        "round_index": 1,
        "site": site,
        "layout_digest": LAYOUT.digest,
        "words": np.arange(3 * LAYOUT.size, dtype=np.uint8),
        "header_h": np.arange(5, dtype=np.uint64),
        "body": b"signed",
    }
    return MaskedUpdate(**_based(usual | changes))


def secure_task(site: SiteId = SITES[0], **changes: Any) -> SecureTask:
    """A step of secure aggregation."""
    usual: dict[str, Any] = {"run_id": RUN, "round_index": 1, "body": b"who"}
    return SecureTask(site=site, step=SecureStep.SURVIVORS, **(usual | changes))


def secure_answer(site: SiteId = SITES[0], **changes: Any) -> SecureAnswer:
    """An answer to ``secure_task``."""
    usual: dict[str, Any] = {"run_id": RUN, "round_index": 1, "body": b"assent"}
    return SecureAnswer(site=site, step=SecureStep.SURVIVORS, **(usual | changes))


def evaluation(site: SiteId = SITES[0], **changes: Any) -> SiteEvaluation:
    """A sound answer to a task for evaluation."""
    usual: dict[str, Any] = {
        "run_id": RUN,
        "round_index": 1,
        "site": site,
        "evaluation": MetricSums(count=10, loss_sum=1.0, metrics={"correct": 5}),
        "phases": (),
    }
    return SiteEvaluation(**_based(usual | changes))


def failure(
    site: SiteId = SITES[0], kind: FailureKind = FailureKind.CRASHED, **changes: Any
) -> SiteFailure:
    """A site's word that it failed."""
    usual: dict[str, Any] = {"run_id": RUN, "round_index": 1, "message": "no disk"}
    return SiteFailure(site=site, kind=kind, **(usual | changes))


def faults(*rules: tuple[str, int, Callable[[SiteMessage], SiteMessage]]) -> Fault:
    """Change the answers of given sites in given rounds."""

    def fault(
        task: RoundTask, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        message = answer()
        if task.kind is TaskKind.TRAIN:
            for site, round_index, change in rules:
                if (site, round_index) == (task.site, task.round_index):
                    message = change(message)
        return (message,)

    return fault
