"""Buffered rounds of secure sums: each group of sites goes at its own pace.

The job names the groups. Each is a secure aggregation of its own, as in
``group_sums``, and its sums are the updates of FedBuff (arXiv:2106.06639). A group
without open tasks makes new keys where these are due, and then gets the newest model;
answers of other groups are folded meanwhile::

    each group   S1, S2 if keys are due    R1 model out, masked updates back
                 with a threshold below the group's size also: R2, R3
    each model   sums of at least ``schedule.buffer_size`` updates

Where fewer sites of a group answer than the threshold, the group's round is lost, and
the group gets the next model. A round has the number of the model that comes next
when it begins, so no group is asked twice under one number, and what is open when an
aggregator dies is never asked for again: no sum counts twice.

A group's sums are all over the same sites but those that drop out, which its sites
judge as in ``secure_sum``, and those of two groups over none that are the same, so that
no two differ by a few more. As in synchronous rounds, the aggregator
sees how one sum after another depends on the model that it sent.

Shape suffixes: d float values of the model.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from aggregator.blame import Blame
from aggregator.combine import combine_rule
from aggregator.group_sums import GroupGather, OpenGroup, losing_the_setup, pooled
from aggregator.masked_round import MaskedRound, OpenedSum
from aggregator.secure_exchange import asked_to_agree, losing_the_round
from aggregator.secure_setup import RunSetup
from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.members import Members, Standing
from federation.messages import (
    Reply,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteFailure,
    Task,
)
from federation.protocols import WeightedUpdate
from federation.rounds.gather import evaluates, part_of_step
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import Dispatcher, OpenTask, ScheduleView, schedule_of
from federation.vectors import Vector
from privacy.secagg.agreement.certificate import without_sum
from privacy.secagg.agreement.contract import Setting
from privacy.secagg.agreement.groups import named_groups
from privacy.secagg.arithmetic.ring import SumOutOfRange
from privacy.secagg.errors import BadShare, TooFewSites
from privacy.secagg.protocol import train
from privacy.secagg.protocol.setup import AggregatorSetup


@dataclass(slots=True, eq=False)
class Flight:
    """What one group is at.

    Attributes:
        step: The step of its new keys, or of opening its sum; None while it trains.
        keys: The keys that are being made.
        replies: To that step.
        sites: Whom it asks in a step.
        round: The round that it trains in.
        round_index: Number of that round.
        based_on: The round whose model it was sent.
        evaluates: Whether its sites evaluate that model.
        steps: The local steps of the round, if they are chosen.
    """

    step: SecureStep | None = None
    keys: AggregatorSetup | None = None
    sites: Sequence[SiteId] = ()
    replies: list[Reply] = field(default_factory=list)
    round: MaskedRound | None = None
    round_index: int = 0
    based_on: int = 0
    evaluates: bool = False
    steps: range | None = None


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A sum of the buffer, the part of a fresh one's weight that it has, and so on."""

    group: OpenGroup
    opened: OpenedSum
    share: float
    is_fresh: bool

    @property
    def sites(self) -> tuple[SiteId, ...]:
        """Those whose updates are in the sum."""
        survivors = self.opened.opened.survivors
        return tuple(self.group.contract.member(i).site for i in survivors)

    @property
    def weight(self) -> float:
        return self.share * self.opened.totals[train.WEIGHT]


