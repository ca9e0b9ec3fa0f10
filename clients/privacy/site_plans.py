"""Differential privacy of a run: what each site promises, and its ledger.

Noise is calibrated for each site from the number of its own records, rounded up to
the grid of ``privacy.counts``. What the accountant charges and what the trainer does
come from the same functions of ``clients.training.private_steps``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from clients.data.datasets import Dataset
from clients.data.privacy_units import held_out_units, num_units
from clients.privacy import ledger_memory, standardise, sum_plan as sum_privacy
from clients.privacy.ledger_memory import (
    ClosableLedger,
    LifetimeBudget,
    RememberedLedger,
    Reservation,
    check_plan,
    keep_anchor,
    known_anchor,
)
from clients.privacy.site_memory import SiteMemory
from clients.privacy.spending import BudgetedTrainer, ClippingTrainer, Releases
from clients.privacy.standardise import Statistics, StatisticsMemory
from clients.privacy.sum_plan import SumPrivacy
from clients.training.kept_steps import KeptSteps
from clients.training.local_federation import Federation
from clients.training.private_steps import (
    PrivateTraining,
    events_by_round,
    most_private_steps,
    num_private_steps,
    sampling_rate,
)
from clients.training.trainer import TorchTrainer
from federation.errors import JobError, PrivacyError, SiteError
from federation.events import PrivacyPlanned, SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import job_digest
from federation.job.evaluation_job import evaluates_only
from federation.job.metrics import (
    MAX_LOSS,
    TRAINER,
    loss_of,
    most_of_a_record,
    noised_of,
)
from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.messages import NO_ANCHOR, LedgerAnchor
from federation.protocols import Clock, Trainer
from federation.rounds.local_work import first_rounds, in_round, leaves_steps_open
from privacy.counts import coarse
from privacy.dp import accountant
from privacy.dp.calibration import noise_multiplier
from privacy.dp.errors import LedgerBehind
from privacy.dp.events import PrivacyEvent
from privacy.dp.held_out import HeldOutMechanism
from privacy.dp.ledger import ledger_recovery
from privacy.dp.ledger.ledger import FileLedger, InMemoryLedger, Ledger
from privacy.dp.ledger.ledger_files import (
    HEAD_NAME,
    LEDGER_NAME,
    RECOVER,
    HeadKey,
    read_file,
)
from privacy.dp.ledger.ledger_format import Purpose, Terms
from privacy.dp.ledger.ledger_recovery import RecoveryResult
from privacy.dp.mechanism import SLACK
from privacy.dp.tables import mechanism_of
from privacy.secagg.protocol.round_memory import FileRounds

_RELATIONS = {
    "record": accountant.NEIGHBOURING_RELATION,
    "person": accountant.PERSON_RELATION,
    "joint": accountant.NEIGHBOURING_RELATION,
    "site": accountant.SITE_RELATION,
}
_SAMPLINGS = {
    "record": accountant.SAMPLING_ASSUMPTION,
    "person": accountant.PERSON_SAMPLING,
    "joint": accountant.SAMPLING_ASSUMPTION,
    "site": accountant.NO_SAMPLING,
}


MakePrivate = Callable[[PrivateTraining | None, Statistics | None], ClippingTrainer]

ROUNDS = "rounds"  # Folder of a site's round memory, beside its ledger.


_UNLIMITED = LifetimeBudget(dataset="records")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContext:
    """What a site keeps besides the ledger in a run's folder.

    Attributes:
        memory: Remembers charges over all runs; None if nothing does.
        key: Signs heads of ledgers; None where sites have no keys.
        budget: Budget of all runs on the site's data.
        is_anchor: Whether a ledger is held to what the memory knows of its run. In a
            simulation it is not: a person may copy a run and continue with both.
        lineage: Names the site's data, for what is released of them once.
        max_delta: The largest delta that the site's operator allows.
        reserved: Plans of the runs that are at work on the site's data beside this one.
    """

    memory: SiteMemory | None = None
    key: HeadKey | None = None
    budget: LifetimeBudget = _UNLIMITED
    is_anchor: bool = True
    lineage: str = ""
    max_delta: float = 1.0
    reserved: tuple[Reservation, ...] = ()


NOTHING_KEPT = LedgerContext()


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """How one site keeps its promise.

    Attributes:
        epsilon_cap: What it may spend, on training and on held-out records each.
        delta: The probability that goes with it.
        training: Noise and clipping of a step; None where whole sites are the unit.
        round_event: The steps of a round, for the accountant.
        later: Where later rounds take larger or smaller steps: the first round of each
            kind, from 2 on and increasing, and its event.
        held_out: Noise of held-out results; None if these are public.
        num_rounds: Rounds that may be trained, with those held in reserve.
        reserve: Those held in reserve.
        most_steps: Steps of a round at most, where tasks say how many.
        noise_varies: Whether the noise follows from what other sites state, who may
            state something else when the run resumes.
        num_evaluations: Evaluations that may be charged, likewise.
        once: What is released before the first round: noised statistics.
    """

    epsilon_cap: float
    delta: float
    training: PrivateTraining | None
    round_event: PrivacyEvent
    held_out: HeldOutMechanism | None
    num_rounds: int
    num_evaluations: int
    once: tuple[PrivacyEvent, ...] = ()
    later: tuple[tuple[int, PrivacyEvent], ...] = ()
    reserve: int = 0
    most_steps: int = 0
    noise_varies: bool = False

    @property
    def largest_event(self) -> PrivacyEvent:
        """The steps of a round that costs most: any may be repeated."""
        events = (self.round_event, *(event for _, event in self.later))
        found = max(events, key=lambda event: event.sampling_rate)
        return replace(found, steps=max(found.steps, self.most_steps))

    @property
    def training_events(self) -> tuple[PrivacyEvent, ...]:
        """All training of the run; a round in reserve may be one that costs most."""
        events = [self.round_event, *(event for _, event in self.later)]
        firsts = [1, *(first for first, _ in self.later)]
        firsts.append(self.num_rounds - self.reserve + 1)
        counts = [last - first for first, last in pairwise(firsts)]
        if self.reserve:
            events.append(self.largest_event)
            counts.append(self.reserve)
        return tuple(
            replace(event, steps=event.steps * count)
            for event, count in zip(events, counts, strict=True)
        )

    @property
    def planned(self) -> tuple[PrivacyEvent, ...]:
        """All releases of the run, including those held in reserve."""
        found = [*self.once, *self.training_events]
        if self.held_out is not None:
            event = self.held_out.event()
            found.append(replace(event, steps=event.steps * self.num_evaluations))
        return tuple(found)

    def budgeted(
        self, trainer: ClippingTrainer, ledger: Ledger, kept: KeptSteps | None = None
    ) -> BudgetedTrainer:
        """Wrap a trainer so that it charges a ledger before each planned release."""
        releases = Releases(
            round_event=self.round_event,
            held_out=self.held_out,
            evaluates=self.num_evaluations > 0,
            max_loss=MAX_LOSS,
            later=self.later,
            planned=self.training_events,
            once=self.once,
            noise_varies=self.noise_varies,
        )
        return BudgetedTrainer(trainer, ledger, releases, kept)


@dataclass(eq=False)
class PrivateSites:
    """Trainers that keep to a budget; a context manager, since ledgers are locked.

    Attributes:
        federation: Model and data.
        run_id: The run that the ledgers are of.
        folder: The run's; ledgers are in ``sites/NAME``. None keeps nothing.
        clock: Clock of the entries.
        stated: What sites have stated that they need, where noise adds up inside
            the secure sum and some of them are elsewhere.
        keeping: What a site keeps beside its ledgers.

    Raises:
        JobError: The promise cannot be kept with these data, rounds and batches;
            the message names the site and says what would do.
    """

    federation: Federation
    _: KW_ONLY
    run_id: RunId
    folder: Path | None
    clock: Clock
    stated: InitVar[Mapping[SiteId, float] | None] = None
    keeping: Callable[[SiteId], LedgerContext] = lambda _name: NOTHING_KEPT

    def __post_init__(self, stated: Mapping[SiteId, float] | None) -> None:
        """Plan every site whose data are here."""
        self._anchors: Mapping[SiteId, LedgerAnchor] = {}
        self._ledgers: dict[SiteId, ClosableLedger] = {}
        self._statistics: dict[SiteId, Statistics] = {}
        self.in_sum: SumPrivacy | None = None
        self.plans: Mapping[SiteId, SitePlan]
        if self.federation.job.privacy.differential_privacy.in_sum:
            self.in_sum = sum_privacy.plan(self.federation, stated)
            self.plans = _plans_in_sum(self.federation, self.in_sum)
        else:
            size = self.federation.pool.num_trained
            self.plans = {
                name: plan_of(
                    self.federation.job,
                    name,
                    data,
                    num_trained=size,
                    max_delta=self._max_delta(name),
                )
                for name, data in self.federation.site_data.items()
            }

    def _max_delta(self, name: SiteId) -> float:
        """A run that has begun keeps its delta, whatever the operator allows since."""
        folder = self._folder_of(name)
        with suppress(PrivacyError):  # Whoever opens the ledger says what is wrong.
            if folder is not None and (folder / LEDGER_NAME).exists():
                return read_file(folder / LEDGER_NAME).terms.delta
        return self.keeping(name).max_delta

    def __enter__(self) -> Self:
        """Return itself; ledgers are opened one by one, by ``trainer``."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the ledgers."""
        for ledger in self._ledgers.values():
            ledger.close()

    def expect(self, anchors: Mapping[SiteId, LedgerAnchor]) -> None:
        """Refuse a ledger with fewer charges than the aggregator knows of."""
        self._anchors = anchors

    def recover(self, name: SiteId, anchor: LedgerAnchor) -> RecoveryResult:
        """Charge again what a site's ledger has lost; see ``ledger_recovery``.

        Raises:
            PrivacyError: It cannot be done; the message says why.
            StoreError: The ledger or the site's memory cannot be read or written.
        """
        plan, folder = self.plans[name], self._folder_of(name)
        keeping = self.keeping(name)
        if folder is None:
            raise ValueError("a run that stores nothing has nothing to recover")
        events: dict[Purpose, PrivacyEvent] = {"train": plan.largest_event}
        if plan.held_out is not None:
            events["evaluate"] = plan.held_out.event()
        anchor = anchor.joined(self._remembered(keeping))
        if _is_missing(folder):
            rounds = FileRounds(folder / ROUNDS).last(self.run_id)
            anchor = anchor.joined(
                LedgerAnchor(
                    train=rounds + len(plan.once) if rounds else 0,
                    evaluate=rounds * ("evaluate" in events),
                )
            )
        found = ledger_recovery.recover(
            folder,
            self._terms(name, plan),
            anchor=anchor,
            events=events,
            once=plan.once,
            clock=self.clock,
            key=keeping.key,
        )
        if keeping.memory is not None:
            keep_anchor(keeping.memory, self.run_id, found.after)
            charges = read_file(folder / LEDGER_NAME).charges
            terms, dataset = self._terms(name, plan), keeping.budget.dataset
            ledger_memory.adopt(keeping.memory, dataset, terms, charges)
        return found

    def trainer(self, name: SiteId, make: MakePrivate | None = None) -> Trainer:
        """Make a site's trainer and open its ledger.

        Args:
            name: The site.
            make: Makes what trains as planned; this process does by default.

        Raises:
            PrivacyError: The ledger that is there cannot be continued.
        """
        plan, federation = self.plans[name], self.federation
        ledger = self._ledger(name, plan)
        train, held_out = federation.site_data[name]
        statistics = self._released(name, plan, ledger)
        trainer: ClippingTrainer
        kept = None
        if federation.job.statistics is not None:
            multiplier = plan.round_event.noise_multiplier
            trainer = federation.statistics_trainer(name, multiplier)
        elif make is not None:
            trainer = make(plan.training, statistics)
        elif federation.job.training.task == TRAINER:
            trainer = federation.loop_trainer(name, (train, held_out))
        else:
            if statistics is not None:
                train, held_out = statistics.apply(train), statistics.apply(held_out)
            kept = federation.kept_steps
            trainer = TorchTrainer(
                federation.job,
                name,
                pool=federation.pool,
                train=train,
                held_out=held_out,
                private=plan.training,
                seed=federation.order_seed,
                ends_early=federation.ends_early,
                kept_steps=kept,
            )
        return plan.budgeted(trainer, ledger, kept)

    def _released(
        self, name: SiteId, plan: SitePlan, ledger: ClosableLedger
    ) -> Statistics | None:
        """Return the statistics that a site's records are standardised by."""
        if not plan.once:
            return None
        (event,) = plan.once
        train, _ = self.federation.site_data[name]
        make = partial(standardise.release, self.federation.job, train)
        if name not in self._statistics:
            job, keeping = self.federation.job, self.keeping(name)
            remembered = _remembered_statistics(job, self.run_id, keeping)
            if evaluates_only(job):
                _check_released(name, remembered)
            if remembered is None or not isinstance(ledger, RememberedLedger):
                ledger.charge(event, round_index=standardise.ROUND)
                self._statistics[name] = make()
            else:
                self._statistics[name] = remembered.take(ledger, event, make)
        return self._statistics[name]

    def promises(self) -> tuple[SitePrivacy, ...]:
        """The promise of every site."""
        return tuple(_promise(name, plan) for name, plan in self.plans.items())

    def planned(self, *, at: float) -> PrivacyPlanned:
        """Return every site's promise, and its meaning."""
        return planned(
            self.federation.job,
            self.promises(),
            replaced=self.federation.pool.replaced,
            signal_to_noise=(
                None if self.in_sum is None else self.in_sum.signal_to_noise
            ),
            at=at,
        )

    def reservation(self, name: SiteId) -> Reservation:
        """What a site has planned to spend, for the runs beside this one."""
        plan = self.plans[name]
        planned = _planned(self.federation.job, self.run_id, plan, self.keeping(name))
        return Reservation(run_id=self.run_id, delta=plan.delta, planned=planned)

    def _remembered(self, keeping: LedgerContext) -> LedgerAnchor:
        if keeping.memory is None or not keeping.is_anchor:
            return NO_ANCHOR
        return known_anchor(keeping.memory, self.run_id)

    def _folder_of(self, name: SiteId) -> Path | None:
        return None if self.folder is None else self.folder / "sites" / name

    def _terms(self, name: SiteId, plan: SitePlan) -> Terms:
        return _terms(self.federation.job, self.run_id, name, plan)

    def _ledger(self, name: SiteId, plan: SitePlan) -> ClosableLedger:
        """Open a site's ledger; a site that restarts opens its own again."""
        before = self._ledgers.pop(name, None)
        if before is not None:
            before.close()
        terms, folder = self._terms(name, plan), self._folder_of(name)
        ledger: ClosableLedger
        if folder is not None:
            ledger = self._open(name, folder, plan)
        elif before is not None:
            ledger = before  # A run that keeps nothing remembers while it lasts.
        else:
            ledger = self._with_memory(
                name, plan, InMemoryLedger(terms, clock=self.clock)
            )
        self._ledgers[name] = ledger
        return ledger

    def _open(self, name: SiteId, folder: Path, plan: SitePlan) -> ClosableLedger:
        """Open a ledger, and check it against everything known about it."""
        keeping = self.keeping(name)
        anchor = self._anchors.get(name, NO_ANCHOR)
        if keeping.memory is not None and keeping.is_anchor:
            # Another proposal may know less, and a recovery must not.
            keep_anchor(keeping.memory, self.run_id, anchor)
        anchor = anchor.joined(self._remembered(keeping))
        _check_rounds(folder, self.run_id)
        # Before anything is written of the run.
        check_budget(self.federation.job, self.run_id, name, plan, keeping)
        ledger = FileLedger(
            folder,
            self._terms(name, plan),
            clock=self.clock,
            anchor=anchor,
            key=keeping.key,
        )
        try:
            return self._with_memory(name, plan, ledger)
        except BaseException:
            ledger.close()
            raise

    def _with_memory(
        self, name: SiteId, plan: SitePlan, ledger: ClosableLedger
    ) -> ClosableLedger:
        """Have a site's memory count a ledger's charges, if it has a memory."""
        keeping = self.keeping(name)
        if keeping.memory is None:
            return ledger
        planned = _planned(self.federation.job, self.run_id, plan, keeping)
        return RememberedLedger(
            ledger, keeping.memory, keeping.budget, planned, keeping.reserved
        )


