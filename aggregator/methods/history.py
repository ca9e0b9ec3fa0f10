"""What each site has done in a run, for samples of the sites that follow it.

``aggregator.sampling`` draws them. With differential privacy neither losses nor times
are kept: both follow from a site's records.
"""

import math
from dataclasses import replace

from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.methods.combining import REMEMBERING
from federation.protocols import NEVER_ASKED, RunState, SiteHistory
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord


class History(ServerGuest):
    """Notes what the sites of each round did."""

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Note it; see ``ServerGuest``."""
        newest = {site: self._after(site, record) for site in record.cohort}
        return replace(new_state, history={**record.state.history, **newest})

    def _after(self, site: SiteId, record: RoundRecord) -> SiteHistory:
        found = record.state.history.get(site, NEVER_ASKED)
        found = replace(
            found,
            asked=found.asked + 1,
            counted=found.counted + (site in record.counted),
            last_round=record.round_index,
        )
        if self.job.privacy.differential_privacy.enabled:
            return found
        if site in record.late:
            return replace(found, seconds=record.late[site])
        if site in record.times:
            found = replace(found, seconds=record.times[site].seconds)
        sums = record.training.get(site)
        # A site may claim any loss, and a checkpoint has no infinity.
        if sums is None or not sums.count or not math.isfinite(sums.loss):
            return found
        return replace(found, loss=sums.loss, predictions=sums.count)


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run whose samples follow what sites did."""
    return History(job) if REMEMBERING.is_on(job) else None
