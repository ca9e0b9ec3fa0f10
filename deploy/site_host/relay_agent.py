"""A relay's part in runs: it passes questions on, and answers with one sum.

It trains nothing, builds no model and holds no key but its own. Of a run it keeps the
proposal, the introductions and the offered contract, so that it can continue after a
restart.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.combine import combine_rule
from aggregator.relay import PlainRelay, SecureRelay, book_in, check_book
from aggregator.weighting import SignedCounts, sums_fault, weight_of
from cloud_adapters.relays.task_queue import AskSites, QuestionKind, RelayQuestion
from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.transport.frame_references import PackedFrame, Sizes
from cloud_adapters.transport.frames import INLINE, Frames
from deploy import audit_log
from deploy.site_host import enrolment_roster
from deploy.site_host.config import SiteConfig
from deploy.site_host.run import runs_folder
from federation.durable_files import replace_file
from federation.errors import (
    AggregatorAtFault,
    FederationError,
    JobError,
    ProtocolError,
    SiteError,
    is_passing,
)
from federation.ids import RunId, SiteId, check_name
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Buffer, Clock
from federation.rounds.failures import failure
from federation.wire import frame as wire
from federation.wire.relayed import down_frames_in, up_frames, with_models
from privacy.membership import introduction, releases
from privacy.membership.introduction import Introduction, Proposal
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.contract import MAX_MEMBERS, Contract
from privacy.secagg.agreement.identity import Identity, Label, PublicIdentity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.protocol.messages import Offer

# What is left of a round's time when sites have none: for the sum, and for its way.
SITES_SHARE = 0.9
# How long sites may take to load their data, and to connect before that. Less than the
# coordinator waits by default, or a site that hangs would make its whole cloud absent.
INTRODUCE_SECONDS, CONNECT_SECONDS = 540.0, 20.0
END_SECONDS = 3.0
# Of an answer besides its vectors: a header, sealed shares, padding.
_MORE_BYTES = 1 << 25

_PROPOSAL, _OFFER, _INTRODUCED = "proposal", "offer", "introductions"
_BOOK = "book"
# Of a site's introduction: those of all sites must fit into one message, in base64.
MAX_INTRODUCTION_BYTES = introduction.MAX_BYTES // (2 * MAX_MEMBERS)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RelayedRun:
    """What a relay knows of a run.

    Attributes:
        num_values: Float values of its model.
        sites: Those behind this relay, in the order of the job.
    """

    run_id: RunId
    job: JobSpec
    num_values: int
    sites: Sequence[SiteId]


@dataclass(kw_only=True)
class RelayAgent:
    """Answers an aggregator for the sites of one cloud.

    Attributes:
        config: The relay's ``site.toml``.
        identity: Its key.
        roster: Pins the aggregator and the sites.
        ask: Reaches the sites.
        served: Sites that may connect.
        clock: Tells time.
        frames: How large messages travel from and to the aggregator.
        stopped: Ends waits for sites.
        listener: Called with a word about every refusal.
    """

    config: SiteConfig
    identity: Identity
    roster: Roster
    ask: AskSites
    served: Collection[SiteId]
    clock: Clock
    frames: Frames = INLINE
    stopped: threading.Event = field(default_factory=threading.Event)
    listener: Callable[[str], None] = _LOG.info
    _run: _RelayedRun | None = field(default=None, init=False)
    _contract: Contract | None = field(default=None, init=False)
    _book: bytes = field(default=b"", init=False, repr=False)

    @property
    def name(self) -> SiteId:
        """The relay's name."""
        return SiteId(self.config.file.name)

    def introduce(self, sealed: bytes) -> bytes:
        """Pass a proposal or statements on, and answer with all introductions.

        The end of a run is passed on, too, and has an empty answer.

        Raises:
            ProtocolError: They are not from the aggregator that the roster pins.
        """
        try:
            return self._introduced(sealed)
        except FederationError as error:
            if isinstance(error, ProtocolError):
                raise
            self.listener(f"a run is refused: {error}")
            return introduction.bundle(self._introduction(sealed, error), [])

    def _introduced(self, sealed: bytes) -> bytes:
        is_end = introduction.is_end(sealed)
        seconds = END_SECONDS if is_end else INTRODUCE_SECONDS
        question = RelayQuestion.of(
            QuestionKind.INTRODUCE,
            [sealed],
            seconds=seconds,
            max_bytes=MAX_INTRODUCTION_BYTES,
        )
        answers = self.ask(
            {site: question for site in self._sites_of(sealed) if site in self.served},
            seconds=seconds,
            patience=0.0 if is_end else CONNECT_SECONDS,
            stopped=self.stopped,
        )
        if is_end:
            return b""
        found = [
            bytes(answer)
            for site, answer in answers.items()
            if answer is not None and self._is_own(site, bytes(answer), sealed)
        ]
        bundle = introduction.bundle(self._introduction(sealed), found)
        run = self._run
        if run is not None and not introduction.are_statements(sealed):
            replace_file(self._folder(run.run_id) / _INTRODUCED, [bundle])
        return bundle

    def _is_own(self, site: SiteId, answer: bytes, sealed: bytes) -> bool:
        """Whether a site introduces itself: another's would spoil the whole bundle."""
        try:
            found = introduction.open_introduction(answer, self.roster, sealed)
        except ProtocolError as error:
            self.listener(f"the introduction of site {site!r} is dropped: {error}")
            return False
        return found.site == site

    def _signed(self, run: _RelayedRun) -> Mapping[SiteId, SignedCounts]:
        """What sites have signed of their data.

        The aggregator would refuse an update that claims more, with the whole sum.
        """
        folder = self._folder(run.run_id)
        try:
            bundle = introduction.open_bundle((folder / _INTRODUCED).read_bytes())
        except OSError:
            return {}
        _, sealed = bundle or (b"", [])
        found = map(introduction.kept_introduction, sealed)
        return {SiteId(each.site): _counts(each) for each in found}

    def answer(self, packed: PackedFrame, *, seconds: float) -> PackedFrame:
        """Pass tasks on, and answer with the sum of what comes back.

        Args:
            packed: The tasks; see ``federation.wire.relayed``.
            seconds: How long the answer may take.

        Raises:
            ProtocolError: They are not tasks of a run that was proposed, for sites of
                this relay.
            JobError: They, or the sum, are too large to go without a store, and there
                is none.
            StoreError: The store does not give or take a vector.
        """
        heads = down_frames_in(packed.frame, limit=MAX_MEMBERS)
        run = self._current(heads[0].run_id)
        _check_tasks(heads, run.sites)
        sizes = Sizes(num_floats=run.num_values, num_integers=0)
        tasks = with_models(self.frames.receive_whole(heads, packed.references, sizes))
        try:
            self._note_offer(tasks, run)
            combine = self._combiner(tasks[0], run)
            if isinstance(combine, SecureRelay):
                combine.check(tasks)
        except AggregatorAtFault as error:
            self.listener(f"round {tasks[0].round_index} is refused: {error}")
            refused = _refused(tasks, error, relay=self.name)
            return self.frames.send_whole(up_frames(None, refused))
        answers = self._asked(tasks, seconds * SITES_SHARE, run)
        through, found = (None, answers) if combine is None else combine(tasks, answers)
        return self.frames.send_whole(up_frames(through, found))

    def _asked(
        self, tasks: Sequence[Task], seconds: float, run: _RelayedRun
    ) -> list[SiteMessage]:
        """Bring each task to its site, and read what comes back."""
        largest = 4 * run.num_values + _MORE_BYTES
        questions = {
            task.site: RelayQuestion.of(
                QuestionKind.TASK,
                wire.encode(task),
                seconds=seconds,
                max_bytes=largest
                + (task.integers_m.nbytes if isinstance(task, RoundTask) else 0),
            )
            for task in tasks
            if task.site in self.served
        }
        answers = self.ask(questions, seconds=seconds, stopped=self.stopped)
        return [_read_answer(task, answers.get(task.site)) for task in tasks]

    def _combiner(
        self, task: Task, run: _RelayedRun
    ) -> PlainRelay | SecureRelay | None:
        """Make what adds answers up; None for messages that are only passed on."""
        if not isinstance(task, RoundTask):
            return None
        if not run.job.privacy.secure_aggregation.enabled:
            signed = self._signed(run)
            return PlainRelay(
                name=self.name,
                num_values=run.num_values,
                layout_digest=task.layout_digest,
                weight_of=weight_of(run.job.aggregation.weights, introduced=signed),
                combine=combine_rule(run.job.aggregation),
                fault_of=sums_fault(run.job, signed),
            )
        if self._contract is None:
            raise ProtocolError(
                f"relay {self.name!r} has not seen the contract of run {run.run_id!r}"
            )
        return SecureRelay(
            name=self.name,
            identity=self.identity,
            contract=self._contract,
            book=self._book,
        )

    def _sites_of(self, sealed: bytes) -> Sequence[SiteId]:
        """Check a proposal, statements or an end, and keep the run.

        Raises:
            ProtocolError: They are not from the aggregator.
            FederationError: This relay does not take part.
        """
        self._read_roster()
        if introduction.is_end(sealed):
            end = introduction.open_end(sealed, self.roster)
            return self._current(RunId(end.ended)).sites
        if introduction.are_statements(sealed):
            statements = introduction.open_statements(sealed, self.roster)
            return self._current(RunId(statements.run_id)).sites
        proposal = introduction.open_proposal(sealed, self.roster)
        run = self._met(proposal)
        folder = self._folder(run.run_id)
        if not (folder / _PROPOSAL).exists():
            self._check_served(run)
            digest = job_digest.digest(run.job).hex()
            about = {"job": run.job.name, "digest": digest, "rounds": run.job.rounds}
            if proposal.audit_head:
                about[audit_log.HEAD] = proposal.audit_head
            own, at, who = self.config.folder, self.clock.now(), audit_log.RELAY
            audit_log.note(own, "run.accept", run.run_id, at=at, who=who, **about)
        with file_errors("write below", folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _PROPOSAL, [sealed])
        self._run, self._contract, self._book = run, None, b""
        return run.sites

    def _met(self, proposal: Proposal) -> _RelayedRun:
        """Read a proposal, and check that this relay can take part."""
        if proposal.code_hash != code_hash().hex():
            raise SiteError(
                releases.advice(
                    site=self.name,
                    here=introduction.release(),
                    there=proposal.release,
                )
            )
        job = job_file.loads(proposal.job)
        limit = self.config.file.policy.max_values
        if proposal.num_values > limit:
            raise JobError(
                f"the model has {proposal.num_values} values, and this relay accepts "
                f"{limit} (policy.max_values)",
                key="model",
            )
        behind = [each.sites for each in job.relays if each.name == self.name]
        if not behind:
            raise JobError(
                f"relay {self.name!r} is not named by this job", key="relays"
            )
        return _RelayedRun(
            run_id=RunId(proposal.run_id),
            job=job,
            num_values=proposal.num_values,
            sites=[SiteId(s.name) for s in job.sites if s.name in behind[0]],
        )

    def _check_served(self, run: _RelayedRun) -> None:
        """Refuse a run of other sites; one that has begun continues without them."""
        strange = ", ".join(site for site in run.sites if site not in self.served)
        if strange:
            raise JobError(
                f"relay {self.name!r} does not serve {strange}: add them to "
                "serve.sites in its site.toml",
                key="relays",
            )

    def _current(self, run_id: RunId) -> _RelayedRun:
        """The run, after a restart from what was kept of it.

        Raises:
            ProtocolError: It was not proposed to this relay.
        """
        if self._run is not None and self._run.run_id == run_id:
            return self._run
        folder = self._folder(run_id)
        try:
            sealed = (folder / _PROPOSAL).read_bytes()
        except OSError:
            raise ProtocolError(
                f"run {run_id!r} has not been proposed to relay {self.name!r}"
            ) from None
        run = self._met(introduction.open_proposal(sealed, self.roster))
        self._run, self._contract, self._book = run, None, b""
        offer, book = folder / _OFFER, folder / _BOOK
        if offer.exists():
            self._contract = self._offered(offer.read_bytes(), run)
        self._book = _kept_book(book, self.listener)
        return run

    def _note_offer(self, tasks: Sequence[Task], run: _RelayedRun) -> None:
        """Keep the contract that is offered to sites: it says what to add, and how.

        And the book of the setup, which says what sites must sign.
        """
        book = book_in(tasks)
        if book and book != self._book:
            self._book = book
            replace_file(self._folder(run.run_id) / _BOOK, [book])
        for task in tasks[:1]:
            if isinstance(task, SecureTask) and task.step is SecureStep.ADVERTISE:
                self._contract = self._offered(task.body, run)
                replace_file(self._folder(run.run_id) / _OFFER, [task.body])

    def _offered(self, body: bytes, run: _RelayedRun) -> Contract:
        """Read an offer.

        Raises:
            ProtocolError: It is not the aggregator's, or of another run or relay.
        """
        offer = Offer.from_bytes(body)
        aggregator = PublicIdentity(self.roster.aggregator_key)
        aggregator.verify(
            Label.OFFER, offer.contract, offer.signature, who="the aggregator"
        )
        contract = Contract.from_bytes(offer.contract)
        key = contract.relay_named(self.name).public_key
        found = key, contract.run_id, contract.job_digest
        own = self.identity.public.key
        if found != (own, run.run_id, job_digest.digest(run.job)):
            raise ProtocolError(
                f"the contract is not that of run {run.run_id!r} with this relay's key"
            )
        return contract

    def _read_roster(self) -> None:
        """Use the newest roster that the operator has accepted."""
        try:
            self.roster = enrolment_roster.newest(
                self.config, self.roster, self.identity
            )
        except FederationError as error:
            serial = self.roster.serial
            self.listener(
                f"roster {serial} stays in use, the newer is refused: {error}"
            )

    def _folder(self, run_id: RunId) -> Path:
        try:
            return runs_folder(self.config) / check_name(run_id)
        except ValueError as error:
            raise ProtocolError(f"a run without a valid name: {error}") from None

    def _introduction(
        self, sealed: bytes, error: FederationError | None = None
    ) -> bytes:
        made = Introduction(
            version=introduction.VERSION,
            site=self.name,
            proposal=introduction.digest(sealed),
            release=introduction.release(),
            refused="" if error is None else error.outside,
            privacy=None,
            num_examples=0,
            temporary=error is not None and is_passing(error),
        )
        return introduction.seal_introduction(made, self.identity)