def check_budget(
    job: JobSpec, run_id: RunId, name: SiteId, plan: SitePlan, keeping: LedgerContext
) -> None:
    """Refuse a run that the budget of all runs on a site's data cannot cover.

    Args:
        job: The run's.
        run_id: Its ID: what it has spent already does not count twice.
        name: The site.
        plan: What the site is about to promise.
        keeping: The site's memory, and its budget; without a memory nothing is checked.

    Raises:
        JobError: The budget does not cover it, or earlier runs were about other
            neighbours.
        StoreError: The memory cannot be read, or is damaged.
    """
    if keeping.memory is not None:
        planned = _planned(job, run_id, plan, keeping)
        terms = _terms(job, run_id, name, plan)
        check_plan(keeping.memory, keeping.budget, terms, planned, keeping.reserved)


def _terms(job: JobSpec, run_id: RunId, name: SiteId, plan: SitePlan) -> Terms:
    unit = job.privacy.differential_privacy.unit
    return Terms(
        run_id=run_id,
        site=name,
        job_digest=job_digest.digest(job).hex(),
        delta=plan.delta,
        epsilon_cap=plan.epsilon_cap,
        unit=unit,
        relation=_RELATIONS[unit],
        sampling="none" if unit == "site" or job.statistics is not None else "poisson",
    )


