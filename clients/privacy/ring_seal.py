"""A site's seal with secure aggregation: updates leave only masked.

What leaves beside the masked words is public: the round, the site, signed digests.

Shape suffixes: d float values of the model.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from clients.methods.registry import follow_clipped_
from clients.privacy.cohorts import CohortRule
from clients.privacy.groups import GroupRule
from clients.privacy.masking import (
    LevelRound,
    Masking,
    SealedUpdate,
    SumNoise,
    check_clip,
    check_divisor,
    check_plan,
)
from clients.privacy.residual import stored
from clients.training.site import Work
from clients.training.update import beyond_clip
from federation.compression.fragments import fragment_of
from federation.compression.rotation import padded
from federation.errors import AggregatorAtFault, ProtocolError, SiteError
from federation.ids import SiteId
from federation.job.metrics import MAX_PREDICTIONS
from federation.messages import (
    MaskedUpdate,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteMessage,
    Task,
    TaskKind,
)
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import ByteVector, HeaderVector, Layout, Vector, Words
from privacy.keystream import RandomBytes
from privacy.secagg.agreement.certificate import OpenedRound
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.policy import Group, LocalPolicy
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import rotation_of, sum_digest
from privacy.secagg.arithmetic.levels import LevelPlan, open_levels
from privacy.secagg.arithmetic.ring import UpdateNotFinite, UpdateOutOfRange
from privacy.secagg.errors import (
    BadSignature,
    BookRefused,
    MalformedMessage,
    NotSetUp,
    UnknownSite,
    WrongContext,
)
from privacy.secagg.protocol import train
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.messages import Survivors
from privacy.secagg.protocol.round_memory import RoundMemory
from privacy.secagg.protocol.setup import SiteSetup

_LOG = logging.getLogger(__name__)

# Not a weak key: an honest aggregator does not look for it.
_WRONG_BOOK = (BadSignature, BookRefused, MalformedMessage, UnknownSite, WrongContext)

_RESTARTED = "has no keys for this run, because it was restarted, and needs a new setup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """A site's own settings for secure aggregation.

    Attributes:
        identity: The site's long-lived key.
        policy_of: What the operator demands of a contract, given the layout of the
            site's own model.
        memory: Remembers the rounds that were answered, beyond a restart.
        random_bytes: The system's source of randomness.
        cohorts: Which sums it may be part of.
        noise: What this site adds to its words, where privacy is made inside the
            sum.
        groups: Its part in drawing groups; None where all sites are in one sum.
        threads: Threads of the arithmetic.
        most_evaluated: Predictions that its held-out results count for at most.
    """

    identity: Identity
    policy_of: Callable[[Layout], LocalPolicy]
    memory: RoundMemory
    random_bytes: RandomBytes
    cohorts: CohortRule
    noise: SumNoise | None = None
    groups: GroupRule | None = None
    threads: int = 1
    most_evaluated: int = MAX_PREDICTIONS


class RingSeal:
    """Answers leave masked; the aggregator sees only sums."""

    def __init__(self, name: SiteId, protection: Protection) -> None:
        """Seal the answers of the site of this name."""
        self._name = name
        self._protection = protection
        self._setup: SiteSetup | None = None
        self._session: SiteSession | None = None
        # Round and levels of the newest update of this site.
        self._last_plan: tuple[int, LevelPlan] | None = None
        # Task in which this site took the newest step of a sum, and the sum's round.
        self._followed: tuple[int, int] | None = None
        self._has_noted = False

    def close(self) -> None:
        """Erase every key of the run: the site takes no further part in it."""
        for part in (self._session, self._setup):
            if part is not None:
                part.close()
        self._session = self._setup = None

    def step(self, task: SecureTask, layout: Callable[[], Layout]) -> SecureAnswer:
        """Take a step of the protocol; see ``clients.training.site.Seal``."""
        self._expire(task.round_index)
        if task.step is SecureStep.COMMIT:
            body = self._group_rule().commit(task.body, self._protection.identity)
        elif task.step is SecureStep.DRAW:
            body = self._group_rule().reveal(task.body)
        elif task.step is SecureStep.ADVERTISE:
            body = self._advertise(task.body, layout)
        elif task.step is SecureStep.CONFIRM:
            body = self._confirm(task.body)
        elif task.step is SecureStep.SURVIVORS:
            body = self._consent(task.body)
        elif task.step is SecureStep.REVEAL:
            body = self._reveal(task)
        else:
            raise ProtocolError(
                f"{task.step.value} is not a step that can be requested"
            )
        return _step(task, task.step, body)

    def _expire(self, round_index: int) -> None:
        if self._session is not None:
            self._session.expire(round_index)

    def _group_rule(self) -> GroupRule:
        rule = self._protection.groups
        if rule is None:
            raise ProtocolError("was asked to draw groups, but the job has none")
        return rule

    def _advertise(self, body: bytes, layout: Callable[[], Layout]) -> bytes:
        group, offer = None, body
        if self._protection.groups is not None:
            group, offer = self._protection.groups.take_offer(body)
        setup = self._begin_setup(group, layout())
        advert = setup.on_offer(offer)
        try:
            self._protection.cohorts.check_contract(setup.contract)
        except BaseException:
            setup.close()
            raise
        return advert

    def _confirm(self, body: bytes) -> bytes:
        """Check the book of keys, and sign that this site has seen it.

        Raises:
            AggregatorAtFault: It is none, or shows what an honest aggregator would
                have refused.
        """
        setup = self._current_setup()
        try:
            return setup.on_book(body)
        except _WRONG_BOOK as error:
            raise AggregatorAtFault(
                f"refuses the aggregator's book of keys: {error}"
            ) from error

    def _consent(self, body: bytes) -> bytes:
        """Sign a list of survivors, unless their sum reveals too much about others.

        A site that does not sign is no obstacle to a sum that enough others sign.
        """
        session = self._current_session()
        consent = session.on_survivors(body)
        survivors = Survivors.from_bytes(body).heads
        try:
            self._protection.cohorts.leave_out(session.contract, survivors)
        except BaseException:
            session.expire(0)  # It erases the round: its sum stays closed.
            raise
        return consent

    def _reveal(self, task: SecureTask) -> bytes:
        """Release shares; log what was wrong with those of others."""
        session = self._current_session()
        shares = session.on_reveal(task.body)
        for dispute in session.disputes:
            _LOG.warning("round %s: %s", task.round_index, dispute)
        return shares

    def _begin_setup(self, group: Group | None, layout: Layout) -> SiteSetup:
        """Begin a new setup, of a group's sites or of all.

        The session of the one before lives until this one is complete: if someone
        is missing now, those who have keys can continue without. No round is answered
        under both, since the memory of rounds outlives sessions.
        """
        if self._setup is not None:
            self._setup.close()
        protection = self._protection
        policy = protection.policy_of(layout)
        self._setup = SiteSetup(
            identity=protection.identity,
            site=self._name,
            policy=replace(policy, group=group),
            random_bytes=protection.random_bytes,
        )
        return self._setup

    def _current_setup(self) -> SiteSetup:
        if self._setup is None:
            raise ProtocolError("was asked to confirm before it received an offer")
        return self._setup

    def _current_session(self) -> SiteSession:
        if self._session is None:
            raise NotSetUp(_RESTARTED)
        return self._session

    def _session_of(self, body: train.TrainBody) -> SiteSession:
        """Find the session of a round's setup; its first task opens it.

        Raises:
            NotSetUp: This site has no keys of that setup.
        """
        session, setup = self._session, self._setup
        if session is not None and session.setup_hash == body.setup_hash:
            return session
        if setup is None or setup.setup_hash != body.setup_hash:
            raise NotSetUp(_RESTARTED)
        return self._open_session(setup, body.confirms)

    def _open_session(self, setup: SiteSetup, confirms: bytes) -> SiteSession:
        """Turn a finished setup into a session, which replaces the old one.

        Raises:
            NotSetUp: Not all sites have confirmed the same setup; it is given up.
        """
        protection = self._protection
        self._setup = None
        try:
            secrets = setup.on_confirms(confirms)
        except ProtocolError as error:
            raise NotSetUp(str(error)) from error
        try:
            protection.cohorts.join(setup.contract)  # From here on there may be a sum.
        except BaseException:
            secrets.erase()
            raise
        if self._session is not None:
            self._session.close()
        self._session = SiteSession(
            contract=setup.contract,
            identity=protection.identity,
            secrets=secrets,
            memory=protection.memory,
            random_bytes=protection.random_bytes,
        )
        return self._session

    def answer(self, task: RoundTask, work: Work) -> SiteMessage:
        """Mask what was done; see ``clients.training.site.Seal``."""
        self._expire(task.round_index)
        if not task.secure:
            raise ProtocolError("answers only with secure aggregation")
        if task.evaluate_after:
            raise ProtocolError(
                "secure aggregation does not evaluate a site's own model"
            )
        body = train.read_train(task.secure)
        session = self._session_of(body)
        contract = session.contract
        check_clip(contract, body.update_clip)
        check_plan(
            contract,
            body.plan,
            round_index=task.round_index,
            trains=task.kind is TaskKind.TRAIN,
        )
        work.check_model()
        weights_d = self._model(task, body, session, work)
        model = train.model_digest(weights_d, task.integers_m)
        session.check_model(
            body.certificate, round_index=task.round_index, model_digest=model
        )
        work.begin_with_named()
        # The round is recorded, and its masks exist, before anything is trained.
        masks = session.begin_round(
            RoundFacts(
                round_index=task.round_index,
                cohort=session.cohort,
                model_digest=model,
                task_digest=train.task_digest(task, body),
            )
        )
        work.context = session.context.hex()
        protection = self._protection
        masking = Masking(
            contract=contract,
            masks=masks,
            update_clip=body.update_clip,
            noise=protection.noise,
            random_bytes=protection.random_bytes,
            threads=protection.threads,
        )
        try:
            words, header_h = self._work(work, masking, session, body)
        except (UpdateNotFinite, UpdateOutOfRange, SiteError) as error:
            work.report(task, error)
            return _step(task, SecureStep.DECLINE, session.decline())
        except BaseException:
            session.decline()  # Never sent: it erases the round's keys.
            raise
        signed = session.finish_masked(
            vector_digest=hashlib.sha256(words.data).digest(),
            header_digest=hashlib.sha256(header_h.data).digest(),
        )
        return MaskedUpdate(
            run_id=task.run_id,
            round_index=task.round_index,
            site=self._name,
            layout_digest=task.layout_digest,
            words=words,
            header_h=header_h,
            body=signed,
            spent=work.spent(),
            based_on=task.based_on,
            fragment=task.fragment,
        )

    def _note(self, masking: Masking, sealed: SealedUpdate) -> None:
        """Write into the site's own log, once, that an update was scaled down.

        Nobody else may know. Noise in the sum asks for a bound that clips.
        """
        if sealed.is_within or masking.adds_noise or self._has_noted:
            return
        self._has_noted = True
        text = beyond_clip(sealed.norm, masking.contract.clip_norm)
        _LOG.warning("site %s: %s; not noted again", self._name, text)

    def _model(
        self, task: RoundTask, body: train.TrainBody, session: SiteSession, work: Work
    ) -> Words:
        """Return the model as the certificate names it, computed here from a sum."""
        if not work.held.takes_sums:
            return task.weights_d
        if not task.changed_to:
            return work.held.whole(task)
        if task.weights_d.size:
            self._follow(task, body, session, work)
        return work.held.receive(task)

    def _follow(
        self, task: RoundTask, body: train.TrainBody, session: SiteSession, work: Work
    ) -> None:
        """Take the step of the sum that a task carries, if it is the certified one.

        Raises:
            NotSetUp: The round of the sum is not the last one of this site.
            ProtocolError: The words are others than those that were certified.
        """
        contract, opened = session.contract, session.opened(body.certificate)
        step = task.round_index, opened.round_index
        if step == self._followed:
            return  # The same task once more, which is refused for that reason.
        if self._last_plan is None or self._last_plan[0] != opened.round_index:
            raise NotSetUp(_RESTARTED)
        plan = self._last_plan[1]
        digits = Digits(levels=plan.levels, num_sites=contract.num_sites)
        fragment = fragment_of(opened.round_index, contract.fragments)
        size, words_w = fragment.size(contract.num_values), task.weights_d
        if (
            words_w.dtype != np.uint64
            or words_w.shape != (digits.num_words(size),)
            or sum_digest(words_w) != opened.sum_digest
        ):
            raise ProtocolError(
                f"was sent a sum of round {opened.round_index} that is not the "
                "certified one"
            )
        check_divisor(contract, len(opened.survivors), body.divisor)
        mean_f = open_levels(
            words_w,
            plan=plan,
            digits=digits,
            rotation=rotation_of(contract.run_id),
            size=size,
            num_updates=len(opened.survivors),
            divisor=body.divisor,
            allocate=work.held.allocate,
        ).mean_d
        work.held.follow(task, mean_f, fragment)
        self._followed = step

    def _work(
        self,
        work: Work,
        masking: Masking,
        session: SiteSession,
        body: train.TrainBody,
    ) -> tuple[ByteVector, HeaderVector]:
        """Do the work; mask the update and its report."""
        rounds: list[LevelRound] = []
        plan = body.plan

        def begin(weights_d: Vector) -> Vector:
            round_, start_d = _level_round(
                work, session, weights_d, session.opened(body.certificate)
            )
            rounds.append(round_)
            return start_d

        if plan is not None:
            work.begin = begin
        work.answers_anyway = masking.adds_noise

        def seal(weights_d: Vector, result: LocalWeights | LocalUpdate) -> SealedUpdate:
            if plan is None:
                sent = masking.update(weights_d, result)
                self._note(masking, sent)
                follow_clipped_(result.kept, weights_d, sent.clip_factor)
                return sent
            sealed, left = masking.few_levels(
                weights_d, result, plan=plan, round_=rounds.pop()
            )
            work.leaves, work.facts = left.arrays(), left.facts()
            self._last_plan = work.task.round_index, plan
            self._note(masking, sealed)
            return sealed

        done = work.do(seal)
        evaluation, trained = done.evaluation, done.trained
        if evaluation is not None:
            evaluation = train.bounded(evaluation, self._protection.most_evaluated)
        header_h = masking.header(
            None if trained is None else trained.sealed,
            training=None if trained is None else trained.training,
            evaluation=evaluation,
        )
        words = np.empty(0, np.uint8) if trained is None else trained.sealed.words
        return words, header_h


def _level_round(
    work: Work, session: SiteSession, weights_d: Vector, opened: OpenedRound
) -> tuple[LevelRound, Vector]:
    """Settle what the round of the named state left out; find where training begins.

    Of fragments that were not exchanged, the site's own values go on.
    """
    before, start_d = stored(work.kept, session.contract), weights_d
    if before is None:
        residual_d = np.zeros(padded(session.contract.num_values), np.float32)
    else:
        left_out = opened.leaves_out(before.round_index, session.number)
        residual_d = before.settled(session.contract, left_out=left_out)
        if before.drift_d is not None:
            start_d = weights_d + before.drift_d
    round_ = LevelRound(round_index=work.task.round_index, residual_d=residual_d)
    return round_, start_d


def _step(task: Task, step: SecureStep, body: bytes) -> SecureAnswer:
    return SecureAnswer(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        step=step,
        body=body,
    )
