"""What runs at a site, for as long as the site is up: it takes part in runs.

Bytes in, bytes out: Flower's connection is in ``cloud_adapters.flower_node``. For each
run that was proposed and accepted the agent keeps the proposal, the ledger and what the
protocol must remember in ``runs/RUN`` of its folder, and goes on after a restart;
model, data and keys of the run are in memory.
"""

import logging
import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clients.kept_integers import KeptIntegers
from clients.model_pool import ModelPool
from clients.secure_site import Protection, SecureSite
from cloud_adapters.storage.local import LocalStore
from deploy import folder_lock, introduction, site_ranks, wiring
from deploy.data import load_data
from deploy.introduction import Introduction, Proposal
from deploy.private_sites import PrivateSites
from deploy.protection import check_layout, code_hash, header_slots
from deploy.run_folder import replace_file
from deploy.site_file import SiteConfig
from deploy.site_floor import accepted_units, check_job
from federation import job_file
from federation.errors import FederationError, JobError, ProtocolError, SiteError
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId, check_name
from federation.job import JobSpec
from federation.messages import SiteMessage, Task
from federation.protocols import Clock, SiteHandler
from federation.vectors import Layout
from privacy.secagg.floor import LocalFloor
from privacy.secagg.identity import Identity
from privacy.secagg.roster import Roster
from privacy.secagg.round_memory import FileRounds

_PROPOSAL = "proposal"

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Run:
    """A run that this site takes part in."""

    run_id: RunId
    job: JobSpec
    layout: Layout
    sealed: bytes
    handler: SiteHandler
    answer: Introduction
    stack: ExitStack