def _planned(
    job: JobSpec, run_id: RunId, plan: SitePlan, keeping: LedgerContext
) -> tuple[PrivacyEvent, ...]:
    """What a run adds to the spending of all runs on its data."""
    remembered = _remembered_statistics(job, run_id, keeping)
    if remembered is not None and remembered.of_another_run():
        plan = replace(plan, once=())
    return plan.planned


def _remembered_statistics(
    job: JobSpec, run_id: RunId, keeping: LedgerContext
) -> StatisticsMemory | None:
    """Where a site remembers its statistics; None if it does not, or has none."""
    spec = job.privacy.differential_privacy.standardise
    if spec is None or keeping.memory is None:
        return None
    return StatisticsMemory(
        memory=keeping.memory,
        lineage=keeping.lineage,
        spec=spec,
        run_id=run_id,
        of_persons=job.privacy.differential_privacy.of_persons,
    )


def _check_released(name: SiteId, remembered: StatisticsMemory | None) -> None:
    """Refuse to standardise by others than a run of training has released.

    Raises:
        SiteError: The site remembers none.
    """
    if remembered is None or not remembered.of_another_run():
        raise SiteError(
            f"site {name!r} remembers no statistics that a run of training released "
            "with these options (privacy.differential_privacy.standardise) on this "
            "dataset, so it cannot prepare records as the model knows them. Give the "
            "options of that run and its data; in a simulation, write the evaluation "
            "beside it (--out)"
        )


