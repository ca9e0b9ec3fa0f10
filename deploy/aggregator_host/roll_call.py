"""The handshake of a deployed run: which sites take part, and their promises.

One question, or two where noise adds up inside the secure sum: what each site needs,
and, once it knows what the others need, what it promises.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import tomli_w

from aggregator.weighting import SignedCounts
from federation.errors import ProtocolError, SiteError
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
class SignedRollCall:
    """Proposes a run, and trusts sites whose key the roster pins.

    Attributes:
        question: What is asked now: the signed proposal, or then the statements.
        run_id: The run.
        aggregator: Signs.
        roster: Pins the sites' keys.
        sites: Those of the job. What others answer does not matter: a site that the
            job does not name refuses it.
        in_sum: Whether their noise adds up, so that all of them plan it together.
        spares: Whether the run does without a site that refuses.
        absent: Sites that the run does without, and why.
        introductions: What the sites that take part have answered to the question.
        needs: What they have stated; None where no site is asked, or not yet.
    """

    question: bytes
    run_id: RunId
    aggregator: Identity = field(repr=False)
    roster: Roster
    sites: frozenset[SiteId]
    in_sum: bool
    spares: bool = False
    absent: dict[SiteId, str] = field(default_factory=dict)
    introductions: dict[SiteId, Introduction] = field(default_factory=dict)
    needs: Mapping[SiteId, float] | None = None
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
    ) -> "SignedRollCall":
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
        )
        sealed = introduction.seal_proposal(proposal, aggregator)
        sites = frozenset(SiteId(site.name) for site in job.sites)
        return cls(
            question=sealed,
            run_id=run_id,
            aggregator=aggregator,
            roster=roster,
            sites=sites,
            in_sum=job.privacy.differential_privacy.in_sum,
            spares=spares,
            absent={
                each: f"site {each!r} was revoked"
                for each in sorted(sites.intersection(revoked))
            },
        )

    def site_of(self, answer: bytes) -> SiteId:
        """See ``cloud_adapters.flower.roll_call.RollCall``."""
        found = introduction.open_introduction(answer, self.roster, self.question)
        site = SiteId(found.site)
        if site not in self.sites or site in self.absent:
            return site
        if found.refused:
            reason = wire.one_line(found.refused)
            text = f"site {site!r} does not take part: {reason}"
            if not self.spares:
                raise SiteError(text)
            self.absent[site] = text
            return site
        if self.in_sum and self.needs is None and found.needs is None:
            raise ProtocolError(f"site {site!r} does not state its noise plan")
        self.introductions[site], self._signed[site] = found, answer
        return site

    def move_on(self) -> bool:
        """See ``cloud_adapters.flower.roll_call.RollCall``."""
        if not self.in_sum or self.needs is not None:
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

    def data(self) -> Mapping[SiteId, SignedCounts]:
        """Each site's numbers about its data."""
        return {
            name: SignedCounts(examples=each.num_examples, held_out=each.num_held_out)
            for name, each in self.introductions.items()
        }

    def promises(self) -> tuple[SitePrivacy, ...]:
        """The sites' promises, in the order of their names."""
        found = sorted(self.introductions.items())
        return tuple(each.privacy for _, each in found if each.privacy is not None)