@dataclass(kw_only=True)
class SiteAgent:
    """Answers proposals and tasks of one run at a time.

    Attributes:
        config: The operator's ``site.toml``.
        identity: The site's own key.
        roster: Whom it trusts.
        clock: Tells time.
    """

    config: SiteConfig
    identity: Identity
    roster: Roster
    clock: Clock
    _run: _Run | None = field(default=None, init=False)

    @property
    def name(self) -> SiteId:
        """The site's name."""
        return SiteId(self.config.file.name)

    def introduce(self, sealed: bytes) -> bytes:
        """Answer a proposal: with a promise, or with the reason against it.

        Raises:
            ProtocolError: It is not from this site's aggregator; it gets no answer.
        """
        proposal = introduction.open_proposal(sealed, self.roster)
        try:
            run = self._open(proposal, sealed)
        except FederationError as error:
            answer = self._introduction(sealed, refused=str(error))
        else:
            answer = run.answer
        return introduction.seal_introduction(answer, self.identity)

    def answer(self, task: Task) -> SiteMessage:
        """Answer a task of a run that was proposed before.

        Raises:
            ProtocolError: It was not, or the task is for another site.
        """
        if task.site != self.name:
            raise ProtocolError(f"a task for {task.site!r} came to site {self.name!r}")
        run = self._current(task.run_id)
        with wiring.torch_threads(run.job):
            return run.handler.handle(task)

    def layout(self, run_id: RunId) -> Layout:
        """Layout of the model of a run that was proposed before.

        Raises:
            ProtocolError: It was not.
        """
        return self._current(run_id).layout

    def close(self) -> None:
        """Leave the run: keys go, ledgers are closed."""
        run, self._run = self._run, None
        if run is not None:
            run.stack.close()

    def _folder(self, run_id: RunId) -> Path:
        try:
            return self.config.folder / "runs" / check_name(run_id)
        except ValueError as error:
            raise ProtocolError(f"a run without a proper name: {error}") from None

    def _current(self, run_id: RunId) -> _Run:
        run = self._run
        if run is None or run.run_id != run_id:
            run = self._open_again(run_id)
        return run

    def _open_again(self, run_id: RunId) -> _Run:
        """Take up a run after a restart of this process."""
        path = self._folder(run_id) / _PROPOSAL
        try:
            sealed = path.read_bytes()
        except OSError:
            raise ProtocolError(
                f"run {run_id!r} has not been proposed to site {self.name!r}"
            ) from None
        return self._open(introduction.open_proposal(sealed, self.roster), sealed)

    def _open(self, proposal: Proposal, sealed: bytes) -> _Run:
        """Check a proposal, and build what its run needs.

        Raises:
            FederationError: The site does not or cannot take part.
        """
        run_id = introduction.run_id_of(proposal)
        folder = self._folder(run_id)
        self._check_code(proposal)
        job = job_file.loads(proposal.job)
        check_job(job, self.config.file.floor, self.name)
        _check_same_job(job, folder, self.roster)
        self._check_total(run_id, job)
        self.close()
        with ExitStack() as stack:
            run = self._build(run_id, job, sealed, folder, stack)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / _PROPOSAL, [sealed])
            run.stack = stack.pop_all()
        self._run = run
        return run

    def _build(
        self, run_id: RunId, job: JobSpec, sealed: bytes, folder: Path, stack: ExitStack
    ) -> _Run:
        federation = wiring.Federation(
            job=job,
            pool=ModelPool(site_ranks.agents_job(job, self.config.file)),
            site_data={self.name: self._data(job)},
        )
        private: PrivateSites | None = None
        make_trainer = site_ranks.trainer_of(federation, self.config.file, stack)
        if job.privacy.differential_privacy.unit != "none":
            private = PrivateSites(
                federation, run_id=run_id, folder=folder, clock=self.clock
            )
            stack.enter_context(private)
            self._check_promise(private.promises()[0])
            make = site_ranks.private_maker(federation, self.config.file, stack)
            trainer = private.trainer(self.name, make)
            make_trainer = lambda: trainer  # noqa: E731
        store = LocalStore(folder)
        handler: SiteHandler
        if job.privacy.secure_aggregation.enabled:
            check_layout(federation.pool.layout)
            handler = SecureSite(
                self.name,
                make_trainer=make_trainer,
                kept=KeptIntegers(self.name, federation.pool.layout, store),
                protection=Protection(
                    identity=self.identity,
                    floor_of=partial(self._floor, job),
                    memory=FileRounds(folder / "sites" / self.name / "rounds"),
                    random_bytes=os.urandom,
                    threads=job.training.threads,
                ),
            )
        else:
            handler = federation.site(
                self.name, make_trainer=make_trainer, store=store, clock=self.clock
            )
        stack.callback(handler.close)
        tells = private is None and not job.privacy.secure_aggregation.enabled
        train, _ = federation.site_data[self.name]
        answer = self._introduction(
            sealed,
            privacy=None if private is None else private.promises()[0],
            num_examples=len(train) if tells else 0,
        )
        return _Run(
            run_id=run_id,
            job=job,
            layout=federation.pool.layout,
            sealed=sealed,
            handler=handler,
            answer=answer,
            stack=stack,
        )

    def _check_total(self, run_id: RunId, job: JobSpec) -> None:
        """Hold what all runs may spend of the same records against the floor."""
        floor, private = self.config.file.floor, job.privacy.differential_privacy
        if floor.total_epsilon is None or private.target_epsilon is None:
            return
        earlier = (
            job_file.loads(introduction.kept_proposal(path.read_bytes()).job)
            for path in (self.config.folder / "runs").glob(f"*/{_PROPOSAL}")
            if path.parent.name != run_id
        )
        targets = (one.privacy.differential_privacy.target_epsilon for one in earlier)
        promised = sum(target for target in targets if target is not None)
        if promised + private.target_epsilon > floor.total_epsilon:
            raise JobError(
                f"site {self.name!r} has promised {promised:g} to earlier runs and "
                f"allows {floor.total_epsilon:g} in all (floor.total_epsilon)",
                key="privacy.differential_privacy.target_epsilon",
            )

    def _check_promise(self, promise: SitePrivacy) -> None:
        """Hold against the floor what only the plan could tell."""
        floor = self.config.file.floor
        if floor.privacy != "none" and promise.delta > floor.max_delta:
            raise JobError(
                f"comes to {promise.delta:.1e} for the records of site {self.name!r}, "
                f"which allows {floor.max_delta:g} (floor.max_delta)",
                key="privacy.differential_privacy.delta",
            )

    def _data(self, job: JobSpec) -> wiring.SiteData:
        own = self.config.file.data
        if own.source:
            return self._own_data()
        named = [job.data, *(site.data for site in job.sites)]
        if job.data is None or any(d is not None and "://" in d.source for d in named):
            # A site opens no address that somebody else gives it.
            raise JobError(
                f"site {self.name!r} has no data of its own: its operator must name "
                "their source in site.toml",
                key="data.source",
            )
        return wiring.deal_data(job)[self.name]

    def _own_data(self) -> wiring.SiteData:
        """Load the site's data; what is wrong with them is told to the site alone."""
        own = self.config.file.data
        try:
            return load_data(own.source, own.options)
        except FederationError as error:
            _LOG.error("data of site %s cannot be loaded: %s", self.name, error)
            raise SiteError(
                f"site {self.name!r} cannot load its data; its log says why"
            ) from error

    def _introduction(
        self,
        sealed: bytes,
        *,
        refused: str = "",
        privacy: SitePrivacy | None = None,
        num_examples: int = 0,
    ) -> Introduction:
        return Introduction(
            version=introduction.VERSION,
            site=self.name,
            proposal=introduction.digest(sealed),
            release=introduction.release(),
            refused=refused,
            privacy=privacy,
            num_examples=num_examples,
        )

    def _check_code(self, proposal: Proposal) -> None:
        if proposal.code_hash == code_hash().hex():
            return
        here, there = introduction.release(), proposal.release
        advice = (
            "the code differs though the release is the same: install the released "
            "package on both sides, unchanged"
            if here == there
            else f"the aggregator runs release {there[:20]} and this site {here}: "
            "upgrade the older one"
        )
        raise ProtocolError(advice)

    def _floor(self, job: JobSpec, layout: Layout) -> LocalFloor:
        """What the operator demands of a contract."""
        floor = self.config.file.floor
        private = floor.privacy != "none"
        return LocalFloor(
            roster=self.roster,
            code_hashes=frozenset({code_hash()}),
            layout_digest=bytes.fromhex(layout.digest),
            num_values=layout.size,
            min_sites=floor.min_sites,
            colluding=floor.colluding_sites,
            max_clip_norm=floor.max_clip_norm,
            privacy_profiles=frozenset(accepted_units(floor)),
            max_epsilon=floor.max_epsilon if private else float("inf"),
            max_delta=floor.max_delta if private else 1.0,
            max_rounds=floor.max_rounds + 1,
            header_slots=header_slots(job),
            accept_two_sites=floor.accept_two_sites,
            require_hybrid=job.privacy.secure_aggregation.hybrid,
        )


def _check_same_job(job: JobSpec, folder: Path, roster: Roster) -> None:
    """A run's job may not change under it."""
    try:
        before = introduction.open_proposal((folder / _PROPOSAL).read_bytes(), roster)
    except FileNotFoundError:
        return
    changes = job_file.differences(
        _what_decides(job_file.loads(before.job)), _what_decides(job)
    )
    if changes:
        raise ProtocolError(f"the run was proposed with another job: {changes[0]}")


def _what_decides(job: JobSpec) -> dict[str, object]:
    document = job_file.document(job)
    return {k: v for k, v in document.items() if k not in {"storage", "simulation"}}


def only_one(folder: Path) -> AbstractContextManager[None]:
    """Hold a site's folder: two agents of one site would contradict each other.

    Raises:
        FederationError: Another process holds it, when the context is entered.
    """
    return folder_lock.hold(
        folder / "agent.lock",
        f"another agent works in {folder}: stop it, or give this site a folder of its "
        "own",
    )
