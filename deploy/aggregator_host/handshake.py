"""The handshake of a deployed run: which sites take part, and their promises.

One question, or two where noise adds up inside the secure sum: what each site needs,
and, once it knows what the others need, what it promises.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import tomli_w

from aggregator.weighting import SignedCounts
from clients.privacy.stated_bounds import introduction_fault
from federation.errors import ProtocolError, SiteError, SiteNotReady
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import LedgerAnchor
from federation.wire import frame as wire
from privacy.membership import introduction
from privacy.membership.introduction import Introduction, Proposal, SiteAnchor
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.roster import Roster

_NONCE_BYTES = 16
NOTHING_KNOWN: Mapping[SiteId, LedgerAnchor] = MappingProxyType({})


@dataclass(kw_only=True)
class SignedHandshake:
    """Proposes a run, and trusts sites whose key the roster pins.

    Attributes:
        question: What is asked now: the signed proposal, or then the statements.
        aggregator: Signs.
        roster: Pins the sites' keys.
        relays: The sites behind each relay of the job.
        job: As proposed; bounds what sites may state.
        sites: Those of the job. What others answer does not matter: a site that the
            job does not name refuses it.
        spares: Whether the run does without a site that refuses.
        absent: Sites that do not take part, and why.
        introductions: What the sites that take part have answered to the question.
        data: Each site's numbers about its data.
        needs: What they have stated; None where no site is asked, or not yet.
        promised: What the run's record claims of privacy, once it has begun: a site
            that comes later promises the same.
    """

    question: bytes
    run_id: RunId
    aggregator: Identity = field(repr=False)
    roster: Roster
    job: JobSpec
    sites: frozenset[SiteId]
    relays: Mapping[SiteId, Collection[SiteId]] = field(default_factory=dict)
    spares: bool = False
    absent: dict[SiteId, str] = field(default_factory=dict)
    introductions: dict[SiteId, Introduction] = field(default_factory=dict)
    data: dict[SiteId, SignedCounts] = field(default_factory=dict)
    needs: Mapping[SiteId, float] | None = None
    promised: Mapping[str, SitePrivacy] | None = None
    _signed: dict[SiteId, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        job: JobSpec,
        run_id: RunId,
        *,
        aggregator: Identity,
        roster: Roster,
        revoked: Collection[SiteId] = (),
        spares: bool = False,
        anchors: Mapping[SiteId, LedgerAnchor] = NOTHING_KNOWN,
        num_values: int = 0,
        audit_head: str = "",
    ) -> "SignedHandshake":
        """Propose a job to all of its sites except revoked ones."""
        proposal = Proposal(
            version=introduction.VERSION,
            run_id=run_id,
            job=tomli_w.dumps(job_file.document(job)),
            release=introduction.release(),
            code_hash=code_hash().hex(),
            nonce=os.urandom(_NONCE_BYTES).hex(),
            anchors=tuple(
                SiteAnchor(site=site, anchor=anchor)
                for site, anchor in sorted(anchors.items())
            ),
            num_values=num_values,
            roster_serial=roster.serial,
            roster_digest=roster.digest.hex(),
            audit_head=audit_head,
        )
        sealed = introduction.seal_proposal(proposal, aggregator)
        sites = frozenset(SiteId(site.name) for site in job.sites)
        return cls(
            question=sealed,
            run_id=run_id,
            aggregator=aggregator,
            roster=roster,
            job=job,
            sites=sites,
            relays={
                SiteId(relay.name): tuple(map(SiteId, relay.sites))
                for relay in job.relays
            },
            spares=spares,
            absent={
                each: f"site {each!r} was revoked"
                for each in sorted(sites.intersection(revoked))
            },
        )

    def site_of(self, answer: bytes) -> SiteId:
        """See ``cloud_adapters.flower.handshake.Handshake``."""
        bundle = introduction.open_bundle(answer)
        if bundle is not None:
            return self._relay_of(*bundle)
        site, fault = self._note(answer), ""
        relay = self._behind(site)
        if site in self.relays:
            fault = (
                f"relay {site!r} answers as a site: add [serve] to its site.toml, and "
                "start it again"
            )
        elif relay is not None:
            fault = (
                f"site {site!r} is behind relay {relay!r} in this job, but connects to "
                "the aggregator itself: name the relay in its site.toml (relay.address)"
            )
        if fault:
            self.absent[site] = fault
            raise SiteError(fault)
        return site

    def _behind(self, site: SiteId) -> SiteId | None:
        """The relay of a site; None if it has none."""
        return next(
            (name for name, behind in self.relays.items() if site in behind), None
        )

    def _relay_of(self, relay: bytes, sites: Sequence[bytes]) -> SiteId:
        """Take a relay's introduction, and those of its sites that are there.

        Raises:
            ProtocolError: One cannot be trusted.
            SiteError: The relay, or a site, does not take part.
        """
        found = introduction.open_introduction(relay, self.roster, self.question)
        name = SiteId(found.site)
        if name in self.sites:
            return self._without(
                name,
                f"site {name!r} answers as a relay: remove [serve] from its site.toml, "
                "and start it again",
            )
        if name not in self.relays:
            return name  # Of another job.
        if found.refused:
            reason = (
                f"relay {name!r} does not take part: {wire.one_line(found.refused)}"
            )
            if found.temporary:
                raise SiteNotReady(reason)
            self.absent[name] = reason
            raise SiteError(reason)
        self._note_behind(name, sites)
        return name

    def _note_behind(self, name: SiteId, sites: Sequence[bytes]) -> None:
        """Note the answers of a relay's sites, and which of them have not come."""
        refused: SiteError | None = None
        missing = dict.fromkeys(self.relays[name])
        for sealed in sites:
            claimed = introduction.open_introduction(sealed, self.roster, self.question)
            site = SiteId(claimed.site)
            if site not in self.relays[name]:
                raise ProtocolError(f"relay {name!r} speaks for site {site!r}")
            missing.pop(site, None)
            try:
                self._note(sealed)
            except SiteNotReady:
                raise
            except SiteError as error:  # The others may refuse the run, too.
                refused = error
        for site in missing:
            text = f"site {site!r} did not connect to relay {name!r}"
            self.absent.setdefault(site, text)
        if refused is not None:
            raise refused

    def check_present(self, required: int) -> None:
        """Check that enough sites are there, with those behind relays.

        Raises:
            SiteError: They are not.
        """
        if len(self.introductions) < required:
            texts = "; ".join(self.absent.values())
            raise SiteError(f"the run cannot start: {texts}")

    def _note(self, answer: bytes) -> SiteId:
        """Check a site's own answer, and note it."""
        found = introduction.open_introduction(answer, self.roster, self.question)
        site = SiteId(found.site)
        if site not in self.sites:
            return site
        if site in self.absent:
            return self._without(site, self.absent[site])
        if found.refused:
            why = f"site {site!r} does not take part: {wire.one_line(found.refused)}"
            # Other sites of a relay do not wait for one that the run can spare.
            if found.temporary and not (self.spares and self._behind(site)):
                raise SiteNotReady(why)
            return self._without(site, why)
        if self._asks_needs and found.needs is None:
            raise ProtocolError(f"site {site!r} does not state its noise plan")
        fault = introduction_fault(self.job, found, is_last=not self._asks_needs)
        if fault:
            return self._without(
                site,
                f"site {site!r} {fault}: it is refused. Ask its operator which release "
                f"it runs, or leave it out of the job",
            )
        if self.promised is not None and found.privacy != self.promised.get(site):
            return self._without(
                site,
                f"site {site!r} came late with another promise of privacy than the "
                "run has noted: stop the run, and resume it",
            )
        self.introductions[site], self._signed[site] = found, answer
        self.data[site] = SignedCounts(
            examples=found.num_examples, held_out=found.num_held_out
        )
        return site

    @property
    def _asks_needs(self) -> bool:
        """Whether sites plan noise together, and this is the first question."""
        return self.job.privacy.differential_privacy.in_sum and self.needs is None

    def _without(self, site: SiteId, why: str) -> SiteId:
        """Do without a site, or end the handshake of a run that needs it."""
        self.absent.setdefault(site, why)
        if not self.spares:
            raise SiteError(why)
        return site

    def move_on(self) -> bool:
        """See ``cloud_adapters.flower.handshake.Handshake``."""
        if not self._asks_needs:
            return False
        found = sorted(self.introductions.items())
        self.needs = {name: each.needs for name, each in found if each.needs}
        self.question = introduction.seal_statements(
            self.run_id, self._signed, self.aggregator
        )
        self.introductions.clear()
        return True

    def examples(self) -> Mapping[SiteId, int]:
        """Training examples that each site reports; 0 if it does not."""
        found = sorted(self.introductions.items())
        return {name: each.num_examples for name, each in found}

    def slots(self) -> Mapping[SiteId, tuple[int, int, int]]:
        """How many runs each site takes at once, and MiB of memory and GPU memory."""
        found = sorted(self.introductions.items())
        return {
            name: (each.max_runs, each.memory_mib, each.gpu_memory_mib)
            for name, each in found
        }

    def promises(self) -> tuple[SitePrivacy, ...]:
        """The sites' promises, in the order of their names."""
        found = sorted(self.introductions.items())
        return tuple(each.privacy for _, each in found if each.privacy is not None)
