"""Gathering under secure aggregation: the aggregator learns the sum, nothing else.

Drives ``privacy.secagg`` over a grid, one exchange after another::

    setup        S1 contract out, public keys back     S2 all keys out, assent back
    each round   R1 model out, masked updates back
                 with a threshold below N also: R2 survivors out, assent back;
                 R3 assents out, shares back

Each masked update is folded into one accumulator as it lands, so that memory is one
model whatever the number of sites. A round is tried once: what is lost is not asked
for again, since two sums of one round differ by a single update. The setup is made
before the first round, and again when a site has lost its keys: ``secure_setup``. Sites
that deal or release wrong shares are not asked again: ``blame``.

Shape suffixes: d float values of the model, h words of the header.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from aggregator.blame import Blame
from aggregator.kept_states import KeptStates
from aggregator.masked_round import MaskedRound, OpenedSum
from aggregator.secure_exchange import (
    SecureExchange,
    losing_the_round,
)
from aggregator.secure_setup import RunSetup
from aggregator.sum_forms import LevelSums, RingSums
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.members import Members
from federation.messages import (
    RoundTask,
    SecureStep,
    TaskKind,
)
from federation.protocols import Grid, RunState
from federation.rounds.gather import (
    evaluates,
    has_before,
    present_cohort,
    round_tasks,
)
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import BARRIER, Schedule, schedule_of
from federation.vectors import Allocate, Layout, Vector, in_memory
from privacy.dp.adaptive_clip import next_clip
from privacy.secagg.agreement.certificate import OpenedRound, before_rounds, certify
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.arithmetic.levels import LevelPlan
from privacy.secagg.errors import TooFewSites
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.setup import AggregatorSetup, SetupRecord


@dataclass(eq=False)
class SecureGather:
    """The ``federation.rounds.gather.Gather`` that sees masked updates only.

    Attributes:
        layout: Layout of the model.
        grid: The way to the sites.
        identity: The aggregator's own.
        contract: What all have agreed on.
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
    schedule: Schedule = field(init=False)

    def __post_init__(self) -> None:
        """Send nothing yet."""
        self.schedule = schedule_of(self.job)
        self._run_setup = RunSetup(self.contract)
        self._exchange = SecureExchange(
            run_id=self.contract.run_id,
            grid=self.grid,
            deadline_seconds=self.job.schedule.round_deadline_seconds,
            run_setup_of=lambda _: self._run_setup,
        )
        self._states = KeptStates(self.job, self.layout)
        self._opened: OpenedRound | None = None  # The newest round with a sum.
        form = LevelSums if self.contract.levels else RingSums
        self._sums = form(self.contract, self.layout.size, self.allocate)

    def cohort(
        self, members: Members, drawn: Sequence[SiteId]
    ) -> tuple[Members, tuple[SiteId, ...]]:
        """Ask all who have not left; see ``federation.rounds.gather.Gather``."""
        return present_cohort(members, drawn, quorum=self.job.minimum_sites)

    def update(
        self,
        record: RoundRecord,
        out_d: Vector,  # noqa: ARG002 -- of the seam
    ) -> Vector:
        """Have all sites train, and open the mean of their updates: it is all of them.

        See ``federation.rounds.gather.Gather``.
        """
        with losing_the_round(record):
            one = self._sum(record)
        self._opened = one.opened
        summed = [self.contract.member(i).site for i in one.opened.survivors]
        self._states.keep(record, summed, one.opened)
        # Only now: what a corrupt sum says of losses is no result.
        record.sums.training = train.read_sums(train.TRAINING, one.totals)
        record.sums.secret_evaluation = train.read_sums(train.EVALUATION, one.totals)
        record.sums.update_clip = clip = self._clip(record.state)
        record.sums.next_clip = self._next_clip(clip, one.totals)
        self._sums.follow(one, record)
        mean_d = one.mean_d
        assert mean_d is not None  # noqa: S101  # The sites have trained.
        if mean_d.size and not mean_d.any():
            record.events.warned(
                f"round {record.round_index}: the mean of the updates is exactly 0. "
                "If sites should have learned something, "
                f"clip_norm = {clip:g} is so large that their updates "
                "were rounded to 0: set privacy.secure_aggregation.clip_norm nearer to "
                "the norm of an update"
            )
        return mean_d

    def evaluation(self, record: RoundRecord) -> None:
        """Have all sites evaluate; only the sums of their results are opened."""
        with losing_the_round(record):
            one = self._sum(record)
        record.sums.secret_evaluation = train.read_sums(train.EVALUATION, one.totals)

    def _sum(self, record: RoundRecord) -> OpenedSum:
        """Sum the headers, and updates if the sites train.

        Raises:
            TooFewSites: Too few sites for some step; the round is lost.
            BadShare: The shares of a secret contradict one another.
            SumOutOfRange: Honest sites do not make such a sum.
        """
        state = record.state
        blame = Blame(self.contract, state.suspicions)
        record.change_members(record.members.leave_out(blame.left_out()))
        setup = self._set_up(record, record.members.away())
        model = train.model_digest(record.sent(), state.integers_m)
        trains, clip = record.kind is TaskKind.TRAIN, self._clip(state)
        plan, total = self._sums.begin(record) if trains else (None, None)
        body, tasks = self._tasks(record, setup=setup, model=model, plan=plan)
        facts = RoundFacts(
            round_index=record.round_index,
            cohort=setup.cohort,
            model_digest=model,
            task_digest=train.task_digest(tasks[0], body),
        )
        current = MaskedRound(setup, facts, total=total)
        record.leave_out(blame.left_out())
        schedule = self.schedule if trains else BARRIER
        self._exchange.fold(record, tasks, lambda _: current, schedule)
        self._states.settle(record, self._exchange)
        try:
            survivors = current.protocol.close_masked()
            if setup.contract.setting is Setting.P2:
                self._exchange.agree_and_reveal(record, current.protocol, survivors)
            evaluation = not trains or evaluates(self.job, state)
            return current.open(
                self.job,
                evaluation=evaluation,
                update_clip=clip,
                steps=record.steps,
            )
        finally:
            for said in blame.note(current.protocol):
                record.events.warned(f"round {record.round_index}: {said}")
            record.verdicts.suspicions = blame.suspicions()
            record.change_members(record.members.leave_out(blame.left_out()))

    def _set_up(self, record: RoundRecord, left_out: Collection[SiteId]) -> SetupRecord:
        """Find the setup in force; make a new one first if that is due.

        Raises:
            TooFewSites: A site is missing, and too few others have keys.
        """
        self._exchange.note_returns(record)
        if self._run_setup.is_due:
            self._run_setup.attempt()
            try:
                self._run_setup.take(self._new_setup(record, left_out))
            except TooFewSites as error:
                if self._run_setup.in_force is None:
                    raise
                index = record.round_index
                record.events.warned(
                    f"round {index} continues with the previous setup: {error}"
                )
        setup = self._run_setup.in_force
        assert setup is not None  # noqa: S101  # Else a setup was due, and made.
        return setup

    def _new_setup(
        self, record: RoundRecord, left_out: Collection[SiteId]
    ) -> SetupRecord:
        """Run S1 and S2 with every site that is not left out."""
        left_out = self._run_setup.without(left_out)
        setup = AggregatorSetup(
            identity=self.identity, contract=self.contract, left_out=left_out
        )
        asked = [SiteId(s.name) for s in self.job.sites if s.name not in left_out]
        offer = setup.offer()
        self._exchange.failed.clear()
        self._exchange.take(
            record,
            SecureStep.ADVERTISE,
            asked,
            lambda _: offer,
            lambda _, data: setup.on_advert(data),
        )
        try:
            book = setup.book()
            self._exchange.take(
                record,
                SecureStep.CONFIRM,
                asked,
                lambda _: book,
                lambda _, data: setup.on_confirm(data),
            )
            return setup.result()
        except TooFewSites:
            self._run_setup.note_silent(self._exchange.silent(setup.missing()))
            raise

    def _tasks(
        self,
        record: RoundRecord,
        *,
        setup: SetupRecord,
        model: bytes,
        plan: LevelPlan | None,
    ) -> tuple[train.TrainBody, list[RoundTask]]:
        """Write every site's task; a new site also gets the confirms.

        Returns:
            What all tasks carry besides the model, and the tasks.
        """
        opened = self._opened or before_rounds(setup.setup_hash)
        certificate = certify(opened, model, self.identity)
        held, divisor = self._exchange.held, self._sums.divisor
        asked = record.members.present(record.cohort)
        steps = {site: len(each) for site, each in record.steps_of.items()}
        cohort = [self.contract.member(number).site for number in setup.cohort]
        body = train.TrainBody(
            setup_hash=setup.setup_hash,
            confirms=b"",
            certificate=certificate,
            update_clip=self._clip(record.state),
            plan=plan,
            steps_by_site=tuple(steps.get(site, 0) for site in cohort) if steps else (),
        )
        return body, round_tasks(
            record,
            held=held,
            states=self._states.name(record, asked),
            secure=lambda site: train.write_train(
                replace(
                    body,
                    confirms=self._run_setup.confirms_for(site),
                    divisor=divisor if has_before(record, held, site) else 0.0,
                )
            ),
        )

    def _clip(self, state: RunState) -> float:
        """The clip norm of updates in the next round."""
        adapted = state.update_clip
        return self.contract.clip_norm if adapted is None else adapted

    def _next_clip(self, clip: float, totals: Mapping[str, float]) -> float | None:
        """Adapt the clip norm to the sites' bits; None if it is fixed."""
        private = self.job.privacy.differential_privacy
        if train.WITHIN_CLIP not in totals:
            return None
        return next_clip(
            clip,
            first=self.contract.clip_norm,
            within=0.5 + totals[train.WITHIN_CLIP] / totals[train.WEIGHT],
            quantile=private.clip_quantile,
            rate=private.clip_rate,
        )