def _check_rounds(folder: Path, run_id: RunId) -> None:
    """Refuse a new ledger if the site answered secure rounds of this run before.

    A ledger is created before the first round, so it must exist by then.

    Raises:
        LedgerBehind: It is missing.
    """
    if not _is_missing(folder):
        return
    last = FileRounds(folder / ROUNDS).last(run_id)
    if last:
        raise LedgerBehind(
            f"{folder / LEDGER_NAME} is missing, but this site has answered rounds of "
            f"run {run_id} up to round {last}, so nothing is released. Restore the "
            f"newest ledger. {RECOVER}"
        )


def _is_missing(folder: Path) -> bool:
    """Whether a ledger does not exist; an empty file counts as missing."""
    if (folder / HEAD_NAME).exists():
        return False
    path = folder / LEDGER_NAME
    return not path.exists() or path.stat().st_size == 0


def planned(
    job: JobSpec,
    promises: Sequence[SitePrivacy],
    *,
    replaced: tuple[str, ...],
    signal_to_noise: float | None = None,
    at: float,
) -> PrivacyPlanned:
    """Return the sites' promises, and their meaning."""
    unit = job.privacy.differential_privacy.unit
    return PrivacyPlanned(
        at=at,
        unit=unit,
        relation=_RELATIONS[unit],
        accountant="pld",
        sampling=(
            _SAMPLINGS[unit] if job.statistics is None else accountant.ALL_RECORDS
        ),
        holds_against=_holds_against(job),
        signal_to_noise=signal_to_noise,
        sites=tuple(promises),
        replaced=replaced,
        withheld=tuple(_withheld(job)),
    )