@dataclass(eq=False)
class BufferedGroups(GroupGather):
    """The ``federation.rounds.gather.Gather`` of groups at their own pace."""

    def __post_init__(self) -> None:
        """Send nothing yet."""
        super().__post_init__()
        self.schedule = schedule_of(self.job)
        self.form_groups(named_groups(self.job.schedule.groups))
        deadline_seconds = self.job.schedule.round_deadline_seconds
        self._dispatcher = Dispatcher(self.grid, deadline_seconds=deadline_seconds)
        self._flights: dict[OpenGroup, Flight] = {}
        # Of each site of these the task that it was or will be sent, answered or not.
        self._flying: dict[SiteId, OpenTask] = {}
        # Those who answered before this round, or are asked nothing in it.
        self._early: set[SiteId] = set()
        self._waiting: Collection[SiteId] = ()  # See ``ScheduleView``; all have tasks.
        self._arrived: list[_Arrived] = []

    def update(self, record: RoundRecord, out_d: Vector) -> Vector:
        """Wait for sums of enough sites; see ``federation.rounds.gather.Gather``."""
        self._arrived.clear()
        with losing_the_round(record):
            self._fill(record)
            if self._num_updates() < (self.job.buffer_size or 0):
                raise TooFewSites(
                    f"sums of {self._num_updates()} updates came, and a model needs "
                    f"{self.job.buffer_size}"
                )
        found, sums = self._arrived, record.sums
        for one in found:
            self._states.keep(record, one.sites, one.opened.opened)
        fresh = [one for one in found if one.is_fresh]
        sums.training = pooled(train.TRAINING, [one.opened for one in found])
        sums.secret_evaluation = pooled(train.EVALUATION, [one.opened for one in fresh])
        sums.evaluators = tuple(site for one in fresh for site in one.sites)
        sums.update_clip = self.contract.clip_norm
        combined_d = combine_rule(self.job.aggregation)(_updates(found), out_d)
        part = self._num_updates() / len(self.job.sites)
        combined_d *= part_of_step([(one.weight, one.share) for one in found], part)
        return combined_d

    def evaluation(self, record: RoundRecord) -> None:
        """Give up what groups are at, and have all evaluate the model."""
        for task, num_bytes in self._dispatcher.withdraw(as_surplus=True).items():
            record.give_up(task.site, num_bytes)
        self._exchange.labelled = self._dispatcher.labelled
        self._lose_all()
        super().evaluation(record)

    def _fewest_groups(self, bad: int) -> int:  # noqa: ARG002 -- none is tolerated
        return 1

    def _absent(self, members: Members) -> Collection[SiteId]:
        return members.away()

    def _threshold(self, group: Sequence[SiteId]) -> int:
        return self.job.group_threshold(group)

    def _offer(self, setup: AggregatorSetup) -> bytes:
        return setup.offer()

    def _num_updates(self) -> int:
        return sum(len(one.sites) for one in self._arrived)

    def _fill(self, record: RoundRecord) -> None:
        """Send to groups that are at nothing, and fold answers, until it is enough."""
        self._exchange.note_returns(record)
        self._note_flying(record)
        record.verdicts.carry(self._flying.values())
        replies = self._dispatcher.replies(
            self.schedule,
            ScheduleView(
                round_index=record.round_index,
                rounds=self.job.rounds,
                cohort=record.cohort,
                open=self._dispatcher.open,
                buffered=self._num_updates,
                waiting=self._waiting,
            ),
            write=lambda sites: self._tasks_for(record, sites),
            tally=record,
            now=record.clock.monotonic,
        )
        replies = self._going_on(record, replies)
        self._exchange.fold_replies(record, replies, self._round_of)
        self._states.settle(record, self._exchange)

    def _note_flying(self, record: RoundRecord) -> None:
        """Note what this round expects of sites that are at work since earlier ones."""
        busy = {task.site for task in self._dispatcher.open}
        for group, flight in self._flights.items():
            if flight.round is None:
                self._expect(record, group)
            elif flight.step is not None:  # They have answered its round.
                busy -= {*group.sites}
        for site in self._early:
            if self._group_of[site] not in self._flights:
                self._flying.pop(site, None)
        self._early = self._flying.keys() - busy

    def _tasks_for(self, record: RoundRecord, sites: Sequence[SiteId]) -> list[Task]:
        """Write what groups get that are at nothing: an offer of keys, or the model."""
        tasks: list[Task] = []
        for group in dict.fromkeys(self._group_of[site] for site in sites):
            flight = self._flights[group] = Flight()
            self._expect(record, group)
            if group.run_setup.is_due:
                flight.sites = group.present(record.cohort)
                flight.keys = group.new_keys(self.identity, flight.sites)
                offer = self._offer(flight.keys)
                tasks += self._ask(flight, SecureStep.ADVERTISE, to_all(offer))
            else:
                tasks += self._train(record, group)
        return tasks

    def _expect(self, record: RoundRecord, group: OpenGroup) -> None:
        """Note what the sites of a group will answer."""
        numbers = record.round_index, record.state.round_index, 0
        sites = group.present(record.cohort)
        self._flying.update({site: OpenTask(site, *numbers) for site in sites})

    def _ask(
        self, flight: Flight, step: SecureStep, body: Callable[[SiteId], bytes]
    ) -> list[SecureTask]:
        """Write a step of new keys, or of opening a sum."""
        flight.step = step
        return [
            SecureTask(
                run_id=self.contract.run_id,
                round_index=flight.round_index,
                site=site,
                step=step,
                body=body(site),
            )
            for site in flight.sites
        ]

    def _train(self, record: RoundRecord, group: OpenGroup) -> list[RoundTask]:
        """Begin a group's round with the newest model."""
        setup, flight = group.run_setup.in_force, self._flights[group]
        assert setup is not None  # noqa: S101  # Else a setup was due, and made.
        tasks, rounds = self._begin(record, [(group, setup)])
        flight.step, flight.keys, flight.round = None, None, rounds[group]
        flight.round_index = record.round_index
        flight.based_on = record.state.round_index
        flight.evaluates = evaluates(self.job, record.state)
        flight.steps = record.steps
        self._expect(record, group)
        return tasks

    def _going_on(
        self, record: RoundRecord, replies: Iterator[Reply]
    ) -> Iterator[Reply]:
        """Keep replies about keys, and let a group go on once its last reply is in."""
        for reply in replies:
            group = self._group_of.get(reply.message.site)
            flight = None if group is None else self._flights.get(group)
            # Not to an earlier task: the site's own is closed by now.
            busy = {task.site for task in self._dispatcher.open}
            about_keys = isinstance(reply.message, SecureAnswer | SiteFailure)
            about_keys &= reply.message.site not in busy
            if flight is not None and flight.step is not None and about_keys:
                flight.replies.append(reply)
            else:
                yield reply
            del reply  # One update at a time: the next is about to land.
            self._go_on(record)
        if record.surplus:
            self._lose_all()
        self._go_on(record)  # The grid may have closed tasks without a word.

    def _go_on(self, record: RoundRecord) -> None:
        """Take the next step of each group that waits for nobody."""
        busy = {task.site for task in self._dispatcher.open}
        for group, flight in list(self._flights.items()):
            if not busy.isdisjoint(group.sites):
                continue
            if flight.round is None:
                self._dispatcher.send(self._after_step(record, group, flight))
            else:
                self._close(record, group, flight)
        complete = {site for one in self._arrived for site in one.sites}
        record.pending.clear()  # Others wait for their sums.
        record.pending.update({*record.verdicts.answered} - complete)

    def _after_step(
        self, record: RoundRecord, group: OpenGroup, flight: Flight
    ) -> Sequence[Task]:
        """Use the answers to a step of new keys, and write the next tasks."""
        keys, step, replies = flight.keys, flight.step, flight.replies
        assert keys is not None and step is not None  # noqa: S101, PT018 -- a step is on
        flight.replies = []
        accept = keys.on_advert if step is SecureStep.ADVERTISE else keys.on_confirm
        self._exchange.take_answers(record, step, replies, lambda _, data: accept(data))
        if group.contract.setting is Setting.P1:
            # All would have to answer, also with the keys of before: nobody trains in
            # vain.
            group.run_setup = RunSetup(group.contract)
        with losing_the_setup(record.events, group):
            if step is SecureStep.ADVERTISE:
                book = keys.book()
                return self._ask(flight, SecureStep.CONFIRM, to_all(book))
            group.run_setup.take(keys.result())
        if group.run_setup.in_force is not None and group.present(record.cohort):
            return self._train(record, group)
        self._early |= {*group.sites}  # They were asked nothing more.
        self._lose(group)
        return ()

    def _lose(self, group: OpenGroup) -> None:
        """End what a group is at; a round that has begun has no sum."""
        flight = self._flights.pop(group)
        for site in {*group.sites} - self._early:
            self._flying.pop(site, None)
        if flight.round is not None:
            group.opened = without_sum(flight.round_index)

    def _lose_all(self) -> None:
        for group in list(self._flights):
            self._lose(group)

    def _unmask(
        self, record: RoundRecord, group: OpenGroup, flight: Flight
    ) -> list[SecureTask]:
        """Take the next step towards a group's sum: none if it can be opened.

        Raises:
            TooFewSites: It never can.
        """
        assert flight.round is not None  # noqa: S101 -- it trains
        current, step = flight.round.protocol, flight.step
        replies, flight.replies = flight.replies, []
        if step is None:
            survivors = current.close_masked()
            if group.contract.setting is Setting.P1:
                return []
            flight.sites = asked_to_agree(record, current, survivors)
            heads = current.survivors()
            return self._ask(flight, SecureStep.SURVIVORS, to_all(heads))
        is_last = step is SecureStep.REVEAL
        accept = current.on_shares if is_last else current.on_consent
        self._exchange.take_answers(
            record, step, replies, lambda _, data: accept(data), flight.round_index
        )
        if is_last:
            return []
        flight.sites = current.close_consents()
        return self._ask(flight, SecureStep.REVEAL, current.reveal)

    def _close(self, record: RoundRecord, group: OpenGroup, flight: Flight) -> None:
        """Open a group's sum, and put it into the buffer; or take a step towards it."""
        current, age = flight.round, record.state.round_index - flight.based_on
        assert current is not None  # noqa: S101 -- it trains
        reason, share, opened = "", self._share(group, age), None
        try:
            if tasks := self._unmask(record, group, flight):
                self._dispatcher.send(tasks)
                return
            found = current.open(
                self.job,
                evaluation=flight.evaluates,
                update_clip=self.contract.clip_norm,
                steps=flight.steps,
            )
        except (TooFewSites, BadShare, SumOutOfRange) as error:
            reason = str(error)
            if isinstance(error, SumOutOfRange):
                record.verdicts.complaints.append(f"the sum of {group.names}: {error}")
        else:
            opened = found.opened
            if share:
                self._arrived.append(_Arrived(group, found, share, is_fresh=age == 0))
            else:
                reason = f"the model of round {flight.based_on} is too old"
        self._lose(group)
        group.opened = opened or group.opened
        self._settle_blame(record, group, current)
        if reason:
            record.events.warned(
                f"round {flight.round_index} has no sum of {group.names}: {reason}"
            )

    def _share(self, group: OpenGroup, age: int) -> float:  # noqa: ARG002 -- all alike
        """The part of its weight that the sum of a group keeps; 0 if it is too old."""
        return self.schedule.share(age)

    def _settle_blame(
        self, record: RoundRecord, group: OpenGroup, current: MaskedRound
    ) -> None:
        """Leave out the sites of a group that dealt or released wrong shares."""
        known, mine = record.verdicts.suspicions or record.state.suspicions, group.sites
        blame = Blame(group.contract, known.among(mine))
        for said in blame.note(current.protocol):
            record.events.warned(f"round {record.round_index}: {said}")
        record.verdicts.suspicions = known.joined(blame.suspicions())
        left_out = record.members.standing(Standing.LEFT_OUT)
        others = {site: why for site, why in left_out.items() if site not in mine}
        record.change_members(record.members.leave_out(others | {**blame.left_out()}))

    def _round_of(self, site: SiteId) -> MaskedRound:
        group = self._group_of.get(site)
        flight = None if group is None else self._flights.get(group)
        if flight is None or flight.round is None:
            raise ProtocolError("has no update for a sum that is open")
        return flight.round


def to_all(body: bytes) -> Callable[[SiteId], bytes]:
    """Send the same to each site."""
    return lambda _site: body


def _updates(found: Sequence[_Arrived]) -> Iterator[WeightedUpdate]:
    """The groups' means by the weight of their sites, less what their age takes."""
    for one in found:
        assert one.opened.mean_d is not None  # noqa: S101 -- the sites have trained
        yield WeightedUpdate(
            site=one.group.sites[0], delta_d=one.opened.mean_d, weight=one.weight
        )
