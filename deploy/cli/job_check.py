"""What a job promises, found out without running it."""

from collections.abc import Sequence

from clients.privacy.site_plans import PrivateSites
from clients.training.local_federation import Federation
from deploy.wiring.rehearsal import dropout_notice, rehearse
from federation.clock import SystemClock
from federation.ids import RunId
from federation.job.spec import JobSpec
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
    notices = [text for text in (dropout_notice(job), bad_site_notice(job)) if text]
    if private is None:
        return tuple(notices)
    planned = private.planned(at=clock.now())
    return (*privacy_words.lines(planned, _MAX_SITES_WITH_LINES), *notices)


def bad_site_notice(job: JobSpec) -> str:
    """Say what bounds a bad site's part in a secure sum; empty without such sums."""
    secure, rule = job.privacy.secure_aggregation, job.aggregation.combine
    if not secure.enabled:
        return ""
    if secure.groups is None:
        return (
            f"one sum over {len(job.sites)} sites: a bad site can move the mean by up "
            f"to the clip norm, {job.update_clip_norm:g}. For a robust rule see "
            "privacy.secure_aggregation.groups"
        )
    bad = job.aggregation.byzantine_sites
    sites = "site" if bad == 1 else "sites"
    return (
        f"{rule} over {secure.groups} groups of {job.sites_in_sum} or more sites, "
        "which all sites draw together: withstands "
        f"{bad} bad {sites}, wherever they are"
    )