def plan_of(
    job: JobSpec,
    name: SiteId,
    data: tuple[Dataset, Dataset],
    *,
    num_trained: int,
    max_delta: float,
) -> SitePlan:
    """Plan what a site promises of records that it gives noise itself.

    Args:
        job: With such a unit.
        name: The site.
        data: Its training and held-out data.
        num_trained: See ``ModelPool.num_trained``.
        max_delta: See ``LedgerContext``.

    Raises:
        JobError: The promise cannot be kept; the message names the site.
        SiteError: The site holds too few records for the largest step.
    """
    try:
        return _plan(job, data, num_trained, max_delta)
    except JobError as error:
        raise JobError(f"site {name!r}: {error.reason}", key=error.key) from error


def _plan(
    job: JobSpec, data: tuple[Dataset, Dataset], num_trained: int, max_delta: float
) -> SitePlan:
    private = job.privacy.differential_privacy
    train, held_out = data
    num_records, cap = num_units(job, train), private.target_epsilon
    if cap is None:
        raise ValueError("a checked job with differential privacy has a target")
    delta = sum_privacy.delta_of_records(job, train, held_out, most=max_delta)
    if job.statistics is not None:
        return _statistics_plan(job, cap, delta)
    once = standardise.events(job, train)
    multiplier = private.noise_multiplier or _multiplier(
        job, num_records, cap, delta, once
    )
    training = PrivateTraining(
        clip_norm=private.clip_norm,
        noise_multiplier=multiplier,
        clipping=private.clipping,
    )
    try:
        mechanism = training.mechanism(num_trained)
    except ValueError as error:  # Beyond what the grid of the noise represents.
        raise JobError(str(error), key="privacy.differential_privacy") from None
    (_, first), *later = events_by_round(job, num_records, mechanism)
    found = SitePlan(
        epsilon_cap=cap,
        delta=delta,
        training=training,
        round_event=first,
        later=tuple(later),
        held_out=_held_out(job, held_out_units(job, train, held_out), delta),
        num_rounds=job.rounds + _reserve(job),
        reserve=_reserve(job),
        most_steps=most_private_steps(job, num_records),
        num_evaluations=_num_evaluations(job),
        once=once,
    )
    _check_schedule(found)
    return found