def _counts(said: Introduction) -> SignedCounts:
    return SignedCounts(examples=said.num_examples, held_out=said.num_held_out)


def _check_tasks(tasks: Sequence[Task], own: Collection[SiteId]) -> None:
    """Check that tasks are of one round of a run, each for another of a relay's sites.

    Raises:
        ProtocolError: They are not.
    """
    sites = [task.site for task in tasks]
    rounds = {(task.run_id, task.round_index, type(task)) for task in tasks}
    if len(rounds) != 1 or len({*sites}) != len(sites) or not {*sites} <= {*own}:
        raise ProtocolError(
            f"tasks of {len(rounds)} rounds for {', '.join(sites)}, but this relay's "
            f"sites are {', '.join(own)}"
        )


def _refused(
    tasks: Sequence[Task], error: AggregatorAtFault, *, relay: SiteId
) -> list[SiteFailure]:
    """Answer for sites that are not asked, since the question itself is wrong."""
    text = f"was not asked by its relay {relay!r}: {error}"
    return [failure(task, FailureKind.AGGREGATOR, text) for task in tasks]


def _kept_book(path: Path, listener: Callable[[str], None]) -> bytes:
    """Read the book that a relay has stored; nothing if there is none, or no longer.

    Then the relay is as one that has missed the setup.
    """
    if not path.exists():
        return b""
    found = path.read_bytes()
    try:
        check_book(found)
    except AggregatorAtFault:
        listener(
            f"{path} is damaged, and is not used: until the next setup, an answer that "
            "the aggregator refuses costs all sites of this relay their round"
        )
        return b""
    return found


def _read_answer(task: Task, data: Buffer | None) -> SiteMessage:
    """Read a site's answer; what is none becomes its failure."""
    if data is None:
        text = "is not connected to its relay, or gave it no answer in time"
        return failure(task, FailureKind.UNREACHABLE, text)
    try:
        answer = wire.decode(data)
    except ProtocolError as error:
        return failure(task, FailureKind.INVALID, str(error))
    asked = task.run_id, task.round_index, task.site
    said = answer.run_id, answer.round_index, answer.site
    if isinstance(answer, RoundTask | SecureTask) or said != asked:
        text = "answered its relay for another site, run or round"
        return failure(task, FailureKind.INVALID, text)
    return answer
