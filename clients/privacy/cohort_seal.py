"""A site's seal where cohorts form of whichever sites are ready.

The site trains first, on a model that comes without keys, and keeps the update. Then it
seals it for one cohort: see ``privacy.secagg.agreement.free_cohort``. What makes such
sums sound is the site's own noise: an update has all the noise that its site was
charged for before it trained, so every sum, and every difference of sums, is
post-processing of what was paid. What it is charged is unchanged: for each task that it
begins. That secure aggregation hides it as well rests on these rules, which the site
enforces:

* An update is sealed once, in one sum. It is forgotten as soon as it is, when a newer
  task comes, and when the run ends. So no two sums have it in common.
* The cohort has at least as many sites as the job says (``schedule.buffer_size``), and
  its contract as many as the operator demands; all are pinned in the roster.
* The cohort names the round and the model that the update was trained on, and no
  update in it is older than the job allows.

The age of each update is public. Each site scales its own by the share that its age
leaves, once it is clipped, so that the bound of the sum holds.

Shape suffixes: d float values of the model.
"""

from dataclasses import KW_ONLY, dataclass

from clients.privacy.masking import SealedUpdate
from clients.privacy.ring_seal import (
    Protection,
    RingRound,
    RingSeal,
    step_answer,
)
from clients.training.site import TrainResult, Work, WorkResult
from clients.training.update import Form, prepare
from federation.errors import ProtocolError, SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    MetricSums,
    RoundTask,
    SecureStep,
    SiteMessage,
    TaskKind,
)
from federation.protocols import LocalUpdate, LocalWeights
from federation.rounds.schedule import schedule_of
from federation.vectors import Vector
from privacy.secagg.agreement.free_cohort import (
    FinishedUpdate,
    FreeCohort,
    read_free_offer,
)
from privacy.secagg.agreement.policy import Group
from privacy.secagg.errors import CohortRefused, NotSetUp
from privacy.secagg.protocol import train
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.round_memory import check_above


