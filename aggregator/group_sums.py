"""Gathering by a robust rule: one secure sum for each group of sites.

The groups are drawn by all sites together (``privacy.secagg.agreement.groups``) before
the first round. Each is a secure aggregation of its own, with its own contract and
setup, in which all sites must answer (P1). A round is one exchange with all sites::

    draw         commitments back     all commitments out, secrets back
    setup        as in ``secure_sum``, for each group
    each round   R1 model out, masked updates back; a sum for each group
                 the rule of the job over the groups' means

A group without a sum is left out if the others suffice for the rule; where a site has
left the run, its group is not even asked. A sum that honest
sites do not make shows that a bad site is in its group, so there is one less elsewhere.

Shape suffixes: d float values of the model.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from operator import add

from aggregator.combine import combine_rule
from aggregator.kept_states import KeptStates
from aggregator.masked_round import MaskedRound, OpenedSum
from aggregator.secure_exchange import (
    SecureExchange,
    losing_the_round,
)
from aggregator.secure_setup import RunSetup
from federation.errors import ProtocolError
from federation.events import GroupsCompared
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.members import Members, Standing
from federation.messages import (
    MetricSums,
    RoundTask,
    SecureStep,
    StateName,
    TaskKind,
)
from federation.protocols import Grid, Suspicions, WeightedUpdate
from federation.rounds.gather import evaluates, present_cohort, round_tasks
from federation.rounds.round_events import RoundEvents
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import BARRIER, Schedule
from federation.vectors import Allocate, Layout, Vector, in_memory, norm
from privacy.secagg.agreement.certificate import (
    OpenedRound,
    before_rounds,
    certify,
    without_sum,
)
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.agreement.groups import (
    AggregatorDraw,
    Draw,
    DrawResult,
    group_contract,
    write_group_offer,
    write_start,
)
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.ring import SumOutOfRange
from privacy.secagg.errors import BadShare, TooFewSites
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.setup import AggregatorSetup, SetupRecord

DRAWS_BEFORE_FAULT = 2  # A site may be slow once.


class OpenGroup:
    """One group, over all rounds."""

    def __init__(self, contract: Contract) -> None:
        """Begin without keys."""
        self.contract = contract
        self.sites = tuple(member.site for member in contract.members)
        self.run_setup = RunSetup(contract)
        self.opened: OpenedRound | None = None  # The newest round of the run.
        self.remark = ""  # Why the newest round has no sum of it that counts.

    def present(self, cohort: Collection[SiteId]) -> tuple[SiteId, ...]:
        """Its sites that are asked, of those of a round; none if they are too few."""
        found = tuple(site for site in self.sites if site in cohort)
        return found if len(found) >= self.contract.quorum else ()

    def new_keys(
        self, identity: Identity, present: Collection[SiteId]
    ) -> AggregatorSetup:
        """Begin a setup without its sites that are not asked."""
        self.run_setup.attempt()
        left_out = {*self.sites} - {*present}
        return AggregatorSetup(
            identity=identity, contract=self.contract, left_out=left_out
        )

    @property
    def names(self) -> str:
        """Its sites, for messages."""
        return ", ".join(self.sites)


_Sums = Mapping[OpenGroup, OpenedSum]  # Of the groups whose sum counts.


@dataclass(eq=False)
class GroupGather:
    """The ``federation.rounds.gather.Gather`` that compares sums of groups.

    Attributes:
        job: Its ``privacy.secure_aggregation.groups`` says how many.
        layout: Layout of the model.
        grid: The way to the sites.
        identity: The aggregator's own.
        contract: Contract of all sites; those of the groups follow from it.
        allocate: Makes the vectors of sums.
        schedule: A round is opened once, with all its sites.
    """

    job: JobSpec
    _: KW_ONLY
    layout: Layout
    grid: Grid
    identity: Identity
    contract: Contract
    allocate: Allocate = in_memory
    schedule: Schedule = field(default=BARRIER, init=False)

    def __post_init__(self) -> None:
        """Send nothing yet."""
        self._groups: list[OpenGroup] = []
        self._group_of: dict[SiteId, OpenGroup] = {}
        self._secrets: Mapping[int, bytes] = {}
        self._states = KeptStates(self.job, self.layout)
        self._exchange = SecureExchange(
            run_id=self.contract.run_id,
            grid=self.grid,
            deadline_seconds=self.job.schedule.round_deadline_seconds,
            run_setup_of=self._run_setup_of,
        )

    def cohort(
        self, members: Members, drawn: Sequence[SiteId]
    ) -> tuple[Members, tuple[SiteId, ...]]:
        """Ask only groups that may have a sum if they suffice, or else all.

        See ``federation.rounds.gather.Gather``.
        """
        gone = self._absent(members)
        here = [site for site in drawn if site not in gone]
        found = [present for g in self._groups if (present := g.present(here))]
        if len(found) < self._fewest_groups(self.job.aggregation.byzantine_sites):
            quorum = self.job.minimum_sites
            return present_cohort(members, drawn, quorum=quorum)
        unasked = {*self._group_of, *gone}.difference(*found)
        return members, tuple(site for site in drawn if site not in unasked)

    def _absent(self, members: Members) -> Collection[SiteId]:
        """Sites that the cohorts of rounds are without."""
        return members.standing(Standing.GONE).keys()

    def update(self, record: RoundRecord, out_d: Vector) -> Vector:
        """Have all sites train, open the mean of each group's updates, combine them.

        See ``federation.rounds.gather.Gather``.
        """
        with losing_the_round(record):
            sums, byzantine = self._sums(record)
        for group in self._groups:
            found = sums.get(group)
            group.opened = (
                without_sum(record.round_index) if not found else found.opened
            )
            if found:
                self._states.keep(record, group.sites, found.opened)
        record.sums.training = pooled(train.TRAINING, sums.values())
        record.sums.secret_evaluation = pooled(train.EVALUATION, sums.values())
        record.sums.update_clip = self.contract.clip_norm
        rule = combine_rule(replace(self.job.aggregation, byzantine_sites=byzantine))
        combined_d = rule(_updates(sums), out_d)
        self._compare(record.events, sums, combined_d)
        return combined_d

    def _compare(self, events: RoundEvents, sums: _Sums, combined_d: Vector) -> None:
        """Emit how each group's mean relates to the rule's result."""
        means = {group: one.mean_d for group, one in sums.items()}
        found = [means.get(group) for group in self._groups]
        norms = (None if mean_d is None else norm(mean_d) for mean_d in found)
        distances = (None if d is None else norm(d - combined_d) for d in found)
        events.emit(
            GroupsCompared(
                at=events.clock.now(),
                round_index=events.round_index,
                groups=tuple(group.sites for group in self._groups),
                norms=tuple(norms),
                distances=tuple(distances),
                remarks=tuple(group.remark for group in self._groups),
            )
        )

    def evaluation(self, record: RoundRecord) -> None:
        """Have all sites evaluate; only the groups' sums of results are opened."""
        with losing_the_round(record):
            sums, _ = self._sums(record)
        record.sums.secret_evaluation = pooled(train.EVALUATION, sums.values())

    def _sums(self, record: RoundRecord) -> tuple[_Sums, int]:
        """Open the sums of a round.

        Returns:
            Those of the groups that have one, and how many of these groups a bad
            site may be in.

        Raises:
            TooFewSites: Too few groups have one for the rule; the round is lost.
            DrawRefused: The groups do not follow from the draw.
        """
        state = record.state
        record.change_members(record.members.leave_out(state.suspicions.faults))
        faults = state.suspicions.faults.items()
        record.leave_out({site: why for site, why in faults if site in record.cohort})
        rounds = self._exchange_updates(record)
        evaluation = record.kind is TaskKind.EVALUATE or evaluates(self.job, state)
        sums: dict[OpenGroup, OpenedSum] = {}
        bad = self.job.aggregation.byzantine_sites
        for group in self._groups:
            left = [site for site in group.sites if site not in record.cohort]
            group.remark = "a site has left" if left else "it has no keys"
        for group, current in rounds.items():
            names, group.remark = group.names, ""
            try:
                survivors = current.protocol.close_masked()
                if group.contract.setting is Setting.P2:
                    self._exchange.agree_and_reveal(record, current.protocol, survivors)
                sums[group] = current.open(
                    self.job,
                    evaluation=evaluation,
                    update_clip=self.contract.clip_norm,
                    steps=record.steps,
                )
            except (TooFewSites, BadShare) as error:
                group.remark = str(error)
                record.events.warned(
                    f"round {record.round_index} has no sum of {names}: {error}"
                )
            except SumOutOfRange as error:
                group.remark = str(error)
                bad = max(0, bad - 1)  # One bad site at least is accounted for.
                record.events.warned(
                    f"round {record.round_index} leaves out the sum of {names}: {error}"
                )
                record.verdicts.complaints.append(f"the sum of {names}: {error}")
        needed = self._fewest_groups(bad)
        if len(sums) < needed:
            raise TooFewSites(
                f"{len(sums)} of {len(self._groups)} groups have a sum, but "
                f"{self.job.aggregation.combine} needs {needed}"
            )
        return sums, bad

    def _fewest_groups(self, bad: int) -> int:
        """How many groups the rule needs if this many may contain a bad site."""
        is_krum = self.job.aggregation.combine in {"krum", "multi_krum"}
        return max(len(self._groups) // 2 + 1, 2 * bad + (3 if is_krum else 1))

    def _exchange_updates(self, record: RoundRecord) -> Mapping[OpenGroup, MaskedRound]:
        """R1: send the model to all groups that have keys, and fold the answers."""
        setups = self._set_up(record)
        tasks, rounds = self._begin(record, setups)

        def round_of(site: SiteId) -> MaskedRound:
            group = self._group_of.get(site)
            if group not in rounds:
                raise ProtocolError("answered a round that its group has no part in")
            return rounds[group]

        self._exchange.fold(record, tasks, round_of)
        self._states.settle(record, self._exchange)
        return rounds

    def _begin(
        self, record: RoundRecord, setups: Sequence[tuple[OpenGroup, SetupRecord]]
    ) -> tuple[list[RoundTask], dict[OpenGroup, MaskedRound]]:
        """Write the tasks of groups that have keys, and open their sums."""
        model = train.model_digest(record.sent(), record.state.integers_m)
        bodies, tasks = self._tasks(record, setups, model)
        first = {task.site: task for task in tasks}
        rounds: dict[OpenGroup, MaskedRound] = {}
        for group, setup in setups:
            one = next(site for site in group.sites if site in first)
            facts = RoundFacts(
                round_index=record.round_index,
                cohort=setup.cohort,
                model_digest=model,
                task_digest=train.task_digest(first[one], bodies[one]),
            )
            total = None
            if record.kind is TaskKind.TRAIN:
                ring = group.contract.ring()
                total = MaskedSum(self.layout.size, ring, allocate=self.allocate)
            rounds[group] = MaskedRound(setup, facts, total=total)
        return tasks, rounds

    def _tasks(
        self,
        record: RoundRecord,
        setups: Sequence[tuple[OpenGroup, SetupRecord]],
        model: bytes,
    ) -> tuple[Mapping[SiteId, train.TrainBody], list[RoundTask]]:
        """Write the tasks of all sites whose group has keys.

        Returns:
            What each site's task carries besides the model, and the tasks.
        """
        bodies: dict[SiteId, train.TrainBody] = {}
        states: dict[SiteId, StateName] = {}
        for group, setup in setups:
            opened = group.opened or before_rounds(setup.setup_hash)
            certificate = certify(opened, model, self.identity)
            asked = group.present(record.cohort)
            states.update(self._states.name(record, asked))
            for site in asked:
                bodies[site] = train.TrainBody(
                    setup_hash=setup.setup_hash,
                    confirms=group.run_setup.confirms_for(site),
                    certificate=certificate,
                    update_clip=self.contract.clip_norm,
                )
        tasks = round_tasks(
            record,
            states=states,
            secure=lambda site: (
                train.write_train(bodies[site]) if site in bodies else b""
            ),
        )
        return bodies, [task for task in tasks if task.site in bodies]

    def _set_up(self, record: RoundRecord) -> list[tuple[OpenGroup, SetupRecord]]:
        """Find the setups in force; make new ones where they are due.

        Raises:
            TooFewSites: Groups cannot be drawn, or none has keys.
            DrawRefused: The groups do not follow from the draw.
        """
        self._exchange.note_returns(record)
        if not self._groups:
            self._draw(record)
        asked = [group for group in self._groups if group.present(record.cohort)]
        due = [group for group in asked if group.run_setup.is_due]
        if due:
            self._new_setups(record, due)
        ready = [(group, group.run_setup.in_force) for group in asked]
        found = [(group, setup) for group, setup in ready if setup is not None]
        if not found:
            raise TooFewSites("no group of sites has keys")
        return found

    def _draw(self, record: RoundRecord) -> None:
        """Have the sites draw the groups; sites that drew before get the same.

        Raises:
            TooFewSites: Someone kept the draw from ending. Who did so twice is left
                out of the next one.
        """
        known = record.state.suspicions
        whole, num_groups = self.contract, self.job.privacy.secure_aggregation.groups
        assert num_groups is not None  # noqa: S101  # Else there is one sum.
        everyone = Draw(members=whole.members, num_groups=num_groups)
        draw = everyone.without(known.faults)
        start, half = write_start(everyone, known.faults), AggregatorDraw(draw)
        try:
            self._exchange.take(
                record,
                SecureStep.COMMIT,
                draw.sites,
                lambda _: start,
                lambda _, data: half.on_commitment(data),
            )
            if not half.is_known():
                commitments = half.commitments()
                self._exchange.take(
                    record,
                    SecureStep.DRAW,
                    draw.sites,
                    lambda _: commitments,
                    lambda _, data: half.on_reveal(data),
                )
            outcome = half.outcome()
        except TooFewSites:
            suspected = _suspected(known, draw, half.missing(), record.events)
            record.verdicts.suspicions = suspected
            record.change_members(record.members.leave_out(suspected.faults))
            raise
        self._secrets = half.secrets
        self.form_groups(outcome)

    def form_groups(self, outcome: DrawResult) -> None:
        """Write the contract of each group."""
        self._groups = [
            OpenGroup(
                group_contract(
                    self.contract, group, outcome.digest, self._threshold(group)
                )
            )
            for group in outcome.groups
        ]
        self._group_of = {site: group for group in self._groups for site in group.sites}

    def _threshold(self, group: Sequence[SiteId]) -> int:
        """Fewest updates of a group's sums: all, so that a bad site spoils one only."""
        return len(group)

    def _new_setups(self, record: RoundRecord, due: Sequence[OpenGroup]) -> None:
        """Run S1 and S2 with every site of some groups; a group may fail alone."""
        halves: dict[OpenGroup, AggregatorSetup] = {}
        sites = {group: group.present(record.cohort) for group in due}
        for group in due:
            halves[group] = group.new_keys(self.identity, sites[group])
        offers = {group: self._offer(half) for group, half in halves.items()}
        self._exchange.take(
            record,
            SecureStep.ADVERTISE,
            [site for group in due for site in sites[group]],
            lambda site: offers[self._group_of[site]],
            lambda site, data: halves[self._group_of[site]].on_advert(data),
        )
        books: dict[OpenGroup, bytes] = {}
        for group in due:
            with losing_the_setup(record.events, group):
                books[group] = halves[group].book()
        self._exchange.take(
            record,
            SecureStep.CONFIRM,
            [site for group in books for site in sites[group]],
            lambda site: books[self._group_of[site]],
            lambda site, data: halves[self._group_of[site]].on_confirm(data),
        )
        for group in books:
            with losing_the_setup(record.events, group):
                group.run_setup.take(halves[group].result())

    def _offer(self, setup: AggregatorSetup) -> bytes:
        """Write what a group's sites are offered."""
        return write_group_offer(self._secrets, setup.offer())

    def _run_setup_of(self, site: SiteId) -> RunSetup | None:
        group = self._group_of.get(site)
        return None if group is None else group.run_setup


@contextmanager
def losing_the_setup(events: RoundEvents, group: OpenGroup) -> Iterator[None]:
    """Say that a group has no new keys; it may have those of an earlier setup."""
    try:
        yield
    except TooFewSites as error:
        events.warned(
            f"round {events.round_index}: no new keys of {group.names}: {error}"
        )


def _suspected(
    known: Suspicions, draw: Draw, missing: Sequence[SiteId], events: RoundEvents
) -> Suspicions:
    """Add sites that blocked a draw; a second time is a fault.

    If most sites did, it is because of another one: they say which. No site is left
    out if a group would be smaller for it than the smallest of before.
    """
    silences, faults = Counter(known.silences), dict(known.faults)
    silences.update(missing)
    few = 2 * len(missing) < len(draw.sites)
    for site in missing if few else ():
        left = len(draw.sites) - (len(faults) - len(known.faults)) - 1
        if silences[site] < DRAWS_BEFORE_FAULT:
            continue
        if left // draw.num_groups < len(draw.sites) // draw.num_groups:
            events.warned(
                f"round {events.round_index}: {site} prevents groups from being drawn, "
                "and without it they would be too small: replace it with another site"
            )
            continue
        faults[site] = "did not reveal its secret when groups were drawn"
    return replace(known, silences=dict(silences), faults=faults)


def _updates(sums: _Sums) -> Iterator[WeightedUpdate]:
    """The groups' means, each counted once."""
    for group, one in sums.items():
        if one.mean_d is not None:
            yield WeightedUpdate(site=group.sites[0], delta_d=one.mean_d, weight=1.0)


def pooled(kind: str, sums: Iterable[OpenedSum]) -> MetricSums | None:
    """Add up the results of all groups that count, of one kind (``train``)."""
    found = [train.read_sums(kind, one.totals) for one in sums]
    known = [one for one in found if one is not None]
    return reduce(add, known) if known else None
