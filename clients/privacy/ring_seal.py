"""A site's seal with secure aggregation: updates leave only masked.

Here they leave as words of the ring; see ``level_seal`` for those in few levels. What
leaves beside the masked words is public: the round, the site, signed digests.

Shape suffixes: d float values of the model.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from clients.methods.registry import follow_clipped_
from clients.privacy.cohorts import CohortRule
from clients.privacy.groups import GroupRule
from clients.privacy.masking import Masking, SealedUpdate, SumNoise, check_clip
from clients.training.site import Work, WorkResult
from clients.training.update import Form, beyond_clip
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
)
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import (
    ByteVector,
    HeaderVector,
    Layout,
    Vector,
    Words,
)
from privacy.keystream import RandomBytes
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.policy import Group, LocalPolicy
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

RESTARTED = "has no keys for this run, because it was restarted, and needs a new setup"


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
        groups: Its part in drawing groups, or its group; None where all sites are in
            one sum.
        threads: Threads of the arithmetic.
        most_evaluated: Predictions that its held-out results count for at most.
        by_capacity: Whether sites of a sum take different numbers of local steps.
    """

    identity: Identity
    policy_of: Callable[[Layout], LocalPolicy]
    memory: RoundMemory
    random_bytes: RandomBytes
    cohorts: CohortRule
    noise: SumNoise | None = None
    groups: GroupRule | Group | None = None
    threads: int = 1
    most_evaluated: int = MAX_PREDICTIONS
    by_capacity: bool = False


@dataclass(eq=False)
class RingRound(Form[SealedUpdate]):
    """One round at a site, whose update leaves as words of the ring.

    Attributes:
        task: What the aggregator asks for.
        body: What the task has of the protocol.
        session: The site's part of the protocol.
        work: Does what is asked.
        share: See ``Masking``.
        masking: Masks what leaves, once the round has begun.
    """

    task: RoundTask
    body: train.TrainBody
    session: SiteSession
    work: Work
    share: float = 1.0
    masking: Masking = field(init=False)

    def check(self) -> None:
        """Check the form in which the update is asked for against the contract.

        Raises:
            ProtocolError: They differ.
        """
        if self.body.plan is not None or self.session.contract.levels:
            raise ProtocolError("was asked for few levels, and the job says none")

    def model(self) -> Words:
        """Return the model as the certificate names it."""
        return self.task.weights_d

    def facts(self) -> RoundFacts:
        """Check the model and find the state that the round begins with.

        Returns:
            What the keys of the round rest on.

        Raises:
            ProtocolError: The model is not the certified one, or not the site's.
        """
        task, session = self.task, self.session
        self.work.check_model()
        model = train.model_digest(self.model(), task.integers_m)
        session.check_model(
            self.body.certificate, round_index=task.round_index, model_digest=model
        )
        self.restore()
        return RoundFacts(
            round_index=task.round_index,
            cohort=session.cohort,
            model_digest=model,
            task_digest=train.task_digest(task, self.body),
        )

    def restore(self) -> None:
        """Begin with the state of one round, the same at all sites of a sum."""
        self.work.begin_with_named()

    def do(self) -> WorkResult[SealedUpdate]:
        """Do what is asked."""
        return self.work.do(self)

    def update(
        self, weights_d: Vector, result: LocalWeights | LocalUpdate
    ) -> SealedUpdate:
        """Turn trained weights into masked words; see ``Masking.update``."""
        sealed = self.masking.update(weights_d, result)
        follow_clipped_(result.kept, weights_d, sealed.clip_factor)
        return sealed


