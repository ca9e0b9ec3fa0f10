"""What a job promises, found out without running it."""

from collections.abc import Sequence

from deploy.private_sites import PrivateSites
from deploy.protection import rehearse
from deploy.wiring import Federation
from federation.clock import SystemClock
from federation.ids import RunId
from monitoring import privacy_words

_MAX_SITES_WITH_LINES = 8


def promises(federation: Federation) -> Sequence[str]:
    """Plan privacy and secure aggregation as a run would, and say what comes of it.

    Raises:
        JobError: They cannot be had with these sites, data, rounds and batches.
    """
    job, clock = federation.job, SystemClock()
    run_id, private = RunId("check"), None
    if job.privacy.differential_privacy.unit != "none":
        private = PrivateSites(federation, run_id=run_id, folder=None, clock=clock)
    if job.privacy.secure_aggregation.enabled:
        rehearse(federation, run_id, private)
    if private is None:
        return ()
    planned = private.planned(at=clock.now())
    return tuple(privacy_words.lines(planned, _MAX_SITES_WITH_LINES))
