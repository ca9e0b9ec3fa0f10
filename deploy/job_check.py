"""What a job promises, found out without running it."""

from collections.abc import Sequence

from deploy.private_sites import PrivateSites
from deploy.protection import dropout_notice, rehearse
from deploy.wiring import Federation
from federation.clock import SystemClock
from federation.ids import RunId
from federation.job import JobSpec
from monitoring import privacy_words

_MAX_SITES_WITH_LINES = 8
_FLOAT_BYTES = 4


def bytes_down(size: int) -> int:
    """Bytes of a model of so many values."""
    return _FLOAT_BYTES * size


def bytes_up(job: JobSpec, size: int) -> int:
    """Bytes of a site's update of so many values: float32, or words of the ring."""
    secure = job.privacy.secure_aggregation
    return size * (secure.ring_bits // 8 if secure.enabled else _FLOAT_BYTES)


def promises(federation: Federation) -> Sequence[str]:
    """Plan privacy and secure aggregation as a run would, and say what comes of it.

    Raises:
        JobError: They cannot be had with these sites, data, rounds and batches.
    """
    job, clock = federation.job, SystemClock()
    run_id, private = RunId("check"), None
    if job.privacy.differential_privacy.enabled:
        private = PrivateSites(federation, run_id=run_id, folder=None, clock=clock)
    if job.privacy.secure_aggregation.enabled:
        rehearse(federation, run_id, private)
    notice = dropout_notice(job)
    if private is None:
        return (notice,) if notice else ()
    planned = private.planned(at=clock.now())
    return tuple(privacy_words.lines(planned, _MAX_SITES_WITH_LINES))
