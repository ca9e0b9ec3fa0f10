"""Buffered rounds of secure sums over whichever sites are ready.

Where each site adds all its own noise, no sum of any sites needs to be kept from being
compared with another, so groups need not be fixed. An idle site gets the newest model
and trains on it, without keys. ``schedule.buffer_size`` sites with finished updates
form a cohort in the order in which they are ready; see
``privacy.secagg.agreement.free_cohort``::

    each site     model out    ready back
    each cohort   S1, S2: keys    R1: masked updates back    the sum makes a model

Everybody in a cohort is idle, so it waits for none that trains, and others train on. If
one vanishes before all have their keys, the others are ready again: no site has sealed
its update. After that the sum is lost, for a site seals an update once, and its sites
get the next model.

Each site scales its update by the share that its age leaves when its cohort forms, as
all of them see. If models are made before the sum is opened, the sum is scaled again by
the share that these leave: an update counts at most as much as its age would leave, and
not at all beyond ``schedule.max_staleness``.

An aggregator that dies forgets who is ready, and what its cohorts were at. Sites train
again for the next one, under the same number if they have sealed no update for it. So
no update counts twice, and a model that was saved has all that count in it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aggregator.buffered_sums import BufferedGroups, Flight, to_all
from aggregator.group_sums import OpenGroup
from aggregator.masked_round import MaskedRound
from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.members import Members
from federation.messages import (
    MaskedUpdate,
    Reply,
    RoundTask,
    SecureAnswer,
    SecureStep,
    Task,
    TaskKind,
)
from federation.rounds.gather import evaluates, present_cohort, round_tasks
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import OpenTask
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.free_cohort import (
    FinishedUpdate,
    FreeCohort,
    write_free_offer,
)
from privacy.secagg.agreement.groups import group_contract
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.setup import AggregatorSetup


class _CohortGroup(OpenGroup):
    """A group for one sum."""

    def __init__(self, whole: Contract, cohort: FreeCohort) -> None:
        super().__init__(group_contract(whole, cohort.sites, cohort.digest))
        self.cohort = cohort


@dataclass(eq=False)
class FreeCohorts(BufferedGroups):
    """The ``federation.rounds.gather.Gather`` of cohorts of whoever is ready."""

    def __post_init__(self) -> None:
        """Send nothing yet."""
        super().__post_init__()
        self._waiting = self._flying.keys()
        # Of each site what it was asked to train, and when; whose update is finished.
        self._asked: dict[SiteId, FinishedUpdate] = {}
        self._since: dict[SiteId, float] = {}
        self._ready: dict[SiteId, FinishedUpdate] = {}

    def cohort(
        self, members: Members, drawn: Sequence[SiteId]
    ) -> tuple[Members, tuple[SiteId, ...]]:
        """Ask all sites that have not left, if these are enough for a sum."""
        return present_cohort(members, drawn, quorum=self.job.sites_in_sum)

    def evaluation(self, record: RoundRecord) -> None:
        """Give up what sites are at, and open one sum of their results."""
        updates = [FinishedUpdate(site=site, round_index=0) for site in record.cohort]
        cohort = self._cohort_of(record, updates)
        self._groups = [_CohortGroup(self.contract, cohort)]
        super().evaluation(record)

    def _offer(self, setup: AggregatorSetup) -> bytes:
        (group,) = self._groups
        assert isinstance(group, _CohortGroup)  # noqa: S101 -- as made above
        return write_free_offer(group.cohort, setup.offer())

    def _lose_all(self) -> None:
        # Nobody waits for these: they keep an update, or have answered a step.
        self._early |= self._ready.keys()
        for flight in self._flights.values():
            self._early |= {reply.message.site for reply in flight.replies}
        self._ready.clear()
        super()._lose_all()
        self._group_of = {site: group for group in self._groups for site in group.sites}

    def _note_flying(self, record: RoundRecord) -> None:
        """Forget updates that are too old by now, or whose sites have left."""
        newest = record.state.round_index
        for site, update in [*self._ready.items()]:
            is_late = not self.schedule.share(newest - update.based_on)
            if is_late or site not in record.cohort:
                del self._ready[site]
        self._forget()
        self._early = self._flying.keys() - self._busy()

    def _busy(self) -> set[SiteId]:
        return {task.site for task in self._dispatcher.open}

    def _forget(self, but: Collection[SiteId] = ()) -> None:
        """Forget tasks that nothing comes of any more."""
        held = self._busy() | self._ready.keys() | {*but}
        held.update(*(group.sites for group in self._flights))
        for site in self._flying.keys() - held:
            del self._flying[site]

    def _tasks_for(self, record: RoundRecord, sites: Sequence[SiteId]) -> list[Task]:
        """Send idle sites the newest model, without any keys."""
        index, newest = record.round_index, record.state.round_index
        model = train.model_digest(record.sent(), record.state.integers_m)
        for site in sites:
            self._flying[site] = OpenTask(site, index, newest, 0)
            self._asked[site] = FinishedUpdate(
                site=site, round_index=index, based_on=newest, model_digest=model
            )
        return [*round_tasks(record, sites=sites)]

    def _expect(self, record: RoundRecord, group: OpenGroup) -> None:
        """Expect nothing else: the sites of a cohort have had their tasks before it."""

    def _going_on(
        self, record: RoundRecord, replies: Iterator[Reply]
    ) -> Iterator[Reply]:
        yield from super()._going_on(record, self._without_ready(record, replies))
        self._forget(self._early)

    def _without_ready(
        self, record: RoundRecord, replies: Iterator[Reply]
    ) -> Iterator[Reply]:
        """Note who is ready, form cohorts, and pass all other replies on."""
        for reply in replies:
            answer = reply.message
            if isinstance(answer, SecureAnswer) and answer.step is SecureStep.READY:
                task = self._flying.get(answer.site)
                self._since[answer.site] = reply.asked_seconds
                self._exchange.take_answers(
                    record,
                    SecureStep.READY,
                    [reply],
                    lambda site, _: self._take_ready(record, site),
                    task.round_index if task else None,
                )
                self._dispatcher.send(self._new_cohorts(record))
            elif isinstance(answer, MaskedUpdate):
                asked = self._since.get(answer.site, reply.asked_seconds)
                yield replace(reply, asked_seconds=asked)  # Its task is older.
            else:
                yield reply
            del answer, reply  # One update at a time: the next is about to land.

    def _take_ready(self, record: RoundRecord, site: SiteId) -> SiteId:
        """Note that a site has a finished update.

        Raises:
            ProtocolError: It is of no use.
        """
        group = self._group_of.get(site)
        if site not in self._flying or site in self._ready or group in self._flights:
            raise ProtocolError("answered twice, or was not asked")
        update = self._asked[site]
        if not self.schedule.share(record.state.round_index - update.based_on):
            self._early.add(site)  # It is asked nothing more in this round.
            raise ProtocolError(
                f"is based on the model of round {update.based_on}, which is too old"
            )
        self._ready[site] = update
        return site

    def _cohort_of(
        self, record: RoundRecord, updates: Collection[FinishedUpdate]
    ) -> FreeCohort:
        ordered = sorted(updates, key=lambda update: update.site)
        return FreeCohort(round_index=record.round_index, updates=tuple(ordered))

    def _new_cohorts(self, record: RoundRecord) -> list[Task]:
        """Form a cohort of the first sites that are ready, as long as they suffice."""
        tasks: list[Task] = []
        size = self.job.sites_in_sum
        there = [site for site in self._ready if site in record.cohort]
        while len(there) >= size:
            chosen = [self._ready.pop(site) for site in there[:size]]
            there = there[size:]
            cohort = self._cohort_of(record, chosen)
            group = _CohortGroup(self.contract, cohort)
            self._group_of |= dict.fromkeys(group.sites, group)
            keys = group.new_keys(self.identity, group.sites)
            flight = self._flights[group] = Flight(
                keys=keys,
                sites=group.sites,
                evaluates=cohort.is_fresh and evaluates(self.job, record.state),
            )
            offer = to_all(write_free_offer(cohort, keys.offer()))
            tasks += self._ask(flight, SecureStep.ADVERTISE, offer)
        return tasks

    def _after_step(
        self, record: RoundRecord, group: OpenGroup, flight: Flight
    ) -> Sequence[Task]:
        """Go on with a cohort; if it lacks a site, the others are ready again."""
        keys = flight.keys
        tasks = super()._after_step(record, group, flight)
        if group not in self._flights and keys is not None:
            there = [site for site in group.sites if site not in keys.missing()]
            self._ready = {site: self._asked[site] for site in there} | self._ready
            return self._new_cohorts(record)
        return tasks

    def _train(self, record: RoundRecord, group: OpenGroup) -> list[RoundTask]:
        """Have a cohort seal its updates: the tasks of before, without the model."""
        setup, flight = group.run_setup.in_force, self._flights[group]
        assert setup is not None and isinstance(group, _CohortGroup)  # noqa: S101, PT018
        body = train.TrainBody(
            setup_hash=setup.setup_hash,
            confirms=setup.confirms,
            certificate=b"",
            update_clip=self.contract.clip_norm,
        )
        tasks = [
            RoundTask(
                run_id=record.run_id,
                round_index=update.round_index,
                site=update.site,
                kind=TaskKind.TRAIN,
                layout_digest=self.layout.digest,
                weights_d=np.empty(0, np.float32),
                integers_m=np.empty(0, np.int64),
                evaluate=False,
                evaluate_after=False,
                secure=train.write_train(body),
                based_on=update.based_on,
            )
            for update in group.cohort.updates
        ]
        facts = RoundFacts(
            round_index=group.cohort.round_index,
            cohort=setup.cohort,
            model_digest=group.cohort.digest,
            task_digest=train.task_digest(tasks[0], body),
        )
        ring = group.contract.ring()
        total = MaskedSum(self.layout.size, ring, allocate=self.allocate)
        flight.step, flight.keys = None, None
        flight.round = MaskedRound(setup, facts, total=total)
        flight.round_index = facts.round_index
        flight.based_on = facts.round_index - 1
        self._early -= {*group.sites}
        return tasks

    def _share(self, group: OpenGroup, age: int) -> float:
        """What models that were made since the cohort formed leave of its sum."""
        assert isinstance(group, _CohortGroup)  # noqa: S101 -- as all groups here
        oldest = age + max(map(group.cohort.age, group.cohort.updates))
        return self.schedule.share(age) if self.schedule.share(oldest) else 0.0