def _reserve(job: JobSpec) -> int:
    """Rounds of training that are held in reserve; none where nothing is trained."""
    private = job.privacy.differential_privacy
    return 0 if evaluates_only(job) else private.reserve_rounds


def _statistics_plan(job: JobSpec, cap: float, delta: float) -> SitePlan:
    """Plan a release of all sums for each stage; lost rounds are held in reserve."""
    private, asked = job.privacy.differential_privacy, table(job)
    num_rounds = len(asked.stages) + private.reserve_rounds
    multiplier = private.noise_multiplier or noise_multiplier(
        cap, delta, 1.0, num_rounds, slack=SLACK
    )
    try:
        event = mechanism_of(asked, asked.stages[0], multiplier).event()
    except ValueError as error:  # Beyond what the sums have room for.
        raise JobError(str(error), key="privacy.differential_privacy") from None
    return SitePlan(
        epsilon_cap=cap,
        delta=delta,
        training=None,
        round_event=event,
        held_out=None,
        num_rounds=num_rounds,
        reserve=private.reserve_rounds,
        num_evaluations=0,
    )


def _check_schedule(plan: SitePlan) -> None:
    """Refuse rounds of different rates that do not all fit below the cap.

    Noise that the job sets need not reach the cap. Results could then choose which
    rounds fill it, and for that choice epsilon is no bound (see ``Releases``).
    """
    if not plan.later:
        return
    needed = accountant.epsilon([*plan.once, *plan.training_events], plan.delta)
    if needed > plan.epsilon_cap:
        raise JobError(
            f"all rounds together would take epsilon {needed:.4g}, beyond "
            f"target_epsilon, {plan.epsilon_cap:g}; with training.accumulate_from all "
            "rounds and those in reserve must fit. Remove this key, raise it, or run "
            "fewer rounds",
            key="privacy.differential_privacy.noise_multiplier",
        )


def _multiplier(
    job: JobSpec,
    num_records: int,
    cap: float,
    delta: float,
    once: Sequence[PrivacyEvent],
) -> float:
    """The noise with which all planned steps stay within the target."""
    firsts = [*first_rounds(job.training), max(job.rounds, 1) + 1]
    jobs = [in_round(job, first) for first in firsts[:-1]]
    kinds = [
        (
            sampling_rate(one, num_records),
            (last - first) * num_private_steps(one, num_records),
        )
        for one, (first, last) in zip(jobs, pairwise(firsts), strict=True)
    ]
    # The kind that costs most comes first, and with it what is held in reserve.
    kinds.sort(reverse=True)
    (rate, steps), *more = kinds
    reserve = job.privacy.differential_privacy.reserve_rounds
    steps += reserve * most_private_steps(job, num_records)
    return noise_multiplier(
        cap, delta, rate, steps, slack=SLACK, beside=once, more=more
    )