class RingSeal:
    """Answers leave masked; the aggregator sees only sums."""

    def __init__(self, name: SiteId, protection: Protection) -> None:
        """Seal the answers of the site of this name."""
        self._name = name
        self._protection = protection
        self._setup: SiteSetup | None = None
        self._session: SiteSession | None = None
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
        return step_answer(task, task.step, body)

    def _expire(self, round_index: int) -> None:
        if self._session is not None:
            self._session.expire(round_index)

    def _group_rule(self) -> GroupRule:
        rule = self._protection.groups
        if not isinstance(rule, GroupRule):
            raise ProtocolError("was asked to draw groups, but the job has none")
        return rule

    def _advertise(self, body: bytes, layout: Callable[[], Layout]) -> bytes:
        group, offer = self._take_offer(body)
        setup = self._begin_setup(group, layout())
        advert = setup.on_offer(offer)
        try:
            self._protection.cohorts.check_contract(setup.contract)
        except BaseException:
            setup.close()
            raise
        return advert

    def _take_offer(self, body: bytes) -> tuple[Group | None, bytes]:
        """Find with whom this site is to be summed, and the offer of the contract."""
        group = self._protection.groups
        return group.take_offer(body) if isinstance(group, GroupRule) else (group, body)

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
            raise NotSetUp(RESTARTED)
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
            raise NotSetUp(RESTARTED)
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
        round_ = self._round(task, body, session, work)
        self._begin(round_)
        try:
            words, header_h = self._work(round_)
        except (UpdateNotFinite, UpdateOutOfRange, SiteError) as error:
            work.report(task, error)
            return step_answer(task, SecureStep.DECLINE, session.decline())
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

    def _begin(self, round_: RingRound) -> None:
        """Check a task against the contract and the model, and begin its round.

        The round is recorded, and its masks exist, before anything is trained.
        """
        session, protection = round_.session, self._protection
        contract, update_clip = session.contract, round_.body.update_clip
        check_clip(contract, update_clip)
        round_.check()
        self._check_steps(round_)
        masks = session.begin_round(round_.facts())
        round_.work.context = session.context.hex()
        round_.masking = Masking(
            contract=contract,
            masks=masks,
            update_clip=update_clip,
            noise=protection.noise,
            random_bytes=protection.random_bytes,
            threads=protection.threads,
            share=round_.share,
        )

    def _check_steps(self, round_: RingRound) -> None:
        """Check the local steps of a task against those that all sites are shown.

        Raises:
            ProtocolError: They differ, or the job fixes them and some are shown.
        """
        wanted, session = round_.task.num_steps, round_.session
        shown = round_.body.steps_by_site
        differ = self._protection.by_capacity and wanted > 0
        if len(shown) != (len(session.cohort) if differ else 0):
            raise ProtocolError(
                f"received the local steps of {len(shown)} sites, of "
                f"{len(session.cohort)} in the sum"
                f"{'' if differ else ', which all take the same'}"
            )
        if differ and (mine := shown[session.cohort.index(session.number)]) != wanted:
            raise ProtocolError(
                f"was asked for {wanted} local steps, but all sites are shown {mine}"
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

    def _round(
        self, task: RoundTask, body: train.TrainBody, session: SiteSession, work: Work
    ) -> RingRound:
        return RingRound(task, body, session, work)

    def _work(self, round_: RingRound) -> tuple[ByteVector, HeaderVector]:
        """Do the work; mask the update and its report."""
        work, masking = round_.work, round_.masking
        work.answers_anyway = masking.adds_noise
        done = round_.do()
        evaluation, trained = done.evaluation, done.trained
        if trained is not None:
            self._note(masking, trained.sealed)
        if evaluation is not None:
            evaluation = train.bounded(evaluation, self._protection.most_evaluated)
        header_h = masking.header(
            None if trained is None else trained.sealed,
            training=None if trained is None else trained.training,
            evaluation=evaluation,
        )
        words = np.empty(0, np.uint8) if trained is None else trained.sealed.words
        return words, header_h


def step_answer(task: Task, step: SecureStep, body: bytes = b"") -> SecureAnswer:
    """Answer a task with a step of the protocol."""
    return SecureAnswer(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        step=step,
        body=body,
    )
