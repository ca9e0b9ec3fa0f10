"""Who takes part in a deployed run, and what each site promises."""

import os
from dataclasses import dataclass, field

import tomli_w

from deploy import introduction
from deploy.introduction import Introduction, Proposal
from deploy.protection import code_hash
from federation import job_file
from federation.errors import SiteError
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import JobSpec
from privacy.secagg.identity import Identity
from privacy.secagg.roster import Roster

_NONCE_BYTES = 16


@dataclass(kw_only=True)
class SignedRollCall:
    """Proposes a run, and believes sites whose key the roster pins.

    Attributes:
        question: The signed proposal.
        roster: Pins the sites' keys.
        sites: Those of the job. What others answer does not matter: a site that the
            job does not name refuses it.
        introductions: What the sites that take part have answered.
    """

    question: bytes
    roster: Roster
    sites: frozenset[SiteId]
    introductions: dict[SiteId, Introduction] = field(default_factory=dict)

    @classmethod
    def of(
        cls, job: JobSpec, run_id: RunId, *, aggregator: Identity, roster: Roster
    ) -> "SignedRollCall":
        """Propose a job."""
        proposal = Proposal(
            version=introduction.VERSION,
            run_id=run_id,
            job=tomli_w.dumps(job_file.document(job)),
            release=introduction.release(),
            code_hash=code_hash().hex(),
            nonce=os.urandom(_NONCE_BYTES).hex(),
        )
        sealed = introduction.seal_proposal(proposal, aggregator)
        sites = frozenset(SiteId(site.name) for site in job.sites)
        return cls(question=sealed, roster=roster, sites=sites)

    def site_of(self, answer: bytes) -> SiteId:
        """See ``cloud_adapters.flower_roll_call.RollCall``."""
        found = introduction.open_introduction(answer, self.roster, self.question)
        site = SiteId(found.site)
        if site not in self.sites:
            return site
        if found.refused:
            raise SiteError(f"site {site!r} does not take part: {found.refused}")
        self.introductions[site] = found
        return site

    def promises(self) -> tuple[SitePrivacy, ...]:
        """What the sites promise, in the order of their names."""
        found = sorted(self.introductions.items())
        return tuple(each.privacy for _, each in found if each.privacy is not None)
