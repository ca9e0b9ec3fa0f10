"""Runs of small jobs whose sites and messages a test can spoil or watch."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites
from cloud_adapters.local.inproc_grid import Fault, InProcessGrid, no_fault
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import parts as wiring, run as wiring_run
from deploy.wiring.rehearsal import Rehearsal, rehearse
from federation import events
from federation.clock import SystemClock
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    MaskedUpdate,
    SecureStep,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import Clock, RunState, SiteHandler
from monitoring.views.run_view import DEPLOYED

Wrap = Callable[[Any], SiteHandler]
Answer = Callable[[], SiteMessage]

MASK = "mask"  # The step of a round's masked update, beside those of SecureStep.


def secure_job(num_sites: int = 5, *, threshold: int = 4, **changes: Any) -> JobSpec:
    """A small job under secure aggregation; ``ring_bits`` and so on may be given."""
    names = (
        "ring_bits",
        "levels",
        "clip_norm",
        "element_bound",
        "clip_elements",
        "max_examples",
        "hybrid",
        "groups",
    )
    table = {name: changes.pop(name) for name in names if name in changes}
    table["enabled"] = True
    if "groups" not in table:
        table["threshold"] = threshold
    if num_sites == 2:
        table["two_sites_waiver"] = True
    return small_job(
        num_sites=num_sites,
        privacy={"secure_aggregation": table},
        **{"rounds": 3} | changes,
    )


def in_the_clear(job: JobSpec) -> JobSpec:
    """The same job, with the same quorum, without secure aggregation."""
    secure = dataclasses.replace(job.privacy.secure_aggregation, enabled=False)
    return dataclasses.replace(
        job,
        privacy=dataclasses.replace(job.privacy, secure_aggregation=secure),
        schedule=dataclasses.replace(job.schedule, minimum_sites=job.minimum_sites),
    )


@dataclass
class Run:
    """What happened in a run."""

    state: RunState
    sites: Mapping[str, Any]
    seen: Sequence[events.Event]

    def statuses(self) -> list[str]:
        """How each round ended."""
        return [e.status for e in self.seen if isinstance(e, events.RoundFinished)]

    def failures(self, round_index: int) -> list[tuple[str, str]]:
        """Who failed in a round, and what was said of it."""
        return [
            (e.site, e.message)
            for e in self.seen
            if isinstance(e, events.SiteFailed) and e.round_index == round_index
        ]

    def answered(self, round_index: int) -> tuple[str, ...]:
        """Whose update counts in a round."""
        (found,) = (
            e.answered
            for e in self.seen
            if isinstance(e, events.RoundFinished) and e.round_index == round_index
        )
        return found

    def warnings(self) -> list[str]:
        """What a person was told."""
        return [e.message for e in self.seen if isinstance(e, events.Warned)]


def run(
    job: JobSpec,
    *,
    fault: Fault = no_fault,
    wraps: Mapping[str, Wrap] | None = None,
    store: MemoryStore | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    own_jobs: Mapping[str, JobSpec] | None = None,
    meet: Callable[[Rehearsal], None] = lambda _: None,
    clock: Clock | None = None,
    returned: Callable[[Collection[SiteId], int], Collection[SiteId]] | None = None,
) -> Run:
    """Run a job; ``wraps`` puts something of a test's own in front of a site.

    With the ``store`` of a run that was stopped another coordinator resumes it.
    ``own_jobs`` are those of sites that work on another one; ``meet`` takes the
    parties of a secure sum before they begin. With ``returned`` sites come back with
    time, as in a deployed run.
    """
    federation = wiring.build_federation(job)
    workers = wiring.num_workers(job)
    federation.pool.reserve(workers)
    run_id, clock, store = (
        RunId("run-1"),
        clock or SystemClock(),
        store or MemoryStore(),
    )
    names = [SiteId(site.name) for site in job.sites]
    secure = job.privacy.secure_aggregation.enabled
    private = None
    if job.privacy.differential_privacy.unit != "none":
        private = PrivateSites(federation, run_id=run_id, folder=None, clock=clock)
    rehearsal = rehearse(federation, run_id, private) if secure else None
    if rehearsal is not None:
        meet(rehearsal)
    sites: dict[SiteId, Any] = {}
    for name in names:
        train = partial((private or federation).trainer, name)
        seal = None if rehearsal is None else rehearsal.seal(name, None)
        job_of_site = (own_jobs or {}).get(name, job)
        sites[name] = replace(federation, job=job_of_site).site(
            name,
            make_trainer=train,
            store=store,
            clock=clock,
            seal=seal,
            tells_all=seal is None,
        )
    handlers = {
        name: (wraps or {}).get(name, lambda s: s)(site) for name, site in sites.items()
    }
    seen: list[events.Event] = []
    back = {} if returned is None else {"returned": returned}
    with InProcessGrid(
        handlers, clock=clock, workers=workers, fault=fault, **back
    ) as grid:
        assembly = wiring_run.Run(
            federation=federation,
            run_id=run_id,
            clock=clock,
            store=store,
            emit=seen.append,
            stop_requested=stop_requested,
        )
        state = assembly.drive(
            wiring_run.ConnectedSites(
                engine="inproc" if returned is None else DEPLOYED, grid=grid
            ),
            secret=None if rehearsal is None else rehearsal.secret,
        )
    return Run(state, sites, seen)


def step_of(task: Task) -> str | None:
    """The step of a task; None for an evaluation alone."""
    step = getattr(task, "step", None)
    if isinstance(step, SecureStep):
        return step.value
    return MASK if getattr(task, "kind", None) is TaskKind.TRAIN else None


def silence(step: str, sites: Collection[str], *, times: int = 1) -> Fault:
    """Have some sites say nothing to the first tasks of a step."""
    left = dict.fromkeys(sites, times)

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if step_of(task) == step and left.get(task.site, 0) > 0:
            left[task.site] -= 1
            return ()
        return (answer(),)

    return fault


@dataclass
class Spoilt:
    """A site whose tasks or answers are changed on their way, in one round."""

    site: Any
    task: Callable[[Any], Task] = lambda task: task
    answer: Callable[[MaskedUpdate], SiteMessage] = lambda message: message
    round_index: int = 1

    def handle(self, task: Task) -> SiteMessage:
        """Answer."""
        if task.round_index != self.round_index or step_of(task) != MASK:
            return self.site.handle(task)
        message = self.site.handle(self.task(task))
        return self.answer(message) if isinstance(message, MaskedUpdate) else message


@dataclass
class Overheard:
    """A site all of whose messages are kept."""

    site: Any
    heard: list[SiteMessage] = field(default_factory=list)

    def handle(self, task: Task) -> SiteMessage:
        """Answer, and keep the answer."""
        message = self.site.handle(task)
        kept = message
        if isinstance(message, SiteUpdate):  # The aggregator may write over its values.
            kept = replace(message, delta_d=message.delta_d.copy())
        self.heard.append(kept)
        return message


def retrained(change: Callable[[Any], Any], *, round_index: int = 1) -> Wrap:
    """A site whose training of one round comes to something else."""

    def wrap(site: Any) -> SiteHandler:
        trainer = _Retrained(site._current_trainer(), change, round_index)
        site._trainer = trainer
        return site

    return wrap


class _Retrained:
    def __init__(self, trainer: Any, change: Callable[[Any], Any], at: int) -> None:
        self._trainer, self._change, self._at = trainer, change, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def fit(self, *args: Any, round_index: int, **named: Any) -> Any:
        result = self._trainer.fit(*args, round_index=round_index, **named)
        return self._change(result) if round_index == self._at else result