def _plans_in_sum(federation: Federation, shared: SumPrivacy) -> dict[SiteId, SitePlan]:
    """What each site promises where noise adds up inside the secure sum."""
    job = federation.job
    private = job.privacy.differential_privacy
    if private.target_epsilon is None:
        raise ValueError("a checked job with differential privacy has a target")
    training = None
    if private.unit == "joint":
        training = PrivateTraining(
            clip_norm=private.clip_norm,
            noise_multiplier=shared.share.multiplier,
            clipping=private.clipping,
            in_sum=True,
        )
    return {
        name: SitePlan(
            epsilon_cap=private.target_epsilon,
            delta=shared.deltas[name],
            training=training,
            round_event=event,
            held_out=_held_out(job, federation.site_data[name][1], shared.deltas[name]),
            num_rounds=job.rounds + _reserve(job),
            num_evaluations=_num_evaluations(job),
            once=standardise.events(job, federation.site_data[name][0]),
            noise_varies=private.noise_multiplier is None,
        )
        for name, event in shared.events.items()
    }


def _holds_against(job: JobSpec) -> str:
    private = job.privacy.differential_privacy
    aggregator = "the aggregator with its relays" if job.relays else "the aggregator"
    if not private.in_sum:
        return f"{aggregator}, all other sites and the public, whatever they do"
    colluding = private.colluding_sites
    sites = "one of the sites" if colluding == 1 else f"{colluding} of the sites"
    return (
        f"{aggregator} and the public together with {sites}, as long as the other "
        "sites in a sum add their noise"
    )


def _withheld(job: JobSpec) -> Iterator[str]:
    """Say what leaves no site, and what leaves beside the updates."""
    private = job.privacy.differential_privacy
    yield "training losses never leave a site, and answers contain no record counts"
    if job.evaluation.every == 0:
        yield "held-out results never leave a site"
    elif private.held_out == "public":
        yield (
            "held-out results leave without noise: the job declares the held-out data "
            "public"
        )
    else:
        yield "held-out results leave with noise, charged only to the held-out records"
    if private.standardise is not None:
        yield (
            "the mean and deviation of each feature at a site get noise, and count "
            "towards epsilon"
        )
    if leaves_steps_open(job):
        yield "rounds take at most so many steps; each is charged for those it takes"
    if private.adaptive_clip:
        yield (
            "the number of updates within the clip norm leaves only as a noisy sum, "
            "which counts towards epsilon"
        )


def _held_out(job: JobSpec, data: Dataset, delta: float) -> HeldOutMechanism | None:
    """Noise of a run's evaluations, including those held in reserve."""
    private, every = job.privacy.differential_privacy, job.evaluation.every
    if every == 0 or private.held_out == "public" or private.target_epsilon is None:
        return None
    multiplier = noise_multiplier(
        private.target_epsilon, delta, 1.0, _num_evaluations(job), slack=SLACK
    )
    return HeldOutMechanism(
        noise_multiplier=multiplier,
        predictions=_predictions(job, data),
        num_records=coarse(len(data)),
        loss=loss_of(job.training),
        metrics=noised_of(job.training),
    )


def _num_evaluations(job: JobSpec) -> int:
    """The initial model, every so many rounds, the last one, and for a resume."""
    every = job.evaluation.every
    if every == 0:
        return 0
    reserve = job.privacy.differential_privacy.reserve_rounds
    return 2 + job.rounds // every + reserve


def _predictions(job: JobSpec, data: Dataset) -> int:
    """Most predictions of one held-out record."""
    if most_of_a_record(job.training) == 1:
        return 1
    windows, _ = data.batch(np.array([0]))
    return int(windows.shape[1]) - 1


def _promise(name: SiteId, plan: SitePlan) -> SitePrivacy:
    held_out = plan.held_out
    return SitePrivacy(
        site=name,
        epsilon_cap=plan.epsilon_cap,
        delta=plan.delta,
        noise_multiplier=plan.round_event.noise_multiplier,
        sampling_rate=plan.largest_event.sampling_rate,
        steps_per_round=plan.largest_event.steps,
        held_out_noise=None if held_out is None else held_out.standard_deviation(),
    )