class _Finished(Form[LocalUpdate]):
    """An update without a mask, which stays at the site."""

    def update(
        self, weights_d: Vector, result: LocalWeights | LocalUpdate
    ) -> LocalUpdate:
        """Take the update out of trained weights, in their memory.

        Raises:
            NotFinite: Training left the finite numbers.
        """
        return LocalUpdate(
            update_d=prepare(weights_d, result),
            integers_m=result.integers_m,
            num_examples=result.num_examples,
            num_steps=result.num_steps,
            training=result.training,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A finished update, and what was done for it."""

    update: FinishedUpdate
    result: LocalUpdate
    evaluation: MetricSums | None


@dataclass(eq=False)
class KeptRound(RingRound):
    """The sum of a cohort, for which a kept update is sealed."""

    _: KW_ONLY
    cohort: FreeCohort
    kept: _Kept

    def facts(self) -> RoundFacts:
        """Name the cohort in place of a model, of which its sites may have several."""
        return RoundFacts(
            round_index=self.cohort.round_index,
            cohort=self.session.cohort,
            model_digest=self.cohort.digest,
            task_digest=train.task_digest(self.task, self.body),
        )

    def do(self) -> WorkResult[SealedUpdate]:
        """Seal the update; results are reported if all are of the newest model."""
        result = self.kept.result
        return WorkResult(
            trained=TrainResult(
                sealed=self.masking.update(result.update_d, result),
                integers_m=result.integers_m,
                num_examples=result.num_examples,
                num_steps=result.num_steps,
                training=result.training,
                evaluation_after=None,
            ),
            evaluation=self.kept.evaluation if self.cohort.is_fresh else None,
            phases=(),
            resources=None,
        )


class LastRound(RingRound):
    """An evaluation, before which each site restores what its own last round left."""

    def restore(self) -> None:
        """Begin with it."""
        self.work.begin_with_last()


class CohortSeal(RingSeal):
    """Updates are kept until they are sealed for a cohort."""

    def __init__(self, name: SiteId, protection: Protection, job: JobSpec) -> None:
        """Seal the answers of the site of this name, in sums that the job allows."""
        super().__init__(name, protection)
        self._size, self._schedule = job.buffer_size or 0, schedule_of(job)
        self._kept: _Kept | None = None
        self._cohort: FreeCohort | None = None  # Of the newest setup.

    def close(self) -> None:
        """Forget the update, and erase the keys of its cohort."""
        self._kept = self._cohort = None
        super().close()

    def answer(self, task: RoundTask, work: Work) -> SiteMessage:
        """Train and keep the update, or seal it; see ``clients.training.site.Seal``."""
        if task.kind is TaskKind.TRAIN and not task.secure:
            return self._train(task, work)
        return super().answer(task, work)

    def _train(self, task: RoundTask, work: Work) -> SiteMessage:
        """Train on the newest model; say only that the update is finished.

        Raises:
            ReplayedRound: The task is not newer than every one before.
        """
        if task.evaluate_after:
            raise ProtocolError(
                "secure aggregation does not evaluate a site's own model"
            )
        last = self._protection.memory.last(task.run_id)
        if self._kept is not None:
            last = max(last, self._kept.update.round_index)
        check_above(task.run_id, task.round_index, last)
        work.check_model()
        self.close()
        work.begin_with_last()
        try:
            done = work.do(_Finished())
        except SiteError as error:
            work.report(task, error)
            return step_answer(task, SecureStep.DECLINE)
        assert done.trained is not None  # noqa: S101 -- it was asked to train
        update = FinishedUpdate(
            site=self._name,
            round_index=task.round_index,
            based_on=task.based_on,
            model_digest=train.model_digest(task.weights_d, task.integers_m),
        )
        self._kept = _Kept(update, done.trained.sealed, done.evaluation)
        return step_answer(task, SecureStep.READY)

    def _take_offer(self, body: bytes) -> tuple[Group | None, bytes]:
        cohort, offer = read_free_offer(body)
        self._check_cohort(cohort)
        self._cohort = cohort
        return Group(sites=frozenset(cohort.sites), partition=cohort.digest), offer

    def _check_cohort(self, cohort: FreeCohort) -> None:
        """Check a cohort before any key is made for it.

        Raises:
            CohortRefused: Its sum would hide too little, or not the update that this
                site keeps, or updates that are too old.
            NotSetUp: This site keeps no update.
        """
        if not self._protection.cohorts.is_private:
            raise CohortRefused(
                "sums over whichever sites are ready need differential privacy for "
                "records that this site's operator counts (policy.max_epsilon, "
                "policy.max_delta)"
            )
        if len(cohort.updates) < self._size:
            raise CohortRefused(
                f"a cohort of {len(cohort.updates)} sites is too small: the job says "
                f"{self._size} (schedule.buffer_size)"
            )
        if self._name not in cohort.sites:
            raise CohortRefused("the cohort does not contain this site")
        if cohort.evaluates:
            return
        kept = self._kept
        if kept is None:
            raise NotSetUp(
                "keeps no update: it was sealed before, or this site was restarted"
            )
        for each in cohort.updates:
            self._check_update(cohort, each, kept.update)

    def _check_update(
        self, cohort: FreeCohort, update: FinishedUpdate, mine: FinishedUpdate
    ) -> None:
        if update.site == self._name and update != mine:
            raise CohortRefused(
                f"the cohort has this site's update of round {update.round_index}, "
                f"but the one that it keeps is of round {mine.round_index}, or was "
                "trained on another model"
            )
        if update.round_index == mine.round_index and (
            (update.based_on, update.model_digest) != (mine.based_on, mine.model_digest)
        ):
            raise CohortRefused(
                f"site {update.site!r} was sent another model in round "
                f"{mine.round_index} than this site"
            )
        if not self._schedule.share(cohort.age(update)):
            raise CohortRefused(
                f"the update of {update.site!r} is {cohort.age(update)} models old, "
                "which is more than the job allows (schedule.max_staleness)"
            )

    def _round(
        self, task: RoundTask, body: train.TrainBody, session: SiteSession, work: Work
    ) -> RingRound:
        """Take the kept update: whatever happens now, it is never sealed again.

        Raises:
            ProtocolError: The keys are of another cohort, or for other work.
            NotSetUp: The update was sealed before.
        """
        cohort, kept = self._cohort, self._kept
        evaluates = task.kind is TaskKind.EVALUATE
        if cohort is None or session.contract.partition != cohort.digest:
            raise ProtocolError("was asked with the keys of an earlier cohort")
        if evaluates != cohort.evaluates:
            raise ProtocolError(f"has keys of a cohort that does not {task.kind.value}")
        if evaluates:
            return LastRound(task, body, session, work)
        if kept is None:
            raise NotSetUp("has sealed its update before, and does so only once")
        self._kept = None
        share = self._schedule.share(cohort.age(kept.update))
        return KeptRound(task, body, session, work, share, cohort=cohort, kept=kept)
